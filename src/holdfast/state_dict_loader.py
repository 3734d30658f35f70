"""Loading a checkpoint."""

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from typing_extensions import deprecated

from holdfast._background.running_save import exclusive_keys
from holdfast._background.running_saves import running_saves
from holdfast._call_arguments import checked_call
from holdfast._engine.adapt import adapt_load_planner, adapt_reader
from holdfast._engine.load import run_load
from holdfast._engine.load_into import load_into
from holdfast._engine.repeated_load import EarlierAttempt, repeat_if_replaced
from holdfast._io.page_cache import PageCache
from holdfast._names_elsewhere import names_of
from holdfast._ranks.group_exchange import DEFAULT_PEER_TIMEOUT, open_exchange
from holdfast._storage_choice import choose_reader
from holdfast._transfer_recorder import TransferRecorder
from holdfast.default_planner import DefaultLoadPlanner, EmptyStateDictLoadPlanner
from holdfast.errors import UsageError
from holdfast.load_result import LoadResult
from holdfast.planner import LoadPlanner
from holdfast.progress_display import ProgressOption, tracking
from holdfast.records import publish
from holdfast.stateful import Stateful
from holdfast.storage import StorageReader

__all__ = ["load", "load_state_dict"]

if not TYPE_CHECKING:
    __getattr__ = names_of(__name__, "_storage_utils", "default_planner", "logger", "planner", "utils")


@checked_call("storage_reader")
def load(
    state_dict: dict[str, Any] | Stateful,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    strict: bool | None = None,
    cast: bool | None = None,
    allow_partial_load: bool = False,
    ignore_mismatched_sizes: bool = False,
    device: torch.device | str | int | None = None,
    allow_pickle: bool = False,
    safe_globals: Iterable[Callable[..., Any] | type] = (),
    peer_timeout: float = DEFAULT_PEER_TIMEOUT,
    progress: ProgressOption = None,
    page_cache: PageCache | None = None,
) -> LoadResult:
    """Load a checkpoint into a state, in place: on every rank of the group, each its own part.

    It waits for saves in the background that go to the same place.

    Tensors are filled where they are, whatever layout the checkpoint was saved in. Other values are
    replaced in the containers that they stand in. Stateful objects, wherever they stand, get their
    loaded state by ``load_state_dict``. Tensors on the meta device get memory: in a dict they are
    replaced, in a module its parameters and buffers stay the same objects.

    If another save replaces the checkpoint meanwhile and removes files that are needed still, the load begins
    again with the new checkpoint, twice at most. One that may leave values alone raises
    ReplacedCheckpointError instead.

    Everything that does not fit (keys, shapes, dtypes, kinds) is reported in one error before anything is
    read or changed. Every byte read is checked. No code of the checkpoint is run.

    If the ranks that saved had different values under one key, each rank gets its own back. If another
    number of ranks loads, every rank gets the coordinator's, and the coordinator warns.

    Args:
        state_dict: What to fill: a dict. Tensors must have their shape already. It may be empty on some
            ranks. A single module, optimizer or other Stateful object is filled from a checkpoint of its
            ``state_dict()``.
        checkpoint_id: Where from: a folder. Not needed if ``storage_reader`` knows. It may be passed as the
            second argument, without its name.
        storage_reader: What to read with; by default a ``FileSystemReader`` on ``checkpoint_id``.
        planner: What decides what is read. By default a ``DefaultLoadPlanner`` with the options below. If
            you pass a planner, give these options to the planner.
        process_group: The ranks that load together; by default all.
        no_dist: Load in this process alone, whatever groups there are.
        strict: What to do with keys of the checkpoint that the state does not have: True raises, False
            ignores them, None warns if you load some keys of a group and leave out others.
        cast: What to do where dtypes differ: True casts, False raises, None casts within a kind, with a
            warning if values may change, and raises across kinds.
        allow_partial_load: Leave alone what the checkpoint does not have, instead of raising. It still raises
            if nothing of the state is in the checkpoint, and if nothing of a group (what stands under one
            key of the state, such as "model") is, although the checkpoint has that group or the same names
            with another prefix.
        ignore_mismatched_sizes: Leave alone tensors whose shape in the checkpoint differs, and log them in
            one warning, instead of raising.
        device: Where tensors on the meta device get their memory. None for the device of the mesh of a
            DTensor, and for others the current accelerator, or the CPU if there is none.
        allow_pickle: Let objects be unpickled freely, running whatever code the checkpoint holds.
        safe_globals: Classes and functions that objects of the checkpoint may use.
        peer_timeout: After how many seconds without a sign of life a rank is taken for dead, and all
            others raise. Slow storage is not silence: a rank that reads for hours is waited for.
        progress: True shows how far rank 0 is: as a bar in a terminal, as log lines elsewhere. A function is
            called with a ``Progress`` (bytes done, bytes in all, bytes a second) every few MiB that this rank
            has read, one call at a time, from the threads that read. An exception from it stops the load and
            is raised.
        page_cache: What the load leaves in the memory of the machine: "auto" (the default), "keep" or
            "bypass"; see ``FileSystemReader``. If you pass a storage_reader, give this option to it.

    Returns:
        Which keys were loaded on this rank, which were left alone, and which others the checkpoint has. Its
        ``record`` says what the load did, by phase and rank.

    Raises:
        UsageError: The arguments do not go together, the state is no dict, there is nothing to fill on any
            rank, or a module on the meta device has tensors that no checkpoint can have, such as
            non-persistent buffers.
        CheckpointException: A step failed on some rank; also an instance of that failure's class:
            CheckpointNotFoundError if there is no checkpoint, WrongFolderError if the checkpoints are in
            folders below, IncompleteCheckpointError if a file is missing, MissingKeyError,
            ShapeMismatchError, ChecksumError and so on.

    Example:
        >>> holdfast.load({"model": model, "optimizer": optimizer}, checkpoint_id="checkpoints/100")
    """
    options = {
        "strict": strict,
        "cast": cast,
        "allow_partial_load": allow_partial_load,
        "ignore_mismatched_sizes": ignore_mismatched_sizes,
        "device": device,
        "allow_pickle": allow_pickle,
        "safe_globals": tuple(safe_globals),
    }
    place, keys = exclusive_keys(checkpoint_id, storage_reader, planner)

    def attempt(earlier: EarlierAttempt) -> LoadResult:
        recorder = TransferRecorder("load", place)
        recorder.clock.begin_wait()
        with open_exchange(
            process_group, purpose="load", no_dist=no_dist, peer_timeout=peer_timeout
        ) as exchange:
            running_saves.come_after(exchange, process_group, keys)
            recorder.clock.end_wait()
            defaults = vars(DefaultLoadPlanner())
            given = ", ".join(name for name, value in options.items() if value != defaults[name])
            if planner is not None and given:
                raise UsageError(f"give {given} to the planner that you pass, not to load")
            reader = choose_reader(storage_reader, checkpoint_id, page_cache=page_cache)
            chosen = DefaultLoadPlanner(**options) if planner is None else planner  # type: ignore[arg-type]
            filler = adapt_load_planner(chosen)
            earlier.admit(exchange, fills_all=not (filler.allows_partial or filler.ignores_shapes))
            with tracking(progress, f"loading {place}", rank=exchange.rank) as tracker:
                result = load_into(
                    state_dict, filler, adapt_reader(reader), exchange, progress=tracker, recorder=recorder
                )
        record = recorder.record()
        publish(record)
        return replace(result, record=record)

    return repeat_if_replaced(attempt)


