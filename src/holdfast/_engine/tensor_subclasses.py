"""Tensor subclasses, wherever they stand in a state: replaced by their parts, and filled by a load."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast._contents.nested_state import Path
from holdfast._engine.pickled_tensors import PickledTensors
from holdfast._engine.ports import LoadPlannerPort, SavePlannerPort
from holdfast._engine.state_walk import StateWalk
from holdfast._engine.stateful_objects import ABSENT
from holdfast._plan.dtype_fit import DtypeFit
from holdfast._plan.fit_report import FitReport
from holdfast._plan.flatten import containers_of, flat_key
from holdfast._plan.stored_tree import stored_subclasses
from holdfast._tensors.chunks import PLAIN_TYPES, global_shape, local_chunks
from holdfast._tensors.shard_parts import nothing_of
from holdfast._tensors.tensor_context import torch_constant
from holdfast._tensors.tensor_parts import (
    About,
    TensorParts,
    has_parts,
    is_made_of_parts,
    leaves_of,
    put_together,
    take_apart,
    why_other,
)
from holdfast._traverse import get_element
from holdfast.metadata import STORAGE_TYPES, Metadata, TensorStorageMetadata


def open_subclasses(state: dict[str, Any], planner: SavePlannerPort) -> dict[str, Any]:
    """The state to save: each tensor that is made of others replaced by its parts.

    The state itself where there is none, or if the planner does not give each part a key of its own. Leaves,
    and containers without such a tensor, are shared with it.

    Raises:
        PlanError: A tensor cannot be stored as its parts.
    """

    def replace(value: torch.Tensor, path: Path) -> Any:
        return take_apart(value, flat_key(path)) if is_made_of_parts(value) else value

    return _walk(replace, all_dtensors=False).start(state) if planner.flattens else state


def _walk(replace: Callable[[torch.Tensor, Path], Any], *, all_dtensors: bool) -> StateWalk:
    """The walk to tensors that are made of others; also to DTensors of plain tensors, if all are wanted."""
    # One tensor in two places is the same tensor in both places of the copy.
    replaced: dict[int, tuple[torch.Tensor, Any]] = {}

    def replace_once(value: torch.Tensor, path: Path) -> Any:
        if type(value) is DTensor and not all_dtensors and type(value._local_tensor) in PLAIN_TYPES:  # noqa: SLF001
            return value
        if id(value) in replaced:
            return replaced[id(value)][1]
        made = replace(value, path)
        if isinstance(made, TensorParts):
            replaced[id(value)] = value, made
        return made

    return StateWalk(torch.Tensor, lambda kind: has_parts(kind) or issubclass(kind, DTensor), replace_once)


@dataclass
class _OpenedTensor:
    """A tensor of the state that is loaded.

    Attributes:
        tensor: The tensor.
        key: Its flat key.
        parts: What stands for it.
        is_held: Whether this rank holds anything of it.
    """

    tensor: torch.Tensor
    key: str
    parts: TensorParts
    is_held: bool


class LoadParts:
    """A load into a state with tensor subclasses; on every rank, between reading metadata and planning.

    Args:
        state: The state. It is not changed before :meth:`finish`.
        planner: The planner that will load. It names each value, and says which dtypes may differ.
        metadata: The checkpoint's metadata.
        shapes: The tensors of torch's whose class is not known yet; see ``pickled_shapes``.

    Attributes:
        state: What the planner is to load into; the given one if there is no such tensor in it.
        metadata: What the planner and the storage are to load from; other metadata if there are ``pickled``.
        pickled: Those that torch stored as one item each.

    Raises:
        PlanError: The state has another class, shape, dtype or context than the checkpoint, or only one of
            both has parts. All places are named.
    """

    def __init__(
        self,
        state: dict[str, Any],
        planner: LoadPlannerPort,
        metadata: Metadata,
        shapes: dict[str, list[int]],
    ) -> None:
        self._metadata, self._planner = metadata, planner
        self.pickled = PickledTensors(metadata, shapes)
        containers = containers_of(metadata.planner_data)
        self._stored = {
            key: (path, about)
            for key, path in stored_subclasses(metadata).items()
            if (about := containers[path].tensor) is not None
        }
        self._opened: dict[int, _OpenedTensor] = {}
        self._walk = _walk(self._replace, all_dtensors=bool(self._stored))
        self.state = self._walk.start(state)
        report = FitReport()
        self.pickled.find_rooms(self.state, report)
        self.metadata = self.pickled.as_objects()
        self._check(report)

    def _replace(self, value: torch.Tensor, path: Path) -> Any:
        key = flat_key(path)
        if is_made_of_parts(value):
            if (stand_in := self.pickled.stand_in(value, key)) is not None:
                return stand_in
            parts = take_apart(value, key)
        elif key in self._stored and isinstance(value, DTensor) and not local_chunks(value):
            # A rank that holds nothing may have a plain tensor without elements, whatever the others have.
            parts = TensorParts(about=self._stored[key][1])
        else:
            return value
        is_held = bool(parts)
        if not is_held and isinstance(value, DTensor):
            parts.update(self._without_elements(value, key))
        self._opened[id(parts)] = _OpenedTensor(value, key, parts, is_held)
        return parts

    def _without_elements(self, value: DTensor, key: str) -> dict[str, Any]:
        """The parts of a tensor of which this rank holds nothing: only the checkpoint tells their shapes."""
        below = f"{key}."
        return {
            name.removeprefix(below): nothing_of(value, entry.size, entry.properties.dtype)
            for name, entry in self._metadata.state_dict_metadata.items()
            if name.startswith(below) and isinstance(entry, TensorStorageMetadata)
        }

    def _check(self, report: FitReport) -> None:
        wanted: dict[str, About] = {}
        dtypes = DtypeFit(report, self._planner.cast)
        for opened in self._opened.values():
            _note(opened.key, opened.parts, wanted)
            if self._planner.allows_partial or self._planner.ignores_shapes:
                self._check_parts(opened.key, opened.parts, report)
            if (entry := self._metadata.state_dict_metadata.get(opened.key)) is not None:
                report.add("kind", opened.key, _why_no_parts(entry, opened))
        for key, tensor in self.pickled.targets.items():
            if isinstance(entry := self._metadata.state_dict_metadata[key], TensorStorageMetadata):
                dtypes.check(key, entry.properties.dtype, tensor.dtype)
        for key, (path, about) in self._stored.items():
            if key in wanted:
                if reason := why_other(about, wanted[key]):
                    report.add("kind", key, reason)
                if about["dtype"] != wanted[key]["dtype"]:
                    _check_dtype(key, about["dtype"], wanted[key]["dtype"], dtypes)
            elif isinstance(here := get_element(self.state, path, ABSENT), torch.Tensor) or here is None:
                name = TensorParts(about=about).class_name
                report.add(
                    "kind",
                    key,
                    f"the checkpoint has the parts of a {name} here, the state a {type(here).__name__}; load "
                    "them into a tensor of that class, or into a dict",
                )
        report.raise_if_any()
        dtypes.warn()

    def _check_parts(self, key: str, parts: TensorParts, report: FitReport) -> None:
        """Report a tensor of which the planner would load some parts, and leave others as they are."""
        stored = self._metadata.state_dict_metadata
        leaves = dict(leaves_of(key, parts))
        missing = [name for name in leaves if name not in stored]
        if missing and len(missing) < len(leaves):
            report.add("kind", missing[0], "the checkpoint has other parts of this tensor, but not this one")
        for name, part in leaves.items():
            entry = stored.get(name)
            if isinstance(entry, TensorStorageMetadata) and entry.size != global_shape(part):
                sizes = f"shape {tuple(entry.size)}, the state {tuple(global_shape(part))}"
                report.add("shape", name, f"Size mismatch: the checkpoint has {sizes}, in a part of a tensor")

    def finish(self) -> None:
        """After the load: put what was loaded where it belongs, and tensors where their parts stood."""
        self.pickled.fill_rooms(self.state)
        self._walk.put_back(self._loaded)

    def _loaded(self, before: Any, value: Any) -> Any:
        opened = self._opened.get(id(value))
        if opened is None:
            return self.pickled.fill(before, value)
        return put_together(opened.tensor, opened.parts) if opened.is_held else opened.tensor


def _why_no_parts(entry: STORAGE_TYPES, opened: _OpenedTensor) -> str:
    reason = (
        f"the checkpoint has one value here, the state a {opened.parts.class_name}, which is stored as its "
        f"parts: {', '.join(opened.parts)}"
    )
    if isinstance(entry, TensorStorageMetadata):
        reason += (
            f". That value has shape {tuple(entry.size)}, in {len(entry.chunks)} piece(s); this "
            f"tensor has shape {tuple(opened.tensor.shape)}. If torch saved it, this rank must hold one of "
            "its pieces: load with as many ranks, divided as it was saved"
        )
    return reason


def _check_dtype(key: str, stored: str, wanted: str, dtypes: DtypeFit) -> None:
    try:
        dtype = torch_constant(stored)
    except TypeError as error:
        dtypes.report.add("dtype", key, str(error))
    else:
        dtypes.check(key, dtype, torch_constant(wanted))


def _note(key: str, parts: TensorParts, wanted: dict[str, About]) -> None:
    wanted[key] = parts.about
    for name, part in parts.items():
        if isinstance(part, TensorParts):
            _note(f"{key}.{name}", part, wanted)
