"""Whether ranks that save a value under one key save the same value, and what becomes of values that differ.

Each rank sends one fingerprint of all its values that are not sharded, and one of all chunks that it holds
together with certain other ranks. Only where these differ, the single fingerprints are compared: ranks may
have other keys, as the stages of a pipeline do, or other values. Small values that differ are kept for each
rank: the plain key has the coordinator's, and the other ranks save theirs under names of their own. A dict on
one rank and a number, or a list, on another differ as well: then all that is in the dict is kept.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from holdfast._engine.ports import Fingerprints, SavePlannerPort
from holdfast._human_units import some_of
from holdfast._plan.kept_values import MOST_VALUES
from holdfast._plan.planner_values import finds_values_itself
from holdfast._plan.replica_fingerprints import UNKNOWN, is_container
from holdfast._plan.write_columns import columns_of
from holdfast._ranks.exchange import Exchange
from holdfast._user_warning import warn_user
from holdfast.errors import PlanError
from holdfast.per_rank import kept_name
from holdfast.planner import SavePlan

_MOST_NAMED = 10
_BUFFERS_OF_BATCH_NORM = ("running_mean", "running_var")

Holders = tuple[int, ...] | None
"""The ranks that should have the same; None for all."""

Groups = dict[str, dict[bytes, list[int]]]
"""For each key the ranks that have it, by the fingerprint of what they have."""


class _Marks(NamedTuple):
    """Fingerprints of a rank: of values that are not sharded, and of chunks that certain ranks have, too."""

    values: dict[str, bytes]
    chunks: dict[str, bytes]


class _Kept(NamedTuple):
    """The answer to a rank if values differ: keys that it must save under other names, with these names.

    The key of a container stands for all that is in it.
    """

    names: dict[str, str]


class _OwnPlan(NamedTuple):
    """A rank's plan with the names that it was told, and how many; without a plan why that cannot be."""

    plan: SavePlan | None
    names: int
    problems: dict[str, str]


class Replicas:
    """This rank's values that others have too, as fingerprints, for one save.

    Args:
        planner: The planner. If it makes no fingerprints, nothing is compared.
        exchange: The ranks.
    """

    def __init__(self, planner: SavePlannerPort, exchange: Exchange) -> None:
        self.exchange = exchange
        self._planner = planner
        self._marks: Fingerprints = {}

    def together(self) -> dict[Holders, bytes]:
        """One fingerprint for all that certain ranks hold; nothing if this rank is alone, or is not told."""
        if self.exchange.world_size == 1:
            return {}
        self._marks = self._planner.fingerprints()
        return {holders: _joined(marks) for holders, marks in self._marks.items()}

    def settle(
        self,
        plans: list[SavePlan],
        make_local_plan: Callable[[], SavePlan],
        make_global_plan: Callable[[list[SavePlan]], list[SavePlan]],
    ) -> SavePlan:
        """Compare value by value; on every rank, if the fingerprints of all together differ.

        Args:
            plans: On the coordinator: what each rank has offered.
            make_local_plan: Makes this rank's offer again, after the planner got other names.
            make_global_plan: On the coordinator: what each rank is to write.

        Returns:
            What this rank is to write.

        Raises:
            CheckpointException: Ranks have different values under one key, and they cannot be kept for each
                rank; also a PlanError.
        """
        different: Groups = {}

        def compare(ranks: list[_Marks]) -> list[SavePlan | _Kept]:
            different.update(_find_differences(ranks))
            if different:
                return [*self._names_of_ranks(different)]
            return [*make_global_plan(plans)]

        def plan_all(offers: list[_OwnPlan]) -> list[SavePlan]:
            _refuse_what_cannot_be_kept(offers, different)
            planned = make_global_plan([offer.plan for offer in offers if offer.plan is not None])
            warn_user(_warning(different, self.exchange.rank))
            return planned

        # Both are still the step "plan" to who reads an error: what fails in them is planning.
        answer = self.exchange.decide("plan", self._by_value, compare)
        if not isinstance(answer, _Kept):
            return answer
        told = answer
        return self.exchange.decide("plan", lambda: self._keep(told, make_local_plan), plan_all)

    def _by_value(self) -> _Marks:
        marks = _Marks({}, {})
        for holders, of_holders in self._marks.items():
            (marks.values if holders is None else marks.chunks).update(of_holders)
        return marks

    def _names_of_ranks(self, different: Groups) -> Iterable[_Kept]:
        """On the coordinator: which ranks save which of their values under which name."""
        names: list[dict[str, str]] = [{} for _ in range(self.exchange.world_size)]
        moved: list[set[str]] = [set() for _ in names]
        has_containers = any(is_container(mark) for groups in different.values() for mark in groups)
        # What a container is in has a shorter key: a rank that keeps it keeps all that is in it.
        for key in sorted(different, key=len) if has_containers else different:
            groups = different[key]
            if has_containers:
                groups = _without_moved(groups, key, moved)
            if not groups:
                continue
            owner = _owner(groups, self.exchange.rank)
            for mark, ranks in groups.items():
                for rank in ranks:
                    if rank != owner and (mark == UNKNOWN or owner not in ranks):
                        names[rank][key] = f"{kept_name(rank, self.exchange.group_size)}.{key}"
                        if is_container(mark):
                            moved[rank].add(key)
        return map(_Kept, names)

    def _keep(self, told: _Kept, make_local_plan: Callable[[], SavePlan]) -> _OwnPlan:
        marks = self._by_value().values
        places = {key: key for key in told.names}
        for place in [key for key in told.names if is_container(marks[key])]:
            places.update({key: place for key in marks if key.startswith(f"{place}.")})
        names = {key: told.names[place] + key[len(place) :] for key, place in places.items()}
        plan, problems = None, self._planner.keep_for_rank(names)
        if not problems:
            plan = make_local_plan()
            problems = self._problems_of(plan, names, marks)
        if problems:
            return _OwnPlan(None, 0, {places.get(key, key): why for key, why in problems.items()})
        return _OwnPlan(plan, len(names), {})

    def _problems_of(
        self, plan: SavePlan, names: Mapping[str, str], marks: Mapping[str, bytes]
    ) -> dict[str, str]:
        """Why a plan does not keep what it should: a subclass may make plans in a way of its own."""
        problems: dict[str, str] = {}
        if not plan.usable:
            # As last time: then it was looked at, with the same names.
            return problems
        numbers = {key: number for number, key in enumerate(columns_of(plan).keys)}
        asks_planner = not finds_values_itself(self._planner.plugin, "resolve_data")
        containers = {key for key in names if is_container(marks[key])}
        for key in numbers if containers else ():
            place = next(
                (key[:end] for end, c in enumerate(key) if c == "." and key[:end] in containers), None
            )
            if place is not None:
                problems[place] = f"{key} is sharded or in a PerRank, and cannot be kept for this rank alone"
        for key, name in names.items():
            if key in containers:
                continue
            if key in numbers or name not in numbers:
                problems[key] = "the planner did not plan it under a name of this rank"
            elif asks_planner:
                try:
                    self._planner.plugin.resolve_data(plan.items[numbers[name]])
                except Exception as error:  # noqa: BLE001 - planners of strangers may raise anything
                    kind = type(error).__name__
                    problems[key] = (
                        f"the planner does not find it under a name of this rank ({kind}: {error})"
                    )
        return problems


