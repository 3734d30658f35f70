"""From the plans of all ranks to the safetensors files of a model: which tensor lies where in which file."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from holdfast._format.safetensors import ATTRIBUTES, StoredTensor, build_header, knows_dtype, place_tensors
from holdfast._format.safetensors_checksums import IDENTITY, IDENTITY_DIGITS
from holdfast._format.safetensors_index import (
    INDEX,
    LONE,
    LONE_SHARD,
    files_by_mapping,
    files_by_size,
    is_shard,
    name_after_save,
    numbered_name,
    temporary_file,
)
from holdfast._hf_utils import (
    CUSTOM_METADATA_KEY,
    DCP_VERSION_KEY,
    FORMAT_KEY,
    FORMAT_VALUE,
    HF_DCP_VERSION,
    SAVED_OFFSETS_KEY,
)
from holdfast._plan.dtype_fit import FLOAT4, cast_floats
from holdfast._plan.write_columns import BYTE_IO, Form, columns_of
from holdfast.errors import InvalidPlanError, UsageError
from holdfast.per_rank import kept_key
from holdfast.planner import SavePlan

_MOST_NAMED = 8


@dataclass(frozen=True)
class ExportOptions:
    """How a model becomes files.

    Attributes:
        mapping: The number or the name of the file of each tensor; None to leave it to ``max_shard_size``.
        max_shard_size: The most bytes of tensors in a file; None for one file.
        dtype: What floating-point tensors are cast to; None to keep them.
        rename: What a key is called in the files; None to keep it.
        lone_name: The name of the file if neither ``mapping`` nor ``max_shard_size`` is given.
        as_shards: Headers say where each tensor begins in the whole one, as those of torch's shards do:
            programs that join shards ask for it.
    """

    mapping: Mapping[str, int | str] | None = None
    max_shard_size: int | None = None
    dtype: torch.dtype | None = None
    rename: Callable[[str], str] | None = None
    lone_name: str = numbered_name(1, 1)
    as_shards: bool = False

    def new_name(self, key: str) -> str:
        """What a key is called in the files."""
        name = key if self.rename is None else self.rename(key)
        if name == ATTRIBUTES:
            raise UsageError(
                f"{key}: {name!r} cannot be the name of a tensor in safetensors files, which keep their "
                "own notes under it. Rename it, or leave it out.",
                key=key,
            )
        return name

    def stored_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that tensors of a dtype have in the files."""
        return cast_floats(dtype, self.dtype)


class ExportFile(NamedTuple):
    """One file of a model that is being written.

    Attributes:
        name: What it will be called.
        temporary: What it is called while it is written.
        tensors: Its tensors, in the order in which they lie.
        nbytes: Its size.
        attributes: What its header says besides.
    """

    name: str
    temporary: str
    tensors: list[StoredTensor]
    nbytes: int
    attributes: Mapping[str, str]

    @classmethod
    def of(
        cls, name: str, temporary: str, tensors: Sequence[StoredTensor], attributes: Mapping[str, str]
    ) -> "ExportFile":
        """The file, its tensors at their places."""
        return cls(name, temporary, *place_tensors(tensors, attributes), attributes)

    def header(self, identity: str | None = None) -> bytes:
        """Its header, once the content is known that the identity stands for. All have the same length."""
        more = {} if identity is None else {IDENTITY: identity}
        return build_header(self.tensors, {**self.attributes, **more})


@dataclass(frozen=True)
class ModelLayout:
    """The files of a model.

    Attributes:
        files: The files.
        names: The name of each key of the plans in the files.
        in_place: Whether ranks write at any place of the files, which get their names later. If not, each
            file is written from front to back by one rank, under the name that it keeps.
    """

    files: list[ExportFile]
    names: dict[str, str]
    in_place: bool = True

    @property
    def has_index(self) -> bool:
        """Whether an index must say where tensors are: not for a model's only file under its usual name."""
        return [file.name for file in self.files] not in ([LONE], [LONE_SHARD])

    def weight_map(self, names: Mapping[str, str] | None = None) -> dict[str, str]:
        """The file of each tensor, under other names if these are given."""
        return {
            tensor.key: (names or {}).get(file.name, file.name)
            for file in self.files
            for tensor in file.tensors
        }

    def total_nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for file in self.files for tensor in file.tensors)


@dataclass(frozen=True)
class RankPlaces:
    """Where the tensors of one rank's plan lie: what the coordinator tells the rank.

    Attributes:
        files: The files that the rank writes to.
        places: For each key the number of its file here, where its tensor begins there, and the name of the
            dtype that it is stored with.
    """

    files: list[str] = field(default_factory=list)
    places: dict[str, tuple[int, int, str]] = field(default_factory=dict)

    def __contains__(self, name: object) -> bool:
        raise UsageError(
            f"plan.storage_data has no {name!r}, as that of torch's writer has: the ranks write the files "
            "of a model together, and the writer's own write_data knows where. Call it, or write a "
            "StorageWriter of your own."
        )

    __getitem__ = get = __contains__


