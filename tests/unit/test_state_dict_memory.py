"""State dicts of many parameters need no more memory than the dicts themselves, but for a few percent."""

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

pytestmark = pytest.mark.slow

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def memory_of(call: Callable[[], Any]) -> tuple[int, int]:
    """The most memory that Python had during a call, and what is left of it while the result is held."""
    call()  # what is only needed once
    gc.collect()
    tracemalloc.start()
    try:
        result = call()
        left, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    del result
    return peak, left


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(5000)])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def test_reading_needs_no_second_copy_of_names_and_states(
    trained: tuple[nn.Module, torch.optim.Optimizer],
) -> None:
    model, optimizer = trained
    wrapped: Any = torch.compile(model)
    most_of_result = {
        "model": (1.04, lambda: get_model_state_dict(model)),
        "whole model": (1.04, lambda: get_model_state_dict(model, options=WHOLE)),
        # The keys with the wrapper's prefix are there before the names.
        "wrapped model": (1.12, lambda: get_model_state_dict(wrapped)),
        "optimizer": (1.02, lambda: get_optimizer_state_dict(model, optimizer)),
        "whole optimizer": (1.02, lambda: get_optimizer_state_dict(model, optimizer, options=WHOLE)),
        "optimizer of a wrapped model": (1.02, lambda: get_optimizer_state_dict(wrapped, optimizer)),
        "flat": (1.02, lambda: get_optimizer_state_dict(model, optimizer, options=FLAT)),
    }
    for kind, (most, read) in most_of_result.items():
        peak, result = memory_of(read)
        assert peak <= most * result, f"{kind}: {peak} bytes for a result of {result}"


def test_setting_needs_less_memory_than_what_is_set(trained: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    model, optimizer = trained
    state = get_model_state_dict(model)
    optimizer_state = get_optimizer_state_dict(model, optimizer)
    flat = get_optimizer_state_dict(model, optimizer, options=FLAT)
    _, size = memory_of(lambda: get_model_state_dict(model))
    peak, left = memory_of(lambda: set_model_state_dict(model, state))
    assert peak - left < size
    _, size = memory_of(lambda: get_optimizer_state_dict(model, optimizer))
    peak, left = memory_of(lambda: set_optimizer_state_dict(model, optimizer, optimizer_state))
    # torch's load_state_dict and the numbers that it wants take these, whoever calls it.
    assert peak <= 1.12 * size
    assert peak - left < size / 2
    _, size = memory_of(lambda: get_optimizer_state_dict(model, optimizer, options=FLAT))
    peak, left = memory_of(lambda: set_optimizer_state_dict(model, optimizer, flat))
    assert peak < size / 2
