"""The choice between the page cache and the way past it: its names, and the rule of whether there is room."""

from pathlib import Path

import pytest

from holdfast._io.page_cache import check_page_cache, room_for
from holdfast.errors import UsageError

MIB = 1 << 20


def kernel(folder: Path, *, free: int, clean: int = 0, cgroups: str = "", mounts: str = "") -> str:
    """A folder like /proc that tells of that much memory, these cgroups and these mounts."""
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(
        f"MemTotal: 9 kB\nMemFree: {free // 1024} kB\nInactive: 8 kB\nInactive(file): {clean // 1024} kB\n"
    )
    (folder / "self/cgroup").write_text(cgroups)
    (folder / "self/mountinfo").write_text(mounts)
    return str(folder)


def version_2(folder: Path, limit: int | str, used: int, unused: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\ninactive_file {unused}\nactive_file 5\n")


def test_a_choice_is_one_of_three() -> None:
    assert [check_page_cache(value) for value in ("auto", "keep", "bypass")] == ["auto", "keep", "bypass"]
    with pytest.raises(UsageError, match=r"'auto', 'keep', 'bypass', not 'never'"):
        check_page_cache("never")


def test_twice_as_much_must_be_free(tmp_path: Path) -> None:
    proc = kernel(tmp_path / "proc", free=100 * MIB, clean=50 * MIB)
    assert room_for(50 * MIB, proc=proc)
    assert not room_for(50 * MIB + 1, proc=proc)


def test_or_four_times_as_much_free_or_clean(tmp_path: Path) -> None:
    proc = kernel(tmp_path / "proc", free=40 * MIB, clean=360 * MIB)
    assert room_for(100 * MIB, proc=proc)
    assert not room_for(100 * MIB + 1, proc=proc)


def test_a_system_that_does_not_tell_has_no_room(tmp_path: Path) -> None:
    assert not room_for(1, proc=str(tmp_path / "nothing"))


def test_every_cgroup_above_the_process_must_have_room(tmp_path: Path) -> None:
    top = tmp_path / "tree"
    proc = kernel(
        tmp_path / "proc",
        free=1000 * MIB,
        cgroups="1:cpu:/else\n0::/job/rank\n",
        mounts=f"30 23 0:26 / {top} rw,nosuid - cgroup2 cgroup2 rw\n",
    )
    version_2(top / "job/rank", "max", 90 * MIB, 0)
    version_2(top / "job", 100 * MIB, 90 * MIB, 30 * MIB)
    assert room_for(10 * MIB, proc=proc)  # 10 MiB are free, and 30 can be had for nothing
    assert not room_for(11 * MIB, proc=proc)


def test_limits_of_version_1_count_where_a_container_sees_a_part_of_the_tree(tmp_path: Path) -> None:
    top = tmp_path / "memory"
    top.mkdir()
    proc = kernel(
        tmp_path / "proc",
        free=1000 * MIB,
        cgroups="4:cpu,memory:/docker/abc\n0::/\n",
        mounts=(
            f"30 23 0:26 /docker/abc {tmp_path / 'cpu'} rw - cgroup cgroup rw,cpuset\n"
            f"31 23 0:27 /docker/abc {top} rw shared:9 - cgroup cgroup rw,cpu,memory\n"
        ),
    )
    (top / "memory.limit_in_bytes").write_text(f"{64 * MIB}\n")
    (top / "memory.usage_in_bytes").write_text(f"{60 * MIB}\n")
    (top / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {6 * MIB}\n")
    assert room_for(2 * MIB, proc=proc)
    assert not room_for(3 * MIB, proc=proc)
