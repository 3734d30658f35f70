"""Which rank writes which safetensors file, where files can only be written from front to back."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast._format.safetensors_checksums import digest_of
from holdfast._geometry import Box
from holdfast._plan.write_columns import columns_of
from holdfast._storage.safetensors_layout import ExportFile, ModelLayout, RankPlaces, places_of_rank
from holdfast.planner import SavePlan

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
        chunks: Who has which part of it, in the order of their offsets.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    chunks: list[HeldBox]


class OwnedFile(NamedTuple):
    """One file that a rank writes.

    Attributes:
        name: Its name.
        header: Its beginning.
        nbytes: Its size.
        tensors: Its tensors in the order in which they lie, without those that have no elements.
    """

    name: str
    header: bytes
    nbytes: int
    tensors: list[OwnedTensor]


@dataclass(frozen=True)
class StreamPlaces(RankPlaces):
    """What the coordinator tells a rank where files are written from front to back.

    Attributes:
        owners: The rank that writes each of ``files``.
        owned: The files that this rank writes.
    """

    owners: list[int] = field(default_factory=list)
    owned: list[OwnedFile] = field(default_factory=list)


def tell_owners(layout: ModelLayout, plans: Sequence[SavePlan], save_id: str) -> list[StreamPlaces]:
    """On the coordinator: what each rank is told.

    Args:
        layout: The files of the model.
        plans: What each rank has to give.
        save_id: The save. It stands in the headers for the content, which is not known yet.
    """
    owners = choose_owners([file.nbytes for file in layout.files], len(plans))
    chunks = _chunks_by_name(layout, plans)
    identity = digest_of(save_id.encode())
    by_file = {file.temporary: owner for file, owner in zip(layout.files, owners, strict=True)}
    told = []
    for rank, plan in enumerate(plans):
        places = places_of_rank(layout, plan)
        owned = [
            _owned_file(file, identity, chunks)
            for file, owner in zip(layout.files, owners, strict=True)
            if owner == rank
        ]
        of_files = [by_file[name] for name in places.files]
        told.append(StreamPlaces(places.files, places.places, of_files, owned))
    return told


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


def _owned_file(file: ExportFile, identity: str, chunks: dict[str, tuple[str, list[HeldBox]]]) -> OwnedFile:
    tensors = []
    for tensor in file.tensors:
        if tensor.nbytes:
            key, held = chunks.get(tensor.key, (tensor.key, []))
            held.sort(key=lambda chunk: chunk.box.offsets)
            tensors.append(OwnedTensor(key, tensor.shape, tensor.dtype, held))
    return OwnedFile(file.temporary, file.header(identity), file.nbytes, tensors)
