"""Owns the page of one checkpoint: what it holds, who wrote which part, how the save went, is it sound."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from holdfast._contents.inventory import Inventory
from holdfast._format.names import parse_data_file
from holdfast._human_units import rate_text, seconds_text, size_text
from holdfast._transfer_record import TransferRecord
from holdfast.cli.pages.bars import Bar, bars
from holdfast.cli.pages.colours import phase_colour, rank_colour
from holdfast.cli.pages.page import facts, legend, page, section, table
from holdfast.cli.pages.shard_map import shard_map
from holdfast.cli.pages.timeline import timeline
from holdfast.cli.pages.treemap import treemap
from holdfast.cli.tree import entry_nbytes, make_tree

__all__ = ["checkpoint_page"]

_MOST_LARGEST = 25


def checkpoint_page(
    place: str,
    part: Inventory,
    summary: dict[str, Any],
    record: TransferRecord | None,
    damages: list[str] | None,
) -> str:
    """The page.

    Args:
        place: The checkpoint, as the user named it.
        part: What it holds.
        summary: It in numbers; see ``summarize``.
        record: What the save did; None if nobody recorded it.
        damages: What was found when every byte was read; None if that was not done.
    """
    created = (summary["created"] or "").replace("T", " ").replace("Z", " UTC")
    under = ", ".join(word for word in (summary["format"], summary["software"], created) if word)
    return page(place, under, _sections(part, summary, record, damages))


def _sections(
    part: Inventory, summary: dict[str, Any], record: TransferRecord | None, damages: list[str] | None
) -> Iterator[str]:
    ranks = _ranks_of(part)
    yield section("At a glance", "", _overview(part, summary, record, damages))
    yield _integrity(part, summary, damages)
    yield section(
        "Size by module",
        "Each rectangle is as large as its bytes; colours tell the largest modules apart.",
        # By the dots of names: a flat state has no other structure.
        treemap(make_tree(part.entries, {}, "size")),
    )
    if part.tensors:
        yield section(
            "Who wrote which part",
            "A tensor is a sheet: its first dimension goes down, the others go across. Tensors divided "
            "alike share a sheet.",
            legend(_rank_entries(ranks)),
            shard_map(part.tensors, ranks),
        )
    if record is not None and record.ranks:
        yield _save(record)
    yield section("Types", "", bars(_dtype_bars(summary), most=20, label="bytes by type"))
    yield from _balance(summary, ranks)
    yield _largest(part)


def _overview(
    part: Inventory, summary: dict[str, Any], record: TransferRecord | None, damages: list[str] | None
) -> str:
    rows = {
        "tensors": f"{summary['tensors']:,} with {size_text(summary['tensor_nbytes'])}",
        "other values": f"{summary['objects']:,} with {size_text(summary['object_nbytes'])}",
        "chunks": f"{summary['chunks']:,}",
        "files": f"{len(summary['files']):,}",
        "ranks": "not recorded" if summary["world_size"] is None else f"{summary['world_size']:,}",
        "stock torch": "can read it" if summary["torch_readable"] else "cannot read it",
    }
    if record is not None:
        rows["saved in"] = f"{seconds_text(record.seconds)}, {rate_text(record.rate)}"
        rows["trainer waited"] = seconds_text(record.stall)
    if part.transforms:
        rows["transforms"] = ", ".join("+".join(stack) for stack in part.transforms)
    if damages is not None:
        rows["every byte read"] = "sound" if not damages else f"{len(damages):,} damages"
    return facts(rows)


def _integrity(part: Inventory, summary: dict[str, Any], damages: list[str] | None) -> str:
    wrong = [f"{file['name']}: {file['state']}" for file in summary["files"] if file["state"] != "present"]
    wrong += damages or []
    if wrong:
        verdict = f'<p class="bad">Damaged: {len(wrong):,} findings.</p>'
        return section("Integrity", "", verdict, table(["what is wrong"], [[one] for one in wrong[:200]]))
    checks = (
        f"A CRC-32 for every {size_text(part.block_size)} is recorded."
        if part.block_size
        else "No checksums of ours are recorded: damage inside of tensors may go unnoticed."
    )
    if damages is None:
        verdict = '<p class="good">All files are there, and as long as they must be.</p>'
        checks += " Their content was not read for this page: --verify does that."
    else:
        verdict = '<p class="good">Every byte was read, and is as it was written.</p>'
    return section("Integrity", checks, verdict)


def _save(record: TransferRecord) -> str:
    slowest = record.slowest
    about = "Pale parts are waits for other ranks."
    if record.world_size > 1 and slowest is not None:
        about += (
            f" Rank {slowest.rank} held the others up most: {seconds_text(slowest.seconds)} in "
            f"'{slowest.phase}', where the rank in the middle took {seconds_text(slowest.median)}."
        )
    rows = [
        (
            phase.name,
            size_text(phase.nbytes) if phase.nbytes else "",
            seconds_text(phase.shortest),
            seconds_text(phase.median),
            seconds_text(phase.longest),
            f"rank {phase.slowest_rank}",
            seconds_text(phase.waited),
        )
        for phase in record.phases
    ]
    head = ("phase", "bytes", "quickest", "median", "slowest", "which", "longest wait")
    events = ", ".join(f"{count:,} x {name}" for name, count in record.events.items())
    return section(
        "How the save went",
        about + (f" Also seen: {events}." if events else ""),
        legend((phase.name, phase_colour(phase.name)) for phase in record.phases),
        timeline(record),
        table(head, rows, numbers=(1, 2, 3, 4, 6)),
    )


def _dtype_bars(summary: dict[str, Any]) -> list[Bar]:
    return [
        Bar(
            total["dtype"],
            total["nbytes"],
            "1 tensor" if total["tensors"] == 1 else f"{total['tensors']:,} tensors",
            f"c{min(number, 7)}",
        )
        for number, total in enumerate(summary["dtypes"])
    ]


def _balance(summary: dict[str, Any], ranks: dict[str, int | None]) -> Iterator[str]:
    sizes = {file["name"]: file["nbytes"] or 0 for file in summary["files"]}
    by_rank: Counter[int] = Counter()
    for name, nbytes in sizes.items():
        rank = ranks.get(name)
        if rank is not None:
            by_rank[rank] += nbytes
    if len(by_rank) > 1:
        mean = sum(by_rank.values()) / len(by_rank)
        rows = [
            Bar(f"rank {rank}", nbytes, f"{nbytes / mean:.2f} of the mean" if mean else "", rank_colour(rank))
            for rank, nbytes in by_rank.most_common()
        ]
        about = "How many bytes each rank wrote, the most first."
        yield section("Balance over ranks", about, bars(rows, most=16, label="bytes by rank"))
    files = sorted(sizes.items(), key=lambda pair: -pair[1])
    rows = [Bar(name, nbytes, colour=rank_colour(ranks.get(name))) for name, nbytes in files]
    yield section("Files", "The largest first.", bars(rows, most=12, label="bytes by file"))


def _largest(part: Inventory) -> str:
    entries = sorted(part.entries, key=lambda entry: -entry_nbytes(entry))[:_MOST_LARGEST]
    tensors = {tensor.key: tensor for tensor in part.tensors}
    rows = []
    for entry in entries:
        tensor = tensors.get(entry.key)
        what = f"{tensor.dtype} {list(tensor.shape)}" if tensor else "object"
        rows.append((entry.key, what, size_text(entry_nbytes(entry))))
    return section("Largest values", "", table(("key", "what", "size"), rows, numbers=(2,)))


def _ranks_of(part: Inventory) -> dict[str, int | None]:
    """For each file the rank that wrote it; None if its name does not say."""
    parsed = {name: parse_data_file(name) for name in part.files}
    return {name: file.rank if file else None for name, file in parsed.items()}


def _rank_entries(ranks: dict[str, int | None]) -> list[tuple[str, str]]:
    known = sorted({rank for rank in ranks.values() if rank is not None})
    entries = [(f"rank {rank}", rank_colour(rank)) for rank in known[:7]]
    if len(known) > 7:
        entries.append((f"and so on, to rank {known[-1]}", rank_colour(known[7])))
    return entries or [("rank not recorded", rank_colour(None))]
