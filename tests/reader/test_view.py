"""``holdfast.open`` gives the same values of a state in whatever format it was saved."""

import gc
import os
import subprocess
import sys
import threading
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from tests.support.stock_torch import stock_save
from torch.distributed.tensor import Shard

import holdfast as hf
from holdfast.errors import (
    CheckpointNotFoundError,
    ChecksumError,
    IncompleteCheckpointError,
    MissingKeyError,
    UnsafeMetadataError,
    UsageError,
)
from holdfast.extension import ZStandard
from holdfast.testing import FakeRank, FakeRanks

pytestmark = pytest.mark.one_core


def tensors() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    return {
        "weight": torch.randn(60, 31, 3, generator=made),
        "large": torch.arange(900_000, dtype=torch.int32).reshape(300, 3000),
        "half": torch.randn(7, 5, generator=made).to(torch.bfloat16),
        "scalar": torch.tensor(7.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "turned": torch.arange(40.0).reshape(5, 8).t(),
        "flags": torch.tensor([True, False, True]),
    }


def state() -> dict[str, Any]:
    return {
        "model": tensors(),
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0)}},
            "groups": [{"lr": 0.1, "betas": (0.9, 0.95)}],
        },
        "epoch": 3,
        "blob": b"x" * 3000,
        "nothing": OrderedDict(),
    }


def save_zstd(path: Path) -> None:
    hf.save(state(), storage_writer=hf.FileSystemWriter(path, _extensions=[ZStandard()]))


def save_safetensors(path: Path) -> None:
    hf.save(
        {f"model.{key}": value.contiguous() for key, value in tensors().items()},
        storage_writer=hf.HuggingFaceStorageWriter(path, max_shard_size="2MB"),
    )


