"""What stores tell of the folders below a place."""

from pathlib import Path

import pytest

from holdfast._io.fsspec_store import open_fsspec_url
from holdfast._io.places import open_place
from holdfast._io.store import Below, ByteStore
from holdfast.errors import NotAFolderError


@pytest.fixture(params=["local", "fsspec"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> ByteStore:
    if request.param == "local":
        return open_place(tmp_path / "run")
    return open_fsspec_url(f"memory://{tmp_path}/run")


def at(root: ByteStore, folder: str) -> ByteStore:
    place = f"{root.url}/{folder}"
    return open_place(place) if "://" not in place else open_fsspec_url(place)


def test_folders_are_told_with_the_facts_of_one_file(root: ByteStore) -> None:
    assert root.below() == Below(set(), {})
    for folder in ("a", "b"):
        store = at(root, folder)
        store.make()
        store.replace("data", b"123")
    at(root, "a").replace("commit", b"12345")
    root.replace("note", b"")
    assert root.below() == Below({"note"}, {"a": None, "b": None})
    files, folders, unseen = root.below("commit")
    assert not unseen
    assert files == {"note"}
    assert folders["b"] is None
    before = folders["a"]
    assert before is not None
    assert before.nbytes == 5
    at(root, "a").replace("commit", b"123456")
    after = root.below("commit").folders["a"]
    assert after is not None
    assert after.version != before.version


def test_only_an_empty_folder_is_removed(root: ByteStore) -> None:
    store = at(root, "a")
    store.make()
    store.replace("data", b"1")
    store.remove_if_empty()
    assert store.exists("data")
    store.delete(["data"])
    store.remove_if_empty()
    assert "a" not in root.below().folders


def test_a_file_is_no_root(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotAFolderError):
        open_place(tmp_path / "file").below()
