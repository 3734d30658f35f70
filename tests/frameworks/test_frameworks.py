"""Unmodified frameworks on Holdfast: they train as before, survive kill -9, and stock torch reads the result.

``make frameworks`` runs these tests, in an environment of its own. They are not part of ``make test``.
"""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from tests.support.ranks import python_environment

JOBS = Path(__file__).parent / "jobs"
FRAMEWORKS = [
    *("accelerate", "lightning", "lightning_trainer", "torchtitan", "transformers", "transformers_trainer")
]
CONTINUES = [name for name in FRAMEWORKS if name != "transformers"]
"""The jobs whose checkpoints have optimizers and steps; the other one saves a model."""
MODEL_KEYS = ["0.bias", "0.weight", "2.bias", "2.weight"]

pytestmark = [pytest.mark.frameworks, pytest.mark.slow]


class Job(NamedTuple):
    """How a job ended: what it told, if it came to its end, how its ranks ended, and all that it printed."""

    result: dict[str, Any] | None
    statuses: list[int]
    output: str

    @property
    def losses(self) -> list[float]:
        assert self.result is not None, self.output
        losses: list[float] = self.result["losses"]
        return losses


def environment(*, stock: bool) -> dict[str, str]:
    return {**python_environment(), "OMP_NUM_THREADS": "1", "HOLDFAST_INSTALL": "0" if stock else "1"}


IMPORTED_ONCE = {
    "accelerate": ["accelerate"],
    "lightning": ["lightning"],
    "torchtitan": ["torchtitan.components.checkpoint"],
    "transformers": ["transformers.trainer", "transformers.models.llama.modeling_llama"],
}
"""What takes longest to import, by framework. It must not ask which rank it is."""
SERVERS = ExitStack()


@pytest.fixture(scope="module", autouse=True)
def _servers_end() -> Iterator[None]:
    yield
    SERVERS.close()


