"""Whether a checkpoint fits a state in every key, shape, dtype and kind; and the plan that fills it."""

import logging
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from holdfast._format.description import OBJECT
from holdfast._human_units import some_of
from holdfast._plan.container_fit import ContainerFit
from holdfast._plan.dtype_fit import DtypeFit
from holdfast._plan.fit_report import FitReport
from holdfast._plan.flatten import paths_of
from holdfast._plan.load_coverage import is_of_another_rank, own_places
from holdfast._plan.metadata_entries import description_of, directory_of, dtypes_of, is_one_whole_chunk
from holdfast._plan.read_columns import ReadColumns, ReadItems
from holdfast._plan.reshard import Resharding
from holdfast._plan.tied_tensors import also_filled
from holdfast._tensors.checkpointable import describes_itself
from holdfast._tensors.chunks import dtype_of, global_shape, is_tensor, local_parts, refuse_undescribable
from holdfast._tensors.host import has_its_memory
from holdfast._tensors.layout_table import Layout, LayoutTable
from holdfast.errors import DtypeMismatchError, PlanError, ShapeMismatchError
from holdfast.metadata import Metadata
from holdfast.per_rank import KEPT
from holdfast.planner import LoadPlan

logger = logging.getLogger(__name__)
_MOST_NAMED = 20
_MOST_EXAMPLES = 3
_NUMBER_OF_RANK = re.compile(r"(?<=rank)[-_.]?\d+")


def plan_load(
    state: dict[str, Any],
    metadata: Metadata,
    *,
    allow_missing: bool,
    refuse_unexpected: bool | None = False,
    cast: bool | None = None,
    ignore_mismatched_sizes: bool = False,
    paths: Mapping[str, Any] = MappingProxyType({}),
) -> LoadPlan:
    """Plan what one rank reads to fill a flat state, after checking that everything fits.

    Args:
        state: The flat state.
        metadata: The checkpoint's metadata.
        allow_missing: As ``allow_partial_load`` of ``DefaultLoadPlanner``.
        refuse_unexpected: As ``strict`` of ``DefaultLoadPlanner``.
        cast: As for ``DefaultLoadPlanner``.
        ignore_mismatched_sizes: As for ``DefaultLoadPlanner``.
        paths: The structure of the flat state, if it was nested: with it, values in the place of containers
            are found, and the reverse.

    Raises:
        PlanError: Something does not fit; it lists everything that does not, over all keys.
        InvalidPlanError: The checkpoint lacks a part of a tensor.
    """
    columns, layouts = ReadColumns(directory_of(metadata)), LayoutTable()
    directory, stored_dtypes = columns.directory, dtypes_of(metadata)
    report, containers = FitReport(), ContainerFit(paths, metadata)
    dtypes = DtypeFit(report, cast)
    resharded, mismatched = list[tuple[str, int, Layout | None]](), dict[str, str]()
    missing = list[str]()
    for key, number in _take_whole(state, metadata, columns, report):
        value = state[key]
        if number is None:
            missing.append(key)
            continue
        size, dtype = torch.Size(directory.shape(number)), stored_dtypes[directory.properties[number]]
        layout = layouts.of_plain(value, dtype)
        if layout is not None and value.shape == size:
            resharded.append((key, number, layout))
            continue
        if ignore_mismatched_sizes and is_tensor(value) and global_shape(value) != size:
            mismatched[key] = f"{key} has {tuple(size)} in the checkpoint, {tuple(global_shape(value))} here"
            continue
        _check_tensor(key, size, dtype, value, dtypes, layouts)
        resharded.append((key, number, None))
    # Models whose weights are tied are stored with one of the names.
    filled = also_filled(state, state.keys() - {*missing, *mismatched}) if missing else set[str]()
    for key in missing:
        why = containers.why_missing(key, state[key])
        if why or not (allow_missing or key in filled):
            report.add_missing(key, why)
    for key in containers.unfilled():
        report.add("kind", key, "the checkpoint has a value here, the state an empty container")
    _check_unexpected(state, metadata, report, refuse=refuse_unexpected)
    resharding = Resharding(columns, layouts)
    for key, number, layout in resharded:
        resharding.fill_tensor(key, number, state[key], layout)
    _warn_of_mismatched(mismatched)
    dtypes.warn()
    return LoadPlan(ReadItems(columns))


