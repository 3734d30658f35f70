"""What it costs to record a save: the time spent in the functions that measure, join, log and store it."""

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import holdfast
from benchmarks.case import Case, Goal, Job, Quantity, Samples
from benchmarks.states import KIB, Tensors
from benchmarks.turns import seconds_of
from holdfast import state_dict_saver
from holdfast._phase_clock import PhaseClock
from holdfast._storage import metadata_writing
from holdfast._transfer_recorder import TransferRecorder

__all__ = ["recording_cases"]

_RECORDING: tuple[tuple[Any, str], ...] = (
    *((PhaseClock, name) for name in ("__init__", "enter", "begin_wait", "end_wait", "count", "phases")),
    *((TransferRecorder, name) for name in ("mine", "gather", "commit_begins", "to_tell", "record")),
    (state_dict_saver, "publish"),
    (metadata_writing, "store_record"),
)
_SHARE = "seconds of recording for a second of saving"


def recording_cases(scale: float) -> list[Case]:
    """The cases of this module."""
    contents = Tensors(64, (max(1, int(1024 * scale)) * KIB,))
    title = f"a save of {contents.nbytes >> 20} MiB, and the time in it that goes into its record"
    quantities = (Quantity(_SHARE, "s/s", Goal(at_most=0.005)), Quantity("save", "s"))

    def run(job: Job) -> Samples:
        state = contents.filled()
        holdfast.save(state, checkpoint_id=job.folder / "warm")
        samples: Samples = {_SHARE: {"holdfast": []}, "save": {"holdfast": []}}
        job.absent["torch"] = "records nothing"
        for number in range(job.rounds):
            folder = job.folder / str(number)
            with _measured() as spent:
                seconds = seconds_of(lambda folder=folder: holdfast.save(state, checkpoint_id=folder))  # type: ignore[misc]
            shutil.rmtree(folder)
            samples[_SHARE]["holdfast"].append(spent[0] / seconds)
            samples["save"]["holdfast"].append(seconds)
            job.say(f"{1e6 * spent[0]:.0f} us of {1e3 * seconds:.1f} ms")
        return samples

    return [Case("recording", title, quantities, 2 * contents.nbytes, 9, run)]


@contextlib.contextmanager
def _measured() -> Iterator[list[float]]:
    """A list whose only entry is the seconds spent in functions that record, measuring included."""
    spent, depth = [0.0], [0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            depth[0] += 1
            try:
                return function(*args, **kwargs)
            finally:
                depth[0] -= 1
                if not depth[0]:
                    spent[0] += time.perf_counter() - began

        return call

    with contextlib.ExitStack() as patches:
        for owner, name in _RECORDING:
            patches.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name))))
        yield spent
