"""Owns what the storages over a store have in common: the place that they write to or read from."""

import os
import uuid
from typing import Any, Generic, TypeVar

from holdfast._io.places import open_place
from holdfast._io.store import FileSource
from holdfast.errors import UsageError

StoreType = TypeVar("StoreType", bound=FileSource)


def new_id() -> str:
    """A name for a save or a load that no other one has."""
    return uuid.uuid4().hex


class AtStore(Generic[StoreType]):
    """A storage over a store. Subclasses are dataclasses."""

    _store: Any
    thread_count: int | None

    def __post_init__(self) -> None:
        if self.thread_count is not None and self.thread_count < 1:
            raise UsageError(f"thread_count must be at least 1, not {self.thread_count}")

    @property
    def store(self) -> StoreType:
        """The place."""
        assert self._store is not None
        store: StoreType = self._store
        return store

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """How the user would name the place."""
        return self.store.url

    def _move_to(self, checkpoint_id: str | os.PathLike[str]) -> None:
        self._store = open_place(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a place that there is a store for."""
        try:
            open_place(checkpoint_id)
        except UsageError:
            return False
        return True
