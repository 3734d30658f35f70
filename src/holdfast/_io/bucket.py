"""Owns a checkpoint's place in an object store: S3, Google Cloud Storage, Azure, through obstore.

A place is a prefix of a bucket. An object appears when it is complete, in one step, and is durable then.
"""

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal
from urllib.error import HTTPError

import obstore
from obstore.exceptions import AlreadyExistsError, GenericError, PreconditionError
from typing_extensions import Buffer

from holdfast._format.names import parse_data_file
from holdfast._io.bucket_client import BucketAccess, refuse_forked_process
from holdfast._io.bucket_errors import PAUSES, may_pass, persist, rest, translated
from holdfast._io.bucket_files import (
    PARTS_IN_FLIGHT,
    READ_NBYTES,
    SPARE_BUFFERS,
    BucketReader,
    BucketWriter,
)
from holdfast._io.endpoint_probe import expect_listener
from holdfast._io.local_buffers import BUFFER_NBYTES
from holdfast._io.s3_uploads import S3Uploads
from holdfast._io.store import (
    Below,
    ByteStore,
    FileFacts,
    StoreTraits,
    check_name,
    check_nbytes,
    existing_file,
)
from holdfast._io.streams import byte_view
from holdfast.errors import AccessDeniedError, CheckpointNotFoundError, StorageError, UnsafeMetadataError

logger = logging.getLogger(__name__)

# By its end one save's metadata is told from another's: it has a checksum of the rest.
_COMPARED = 256
_CONFLICTS = (AlreadyExistsError, PreconditionError)
_NO_SUCH_RANGE = "status code: 416 "
_NOT_FOR_US = {403, 405, 501}
_MOST_LISTED = 10_000


