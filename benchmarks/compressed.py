"""The case of compressed weights: bfloat16 through each side's zstd extension."""

import shutil

from benchmarks.case import Case, Goal, Job, Quantity, Samples
from benchmarks.sides import Side
from benchmarks.states import MIB, NormalWeights
from benchmarks.turns import load_turn, read_through, save_turn, take_turns

__all__ = ["compressed_cases"]


def compressed_cases(scale: float) -> list[Case]:
    """The cases of this module."""
    contents = NormalWeights(8, max(1, int(32 * MIB * scale)))
    quantities = (
        Quantity("save", "s"),
        Quantity("load", "s"),
        Quantity("save + load", "s", Goal(times=1.5)),
        Quantity("bytes stored per byte", "bytes/byte"),
    )

    def run(job: Job) -> Samples:
        state, target = contents.filled(), contents.blank()

        def act(side: Side) -> dict[str, float]:
            folder = job.folder / side.name
            save = save_turn(side, state, folder)
            stored = sum(path.stat().st_size for path in folder.iterdir())
            read_through(folder)
            load = load_turn(side, contents, target, folder)
            shutil.rmtree(folder)
            measured = (save, load, save + load, stored / contents.nbytes)
            return {quantity.name: value for quantity, value in zip(quantities, measured, strict=True)}

        return take_turns(job, act, zstd=True)

    return [
        Case(
            "zstd",
            f"bfloat16 weights, {contents.nbytes / MIB:,.0f} MiB in {contents.count} tensors, zstd, "
            "page cache warm",
            quantities,
            contents.nbytes,
            3,
            run,
        )
    ]
