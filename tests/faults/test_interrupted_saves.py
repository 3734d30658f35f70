"""Ctrl-C inside of a save, at any call: the old checkpoint or the new one, and the place is free again."""

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoints import committed_files, load
from tests.support.states import same, small_state

import holdfast as hf

CALLS = [(os, name) for name in ("open", "pwritev", "fsync", "close", "rename", "unlink", "ftruncate")]
CALLS.append((fcntl, "flock"))


class _Interrupt:
    """Raises KeyboardInterrupt in the main thread before or after the n-th of the calls, as a signal does."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int) -> None:
        self.at = at
        self.count = 0
        for module, name in CALLS:
            patch.setattr(module, name, self._watched(getattr(module, name)))

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._step()
            result = call(*args, **kwargs)
            self._step()
            return result

        return watched

    def _step(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self.count += 1
            if self.count == self.at:
                raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"single_file_per_rank": False}], ids=["one file", "a file per item"]
)
def test_an_interrupt_at_any_call_leaves_the_place_free(tmp_path: Path, options: dict[str, Any]) -> None:
    found = []
    for n in range(1, 1000):
        hf.save(small_state(1), checkpoint_id=tmp_path)
        with pytest.MonkeyPatch.context() as patch:
            calls = _Interrupt(patch, n)
            try:
                hf.save(small_state(2), storage_writer=hf.FileSystemWriter(tmp_path, **options))
            except KeyboardInterrupt as interrupt:
                kept = interrupt  # as a notebook keeps it, with everything that its traceback refers to
            else:
                assert calls.count < n
                break
        state = load(tmp_path, small_state(99))
        found.append(
            "new" if same(state, small_state(2)) else "old" if same(state, small_state(1)) else "mix"
        )
        hf.save(small_state(3), checkpoint_id=tmp_path)
        assert same(load(tmp_path, small_state(99)), small_state(3))
        assert set(os.listdir(tmp_path)) == committed_files(tmp_path), f"interrupted at step {n}"
        del kept
    new = found.count("new")
    assert new > 0
    assert found == ["old"] * (len(found) - new) + ["new"] * new
