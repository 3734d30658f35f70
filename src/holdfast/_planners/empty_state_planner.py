"""The planner that loads without a state to load into."""

from collections.abc import Collection, Iterable
from typing import Any

import torch

from holdfast._contents.nested_state import Container, Path
from holdfast._format.item_table import StorageInfo
from holdfast._human_units import some_of
from holdfast._plan.flatten import containers_of, flat_key, paths_of, unflatten
from holdfast._planners.load_planner import DefaultLoadPlanner
from holdfast._torch_compat.torch_records import to_ours
from holdfast.errors import MetadataFormatError, MissingKeyError, UsageError
from holdfast.metadata import (
    STATE_DICT_TYPE,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)


class EmptyStateDictLoadPlanner(DefaultLoadPlanner):
    """Loads a checkpoint without a state to load into: builds the nested state from the checkpoint.

    The ``state_dict`` given to ``load`` must be empty; it is filled. Every tensor is held whole by this
    process.

    Args:
        keys: Load only these flat keys, and whatever is below these names. None for everything.
        *args: As for :class:`DefaultLoadPlanner`.
        **kwargs: As for :class:`DefaultLoadPlanner`.
    """

    def __init__(self, keys: Iterable[str] | None = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.keys = None if keys is None else set(keys)
        self._built: Collection[str] = ()

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,  # type: ignore[type-arg]
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Build the state, with memory for every tensor.

        Raises:
            UsageError: The given state is not empty.
            MissingKeyError: The checkpoint has none of the keys.
        """
        if state_dict:
            raise UsageError("the state to load into must be empty: it is built from the checkpoint")
        if metadata is None:
            raise UsageError("the planner was set up without the checkpoint's metadata")
        metadata = to_ours(metadata)
        paths = paths_of(metadata.planner_data)
        leaves = {
            key: _memory_for(key, entry, metadata.storage_data)
            if isinstance(entry, TensorStorageMetadata)
            else entry
            for key, entry in metadata.state_dict_metadata.items()
            if self.keys is None or self._is_wanted(key, paths.get(key, (key,)))
        }
        self._built = leaves.keys()
        state_dict.update(unflatten(leaves, paths, self._wanted_containers(leaves, paths)))
        if self.keys and not state_dict:
            names = some_of(sorted(self.keys), 20)
            raise MissingKeyError(
                f"the checkpoint has none of the keys asked for: {names}", key=min(self.keys)
            )
        super().set_up_planner(state_dict, metadata, is_coordinator)
        if self.keys is not None and self.strict is None:
            self.strict = False

    def _opens_lists(self, value: Any) -> bool:
        # The list may have been saved flattened for a tensor that is stored whole, as sparse ones are.
        return isinstance(value, BytesStorageMetadata) or super()._opens_lists(value)

    def _flatten(self, *, open_every_dict: bool) -> None:
        super()._flatten(open_every_dict=open_every_dict)
        # None fills the positions of lists that are not wanted.
        for key in [] if self.keys is None else self.state_dict.keys() - self._built:
            if self.state_dict[key] is None:
                del self.state_dict[key], self.mappings[key], self._slots[key]

    def _wanted_containers(self, leaves: dict[str, Any], paths: dict[str, Path]) -> dict[Path, Container]:
        containers = containers_of(paths)
        if self.keys is None:
            return containers
        above = {path[:depth] for key in leaves if (path := paths.get(key)) for depth in range(len(path))}
        return {
            path: container
            for path, container in containers.items()
            if path in above or self._is_wanted(flat_key(path), path)
        }

    def _is_wanted(self, key: str, path: tuple[Any, ...]) -> bool:
        assert self.keys is not None
        names = {flat_key(path[:depth]) for depth in range(1, len(path) + 1)}
        return key in self.keys or not names.isdisjoint(self.keys)


def _memory_for(key: str, entry: TensorStorageMetadata, places: Any) -> torch.Tensor:
    """Memory for a whole tensor, unless what is stored of it is too little to fill it."""
    nbytes = entry.size.numel() * entry.properties.dtype.itemsize
    found = [
        places[index]
        for chunk in entry.chunks
        if (index := MetadataIndex(key, chunk.offsets)) in (places or ())
    ]
    # Places belong to the storage: of those that are not ours nothing is known.
    is_known = all(isinstance(place, StorageInfo) and not place.transform_descriptors for place in found)
    if is_known and sum(place.length for place in found) < nbytes:
        raise MetadataFormatError(
            f"{key}: a tensor of shape {tuple(entry.size)} takes {nbytes} bytes, but fewer are stored",
            key=key,
        )
    return torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
