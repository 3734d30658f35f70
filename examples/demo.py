"""The main job, shown: train, save, damage, kill in the middle of an overwrite, load, and go on exactly.

Run it with ``make demo``. Everything it shows happens for real, in the folder ``demo-output``.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from layout_picture import draw_layout
from torch import nn

import holdfast
from holdfast.state_dict import get_state_dict, set_state_dict

OUTPUT = Path("demo-output")
CHECKPOINT = OUTPUT / "checkpoint"
KILLS = 12


class Training:
    """A model with its optimizer, as one Stateful object.

    torch's helpers name the optimizer's state after the parameters, and know how to make room for it in
    an optimizer that has not taken a step yet.
    """

    def __init__(self) -> None:
        self.model, self.optimizer = make_training()

    def state_dict(self) -> dict[str, Any]:
        """Everything that training needs to go on."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it back."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


def make_training() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model and its optimizer, the same each time."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4)


def train(training: Training, first: int, last: int) -> list[float]:
    """Steps ``first`` to ``last``; each step's data depends on its number alone."""
    losses = []
    for step in range(first, last):
        inputs = torch.randn(64, 256, generator=torch.Generator().manual_seed(step))
        loss = (training.model(inputs) - inputs.mean(1, keepdim=True)).square().mean()
        training.optimizer.zero_grad()
        loss.backward()
        training.optimizer.step()
        losses.append(loss.item())
    return losses


def say(text: str) -> None:
    """A heading."""
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n== {text}")


def save_and_show() -> list[float]:
    """Train and save, and show what is on disk."""
    say("1. Train 30 steps, save at step 20")
    training = Training()
    losses = train(training, 0, 20)
    started = time.perf_counter()
    holdfast.save({"training": training, "step": 20}, checkpoint_id=CHECKPOINT)
    seconds = time.perf_counter() - started
    for path in sorted(CHECKPOINT.iterdir()):
        print(f"   {path.name:32} {path.stat().st_size:>12,} bytes")
    print(f"   on stable storage after {seconds * 1000:.0f} ms")
    return losses + train(training, 20, 30)


def stock_torch_reads_it() -> None:
    """The same folder, loaded by torch itself."""
    say("2. Stock torch loads the same folder")
    from torch.distributed import checkpoint as stock  # noqa: PLC0415 - only this step needs it

    wanted = Training().state_dict()["model"]
    theirs, ours = (
        {"training": {"model": {key: torch.zeros_like(value) for key, value in wanted.items()}}} for _ in "12"
    )
    stock.load(theirs, checkpoint_id=CHECKPOINT)  # type: ignore[attr-defined]
    holdfast.load(ours, checkpoint_id=CHECKPOINT, strict=False)
    loaded = ours["training"]["model"]
    same = all(torch.equal(theirs["training"]["model"][key], value) for key, value in loaded.items())
    print(f"   {len(loaded)} tensors, bit for bit the same: {same}")
    assert same


def damage_is_noticed() -> None:
    """One flipped bit in a copy of the checkpoint."""
    say("3. Flip one bit of 16 million bytes")
    damaged = OUTPUT / "damaged"
    shutil.copytree(CHECKPOINT, damaged)
    items = holdfast.FileSystemReader(damaged).read_metadata().storage_data.values()
    largest = max(items, key=lambda item: item.length)
    place = largest.offset + largest.length // 2
    with (damaged / largest.relative_path).open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x10]))
    try:
        holdfast.load({"training": Training()}, checkpoint_id=damaged)
    except holdfast.CheckpointError as error:
        print(f"   {type(error.__cause__).__name__}: {error.__cause__}")
    else:
        raise AssertionError("the damage was not noticed")
    print(f"   $ holdfast verify {damaged}")
    checked = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "verify", str(damaged)],
        capture_output=True,
        text=True,
        check=False,
    )
    print("".join(f"     {line}\n" for line in (checked.stdout + checked.stderr).splitlines()), end="")
    assert checked.returncode == 1


def kill_overwrites() -> None:
    """Overwrite the checkpoint again and again in another process, and kill that process each time."""
    say(f"4. Overwrite it in another process, kill -9 that process at {KILLS} random instants")
    outcomes = []
    known = saved_step()
    for attempt in range(KILLS):
        child = subprocess.Popen(
            [sys.executable, __file__, "overwrite", str(1000 + attempt)], stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        child.stdout.readline()  # it has begun to save
        time.sleep(random.random() * 0.4)
        child.send_signal(signal.SIGKILL)
        child.wait()
        step = saved_step()
        assert step in (known, 1000 + attempt), "a mix of two checkpoints"
        outcomes.append("new" if step != known else "old")
        known = step
    print(f"   what loads afterwards, each time whole: {' '.join(outcomes)}")


def saved_step() -> int:
    """Load everything, check that model and step belong together, and return the step."""
    training = Training()
    state: dict[str, Any] = {"training": training, "step": 0}
    holdfast.load(state, checkpoint_id=CHECKPOINT)
    step: int = state["step"]
    if step >= 1000:
        # The overwriting process fills every tensor with its number: a mix would show.
        assert all((p == step).all() for p in training.model.parameters())
    return step


def overwrite(step: int) -> None:
    """What the other process does."""
    training = Training()
    train(training, 0, 1)
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.fill_(step)
    print("saving", flush=True)
    while True:
        holdfast.save({"training": training, "step": step}, checkpoint_id=CHECKPOINT)


def resume(losses: list[float]) -> None:
    """Load the first checkpoint into new objects, and train on."""
    say("5. Load into a new model and optimizer, train on")
    training = Training()
    state: dict[str, Any] = {"training": training, "step": 0}
    holdfast.load(state, checkpoint_id=OUTPUT / "kept")
    resumed = train(training, state["step"], 30)
    for number, (before, after) in enumerate(zip(losses[20:], resumed, strict=True), start=20):
        mark = "=" if before == after else "DIFFERS"
        print(f"   step {number}  uninterrupted {before:.9f}  resumed {after:.9f}  {mark}")
    assert losses[20:] == resumed


def main() -> None:
    """Everything in order."""
    # Without a process group a save is a single process's: that is what this demo means.
    warnings.simplefilter("ignore")
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir()
    losses = save_and_show()
    shutil.copytree(CHECKPOINT, OUTPUT / "kept")
    stock_torch_reads_it()
    damage_is_noticed()
    kill_overwrites()
    resume(losses)
    picture = draw_layout(OUTPUT / "kept", OUTPUT / "layout.svg")
    say(f"Done. A picture of what lies where in the checkpoint: {picture}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["overwrite"]:
        os.nice(5)
        overwrite(int(sys.argv[2]))
    else:
        main()
