"""A manager over an object store: few requests, deletions, and kills at requests."""

import os
from pathlib import Path

import obstore
import pytest
import torch
from tests.object_stores.kill_programs import MOMENTS, AtRequest, at_request
from tests.support.ranks import rank_processes
from tests.support.s3_proxy import S3Proxy
from tests.support.s3_server import S3Server
from tests.support.sweeps import sweep

from holdfast._io.bucket_client import BucketAccess
from holdfast.cli import main
from holdfast.manager import Best, CheckpointManager, Last

pytestmark = [pytest.mark.slow, pytest.mark.one_core]


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((300,), float(step))}


def test_a_thousand_steps_are_opened_by_three_requests(proxy: S3Proxy, place: str) -> None:
    with CheckpointManager(place, no_dist=True) as manager:
        manager.save(1000, state_of(1000))
    client = BucketAccess(place).open()
    data = bytes(obstore.get(client, "step-1000/.metadata").bytes())
    for step in range(1, 1000):
        obstore.put(client, f"step-{step}/.metadata", data)
    proxy.clear()
    manager = CheckpointManager(place, keep=Last(3), no_dist=True)
    assert len(proxy.requests) <= 3, [f"{each.method} {each.key} {each.query}" for each in proxy.requests]
    assert manager.latest() == 1000


def test_steps_are_pruned_restored_and_their_metrics_read_once(
    proxy: S3Proxy, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = Last(2) | Best(1, "loss")
    with CheckpointManager(place, keep=keep) as manager:
        for step in range(1, 7):
            manager.save(step, state_of(step), metrics={"loss": abs(2.0 - step)})
        manager.wait()
        manager.prune()
        assert manager.steps() == [2, 5, 6]
    again = CheckpointManager(place, keep=keep)
    proxy.clear()
    assert again.best("loss") == 2
    assert len(proxy.requests) <= 3, "the index tells the metrics"
    state = state_of(0)
    restored = again.restore(state)
    assert restored is not None
    assert (restored.step, float(state["w"][0]), restored.metrics) == (6, 6.0, {"loss": 4.0})
    assert main(["steps", place, "--metrics"]) == 0
    assert "loss=4" in capsys.readouterr().out


def test_a_damaged_newest_step_costs_one_more_read_of_metadata(proxy: S3Proxy, place: str) -> None:
    with CheckpointManager(place, no_dist=True) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step), metrics={"loss": float(step)})

    def metadata_reads() -> list[str]:
        proxy.clear()
        restored = manager.restore(state_of(0))
        assert restored is not None
        assert restored.metrics == {"loss": float(restored.step)}
        asked = [each.key for each in proxy.requests if each.method == "GET"]
        return [key.split("/")[-2] for key in asked if key.endswith("/.metadata")]

    assert metadata_reads() == ["step-2"]
    client = BucketAccess(place).open()
    (data,) = [one["path"] for one in obstore.list(client, "step-2").collect() if "distcp" in one["path"]]
    obstore.put(client, data, bytes(1000))
    assert metadata_reads() == ["step-2", "step-1"]


def save_and_prune(place: str, environment: dict[str, str], pid: str) -> None:
    """Runs in a process that is killed."""
    Path(pid).write_text(str(os.getpid()))
    os.environ.update(environment)
    with CheckpointManager(place, keep=Last(1), no_dist=True) as manager:
        manager.save(4, state_of(4))


@sweep(stride=41)
def test_a_kill_at_any_request_of_save_and_prune_leaves_a_newest_step_that_loads(
    s3: S3Server, place: str, stride: int, tmp_path: Path
) -> None:
    pid, case, seen = tmp_path / "pid", 0, 0
    with S3Proxy(s3.endpoint) as proxy:
        environment = {**s3.environment, "AWS_ENDPOINT_URL": proxy.endpoint}
        while True:
            root = f"{place}-{case}"
            with CheckpointManager(root, no_dist=True) as manager:
                for step in (1, 2, 3):
                    manager.save(step, state_of(step))
            number, moment = 1 + case // len(MOMENTS), MOMENTS[case % len(MOMENTS)]
            rule = AtRequest(lambda _: os.kill(int(pid.read_text()), 9), number, moment)
            with at_request(proxy, rule) as killed:
                rank_processes().run(save_and_prune, 1, root, environment, str(pid))
            manager = CheckpointManager(root, keep=Last(1), no_dist=True)
            state = state_of(0)
            restored = manager.restore(state)
            assert restored is not None
            assert restored.step == manager.latest() == float(state["w"][0])
            assert restored.step in ({4} if killed.point is None else {3, 4}), killed.point
            # What the kill left of step 4 is named.
            assert all(step > restored.step for step in restored.skipped), killed.point
            assert all("not complete" in why for why in restored.skipped.values()), killed.point
            manager.save(5, state_of(5))
            manager.close()
            assert manager.steps() == [5], killed.point
            if killed.point is None:
                break
            case, seen = case + stride, seen + 1
    assert seen > 50 // stride
