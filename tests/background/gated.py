"""Writers that wait or fail where a test wants it, and what is asked of saves of both kinds."""

import concurrent.futures
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
import torch

import holdfast
from holdfast.extension import StreamTransformExtension
from holdfast.filesystem import FileSystemWriter
from holdfast.state_dict_saver import SaveFuture

HANG_GUARD = 60.0


class Gated(FileSystemWriter):
    """Stops before it writes its data until it is let go."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reached = threading.Event()
        self.may_go = threading.Event()

    def write_data(self, plan: holdfast.SavePlan, planner: holdfast.SavePlanner) -> Any:
        self.reached.set()
        assert self.may_go.wait(HANG_GUARD)
        return super().write_data(plan, planner)


def wait_until_it_writes(folder: Path, future: SaveFuture) -> None:
    """Until the writer, in whatever process it is, has made the file "reached" in ``folder``."""
    while not (folder / "reached").exists():
        assert not future.done(), future.exception()
        os.sched_yield()


class GatedStream(StreamTransformExtension):
    """Changes nothing, and stops after so many bytes of an item until it is let go, in any process.

    Args:
        nbytes: Where it stops.
        folder: Where it makes the file "reached" then.
    """

    def __init__(self, nbytes: int, folder: Path) -> None:
        self.nbytes = nbytes
        self.folder = folder
        os.mkfifo(folder / "gate")

    def wait_until_let_go(self) -> None:
        """Called by the writer."""
        (self.folder / "reached").touch()
        (self.folder / "gate").read_bytes()

    def let_go(self) -> None:
        """Called by the test, once it is reached."""
        (self.folder / "gate").write_bytes(b"")

    @staticmethod
    def registry_name() -> str:
        return "test.gated"

    @classmethod
    def from_descriptor(cls, version: str) -> "GatedStream":
        raise NotImplementedError

    def get_descriptor(self) -> str:
        return "test.gated/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return _Counted(output, self)  # type: ignore[return-value]

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        return input


class _Counted(io.RawIOBase):
    def __init__(self, output: IO[bytes], gate: GatedStream) -> None:
        self._output, self._gate, self._taken = output, gate, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._output.write(data)
        before, self._taken = self._taken, self._taken + memoryview(data).nbytes
        if before < self._gate.nbytes <= self._taken:
            self._gate.wait_until_let_go()
        return memoryview(data).nbytes

    def close(self) -> None:
        if not self.closed:
            self._output.close()
        super().close()


def cancel_within_one_value(saving: Callable[..., SaveFuture], folder: Path) -> None:
    """Save one large value, see from outside that a part of it is written, and give the save up."""
    gate = GatedStream(24 << 20, folder)
    writer = FileSystemWriter(folder / "c", _extensions=[gate])
    future = saving({"large": torch.ones(16 << 20)}, storage_writer=writer)
    wait_until_it_writes(folder, future)
    progress = future.progress()
    assert 8 << 20 <= progress.nbytes_done <= 32 << 20 < progress.nbytes_total
    assert future.cancel()
    gate.let_go()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(HANG_GUARD)
    assert os.listdir(folder / "c") == []


class GatedCommit(FileSystemWriter):
    """Stops inside of its commit until it is let go."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reached = threading.Event()
        self.may_go = threading.Event()

    def finish(self, metadata: holdfast.Metadata, results: Any) -> None:
        self.reached.set()
        assert self.may_go.wait(HANG_GUARD)
        super().finish(metadata, results)


class Failing(FileSystemWriter):
    """Fails when it writes."""

    def write_data(self, plan: holdfast.SavePlan, planner: holdfast.SavePlanner) -> Any:
        raise OSError(5, "on purpose")