@deprecated("load_state_dict is deprecated: use load", category=FutureWarning)
def load_state_dict(
    state_dict: dict[str, Any],
    storage_reader: StorageReader,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> None:
    """The name of :func:`load` before torch 2.2. Stateful objects are not opened."""
    _, keys = exclusive_keys(None, storage_reader, planner)
    with open_exchange(
        process_group, purpose="load", no_dist=no_dist, coordinator_rank=coordinator_rank
    ) as exchange:
        running_saves.come_after(exchange, process_group, keys)
        storage_reader.reset()
        chosen = DefaultLoadPlanner() if planner is None else planner
        run_load(state_dict, adapt_load_planner(chosen), adapt_reader(storage_reader), exchange)


# The same without the warning; programs call it by this name of torch's.
_load_state_dict: Callable[..., None] = load_state_dict.__wrapped__  # type: ignore[attr-defined]


def _load_state_dict_from_keys(
    keys: set[str] | str | None = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load what is under ``keys``, or everything, into a new nested state; torch has it under this name."""
    state: dict[str, Any] = {}
    wanted = {keys} if isinstance(keys, str) else keys
    _, exclusive = exclusive_keys(checkpoint_id, storage_reader, None)
    with open_exchange(process_group, purpose="load") as exchange:
        running_saves.come_after(exchange, process_group, exclusive)
        planner = EmptyStateDictLoadPlanner(wanted or None)
        reader = choose_reader(storage_reader, checkpoint_id)
        run_load(state, adapt_load_planner(planner), adapt_reader(reader), exchange)
    return state
