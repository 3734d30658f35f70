"""Which storage serves a place, when the caller names only the place."""

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from holdfast._io.places import local_path
from holdfast.errors import UsageError
from holdfast.filesystem import FileSystemReader, FileSystemWriter
from holdfast.storage import StorageReader, StorageWriter

F = TypeVar("F", bound=Callable[..., Any])
Place: TypeAlias = str | os.PathLike[str]


def storage_may_come_second(keyword: str) -> Callable[[F], F]:
    """Let a function take its storage as a second positional argument, as it did before torch 2.2."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def with_keyword(*args: Any, **kwargs: Any) -> Any:
            if len(args) == 2:
                warnings.warn(
                    f"pass the second argument of {function.__name__} by its name: {keyword}=",
                    FutureWarning,
                    stacklevel=2,
                )
                return function(args[0], **{**kwargs, keyword: args[1]})
            return function(*args, **kwargs)

        return with_keyword  # type: ignore[return-value]

    return decorate


def choose_writer(writer: StorageWriter | None, checkpoint_id: Place | None) -> StorageWriter:
    """The caller's writer at the caller's place, or a new one that suits the place."""
    if writer is None:
        writer = FileSystemWriter(_local_place(checkpoint_id, "storage_writer"))
        checkpoint_id = None  # it is there already
    writer.reset(checkpoint_id)
    return writer


def choose_reader(reader: StorageReader | None, checkpoint_id: Place | None) -> StorageReader:
    """The caller's reader at the caller's place, or a new one that suits the place."""
    if reader is None:
        return FileSystemReader(_local_place(checkpoint_id, "storage_reader"))
    reader.reset(checkpoint_id)
    return reader


def _local_place(checkpoint_id: Place | None, instead: str) -> Place:
    if not checkpoint_id:
        raise UsageError(
            f"where is the checkpoint? Its checkpoint_id must be specified, or a {instead} that knows"
        )
    if not isinstance(checkpoint_id, str | os.PathLike):
        raise UsageError(f"checkpoint_id must be a path, not {type(checkpoint_id).__name__}")
    try:
        return local_path(checkpoint_id)
    except UsageError as error:
        raise UsageError(f"{error} ({instead}=)", path=str(checkpoint_id)) from error
