"""Which file of a model has which tensor: the names of the files, and the index that says it."""

import operator
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

import msgspec

from holdfast._format.names import SAVE_DIGITS, is_plain_name
from holdfast._format.safetensors import SUFFIX, StoredTensor, refuse_doubles
from holdfast._human_units import some_of
from holdfast.errors import MetadataFormatError, UsageError

INDEX = "model.safetensors.index.json"
"""The file that says which file has which tensor."""
LONE = "model.safetensors"
"""The only file of a model that has no index."""
LONE_SHARD = "shard-00001-model-00001-of-00001.safetensors"
"""The only file of a model whose readers look for shards of torch's, which have no index."""
CHECKSUMS = ".holdfast.safetensors.checksums"
"""The checksums of the files that Holdfast wrote; see ``safetensors_checksums``."""

_INDEX_SUFFIX = ".safetensors.index.json"
_OF_SEVERAL = re.compile(r"(.*?)(\d{1,6})-of-(\d{1,6})\.safetensors")
_SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
_TEMPORARY = re.compile(r"\.([0-9a-f]+)\.\d+\.safetensors\.tmp")
_NAMED_AFTER_SAVE = re.compile(r".+\.([0-9a-f]{12})\.safetensors")
_UNFINISHED = re.compile(
    r"(?:model\.safetensors\.index\.json|\.holdfast\.safetensors\.checksums)\.[0-9a-f]+\.tmp"
)
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?\s*", re.IGNORECASE)


def parse_size(size: int | str) -> int:
    """A number of bytes, given as such or as text: ``"5GB"`` has 5 * 10**9, ``"5GiB"`` 5 * 2**30.

    Raises:
        UsageError: It is neither, or not positive.
    """
    found = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if found:
        power = " KMGT".index(found[2].upper() or " ")
        nbytes = int(float(found[1]) * (1024 if found[3] else 1000) ** power)
    else:
        nbytes = size if isinstance(size, int) and not isinstance(size, bool) else 0
    if nbytes < 1:
        raise UsageError(f'a size is a number of bytes, or text such as "5GB", not {size!r}', found=size)
    return nbytes


def numbered_name(number: int, count: int) -> str:
    """The name of file ``number`` of ``count``, as Hugging Face numbers them: from 1."""
    return f"model-{number:05}-of-{count:05}{SUFFIX}"


def is_shard(name: str) -> bool:
    """Whether ``name`` is one that torch gives to the part of a rank."""
    return _SHARD.fullmatch(name) is not None


def temporary_file(number: int, save_id: str) -> str:
    """The name of a file while it is being written."""
    return f".{save_id[:SAVE_DIGITS]}.{number}{SUFFIX}.tmp"


def name_after_save(name: str, save_id: str) -> str:
    """A name for a file that cannot have ``name`` yet, because another file has it."""
    return f"{name.removesuffix(SUFFIX)}.{save_id[:SAVE_DIGITS]}{SUFFIX}"


def save_of_temporary(name: str) -> str | None:
    """The save that was writing a file, if ``name`` is such a file's."""
    found = _TEMPORARY.fullmatch(name)
    return found[1] if found else None


def save_in_name(name: str) -> str | None:
    """The save that a file is named after, or was written by; None for any other file."""
    found = _NAMED_AFTER_SAVE.fullmatch(name)
    return found[1] if found else save_of_temporary(name)


def is_unfinished(name: str) -> bool:
    """Whether ``name`` is that of an index or of checksums that did not get their name."""
    return _UNFINISHED.fullmatch(name) is not None


def files_by_mapping(
    tensors: Sequence[StoredTensor], mapping: Mapping[str, int | str]
) -> dict[str, list[StoredTensor]]:
    """The tensors of each file, as a mapping from keys to numbers or names of files has it.

    Raises:
        UsageError: The mapping has a key that is no tensor, lacks one, or names what is no safetensors file.
    """
    keys = {tensor.key for tensor in tensors}
    _refuse(sorted(map(str, mapping.keys() - keys)), "fqn_to_index_mapping has, and the state does not")
    _refuse(sorted(keys - mapping.keys()), "the state has, and fqn_to_index_mapping does not")
    places = {key: _file_in(key, place) for key, place in mapping.items()}
    count = max((place for place in places.values() if isinstance(place, int)), default=0)
    names = {
        key: numbered_name(place, count) if isinstance(place, int) else place for key, place in places.items()
    }
    files: dict[str, list[StoredTensor]] = {name: [] for name in sorted(set(names.values()))}
    for tensor in tensors:
        files[names[tensor.key]].append(tensor)
    return files