SAVED: dict[str, Callable[[Path], Any]] = {
    "ours": lambda path: hf.save(state(), checkpoint_id=path),
    "zstd": save_zstd,
    "torch": lambda path: stock_save(state(), checkpoint_id=path),
    "file.pt": lambda path: torch.save(state(), path),
    "safetensors": save_safetensors,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("views")
    for name, save in SAVED.items():
        save(made / name)
    return made


@pytest.fixture(params=list(SAVED))
def saved(request: pytest.FixtureRequest, root: Path) -> Path:
    return root / str(request.param)


INDICES: list[Any] = [
    ...,
    0,
    -1,
    slice(10, 20),
    (slice(10, 20), slice(None)),
    (..., 1),
    (slice(None, None, 7), 3),
    (slice(5, 50, 3), slice(2, -2, 2), slice(1, None)),
    (-3, slice(-5, None), -1),
    slice(20, 20),
    (Ellipsis, slice(0, 2)),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_an_index_gives_what_torch_gives(saved: Path, index: Any) -> None:
    expected = tensors()["weight"]
    with hf.open(saved) as view:
        found = view["model.weight"]
        assert torch.equal(found[index], expected[index])
        assert np.array_equal(found.numpy(index), expected[index].numpy())


@pytest.mark.parametrize("key", list(tensors()))
def test_whole_tensors_of_every_kind(saved: Path, key: str) -> None:
    expected = tensors()[key]
    with hf.open(saved) as view:
        found = view[f"model.{key}"]
        assert (found.shape, found.dtype) == (tuple(expected.shape), str(expected.dtype)[6:])
        whole = found.torch()
        assert whole.dtype == expected.dtype
        assert torch.equal(whole, expected)
        assert torch.equal(found[2:6], expected[2:6]) if expected.dim() else True


def test_read_gives_the_nested_state(root: Path) -> None:
    for name in ("ours", "zstd", "file.pt"):
        with hf.open(root / name) as view:
            found = view.read()
        expected = state()
        assert list(found) == list(expected)
        assert found["optimizer"]["groups"] == expected["optimizer"]["groups"]
        assert torch.equal(found["optimizer"]["state"][0]["step"], torch.tensor(3.0))
        assert (found["epoch"], found["blob"], found["nothing"]) == (3, b"x" * 3000, OrderedDict())
        for key, value in tensors().items():
            assert torch.equal(found["model"][key], value), (name, key)


def test_read_takes_keys_names_above_them_and_globs(root: Path) -> None:
    with hf.open(root / "ours") as view:
        assert list(view.read("model")["model"]) == list(tensors())
        assert list(view.read(["model.h*", "epoch"])) == ["model", "epoch"]
        assert view.find("*.lr") == ["optimizer.groups.0.lr"]
        with pytest.raises(MissingKeyError, match="no key 'nobody"):
            view.read(["epoch", "nobody.*"])


def test_numpy_needs_no_torch(root: Path) -> None:
    for name in ("ours", "zstd", "torch", "safetensors"):
        code = (
            f"import sys, holdfast; v = holdfast.open({str(root / name)!r}, framework='numpy');"
            "a = v['model.weight'][10:20]; t = v['model.turned'][...]; v.keys(); repr(v); v.metadata;"
            "e = v.read(['epoch', 'model.large']) if 'epoch' in v else {'epoch': 3};"
            "assert type(a).__name__ == 'ndarray' and t[1, 0] == 1.0 and e['epoch'] == 3;"
            "assert v.verify();"
            "assert 'torch' not in sys.modules, 'torch'"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, (name, done.stderr)


def test_a_part_of_a_compressed_tensor_takes_little_memory(tmp_path: Path) -> None:
    large = torch.arange(4 << 20, dtype=torch.int32).reshape(2048, 2048)
    hf.save({"w": large}, storage_writer=hf.FileSystemWriter(tmp_path, _extensions=[ZStandard()]))
    with hf.open(tmp_path, framework="numpy") as view:
        tracemalloc.start()
        try:
            part = view["w"][2000:2002, 5:7]
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert part.tolist() == large[2000:2002, 5:7].tolist()
    assert peak < large.nbytes / 2


def test_bfloat16_needs_ml_dtypes_in_numpy_and_says_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)  # so that it cannot be imported, installed or not
    with hf.open(root / "ours", framework="numpy") as view:
        with pytest.raises(UsageError, match="pip install ml_dtypes"):
            view["model.half"][0]
        assert np.asarray(view["model.flags"]).tolist() == [True, False, True]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")  # torch's own
def test_what_no_package_adds_to_numpy_is_not_said_to_be_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    hf.save({"c": torch.zeros(3, dtype=torch.complex32)}, checkpoint_id=tmp_path, no_dist=True)
    expected = 'numpy has no complex32: read it with framework="torch"'
    with hf.open(tmp_path, framework="numpy") as view, pytest.raises(UsageError, match=expected):
        view["c"][0]


def test_a_new_axis_is_refused_as_what_it_is(tmp_path: Path) -> None:
    hf.save({"w": torch.zeros(3, 4)}, checkpoint_id=tmp_path, no_dist=True)
    with hf.open(tmp_path) as view, pytest.raises(UsageError, match="not with NoneType"):
        view["w"][:, None, 1]


def nbytes_read() -> int:
    """How many bytes this process has read by system calls."""
    return int(Path("/proc/self/io").read_text().split()[1])


def reads_of(work: Callable[[], Any]) -> tuple[Any, int]:
    before = nbytes_read()
    found = work()
    return found, nbytes_read() - before - 200  # the files of /proc count too


def test_a_slice_reads_only_its_bytes(tmp_path: Path) -> None:
    whole = torch.arange(16 << 20, dtype=torch.int32).reshape(4096, 4096)  # 64 MiB
    hf.save({"w": whole}, checkpoint_id=tmp_path / "ours")
    stock_save({"w": whole}, checkpoint_id=tmp_path / "torch")
    for name in ("ours", "torch"):
        with hf.open(tmp_path / name) as view:
            handle = view["w"]
            part, nbytes = reads_of(lambda: handle[1000:2500, :])  # noqa: B023
            assert torch.equal(part, whole[1000:2500])
            assert 0.9 * part.nbytes <= nbytes <= 1.1 * part.nbytes, name
    with hf.open(tmp_path / "ours", verify=False) as view:
        for index in (slice(1000, 1010), (slice(1000, 1100), slice(8, 2000))):
            part, nbytes = reads_of(lambda: view["w"][index])  # noqa: B023
            assert torch.equal(part, whole[index])
            assert nbytes <= 1.1 * part.nbytes
    with hf.open(tmp_path / "ours") as view:
        part, nbytes = reads_of(lambda: view["w"][::512])
        assert torch.equal(part, whole[::512])
        assert nbytes <= 9 << 20, "rows far apart are read one by one, each with its block"


def test_sharded_tensors_are_put_together(tmp_path: Path) -> None:
    whole = torch.arange(120.0).reshape(10, 12)

    def save(rank: FakeRank) -> None:
        weight = rank.distribute(whole, rank.mesh(), [Shard(1)])
        own = torch.full((3,), float(rank.rank))
        rank.save({"w": weight, f"own{rank.rank}": own}, checkpoint_id=tmp_path / "run")

    FakeRanks(2).run(save)
    with hf.open(tmp_path / "run") as view:
        assert torch.equal(view["w"][3:8, 2:11], whole[3:8, 2:11])
        assert len(view.tree()["w"].chunks) == 2
        info = view.info("own1")
        assert isinstance(info, hf.reader.TensorInfo)
        assert (info.shape, info.dtype, info.nbytes, info.ranks) == ((3,), "float32", 12, (1,))
        assert view.metadata.world_size == 2
        assert view.record is not None
        assert view.record.world_size == 2


def test_tree_and_info_read_no_values(root: Path) -> None:
    with hf.open(root / "ours") as view:
        tree = view.tree()
        assert tree["model"]["large"].shape == (300, 3000)
        assert isinstance(tree["epoch"], hf.reader.ObjectInfo)
        assert len(view) == len(view.keys()) == len(list(view))
        assert "model.large" in view
        assert "nobody" not in view
        assert view.get("nobody") is None
        with pytest.raises(KeyError, match=r"^[^'].* has no key 'nobody'"):
            view["nobody"]
        with pytest.raises(MissingKeyError):
            view.info("nobody")
        with pytest.raises(KeyError, match=r"has no key 'modle\.lagre'; there is model\.large"):
            view["modle.lagre"]


def test_repr_is_for_people_and_html_is_escaped(root: Path, tmp_path: Path) -> None:
    with hf.open(root / "ours") as view:
        text = repr(view)
        assert "model.large" in text
        assert "[300, 3000]" in text
        assert repr(view["model.large"]) == "<SavedTensor 'model.large' int32 [300, 3000] 3.4 MiB>"
    hf.save({"<script>": torch.zeros(2)}, checkpoint_id=tmp_path / "odd")
    with hf.open(tmp_path / "odd") as view:
        found = view._repr_html_()
        assert "<script>" not in found
        assert "&lt;script&gt;" in found


@pytest.mark.parametrize(
    ("index", "error"),
    [
        (60, IndexError),
        ((0, 0, 0, 0), IndexError),
        (slice(None, None, -1), UsageError),
        (slice(0, 3, 0), UsageError),
        ([0, 1], UsageError),
    ],
    ids=str,
)
def test_a_bad_index_says_why(root: Path, index: Any, error: type[Exception]) -> None:
    with hf.open(root / "ours") as view, pytest.raises(error):
        view["model.weight"][index]


def test_a_tensor_can_be_iterated(root: Path) -> None:
    with hf.open(root / "ours") as view:
        rows = list(view["model.half"])
    assert torch.equal(torch.stack(rows), tensors()["half"])


def test_damage_is_found_when_it_is_read_and_by_verify(root: Path, tmp_path: Path) -> None:
    for name in ("ours", "torch", "file.pt", "safetensors"):
        path = tmp_path / name
        SAVED[name](path)
        with hf.open(path) as view:
            assert view.verify(), name
            info = view.info("model.large")
            assert isinstance(info, hf.reader.TensorInfo)
            chunk = info.chunks[0]
            file = path if path.is_file() else path / str(chunk.file)
        data = bytearray(file.read_bytes())
        data[(chunk.offset or 0) + 500_000] ^= 1
        file.write_bytes(data)
        with hf.open(path) as view:
            with pytest.raises(ChecksumError, match=r"model\.large|bytes"):
                view["model.large"][...]
            result = view.verify()
            assert not result.ok
            assert [damage.keys for damage in result.damages] == [["model.large"]], name
            assert torch.equal(view["model.weight"][...], tensors()["weight"])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    hf.save(state(), checkpoint_id=tmp_path)
    next(tmp_path.glob("*.distcp")).unlink()
    with hf.open(tmp_path) as view:
        with pytest.raises(IncompleteCheckpointError, match="The metadata names it"):
            view["model.weight"][0]
        assert not view.verify()


class Custom:
    def __init__(self) -> None:
        self.value = 1


def test_objects_load_under_the_allow_list(tmp_path: Path) -> None:
    hf.save({"odd": Custom(), "size": torch.Size([2, 3])}, checkpoint_id=tmp_path)
    with hf.open(tmp_path) as view:
        assert view["size"] == torch.Size([2, 3])
        with pytest.raises(UnsafeMetadataError, match="Custom"):
            view["odd"]
    with hf.open(tmp_path, safe_globals=[Custom]) as view:
        assert view["odd"].value == 1
    with hf.open(tmp_path, allow_pickle=True) as view:
        assert view["odd"].value == 1


def test_a_closed_view_says_so(root: Path) -> None:
    view = hf.open(root / "ours")
    view.close()
    view.close()
    with pytest.raises(UsageError, match="closed"):
        view["model.weight"][0]


def test_threads_share_a_view(root: Path) -> None:
    expected = tensors()["weight"]
    failures: list[BaseException] = []
    with hf.open(root / "ours") as view:

        def work(number: int) -> None:
            try:
                for at in range(number, 60, 8):
                    assert torch.equal(view["model.weight"][at], expected[at])
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


def test_a_single_safetensors_file_and_parts_of_ranks(root: Path, tmp_path: Path) -> None:
    file = next(path for path in (root / "safetensors").glob("*.safetensors"))
    with hf.open(file) as view:
        assert view.metadata.format == "safetensors"
        assert len(view) >= 1
    hf.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "own", use_collectives=False)
    with hf.open(tmp_path / "own") as view:
        assert view["a"][...].tolist() == [1.0, 1.0]
    with pytest.raises(UsageError, match="no part of rank 5"):
        hf.open(tmp_path / "own", rank=5)
    with pytest.raises(CheckpointNotFoundError):
        hf.open(tmp_path / "nobody")
    with pytest.raises(UsageError, match="framework"):
        hf.open(root / "ours", framework="jax")  # type: ignore[arg-type]


def test_a_load_of_a_safetensors_folder_says_what_reads_it(root: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="HuggingFaceStorageReader"):
        hf.load({"model.weight": torch.empty(60, 31, 3)}, checkpoint_id=root / "safetensors", no_dist=True)


def test_a_file_at_a_url_may_be_called_anything(tmp_path: Path) -> None:
    """A URL does not tell a file from a prefix: ``open`` and ``convert`` find out the same."""
    torch.save({"w": torch.ones(3)}, tmp_path / "weights")
    files = fsspec.filesystem("memory")
    files.pipe("/view/weights", (tmp_path / "weights").read_bytes())
    assert list(hf.open("memory://view/weights")) == ["w"]
    assert hf.convert("memory://view/weights", tmp_path / "copy.pt").source_format == "torch_save"
    for nothing in ("memory://view/absent", "memory://view"):
        with pytest.raises(CheckpointNotFoundError):
            hf.open(nothing)
        with pytest.raises(CheckpointNotFoundError):
            hf.convert(nothing, tmp_path / "nothing.pt")


def test_a_view_that_is_let_go_of_closes_its_files(tmp_path: Path) -> None:
    hf.save(state(), checkpoint_id=tmp_path / "c", no_dist=True)
    torch.save(state(), tmp_path / "s.pt")
    before = len(os.listdir("/proc/self/fd"))
    for place in (tmp_path / "c", tmp_path / "s.pt"):
        view = hf.open(place)
        weight = view["model.weight"]
        view.read(["model.large"])
        del view
        assert torch.equal(weight[3], tensors()["weight"][3])
        del weight
        gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_torch_makes_a_tensor_of_a_stored_one(saved: Path) -> None:
    with hf.open(saved) as view:
        for key in view:
            stored = view[key]
            if hasattr(stored, "ndim"):
                whole = stored[...]
                for made in (torch.as_tensor(stored), torch.tensor(stored)):
                    assert made.dtype == whole.dtype
                    assert made.shape == whole.shape
                    assert torch.equal(*(one.reshape(-1).view(torch.uint8) for one in (made, whole)))


def test_what_a_stored_tensor_does_not_have_is_answered_with_how_to_read_it(root: Path) -> None:
    with hf.open(root / "ours") as view:
        stored = view[next(key for key in view if hasattr(view[key], "ndim"))]
        with pytest.raises(AttributeError, match=r"float: .* Read it first: \[\.\.\.\] is the whole tensor"):
            stored.float()
        assert not hasattr(stored, "_ipython_display_")


def test_a_key_that_has_others_below_it_leads_to_read(tmp_path: Path) -> None:
    hf.save({"model": {"a": torch.ones(1)}, "modest": 1}, checkpoint_id=tmp_path / "c")
    view = hf.open(tmp_path / "c")
    with pytest.raises(KeyError, match=r"'model' has other keys below it: read\('model'\) gives all"):
        view["model"]
    assert "model" not in view
