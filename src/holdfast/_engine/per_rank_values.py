"""PerRank values, wherever they stand in a state: named by rank, and given back what is loaded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast._contents.nested_state import Path
from holdfast._engine.meta_modules import MetaTensors
from holdfast._engine.optimizer_room import OptimizerRooms
from holdfast._engine.ports import LoadPlannerPort, SavePlannerPort
from holdfast._engine.rule_results import put_result
from holdfast._engine.saved_by_rank import has_value, saved_places
from holdfast._engine.state_walk import StateWalk
from holdfast._engine.stateful_objects import ABSENT, OpenedState, open_states, return_states
from holdfast._plan.flatten import flat_key
from holdfast._traverse import get_element
from holdfast.default_planner import EmptyStateDictLoadPlanner
from holdfast.errors import PlanError, UsageError
from holdfast.metadata import Metadata
from holdfast.per_rank import PerRank, rank_key, rank_name


def split_by_rank(
    state: dict[str, Any], planner: SavePlannerPort, *, rank: int, world_size: int
) -> dict[str, Any]:
    """The state to save: each PerRank replaced by a dict with this rank's value under this rank's name.

    The state itself where there is none. Leaves, and containers without a PerRank, are shared with it;
    Stateful objects in a PerRank are replaced by their state.

    Raises:
        UsageError: A PerRank stands in another, or the planner does not flatten states.
    """

    def replace(owner: "PerRank[Any]", path: Path) -> dict[str, Any]:
        opened, _ = _open_value(owner, path, planner)
        return {rank_name(rank, world_size): opened["value"]}

    return _walk(replace).start(state)


def _open_value(
    owner: "PerRank[Any]", path: Path, planner: SavePlannerPort | LoadPlannerPort
) -> tuple[dict[Any, Any], list[OpenedState]]:
    key = flat_key(path)
    if not planner.flattens:
        raise UsageError(
            f"{key}: a PerRank needs a planner that flattens the state, for only so has each rank's value a "
            "name of its own. Pass flatten_state_dict=True.",
            key=key,
        )
    opened, found = open_states({"value": owner.value})

    def refuse(_: "PerRank[Any]", inner: Path) -> Any:
        raise UsageError(f"{key}: a PerRank stands in a PerRank, at {flat_key(inner)}", key=key)

    _walk(refuse).open(opened["value"], path)
    return opened, found


def _walk(replace: Callable[["PerRank[Any]", Path], Any]) -> StateWalk:
    return StateWalk(PerRank, lambda _: True, replace)


@dataclass
class _Place:
    """A PerRank of the state that is loaded.

    Attributes:
        opened: Its value under "value", with the Stateful objects that are in ``found`` replaced.
        slots: The dict in its place: names of ranks with the values that are to be filled. None if the value
            itself is in its place, because the checkpoint has one for all ranks there.
        on_meta: Those of ``found`` that have tensors on the meta device.
        saved_by: How many ranks saved, if it is to be made by its rule; else None.
    """

    owner: "PerRank[Any]"
    path: Path
    opened: dict[Any, Any]
    found: list[OpenedState]
    slots: dict[str, Any] | None
    on_meta: MetaTensors
    saved_by: int | None = None

    def rooms(self, rank: int, world_size: int, *, allow_partial: bool) -> OptimizerRooms:
        """Room for the state of its optimizers, where the checkpoint has this rank's value."""
        name = () if self.slots is None else (rank_name(rank, world_size),)
        node = self.opened["value"]
        for step in reversed((*self.path, *name)):
            node = {step: node}
        return OptimizerRooms(node, self.found, allow_partial=allow_partial)


