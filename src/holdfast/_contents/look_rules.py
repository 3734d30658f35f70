"""How items are read for somebody who looks into a checkpoint."""

from dataclasses import dataclass

from holdfast._byte_ranges import USUAL, Thrift
from holdfast._io.pool import Cancellation
from holdfast.extension import ExtensionRegistry

_LEAN = Thrift(waste=1.1, always_fine=4096)
"""For a store where a request costs next to nothing."""


@dataclass(frozen=True)
class LookRules:
    """How items are read for somebody who looks into a checkpoint.

    Attributes:
        registry: Makes transforms from their descriptors.
        cancellation: Says that another job failed.
        verify: Whether checksums are compared.
        thrift: What may be read besides what is wanted.
    """

    registry: ExtensionRegistry
    cancellation: Cancellation
    verify: bool
    thrift: Thrift

    @staticmethod
    def for_store(read_gap_nbytes: int, *, verify: bool, registry: ExtensionRegistry | None) -> "LookRules":
        """The rules for a store that reads gaps of that many bytes along with what is wanted."""
        is_far = read_gap_nbytes > USUAL.always_fine // 4
        return LookRules(registry or ExtensionRegistry(), Cancellation(), verify, USUAL if is_far else _LEAN)
