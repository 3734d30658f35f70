"""The buffers of a stager are allocated once, reused, and never overwritten while somebody reads them."""

import gc
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import errors
from holdfast._staging.stage import Staging
from holdfast.staging import BlockingAsyncStager, DefaultStager, StagingOptions

MIB = 1 << 20
PAGE = os.sysconf("SC_PAGESIZE")


def state_of(nbytes: int, value: float = 1.0) -> dict[str, Any]:
    return {"w": torch.full((nbytes // 4,), value), "step": 3}


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def resident() -> int:
    """Bytes of this process's memory that are there, shared ones included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def address(staged: Any) -> int:
    return int(staged.state["w"].data_ptr())


# --- memory


@pytest.mark.parametrize("shared", [False, True])
def test_a_second_staging_takes_no_memory(shared: bool) -> None:
    stager = Staging(shared_memory=shared)
    state = state_of(64 * MIB)
    with stager.stage(state) as first:
        where = address(first)
    before = page_faults()
    with stager.stage(state) as second:
        assert address(second) == where
    assert page_faults() - before < 64 * MIB // PAGE // 20


def test_prepared_memory_is_there_before_the_first_staging() -> None:
    stager = DefaultStager(StagingOptions(use_async_staging=False))
    state = state_of(64 * MIB)
    stager.prepare(state)
    before = page_faults()
    stager.stage(state)
    assert page_faults() - before < 64 * MIB // PAGE // 20


def test_a_state_with_other_tensors_uses_the_same_memory() -> None:
    stager = Staging(shared_memory=True)
    sizes = []
    for tensors in (1, 7, 64):
        other = {str(n): torch.full((8 * MIB // 4 // tensors,), float(n)) for n in range(tensors)}
        with stager.stage(other) as staged:
            assert all(bool((staged.state[str(n)] == n).all()) for n in range(tensors))
            assert staged.fd is not None
            sizes.append((os.fstat(staged.fd).st_ino, os.fstat(staged.fd).st_size))
    assert len(set(sizes)) == 1


@pytest.mark.parametrize("shared", [False, True])
def test_a_larger_state_makes_the_memory_grow(shared: bool) -> None:
    stager = Staging(shared_memory=shared)
    for size in (1, 5, 3, 20):
        state = state_of(size * MIB, size)
        with stager.stage(state) as staged:
            assert staged.state["w"].numel() == size * MIB // 4
            assert bool((staged.state["w"] == size).all())


@pytest.mark.parametrize("shared", [False, True])
def test_fifty_stagings_hold_one_copy(shared: bool) -> None:
    stager = DefaultStager(StagingOptions(use_shared_memory=shared, use_async_staging=False))
    state = state_of(16 * MIB)
    stager.stage_leased(state).release()
    before = resident()
    for _ in range(50):
        stager.stage_leased(state).release()
    assert resident() - before < 4 * MIB


def test_closing_returns_the_memory() -> None:
    stager = Staging(shared_memory=True)
    stager.stage(state_of(64 * MIB)).release()
    gc.collect()
    before = resident()
    stager.close()
    assert before - resident() > 60 * MIB


def test_a_dropped_stager_returns_the_memory_and_its_descriptor() -> None:
    stager = Staging(shared_memory=True)
    staged = stager.stage(state_of(64 * MIB))
    fd = staged.fd
    assert fd is not None
    assert os.fstat(fd).st_size >= 64 * MIB
    before = resident()
    del stager, staged
    gc.collect()
    assert before - resident() > 60 * MIB
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_staged_state_outlives_its_stager() -> None:
    stager = Staging(shared_memory=True)
    staged = stager.stage(state_of(4 * MIB, 5)).state
    stager.close()
    del stager
    gc.collect()
    assert bool((staged["w"] == 5).all())


def test_without_caching_a_blocking_stager_keeps_nothing() -> None:
    stager = BlockingAsyncStager()
    state = state_of(64 * MIB)
    before = resident()
    stager.stage(state)
    assert resident() - before < 4 * MIB


@pytest.mark.slow
def test_too_much_is_a_memory_error_and_the_stager_goes_on() -> None:
    code = """
import resource, torch
from holdfast._staging.stage import Staging
state = {"w": torch.ones(64 << 18)}
stager = Staging(shared_memory=True)
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (32 << 20), resource.RLIM_INFINITY))
try:
    stager.stage(state)
except MemoryError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(bool((stager.stage(state).state["w"] == 1).all()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[0].startswith("staging needs 67,108,864 bytes"), done
    assert done.stdout.splitlines()[1] == "True"


@pytest.mark.slow
def test_tensors_that_are_held_survive_a_later_staging_without_memory() -> None:
    code = """
import resource, torch
from holdfast._staging.stage import Staging
stager = Staging(shared_memory=True)
staged = stager.stage({"w": torch.ones(1000)})
held = staged.state["w"]
staged.release()
large = {"w": torch.ones(64 << 18)}
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (32 << 20), resource.RLIM_INFINITY))
try:
    stager.stage(large)
except MemoryError:
    print(held.sum().item())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "1000.0\n", done


# --- leases


def test_while_a_copy_is_in_use_staging_raises_if_told_so() -> None:
    stager = Staging()
    first = stager.stage(state_of(MIB, 1), when_busy="raise")
    with pytest.raises(errors.UsageError, match="still in use"):
        stager.stage(state_of(MIB, 2), when_busy="raise")
    assert bool((first.state["w"] == 1).all())
    first.release()
    stager.stage(state_of(MIB, 2), when_busy="raise").release()


def test_another_word_for_when_busy_is_refused() -> None:
    stager = DefaultStager()
    with pytest.raises(errors.UsageError, match="not 'skip'"):
        stager.stage_leased(state_of(MIB), when_busy="skip")  # type: ignore[arg-type]


def test_while_a_copy_is_in_use_staging_waits_for_its_release() -> None:
    stager = Staging()
    state = state_of(MIB, 1)
    first = stager.stage(state)
    results: list[Any] = []
    waiting = threading.Thread(target=lambda: results.append(stager.stage(state_of(MIB, 2))))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    assert bool((first.state["w"] == 1).all())
    first.release()
    waiting.join(60)
    assert bool((results[0].state["w"] == 2).all())


def test_waiting_ends_with_its_timeout() -> None:
    stager = Staging()
    held = stager.stage(state_of(MIB))
    with pytest.raises(TimeoutError, match="not released"):
        stager.stage(state_of(MIB), timeout=0.01)
    assert held.state["step"] == 3


def test_waiting_ends_when_the_stager_is_closed() -> None:
    stager = Staging()
    held = stager.stage(state_of(MIB))
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            stager.stage(state_of(MIB))
        except errors.UsageError as error:
            raised.append(error)

    waiting = [threading.Thread(target=wait) for _ in range(2)]
    for thread in waiting:
        thread.start()
    waiting[0].join(0.1)
    stager.close()
    for thread in waiting:
        thread.join(60)
    assert [str(error) for error in raised] == ["this stager is closed; make another one"] * 2
    assert held.state["step"] == 3


def test_another_buffer_is_taken_if_told_so_and_let_go_of_again() -> None:
    stager = Staging()
    copies = [stager.stage(state_of(16 * MIB, n), when_busy="another") for n in range(3)]
    assert [copy.state["w"][-1].item() for copy in copies] == [0, 1, 2]
    most = resident()
    copies.clear()
    stager.stage(state_of(16 * MIB), when_busy="another").release()
    assert most - resident() > 30 * MIB


def test_memory_of_which_one_tensor_is_held_is_neither_waited_for_nor_overwritten() -> None:
    stager = Staging()
    state: dict[str, Any] = {"w": torch.ones(MIB), "nested": [torch.ones(10)]}
    part = stager.stage(state).state["nested"][0][2:5]
    state["nested"][0].zero_()
    with stager.stage(state, timeout=60) as staged:
        assert staged.state["nested"][0].sum() == 0
    assert part.tolist() == [1, 1, 1]


def test_memory_of_which_the_last_tensor_is_dropped_is_used_again() -> None:
    stager = Staging()
    where = address(stager.stage(state_of(MIB), when_busy="raise"))
    assert address(stager.stage(state_of(MIB), when_busy="raise")) == where


def test_one_who_waits_goes_on_when_the_lease_is_dropped_though_tensors_are_held() -> None:
    stager = Staging()
    leases = [stager.stage(state_of(MIB, 1))]
    held = leases[0].state["w"]
    results: list[Any] = []
    waiting = threading.Thread(target=lambda: results.append(stager.stage(state_of(MIB, 2))))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    leases.clear()
    waiting.join(60)
    assert (held[0].item(), results[0].state["w"][0].item()) == (1, 2)


def test_releasing_twice_lends_the_memory_once() -> None:
    stager = Staging()
    first = stager.stage(state_of(MIB), when_busy="raise")
    first.release()
    first.release()
    second = stager.stage(state_of(MIB), when_busy="raise")
    del first
    with pytest.raises(errors.UsageError, match="still in use"):
        stager.stage(state_of(MIB), when_busy="raise")
    second.release()


def test_a_stager_that_is_used_by_torchs_way_never_overwrites_what_is_held() -> None:
    stager = DefaultStager(StagingOptions(use_async_staging=False))
    held: list[Any] = [stager.stage(state_of(MIB, n)) for n in range(4)]
    assert [state["w"][7].item() for state in held] == [0, 1, 2, 3]


def test_many_threads_each_get_their_own_values() -> None:
    stager = Staging()
    wrong: list[int] = []

    def work(number: int) -> None:
        state = state_of(MIB, number)
        for _ in range(20):
            with stager.stage(state) as staged:
                if not bool((staged.state["w"] == number).all()):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_a_forked_child_does_not_stage_into_the_memory_of_its_parent() -> None:
    stager = Staging(shared_memory=True)
    with stager.stage(state_of(MIB, 1)) as released:
        staged = released.state
    child = os.fork()
    if child == 0:
        # Only what cannot hang in a forked child: no thread of torch is needed to copy one page.
        stager.stage({"w": torch.full((64,), 2.0)})
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert bool((staged["w"] == 1).all())


def test_shared_memory_has_no_name_that_a_crash_could_leave_behind() -> None:
    staged = Staging(shared_memory=True).stage(state_of(MIB))
    assert staged.fd is not None
    assert os.fstat(staged.fd).st_nlink == 0
