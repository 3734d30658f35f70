"""Peak memory of saves and loads beyond the state itself, measured by the system in a process of its own."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

MIB = 1 << 20
BUDGET = 256 * MIB
# Threads' stacks, allocator arenas, and modules that are imported on first use.
MARGIN = 48 * MIB

pytestmark = [
    pytest.mark.one_core,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux can start the peak of a process anew"),
]

PROGRAM = """
import sys
import torch
import torch.distributed.checkpoint as dcp
import holdfast as hf
from holdfast.extension import ZStandard

torch.set_num_threads(2)
MIB = 1 << 20
folder = sys.argv[1]


def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name + ":"))


def peak_of(work):
    # Everything that is imported and started on first use, before the measurement.
    small = {"t": torch.ones(4), "n": 1}
    hf.save(small, storage_writer=hf.FileSystemWriter(folder + "-warm", _extensions=EXTENSIONS))
    hf.load(small, checkpoint_id=folder + "-warm")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


EXTENSIONS = []
"""

SAVED = """
def save(state, **options):
    options = {"_extensions": EXTENSIONS, "sync_files": False, **options}
    hf.save(state, storage_writer=hf.FileSystemWriter(folder, **options))
"""


def run(folder: Path, program: str) -> int:
    """The number that the program prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM + SAVED + textwrap.dedent(program), str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
def test_small_states_take_little(tmp_path: Path) -> None:
    peak = run(
        tmp_path / "c",
        """
        state = {f"t{n}": torch.ones(1000) for n in range(100)}
        print(peak_of(lambda: (save(state), hf.load(state, checkpoint_id=folder))))
        """,
    )
    assert peak < 64 * MIB


@pytest.mark.slow
def test_one_large_tensor_is_saved_within_the_budget(tmp_path: Path) -> None:
    peak = run(
        tmp_path / "c",
        """
        state = {"t": torch.ones(256 * MIB)}
        print(peak_of(lambda: save(state)))
        """,
    )
    assert peak < BUDGET + MARGIN


@pytest.mark.slow
@pytest.mark.parametrize("destination", ["torch.ones(1 << 14, 1 << 14)", "torch.ones(1 << 14, 1 << 14).t()"])
def test_one_large_tensor_is_loaded_within_the_budget(tmp_path: Path, destination: str) -> None:
    peak = run(
        tmp_path / "c",
        f"""
        save({{"t": torch.ones(1 << 14, 1 << 14)}})
        state = {{"t": {destination}}}
        print(peak_of(lambda: hf.load(state, checkpoint_id=folder)))
        """,
    )
    assert peak < BUDGET + MARGIN


@pytest.mark.slow
def test_a_large_tensor_is_cast_on_load_within_the_budget(tmp_path: Path) -> None:
    peak = run(
        tmp_path / "c",
        """
        save({"t": torch.ones(128 * MIB)})
        state = {"t": torch.zeros(128 * MIB, dtype=torch.bfloat16).fill_(1)}
        print(peak_of(lambda: hf.load(state, checkpoint_id=folder, cast=True)))
        """,
    )
    assert peak < BUDGET + MARGIN


@pytest.mark.slow
def test_views_that_must_be_copied_are_saved_within_the_budget(tmp_path: Path) -> None:
    peak = run(
        tmp_path / "c",
        """
        state = {f"t{n}": torch.ones(4096, 4096).t() for n in range(7)}
        state["steps"] = torch.ones(2, 16 * MIB)[:, ::2]
        state["long and thin"] = torch.ones(8 * MIB, 2).t()
        print(peak_of(lambda: save(state, thread_count=4)))
        """,
    )
    assert peak < BUDGET + MARGIN


@pytest.mark.slow
def test_one_large_view_is_saved_within_the_budget(tmp_path: Path) -> None:
    peak = run(
        tmp_path / "c",
        """
        state = {"t": torch.ones(1 << 13, 1 << 14).t()}
        print(peak_of(lambda: save(state)))
        """,
    )
    assert peak < BUDGET + MARGIN


@pytest.mark.slow
def test_a_large_value_of_bytes_is_saved_within_the_budget(tmp_path: Path) -> None:
    peak = run(
        tmp_path / "c",
        """
        state = {"b": b"x" * (512 * MIB)}
        print(peak_of(lambda: save(state)))
        """,
    )
    assert peak < BUDGET + MARGIN


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bytes", "bytearray"])
def test_a_large_value_of_bytes_is_loaded_within_the_budget(tmp_path: Path, kind: str) -> None:
    peak = run(
        tmp_path / "c",
        f"""
        save({{"b": {kind}(b"x" * (512 * MIB))}})
        state = {{"b": None}}
        print(peak_of(lambda: hf.load(state, checkpoint_id=folder)))
        """,
    )
    # The value itself is new memory.
    assert peak - 512 * MIB < BUDGET + MARGIN


@pytest.mark.slow
def test_a_compressed_tensor_is_saved_within_the_budget(tmp_path: Path) -> None:
    peak = run(
        tmp_path / "c",
        """
        EXTENSIONS = [ZStandard()]
        state = {"t": torch.ones(128 * MIB)}
        print(peak_of(lambda: save(state)))
        """,
    )
    assert peak < BUDGET + MARGIN


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 8])
def test_compressed_tensors_are_loaded_within_the_budget(tmp_path: Path, count: int) -> None:
    peak = run(
        tmp_path / "c",
        f"""
        EXTENSIONS = [ZStandard()]
        state = {{f"t{{n}}": torch.ones(128 * MIB // {count}) for n in range({count})}}
        save(state)
        print(peak_of(lambda: hf.load(state, checkpoint_id=folder)))
        """,
    )
    assert peak < BUDGET + MARGIN


@pytest.mark.slow
@pytest.mark.parametrize("key", ["plain", "transposed"])
def test_a_large_tensor_that_torch_wrote_is_loaded_within_the_budget(tmp_path: Path, key: str) -> None:
    peak = run(
        tmp_path / "c",
        f"""
        made = torch.ones(1 << 13, 1 << 14)
        state = {{"{key}": made.t() if "{key}" == "transposed" else made}}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, sync_files=False))
        state = {{"{key}": torch.ones(state["{key}"].shape)}}
        print(peak_of(lambda: hf.load(state, checkpoint_id=folder)))
        """,
    )
    assert peak < BUDGET + MARGIN
