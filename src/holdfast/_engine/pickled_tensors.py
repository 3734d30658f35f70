"""Tensor subclasses that torch stored, each as one pickled tensor: loaded as objects, copied into the state.

The metadata of such a checkpoint says nothing of the class. It calls the item a tensor, and gives its shape.
"""

import dataclasses
import io
import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast._format.description import OBJECT
from holdfast._geometry import Box, intersect, volume
from holdfast._plan.fit_report import FitReport
from holdfast._plan.flatten import paths_of
from holdfast._plan.metadata_entries import dtypes_of
from holdfast._storage.item_places import ItemPlaces, places_of
from holdfast._tensors.dtensors import held_pieces, own_part
from holdfast._tensors.subclass_pieces import (
    OTHER_BOXES,
    CommonParts,
    SubclassPiece,
    copy_piece,
    inside,
    parts_of_cut,
    why_no_tensor,
    why_unfit,
)
from holdfast._tensors.subclass_room import as_parameter_is
from holdfast._tensors.tensor_parts import has_parts, put_together, take_apart
from holdfast._traverse import get_element, set_element
from holdfast.errors import PlanError
from holdfast.metadata import STORAGE_TYPES, BytesStorageMetadata, Metadata, MetadataIndex


class PickledTensorMetadata(BytesStorageMetadata):
    """A tensor of which only its item tells the class."""


@dataclasses.dataclass(eq=False)
class PickledRoom:
    """Stands for such a tensor in the state of an optimizer that does not have it yet.

    Attributes:
        parameter: The parameter that it is for; None to make it whole.
        device: Where to make it.
    """

    parameter: torch.Tensor | None
    device: torch.device

    def layout(self, shape: list[int]) -> DTensor | None:
        """The parameter, if a tensor of this shape is to be divided as that is."""
        parameter = self.parameter
        return parameter if isinstance(parameter, DTensor) and list(parameter.shape) == shape else None


def pickled_shapes(metadata: Metadata) -> dict[str, list[int]]:
    """The keys of tensors that take fewer bytes than their elements would, each with its shape.

    Only items that torch wrote can be such tensors.
    """
    places = places_of(metadata)
    if places is None or min(places.payload_nbytes, default=0) >= 0:
        return {}
    directory, dtypes = places.directory, dtypes_of(metadata)
    found: dict[str, list[int]] = {}
    for key, number in directory.numbers.items():
        if directory.kinds[number] == OBJECT:
            continue
        rows = range(directory.row[number], directory.row[number + 1])
        shape, itemsize = directory.shape(number), dtypes[directory.properties[number]].itemsize
        is_smaller = sum(places.nbytes[row] for row in rows) < math.prod(shape) * itemsize
        if is_smaller and all(_is_of_torch(places, row) and places.is_plain(row) for row in rows):
            found[key] = shape
    return found


def mark_pickled(metadata: Metadata, keys: Collection[str]) -> Metadata:
    """The metadata with entries of another kind for some tensors; the metadata itself if there are none."""
    if not keys:
        return metadata
    entries: dict[str, STORAGE_TYPES] = {**metadata.state_dict_metadata}
    entries.update({key: PickledTensorMetadata() for key in keys})
    return dataclasses.replace(metadata, state_dict_metadata=entries)


def _is_of_torch(places: ItemPlaces, row: int) -> bool:
    return bool(places.payload_nbytes[row] < 0 <= places.nbytes[row])


class _StandIn:
    """Stands in a state for a tensor, or a piece of one, that will be loaded as an object."""