@functools.cache
def fork_server(package: str, *, stock: bool) -> subprocess.Popen[str]:
    """A process that has imported a framework."""
    command = [sys.executable, str(Path(__file__).with_name("fork_server.py")), *IMPORTED_ONCE[package]]
    return SERVERS.enter_context(
        subprocess.Popen(
            command, env=environment(stock=stock), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
    )


def run(framework: str, folder: Path, world: int = 2, *, stock: bool = False, **settings: Any) -> Job:
    """Run a framework's job on some ranks, on Holdfast or with stock torch."""
    server = fork_server(framework.partition("_")[0], stock=stock)
    assert server.stdin is not None
    assert server.stdout is not None
    output = folder.with_name(f"{folder.name}.output")
    output.unlink(missing_ok=True)
    job = {"job": str(JOBS / f"{framework}_job.py"), "settings": {"folder": str(folder), **settings}}
    print(json.dumps({**job, "world": world, "output": str(output)}), file=server.stdin, flush=True)
    statuses = json.loads(server.stdout.readline())
    return Job(_told(output.read_text()), statuses, output.read_text())


def _told(output: str) -> dict[str, Any] | None:
    told = [line for line in output.splitlines() if line.startswith("RESULT ")]
    return json.loads(told[-1].removeprefix("RESULT ")) if told else None


def saved_by_us(folder: Path) -> bool:
    """Whether all checkpoints below a folder are ours."""
    files = [*folder.rglob("__*.distcp")]
    checksums = [*folder.rglob(".holdfast.safetensors.checksums")]
    return bool(files or checksums) and all("-" in file.name for file in files)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_losses_are_those_of_stock_torch_and_each_reads_the_others_checkpoint(
    framework: str, tmp_path: Path
) -> None:
    stock = run(framework, tmp_path / "stock", stock=True)
    ours = run(framework, tmp_path / "ours")
    assert ours.losses == stock.losses, ours.output
    assert saved_by_us(tmp_path / "ours")
    assert not saved_by_us(tmp_path / "stock")
    goes_on = run(framework, tmp_path / "stock", stock=True, resume=True)
    # Each side goes on from the checkpoint of the other.
    assert run(framework, tmp_path / "ours", stock=True, resume=True).losses == goes_on.losses
    again = run(framework, tmp_path / "again")
    assert again.losses == stock.losses
    assert run(framework, tmp_path / "again", resume=True).losses == goes_on.losses


@pytest.mark.parametrize("framework", CONTINUES)
def test_a_run_goes_on_with_another_number_of_ranks(framework: str, tmp_path: Path) -> None:
    whole = run(framework, tmp_path / "whole", steps=4)
    run(framework, tmp_path / "parts", steps=2)
    rest = run(framework, tmp_path / "parts", world=1, resume="elsewhere", steps=2)
    assert rest.result is not None, rest.output
    assert rest.result["first"] == 2
    # Sums over one and over two ranks are rounded differently.
    assert rest.losses == pytest.approx(whole.losses[2:], rel=1e-5)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("kill_at", [4, 12])
def test_a_kill_in_an_overwrite_leaves_a_whole_checkpoint(
    framework: str, kill_at: int, tmp_path: Path
) -> None:
    first = run(framework, tmp_path / "a")
    assert first.result is not None, first.output
    resume: bool | str = True
    if framework == "transformers_trainer":
        # It has a folder for each step: go on twice from the same one.
        assert run(framework, tmp_path / "a", resume=True).result is not None
        resume = "first"
    killed = run(framework, tmp_path / "a", resume=resume, kill_at=kill_at)
    assert killed.result is None
    assert killed.statuses[0] == signal.SIGKILL, killed.output
    then = run(framework, tmp_path / "a", resume=True, steps=1)
    assert then.result is not None, then.output
    if framework in CONTINUES:
        assert then.result["first"] in (2, 3, 4)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_flipped_byte_is_noticed(framework: str, tmp_path: Path) -> None:
    assert run(framework, tmp_path / "a").result is not None
    files = [*(tmp_path / "a").rglob("__*.distcp"), *(tmp_path / "a").glob("*.safetensors")]
    assert files
    for file in files:
        data = bytearray(file.read_bytes())
        # What is before it may be a header.
        for place in range(len(data) // 2, len(data), 997):
            data[place] ^= 1
        file.write_bytes(data)
    damaged = run(framework, tmp_path / "a", resume=True)
    assert damaged.result is None
    assert "ChecksumError" in damaged.output or "IntegrityError" in damaged.output, damaged.output


def test_the_word_before_the_command_is_enough(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "holdfast", "run", sys.executable, "-m", "torch.distributed.run"]
    command += ["--standalone", "--nproc-per-node=2", str(JOBS / "accelerate_job.py")]
    command += [json.dumps({"folder": str(tmp_path / "a")})]
    subprocess.run(command, env=environment(stock=True), check=True)
    assert saved_by_us(tmp_path / "a")


def test_accelerate_merges_the_weights_of_a_checkpoint(tmp_path: Path) -> None:
    job = run("accelerate", tmp_path / "a", export=str(tmp_path / "merged"))
    assert job.result is not None, job.output
    weights = load_file(tmp_path / "merged" / "model.safetensors")
    assert sorted(weights) == MODEL_KEYS


@pytest.mark.parametrize(
    ("framework", "names"),
    [("lightning", ("model", "", "step")), ("lightning_trainer", ("state_dict", "model.", "global_step"))],
)
def test_lightning_consolidates_a_checkpoint(
    framework: str, names: tuple[str, str, str], tmp_path: Path
) -> None:
    assert run(framework, tmp_path / "a").result is not None
    command = [sys.executable, "-m", "lightning.fabric.utilities.consolidate_checkpoint", str(tmp_path / "a")]
    model, prefix, step = names
    for stock in (True, False):
        output = tmp_path / f"{stock}.ckpt"
        subprocess.run([*command, "--output_file", str(output)], env=environment(stock=stock), check=True)
        state = torch.load(output, weights_only=False)
        assert sorted(state[model]) == [f"{prefix}{name}" for name in MODEL_KEYS]
        assert state[step] == 2


@pytest.mark.parametrize("stock", [True, False])
def test_transformers_reads_and_consolidates_what_many_ranks_saved(tmp_path: Path, stock: bool) -> None:
    job = run("transformers", tmp_path / "a", export=str(tmp_path / "b"))
    assert job.result is not None, job.output
    assert [file.name for file in (tmp_path / "a").glob("*.safetensors")] == [
        "shard-00001-model-00001-of-00001.safetensors"
    ]
    code = """
import sys, torch
from transformers import LlamaForCausalLM
one, two = [LlamaForCausalLM.from_pretrained(folder).state_dict() for folder in sys.argv[1:]]
assert all(torch.equal(value, two[key]) for key, value in one.items())
"""
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    for name in ("config.json", "generation_config.json"):
        shutil.copy(tmp_path / "a" / name, tmp_path / "b")
    subprocess.run([sys.executable, "-c", code, *folders], env=environment(stock=stock), check=True)
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    on_two = run("transformers", tmp_path / "a", resume=True, stock=stock)
    on_four = run("transformers", tmp_path / "c", world=4, resume=True, stock=stock)
    # Sums over two and over four ranks are rounded differently.
    assert on_four.losses == pytest.approx(on_two.losses, rel=1e-5), on_four.output


@pytest.mark.parametrize("framework", ["accelerate", "transformers_trainer"])
def test_checkpoints_without_shards_are_left_alone(framework: str, tmp_path: Path) -> None:
    stock = run(framework, tmp_path / "stock", stock=True, plain=True)
    ours = run(framework, tmp_path / "ours", plain=True)
    assert ours.losses == stock.losses
    assert not saved_by_us(tmp_path / "ours")
    # accelerate reads and sets the state dicts by our functions, and keeps them with torch.save.
    ours = run(framework, tmp_path / "ours", stock=True, plain=True, resume=True)
    stock = run(framework, tmp_path / "stock", plain=True, resume=True)
    assert ours.losses == stock.losses


def test_torchtitan_saves_in_the_background_and_keeps_the_last_two(tmp_path: Path) -> None:
    job = run("torchtitan", tmp_path / "a", steps=4, in_background=True)
    assert job.result is not None, job.output
    # It counts the folders that exist when a save has begun: the folder of that save may not be there yet.
    assert job.result["folders"] in (["step-3", "step-4"], ["step-2", "step-3", "step-4"])
    assert saved_by_us(tmp_path / "a")
    then = run("torchtitan", tmp_path / "a", resume=True, steps=1, in_background=True)
    assert then.result is not None, then.output
    assert (then.result["first"], then.result["seen"]) == (4, 5)
    assert "are not loaded" not in then.output


@pytest.mark.parametrize("stock", [True, False])
def test_torchtitan_writes_its_last_save_for_hugging_face(tmp_path: Path, stock: bool) -> None:
    job = run("torchtitan", tmp_path / "a", steps=2, export="yes", stock=stock)
    assert job.result is not None, job.output
    last = tmp_path / "a" / "step-2"
    index = json.loads((last / "model.safetensors.index.json").read_text())["weight_map"]
    assert sorted(index) == [f"x.{name}" for name in MODEL_KEYS]
    assert all(key in load_file(os.path.join(last, file)) for key, file in index.items())