class BucketStore(ByteStore):
    """A prefix of a bucket.

    It keeps no connection of its own, can be pickled, and finds its client again in another process.

    Args:
        access: How to reach it.
    """

    traits = StoreTraits(
        writer_nbytes=(PARTS_IN_FLIGHT + SPARE_BUFFERS) * BUFFER_NBYTES,
        requests_in_flight=8,
        read_gap_nbytes=1 << 20,
        read_nbytes=READ_NBYTES,
        request_nbytes=READ_NBYTES,
        may_write_late=True,
        creates_at_once=True,
        looks_below=False,
    )

    def __init__(self, access: BucketAccess) -> None:
        self.url = access.url.rstrip("/")
        self._access = access
        self._opened: Any = None
        self._may_list: bool | None = None
        self._listed: dict[str, Any] = {}  # what obstore tells of an object, by name

    def __getstate__(self) -> dict[str, Any]:
        # The writer process may have been started before the environment had its present values.
        return {**self.__dict__, "_access": self._access.settled(), "_opened": None, "_listed": {}}

    @property
    def _client(self) -> Any:
        refuse_forked_process()
        if self._opened is None:
            opened, endpoint = self._access.open(), self._access.address
            if endpoint is not None and "proxy_url" not in self._access.client_options:
                expect_listener(endpoint, path=self.url)
            self._opened = opened
        return self._opened

    def _path(self, name: str) -> str:
        return f"{self.url}/{name}"

    @property
    def can_list(self) -> bool:
        """Whether the credentials allow to list the bucket. Found out once, by trying."""
        if self._may_list is None:
            try:
                self.list()
            except AccessDeniedError as error:
                logger.warning(
                    "%s: without the right to list, leftovers of killed saves stay: %s", self.url, error
                )
                self._may_list = False
        return bool(self._may_list)

    def make(self) -> None:
        """Nothing: a prefix need not be made."""

    def list(self) -> dict[str, int]:
        """The name and size of every object directly below the prefix."""
        found = persist(self.url, lambda: obstore.list_with_delimiter(self._client)["objects"])
        self._may_list = True
        # An object without a name is the mark of an empty folder that some tools make.
        self._listed = {each["path"]: each for each in found if each["path"]}
        return {name: each["size"] for name, each in self._listed.items()}

    def below(self, name: str | None = None, *, is_brief: bool = False) -> Below:
        """The objects and prefixes directly below this prefix; see FileSource.

        Without a name this takes one request for 1,000 of them. With one it takes a request for 1,000 objects
        at any depth.
        """
        if name is None:
            return persist(self.url, self._prefixes)
        most = _MOST_LISTED if is_brief else None
        return persist(self.url, lambda: self._objects_below(name, most))

    def _prefixes(self) -> Below:
        found = obstore.list_with_delimiter(self._client)
        files = {each["path"] for each in found["objects"]}
        return Below(files, dict.fromkeys(prefix.rstrip("/") for prefix in found["common_prefixes"]))

    def _objects_below(self, name: str, most: int | None) -> Below:
        files, folders = set[str](), dict[str, FileFacts | None]()
        objects = itertools.chain.from_iterable(obstore.list(self._client, chunk_size=1000))
        for each in itertools.islice(objects, most):
            first, _, rest = each["path"].partition("/")
            if not rest:
                files.add(first)
                continue
            folders.setdefault(first, None)
            if rest == name:
                folders[first] = _facts(each)
        return Below(files, folders)

    def exists(self, name: str) -> bool:
        """Whether there is such an object."""
        return self._head(check_name(name)) is not None

    def facts(self, name: str) -> FileFacts | None:
        """What is known of an object; see FileSource. Its time is in whole seconds."""
        found = self._head(check_name(name))
        return None if found is None else _facts(found)

    def _head(self, name: str) -> Any:
        try:
            with translated(self._path(name)):
                return obstore.head(self._client, name)
        except CheckpointNotFoundError:
            return None
        except AccessDeniedError:
            if self.can_list:
                raise
            return None  # what does not exist is answered so to those who may not list

    def open(self, name: str) -> BucketReader:
        """Open an object for reading; see FileSource. Asks for its size only if no listing has told it."""
        check_name(name, error=UnsafeMetadataError)
        # Other objects may have been replaced since they were listed.
        found = self._listed.get(name) if parse_data_file(name) else None
        if found is None:
            with translated(self._path(name)):
                found = obstore.head(self._client, name)
        return BucketReader(self._path(name), self._client, name, found["size"], found["e_tag"])

    def read(self, name: str, *, max_bytes: int) -> bytearray:
        """The whole of a small object, in one request; see FileSource."""
        path = self._path(check_name(name, error=UnsafeMetadataError))

        def request() -> bytearray:
            found = obstore.get(self._client, name)
            check_nbytes(path, found.meta["size"], max_bytes)
            return bytearray(found.bytes())

        return persist(path, request)

    def create(self, name: str, *, nbytes_hint: int | None = None, durable: bool = True) -> BucketWriter:  # noqa: ARG002
        """Start a new object; see ByteStore.

        A name that is taken is not noticed: stores cannot refuse one for objects in parts. Data files have
        names that no other save uses.
        """
        return self._writer(name, nbytes_hint, self._discard)

    def create_over(self, name: str, *, nbytes_hint: int | None = None) -> BucketWriter:
        """Start an object that replaces another one when it is complete; see ByteStore."""
        return self._writer(name, nbytes_hint, self._abort_upload)

    def _writer(self, name: str, nbytes_hint: int | None, discard: Callable[[str], None]) -> BucketWriter:
        path = self._path(check_name(name))
        return BucketWriter(path, self._client, name, nbytes_hint or 0, partial(discard, name))

    def replace(self, name: str, *pieces: Buffer, durable: bool = True, overwrite: bool = True) -> None:  # noqa: ARG002
        """Put the pieces under ``name`` by one request; see ByteStore.

        An error does not tell whether the store has carried the request out: a server may do so and fail to
        answer, and the second try then meets the result of the first. So the object is read back: if it is
        the one that was to be put there, this succeeded.
        """
        path = self._path(check_name(name))
        data = b"".join(map(byte_view, pieces))
        mode: Literal["overwrite", "create"] = "overwrite" if overwrite else "create"
        for pause in (*PAUSES, None):
            error = self._try_to_put(name, data, mode)
            if error is None:
                return
            found = self._compare(name, data, error)
            if found == "same":
                return
            if found == "other" and not overwrite:
                raise existing_file(path) from error
            if pause is None or not (isinstance(error.__cause__, _CONFLICTS) or may_pass(error)):
                raise error
            logger.warning("%s Trying again.", error)
            rest(pause)

    def _try_to_put(
        self, name: str, data: bytes, mode: Literal["overwrite", "create"]
    ) -> StorageError | None:
        """Put an object. Returns an error that does not tell whether it is there, and raises others."""
        try:
            with translated(self._path(name)):
                obstore.put(self._client, name, data, mode=mode, use_multipart=False)
        except StorageError as error:
            if isinstance(error.__cause__, (*_CONFLICTS, GenericError)):
                return error
            raise
        return None

    def _compare(self, name: str, data: bytes, error: StorageError) -> Literal["same", "other", "absent"]:
        """What is under a name after a put that raised ``error``."""
        start = max(0, len(data) - _COMPARED)
        try:
            with translated(self._path(name)):
                # Azure cannot be asked for the end of an object.
                found = obstore.get(self._client, name, options={"range": (start, len(data))})
                is_same = found.meta["size"] == len(data) and bytes(found.bytes()) == data[start:]
                return "same" if is_same else "other"
        except CheckpointNotFoundError:
            return "absent"
        except StorageError as unknown:
            if isinstance(unknown, AccessDeniedError) and not self.can_list:
                return "absent"  # what does not exist is answered so to those who may not list
            if _NO_SUCH_RANGE in str(unknown):
                return "other"  # it is shorter
            raise StorageError(
                f"{error} Whether it was written is not known, because it cannot be read now: {unknown}",
                path=error.path,
            ) from error

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; a missing one is fine."""
        doomed = [check_name(name) for name in names]
        if doomed:
            with contextlib.suppress(CheckpointNotFoundError):
                persist(self.url, lambda: obstore.delete(self._client, doomed))

    def _discard(self, name: str) -> None:
        """After an upload that failed: remove the object, and what was uploaded of it."""
        try:
            self.delete([name])
        except Exception as error:  # noqa: BLE001 - the reason why it failed is on its way to the caller
            logger.warning("%s: an upload that failed could not be removed: %s", self._path(name), error)
        self._abort_upload(name)

    def _abort_upload(self, name: str) -> None:
        """Remove what was uploaded of an object that will not be completed."""
        try:
            self.abort_unfinished(lambda found: found == name)
        except Exception as error:  # noqa: BLE001 - the reason why it failed is on its way to the caller
            logger.warning("%s: an upload that failed could not be removed: %s", self._path(name), error)

    def abort_unfinished(self, is_dead: Callable[[str], bool]) -> None:
        """Abort uploads in parts that nobody will complete; see ByteStore.

        Only on S3, and only if the server lets us.
        """
        keys = self._access.s3_keys()
        if keys is None:
            return
        uploads = S3Uploads(self._access, keys)
        prefix = f"{self._access.prefix}/" if self._access.prefix else ""
        try:
            for upload in list(uploads.find(prefix)):
                if is_dead(upload.key.removeprefix(prefix)):
                    uploads.abort(upload)
        except HTTPError as error:
            error.close()
            if error.code not in _NOT_FOR_US:
                raise
            logger.info("%s: unfinished uploads cannot be looked for: %s", self.url, error)

    def sync(self) -> None:
        """Nothing: an object that the store has confirmed is durable, its name included."""


def _facts(found: Any) -> FileFacts:
    modified_ns = int(found["last_modified"].timestamp()) * 1_000_000_000
    return FileFacts(found["size"], modified_ns, str(found["e_tag"] or modified_ns))