def refuse_what_is_no_tensor(plan: SavePlan) -> None:
    """Raise InvalidPlanError if a rank's plan has values that safetensors files cannot keep."""
    columns = columns_of(plan)
    objects = [key for key, kind in zip(columns.keys, columns.kinds, strict=True) if kind == BYTE_IO]
    _refuse(objects, "not a tensor, and safetensors files keep only tensors. Leave it out of the state")
    kept = {key: told.key for key in columns.keys if (told := kept_key(key))}
    _refuse(
        list(kept.values()),
        f"ranks have different values (such as {next(iter(kept), None)}), and safetensors files keep one for "
        "all of them. Make them equal before the save (BatchNorm: broadcast the buffers), or pass "
        "check_replicas=False to keep those of any rank",
    )
    forms = zip(columns.keys, columns.form, strict=True)
    unknown = {key: columns.forms[form] for key, form in forms if not _is_known(columns.forms[form])}
    if unknown:
        first = next(iter(unknown.values()))
        what = f"a tensor of {first.properties[0]} and shape {list(first.size)}"
        _refuse(list(unknown), f"safetensors files cannot keep {what}. Cast it, or leave it out")


def _refuse(keys: Sequence[str], what: str) -> None:
    if keys:
        more = f" (and {len(keys) - 1} more: {', '.join(keys[1:_MOST_NAMED])})" if len(keys) > 1 else ""
        raise InvalidPlanError(f"{keys[0]}{more}: {what}. Nothing was written.", key=keys[0])


def _is_known(form: Form) -> bool:
    dtype = form.properties[0]
    # The format counts the numbers of a packed pair, so a lone pair needs a dimension.
    return knows_dtype(_name_of(dtype)) and (dtype != FLOAT4 or len(form.size) > 0)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def lay_out(
    plans: Sequence[SavePlan], order: Sequence[str], options: ExportOptions, save_id: str
) -> ModelLayout:
    """On the coordinator: the files of the model that all ranks write together.

    Args:
        plans: What each rank writes.
        order: Keys in the order in which they come in the files; others follow as the plans have them.
        options: How the model becomes files.
        save_id: The save.

    Raises:
        InvalidPlanError: A plan has what safetensors files cannot keep.
        UsageError: Two keys get the same name, or the mapping does not fit.
    """
    found: dict[str, StoredTensor] = {}
    for plan in plans:
        refuse_what_is_no_tensor(plan)
        columns = columns_of(plan)
        for key, form in zip(columns.keys, columns.form, strict=True):
            if key not in found:
                like = columns.forms[form]
                found[key] = stored_tensor(key, like.properties[0], like.size, options)
    keys = [key for key in dict.fromkeys(order) if key in found]
    keys = list(dict.fromkeys([*keys, *found]))
    names = {key: found[key].key for key in keys}
    _refuse_doubles(names)
    files = [
        ExportFile.of(name, temporary_file(number, save_id), tensors, _attributes(tensors, options))
        for number, (name, tensors) in enumerate(_files([found[key] for key in keys], options).items())
    ]
    return ModelLayout(files, names)


def stored_tensor(key: str, dtype: torch.dtype, size: Sequence[int], options: ExportOptions) -> StoredTensor:
    """A tensor of the state as it is in the files, without its place."""
    return StoredTensor(options.new_name(key), _name_of(options.stored_dtype(dtype)), tuple(size))


def _refuse_doubles(names: Mapping[str, str]) -> None:
    first: dict[str, str] = {}
    for key, name in names.items():
        if first.setdefault(name, key) != key:
            raise UsageError(f"rename gives {first[name]} and {key} the same name {name!r}", key=key)


def _files(tensors: Sequence[StoredTensor], options: ExportOptions) -> dict[str, list[StoredTensor]]:
    if options.mapping is not None:
        return files_by_mapping(tensors, options.mapping)
    if options.max_shard_size is not None:
        return files_by_size(tensors, options.max_shard_size)
    return {options.lone_name: list(tensors)}


def for_streams(layout: ModelLayout, taken: Collection[str], save_id: str) -> ModelLayout:
    """The layout for a store whose files cannot be renamed: they are written under their last names."""
    names = {file.name: file.name for file in layout.files}
    has_others = INDEX in taken or any(map(is_shard, taken))
    if not names.keys().isdisjoint(taken) or (not layout.has_index and has_others):
        names = {name: name_after_save(name, save_id) for name in names}
    files = [file._replace(temporary=names[file.name]) for file in layout.files]
    return replace(layout, files=files, in_place=False)


def _attributes(tensors: Sequence[StoredTensor], options: ExportOptions) -> dict[str, str]:
    parts = {tensor.key: [0] * len(tensor.shape) for tensor in tensors} if options.as_shards else None
    return {**header_attributes(parts), IDENTITY: "0" * IDENTITY_DIGITS}


def header_attributes(offsets: Mapping[str, Sequence[int]] | None) -> dict[str, str]:
    """What torch's header of a file says besides its tensors; of parts, where they begin."""
    attributes = {FORMAT_KEY: FORMAT_VALUE}
    if offsets is not None:
        parts = {key: {SAVED_OFFSETS_KEY: list(offset)} for key, offset in offsets.items()}
        attributes |= {DCP_VERSION_KEY: str(HF_DCP_VERSION), CUSTOM_METADATA_KEY: json.dumps(parts)}
    return attributes


def places_of_rank(layout: ModelLayout, plan: SavePlan) -> RankPlaces:
    """Where the tensors of a rank's plan lie."""
    by_name = {tensor.key: (file, tensor) for file in layout.files for tensor in file.tensors}
    told = RankPlaces()
    numbers: dict[str, int] = {}
    for key in columns_of(plan).keys:
        file, tensor = by_name[layout.names[key]]
        number = numbers.setdefault(file.temporary, len(numbers))
        told.places[key] = number, tensor.begin, tensor.dtype
    told.files.extend(numbers)
    return told
