"""Small checkpoints of every kind, made once, and copies of them to be damaged."""

import json
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.support.stock_torch import stock_save

import holdfast as hf
from holdfast.cli import main
from holdfast.extension import ZStandard

GOLDEN = Path(__file__).parents[1] / "golden"


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Outcome]
Copy = Callable[[str], Path]


def state() -> dict[str, Any]:
    return {
        "model": {
            "weight": torch.arange(600, dtype=torch.float32).reshape(20, 30),
            "large": torch.arange(700_000, dtype=torch.int32),
            "bias": torch.ones(3, dtype=torch.bfloat16),
        },
        "optimizer": {"state": {0: {"step": torch.tensor(7.0)}, (1, "a"): 3}},
        "blob": b"x" * 3000,
        "epoch": 3,
        "mix": [torch.ones(2), "text"],
        "empty": OrderedDict(),
    }


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("originals")
    hf.save(state(), checkpoint_id=root / "ours")
    tiny = {"a": torch.arange(5), "b": {"c": "text"}}
    hf.save(tiny, checkpoint_id=root / "tiny")
    hf.save(tiny, storage_writer=hf.FileSystemWriter(root / "tiny-zstd", _extensions=[ZStandard()]))
    hf.save(state(), storage_writer=hf.FileSystemWriter(root / "zstd", _extensions=[ZStandard()]))
    hf.save(
        state(),
        storage_writer=hf.FileSystemWriter(
            root / "native", single_file_per_rank=False, torch_compatible=False
        ),
    )
    stock_save(state(), checkpoint_id=root / "torch")
    for name in ("sharded", "zstd", "rank_local"):
        shutil.copytree(GOLDEN / "torch-2.13" / name, root / f"torch-{name}")
    return root


@pytest.fixture
def copy(originals: Path, tmp_path: Path) -> Copy:
    """A copy of a checkpoint that a test may do anything with."""

    def make(name: str) -> Path:
        return Path(shutil.copytree(originals / name, tmp_path / name))

    return make


@pytest.fixture
def holdfast(capsys: pytest.CaptureFixture[str]) -> Command:
    """The command, in this process."""

    def run(*words: object) -> Outcome:
        capsys.readouterr()
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return Outcome(code, out, err)

    return run
