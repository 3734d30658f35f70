"""Storages move bytes: the interfaces of the writer and of the reader, and the result of one write."""

import abc
import os
from dataclasses import dataclass
from typing import Any

from torch.futures import Future

from holdfast.metadata import Metadata, MetadataIndex, StorageMeta
from holdfast.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner

__all__ = ["StorageReader", "StorageWriter", "WriteResult"]


@dataclass(frozen=True)
class WriteResult:
    """Proof that one item of a plan was written.

    Attributes:
        index: The item's name, as the plan has it.
        size_in_bytes: How many bytes it took on the storage.
        storage_data: Belongs to the storage: what its reader needs to find the item again.
    """

    index: MetadataIndex
    size_in_bytes: int
    storage_data: Any

    def __init__(self, index: MetadataIndex, size_in_bytes: int, storage_data: Any) -> None:
        # Written directly, as in the records of a plan.
        fields = self.__dict__
        fields["index"] = index
        fields["size_in_bytes"] = size_in_bytes
        fields["storage_data"] = storage_data


class StorageWriter(abc.ABC):
    """Writes a checkpoint to one kind of storage.

    One instance lives on each rank. It may be used for several saves, one after the other, never for
    two at once. A save calls, in this order:

    =========================  ===============  ======================================================
    call                       on               purpose
    =========================  ===============  ======================================================
    ``reset``                  every rank       a new save begins, perhaps at another place
    ``storage_meta``           every rank       what the planner must know of the storage
    ``set_up_storage_writer``  every rank       whether this rank is the coordinator
    ``prepare_local_plan``     every rank       the rank's plan; make ready, add storage data
    ``prepare_global_plan``    the coordinator  all plans together, for example to name files
    ``write_data``             every rank       write what the plan says
    ``finish``                 the coordinator  all ranks have written: commit
    =========================  ===============  ======================================================

    Before each call the previous one has returned on every rank that it was made on. If a call raises
    on one rank, ``finish`` is not called on any.

    The promise that a writer makes to its users: until ``finish`` returns, whoever reads that place
    sees the checkpoint that was there before, whole, or none if there was none. After it, the new one.
    A crash at any instant leaves one of the two. So data goes to places that no earlier checkpoint
    names, and ``finish`` is one atomic step.

    ``set_up_storage_writer`` gets the keyword arguments ``rank``, ``use_collectives`` and ``context`` if
    its signature has ``**kwargs`` or names them. ``context`` is a ``SaveContext``: report written bytes to
    ``context.progress.advance(nbytes)``, which raises if the save was cancelled, and call
    ``context.confirm_commit()`` directly before the commit, which raises if the ranks have given the save
    up. With ``use_collectives=False`` every rank makes a checkpoint of its own:
    it is its own coordinator and ``finish`` is called on each with that rank's results.
    """

    @abc.abstractmethod
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save; called on every rank, first.

        Args:
            checkpoint_id: The place to write to, in whatever form the storage has places: a folder, a
                URL, a key. None: the place that the instance was made with, or the last one.
        """

    @abc.abstractmethod
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn this rank's role; called on every rank. Writes nothing.

        Args:
            is_coordinator: Whether ``prepare_global_plan`` and ``finish`` will be called here.
            *args: Room for roles that later versions add; to be ignored.
            **kwargs: ``rank``, ``use_collectives`` and ``context``, see the class. Ignore others.
        """

    @abc.abstractmethod
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See what this rank offers to write; called on every rank.

        The place to make folders and to refuse a place that cannot be written to. Return the plan,
        changed only in ``storage_data`` (``dataclasses.replace``). Safe to repeat.
        """

    @abc.abstractmethod
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """See what each rank will write, in rank order; called on the coordinator only.

        Return as many plans in the same order, changed only in ``storage_data``: this is how the
        coordinator tells each rank where to write.
        """

    @abc.abstractmethod
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write every item of ``plan``; called on every rank.

        Ask ``planner.resolve_data(item)`` for the data as late as possible and let go of it soon: it may
        take memory. A tensor may be on any device, of any strides, and a view of something larger: only
        the elements that it shows are to be saved. Neither tensors nor streams may be changed.

        Returns:
            A future of one result for each item, in any order. When it completes, the data is on stable
            storage. Any failure, of any thread, makes the future (or this call) raise; no thread goes
            on writing after that.
        """

    @abc.abstractmethod
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint; called on the coordinator, once, after every rank has written.

        Fill ``metadata.storage_data`` from the results, and store the metadata in one atomic step, in a
        form from which ``StorageReader.read_metadata`` makes an equal one.

        Args:
            metadata: As ``create_global_plan`` made it.
            results: What ``write_data`` gave on each rank, in rank order.
        """

    @classmethod
    @abc.abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this class can write to such a place; touches nothing.

        Used to choose a storage when the caller gave only a place.
        """

    def storage_meta(self) -> StorageMeta | None:
        """What the planner and the checkpoint must know of this storage; None for nothing.

        For example ``StorageMeta(checkpoint_id=self.path, save_id=self.save_id)``.
        """
        return None


