"""Makes what callers of torch's functions expect back: torch's records, futures and exceptions."""

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

from holdfast._background.save_future import SaveFuture
from holdfast._deferred import DeferredDict
from holdfast._format.item_table import StorageInfo
from holdfast._install.door_table import PACKAGE
from holdfast._torch_compat.torch_records import in_plain_types, to_torch
from holdfast.errors import CheckpointException
from holdfast.metadata import Metadata
from holdfast.state_dict_saver import AsyncSaveResponse


def torch_metadata(metadata: Metadata | None) -> Any:
    """Metadata as torch's record. Its dicts are filled when somebody looks at them."""
    if metadata is None:
        return None
    kind = sys.modules[f"{PACKAGE}.metadata"].Metadata
    fields: dict[str, Any] = {
        "state_dict_metadata": _deferred(metadata.state_dict_metadata, to_torch),
        "planner_data": _deferred(metadata.planner_data, in_plain_types),
        "storage_data": _deferred(metadata.storage_data, _torch_places),
        "storage_meta": to_torch(metadata.storage_meta),
        "version": metadata.version,
    }
    return kind(**{field.name: fields[field.name] for field in dataclasses.fields(kind)})


def _deferred(entries: Any, convert: Callable[[Any], Any]) -> Any:
    if not isinstance(entries, dict):
        return entries
    return DeferredDict(len(entries), lambda: convert(dict(entries)).items())


def _torch_places(places: dict[Any, Any]) -> dict[Any, Any]:
    kind = sys.modules[f"{PACKAGE}.filesystem"]._StorageInfo  # noqa: SLF001 - torch has no other name for it
    names = [field.name for field in dataclasses.fields(kind)]
    return {
        to_torch(index): kind(**{name: getattr(place, name) for name in names})
        if isinstance(place, StorageInfo)
        else place
        for index, place in places.items()
    }


class SaveFutureForTorch(SaveFuture):
    """A future of torch's metadata. Its failure is an instance of torch's CheckpointException, too."""

    def result(self, timeout: float | None = None) -> Any:
        """As ``Future.result``, with torch's metadata and exceptions."""
        try:
            return torch_metadata(super().result(timeout))
        except CheckpointException as error:
            make_torchs(error)
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As ``Future.exception``, with torch's exceptions."""
        error = super().exception(timeout)
        if isinstance(error, CheckpointException):
            make_torchs(error)
        return error


def torch_futures(made: SaveFuture | AsyncSaveResponse) -> Any:
    """The return value of torch's ``async_save``: a future, or torch's response with two futures."""
    future: Any = made.upload_completion if isinstance(made, AsyncSaveResponse) else made
    future.__class__ = SaveFutureForTorch
    if not isinstance(made, AsyncSaveResponse):
        return future
    saver = sys.modules[f"{PACKAGE}.state_dict_saver"]
    response = getattr(saver, "AsyncSaveResponse", AsyncSaveResponse)
    return response(staging_completion=made.staging_completion, upload_completion=future)


def make_torchs(error: CheckpointException) -> None:
    """Make an exception an instance of torch's CheckpointException, besides all that it is."""
    theirs = sys.modules[f"{PACKAGE}.api"].CheckpointException
    if not isinstance(error, theirs):
        error.__class__ = _both(type(error), theirs)  # type: ignore[arg-type] # mypy doubts that a class has a hash


@functools.cache
def _both(ours: type[CheckpointException], theirs: type[BaseException]) -> type:
    def failures(self: CheckpointException) -> Any:
        return vars(self)["failures"]

    def reduce(self: CheckpointException) -> Any:
        # Other processes may not have called install.
        _, (told, portable) = CheckpointException.__reduce__(self)
        if self.step is not None:
            return CheckpointException.of, (self.step, portable)
        return CheckpointException, (told, portable)

    # torch's class has a property of that name, which looks elsewhere.
    return type(
        "CheckpointException",
        (ours, theirs),
        {"__module__": ours.__module__, "failures": property(failures), "__reduce__": reduce},
    )