def _file_in(key: str, place: object) -> int | str:
    """The number or the name of a file, as a mapping of the caller's has it."""
    if isinstance(place, str):
        if is_plain_name(place) and place.endswith(SUFFIX):
            return place
    elif isinstance(place, SupportsIndex) and not isinstance(place, bool) and operator.index(place) > 0:
        return operator.index(place)
    raise UsageError(
        f"{key}: fqn_to_index_mapping puts it into {place!r}: a file is a number from 1 on, or a plain name "
        f"that ends with {SUFFIX}",
        key=key,
        found=place,
    )


def _refuse(keys: list[str], what: str) -> None:
    if keys:
        raise UsageError(
            f"tensors that {what}: {some_of(keys, 8)}. Each tensor needs a file, and each key of the "
            "mapping a tensor.",
            key=keys[0],
        )


def files_by_size(tensors: Sequence[StoredTensor], max_shard_size: int) -> dict[str, list[StoredTensor]]:
    """The tensors of each file, in their order, none larger than a size unless a single tensor is.

    One file has the name of a model's only file.
    """
    shards: list[list[StoredTensor]] = [[]]
    room = max_shard_size
    for tensor in tensors:
        if shards[-1] and tensor.nbytes > room:
            shards.append([])
            room = max_shard_size
        shards[-1].append(tensor)
        room -= tensor.nbytes
    if len(shards) == 1:
        return {LONE: shards[0]}
    return {numbered_name(n, len(shards)): shard for n, shard in enumerate(shards, 1)}


def build_index(weight_map: Mapping[str, str], total_nbytes: int) -> bytes:
    """The content of the index, in the form that Hugging Face gives it."""
    content = {
        "metadata": {"total_size": total_nbytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: Any = None


def parse_index(data: bytes | bytearray, *, path: str) -> dict[str, str]:
    """The file of each tensor.

    Raises:
        MetadataFormatError: It is not an index, or names a file that does not lie beside it.
    """
    try:
        index = msgspec.json.decode(data, type=_Index)
        strings, about = 1 + 2 * len(index.weight_map), index.metadata
        if isinstance(about, dict):
            strings += 1 + len(about) + sum(isinstance(value, str) for value in about.values())
        refuse_doubles(data, strings)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MetadataFormatError(f"{path} is not the index of a model: {error}", path=path) from error
    weight_map = index.weight_map
    for name in set(weight_map.values()):
        if not is_plain_name(name):
            key = next(key for key, of_key in weight_map.items() if of_key == name)
            raise MetadataFormatError(
                f"{key}: {path} says that it is in {name!r}. The files of a model must lie beside the index: "
                "neither in a folder below it nor elsewhere. Move the file there, and name it so.",
                key=key,
                path=path,
                found=name,
            )
    return weight_map


def find_index(names: Collection[str]) -> str | None:
    """The name of the index among the files of a folder: that of a model, or the only one of another kind."""
    if INDEX in names:
        return INDEX
    others = [name for name in names if name.endswith(_INDEX_SUFFIX)]
    return others[0] if len(others) == 1 else None


def missing_numbers(names: Iterable[str]) -> list[str]:
    """Files that must be there, because others are called "i of N"."""
    there = set(names)
    missing: list[str] = []
    for stem, width, count in {
        (found[1], len(found[2]), found[3]) for name in there if (found := _OF_SEVERAL.fullmatch(name))
    }:
        expected = [f"{stem}{number:0{width}}-of-{count}{SUFFIX}" for number in range(1, int(count) + 1)]
        missing += [name for name in expected if name not in there]
    return sorted(missing)