def differ(marks: Iterable[Mapping[Holders, bytes]]) -> bool:
    """Whether ranks that should have the same do not, or not under the same keys."""
    first: dict[Holders, bytes] = {}
    return any(
        first.setdefault(holders, mark) != mark for of_rank in marks for holders, mark in of_rank.items()
    )


def _joined(marks: Mapping[str, bytes]) -> bytes:
    joined = hashlib.blake2b(digest_size=16)
    for key in sorted(marks):
        name = key.encode("utf-8", "surrogatepass")
        joined.update(len(name).to_bytes(4, "little") + name + marks[key])
    return joined.digest()


def _find_differences(ranks: Sequence[_Marks]) -> Groups:
    """The values that differ.

    Raises:
        PlanError: Chunks that are replicated differ: one rank's layout says that it has what another has.
    """
    chunks = _different([marks.chunks for marks in ranks])
    if chunks:
        raise _refused(chunks, {})
    return _different([marks.values for marks in ranks])


def _different(ranks: Sequence[Mapping[str, bytes]]) -> Groups:
    seen: Groups = defaultdict(dict)
    for rank, marks in enumerate(ranks):
        for key, mark in marks.items():
            seen[key].setdefault(mark, []).append(rank)
    return {key: groups for key, groups in seen.items() if len(groups) > 1}


def _without_moved(
    groups: Mapping[bytes, list[int]], key: str, moved: Sequence[set[str]]
) -> dict[bytes, list[int]]:
    """The ranks that may save a key under its own name, because they keep no container that it is in."""
    above = [key[:end] for end, letter in enumerate(key) if letter == "."]
    left = {mark: [rank for rank in ranks if moved[rank].isdisjoint(above)] for mark, ranks in groups.items()}
    return {mark: ranks for mark, ranks in left.items() if ranks}


def _owner(groups: Mapping[bytes, list[int]], coordinator: int) -> int:
    """The rank whose value has the plain key: the coordinator, or the first one that has the key."""
    holders = [rank for ranks in groups.values() for rank in ranks]
    return coordinator if coordinator in holders else min(holders)


def _refuse_what_cannot_be_kept(offers: Sequence[_OwnPlan], different: Groups) -> None:
    problems = {key: why for offer in reversed(offers) for key, why in offer.problems.items()}
    if problems:
        raise _refused({key: groups for key, groups in different.items() if key in problems}, problems)
    count = sum(offer.names for offer in offers)
    if count > MOST_VALUES:
        why = (
            f"{count} values would be kept for single ranks, and at most {MOST_VALUES} are in one checkpoint"
        )
        raise _refused(different, {next(iter(different)): why})


def _refused(different: Groups, problems: Mapping[str, str]) -> PlanError:
    lines = [
        f"{key}: ranks {' and '.join(some_of(ranks, 4) for ranks in groups.values())} have different values"
        + (f"; {problems[key]}" if key in problems else "")
        for key, groups in list(different.items())[:_MOST_NAMED]
    ]
    if len(different) > len(lines):
        lines.append(f"and {len(different) - len(lines)} more")
    return PlanError(
        "ranks save different values under one key, and only one could be kept:\n  "
        + "\n  ".join(lines)
        + "\nSave one value per rank with PerRank(value), give each rank a key of its own, or make them "
        "equal first. check_replicas=False keeps any one of them." + _hint(different),
        key=next(iter(different)),
    )


def _warning(different: Groups, coordinator: int) -> str:
    owners = {_owner(groups, coordinator) for groups in different.values()}
    return (
        f"ranks save different values of {some_of(different, 5)}. A load by as many ranks gives each its "
        f"own back, any other that of rank {some_of(sorted(owners), 4)}. PerRank(value) says that you mean "
        "it; otherwise make them equal first." + _hint(different)
    )


def _hint(different: Groups) -> str:
    if not any(key.rpartition(".")[2] in _BUFFERS_OF_BATCH_NORM for key in different):
        return ""
    return " BatchNorm: broadcast the buffers before the save, or use SyncBatchNorm."
