"""A record as spans of OpenTelemetry, in programs that use it."""

import sys
from typing import Any

from holdfast._transfer_record import TransferRecord

_NANO = 1_000_000_000


def emit_spans(record: TransferRecord) -> None:
    """Give the record to OpenTelemetry as a span with one child for each phase of this rank.

    It does nothing unless the program has imported ``opentelemetry.trace`` itself. Holdfast never imports it.
    """
    trace: Any = sys.modules.get("opentelemetry.trace")
    mine = record.of_rank(record.rank)
    if trace is None or mine is None:
        return
    tracer = trace.get_tracer("holdfast")
    began = int(record.started_at * _NANO)
    whole = tracer.start_span(f"holdfast.{record.kind}", start_time=began, attributes=_attributes(record))
    inside = trace.set_span_in_context(whole)
    for phase in mine.phases:
        start = began + int(phase.start * _NANO)
        attributes = {
            "holdfast.rank": mine.rank,
            "holdfast.waited": phase.waited,
            "holdfast.nbytes": phase.nbytes,
        }
        span = tracer.start_span(
            f"holdfast.{record.kind}.{phase.name.replace(' ', '_')}",
            context=inside,
            start_time=start,
            attributes=attributes,
        )
        span.end(end_time=start + int(phase.seconds * _NANO))
    whole.end(end_time=began + int(mine.seconds * _NANO))


def _attributes(record: TransferRecord) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "holdfast.place": record.place,
        "holdfast.mode": record.mode,
        "holdfast.rank": record.rank,
        "holdfast.world_size": record.world_size,
        "holdfast.nbytes": record.nbytes,
        "holdfast.stall": record.stall,
        "holdfast.retries": record.retries,
    }
    slowest = record.slowest
    if slowest is not None:
        attributes.update({"holdfast.slowest_rank": slowest.rank, "holdfast.slowest_phase": slowest.phase})
    return attributes
