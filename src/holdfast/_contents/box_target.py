"""Owns the interface of what a box of a stored chunk is read into, whatever memory that is."""

from typing import NamedTuple

from holdfast._contents.inventory import Ints
from holdfast._format.dtypes import DTYPES
from holdfast._format.item_table import StorageInfo
from holdfast._geometry import Box, reach_of, row_major_strides, volume


class BoxTarget:
    """Where the elements of a box go, in parts that several threads may put there.

    Attributes:
        key: The tensor's flat name.
        lengths: How long the box is in each dimension.
        waiting: How many parts are still to arrive.
    """

    key: str
    lengths: Ints
    waiting: int = 1

    def memory(self) -> memoryview | None:
        """The memory of the box, if it is row-major, and what is stored can be written there as it is.

        Call ``touch`` before you write there.
        """
        raise NotImplementedError

    def put(self, offsets: Ints, lengths: Ints, content: memoryview, strides: Ints, first: int) -> None:
        """Fill a part of the box with elements from bytes: from element ``first`` on, ``strides`` apart."""
        raise NotImplementedError

    def put_loaded(self, content: bytes, shape: Ints, at: Ints) -> None:
        """Fill the box with that of the tensor of this shape in a container of torch's, from ``at`` on.

        Raises:
            IntegrityError: There is no such tensor in it.
            UsageError: Only torch can read it, and this is no memory of torch's.
        """
        raise NotImplementedError

    def touch(self) -> None:
        """Note that the box is about to be changed."""

    def arrived(self) -> None:
        """Count one part, all of which is there."""

    def memory_for(self, offsets: Ints, lengths: Ints, itemsize: int) -> memoryview | None:
        """The memory of a part of the box, if it is one run; see ``memory``."""
        strides = row_major_strides(self.lengths)
        if reach_of(lengths, strides) != volume(lengths):
            return None
        memory = self.memory()
        if memory is None:
            return None
        start = sum(o * s for o, s in zip(offsets, strides, strict=True)) * itemsize
        return memory[start : start + volume(lengths) * itemsize]


class StoredBox(NamedTuple):
    """A box of one stored chunk, and where it goes.

    Attributes:
        info: Where the chunk lies.
        shape: The shape of the chunk.
        strides: Elements between its neighbours along each dimension, as it is stored.
        dtype: The name of its dtype.
        box: The box, in the chunk.
        target: Where it goes.
    """

    info: StorageInfo
    shape: Ints
    strides: Ints
    dtype: str
    box: Box
    target: BoxTarget

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole chunk."""
        return volume(self.shape) * self.itemsize
