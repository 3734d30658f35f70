"""``holdfast clean``: removes what killed saves have left."""

import argparse
import time
import uuid

from holdfast._format.names import METADATA, is_leftover, save_of_lease
from holdfast._format.safetensors_index import INDEX
from holdfast._io.lease import take_lease
from holdfast._io.lease_file import EXPIRY_SECONDS, living_and_dead
from holdfast._io.store import ByteStore
from holdfast._steps.root_files import steps_being_deleted
from holdfast._steps.step_deletion import finish_deletion
from holdfast._storage.cleanup import known_by, remove_dead
from holdfast.cli.exit_codes import FINE
from holdfast.cli.run_steps import open_root
from holdfast.cli.text import counted, printable, write_json, write_lines

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Clean a folder and those below it; returns the exit code."""
    root = open_root(arguments.path, None)
    below = root.store.below()
    removed: dict[str, int] = {}
    cut_off = steps_being_deleted(below.files)
    for folder in ["", *sorted(below.folders)]:
        place = root.open_step(folder) if folder else root.store
        count = 0
        if folder in cut_off and not arguments.dry_run:
            before = len(place.names())
            finish_deletion(root.store, place, folder)
            count = before - len(place.names())
        count += _clean(place, dry_run=arguments.dry_run)
        if count or folder in cut_off:
            removed[folder or "."] = count
    if arguments.json:
        write_json({"schema": "holdfast.clean/1", "path": arguments.path, "removed": removed})
        return FINE
    verb = "would remove" if arguments.dry_run else "removed"
    lines = [f"{printable(folder)}: {verb} {counted(count, 'file')}" for folder, count in removed.items()]
    write_lines(lines or [f"{printable(arguments.path)}: nothing is left of killed saves"])
    return FINE


def _clean(place: ByteStore, *, dry_run: bool) -> int:
    """Remove what dead saves have left in one folder; how many files that were, or would be."""
    names = place.names()
    living, dead = living_and_dead(place, [name for name in names if save_of_lease(name)], None)
    unnamed = [name for name in names if is_leftover(name) and _is_old(place, name)]
    if living or not (dead or unnamed):
        return 0
    if dry_run:
        saves = {save_of_lease(name) for name in dead}
        files = [name for name in names if known_by(name) in saves]
        return len(dead) + len(unnamed) + (0 if METADATA in names or INDEX in names else len(files))
    place.delete(unnamed)
    if dead:
        _remove_dead(place)
    left = place.names()
    if not left:
        place.remove_if_empty()
    return len(names - left)


def _remove_dead(place: ByteStore) -> None:
    """Do what a save does at its beginning."""
    lease = take_lease(place, uuid.uuid4().hex, shared=False)
    try:
        remove_dead(place, lease)
    finally:
        lease.release()


def _is_old(place: ByteStore, name: str) -> bool:
    """Whether no living save can be about to rename a file."""
    modified_ns = place.modified_ns(name)
    return modified_ns is not None and time.time_ns() - modified_ns > EXPIRY_SECONDS * 1e9
