"""What a storage is told of the save or load that it serves: who takes part, whom to report progress to.

``save`` and ``load`` pass it as the keyword argument ``context`` to ``set_up_storage_writer`` and
``set_up_storage_reader`` of every storage that takes keyword arguments. A storage keeps it until its next
set-up. Of a context that is pickled with its storage only the facts are kept: nobody is told of the progress
of the copy. The writer process of ``async_save`` puts its own in the place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast._io.progress import ProgressTracker
from holdfast._transfer_recorder import TransferRecorder

if TYPE_CHECKING:
    from holdfast._ranks.broadcast import Broadcast


@dataclass
class SaveContext:
    """One save, as a storage writer sees it.

    Attributes:
        rank: This rank's number among those that save.
        world_size: How many ranks save together.
        is_coordinator: Whether this rank plans for all, and commits.
        use_collectives: False if each rank writes a checkpoint of its own part.
        progress: Told of the bytes that were written. Telling it raises if the save is cancelled.
        confirm_commit: Called directly before the commit; raises if another rank has given this save up.
        others_at_work: Tells the coordinator, after a failure, whether other ranks may still be writing.
        open_broadcast: Connects ranks to send each other bytes, see ``Exchange.open_broadcast``; None if that
            is not possible. To be called in ``write_data`` only, and not in another process.
        writes_elsewhere: Whether another process would write, unless ``write_data`` needs ``open_broadcast``.
        recorder: Measures the save; on the coordinator it knows at the commit what all ranks have done. None
            if nobody measures it, as where torch calls a storage of ours.
        user_metadata: What the caller wants to keep with the checkpoint, encoded.
    """

    rank: int = 0
    world_size: int = 1
    is_coordinator: bool = True
    use_collectives: bool = True
    progress: ProgressTracker = field(default_factory=ProgressTracker)
    confirm_commit: Callable[[], None] = lambda: None
    others_at_work: Callable[[], bool] = lambda: False
    open_broadcast: "Callable[[Sequence[int], Callable[[], None]], Broadcast] | None" = None
    writes_elsewhere: bool = False
    recorder: TransferRecorder | None = None
    user_metadata: bytes = b""

    def __reduce__(self) -> tuple[type["SaveContext"], tuple[int, int, bool, bool]]:
        return SaveContext, (self.rank, self.world_size, self.is_coordinator, self.use_collectives)


@dataclass
class LoadContext:
    """One load, as a storage reader sees it.

    Attributes:
        rank: This rank's number among those that load.
        world_size: How many ranks load together.
        is_coordinator: Whether this rank plans for all.
        progress: Told of the bytes that were read. Telling it raises if the load is cancelled.
        may_change: Whether the caller's own value changes when the value of a key is given to the planner.
            False for what the engine throws away if the load fails: an error does not call it changed.
    """

    rank: int = 0
    world_size: int = 1
    is_coordinator: bool = True
    progress: ProgressTracker = field(default_factory=ProgressTracker)
    may_change: Callable[[str], bool] = lambda _: True

    def __reduce__(self) -> tuple[type["LoadContext"], tuple[int, int, bool]]:
        return LoadContext, (self.rank, self.world_size, self.is_coordinator)
