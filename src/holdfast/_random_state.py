"""The states of the random number generators that a training script draws from."""

import hashlib
import random
import sys
from typing import Any

import torch

__all__ = ["get_random_state", "resize_random_state", "set_random_state"]


def get_random_state() -> tuple[tuple[str, Any], ...]:
    """The state of each generator by name: Python's, torch's, numpy's if it is in use, the accelerator's.

    It is a tuple so that it is saved as one value: which generators there are depends on the machine.
    """
    states: list[tuple[str, Any]] = [("python", random.getstate()), ("torch", torch.get_rng_state())]
    if "numpy" in sys.modules:
        states.append(("numpy", sys.modules["numpy"].random.get_state()))
    accelerator = _accelerator()
    if accelerator is not None:
        states.append((accelerator, torch.get_device_module(accelerator).get_rng_state()))
    return tuple(states)


def set_random_state(states: tuple[tuple[str, Any], ...]) -> None:
    """Set each generator that has a state here and exists on this machine."""
    for name, state in states:
        if name == "python":
            random.setstate(state)
        elif name == "torch":
            torch.set_rng_state(state)
        elif name == "numpy":
            # Imported now if it was not yet: the program drew from it before.
            from numpy import random as numpy_random  # noqa: PLC0415

            numpy_random.set_state(state)
        elif name == _accelerator():
            torch.get_device_module(name).set_rng_state(state)


def resize_random_state(values: list[Any], rank: int, world_size: int) -> Any:  # noqa: ARG001
    """The state of one rank, given those of all ranks that saved: its own, or a new one made from rank 0's.

    A new one depends on the state of rank 0 and on the rank alone, so that every resume gives the same.
    """
    if rank < len(values):
        return values[rank]
    first = dict(values[0])
    seed = int.from_bytes(
        hashlib.blake2b(f"{rank} {first['torch'].tolist()}".encode(), digest_size=4).digest(), "big"
    )
    made: dict[str, Any] = {
        "python": random.Random(seed).getstate(),  # noqa: S311 - not for secrets
        "torch": torch.Generator().manual_seed(seed).get_state(),
    }
    if "numpy" in first:
        from numpy.random import RandomState  # noqa: PLC0415

        made["numpy"] = RandomState(seed).get_state()
    accelerator = _accelerator()
    if accelerator is not None and accelerator in first:
        made[accelerator] = torch.Generator(accelerator).manual_seed(seed).get_state()
    return tuple(made.items())


def _accelerator() -> str | None:
    """The kind of the accelerator of this process. Not tested with one."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    return None if device is None else device.type