class PickledTensors:
    """Those tensors of a state that the checkpoint has as pickled tensors: one for each box that was saved.

    Args:
        metadata: The checkpoint's metadata.
        shapes: The tensors that an optimizer may have a room for, as ``pickled_shapes`` finds them.

    Attributes:
        targets: Those that the state has, by their flat keys.
    """

    def __init__(self, metadata: Metadata, shapes: dict[str, list[int]]) -> None:
        self._shapes = shapes
        self._metadata, self._places = metadata, places_of(metadata)
        self._rows: dict[str, int] = {}
        self.targets: dict[str, torch.Tensor] = {}
        self._pieces: dict[str, SubclassPiece] = {}
        self._keys: dict[int, str] = {}
        self._rooms: dict[str, tuple[PickledRoom, DTensor | None, tuple[int, ...]]] = {}

    def stand_in(self, value: torch.Tensor, key: str) -> Any:
        """A placeholder for a tensor that is loaded as objects; None if torch has no items that fill it."""
        layout = value if isinstance(value, DTensor) else None
        pieces = self._pieces_of(key, own_part(value), _box_of(list(value.shape), layout))
        if not pieces or self._shape_of(key) != list(value.shape):
            return None
        # One item keeps the key of the tensor.
        names = [key] if len(pieces) == 1 else [f"{key}.{number}" for number in range(len(pieces))]
        self._pieces.update(zip(names, pieces, strict=True))
        self._rows.update({name: piece.row for name, piece in zip(names, pieces, strict=True)})
        self.targets[key], self._keys[id(value)] = value, key
        return _StandIn() if len(pieces) == 1 else {str(n): _StandIn() for n in range(len(pieces))}

    def _pieces_of(self, key: str, inner: torch.Tensor, held: Box | None) -> list[SubclassPiece]:
        pieces = []
        for row, box in self._boxes_of(key):
            both = None if held is None or len(box.lengths) != len(held.lengths) else intersect(box, held)
            if held is None or both is None:
                continue
            parts = parts_of_cut(inner, inside(both, held))
            if parts is None:
                return []
            pieces.append(SubclassPiece(key, row, box.lengths, inside(both, box), inner, parts))
        found = sum(volume(piece.stored.lengths) for piece in pieces)
        if len(pieces) == 1:
            pieces[0].is_only = True
        is_filled = held is not None and found == volume(held.lengths)
        return pieces if is_filled else []

    def _boxes_of(self, key: str) -> list[tuple[int, Box]]:
        """The items of a tensor that torch wrote, each with its box."""
        number = None if self._places is None else self._places.directory.numbers.get(key)
        if self._places is None or number is None or self._places.directory.kinds[number] == OBJECT:
            return []
        directory = self._places.directory
        boxes = enumerate(directory.boxes(number), directory.row[number])
        return [
            (row, Box(tuple(offsets), tuple(lengths)))
            for row, (offsets, lengths) in boxes
            if _is_of_torch(self._places, row)
        ]

    def _shape_of(self, key: str) -> list[int]:
        assert self._places is not None
        return self._places.directory.shape(self._places.directory.numbers[key])

    def find_rooms(self, state: dict[str, Any], report: FitReport) -> None:
        """Find the rooms in a state, and report those for which there is no item."""
        paths = paths_of(self._metadata.planner_data)
        for key, shape in self._shapes.items():
            room = get_element(state, paths[key]) if key in paths else None
            if not isinstance(room, PickledRoom):
                continue
            layout = room.layout(shape)
            if layout is not None and not held_pieces(layout):
                nothing = torch.empty(0, device=room.device)
                set_element(state, paths[key], as_parameter_is(nothing, layout))
                continue
            held = _box_of(shape, layout)
            row = next((row for row, box in self._boxes_of(key) if box == held), None)
            if held is not None and row is not None:
                self._rows[key], self._rooms[key] = row, (room, layout, held.lengths)
            else:
                report.add("kind", key, OTHER_BOXES)

    def as_objects(self) -> Metadata:
        """The metadata, with an object in the place of each of them."""
        if not self._rows:
            return self._metadata
        assert self._places is not None
        entries: dict[str, STORAGE_TYPES] = {**self._metadata.state_dict_metadata}
        stored = {**self._metadata.storage_data}
        for key in self.targets:
            del entries[key]
        for key, row in self._rows.items():
            entries[key] = BytesStorageMetadata()
            stored[MetadataIndex(key)] = self._places.record(row)
        return dataclasses.replace(self._metadata, state_dict_metadata=entries, storage_data=stored)

    def check(
        self,
        read: Callable[[list[str], Callable[[str, io.BytesIO], None]], None],
        decode: Callable[[str, io.BytesIO], Any],
    ) -> None:
        """Before anything is changed: read and decode them one by one, and make sure that they fit.

        Args:
            read: Reads some items, and hands each on.
            decode: Makes a value of one.

        Raises:
            PlanError: They do not fit.
        """
        report, common = FitReport(), CommonParts()

        def look(key: str, stream: io.BytesIO) -> None:
            value = decode(key, stream)
            if key in self._rooms:
                problem = why_no_tensor(value, self._rooms[key][2])
            else:
                problem = why_unfit(value, self._pieces[key], common)
            if problem:
                report.add("kind", key, problem)

        if self._rows:
            read(list(self._rows), look)
        report.raise_if_any()

    def fill_rooms(self, state: dict[str, Any]) -> None:
        """After the load: what was loaded into rooms, as the parameters are divided and where they are."""
        paths = paths_of(self._metadata.planner_data)
        for key, (room, layout, _) in self._rooms.items():
            value = get_element(state, paths[key])
            if isinstance(value, torch.Tensor):
                value = _moved(value, room.device)
                set_element(state, paths[key], value if layout is None else as_parameter_is(value, layout))

    def fill(self, before: Any, value: Any) -> Any:
        """After the load: what belongs in the place of ``before``, given what is where its stand-in was.

        Raises:
            PlanError: What was loaded does not fit, and ``check`` could not read it.
        """
        if isinstance(value, _StandIn):
            return before
        key = self._keys.get(id(before))
        if key is None:
            return value
        loaded = (
            {f"{key}.{name}": piece for name, piece in value.items()}
            if isinstance(value, dict)
            else {key: value}
        )
        common = CommonParts()
        for name, piece in loaded.items():
            if problem := why_unfit(piece, self._pieces[name], common):
                raise PlanError(f"{name}: {problem}", key=name)
        with torch.no_grad():
            for name, piece in loaded.items():
                copy_piece(piece, self._pieces[name])
        return before


def _box_of(shape: list[int], layout: DTensor | None) -> Box | None:
    """The box of a tensor that this rank holds, if it is one."""
    if layout is None:
        return Box((0,) * len(shape), tuple(shape))
    pieces = held_pieces(layout)
    return Box(tuple(pieces[0].offsets), tuple(pieces[0].lengths)) if len(pieces) == 1 else None


def _moved(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    if not has_parts(type(value)):
        return value.to(device)
    return put_together(value, take_apart(value, "?").with_parts(lambda part: part.to(device)))
