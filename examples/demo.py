"""The main job, shown: a run is killed, pre-empted and damaged, and goes on exactly, on fewer ranks.

Run it with ``make demo``. Everything it shows happens for real, in the folder ``demo-output``. Each claim is
checked; the exit status is 1 if one does not hold.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
import webbrowser
from pathlib import Path
from typing import Any

import torch
from demo_page import write_page
from fatal_planner import bytes_at_death
from job import Ended, run_job
from torch.distributed import checkpoint as stock

import holdfast
from holdfast.manager import CheckpointManager

OUTPUT = Path("demo-output")
RUN, UNINTERRUPTED = OUTPUT / "run", OUTPUT / "uninterrupted"
STEPS, SAVE_EVERY = 48, 12
KILLED_RANK, KILLED_AT = 2, 24
PREEMPTED_RANK, PREEMPTED_AT = 1, 28
PATIENCE = 60.0
"""Seconds after which ranks that did not notice the death of another are stopped."""

Losses = dict[int, float]
claims: dict[str, bool] = {}


def say(text: str) -> None:
    """A heading."""
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n== {text}", flush=True)


def claim(text: str, holds: bool, *, needed: bool = False) -> None:
    """Print whether something is so, and remember it; end here if the rest makes no sense without it."""
    claims[text] = holds
    print(f"   {'✓' if holds else '✗ NOT SO:'} {text}", flush=True)
    if needed and not holds:
        sys.exit(f"The rest cannot be shown. What the ranks said is in {OUTPUT / 'logs'}.")


def quote(text: str) -> None:
    """What somebody else printed."""
    print("".join(f"     | {line}\n" for line in text.splitlines()), end="", flush=True)


def ask(*arguments: str) -> tuple[int, Any]:
    """Run the command ``holdfast``; its exit status, and what it says in JSON."""
    command = [sys.executable, "-m", "holdfast.cli", *arguments, "--json"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    return asked.returncode, json.loads(asked.stdout)


def train(ranks: int, name: str, root: Path, *more: str) -> tuple[list[Ended], Losses]:
    """Run the job; how each rank ended, and the loss of each step."""
    losses = OUTPUT / f"{name}.txt"
    ended = run_job(
        ranks,
        OUTPUT / "logs" / name,
        *("--root", str(root), "--losses", str(losses)),
        *("--steps", str(STEPS), "--save-every", str(SAVE_EVERY), *more),
        patience=PATIENCE,
    )
    lines = [line.split() for line in losses.read_text().splitlines()] if losses.exists() else []
    return ended, {int(step): float.fromhex(loss) for step, loss in lines}


def went_well(ended: list[Ended]) -> bool:
    """Whether every rank of a job did; shows what the others said."""
    for rank in ended:
        if rank.status != 0:
            quote(f"rank {rank.rank}: {rank.error or rank.output}")
    return all(rank.status == 0 for rank in ended)


def step_folder(step: int, root: Path = RUN) -> Path:
    """The checkpoint of a step."""
    return root / f"step-{step}"


def train_uninterrupted() -> Losses:
    """The run to compare with."""
    say("1. Four ranks train a model (FSDP2, AdamW); nothing goes wrong")
    ended, losses = train(4, "uninterrupted-losses", UNINTERRUPTED)
    done = went_well(ended) and len(losses) == STEPS
    claim(f"{STEPS} steps, saved every {SAVE_EVERY}", done, needed=True)
    print(f"     loss {losses[1]:.4f} at the first step, {losses[STEPS]:.4f} at the last")
    return losses


def train_until_a_rank_dies() -> Losses:
    """The same job again, with SIGKILL for one rank while it writes its part of the second checkpoint."""
    say(f"2. The same job; rank {KILLED_RANK} is killed in the middle of the save of step {KILLED_AT}")
    kill = ("--kill-rank", str(KILLED_RANK), "--kill-at", str(KILLED_AT))
    ended, losses = train(4, "losses-until-the-kill", RUN, *kill)
    killed = ended[KILLED_RANK]
    _, shown = ask("show", str(step_folder(SAVE_EVERY)))
    own = (file for file in shown["parts"][0]["files"] if file["name"].startswith(f"__{KILLED_RANK}_"))
    begun, whole = bytes_at_death(killed.output), sum(file["nbytes"] for file in own)
    print(f"     its file had {begun:,} bytes by then; that of the checkpoint before has {whole:,}")
    died = killed.status == -signal.SIGKILL and 0 < begun < whole
    claim(f"rank {KILLED_RANK} died of SIGKILL while it wrote its part", died, needed=True)
    survivors = [rank for rank in ended if rank is not killed]
    for error in dict.fromkeys(rank.error for rank in survivors):
        ranks = ", ".join(str(rank.rank) for rank in survivors if rank.error == error)
        later = max(rank.seconds for rank in survivors if rank.error == error) - killed.seconds
        print(f"     ranks {ranks} ended with this, at most {later:.1f} s later:")
        quote(error)
    claim("every other rank raised an error, none hangs", all(rank.status == 1 for rank in survivors))
    named = all(f"rank {KILLED_RANK}" in rank.error and "write" in rank.error for rank in survivors)
    claim(f"the error names rank {KILLED_RANK} and the step of the save, which is to write", named)
    status, _ = ask("verify", str(step_folder(SAVE_EVERY)))
    with CheckpointManager(RUN, read_only=True, no_dist=True) as manager:
        newest = manager.latest()
    claim(
        f"the newest checkpoint is that of step {SAVE_EVERY}, and it is whole: every byte was checked",
        newest == SAVE_EVERY and status == 0,
    )
    return losses


def train_until_preempted() -> tuple[Losses, int]:
    """Four new ranks, until SIGTERM comes to one of them; the losses, and the step that was saved then."""
    say(f"3. Four ranks go on; after step {PREEMPTED_AT} rank {PREEMPTED_RANK} gets SIGTERM (a pre-emption)")
    signals = ("--preempt-rank", str(PREEMPTED_RANK), "--preempt-at", str(PREEMPTED_AT))
    ended, losses = train(4, "losses-until-the-preemption", RUN, *signals)
    said = [re.findall(r"pre-empted after step (\d+)", rank.output) for rank in ended]
    done = went_well(ended) and all(said) and min(losses) == SAVE_EVERY + 1
    claim(f"they go on at step {SAVE_EVERY + 1}, and all end with status 0", done, needed=True)
    steps = {int(step) for found in said for step in found}
    print(f"     saved and ended after step {', '.join(map(str, sorted(steps)))}")
    with CheckpointManager(RUN, read_only=True, no_dist=True) as manager:
        newest = manager.latest()
    claim("all four ranks saved the same step, and it is the newest", steps == {newest}, needed=True)
    return losses, steps.pop()


def damage_the_newest(step: int) -> None:
    """Flip one bit."""
    say(f"4. One bit of the newest checkpoint, step {step}, is flipped on the disk")
    key, file = flip_a_bit(step_folder(step))
    status, found = ask("verify", str(step_folder(step)))
    for damage in found["damage"]:
        quote(f"{damage['file']}, {', '.join(damage['keys'])}: {damage['message']}")
    named = [(damage["file"], damage["keys"]) for damage in found["damage"]] == [(file, [key])]
    claim("holdfast verify names the file and the key", status == 1 and named)


def go_on_with_fewer_ranks(uninterrupted: Losses, before: list[Losses], damaged: int) -> Losses:
    """Two new ranks, the same command."""
    say("5. Two ranks go on: the same command, another number of processes")
    sound = (damaged - 1) // SAVE_EVERY * SAVE_EVERY
    ended, after = train(2, "losses-on-two-ranks", RUN)
    warned = next((line for line in ended[0].output.splitlines() if f"step {damaged}" in line), "")
    quote(warned)
    claim(
        f"the damaged step {damaged} is named and skipped, and step {sound} is restored",
        f"restored step {sound}, skipped [{damaged}]" in ended[0].output,
    )
    done = went_well(ended) and list(after) == list(range(sound + 1, STEPS + 1))
    claim(f"they start at step {sound + 1} and come to the end", done, needed=True)
    for step in (sound + 1, damaged, STEPS):
        same = "=" if uninterrupted[step] == after[step] else "is not"
        print(f"     step {step:2}: {uninterrupted[step]!r} uninterrupted {same} {after[step]!r} on 2 ranks")
    runs = [*before, after]
    exact = all(run[step] == uninterrupted[step] for run in runs for step in run)
    every = set().union(*runs) == uninterrupted.keys()
    claim(
        f"all {STEPS} losses are those of the uninterrupted run, to the last bit, each time", exact and every
    )
    ours, theirs = load_everything(step_folder(STEPS)), load_everything(step_folder(STEPS, UNINTERRUPTED))
    claim(
        f"so are all {len(ours)} tensors of model and optimizer after the last step", same_bits(ours, theirs)
    )
    return after


def check_the_last_checkpoint() -> None:
    """Verified, and read by torch."""
    say("6. The last checkpoint")
    status, found = ask("verify", str(step_folder(STEPS)))
    sound = status == 0 and not found["notes"]
    claim(f"holdfast verify: sound, {found['checked_nbytes']:,} bytes checked, nothing left over", sound)
    ours = load_everything(step_folder(STEPS))
    theirs = load_everything(step_folder(STEPS), with_torch=True)
    claim("stock torch loads it too, in one process, with the same values", same_bits(ours, theirs))


def flip_a_bit(checkpoint: Path) -> tuple[str, str]:
    """Damage the middle of the second chunk of a tensor; the key and the file."""
    _, listing = ask("ls", str(checkpoint))
    tensor = next(
        tensor for tensor in listing["tensors"] if tensor["key"].endswith("second.0.weight.exp_avg")
    )
    chunk = tensor["chunks"][1]
    with (checkpoint / chunk["file"]).open("r+b") as file:
        file.seek(chunk["offset"] + chunk["stored_nbytes"] // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x10]))
    return tensor["key"], chunk["file"]


def load_everything(checkpoint: Path, *, with_torch: bool = False) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, under its flat name; without the model that it came from."""
    described = holdfast.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in described.items()
        if isinstance(entry, holdfast.TensorStorageMetadata)
    }
    if with_torch:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group
            stock.load(state, checkpoint_id=checkpoint)  # type: ignore[attr-defined]
    else:
        holdfast.load(state, checkpoint_id=checkpoint, no_dist=True, strict=False)
    return state


