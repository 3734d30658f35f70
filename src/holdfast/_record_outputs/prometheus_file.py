"""Records as a text file that Prometheus collects (the textfile collector of its node exporter)."""

import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from holdfast._transfer_record import TransferRecord


class PrometheusFile:
    """A listener that keeps a file with figures of the last save and the last load.

    The file is replaced in one step, so that nobody reads half of one. Only rank 0 writes it, unless the path
    has ``{rank}`` in it, which becomes the number of the rank.

    Args:
        path: The file, in an existing folder. The collector wants a name that ends with ``.prom``.

    Example:
        >>> holdfast.records.add_listener(holdfast.records.PrometheusFile("/var/lib/node/holdfast.prom"))
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._lock = threading.Lock()
        self._last: dict[str, TransferRecord] = {}
        self._totals: Counter[tuple[str, str]] = Counter()

    def __call__(self, record: TransferRecord) -> None:
        """Take a record, and write the file. Raises OSError if that is not possible."""
        if record.rank != 0 and "{rank}" not in self._path:
            return
        with self._lock:
            self._last[record.kind] = record
            self._totals["transfers", record.kind] += 1
            self._totals["bytes", record.kind] += record.nbytes
            self._totals["retries", record.kind] += record.retries
            path = self._path.replace("{rank}", str(record.rank))
            # In the same folder, or it could not take the other's place in one step.
            temporary = f"{path}.{os.getpid()}.tmp"
            try:
                with open(temporary, "w", encoding="utf-8") as file:
                    file.write(self._text())
                os.replace(temporary, path)
            except BaseException:
                if os.path.exists(temporary):
                    os.unlink(temporary)
                raise

    def _text(self) -> str:
        families = [
            *self._of_last("seconds", "Seconds from the call to the end.", lambda r: r.seconds),
            *self._of_last("bytes", "Bytes of all ranks.", lambda r: r.nbytes),
            *self._of_last("stall_seconds", "Seconds in which the trainer waited.", lambda r: r.stall),
            *self._of_last(
                "finished_timestamp_seconds", "When it ended, since 1970.", lambda r: r.started_at + r.seconds
            ),
            *self._of_last("slowest_rank", "The rank that held the others up.", lambda r: r.slowest.rank),
            *self._phases(),
        ]
        for name, about in (
            ("transfers", "Saves and loads of this process."),
            ("bytes", "Bytes of all of them."),
            ("retries", "Requests that were made again."),
        ):
            families += _head(f"{name}_total", about, "counter")
            families += [
                f'holdfast_{name}_total{{kind="{kind}"}} {count}'
                for (counted, kind), count in self._totals.items()
                if counted == name
            ]
        return "\n".join(families) + "\n"

    def _of_last(self, name: str, about: str, value: Callable[[Any], float]) -> list[str]:
        lines = [
            f'holdfast_last_{name}{{kind="{kind}",mode="{record.mode}"}} {value(record)!r}'
            for kind, record in self._last.items()
        ]
        return [*_head(f"last_{name}", about, "gauge"), *lines]

    def _phases(self) -> list[str]:
        lines = _head("last_phase_seconds", "Busy seconds of the slowest rank, by phase.", "gauge")
        for kind, record in self._last.items():
            lines += [
                f'holdfast_last_phase_seconds{{kind="{kind}",phase="{phase.name}",'
                f'rank="{phase.slowest_rank}"}} {phase.longest!r}'
                for phase in record.phases
            ]
        return lines


def _head(name: str, about: str, kind: str) -> list[str]:
    return [f"# HELP holdfast_{name} {about}", f"# TYPE holdfast_{name} {kind}"]
