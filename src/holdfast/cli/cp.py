"""``holdfast cp``: copies a checkpoint between stores, checks the copy, and only then makes it exist."""

import argparse
import contextlib
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from holdfast._any_format import open_checkpoint
from holdfast._contents.checking_parts import part_jobs
from holdfast._contents.findings import Findings
from holdfast._contents.inventory import Inventory, read_inventory
from holdfast._contents.opening import Checkpoint, SafetensorsModel
from holdfast._format import metadata_file
from holdfast._format.metadata_file import LARGEST_METADATA
from holdfast._io import pool
from holdfast._io.file_access import FileReader
from holdfast._io.lease import Lease, take_lease
from holdfast._io.places import open_place
from holdfast._io.progress import STRIDE, ProgressTracker
from holdfast._io.store import ByteStore, FileSource
from holdfast._storage import cleanup
from holdfast.cli.exit_codes import FINE
from holdfast.cli.text import Style, counted, printable, size_text, write_json, write_lines
from holdfast.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    IntegrityError,
    StorageError,
    UsageError,
)
from holdfast.progress_display import tracking

__all__ = ["run"]

_THREADS = 4


def run(arguments: argparse.Namespace) -> int:
    """Copy, check, commit; print what was copied and return the exit code."""
    checkpoint = open_checkpoint(arguments.path)
    if type(checkpoint) is not Checkpoint:
        is_model = isinstance(checkpoint, SafetensorsModel)
        what = "model of safetensors files" if is_model else "file of torch.save"
        raise UsageError(
            f"{checkpoint.url}: is a {what}, and cp copies checkpoints: use `holdfast convert`, or copy its "
            "files",
            path=checkpoint.url,
        )
    target = open_place(arguments.target)
    if target.url == checkpoint.store.url:
        raise UsageError(f"{target.url}: source and target are the same place", path=target.url)
    target.make()
    files = nbytes = 0
    for rank, name in checkpoint.metadata_names:
        data = checkpoint.store.read(name, max_bytes=LARGEST_METADATA)
        part = read_inventory(data, path=f"{checkpoint.store.url}/{name}", rank=rank)
        _CopiedPart(checkpoint.store, target, name, bytes(data), part, arguments).copy()
        files, nbytes = files + len(part.files), nbytes + len(data) + sum(part.files.values())
    if arguments.json:
        document = {"schema": "holdfast.cp/1", "path": arguments.path, "target": arguments.target}
        write_json({**document, "files": files, "nbytes": nbytes})
    elif not arguments.quiet:
        what = f"{counted(files, 'data file')}, {size_text(nbytes)}, all checked"
        write_lines([f"{printable(arguments.path)} -> {printable(arguments.target)}: {what}"])
    return FINE


@dataclass
class _CopiedPart:
    """One metadata file and the data files that it names, on their way.

    The target's own checkpoint stays whole until the last step, the commit, which replaces one file.

    Attributes:
        source: Where they are.
        target: Where they go.
        name: The metadata file.
        data: Its content.
        part: What it says.
        arguments: Those of the command.
    """

    source: FileSource
    target: ByteStore
    name: str
    data: bytes
    part: Inventory
    arguments: argparse.Namespace

    def copy(self) -> None:
        """Copy everything, check it, and commit.

        Raises:
            CheckpointExistsError: There is another checkpoint, which must not be replaced.
            StorageError: There is one whose files have the same names.
            IntegrityError: A file is missing, or a byte of the copy is not the one that was saved.
        """
        there = self.target.exists(self.name)
        if there and self.target.read(self.name, max_bytes=LARGEST_METADATA) == self.data:
            self._check()  # an earlier copy
            return
        if there and not self.arguments.overwrite:
            raise CheckpointExistsError(
                f"{self.target.url}: has a checkpoint already; --overwrite replaces it", path=self.target.url
            )
        lease = take_lease(
            self.target, self.part.save_id or uuid.uuid4().hex, shared=self.part.rank is not None
        )
        try:
            lease.keep()
            self._copy_under(lease)
        finally:
            lease.release()

    def _copy_under(self, lease: Lease) -> None:
        rank = self.part.rank
        cleanup.remove_dead(self.target, lease)
        replaced = cleanup.files_to_replace(self.target, rank=rank)
        clashing = sorted(replaced & self.part.files.keys())
        if clashing:
            raise StorageError(
                f"{self.target.url}: has another checkpoint with a file {clashing[0]}, which the copy would "
                "overwrite before it is complete. Copy to another place.",
                path=self.target.url,
            )
        # What a copy that was killed has left is not to be trusted.
        self.target.delete(self.target.names() & self.part.files.keys() if self.target.can_list else ())
        try:
            self._copy_files()
            self.target.sync()
            self._check()
            lease.note_replaced(map(cleanup.known_by, replaced))
            lease.check()
            self.target.replace(self.name, self.data, overwrite=self.arguments.overwrite)
        except BaseException:
            used = partial(cleanup.files_named_by, self.target, self.name)
            if not cleanup.discard_files(self.target, self.part.files, used):
                lease.leave()
            raise
        footer = self.data[-metadata_file.FOOTER_NBYTES :]
        cleanup.remove_replaced(self.target, lease, self.part.files, replaced, footer=footer, rank=rank)

    def _copy_files(self) -> None:
        with self._showing("copying", sum(self.part.files.values())) as tracker:
            jobs = [self._file_job(name, tracker) for name in self.part.files]
            pool.run(jobs, threads=_THREADS)

    def _file_job(self, name: str, tracker: ProgressTracker) -> Callable[[], None]:
        def job() -> None:
            with self._opened(name) as reader:
                buffer = memoryview(bytearray(min(STRIDE, reader.nbytes)))
                with self.target.create(name, nbytes_hint=reader.nbytes) as writer:
                    writer.progress = tracker
                    for at in range(0, reader.nbytes, STRIDE):
                        piece = buffer[: min(STRIDE, reader.nbytes - at)]
                        reader.read_into(at, piece)
                        writer.write(piece)

        return job

    def _opened(self, name: str) -> FileReader:
        try:
            return self.source.open(name)
        except CheckpointNotFoundError as error:
            raise IncompleteCheckpointError(
                f"{self.source.url}: {name} is missing: it was deleted, or was not copied with the rest. Put "
                "it back, or copy another checkpoint.",
                path=f"{self.source.url}/{name}",
            ) from error

    def _check(self) -> None:
        """Read the copy, and compare every byte with the checksums of the checkpoint."""
        report = Findings()
        jobs = list(part_jobs(self.target, self.part, self.target.sizes(self.part.files), report))
        with self._showing("checking", sum(self.part.files.values())) as tracker:
            report.on_progress = tracker.advance
            pool.run(jobs, threads=_THREADS)
        damages = report.sorted_damages()
        if damages:
            first = damages[0]
            raise IntegrityError(
                f"{self.target.url}: the copy is not what was saved: {first.file or self.name}: "
                f"{first.message} ({counted(len(damages), 'problem')} in all). Run `holdfast verify` on the "
                "source.",
                path=self.target.url,
            )

    @contextlib.contextmanager
    def _showing(self, doing: str, nbytes: int) -> Iterator[ProgressTracker]:
        is_shown = Style(sys.stderr).is_terminal and not (self.arguments.quiet or self.arguments.json)
        with tracking(is_shown, f"{doing} {printable(self.arguments.target)}") as shown:
            tracker = shown or ProgressTracker()
            tracker.begin(nbytes)
            yield tracker
