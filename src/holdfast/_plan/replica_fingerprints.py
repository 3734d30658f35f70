"""Fingerprints of the values that several ranks must hold alike, and which ranks those are."""

from collections.abc import Mapping
from typing import Any

from torch.distributed.tensor import DTensor, Replicate

from holdfast._contents.nested_state import Path
from holdfast._objects.object_fingerprint import fingerprint
from holdfast._plan.flatten import container_kinds, flat_key
from holdfast._tensors.checkpointable import describes_itself
from holdfast._tensors.chunks import is_sharded, is_tensor
from holdfast._tensors.dtensors import held_pieces, memory_of_piece
from holdfast._tensors.tensor_fingerprint import fingerprint_tensor
from holdfast.per_rank import rank_key

UNKNOWN = b""
"""Stands for the fingerprint of a value that cannot be compared."""

_CONTAINERS = {kind: kind.encode() for kind in ("dict", "list", "tensor")}


def is_container(mark: bytes) -> bool:
    """Whether a fingerprint is that of an opened container, whose values have keys of their own."""
    return mark in _CONTAINERS.values()


def fingerprint_replicas(
    state: dict[str, Any], paths: Mapping[str, Path], *, full: bool
) -> dict[tuple[int, ...] | None, dict[str, bytes]]:
    """The fingerprints of a flat state's values, by the ranks that must hold the same value.

    A value of which nothing can be said has the fingerprint :data:`UNKNOWN`. A chunk that no other rank
    holds is left out. A container has one too, which tells only what kind of container it is: so a dict on
    one rank differs from a number or a list on another.

    Args:
        state: The flat state of this rank.
        paths: Its structure; empty if the state was not flattened.
        full: Whether every byte of a large tensor counts, or only a sample of them.

    Returns:
        Under None, which stands for all ranks: the values that are not sharded, by flat key. Under the ranks
        that a DTensor is replicated on: its chunks, by key and box, such as ``weight[0:4, 0:8]``.
    """
    everywhere: dict[str, bytes] = {}
    found: dict[tuple[int, ...] | None, dict[str, bytes]] = {None: everywhere}
    # A mesh is asked once: torch 2.13 takes some 50 us for it.
    known: dict[tuple[int, tuple[Any, ...]], tuple[int, ...]] = {}
    for key, value in state.items():
        if rank_key(key) is not None:
            continue
        if is_sharded(value):
            # What other ranks hold of a ShardedTensor is not known here, nor of what describes itself.
            # Classes: torch 2.13 takes 10 us to make a placement and compare it.
            if not isinstance(value, DTensor) or Replicate not in map(type, value.placements):
                continue
            if describes_itself(value):
                continue
            layout = (id(value.device_mesh), value.placements)
            if layout not in known:
                known[layout] = _ranks_with_same_chunks(value)
            if len(known[layout]) > 1:
                found.setdefault(known[layout], {}).update(_fingerprint_chunks(key, value, full=full))
            continue
        mark = fingerprint_tensor(value, full=full) if is_tensor(value) else fingerprint(value)
        everywhere[key] = UNKNOWN if mark is None else mark
    for path, kind in container_kinds(paths).items():
        key = flat_key(path)
        if rank_key(key) is None:
            everywhere.setdefault(key, _CONTAINERS[kind])
    return found


def _ranks_with_same_chunks(value: DTensor) -> tuple[int, ...]:
    """The global ranks that hold the same chunks as this one; none if this rank is not in the mesh."""
    mesh = value.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    same = tuple(
        slice(None) if type(placement) is Replicate else at
        for placement, at in zip(value.placements, coordinate, strict=True)
    )
    return tuple(mesh.mesh[same].flatten().tolist())


def _fingerprint_chunks(key: str, value: DTensor, *, full: bool) -> dict[str, bytes]:
    found = {}
    for piece in held_pieces(value):
        box = ", ".join(f"{a}:{a + length}" for a, length in zip(piece.offsets, piece.lengths, strict=True))
        found[f"{key}[{box}]"] = fingerprint_tensor(memory_of_piece(value, piece), full=full)
    return found
