"""The suite that every ByteStore must pass."""

from pathlib import Path

import pytest

from holdfast._io.store import ByteStore
from holdfast.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    MetadataFormatError,
    StorageError,
    UnsafeMetadataError,
    UsageError,
)
from holdfast.testing.store_contract_base import MIB, pattern
from holdfast.testing.store_read_tests import StoreReadTests
from holdfast.testing.store_write_tests import StoreWriteTests

__all__ = ["StoreContract"]

BAD_NAMES = ["", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", "a\0b"]


class StoreContract(StoreWriteTests, StoreReadTests):
    """Subclass it, define ``make_store``, and let pytest collect the subclass.

    Attributes:
        durable: What ``create`` and ``replace`` are called with.
        refuses_taken_names: Whether ``create`` notices that a name is taken. A store that cannot, because it
            would have to ask before every upload, depends on the names of data files, which are new for
            each save.
    """

    @pytest.mark.parametrize("name", BAD_NAMES)
    def test_names_that_leave_the_folder_are_refused(self, store: ByteStore, name: str) -> None:
        """Every method checks the names it gets: names from metadata may be hostile."""
        for call in (
            store.create,
            store.exists,
            lambda n: store.replace(n, b""),
            lambda n: store.delete([n]),
        ):
            with pytest.raises(UsageError):
                call(name)
        for read in (store.open, lambda n: store.read(n, max_bytes=1)):
            with pytest.raises(UnsafeMetadataError):
                read(name)

    def test_make_may_be_called_again(self, store: ByteStore) -> None:
        """Every rank may call make, in any order, and no file is lost."""
        self.write(store, "kept", b"x")
        store.make()
        assert store.read("kept", max_bytes=1) == b"x"

    def test_replace_puts_the_whole_file_in_place(self, store: ByteStore) -> None:
        """Replace makes a new file or replaces an old one, and leaves no other file behind."""
        for data in (b"first", b"", pattern(3 * MIB), b"last"):
            store.replace("f", data, durable=self.durable)
            assert store.read("f", max_bytes=3 * MIB) == data
            assert store.list() == {"f": len(data)}

    def test_replace_can_be_told_not_to_overwrite(self, store: ByteStore) -> None:
        """A file that is there stays as it was, and nothing else is left behind."""
        store.replace("f", b"first", durable=self.durable, overwrite=False)
        with pytest.raises(CheckpointExistsError) as caught:
            store.replace("f", b"second", durable=self.durable, overwrite=False)
        assert str(caught.value.path).endswith("f")
        assert store.read("f", max_bytes=9) == b"first"
        assert store.list() == {"f": 5}

    def test_a_reader_keeps_the_file_that_it_opened(self, store: ByteStore) -> None:
        """A reader that is open during a replace gets the old bytes or an error, never a mix."""
        store.replace("f", b"old" * 1000, durable=self.durable)
        with store.open("f") as file:
            store.replace("f", b"new" * 1000, durable=self.durable)
            data = bytearray(3000)
            try:
                file.read_into(0, data)
            except StorageError:
                return
        assert data == b"old" * 1000

    def test_a_missing_file_is_named(self, store: ByteStore) -> None:
        """The error is CheckpointNotFoundError, which is a FileNotFoundError; exists is False."""
        for call in (lambda: store.open("gone"), lambda: store.read("gone", max_bytes=1)):
            with pytest.raises(CheckpointNotFoundError, match="gone") as caught:
                call()
            assert str(caught.value.path).endswith("gone")
        assert not store.exists("gone")

    def test_read_takes_no_memory_for_a_file_that_is_too_large(self, store: ByteStore) -> None:
        """The limit is inclusive, and a larger file is an error that names both sizes."""
        self.write(store, "f", b"abcd")
        assert store.read("f", max_bytes=4) == b"abcd"
        with pytest.raises(MetadataFormatError) as caught:
            store.read("f", max_bytes=3)
        assert (caught.value.expected, caught.value.found) == (3, 4)

    def test_listing_and_deleting(self, store: ByteStore) -> None:
        """List gives every file with its size; delete removes files and ignores missing ones."""
        for n in range(5):
            self.write(store, f"f{n}", bytes(n))
        assert store.list() == {f"f{n}": n for n in range(5)}
        store.delete(["f1", "never", "f3"])
        store.delete([])
        assert store.list() == {"f0": 0, "f2": 2, "f4": 4}
        assert [n for n in range(5) if store.exists(f"f{n}")] == [0, 2, 4]

    def test_a_store_that_was_never_made_is_empty(self, tmp_path: Path) -> None:
        """List and exists at a place that does not exist raise nothing and make nothing."""
        store = self.make_store(tmp_path / "nowhere")
        assert store.list() == {}
        assert not store.exists("f")
        store.delete(["f"])
        with pytest.raises(CheckpointNotFoundError):
            store.open("f")
