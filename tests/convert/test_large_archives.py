"""Files of ``torch.save`` beyond 4 GiB, and with more storages than the old fields of zip count."""

import io
import zipfile
import zlib
from pathlib import Path

import torch

from holdfast._format.torch_save_zip import ArchiveLayout
from holdfast._objects.saved_pickle import LaterTensor, pickle_state
from holdfast.format_utils import TorchSaveReader
from holdfast.metadata import TensorStorageMetadata


def test_a_storage_of_5_gib_and_one_behind_it(tmp_path: Path) -> None:
    """The file is sparse: only the bytes around the content of the large storage are written."""
    path, nbytes = tmp_path / "x.pt", 5 << 30
    small = b"\1\2\3\4"
    state = {
        "large": LaterTensor(torch.uint8, (nbytes,), requires_grad=False, storage=0),
        "small": LaterTensor(torch.uint8, (4,), requires_grad=False, storage=1),
    }
    pickled, layout = pickle_state(state).pickled, ArchiveLayout()
    with path.open("wb") as file:
        for name, content in (
            ("data.pkl", pickled),
            ("data/0", None),
            ("data/1", small),
            ("version", b"3\n"),
        ):
            file.write(layout.header(f"archive/{name}", nbytes if content is None else len(content)))
            if content is None:
                file.seek(nbytes, io.SEEK_CUR)
            else:
                file.write(content)
            file.write(layout.descriptor(7 if content is None else zlib.crc32(content)))
        file.write(layout.directory())
    loaded = torch.load(path, mmap=True, weights_only=True)
    assert loaded["large"].shape == (nbytes,)
    assert loaded["small"].tolist() == [1, 2, 3, 4]
    with zipfile.ZipFile(path) as archive:
        assert archive.read("archive/data/1") == small
        assert archive.getinfo("archive/data/0").file_size == nbytes
    metadata = TorchSaveReader(path).read_metadata()
    entry = metadata.state_dict_metadata["large"]
    assert isinstance(entry, TensorStorageMetadata)
    assert entry.size == (nbytes,)
    assert sum(info.length for info in metadata.storage_data.values()) == nbytes + 4


def test_more_records_than_65535(tmp_path: Path) -> None:
    count, layout, stream = 70_000, ArchiveLayout(), io.BytesIO()
    for number in range(count):
        stream.write(layout.header(f"archive/data/{number}", 1) + b"x" + layout.descriptor(zlib.crc32(b"x")))
    stream.write(layout.directory())
    with zipfile.ZipFile(stream) as archive:
        assert len(archive.namelist()) == count
        assert archive.read(f"archive/data/{count - 1}") == b"x"
