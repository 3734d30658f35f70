"""What ranks do to test state dicts of models that are spread over them."""

import copy
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tests.support.states import assert_same
from tests.training.layouts import Model
from torch import nn
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from holdfast._model_state import rank0_broadcast
from holdfast._parameter_states import ParameterStates
from holdfast.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

FULL = StateDictOptions(full_state_dict=True)
OFFLOADED = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def make_model(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model()


def _ddp(model: Any) -> Any:
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.head = torch.compile(model.head, backend="eager")
    return nn.parallel.DistributedDataParallel(model)


def _fsdp(model: Any) -> Any:
    model.blocks[0] = fully_shard(checkpoint_wrapper(model.blocks[0]), mesh=init_device_mesh("cpu", (4,)))
    return torch.compile(fully_shard(model, mesh=init_device_mesh("cpu", (4,))), backend="eager")


def _hsdp(model: Any) -> Any:
    return fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))


def _split(model: Any, mesh: Any) -> Any:
    block = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model.blocks[0], mesh, block)
    return model


def _tp(model: Any) -> Any:
    return _split(model, init_device_mesh("cpu", (4,)))


def _tp_fsdp(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    return fully_shard(_split(model, mesh["tensor"]), mesh=mesh["data"])


LAYOUTS: dict[str, Callable[[Any], nn.Module]] = {
    "ddp": _ddp,
    "fsdp": _fsdp,
    "hsdp": _hsdp,
    "tp": _tp,
    "tp_fsdp": _tp_fsdp,
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step whose result does not depend on the layout: every element has a gradient of its own."""
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5 + 0.1
    optimizer.step()
    optimizer.zero_grad()


def local_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All values of this rank, copied."""

    def local(value: Any) -> Any:
        return (value.to_local() if isinstance(value, DTensor) else value).detach().clone()

    named = dict(model.named_parameters())
    states = {name: optimizer.state[p] for name, p in named.items() if p in optimizer.state}
    return {
        "parameters": {name: local(p) for name, p in named.items()},
        "states": {name: {key: local(one) for key, one in state.items()} for name, state in states.items()},
        "groups": copy.deepcopy(
            [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        ),
    }


class Factored(torch.optim.AdamW):
    """Keeps a sum over rows as well, and a value of another dtype than the parameter's."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for parameter, state in self.state.items():
            if parameter.dim() == 2:
                state["rows"] = torch.zeros_like(parameter).sum(0)
                if isinstance(parameter, DTensor):
                    state["rows"] = state["rows"].redistribute(
                        placements=[Replicate()] * parameter.device_mesh.ndim
                    )
                state["exact"] = parameter.detach().double() / 3


def check_layouts(layouts: list[str]) -> None:
    """The state of a sharded model is that of the whole model, and comes back into the same layout."""
    torch.set_num_threads(1)
    plain = make_model(1)
    optimizer = Factored(plain.parameters(), lr=0.01)
    step(plain, optimizer)
    states = get_state_dict(plain, optimizer)
    for layout in layouts:
        build = LAYOUTS[layout]
        model = build(make_model(1))
        mine = Factored(model.parameters(), lr=0.01)
        check_reading(model, mine, *states)
        for seed, options in ((2, FULL), (3, FROM_RANK0)):
            check_setting(build(make_model(seed)), *copy.deepcopy(states), options)
        check_sharded(build(make_model(4)), model, mine)


def check_reading(
    model: nn.Module, optimizer: torch.optim.Optimizer, model_state: Any, optimizer_state: Any
) -> None:
    fresh = get_optimizer_state_dict(model, optimizer)["state"]
    assert isinstance(fresh, ParameterStates)
    assert fresh == {}
    assert list(fresh.parameters) == [name for name, _ in make_model(1).named_parameters()]
    step(model, optimizer)
    before = local_bytes(model, optimizer)
    found = get_state_dict(model, optimizer, options=FULL)
    get_state_dict(model, optimizer)
    at_rank0 = get_state_dict(model, optimizer, options=OFFLOADED)
    assert_same(local_bytes(model, optimizer), before)
    assert_same(dict(found[0]), dict(model_state))
    assert_same(dict(found[1]["state"]), dict(optimizer_state["state"]))
    assert found[1]["param_groups"] == optimizer_state["param_groups"]
    if dist.get_rank() == 0:
        assert_same(dict(at_rank0[0]), dict(found[0]))
        assert_same(dict(at_rank0[1]["state"]), dict(found[1]["state"]))
    else:
        assert at_rank0 == ({}, {})


def check_setting(
    model: nn.Module, model_state: Any, optimizer_state: Any, options: StateDictOptions
) -> None:
    """Whole values, on every rank or only on rank 0, into a model and an optimizer that have others."""
    optimizer = Factored(model.parameters(), lr=7.0)
    is_sender = options is FULL or dist.get_rank() == 0
    set_state_dict(
        model,
        optimizer,
        model_state_dict=model_state if is_sender else {},
        optim_state_dict=optimizer_state if is_sender else None,
        options=options,
    )
    found = get_state_dict(model, optimizer, options=FULL)
    assert_same(dict(found[0]), dict(model_state))
    assert_same(dict(found[1]["state"]), dict(optimizer_state["state"]))
    assert found[1]["param_groups"] == optimizer_state["param_groups"]
    for parameter, state in optimizer.state.items():
        for key in state.keys() - {"step"}:
            assert type(state[key]) is type(parameter.detach()), key
    step(model, optimizer)


def check_sharded(model: nn.Module, source: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    fresh = Factored(model.parameters(), lr=7.0)
    states = get_state_dict(source, optimizer)
    set_state_dict(model, fresh, model_state_dict=states[0], optim_state_dict=states[1])
    assert_same(local_bytes(model, fresh), local_bytes(source, optimizer))


def check_broadcasts() -> None:
    """Models without memory, ranks with different models, and state dicts that do not fit."""
    torch.set_num_threads(1)
    rank0_broadcast.WINDOW = 2048  # small ones together, large ones alone
    whole = make_model(1).double()
    state = dict(whole.state_dict()) if dist.get_rank() == 0 else {}
    with torch.device("meta"):
        model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (4,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    set_model_state_dict(model, state, options=FROM_RANK0)
    assert_same(dict(get_state_dict(model, (), options=FULL)[0]), dict(whole.state_dict()))
    assert not any(one.is_meta for one in model.parameters())

    stage = nn.ModuleDict({str(dist.get_rank()): nn.Linear(3, 2)})
    shapes = {"weight": (2, 3), "bias": (2,)}
    all_stages = {f"{n}.{name}": torch.full(shapes[name], float(n)) for n in range(4) for name in shapes}
    set_model_state_dict(stage, all_stages if dist.get_rank() == 0 else None, options=FROM_RANK0)
    assert all(bool((one == dist.get_rank()).all()) for one in stage.parameters())

    expect_everywhere("Unexpected key", stage, {**all_stages, "other": torch.ones(3)})
    expect_everywhere("Missing key", nn.ModuleDict({"0": nn.Linear(3, 2), "9": nn.Linear(1, 1)}), all_stages)
    check_sharded_tensors()
    optimizer = torch.optim.Adam(stage.parameters())
    try:
        set_optimizer_state_dict(stage, optimizer, {"state": {}, "param_groups": []}, options=FROM_RANK0)
    except RuntimeError as error:
        assert "Missing optimizer state" in str(error)  # noqa: PT017
    else:
        raise AssertionError("it was accepted")


def check_sharded_tensors() -> None:
    """ShardedTensors, which hooks put into state dicts, are gathered, whatever the sizes of their shards."""
    rank, rows = dist.get_rank(), (3, 0, 2, 1)
    whole = torch.arange(12.0).view(6, 2)
    begin = sum(rows[:rank])
    shards = [
        Shard.from_tensor_and_offsets(whole[begin : begin + rows[rank]].clone(), [begin, 0], rank)
        for _ in range(min(1, rows[rank]))
    ]
    sharded = init_from_local_shards(shards, 6, 2)
    model: Any = nn.Linear(1, 1, bias=False)
    model._register_state_dict_hook(lambda _, state, *__: state.update(weight=sharded))
    found, _ = get_state_dict(model, (), options=FULL)
    assert_same(found["weight"], whole)
    at_rank0, _ = get_state_dict(model, (), options=OFFLOADED)
    assert at_rank0.keys() == ({"weight"} if rank == 0 else set())


def expect_everywhere(
    text: str, model: nn.Module, state: dict[str, Any], optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Set what rank 0 has, which must fail on every rank."""
    given = state if dist.get_rank() == 0 else {}
    try:
        if optimizer is None:
            set_model_state_dict(model, given, options=FROM_RANK0)
        else:
            set_optimizer_state_dict(model, optimizer, given, options=FROM_RANK0)
    except Exception as error:
        assert re.search(text, str(error)), error  # noqa: PT017
    else:
        raise AssertionError(f"no {text}")