def _take_whole(
    state: dict[str, Any], metadata: Metadata, columns: ReadColumns, report: FitReport
) -> list[tuple[str, int | None]]:
    """Add to a plan the objects, and the tensors that are the same on both sides.

    Returns:
        All other keys, each with its number in the checkpoint, or None if it is not there.
    """
    directory, dtypes = columns.directory, dtypes_of(metadata)
    numbers, kinds, strided = directory.numbers, directory.kinds, torch.strided
    shape_at, shapes, row = directory.shape_at, directory.shapes, directory.row
    properties, size = directory.properties, torch.Size
    all_are_whole = description_of(metadata).all_are_whole()
    add_key, add_row = columns.keys.append, columns.rows.append
    others: list[tuple[str, int | None]] = []
    for key, value in state.items():
        number = numbers.get(key)
        if number is None:
            others.append((key, None))
            continue
        if kinds[number] == OBJECT:
            if is_tensor(value) and not describes_itself(value):
                report.add("kind", key, "the checkpoint has an object here, the state a tensor")
        # What nearly all of 100,000 tensors are: one chunk, and the same on both sides.
        elif not (
            type(value) is torch.Tensor
            and value.shape == size(shapes[shape_at[number] : shape_at[number + 1]])
            and value.dtype is dtypes[properties[number]]
            and value.layout is strided
            and value.is_contiguous()
            and has_its_memory(value)
            and (all_are_whole or is_one_whole_chunk(directory, number))
        ):
            others.append((key, number))
            continue
        add_key(key)
        add_row(row[number])
    return others


def _check_unexpected(
    state: dict[str, Any], metadata: Metadata, report: FitReport, *, refuse: bool | None
) -> None:
    """Raise everything that was reported, with what the state lacks if that is refused; or warn of it."""
    unexpected = _unexpected(state, metadata) if refuse is not False else []
    for key in unexpected if refuse else ():
        report.add("unexpected", key, "is in the checkpoint, but not in the state; strict=False ignores it")
    report.raise_if_any(lambda: unexpected or _unexpected(state, metadata))
    if refuse is None:
        _warn_of_forgotten(unexpected, state, metadata)


def _warn_of_mismatched(mismatched: Mapping[str, str]) -> None:
    if mismatched:
        logger.warning(
            "%d tensors are left as they are, because their shapes differ: %s",
            *(len(mismatched), some_of([*mismatched.values()], _MOST_NAMED, "; ")),
        )


def _check_tensor(
    key: str, size: torch.Size, dtype: torch.dtype, value: Any, dtypes: DtypeFit, layouts: LayoutTable
) -> None:
    report = dtypes.report
    if not is_tensor(value):
        problem = f"the checkpoint has a tensor here, the state a value of type {type(value).__name__}"
        report.add("kind", key, problem)
        return
    shape = global_shape(value)
    if shape != size:
        problem = f"Size mismatch: the checkpoint has shape {tuple(size)}, the state {tuple(shape)}"
        report.add("shape", key, problem)
    try:
        memory = local_parts(value)
        refuse_undescribable(key, value, layouts)
    except PlanError as error:
        report.add("kind", key, str(error).removeprefix(f"{key}: "))
        return
    if not all(map(has_its_memory, memory)):
        problem = "the storage of the state's tensor was freed or resized: there is no memory to load into"
        report.add("kind", key, problem)
    if any(map(_repeats_memory, memory)):
        report.add("kind", key, "several elements of the state's tensor share one place in memory")
    for wanted in {part.dtype for part in memory} if describes_itself(value) else {dtype_of(value)}:
        dtypes.check(key, dtype, wanted)