class StorageReader(abc.ABC):
    """Reads a checkpoint from one kind of storage.

    One instance lives on each rank. It may be used for several loads, one after the other, never for
    two at once. A load calls, in this order:

    =========================  ===============  ======================================================
    call                       on               purpose
    =========================  ===============  ======================================================
    ``reset``                  every rank       a new load begins, perhaps from another place
    ``read_metadata``          see below        what is there?
    ``set_up_storage_reader``  every rank       the metadata, and whether this is the coordinator
    ``prepare_local_plan``     every rank       the rank's plan; may add storage data
    ``prepare_global_plan``    the coordinator  all plans together
    ``read_data``              every rank       read what the plan says
    =========================  ===============  ======================================================

    ``read_metadata`` may be called on every rank, or on the coordinator only and its result sent to the
    others: an implementation must not count on either.

    Reading needs read access only, and changes nothing on the storage. Bytes that are not the ones that
    were written must be noticed and raise. If a reader returns bytes that it cannot check, its
    documentation must say so.
    """

    @abc.abstractmethod
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load; called on every rank, first.

        Args:
            checkpoint_id: The place to read from. None: the place that the instance was made with, or
                the last one.
        """

    @abc.abstractmethod
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the checkpoint, equal to what ``StorageWriter.finish`` was given.

        Runs no code that the storage holds.

        Args:
            *args: Room for what later versions add; to be ignored.
            **kwargs: ``rank``, for a checkpoint of which every rank wrote a part of its own.

        Raises:
            CheckpointNotFoundError: There is no complete checkpoint.
            IntegrityError: There is one, and its metadata is damaged or unsafe.
        """

    @abc.abstractmethod
    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Learn the metadata and this rank's role; called on every rank.

        Args:
            metadata: As ``read_metadata`` returned it, here or on the coordinator.
            is_coordinator: Whether ``prepare_global_plan`` will be called here.
            *args: Room for roles that later versions add; to be ignored.
            **kwargs: ``rank``, ``use_collectives`` and ``context`` (a ``LoadContext``, whose ``progress``
                is told of the bytes that were read), if the signature has ``**kwargs`` or names them.
        """

    @abc.abstractmethod
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """See what this rank needs; called on every rank. Return it, changed only in ``storage_data``."""

    @abc.abstractmethod
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See what all ranks need, in rank order; called on the coordinator only.

        Return as many plans in the same order, changed only in ``storage_data``.
        """

    @abc.abstractmethod
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every item of ``plan``; called on every rank.

        For a tensor: ``planner.resolve_tensor(item)`` gives the destination, on any device and of any
        strides; fill it, moving between devices as needed, then ``planner.commit_tensor(item, tensor)``
        with that same tensor. For another value: ``planner.load_bytes(item, stream)``.

        Returns:
            A future that completes when every item has arrived. Any failure makes it (or this call)
            raise; no thread goes on writing into the destinations after that.
        """

    @classmethod
    @abc.abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this class can read from such a place; touches nothing.

        Used to choose a storage when the caller gave only a place.
        """
