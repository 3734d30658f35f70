"""Deletes the folder of a step: a crash at any instant leaves a checkpoint, or nothing that looks like one.

The order: a file in the root says which files go; the commit file goes, and that is made durable; then all
others go, the folder, and the file in the root. A deletion that was cut off is finished from that file. It
names the files, so that a save into the same folder that has begun since loses nothing.
"""

import json

from holdfast._format.foreign_manifest import data_files_in
from holdfast._format.metadata_file import LARGEST_METADATA
from holdfast._format.names import METADATA, metadata_rank, parse_data_file, save_of_lease
from holdfast._io.lease_file import living_and_dead
from holdfast._io.store import ByteStore
from holdfast._steps.root_files import deleting_name, marks_of_damage, pinned_name, read_json
from holdfast._steps.step_list import Step
from holdfast.errors import IntegrityError


def delete_step(root: ByteStore, place: ByteStore, step: Step) -> bool:
    """Delete a complete step, with all files in its folder.

    Args:
        root: The root of the run.
        place: The folder of the step.
        step: The step, as it was when it was chosen.

    Returns:
        False if it was left alone, because it was saved again meanwhile or somebody saves into it now.

    Raises:
        OSError, CheckpointError: Some of it could not be deleted. ``finish_deletion`` may be called later.
    """
    assert step.commit is not None
    names, mark = place.names(), deleting_name(step.folder)
    root.replace(mark, json.dumps({"files": sorted(names - {METADATA})}).encode())
    # The file in the root has the time that it is now, by the clock of the store.
    living, _ = living_and_dead(
        place, [name for name in names if save_of_lease(name)], root.modified_ns(mark)
    )
    if living or place.modified_ns(METADATA) != step.commit.modified_ns:
        root.delete([mark])
        return False
    place.delete([METADATA, *(name for name in names if metadata_rank(name) is not None)])
    place.sync()
    finish_deletion(root, place, step.folder)
    return True


def finish_deletion(root: ByteStore, place: ByteStore, folder: str) -> None:
    """Go on with a deletion that has begun; see ``delete_step``. Files that were made since stay."""
    mark = deleting_name(folder)
    began_ns = root.modified_ns(mark)
    noted = {name for name in read_json(root, mark).get("files", ()) if isinstance(name, str)}
    doomed = noted & place.names()
    is_there = place.exists(METADATA)
    if is_there:
        # Cut off before the commit file went, so that all stays; or saved again since. No other save has
        # files of the names that ours have.
        metadata = place.read(METADATA, max_bytes=LARGEST_METADATA)
        try:
            named = set(data_files_in(metadata, path=f"{place.url}/{METADATA}"))
        except IntegrityError:
            named = doomed  # nobody knows which are used: all stay, and the step may be chosen again
        doomed = {name for name in doomed - named if _belongs_to_one_save(name)}
    place.delete([name for name in sorted(doomed) if _is_from_before(place, name, began_ns)])
    gone = [mark]
    if not is_there:
        place.remove_if_empty()
        gone += [pinned_name(folder), *marks_of_damage(folder, root.names())]
    root.delete(gone)


def _belongs_to_one_save(name: str) -> bool:
    file = parse_data_file(name)
    return file is not None and file.save is not None


def _is_from_before(place: ByteStore, name: str, began_ns: int | None) -> bool:
    """Whether a file is one that was there when the deletion began, and not a new one of the same name."""
    if began_ns is None or _belongs_to_one_save(name) or save_of_lease(name):
        return True
    return (place.modified_ns(name) or 0) <= began_ns
