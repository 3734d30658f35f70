"""What an object needs so that a checkpoint can hold it and put it back in place."""

from typing import Any, Protocol, TypeVar, runtime_checkable

__all__ = ["Stateful", "StatefulT"]


@runtime_checkable
class Stateful(Protocol):
    """An object that gives its state as a dict and takes it back: a module, an optimizer, a data loader.

    Having both methods is enough; nothing needs to inherit from this class. ``isinstance(x, Stateful)``
    looks at the methods' names only.

    A save calls ``state_dict`` once, on every rank. A load calls ``state_dict`` first, to learn which
    keys, shapes and devices to fill, writes into the tensors of that dict in place, and then calls
    ``load_state_dict`` with it. If the load fails, ``load_state_dict`` is not called.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state, without changing it.

        Called by save and by load. Tensors in the result should alias the object's own memory where
        they can: a load writes into them directly. Every rank must return the same structure, as far
        as the keys that it shares with other ranks go.
        """
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of the structure that ``state_dict`` returned, now holding loaded values."""
        ...


StatefulT = TypeVar("StatefulT", bound=Stateful)
