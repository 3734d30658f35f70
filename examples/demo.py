"""The main job, shown: ranks train, one is killed in the middle of a save, fewer ranks go on, exactly.

Run it with ``make demo``. Everything it shows happens for real, in the folder ``demo-output``. Each claim is
checked; the exit status is 1 if one does not hold.
"""

import json
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from demo_page import write_page
from fatal_planner import bytes_at_death
from job import Ended, run_job
from torch.distributed import checkpoint as stock

import holdfast

OUTPUT = Path("demo-output")
CHECKPOINT = OUTPUT / "checkpoint"
KEPT = OUTPUT / "checkpoint-after-the-crash"
UNINTERRUPTED = OUTPUT / "uninterrupted"
STEPS, SAVE_EVERY = 24, 8
KILLED_RANK, KILLED_AT = 2, 16
PATIENCE = 60.0
"""Seconds after which ranks that did not notice the death of another are stopped."""

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


def train(ranks: int, name: str, checkpoint: Path, *more: str) -> tuple[list[Ended], dict[int, float]]:
    """Run the job; how each rank ended, and the loss of each step."""
    losses = OUTPUT / f"{name}.txt"
    ended = run_job(
        ranks,
        OUTPUT / "logs" / name,
        *("--checkpoint", str(checkpoint), "--losses", str(losses)),
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


def train_uninterrupted() -> dict[int, float]:
    """The run to compare with."""
    say("1. Four ranks train a model (FSDP2, AdamW); nothing goes wrong")
    ended, losses = train(4, "losses-uninterrupted", UNINTERRUPTED)
    done = went_well(ended) and len(losses) == STEPS
    claim(f"{STEPS} steps, saved every {SAVE_EVERY}", done, needed=True)
    print(f"     loss {losses[1]:.4f} at the first step, {losses[STEPS]:.4f} at the last")
    return losses


def train_until_a_rank_dies() -> dict[int, float]:
    """The same job again, with SIGKILL for one rank while it writes its part of the second checkpoint."""
    say(f"2. The same job; rank {KILLED_RANK} is killed in the middle of the save of step {KILLED_AT}")
    kill = ("--kill-rank", str(KILLED_RANK), "--kill-at", str(KILLED_AT))
    ended, losses = train(4, "losses-before-the-crash", CHECKPOINT, *kill)
    killed = ended[KILLED_RANK]
    _, shown = ask("show", str(CHECKPOINT))
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
    return losses


def look_at_what_is_left() -> None:
    """The folder after the crash."""
    say("3. What is in the folder now")
    status, found = ask("verify", str(CHECKPOINT))
    for note in found["notes"]:
        quote(note)
    claim(f"the checkpoint of step {saved_step(CHECKPOINT)} is whole: every byte was checked", status == 0)
    claim(f"nothing of step {KILLED_AT} is in it", saved_step(CHECKPOINT) == KILLED_AT - SAVE_EVERY)
    shutil.copytree(CHECKPOINT, KEPT)


def go_on_with_fewer_ranks(uninterrupted: dict[int, float], before: dict[int, float]) -> dict[int, float]:
    """Two new ranks, the same command."""
    say("4. Two ranks go on from it: the same command, another number of processes")
    ended, after = train(2, "losses-after-the-restart", CHECKPOINT)
    first = KILLED_AT - SAVE_EVERY + 1
    done = went_well(ended) and list(after) == list(range(first, STEPS + 1))
    claim(f"they start at step {first} and come to the end", done, needed=True)
    for step in (first, first + 1, KILLED_AT, STEPS):
        same = "=" if uninterrupted[step] == after[step] else "is not"
        print(f"     step {step:2}: {uninterrupted[step]!r} uninterrupted {same} {after[step]!r} on 2 ranks")
    whole = {**before, **after}
    both = all(before[step] == after[step] for step in before.keys() & after.keys())
    claim(
        f"all {len(whole)} losses are those of the uninterrupted run, to the last bit",
        both and whole == uninterrupted,
    )
    ours, theirs = load_everything(CHECKPOINT), load_everything(UNINTERRUPTED)
    claim(
        f"so are all {len(ours)} tensors of model and optimizer after the last step", same_bits(ours, theirs)
    )
    return after


def check_the_last_checkpoint() -> None:
    """Verified, read by torch, and a flipped bit found."""
    say("5. The last checkpoint")
    status, found = ask("verify", str(CHECKPOINT))
    sound = status == 0 and not found["notes"]
    claim(f"holdfast verify: sound, {found['checked_nbytes']:,} bytes checked, nothing left over", sound)
    ours, theirs = load_everything(CHECKPOINT), load_everything(CHECKPOINT, with_torch=True)
    claim("stock torch loads it too, in one process, with the same values", same_bits(ours, theirs))
    damaged = OUTPUT / "damaged"
    shutil.copytree(CHECKPOINT, damaged)
    key, file = flip_a_bit(damaged)
    status, found = ask("verify", str(damaged))
    for damage in found["damage"]:
        quote(f"{damage['file']}, {', '.join(damage['keys'])}: {damage['message']}")
    named = [(damage["file"], damage["keys"]) for damage in found["damage"]] == [(file, [key])]
    claim("one flipped bit in a copy of it: verify names the file and the key", status == 1 and named)
    try:
        load_everything(damaged)
    except holdfast.errors.ChecksumError as error:
        refused = key in str(error)
    else:
        refused = False
    claim("and it does not load", refused)
    shutil.rmtree(damaged)


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


def saved_step(checkpoint: Path) -> int:
    """The step that a checkpoint is of."""
    state = {"training": {"step": -1}}
    holdfast.load(state, checkpoint_id=checkpoint, no_dist=True, strict=False)
    return state["training"]["step"]


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


def main() -> int:
    """Everything in order; the exit status."""
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir()
    uninterrupted = train_uninterrupted()
    before = train_until_a_rank_dies()
    look_at_what_is_left()
    after = go_on_with_fewer_ranks(uninterrupted, before)
    check_the_last_checkpoint()
    layouts = {
        f"Who wrote what: the checkpoint of step {KILLED_AT - SAVE_EVERY}, saved by 4 ranks": KEPT,
        f"The checkpoint of step {STEPS}, saved by the 2 ranks that went on": CHECKPOINT,
    }
    page = write_page(
        OUTPUT / "demo.html",
        (uninterrupted, before, after),
        KILLED_AT,
        {heading: ask("ls", str(checkpoint))[1] for heading, checkpoint in layouts.items()},
        claims,
    )
    say(f"{sum(claims.values())} of {len(claims)} claims hold. Pictures of all this: {page}")
    return 0 if all(claims.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
