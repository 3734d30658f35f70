"""Small checkpoints in an object store, told apart by one number."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

import holdfast
from holdfast._io.places import open_bucket
from holdfast._io.store import ByteStore

ONCE = {"timeout": "20s", "read_timeout": "3s", "connect_timeout": "3s"}
"""Timeouts for servers that are told to stall."""


def state_of(value: float, nbytes: int = 4096) -> dict[str, Any]:
    """A state whose every part tells the number."""
    return {"a": torch.full((nbytes // 4,), value), "nested": {"text": f"value {value}"}}


def save(place: str, value: float, *, nbytes: int = 4096, **options: Any) -> None:
    """Save it."""
    holdfast.save(state_of(value, nbytes), storage_writer=holdfast.ObjectStoreWriter(place, **options))


def load(place: str, nbytes: int = 4096, **options: Any) -> float:
    """The number of the checkpoint in a place, all of which must agree."""
    state = state_of(0.0, nbytes)
    holdfast.load(state, storage_reader=holdfast.ObjectStoreReader(place, **options))
    value = float(state["a"][0])
    assert torch.equal(state["a"], torch.full_like(state["a"], value))
    assert state["nested"]["text"] == f"value {value}"
    return value


class Server(Protocol):
    """What answers at an endpoint."""

    endpoint: str


def store_of(place: str, server: Server) -> ByteStore:
    """The place as it is on the server, past any proxy."""
    return open_bucket(place, options={"endpoint": server.endpoint})


def rival_for(place: str, value: float, server: Server) -> Callable[[object], None]:
    """Save a checkpoint elsewhere; the result copies it to ``place``, as a save without leases would."""
    elsewhere = f"{place}-rival"
    save(elsewhere, value, options={"endpoint": server.endpoint})
    source = store_of(elsewhere, server)
    files = {name: bytes(source.read(name, max_bytes=1 << 20)) for name in source.names()}

    def act(_: object) -> None:
        target = store_of(place, server)
        # The metadata last.
        for name in sorted(files, reverse=True):
            target.replace(name, files[name])

    return act