class LoadByRank:
    """A load into a state with PerRank values; on every rank, between reading metadata and planning.

    Where the checkpoint has one value for all ranks, a PerRank gets that.

    Args:
        state: The state, with its Stateful objects opened. It is not changed before :meth:`finish`.
        planner: The planner that will load.
        metadata: The checkpoint's metadata.
        rank: The rank that loads.
        world_size: How many ranks load.

    Attributes:
        state: What the planner is to load into; the given one if there is no PerRank in it.

    Raises:
        PlanError: The checkpoint has values of another number of ranks and there is no rule, or the state has
            no PerRank where the checkpoint has values of ranks. All places are named.
        UsageError: As ``split_by_rank``.
    """

    def __init__(
        self,
        state: dict[str, Any],
        planner: LoadPlannerPort,
        metadata: Metadata,
        *,
        rank: int,
        world_size: int,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._metadata, self._planner = metadata, planner
        self._saved = saved_places(metadata)
        self._places: list[_Place] = []
        self._optimizers: list[OptimizerRooms] = []
        self._walk = _walk(self._replace)
        self.state = self._walk.start(state)
        problems = [*self._problems(), *self._plain_places()]
        if problems:
            lines = "\n  ".join(f"{key}: {problem}" for key, problem in problems)
            raise PlanError(
                f"the checkpoint does not fit the ranks (nothing was changed):\n  {lines}", key=problems[0][0]
            )
        self._make_room()
        self._make_room_for_optimizers()

    def _replace(self, owner: "PerRank[Any]", path: Path) -> Any:
        opened, found = _open_value(owner, path, self._planner)
        slots: dict[str, Any] | None = {rank_name(self.rank, self.world_size): opened["value"]}
        if flat_key(path) not in self._saved and has_value(flat_key(path), self._metadata):
            slots = None
        self._places.append(_Place(owner, path, opened, found, slots, MetaTensors(found)))
        return opened["value"] if slots is None else slots

    def _problems(self) -> list[tuple[str, str]]:
        """The PerRanks that cannot be loaded, each with the reason. Also notes which ones need their rule."""
        problems = []
        for place in self._places:
            key = flat_key(place.path)
            saved = self._saved.get(key)
            # Where nothing at all is there, the planner says whether that is an error.
            if saved is None or saved.world_sizes == {self.world_size}:
                continue
            problem = saved.why_not_resized(place.owner, self.world_size)
            place.saved_by = max(saved.world_sizes)
            if problem is not None:
                problems.append((key, problem))
        return problems

    def _plain_places(self) -> list[tuple[str, str]]:
        """The places that were saved with a PerRank, and at which the state has something else."""
        problems = []
        wanted = {flat_key(place.path) for place in self._places}
        for key, saved in self._saved.items():
            here = get_element(self.state, saved.path, ABSENT) if key not in wanted else ABSENT
            if here is ABSENT or (isinstance(here, Mapping) and _has_names(here)):
                continue
            count = max(saved.world_sizes)
            problems.append((key, f"each of {count} ranks saved its own value here; load it into a PerRank"))
        return problems

    def _make_room(self) -> None:
        """For the places that need their rule: room for the values of all ranks that saved."""
        resized = [(place, count) for place in self._places if (count := place.saved_by) is not None]
        if not resized:
            return
        names = {
            f"{flat_key(place.path)}.{rank_name(rank, count)}"
            for place, count in resized
            for rank in range(count)
        }
        built: dict[str, Any] = {}
        EmptyStateDictLoadPlanner(names).set_up_planner(built, self._metadata)
        for place, count in resized:
            values = get_element(built, place.path)
            if not isinstance(values, Mapping):
                raise PlanError(
                    f"{flat_key(place.path)}: the checkpoint does not say how its ranks' values are nested",
                    key=flat_key(place.path),
                )
            assert place.slots is not None
            place.slots.clear()
            place.slots.update({name: values[name] for name in (rank_name(r, count) for r in range(count))})

    def _make_room_for_optimizers(self) -> None:
        """For optimizers that have not taken a step: room for the state that this rank saved."""
        for place in self._places:
            # A rule gets what the ranks saved, with all that there is.
            if place.saved_by is None:
                allow_partial = self._planner.allows_partial
                rooms = place.rooms(self.rank, self.world_size, allow_partial=allow_partial)
                self._optimizers.append(rooms)
                rooms.make(self._metadata)

    def undo(self) -> None:
        """After a load that failed: take the room for optimizers away again."""
        for rooms in self._optimizers:
            rooms.undo()

    def finish(self) -> None:
        """After the load: put what was loaded where it belongs, applying the rules.

        Raises:
            ShapeMismatchError, DtypeMismatchError, PlanError: A rule returned something else than a tensor
                of the shape and dtype of the one that it is for; or the groups of an optimizer are others.
        """
        for place in self._places:
            place.on_meta.materialise()
        for rooms in self._optimizers:
            rooms.settle()
        for place in self._places:
            if place.saved_by is not None:
                assert place.owner.resize is not None
                assert place.slots is not None
                values = list(place.slots.values())
                made = place.owner.resize(values, self.rank, self.world_size)
                place.owner.value = put_result(place.owner.value, made, flat_key(place.path))
                continue
            holder = {"value": place.owner.value}
            if place.slots is None:
                place.opened["value"] = get_element(self.state, place.path)
            else:
                place.opened["value"] = place.slots[rank_name(self.rank, self.world_size)]
            return_states(holder, place.opened, place.found)
            place.owner.value = holder["value"]
        self._walk.put_back(lambda before, value: before if isinstance(before, PerRank) else value)


def _has_names(values: Mapping[Any, Any]) -> bool:
    """Whether a dict asks for ranks' values by their names, or for nothing."""
    return not values or any(rank_key(str(name)) is not None for name in values)
