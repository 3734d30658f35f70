"""The stager that copies a state in one call, under torch's name; :mod:`holdfast.staging` has the others."""

from typing import Any

from holdfast._staging.stage import Staging
from holdfast.errors import UsageError


class StateDictStager:
    """Copies states into memory of the host that is allocated once and reused.

    A staged state does not change as long as somebody holds a tensor of it.

    Args:
        pin_memory: Stage into pinned memory, if there is a CUDA device.
        share_memory: Stage into memory that another process can map.
        pin_memory_min_bytes: Accepted for compatibility: all tensors lie in one piece of memory.
    """

    def __init__(
        self,
        pin_memory: bool = False,
        share_memory: bool = False,
        pin_memory_min_bytes: int = 5,  # noqa: ARG002
    ) -> None:
        self.pin_memory = pin_memory
        self.share_memory = share_memory
        self._staging: Staging | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("_offload_tensor", "deepcopy_with_tensor_offload"):
            if name in vars(cls):
                raise UsageError(
                    f"{cls.__name__} replaces {name}, which is not called here: states are copied by "
                    "holdfast.staging. Write an AsyncStager of your own instead."
                )

    def stage(self, state_dict: Any, non_blocking: bool = False) -> Any:  # noqa: ARG002
        """Copy a state. When this returns the copy is complete, also with ``non_blocking``.

        Raises:
            PlanError: A value cannot be copied; the error has its key.
        """
        if self._staging is None:
            self._staging = Staging(shared_memory=self.share_memory, pinned_memory=self.pin_memory)
        return self._staging.stage(state_dict, when_busy="another").state

    def close(self) -> None:
        """Free the memory; a staged state that is still held keeps its own. ``stage`` may follow."""
        if self._staging is not None:
            self._staging.close()
            self._staging = None
