"""Where two chunks of a tensor meet, under the names of torch's module; boxes belong to ``_geometry``."""

from holdfast._geometry import Box, intersect
from holdfast.metadata import ChunkStorageMetadata

__all__: list[str] = []


def _check_shard_metadata_pair_overlap(shard1: ChunkStorageMetadata, shard2: ChunkStorageMetadata) -> bool:
    """Whether two chunks of one tensor have an element in common."""
    return intersect(_box(shard1), _box(shard2)) is not None


def _shards_get_overlap_region_wrt_saved_tensor(
    saved_shard: ChunkStorageMetadata, current_shard: ChunkStorageMetadata
) -> list[tuple[int, int, int, int]]:
    """The elements that two chunks have in common, dimension by dimension; the chunks must overlap.

    Returns:
        For each dimension its number, where the common part begins in the saved chunk, where it begins in
        the current one, and how long it is.
    """
    saved, current = _box(saved_shard), _box(current_shard)
    both = intersect(saved, current)
    if both is None:
        raise ValueError(f"the chunks {saved} and {current} have no element in common")
    return [
        (dimension, start - in_saved, start - in_current, length)
        for dimension, (start, in_saved, in_current, length) in enumerate(
            zip(both.offsets, saved.offsets, current.offsets, both.lengths, strict=True)
        )
    ]


def _box(chunk: ChunkStorageMetadata) -> Box:
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))
