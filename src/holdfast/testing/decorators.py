"""Decorators for test methods: a folder that all ranks share, and a logger at a chosen level."""

import functools
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, overload

import torch.distributed as dist

__all__ = ["with_checkpoint_logging", "with_temp_dir"]

_Test = TypeVar("_Test", bound=Callable[..., Any])


def with_temp_dir(func: _Test | None = None) -> _Test:
    """Give a test method ``self.temp_dir``: a new empty folder, the same one on every rank.

    Without a process group the folder is this process's own. With one, every rank of the default group
    must enter the method, and all must see the same file system.

    The folder is removed once: by the last rank to leave, whether by return or by exception, so that no
    rank finds it gone while it is still at work, and none waits for another. A rank that is killed
    leaves it behind.
    """
    if func is None:
        raise TypeError("with_temp_dir takes no options: write @with_temp_dir without parentheses")

    @functools.wraps(func)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        root, rank, world_size = _agree_on_folder()
        self.temp_dir = str(root / "data")
        try:
            return func(self, *args, **kwargs)
        finally:
            _leave_folder(root, rank, world_size)

    return wrapper  # type: ignore[return-value]


def _agree_on_folder() -> tuple[Path, int, int]:
    if not (dist.is_available() and dist.is_initialized()):
        root = tempfile.mkdtemp(prefix="holdfast-test-")
        Path(root, "data").mkdir()
        return Path(root), 0, 1
    rank, world_size = dist.get_rank(), dist.get_world_size()
    agreed: list[str | None] = [None]
    if rank == 0:
        root = tempfile.mkdtemp(prefix="holdfast-test-")
        Path(root, "data").mkdir()
        agreed = [root]
    dist.broadcast_object_list(agreed, src=0)
    assert agreed[0] is not None
    return Path(agreed[0]), rank, world_size


def _leave_folder(root: Path, rank: int, world_size: int) -> None:
    (root / f"left-{rank}").touch()
    # Two ranks may both see that all have left: the one whose rename succeeds removes the folder, and the
    # other finds it gone, perhaps while it is counting.
    doomed = root.with_name(root.name + "-done")
    try:
        if sum(name.startswith("left-") for name in os.listdir(root)) < world_size:
            return
        os.rename(root, doomed)
    except FileNotFoundError:
        return
    shutil.rmtree(doomed, ignore_errors=True)


@overload
def with_checkpoint_logging(func: _Test, logger_name: str = ..., level: int = ...) -> _Test: ...
@overload
def with_checkpoint_logging(
    func: None = None, logger_name: str = ..., level: int = ...
) -> Callable[[_Test], _Test]: ...
def with_checkpoint_logging(
    func: _Test | None = None, logger_name: str = "holdfast", level: int = logging.INFO
) -> _Test | Callable[[_Test], _Test]:
    """Run a test method with a logger at ``level``, and put its old level back, also on failure.

    Use it plain, ``@with_checkpoint_logging``, or with options, ``@with_checkpoint_logging(level=10)``.

    Args:
        func: The test method.
        logger_name: The logger to set; by default the root of all of Holdfast's.
        level: The level while the test runs.
    """
    if func is None:
        return functools.partial(with_checkpoint_logging, logger_name=logger_name, level=level)
    test = func

    @functools.wraps(test)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        logger = logging.getLogger(logger_name)
        level_before = logger.level
        logger.setLevel(level)
        try:
            return test(self, *args, **kwargs)
        finally:
            logger.setLevel(level_before)

    return wrapper
