"""How tensors are cut for streams, and how files are shared out among the ranks that write them."""

import math

import pytest

from holdfast._geometry import row_major_strides
from holdfast._storage import safetensors_slabs
from holdfast._storage.safetensors_owners import choose_owners
from holdfast._storage.safetensors_slabs import slabs


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (1, 40), (4, 3, 5), (2, 1, 3, 9), (0, 4), (4, 0)])
@pytest.mark.parametrize("itemsize", [1, 8])
def test_slabs_follow_each_other_without_gaps(
    shape: tuple[int, ...], itemsize: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_slabs, "SLAB", 24)
    end = 0
    for offsets, lengths in slabs(shape, itemsize):
        assert sum(map(int.__mul__, offsets, row_major_strides(shape))) == end
        assert math.prod(lengths) * itemsize <= 24
        # In one piece: only the first dimension that is longer than 1 may be cut.
        longer = [d for d, length in enumerate(lengths) if length > 1]
        assert all(lengths[d] == shape[d] for d in longer[1:])
        end += math.prod(lengths)
    assert end == math.prod(shape)


def test_owners_get_about_the_same_number_of_bytes() -> None:
    assert choose_owners([5, 5, 5, 5], 2) in ([0, 1, 0, 1], [1, 0, 1, 0])
    owners = choose_owners([9, 1, 2, 3, 3], 2)
    assert sum(size for size, owner in zip([9, 1, 2, 3, 3], owners, strict=True) if owner == owners[0]) == 9
    assert choose_owners([4], 3) == [0]
    # Few of many ranks, and not those of one machine only.
    many = set(choose_owners([1] * 1000, 1024))
    assert len(many) == 16
    assert max(many) > 900
