"""The states that are saved and loaded: how they are filled, emptied, and compared after a load.

Values are made again to be compared, piece by piece, so that a check needs no second copy of the state.
"""

import functools
import io
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["KIB", "MIB", "BytesValue", "NormalWeights", "State", "Tensors", "bulk"]

KIB = 1 << 10
MIB = 1 << 20
_PIECE = 16 * MIB  # elements of four bytes: 64 MiB, the most that making and checking values takes


class State(ABC):
    """A state of known values.

    Attributes:
        nbytes: Its size.
        made_by_load: How much of it a load makes anew, besides what ``blank`` has: no extra memory.
    """

    nbytes: int
    made_by_load = 0

    @abstractmethod
    def filled(self) -> dict[str, Any]:
        """A new state with its values, all of its memory touched."""

    @abstractmethod
    def blank(self) -> dict[str, Any]:
        """A new state to load into, all of its memory touched."""

    @abstractmethod
    def is_right(self, key: str, value: Any) -> bool:
        """Whether a loaded value is the one that was saved."""

    def clear(self, state: dict[str, Any]) -> None:
        """Take the values out of a state, so that the next load has something to do."""
        for value in state.values():
            value.zero_()

    def check(self, state: dict[str, Any]) -> None:
        """Raise AssertionError if a value is not the one that was saved."""
        wrong = [key for key, value in state.items() if not self.is_right(key, value)]
        if wrong:
            raise AssertionError(f"{len(wrong)} values were loaded wrong, such as {wrong[0]}")


class Tensors(State):
    """Tensors of random bits: as many as asked for, all of one shape, float32.

    Args:
        count: How many.
        shape: The shape of each.
        transposed: The state holds transposed views of them, which are not contiguous.
    """

    def __init__(self, count: int, shape: tuple[int, ...], *, transposed: bool = False) -> None:
        self.count = count
        self.shape = shape
        self.transposed = transposed
        self.nbytes = count * 4 * torch.Size(shape).numel()

    def filled(self) -> dict[str, torch.Tensor]:  # noqa: D102
        state = self.blank()
        for key, tensor in state.items():
            self._fill(key, tensor)
        return state

    def value(self, key: str) -> torch.Tensor:
        """One tensor of the filled state, made anew."""
        made = torch.empty(self.shape)
        tensor = made.t() if self.transposed else made
        self._fill(key, tensor)
        return tensor

    def _fill(self, key: str, tensor: torch.Tensor) -> None:
        bits = self._bits(tensor)
        for start in range(0, len(bits), _PIECE):
            piece = bits[start : start + _PIECE]
            torch.add(_pattern(len(piece)), _shift(key, start), out=piece)

    def blank(self) -> dict[str, torch.Tensor]:  # noqa: D102
        # torch.zeros leaves the kernel's zero pages untouched; filling takes memory now, not in the load.
        made = [torch.empty(self.shape).zero_() for _ in range(self.count)]
        return {
            f"layers.{number}.weight": tensor.t() if self.transposed else tensor
            for number, tensor in enumerate(made)
        }

    def is_right(self, key: str, value: torch.Tensor) -> bool:  # noqa: D102
        bits = self._bits(value)
        return all(
            torch.equal(_pattern(len(piece)) + _shift(key, start), piece)
            for start in range(0, len(bits), _PIECE)
            for piece in (bits[start : start + _PIECE],)
        )

    def _bits(self, tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.t() if self.transposed else tensor).view(-1).view(torch.int32)


@functools.cache
def _pattern(count: int) -> torch.Tensor:
    seeded = torch.Generator().manual_seed(1)
    return torch.randint(-(1 << 31), (1 << 31) - 1, (count,), dtype=torch.int32, generator=seeded)


def _shift(key: str, start: int) -> int:
    """What tells one piece of one tensor from all others, so that swapped bytes are seen."""
    return int(key.split(".")[1]) * 7919 + start // _PIECE


class NormalWeights(State):
    """bfloat16 tensors of normally distributed values, as weights are: zstd saves a fifth of it."""

    def __init__(self, count: int, elements: int) -> None:
        self.count = count
        self.elements = elements
        self.nbytes = count * elements * 2

    def filled(self) -> dict[str, torch.Tensor]:  # noqa: D102
        return {f"layers.{number}.weight": self._values(number) for number in range(self.count)}

    def blank(self) -> dict[str, torch.Tensor]:  # noqa: D102
        return {
            f"layers.{number}.weight": torch.empty(self.elements, dtype=torch.bfloat16).zero_()
            for number in range(self.count)
        }

    def is_right(self, key: str, value: torch.Tensor) -> bool:  # noqa: D102
        return torch.equal(value, self._values(int(key.split(".")[1])))

    def _values(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.empty(self.elements, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)


class BytesValue(State):
    """One value of type ``bytes``, of whole MiB. A load makes a new one: there is nothing to touch before."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = self.made_by_load = nbytes

    def filled(self) -> dict[str, bytes]:  # noqa: D102
        # Filled in place and handed over without a copy: garbage would count as memory in use.
        stream = io.BytesIO()
        stream.seek(self.nbytes - 1)
        stream.write(b"\0")
        stream.seek(0)
        for piece in self._pieces():
            stream.write(piece)
        return {"blob": stream.getvalue()}

    def blank(self) -> dict[str, bytes]:  # noqa: D102
        return {"blob": b""}

    def is_right(self, key: str, value: bytes) -> bool:  # noqa: ARG002, D102
        view = memoryview(value)
        places = range(0, self.nbytes, MIB)
        return len(value) == self.nbytes and all(
            view[at : at + MIB] == piece for at, piece in zip(places, self._pieces(), strict=True)
        )

    def _pieces(self) -> Iterator[bytes]:
        block = random.Random(1).randbytes(MIB - 8)
        return (number.to_bytes(8, "little") + block for number in range(self.nbytes // MIB))


def bulk(nbytes: int) -> Tensors:
    """About ``nbytes`` in tensors of 64 MiB; of less where that would be fewer than two."""
    count = max(2, nbytes // (64 * MIB))
    return Tensors(count, (max(1, nbytes // count // (4 * KIB)), KIB))
