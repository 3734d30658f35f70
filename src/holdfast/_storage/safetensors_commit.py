"""Owns how the files of a model get their names: the model that was there stays whole until the new one is.

Readers find a model by ``model.safetensors.index.json``, or by the name ``model.safetensors`` where there is
no index. Some look for torch's shards, which have no index: a model for them is one file with the name of the
first shard. Files are written under temporary names, and then:

1. A lone ``model.safetensors``, in a folder without an index: one rename is the commit. So it is for a lone
   shard, unless the folder has other shards or a ``model.safetensors``.
2. If no file has one of the new names, and there are no shards: the files get them, then the index is
   replaced, which is the commit.
3. If names are taken, by the model that is there or by anything else: the files get names that carry the
   save, and the index is replaced, which is the commit. The old files are removed. Then each file gets its
   usual name as a second name, the index is replaced by one with these, and the first names are removed.
   At last the index is removed, if a lone file needs none. Where there are no hard links, the names that
   carry the save stay.

A kill at any instant leaves an index whose files are all there, and all of one save.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from holdfast._contents.safetensors_files import read_checksums
from holdfast._format.names import is_leftover
from holdfast._format.safetensors import SUFFIX
from holdfast._format.safetensors_checksums import FileChecksums, digest_of, dump_checksums
from holdfast._format.safetensors_index import (
    CHECKSUMS,
    INDEX,
    LONE,
    build_index,
    is_shard,
    is_unfinished,
    name_after_save,
)
from holdfast._io.blocks import BLOCK_SIZE
from holdfast._io.lease import Lease
from holdfast._io.store import ByteStore
from holdfast._storage.cleanup import files_of_index
from holdfast._storage.safetensors_layout import ModelLayout

logger = logging.getLogger(__name__)


@dataclass
class ModelCommit:
    """The commit of one model, on the coordinator, once all ranks have written.

    Args:
        store: The folder.
        lease: The right to write there.
        layout: The files, which are there under their temporary names, without their headers.
        save_id: The save.
        confirm: Called directly before the commit; raises if it must not be.
        made: Takes the names that files get before the commit, to be removed if that fails.

    Attributes:
        names: What each file is called in the end, by its usual name.
    """

    store: ByteStore
    lease: Lease
    layout: ModelLayout
    save_id: str
    confirm: Callable[[], None]
    made: list[str]
    names: dict[str, str] = field(default_factory=dict)

    def run(self, checksums: Mapping[str, bytes]) -> None:
        """Write the headers, make the model exist, and remove what it replaces.

        Args:
            checksums: The CRC-32 of each block of each tensor, by its name.

        Raises:
            CheckpointError, OSError: Nothing was committed, or the commit itself has failed.
        """
        new = self._write_headers(checksums)
        there = names_there(self.store, self.layout)
        replaced = replaced_files(self.store, there)
        usual = [file.name for file in self.layout.files]
        after_save = [name_after_save(name, self.save_id) for name in usual]
        self.confirm()
        self.lease.note_replaced([*replaced, *usual, *after_save])
        self.lease.check()
        self._put_checksums({**read_checksums(self.store), **new})
        is_tidy = self._commit(there, replaced)
        self.made.clear()
        try:
            left = {name for name in self.lease.left_by_dead if name.endswith(SUFFIX)}
            self.store.delete((replaced | left | (set(usual) & there)) - set(self.names.values()))
            if not is_tidy:
                self._take_usual_names()
            self._put_checksums(new)
            self._remove_leftovers()
        except BaseException as error:
            self.lease.leave()
            if not isinstance(error, Exception):
                raise
            # Whatever it is: the model is complete, and the rest is in the way only.
            logger.warning("%s: the model is saved, but not cleaned up: %s", self.store.url, error)

    def _remove_leftovers(self) -> None:
        """Remove files that killed saves did not give their names. They do not tell whose they are."""
        names = names_there(self.store, self.layout)
        leftovers = [name for name in names if is_leftover(name) or is_unfinished(name)]
        if leftovers and not self.lease.others(names)[0]:
            self.store.delete(leftovers)

    def _write_headers(self, checksums: Mapping[str, bytes]) -> dict[str, FileChecksums]:
        found = {}
        for file in self.layout.files:
            sums = b"".join(checksums[tensor.key] for tensor in file.tensors)
            if self.layout.in_place:
                header = file.header(digest_of(sums))
                with self.store.open_ranges(file.temporary) as output:
                    output.write_at(0, memoryview(header))
            else:
                header = file.header(digest_of(self.save_id.encode()))
            found[digest_of(header)] = FileChecksums(file.nbytes, sums)
        return found

    def _put_checksums(self, files: Mapping[str, FileChecksums]) -> None:
        self.store.replace(CHECKSUMS, dump_checksums(files, BLOCK_SIZE))

    def _commit(self, there: set[str], replaced: set[str]) -> bool:
        """Make the model exist; return whether its files have their usual names."""
        usual = [file.name for file in self.layout.files]
        is_lone = not self.layout.has_index
        if not self.layout.in_place:
            self.names = {file.name: file.temporary for file in self.layout.files}
            if not is_lone or self.names.keys() != set(self.names.values()):
                self._put_index()
            return True
        is_tidy = there.isdisjoint(usual) and not any(map(is_shard, there))
        if is_lone:
            is_tidy = INDEX not in there and replaced.issubset(usual)
        self.names = {name: name if is_tidy else name_after_save(name, self.save_id) for name in usual}
        if is_lone and is_tidy:
            self.store.rename(self.layout.files[0].temporary, usual[0])
            self.store.sync()
            return True
        for file in self.layout.files:
            self.store.rename(file.temporary, self.names[file.name])
            self.made.append(self.names[file.name])
        self.store.sync()
        self._put_index()
        return is_tidy

    def _put_index(self) -> None:
        content = build_index(self.layout.weight_map(self.names), self.layout.total_nbytes())
        self.store.replace(INDEX, content)

    def _take_usual_names(self) -> None:
        if not all(self.store.link(name, usual) for usual, name in self.names.items()):
            self.store.delete(set(self.names) - set(self.names.values()))
            return
        self.store.sync()
        first, self.names = self.names, {usual: usual for usual in self.names}
        self._put_index()
        self.store.delete(first.values())
        if not self.layout.has_index:
            self.store.delete([INDEX])
            self.store.sync()


def names_there(store: ByteStore, layout: ModelLayout) -> set[str]:
    """The files of a folder; of a store that cannot list them those that matter for a model."""
    if store.can_list:
        return store.names()
    asked = [INDEX, LONE, CHECKSUMS, *(file.name for file in layout.files)]
    return {name for name in asked if store.exists(name)}


def replaced_files(store: ByteStore, there: set[str]) -> set[str]:
    """The files of the models in a folder, which a new model replaces.

    Raises:
        CheckpointError: The index cannot be read.
    """
    return files_of_index(store, there) | ({LONE} & there) | set(filter(is_shard, there))