def same_bits(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of tensors have the same names and bytes."""
    return some.keys() == others.keys() and all(
        torch.equal(tensor.reshape(-1).view(torch.uint8), others[key].reshape(-1).view(torch.uint8))
        for key, tensor in some.items()
    )


def write_reports(damaged: int) -> dict[str, str]:
    """Pages of ``holdfast report``, with the words that describe them."""
    ask("report", str(RUN), "--last", "3", "-o", str(OUTPUT / "run.html"))
    reports = {"run.html": "the run: all its steps, and why each is kept"}
    for step, words in (
        (KILLED_AT, f"step {KILLED_AT}, saved by 4 ranks"),
        (damaged, f"step {damaged}, saved by 4 ranks at the pre-emption, and damaged since"),
        (STEPS, f"step {STEPS}, saved by 2 ranks"),
    ):
        folder = step_folder(step)
        if folder.exists():  # the manager keeps the newest three
            name = f"step-{step}.html"
            ask("report", str(folder), "--verify", "-o", str(OUTPUT / name))
            reports[name] = words
    return reports


def main() -> int:
    """Everything in order; the exit status."""
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir()
    uninterrupted = train_uninterrupted()
    until_kill = train_until_a_rank_dies()
    until_preemption, preempted = train_until_preempted()
    damage_the_newest(preempted)
    after = go_on_with_fewer_ranks(uninterrupted, [until_kill, until_preemption], preempted)
    check_the_last_checkpoint()
    page = write_page(
        OUTPUT / "demo.html",
        uninterrupted,
        {
            "4 ranks, until one was killed": until_kill,
            "4 ranks, until the pre-emption": until_preemption,
            "2 ranks, to the end": after,
        },
        [(KILLED_AT, f"killed in the save of step {KILLED_AT}"), (preempted, "pre-empted; damaged since")],
        write_reports(preempted),
        claims,
    )
    say(f"{sum(claims.values())} of {len(claims)} claims hold. Pictures of all this: {page}")
    if sys.stdout.isatty() and os.environ.get("DISPLAY"):
        webbrowser.open(page.resolve().as_uri())
    return 0 if all(claims.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
