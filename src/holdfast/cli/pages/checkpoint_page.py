"""Owns the page of one checkpoint: what it holds, who wrote which part, how the save went, is it sound."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from holdfast._contents.inventory import Inventory, TensorEntry
from holdfast._format.names import parse_data_file
from holdfast._human_units import rate_text, seconds_text, size_text
from holdfast.cli.pages.bars import Bar, bars
from holdfast.cli.pages.colours import RankColours
from holdfast.cli.pages.page import columns, facts, page, section, table, verdict
from holdfast.cli.pages.save_section import save_section
from holdfast.cli.pages.shard_map import rank_legend, shard_map
from holdfast.cli.pages.treemap import treemap
from holdfast.cli.text import counted, shape_text
from holdfast.cli.tree import Entry, entry_nbytes, make_tree

__all__ = ["Integrity", "checkpoint_page"]

_MOST_LARGEST = 20
_MOST_FINDINGS = 200
_MOST_BARS = 12


class Integrity(NamedTuple):
    """Whether a checkpoint is sound.

    Attributes:
        wrong: What is wrong, in a sentence each.
        notes: What is worth knowing, and what could not be checked.
        checked_nbytes: How many bytes were read; None if only the sizes of files were compared.
        unchecked: How many items have nothing that their content could be compared with.
    """

    wrong: Sequence[str]
    notes: Sequence[str] = ()
    checked_nbytes: int | None = None
    unchecked: int = 0


def checkpoint_page(place: str, part: Inventory, summary: dict[str, Any], integrity: Integrity) -> str:
    """The page.

    Args:
        place: The checkpoint, as the user named it.
        part: What it holds.
        summary: It in numbers; see ``summarize``.
        integrity: Whether it is sound.
    """
    created = (summary["created"] or "").replace("T", " ").replace("Z", " UTC")
    under = ", ".join(word for word in (summary["format"], summary["software"], created) if word)
    return page(place, under, _sections(part, summary, integrity))


def _sections(part: Inventory, summary: dict[str, Any], integrity: Integrity) -> Iterator[str]:
    ranks = _ranks_of(part)
    colours = RankColours(ranks.values())
    yield _verdict(integrity)
    yield facts(_figures(part, summary))
    if integrity.wrong:
        rows = [[one] for one in integrity.wrong[:_MOST_FINDINGS]]
        more = len(integrity.wrong) - len(rows)
        about = f"{more:,} more are not listed: holdfast verify lists all." if more else ""
        yield section("What is damaged", about, table(["where, and what"], rows))
    # By the dots of names: a flat state has no other structure.
    yield section("Size by module", "The area shows the bytes.", treemap(make_tree(part.entries, {}, "size")))
    if colours.ranks or any(tensor.chunk_count > 1 for tensor in part.tensors):
        yield section(
            "Which rank wrote what",
            "The first dimension goes down, the second across. Tensors divided alike are drawn once.",
            rank_legend(colours),
            shard_map(part.tensors, ranks, colours),
        )
    if part.record is not None and part.record.ranks:
        yield save_section(part.record)
    yield columns(
        section("Data types", "", bars(_dtype_bars(summary), most=_MOST_BARS, label="bytes by data type")),
        *_balance(summary, ranks, colours),
    )
    yield _largest(part)
    yield _checks(part, summary, integrity)


def _verdict(integrity: Integrity) -> str:
    if integrity.wrong:
        return verdict("bad", "Damaged", f"{counted(len(integrity.wrong), 'problem')} found.")
    if integrity.checked_nbytes is None:
        said = "All files exist and have the right size. Their content was not read for this page."
        return verdict("dim", "Complete", said)
    if integrity.checked_nbytes == 0:
        said = (
            "All files exist and have the right size. There are no checksums to compare their content with."
        )
        return verdict("dim", "Complete", said)
    if integrity.unchecked:
        said = (
            f"{size_text(integrity.checked_nbytes)} were read, and nothing of that is damaged. "
            f"{counted(integrity.unchecked, 'item')} could not be checked: see the notes at the end."
        )
        return verdict("dim", "Sound as far as it could be checked", said)
    said = f"All {size_text(integrity.checked_nbytes)} were read; nothing is damaged."
    return verdict("good", "Sound", said)


def _figures(part: Inventory, summary: dict[str, Any]) -> dict[str, str]:
    stored = sum(file["nbytes"] or 0 for file in summary["files"]) + summary["metadata"]["nbytes"]
    figures = {
        "on disk": size_text(stored),
        "tensors": f"{summary['tensors']:,} ({size_text(summary['tensor_nbytes'])})",
        "other values": f"{summary['objects']:,} ({size_text(summary['object_nbytes'])})",
        "chunks": f"{summary['chunks']:,}",
        "files": f"{len(summary['files']) + bool(summary['metadata']['name']):,}",
        "ranks": "not recorded" if summary["world_size"] is None else f"{summary['world_size']:,}",
    }
    if part.record is not None:
        figures["saved in"] = f"{seconds_text(part.record.seconds)} ({rate_text(part.record.rate)})"
        figures["trainer waited"] = seconds_text(part.record.stall)
    return figures


def _checks(part: Inventory, summary: dict[str, Any], integrity: Integrity) -> str:
    checksums = (
        f"a CRC-32 for every {size_text(part.block_size)}" if part.block_size else "none of holdfast's"
    )
    transforms = [f"{' + '.join(stack)}: {counted(n, 'item')}" for stack, n in part.transforms.items()]
    rows = [
        ("checksums", checksums),
        ("content", "read" if integrity.checked_nbytes is not None else "not read; --verify reads it"),
        ("torch.distributed.checkpoint", "can read it" if summary["torch_readable"] else "cannot read it"),
        ("saved as", summary["checkpoint_id"] or "not recorded"),
        ("save id", summary["save_id"] or "not recorded"),
        ("transforms", "; ".join(transforms) or "none"),
        *(("note", note) for note in integrity.notes[:_MOST_FINDINGS]),
    ]
    return section("Format and integrity", "", table((), rows, keys=(1,), stacked=True))


def _dtype_bars(summary: dict[str, Any]) -> list[Bar]:
    return [
        Bar(total["dtype"], total["nbytes"], counted(total["tensors"], "tensor"))
        for total in summary["dtypes"]
    ]


def _balance(summary: dict[str, Any], ranks: dict[str, int | None], colours: RankColours) -> Iterator[str]:
    """How even ranks and files are."""
    sizes = {file["name"]: file["nbytes"] or 0 for file in summary["files"]}
    by_rank: Counter[int] = Counter()
    for name, nbytes in sizes.items():
        rank = ranks.get(name)
        if rank is not None:
            by_rank[rank] += nbytes
    if len(by_rank) > 1:
        many = len(by_rank) > _MOST_BARS
        order = by_rank.most_common() if many else sorted(by_rank.items())
        rows = [Bar(f"rank {rank}", nbytes, colour=colours.of(rank)) for rank, nbytes in order]
        mean = sum(by_rank.values()) / len(by_rank)
        most = max(by_rank.values()) / mean - 1 if mean else 0.0
        about = (
            f"The largest share is {most:.0%} above the mean."
            if round(100 * most)
            else "All shares are equal."
        )
        yield section("Bytes by rank", about, bars(rows, most=_MOST_BARS, label="bytes by rank"))
    files = sorted(sizes.items(), key=lambda pair: -pair[1])
    if len(files) != len(by_rank):
        rows = [Bar(name, nbytes, colour=colours.of(ranks.get(name))) for name, nbytes in files]
        yield section("Bytes by file", "", bars(rows, most=_MOST_BARS, label="bytes by file"))


def _largest(part: Inventory) -> str:
    entries = sorted(part.entries, key=lambda entry: -entry_nbytes(entry))[:_MOST_LARGEST]
    rows = [(entry.key, *_kind(entry), size_text(entry_nbytes(entry))) for entry in entries]
    head = ("key", "type", "shape", "size")
    return section("Largest values", "", table(head, rows, numbers=(3,), stacked=True))


def _kind(entry: Entry) -> tuple[str, str]:
    return (entry.dtype, shape_text(entry.shape)) if isinstance(entry, TensorEntry) else ("object", "")


def _ranks_of(part: Inventory) -> dict[str, int | None]:
    """For each file the rank that wrote it; None if its name does not say."""
    parsed = {name: parse_data_file(name) for name in part.files}
    return {name: file.rank if file else None for name, file in parsed.items()}
