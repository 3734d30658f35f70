"""Owns writing safetensors files from front to back, where a store has no writes at any place of a file."""

from holdfast._io.file_access import FileWriter, RangeWriter
from holdfast._io.store import ByteStore
from holdfast.errors import UsageError


class StreamedFile(RangeWriter):
    """A file that takes ranges only in their order. It is made with its header, and ended with its last byte.

    Args:
        store: The place.
        name: The name of the file, which no file has.
        header: Its header.
        nbytes: Its size.
    """

    def __init__(self, store: ByteStore, name: str, header: bytes, nbytes: int) -> None:
        self.path = f"{store.url}/{name}"
        self._store, self._name = store, name
        self._header = header
        self._nbytes = nbytes
        self._file: FileWriter | None = None
        self._is_over = False

    def write_at(self, offset: int, view: memoryview) -> None:
        """Write all of ``view``, which must follow what was written before.

        Raises:
            UsageError: It does not.
        """
        file = self._begin()
        if offset != file.position:
            raise UsageError(
                f"{self.path}: this storage takes files from front to back only, and a tensor of the state "
                "is sharded in another order. Export whole tensors, or to a local or shared folder.",
                path=self.path,
            )
        file.write(view)
        if file.position == self._nbytes:
            # Not when all files are written: a store keeps memory for each that is open.
            self._end(file)

    def finish(self) -> None:
        """End the file, if its last byte has not done so."""
        if not self._is_over:
            self._end(self._begin())

    def close(self) -> None:
        """Remove a file that is not complete."""
        if self._file is not None and not self._is_over:
            self._is_over = True
            self._file.abort()

    def _begin(self) -> FileWriter:
        if self._file is None:
            self._file = self._store.create(self._name, nbytes_hint=self._nbytes)
            self._file.write(self._header)
        return self._file

    def _end(self, file: FileWriter) -> None:
        file.finish()
        self._is_over = True