def check_replacement(key: str, value: Any, loaded: Any) -> None:
    """Check a tensor that was stored whole, as sparse and quantized ones are, and replaces one of the state.

    Raises:
        PlanError: Its shape, dtype or layout is another one.
    """
    if not (isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor)):
        return
    facts: list[tuple[type[PlanError], str, Any, Any]] = [
        (ShapeMismatchError, "shape", _whole_shape(loaded), _whole_shape(value)),
        (DtypeMismatchError, "dtype", loaded.dtype, value.dtype),
        (PlanError, "layout", loaded.layout, value.layout),
    ]
    for error, what, found, expected in facts:
        if found != expected:
            raise error(
                f"{key}: the checkpoint has the {what} {found}, the state {expected}. Give the state such a "
                "tensor, or leave the key out of it.",
                key=key,
                expected=expected,
                found=found,
            )


def _whole_shape(tensor: torch.Tensor) -> Any:
    """The shape of a tensor, or of each part of a nested one, which has no shape that can be compared."""
    return [tuple(part.shape) for part in tensor.unbind()] if tensor.is_nested else tuple(tensor.shape)


def _repeats_memory(tensor: torch.Tensor) -> bool:
    """Whether two elements share a place in memory, as those of an expanded tensor do."""
    if tensor.is_contiguous() or not tensor.numel():
        return False
    by_step = sorted((step, n) for step, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    reach = 1
    for step, length in by_step:
        if step < reach:
            break
        reach += (length - 1) * step
    else:
        return False
    # What torch.as_strided made may still have a place for each element.
    places = torch.zeros(1, dtype=torch.int64, device="cpu")
    for step, length in by_step:
        places = (places[:, None] + step * torch.arange(length, device="cpu")).flatten()
    return bool((places.sort().values.diff() == 0).any())


def _unexpected(state: dict[str, Any], metadata: Metadata) -> list[str]:
    """The keys of the checkpoint that the state does not have, and that were not saved for another rank."""
    if (
        len(state) == len(metadata.state_dict_metadata)
        and state.keys() == metadata.state_dict_metadata.keys()
    ):
        return []
    # What was kept for single ranks is only for those who ask for it by name.
    unexpected = [k for k in metadata.state_dict_metadata if k not in state and not k.startswith(KEPT)]
    # What other ranks saved for themselves is not for this one, where it loads its own.
    own = own_places(state)
    return [key for key in unexpected if not is_of_another_rank(key, own)] if own else unexpected


def _warn_of_forgotten(unexpected: list[str], state: dict[str, Any], metadata: Metadata) -> None:
    if not unexpected:
        return
    # A program that loads only its model from a checkpoint of model and optimizer means it. A key below
    # a container that is being loaded was more likely forgotten: a momentum buffer, a buffer of a module.
    paths = paths_of(metadata.planner_data)
    roots = {_root(key, paths) for key in state}
    forgotten = [key for key in unexpected if _root(key, paths) in roots and len(paths.get(key, ())) > 1]
    # Programs keep values of each rank under names such as ``dp_rank_1``, and each rank loads its own.
    of_ranks = {name for key in state if (name := _NUMBER_OF_RANK.sub("", key)) != key}
    forgotten = [key for key in forgotten if not of_ranks or _NUMBER_OF_RANK.sub("", key) not in of_ranks]
    if forgotten:
        logger.warning(
            "%d value(s) of the checkpoint are not loaded, because the state does not have them: %s "
            "(strict=True makes this an error, strict=False hides it)",
            *(len(forgotten), some_of(forgotten, _MOST_EXAMPLES)),
        )


def _root(key: str, paths: dict[str, Any]) -> str:
    path = paths.get(key)
    return str(path[0]) if path else key.split(".", 1)[0]
