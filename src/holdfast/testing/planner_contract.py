"""The suite that every pair of a SavePlanner and a LoadPlanner must pass."""

import abc
import collections
import copy
import io
import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from holdfast.metadata import Metadata, TensorStorageMetadata
from holdfast.planner import LoadItemType, LoadPlanner, SavePlan, SavePlanner

__all__ = ["PlannerContract"]


class PlannerContract(abc.ABC):
    """Subclass it, make your planners and a state, and let pytest collect the subclass.

    The state must be made of tensors and of what your planners can save besides; ``blank_state`` is the
    same structure with other values, to be loaded into. Override ``flat`` if your planners take more
    than a flat dict of tensors and bytes.
    """

    @abc.abstractmethod
    def make_save_planner(self) -> SavePlanner:
        """A new planner for saving."""

    @abc.abstractmethod
    def make_load_planner(self) -> LoadPlanner:
        """A new planner for loading."""

    def make_state(self) -> dict[str, Any]:
        """The state to save."""
        return {"weight": torch.arange(12.0).view(3, 4), "step": torch.tensor(7), "note": b"hello"}

    def blank_state(self) -> dict[str, Any]:
        """A state of the same form to load into, with other values."""
        return {"weight": torch.zeros(3, 4), "step": torch.tensor(0), "note": b""}

    def flat(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state's leaves by name, for comparison."""
        return state

    def plan(self, states: Sequence[dict[str, Any]]) -> tuple[list[SavePlanner], list[SavePlan], Metadata]:
        """Plan a save of ``states``, one a rank, up to the finished plans."""
        planners = [self.make_save_planner() for _ in states]
        for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
            planner.set_up_planner(state, None, rank == 0)
        local_plans = [planner.create_local_plan() for planner in planners]
        global_plans, metadata = planners[0].create_global_plan(local_plans)
        finished = [p.finish_plan(plan) for p, plan in zip(planners, global_plans, strict=True)]
        return planners, finished, metadata

    def test_each_rank_gets_a_plan_and_each_item_is_in_one(self) -> None:
        """A value that several ranks hold is written once."""
        states = [self.make_state() for _ in range(3)]
        _, finished, _ = self.plan(states)
        assert len(finished) == len(states)
        written = collections.Counter(item.index for plan in finished for item in plan.items)
        assert set(written.values()) == {1}

    def test_the_metadata_lists_what_is_written(self) -> None:
        """Every planned item is in the metadata, and every chunk of the metadata is planned."""
        _, finished, metadata = self.plan([self.make_state()])
        items = [item for plan in finished for item in plan.items]
        assert {item.index.fqn for item in items} == set(metadata.state_dict_metadata)
        planned = {(i.index.fqn, i.tensor_data.chunk.offsets) for i in items if i.tensor_data is not None}
        listed = {
            (key, chunk.offsets)
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
            for chunk in entry.chunks
        }
        assert planned == listed

    def test_data_matches_the_plan(self) -> None:
        """``resolve_data`` gives the planned shape and dtype, or a stream at its beginning."""
        (planner,), (plan,), _ = self.plan([self.make_state()])
        for item in plan.items:
            data = planner.resolve_data(item)
            if item.tensor_data is None:
                assert isinstance(data, io.BytesIO)
                assert data.tell() == 0
            else:
                assert isinstance(data, torch.Tensor)
                assert data.size() == item.tensor_data.chunk.sizes
                assert data.dtype == item.tensor_data.properties.dtype

    def test_data_is_the_same_each_time_and_from_any_thread(self) -> None:
        """``resolve_data`` may be called again, and from several threads at once."""
        (planner,), (plan,), _ = self.plan([self.make_state()])
        once = [_raw(planner.resolve_data(item)) for item in plan.items]
        with ThreadPoolExecutor(4) as pool:
            for _ in range(3):
                again = list(pool.map(lambda item: _raw(planner.resolve_data(item)), plan.items))
                assert again == once

    def test_plans_travel_between_ranks(self) -> None:
        """Local plans, global plans and metadata survive pickle, and hold no tensors' data."""
        planner = self.make_save_planner()
        planner.set_up_planner(self.make_state(), None, True)  # noqa: FBT003
        local = planner.create_local_plan()
        assert pickle.loads(pickle.dumps(local)) == local
        plans, metadata = planner.create_global_plan([local])
        assert pickle.loads(pickle.dumps((plans, metadata))) == (plans, metadata)

    def test_planning_changes_nothing(self) -> None:
        """The state is the same after planning a save, and after planning a load."""
        state = self.make_state()
        before = copy.deepcopy(self.flat(state))
        _, _, metadata = self.plan([state])
        _assert_same(self.flat(state), before)
        blank = self.blank_state()
        before = copy.deepcopy(self.flat(blank))
        loader = self.make_load_planner()
        loader.set_up_planner(blank, metadata, True)  # noqa: FBT003
        loader.create_local_plan()
        _assert_same(self.flat(blank), before)

    def test_what_was_saved_is_loaded(self) -> None:
        """Data that goes directly from one planner to the other restores the state."""
        state, loaded = self.make_state(), self.blank_state()
        (saver,), (save_plan,), metadata = self.plan([state])
        data = {item.index: saver.resolve_data(item) for item in save_plan.items}
        # An item of a whole tensor may be named with or without its offset of zeros.
        by_key = {item.index.fqn: saver.resolve_data(item) for item in save_plan.items}

        loader = self.make_load_planner()
        loader.set_up_planner(loaded, metadata, True)  # noqa: FBT003
        plan = loader.finish_plan(loader.create_global_plan([loader.create_local_plan()])[0])
        for item in plan.items:
            value = data.get(item.storage_index, by_key[item.storage_index.fqn])
            if item.type == LoadItemType.BYTE_IO:
                assert isinstance(value, io.BytesIO)
                loader.load_bytes(item, io.BytesIO(value.getvalue()))
                continue
            assert isinstance(value, torch.Tensor)
            target = loader.resolve_tensor(item)
            assert target.size() == item.lengths
            for dimension, offset in enumerate(item.storage_offsets):
                value = value.narrow(dimension, offset, item.lengths[dimension])
            target.copy_(value)
            loader.commit_tensor(item, target)
        _assert_same(self.flat(loaded), self.flat(state))

    def test_a_missing_key_raises_before_anything_changes(self) -> None:
        """Planning a load finds keys that the checkpoint does not have."""
        _, _, metadata = self.plan([self.make_state()])
        wanted = {**self.blank_state(), "nobody saved this": torch.zeros(2)}
        loader = self.make_load_planner()
        with pytest.raises(Exception, match="nobody saved this"):  # noqa: PT012 - either call may raise
            loader.set_up_planner(wanted, metadata, True)  # noqa: FBT003
            loader.create_local_plan()


def _raw(data: torch.Tensor | io.BytesIO) -> bytes:
    if isinstance(data, torch.Tensor):
        return data.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return data.getvalue()


def _assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for key, value in left.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, right[key]), key
        else:
            assert value == right[key], key
