"""What every save and load did: bytes, seconds and rate by phase and rank, waits, retries, the slowest rank.

``save`` returns metadata with a ``record``, ``load`` a result with one, and the future of ``async_save`` has
one when it is done. The manifest of a checkpoint keeps the record of its save. Each record is also logged,
and given to every listener.
"""

import logging
import os
import threading
from collections.abc import Callable
from typing import TypeAlias

from holdfast._record_outputs.chrome_trace import chrome_trace
from holdfast._record_outputs.open_telemetry import emit_spans
from holdfast._record_outputs.prometheus_file import PrometheusFile
from holdfast._transfer_record import PhaseSummary, PhaseTime, RankRecord, SlowestRank, TransferRecord

__all__ = [
    "PhaseSummary",
    "PhaseTime",
    "PrometheusFile",
    "RankRecord",
    "SlowestRank",
    "TransferRecord",
    "add_listener",
    "chrome_trace",
]

PROMETHEUS_VARIABLE = "HOLDFAST_PROMETHEUS_FILE"

RecordListener: TypeAlias = Callable[[TransferRecord], object]
logger = logging.getLogger(__name__)

_lock = threading.Lock()
_listeners: list[RecordListener] = []
_files: dict[str, PrometheusFile] = {}


def add_listener(listener: RecordListener) -> Callable[[], None]:
    """Have a function called with the record of every save and load of this process that succeeds.

    It is called on every rank, in the thread that saved or loaded, when the checkpoint is complete and before
    ``save`` or ``load`` returns, or the future is done. An exception from it is logged and changes nothing.

    Returns:
        A function that ends this. Calling it twice is fine.

    Example:
        >>> holdfast.records.add_listener(lambda record: wandb.log({"save_seconds": record.seconds}))
    """
    with _lock:
        _listeners.append(listener)

    def remove() -> None:
        with _lock:
            _listeners[:] = [known for known in _listeners if known is not listener]

    return remove


def publish(record: TransferRecord) -> None:
    """Log a record, and give it to all who listen. Raises nothing but interrupts."""
    level = logging.INFO if record.rank == 0 else logging.DEBUG
    if logger.isEnabledFor(level):
        logger.log(level, "%s", record, extra={"holdfast": _fields(record)})
    with _lock:
        listeners = [*_listeners, emit_spans]
        path = os.environ.get(PROMETHEUS_VARIABLE)
        if path:
            listeners.append(_files.setdefault(path, PrometheusFile(path)))
    for listener in listeners:
        _give(record, listener)


def _give(record: TransferRecord, listener: RecordListener) -> None:
    try:
        listener(record)
    except Exception:
        logger.warning("the record of a %s could not be given to %r", record.kind, listener, exc_info=True)


def _fields(record: TransferRecord) -> dict[str, object]:
    """The data of a log line: a few numbers, however many ranks there are."""
    slowest = record.slowest
    return {
        "kind": record.kind,
        "place": record.place,
        "mode": record.mode,
        "rank": record.rank,
        "world_size": record.world_size,
        "nbytes": record.nbytes,
        "seconds": record.seconds,
        "rate": record.rate,
        "stall": record.stall,
        "slowest_rank": slowest and slowest.rank,
        "slowest_phase": slowest and slowest.phase,
        "slowest_seconds": slowest and slowest.seconds,
        "phases": {phase.name: phase.longest for phase in record.phases},
        "events": dict(record.events),
    }
