"""Which rank writes a file or a tensor that several ranks have parts of: its owner.

Where files can only be written from front to back, each file has an owner. In a folder, ranks write at any
place, and only a tensor that they have columns of has an owner: else each row would be a write of its own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast._format.safetensors import StoredTensor
from holdfast._format.safetensors_checksums import digest_of
from holdfast._geometry import Box
from holdfast._plan.write_columns import columns_of
from holdfast._storage.safetensors_layout import ModelLayout, RankPlaces, places_of_rank
from holdfast.planner import SavePlan

SHORT_RUN, _SMALL_TENSOR = 256 << 10, 1 << 20
"""Shorter runs of tensors that are not small are sent to an owner."""
_MOST_OWNERS = 16
"""More ranks than these do not upload at the same time: every other rank has a connection to each of them."""


class HeldBox(NamedTuple):
    """A chunk of a tensor, and the rank that has it."""

    rank: int
    box: Box


class OwnedTensor(NamedTuple):
    """One tensor of a file, as the owner of the file knows it.

    Attributes:
        key: Its key in the plans.
        shape: Its shape.
        dtype: The name of the dtype that it is stored with.
        chunks: Its parts and the ranks that have them, in the order of their offsets.
        begin: Where it begins in the file.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    chunks: list[HeldBox]
    begin: int


class OwnedFile(NamedTuple):
    """One file that a rank writes, or writes some tensors of.

    Attributes:
        name: Its name.
        tensors: Its tensors in the order in which they lie, without those that have no elements.
        header: Its beginning; None if the file is there already, and others write to it as well.
        nbytes: Its size.
    """

    name: str
    tensors: list[OwnedTensor]
    header: bytes | None = None
    nbytes: int = 0


@dataclass(frozen=True)
class StreamPlaces(RankPlaces):
    """What the coordinator tells a rank if some of what it has is written by another rank, or the reverse.

    Attributes:
        owners: The rank that writes the tensor of a key. A tensor without one is written by all that have it.
        owned: What this rank writes for all that have it.
    """

    owners: dict[str, int] = field(default_factory=dict)
    owned: list[OwnedFile] = field(default_factory=list)


def tell_owners(layout: ModelLayout, plans: Sequence[SavePlan], save_id: str) -> list[StreamPlaces]:
    """On the coordinator: what each rank is told where files are written from front to back.

    Args:
        layout: The files of the model.
        plans: What each rank has to give.
        save_id: The save. It stands in the headers for the content, which is not known yet.
    """
    chunks = _chunks_by_name(layout, plans)
    identity = digest_of(save_id.encode())
    owned: list[list[OwnedFile]] = [[] for _ in plans]
    owner_of: dict[str, int] = {}
    owners = choose_owners([file.nbytes for file in layout.files], len(plans))
    for file, owner in zip(layout.files, owners, strict=True):
        tensors = _owned_tensors(file.tensors, chunks)
        owned[owner].append(OwnedFile(file.temporary, tensors, file.header(identity), file.nbytes))
        owner_of |= {tensor.key: owner for tensor in file.tensors}
    return _tell(layout, plans, owner_of, owned)


def tell_owners_of_columns(layout: ModelLayout, plans: Sequence[SavePlan]) -> list[StreamPlaces]:
    """On the coordinator: what each rank is told where ranks write at any place of the files."""
    chunks = _chunks_by_name(layout, plans)
    wanted = [
        (file, tensor)
        for file in layout.files
        for tensor in file.tensors
        if tensor.nbytes >= _SMALL_TENSOR and _has_short_runs(tensor, chunks)
    ]
    owners = choose_owners([tensor.nbytes for _, tensor in wanted], len(plans))
    owned: list[list[OwnedFile]] = [[] for _ in plans]
    for (file, tensor), owner in zip(wanted, owners, strict=True):
        if not owned[owner] or owned[owner][-1].name != file.temporary:
            owned[owner].append(OwnedFile(file.temporary, []))
        owned[owner][-1].tensors.extend(_owned_tensors([tensor], chunks))
    owner_of = {tensor.key: owner for (_, tensor), owner in zip(wanted, owners, strict=True)}
    return _tell(layout, plans, owner_of, owned)


def _tell(
    layout: ModelLayout,
    plans: Sequence[SavePlan],
    owner_of: dict[str, int],
    owned: Sequence[list[OwnedFile]],
) -> list[StreamPlaces]:
    """Every rank's own part of it. ``owner_of`` goes by the names of tensors in the files."""
    told = []
    for plan, own in zip(plans, owned, strict=True):
        places = places_of_rank(layout, plan)
        owners = {key: owner_of[layout.names[key]] for key in places.places if layout.names[key] in owner_of}
        told.append(StreamPlaces(places.files, places.places, owners, own))
    return told


def _has_short_runs(tensor: StoredTensor, chunks: dict[str, tuple[str, list[HeldBox]]]) -> bool:
    """Whether a rank has a part of a tensor that is several short runs in the file."""
    itemsize = tensor.nbytes // math.prod(tensor.shape)
    for _, box in chunks.get(tensor.key, ("", []))[1]:
        split = len(tensor.shape)
        while split and box.lengths[split - 1] == tensor.shape[split - 1]:
            split -= 1
        run = math.prod(box.lengths[max(split - 1, 0) :])
        if run < math.prod(box.lengths) and run * itemsize < SHORT_RUN:
            return True
    return False


def choose_owners(nbytes: Sequence[int], world_size: int) -> list[int]:
    """The owner of each file: the largest files first, each to the rank that has the fewest bytes so far."""
    count = min(world_size, _MOST_OWNERS)
    # Not the first ranks only: those of one machine share its network.
    ranks = [number * world_size // count for number in range(count)]
    todo = dict.fromkeys(ranks, 0)
    owners = [0] * len(nbytes)
    for number in sorted(range(len(nbytes)), key=lambda number: -nbytes[number]):
        owners[number] = min(ranks, key=lambda rank: todo[rank])
        todo[owners[number]] += nbytes[number]
    return owners


def _chunks_by_name(layout: ModelLayout, plans: Sequence[SavePlan]) -> dict[str, tuple[str, list[HeldBox]]]:
    """For each tensor of the files its key, and who has which part of it."""
    found: dict[str, tuple[str, list[HeldBox]]] = {}
    for rank, plan in enumerate(plans):
        columns = columns_of(plan)
        for key, form, offset in zip(columns.keys, columns.form, columns.offset, strict=True):
            box = Box(tuple(columns.offsets[offset]), tuple(columns.forms[form].lengths))
            if 0 not in box.lengths:
                found.setdefault(layout.names[key], (key, []))[1].append(HeldBox(rank, box))
    return found


def _owned_tensors(
    tensors: Sequence[StoredTensor], chunks: dict[str, tuple[str, list[HeldBox]]]
) -> list[OwnedTensor]:
    owned = []
    for tensor in tensors:
        if tensor.nbytes:
            key, held = chunks.get(tensor.key, (tensor.key, []))
            held.sort(key=lambda chunk: chunk.box.offsets)
            owned.append(OwnedTensor(key, tensor.shape, tensor.dtype, held, tensor.begin))
    return owned
