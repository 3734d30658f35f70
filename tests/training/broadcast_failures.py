"""What ranks do to test that a broadcast of state dicts fails on all of them, or on none."""

from typing import Any, cast

import torch
import torch.distributed as dist
from tests.support.states import assert_same
from tests.support.subclasses import BlockScaled, RowScaled, assert_same_parts
from tests.training.model_states import FROM_RANK0, expect_everywhere
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from holdfast.state_dict import get_model_state_dict, set_model_state_dict, set_optimizer_state_dict


class Extra(nn.Module):
    """Keeps a value with tensors in it beside its parameters."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Picky(torch.Tensor):
    """Cannot be written into."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.copy_:
            raise NotImplementedError("no copy into a Picky")
        return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def _fail(*_: Any) -> None:
    raise RuntimeError("a hook that fails")


class OnlyRank0:
    """A value that other ranks cannot unpickle."""

    def __reduce__(self) -> Any:
        return _load_on_rank_0, ()


def _load_on_rank_0() -> OnlyRank0:
    if dist.get_rank():
        raise ImportError("knows_only_rank_0")
    return OnlyRank0()


class Weights(nn.Module):
    """A parameter that is made of other tensors, and one whose class can hardly do anything."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.scaled = nn.Parameter(BlockScaled.random(4, 8, seed=seed), requires_grad=False)
        self.register_buffer("rows", RowScaled(torch.full((3, 2), seed), torch.full((3,), float(seed))))


def check_tensors_made_of_others(rank: int) -> None:
    """They are sent as their parts, into memory that is there and into models without any."""
    sent = Weights(seed=1)
    state = get_model_state_dict(sent) if rank == 0 else {}
    with torch.device("meta"):
        empty: Any = nn.Module()
        empty.scaled = nn.Parameter(torch.empty(4, 8), requires_grad=False)
        empty.register_buffer("rows", torch.empty(3, 2))
    set_model_state_dict(empty, state, options=FROM_RANK0)
    assert_same_parts(empty.scaled.data, sent.scaled.data)
    assert_same_parts(empty.rows, sent.rows)

    filled: Any = Weights(seed=2)
    del filled.rows
    state = {"scaled": sent.scaled} if rank == 0 else {}
    set_model_state_dict(filled, state, options=FROM_RANK0)
    assert_same_parts(filled.scaled.data, sent.scaled.data)

    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    moments = {"weight": {"momentum_buffer": sent.scaled.data}, "bias": {"momentum_buffer": torch.ones(4)}}
    whole = {"state": moments, "param_groups": [{"params": ["weight", "bias"], "lr": 0.5}]}
    set_optimizer_state_dict(model, optimizer, whole if rank == 0 else {}, options=FROM_RANK0)
    assert_same_parts(optimizer.state[model.weight]["momentum_buffer"], sent.scaled.data)
    assert optimizer.state[model.bias]["momentum_buffer"].all()

    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    expect_everywhere("cannot divide a .*BlockScaled", model, whole, optimizer)
    assert not optimizer.state


def check_failing_broadcasts() -> None:
    """What rank 0 cannot send changes nothing anywhere; what one rank cannot take raises on all ranks."""
    rank = dist.get_rank()
    scaled = BlockScaled.random(4, 8)
    nameless = cast("Any", type("Nameless", (BlockScaled,), {})).random(4, 8)  # no rank finds it by name
    unsendable: dict[str, Any] = {
        "Can't (pickle|get) local object": {"weight": torch.ones(3), "_extra_state": lambda: 0},
        "Nameless cannot be rebuilt": {"weight": torch.ones(3), "_extra_state": nameless},
        "on the meta device": {"weight": torch.ones(3, device="meta"), "_extra_state": 0},
        "knows_only_rank_0": {"weight": torch.ones(3), "_extra_state": OnlyRank0()},
    }
    for text, state in unsendable.items():
        model = Extra("before")
        expect_everywhere(text, model, state)
        assert model.extra == "before"
        assert not model.weight.any()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        groups = [{"params": ["weight"], "lr": 0.5}]
        whole = {"state": {"weight": {"momentum_buffer": state["_extra_state"]}}, "param_groups": groups}
        if text != "on the meta device":
            expect_everywhere(text, model, whole, optimizer)
            assert optimizer.param_groups[0]["lr"] == 0.1

    model = Extra({"scale": torch.zeros(2)})
    nested = {"scale": torch.ones(2), "also": [torch.ones(1), 5]}
    state = {"weight": torch.ones(3), "_extra_state": nested} if rank == 0 else {}
    set_model_state_dict(model, state, options=FROM_RANK0)
    assert_same(model.extra, nested)
    assert model.weight.all()

    scaled.table[:] = torch.arange(16.0)
    nested = {"scaled": scaled, "also": torch.ones(1)}
    state = {"weight": torch.ones(3), "_extra_state": nested} if rank == 0 else {}
    set_model_state_dict(model, state, options=FROM_RANK0)
    assert_same_parts(model.extra["scaled"], scaled)
    check_tensors_made_of_others(rank)

    refused: Any = Extra(0)
    if rank == 1:
        refused.weight = nn.Parameter(torch.zeros(3).as_subclass(Picky))
    fitting = {"weight": torch.ones(3), "_extra_state": 1}
    expect_everywhere("no copy into a Picky", refused, fitting)

    if rank == 1:
        refused._register_state_dict_hook(_fail)
    expect_everywhere("a hook that fails", refused, fitting)
