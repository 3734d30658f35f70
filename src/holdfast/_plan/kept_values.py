"""Small values that differ between ranks and are kept for each: how many may be, and what they are called."""

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

from holdfast._contents.nested_state import Container, Path
from holdfast._plan.flatten import Structure, container_kinds, containers_of, flat_key
from holdfast._tensors.chunks import is_tensor
from holdfast._tensors.tensor_fingerprint import SMALL
from holdfast.errors import UsageError
from holdfast.per_rank import KEPT

LARGEST_TENSOR = SMALL
"""The bytes of the largest tensor that is kept: of larger ones not every byte is compared."""

LARGEST_OBJECT = 1 << 20
"""The bytes of the largest object that is kept, pickled: ten states of generators, or a small data loader."""

MOST_BYTES = 16 << 20
"""The bytes that are kept for one rank, all together."""

MOST_VALUES = 1 << 16
"""How many values are kept in one checkpoint, over all ranks.

That is the statistics of a ResNet-50 (106) on 600 ranks, or 16 values on 4096. Each takes 360 bytes of
metadata, which a load sends to every rank: 24 MB at most. 1000 statistics on 4096 ranks would be 1.5 GB.
"""


class _TooLargeError(Exception):
    pass


class _Counter:
    """A file that counts what is written to it, and stops a pickle that is too large."""

    def __init__(self) -> None:
        self.nbytes = 0

    def write(self, data: Any) -> None:
        self.nbytes += memoryview(data).nbytes
        if self.nbytes > LARGEST_OBJECT:
            raise _TooLargeError


def refuse_reserved(names: Iterable[Any]) -> None:
    """Raise UsageError if a name of a state looks like those of values that are kept for ranks."""
    for key in names:
        if type(key) is str and key.startswith(KEPT):
            raise UsageError(
                f"the state has the key {key!r}: names that begin with {KEPT} are those under which a "
                "checkpoint keeps values that differ between ranks. Rename it.",
                key=key,
            )


def why_not_kept(values: Mapping[str, Any]) -> dict[str, str]:
    """Why values of this rank are too much to be kept for it alone, by key; empty if they are not."""
    problems, total = {}, 0
    for key, value in values.items():
        if is_tensor(value):
            nbytes = value.nbytes
            if nbytes > LARGEST_TENSOR:
                problems[key] = (
                    f"a tensor of {nbytes} bytes is not kept for each rank, but only those of up to "
                    f"{LARGEST_TENSOR}"
                )
        else:
            nbytes = _pickled_nbytes(value)
            if nbytes > LARGEST_OBJECT:
                problems[key] = f"an object of more than {LARGEST_OBJECT} bytes is not kept for each rank"
        total += nbytes
    if total > MOST_BYTES and not problems:
        problems[next(iter(values))] = (
            f"this and the rest take {total} bytes on one rank, and at most {MOST_BYTES} are kept for each"
        )
    return problems


def _pickled_nbytes(value: Any) -> int:
    if isinstance(value, bytes | bytearray):
        return len(value)
    counter = _Counter()
    try:
        pickle.Pickler(counter, pickle.HIGHEST_PROTOCOL).dump(value)
    except _TooLargeError:
        return LARGEST_OBJECT + 1
    except Exception:  # noqa: BLE001 - whoever writes it will say why it cannot be saved
        return 0
    return counter.nbytes


def rename_kept(
    state: Mapping[str, Any], paths: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[dict[str, Any], Structure]:
    """A flat state and its structure, with some keys renamed; the order stays.

    Args:
        state: The flat state.
        paths: The path of each key, as far as they are known.
        names: Keys with their new names: the name of a rank, a dot, the old key. If the name of a container
            is there, so are the keys of all that is in it. It is then noted as a container, though its values
            tell that it is one: so a load knows that this rank had a container in this place.
    """
    renamed = {names.get(key, key): value for key, value in state.items()}
    structure = Structure(
        (names.get(key, key), (names[key].partition(".")[0], *path) if key in names else path)
        for key, path in paths.items()
    )
    known = containers_of(paths)
    moved: dict[Path, Container] = {}
    if not names.keys() <= state.keys():
        for path, kind in container_kinds(paths).items():
            if (key := flat_key(path)) in names and key not in state:
                moved[path] = known.get(path, Container(kind, len(renamed)))
    structure.containers = {
        (names[flat_key(path)].partition(".")[0], *path) if path in moved else path: container
        for path, container in (known | moved).items()
    }
    return renamed, structure
