"""Checkpoints from one format into another: ours, torch's, ``torch.save`` and safetensors."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, get_args

import torch

from holdfast._contents.absence import refuse_folder_of_run
from holdfast._conversion.copy_planner import CopyPlanner
from holdfast._conversion.entry_stream import EntryStream
from holdfast._conversion.selection import Selection, refuse_objects, refuse_subclasses, select
from holdfast._conversion.sources import Format, Source, open_source, open_target
from holdfast._conversion.torch_save_target import TorchSaveTarget
from holdfast._format.names import shows_a_checkpoint
from holdfast._format.safetensors import SUFFIX
from holdfast._io.places import local_path, open_file_place, open_place
from holdfast._io.progress import ProgressTracker
from holdfast._io.store import ByteStore
from holdfast._plan.dtype_fit import float_dtype
from holdfast._plan.key_renaming import Rename
from holdfast.errors import CheckpointExistsError, UsageError
from holdfast.filesystem import FileSystemWriter
from holdfast.hf_storage import HuggingFaceStorageWriter
from holdfast.progress_display import ProgressOption, tracking
from holdfast.state_dict_saver import save

__all__ = ["ConversionResult", "convert"]

_FILE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_SHARD_SIZE = "5GB"


@dataclass(frozen=True)
class ConversionResult:
    """The result of a conversion.

    Attributes:
        source_format: What the source was: "holdfast", "torch", "torch_save" or "safetensors".
        target_format: What the target is.
        tensors: How many tensors were written.
        objects: How many other values.
        nbytes: The bytes of the tensors, as written.
    """

    source_format: Format
    target_format: Format
    tensors: int
    objects: int
    nbytes: int


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: Format | None = None,
    keys: str | Sequence[str] | None = None,
    rename: Rename | None = None,
    dtype: torch.dtype | str | None = None,
    overwrite: bool = False,
    max_shard_size: int | str | None = None,
    allow_pickle: bool = False,
    safe_globals: Iterable[Callable[..., Any] | type] = (),
    progress: ProgressOption = None,
) -> ConversionResult:
    """Convert a checkpoint into another format, from and to any place; called by one process.

    The format of the source is found out. About 100 MiB are in memory at a time, whatever the size; up to
    450 MiB if torch wrote the source, or if it is compressed; values that are not tensors come on top. When
    this returns, the target is complete, on stable storage, and every byte of it was read back and compared
    with what was read of the source. When it raises, or is killed, what was at the target is still there,
    whole. If only the comparison at the end fails, the target is there: then do not use it. A file of
    ``torch.save`` in a folder is compared before it takes its name.

    Nothing that the source names is run, unless it is allowed.

    What each format holds:

    - ``"holdfast"``, which is also ``"torch"``: everything. Stock torch reads what Holdfast writes.
    - ``"torch_save"``: everything but tensors of classes of their own. Tensors that are the same tensor in a
      source of this format stay so. Chunks are joined. Other values are decoded, as by ``load``.
    - ``"safetensors"``: tensors. The path of a tensor becomes its name, joined by dots. Other values are
      refused by their keys; select tensors with ``keys``.

    Args:
        source: A checkpoint's folder, a file of ``torch.save``, a folder with safetensors files, or one such
            file: a path or a URL.
        target: Where to: a folder, or a file for ``"torch_save"``: a path or a URL.
        to: The format of the target. None for ``"torch_save"`` if the target ends with .pt, .pth, .bin or
            .ckpt.
        keys: Which values are taken: patterns of flat keys, with ``*``, ``?`` and ``[...]``. A pattern also
            takes what is below the names that it matches. None for all.
        rename: New names: a function of the flat key; or a dict with new names for keys, and for whatever is
            below them. The empty name takes the step away: with ``{"model": ""}``, ``model.weight`` becomes
            ``weight``.
        dtype: Cast floating-point tensors to this dtype.
        overwrite: Whether what is at the target may be replaced.
        max_shard_size: For safetensors: the most bytes of tensors in a file, as a number or as text such as
            ``"5GB"``, the default.
        allow_pickle: As for :func:`load`. Runs whatever code the source holds.
        safe_globals: As for :func:`load`.
        progress: As for :func:`save`: first of what is written, then of what is compared.

    Returns:
        What was converted.

    Raises:
        UsageError: The arguments make no sense together.
        CheckpointNotFoundError: There is nothing to convert.
        CheckpointExistsError: The target exists, and ``overwrite`` is not given; or it has another format.
        MissingKeyError: A pattern of ``keys`` matches nothing, or a name in ``rename`` does.
        PlanError: The target cannot hold a value; the error names its key.
        UnsafeMetadataError: A value needs code to be read; the error names its key.
        IntegrityError: The source is damaged, or the target is not what was written.

    Example:
        >>> holdfast.convert("run/step-1000", "export", to="safetensors", keys="model", rename={"model": ""})
    """
    _check_places(source, target)
    chosen = _format_of(target, to)
    globals_ = tuple(safe_globals)
    if max_shard_size is not None and chosen != "safetensors":
        raise UsageError("max_shard_size is for to='safetensors'; other targets are not divided")
    opened = open_source(source, allow_pickle=allow_pickle, safe_globals=globals_)
    selection = select(
        opened,
        keys=_patterns(keys),
        rename=rename,
        dtype=float_dtype(dtype),
        with_kept_values=chosen in {"holdfast", "torch"},
    )
    stream = EntryStream(opened, selection)
    if chosen == "torch_save":
        refuse_subclasses(selection, "a file of torch.save")
        file = local_path(target)
        with _no_empty_folder_left(None if file is None else os.path.dirname(file)):
            _to_torch_save(stream, target, overwrite, allow_pickle, globals_, progress)
    else:
        if chosen == "safetensors":
            refuse_objects(selection, "safetensors")
            refuse_subclasses(selection, "safetensors")
        _refuse_others(target, chosen, overwrite=overwrite)
        with _no_empty_folder_left(local_path(target)):
            _save(stream, target, chosen, overwrite, max_shard_size, progress)
        _check(stream, open_target(target, chosen), progress)
    return _result(opened, chosen, selection)


@contextmanager
def _no_empty_folder_left(folder: str | None) -> Iterator[None]:
    """If this fails, remove the folder, and those above it, if they were made for it and are empty."""
    made = list[str]()
    while folder and not os.path.lexists(folder):
        made.append(folder)
        folder = os.path.dirname(folder.rstrip("/"))
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for empty in made:
                os.rmdir(empty)
        raise


def _save(
    stream: EntryStream,
    target: str | os.PathLike[str],
    to: Format,
    overwrite: bool,
    max_shard_size: int | str | None,
    progress: ProgressOption,
) -> None:
    """Write by a save whose planner reads the source."""
    if to == "safetensors":
        writer: FileSystemWriter = HuggingFaceStorageWriter(
            target, max_shard_size=_SHARD_SIZE if max_shard_size is None else max_shard_size
        )
    else:
        writer = FileSystemWriter(target, overwrite=overwrite)
    planner = CopyPlanner(stream, in_pieces=to == "safetensors")
    save({}, storage_writer=writer, planner=planner, no_dist=True, progress=progress)


def _to_torch_save(
    stream: EntryStream,
    target: str | os.PathLike[str],
    overwrite: bool,
    allow_pickle: bool,
    safe_globals: tuple[Callable[..., Any] | type, ...],
    progress: ProgressOption,
) -> None:
    store, name = open_file_place(target)

    def check(place: ByteStore, found: str) -> None:
        written = open_target(target, "torch_save", file=(place, found), safe_globals=safe_globals)
        _check(stream, written, progress)

    file = TorchSaveTarget(
        store, name, overwrite=overwrite, allow_pickle=allow_pickle, safe_globals=safe_globals
    )
    with tracking(progress, f"writing {os.fspath(target)}") as shown:
        tracker = shown or ProgressTracker()
        tracker.begin(stream.selection.nbytes)
        file.write(stream, tracker, check)


def _check(stream: EntryStream, written: Source, progress: ProgressOption) -> None:
    with tracking(progress, f"checking {written.url}") as tracker:
        stream.check(written, tracker or ProgressTracker())


def _result(source: Source, to: Format, selection: Selection) -> ConversionResult:
    tensors = sum(1 for _ in selection.tensors())
    return ConversionResult(source.format, to, tensors, len(selection.entries) - tensors, selection.nbytes)


def _format_of(target: str | os.PathLike[str], to: str | None) -> Format:
    path = os.fspath(target).rstrip("/")
    known: tuple[Format, ...] = get_args(Format)
    if to is None and path.endswith(_FILE_SUFFIXES):
        return "torch_save"
    if to in {None, "safetensors"} and path.endswith(SUFFIX):
        raise UsageError(
            f"{path}: a model is a folder: name the folder that {SUFFIX} files are to be in, and pass "
            "to='safetensors', or --to safetensors",
            path=path,
        )
    if to is None:
        raise UsageError(
            f"{path}: which format? Pass to=, or --to, with one of {', '.join(known)}", path=path
        )
    if to not in known:
        raise UsageError(f"to is one of {', '.join(map(repr, known))}, not {to!r}", found=to)
    return next(name for name in known if name == to)


def _patterns(keys: Any) -> list[str] | None:
    if keys is None:
        return None
    patterns = [keys] if isinstance(keys, str) else keys
    if not isinstance(patterns, Iterable) or not all(isinstance(pattern, str) for pattern in patterns):
        raise UsageError(f"keys is a pattern of keys, or a list of patterns, not {keys!r}", found=keys)
    return list(patterns)


def _check_places(source: Any, target: Any) -> None:
    for name, place in (("source", source), ("target", target)):
        if not isinstance(place, str | os.PathLike) or not os.fspath(place):
            raise UsageError(f"{name} is a path or a URL, not {place!r}", found=place)

    def plain(place: str | os.PathLike[str]) -> str:
        folder = local_path(place)
        return os.fspath(place).rstrip("/") if folder is None else os.path.realpath(folder)

    if plain(source) == plain(target):
        raise UsageError(f"{os.fspath(target)}: source and target are the same place", path=os.fspath(target))


def _refuse_others(target: str | os.PathLike[str], to: Format, *, overwrite: bool) -> None:
    """Raise if the target has something that is not replaced, beside which readers would not find the new.

    Checkpoints and models have files of different names, so neither replaces the other.
    """
    store = open_place(target)
    there = list(filter(shows_a_checkpoint, store.names() if store.can_list else ()))
    models = [name for name in there if name.endswith(SUFFIX)]
    checkpoints = [name for name in there if name not in models]
    same, others = (models, checkpoints) if to == "safetensors" else (checkpoints, models)
    if others:
        raise CheckpointExistsError(
            f"{store.url} has {min(others)}, of another format than {to}, which would stay beside the new "
            "files. Name another folder, or remove it.",
            path=store.url,
        )
    refuse_folder_of_run(store)
    if same and not overwrite:
        raise CheckpointExistsError(
            f"{store.url} has {min(same)} already; overwrite=True, or --overwrite, replaces it",
            path=store.url,
        )
