"""``holdfast report`` draws any checkpoint as one page on its own, and no name can break it."""

import re
import subprocess
import sys
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.cli.conftest import GOLDEN
from tests.support.checkpoints import data_file, flip_bit
from torch.distributed.tensor import Replicate, Shard

import holdfast as hf
from holdfast.cli import run_summary
from holdfast.cli.pages import run_page
from holdfast.manager import CheckpointManager
from holdfast.testing import FakeRank, FakeRanks

Command = Callable[..., Any]
Copy = Callable[[str], Path]

HOSTILE = (
    "</svg><script>document.title='owned'</script>",
    "\"'><img src=x onerror=alert(1)>",
    "</style><style>body{display:none}",
    "--><!--<iframe src=//example.org>",
)


class Page(HTMLParser):
    """What a page shows: its elements, its text by section, and the hints of its drawings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.sections: dict[str, str] = {}
        self.hints: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self._heading = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert not any(name.startswith("on") or name in ("href", "src") for name, _ in attrs), attrs
        if tag not in ("meta", "wbr"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside == "style":
            return
        if inside == "title" and "svg" in self._open:
            self.hints.append(data)
        elif inside == "h2":
            self._heading = data
            self.sections[data] = ""
        else:
            self.text += data
            if self._heading:
                self.sections[self._heading] += data


@pytest.fixture
def report(holdfast: Command, tmp_path: Path) -> Callable[..., tuple[Any, Page]]:
    def run(path: object, *words: str) -> tuple[Any, Page]:
        output = tmp_path / "page.html"
        found = holdfast("report", path, "-o", output, *words)
        return found, Page(output.read_text(encoding="utf-8"))

    return run


Reported = Callable[..., tuple[Any, Page]]


def save_sharded(folder: Path) -> None:
    def save(rank: FakeRank) -> None:
        mesh = rank.mesh(2, 2)
        state = {
            "weight": rank.distribute(torch.zeros(8, 6), mesh, [Shard(0), Shard(1)]),
            "table": rank.distribute(torch.zeros(64, 4), mesh, [Shard(0), Replicate()]),
        }
        rank.save({"model": state}, checkpoint_id=folder)

    FakeRanks(4).run(save)


@pytest.mark.parametrize(
    "name", ["ours", "tiny", "zstd", "native", "torch", "torch-sharded", "torch-rank_local"]
)
@pytest.mark.parametrize("verify", [(), ("--verify",)], ids=["quick", "verify"])
def test_any_checkpoint_is_drawn(
    report: Reported, originals: Path, name: str, verify: tuple[str, ...]
) -> None:
    found, page = report(originals / name, *verify)
    assert (found.code, found.err) == (0, "")
    assert found.out.startswith(f"{originals / name}: ")
    assert ("Sound" if verify else "Complete") in page.text
    assert {"Size by module", "Which rank wrote what", "Data types", "Largest values"} <= page.sections.keys()
    assert page.tags.isdisjoint({"script", "link", "img", "iframe", "a"})


@pytest.mark.parametrize("kind", ["folder", "file", "torch.save"])
def test_other_formats_are_drawn(report: Reported, tmp_path: Path, kind: str) -> None:
    state = {"model.weight": torch.ones(300, 5), "model.bias": torch.ones(5, dtype=torch.bfloat16)}
    target = tmp_path / "model.pt"
    if kind == "torch.save":
        torch.save(state, target)
    else:
        target = tmp_path / "model"
        target.mkdir()
        save_file(state, target / "model.safetensors")
        target = target if kind == "folder" else target / "model.safetensors"
    found, page = report(target, "--verify")
    assert (found.code, found.err) == (0, "")
    # A file of safetensors has no checksums, unless holdfast wrote some beside it.
    assert ("Sound" if kind == "torch.save" else "no checksums to compare") in page.text
    assert "model.weight" in page.sections["Largest values"]
    assert "bfloat16" in page.sections["Data types"]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five steps: one pinned, one that did not end, the newest damaged."""
    root = tmp_path_factory.mktemp("runs") / "run"
    with CheckpointManager(root, no_dist=True) as manager:
        for step in range(10, 60, 10):
            manager.save(step, {"w": torch.ones(400, 10)}, metrics={"loss": abs(step - 20) / 16})
        manager.pin(10)
        (root / "step-30" / ".metadata").unlink()
        flip_bit(data_file(root / "step-50"), 1500)
        restored = manager.restore({"w": torch.ones(400, 10)})
        assert restored is not None
        assert restored.step == 40
    return root


def test_a_run_is_drawn_with_its_steps(report: Reported, run_folder: Path, tmp_path: Path) -> None:
    found, page = report(run_folder, "--last", "1", "--best", "1", "--metric", "loss")
    assert found.code == 1
    assert "Damaged steps 50. A restore begins with step 40." in page.text
    table = page.sections["Steps, the newest first"]
    html = (tmp_path / "page.html").read_text()
    assert re.findall(r'<tr><td class="w">(\d+)</td>', html) == ["50", "40", "30", "20", "10"]
    metrics = [abs(step - 20) / 16 for step in (40, 20, 10)]
    assert all(f"loss={metric:g}</td>" in html for metric in metrics)  # no line ends within a number
    assert "Last(1)" in table
    assert "Best(1, 'loss')" in table
    assert "pinned" in table
    assert "incomplete: counts for nothing" in table
    assert any(hint.startswith("step 20: 0") for hint in page.hints)
    assert {"Size", "Duration of the saves", "Metric: loss"} <= page.sections.keys()
    assert page.tags.isdisjoint({"script", "link", "img", "iframe"})


def test_a_run_without_a_policy_says_that_none_is_stored(report: Reported, run_folder: Path) -> None:
    _, page = report(run_folder)
    assert "not stored" in page.sections["Steps, the newest first"]


def test_of_a_long_run_only_the_newest_steps_are_read(
    report: Reported, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (run_summary, run_page):
        monkeypatch.setattr(module, "MOST_READ", 2)
    _, page = report(run_folder)
    assert "(newest 2)" in page.text
    table = page.sections["Steps, the newest first"]
    assert "loss=1.25" in table
    assert "loss=0.625" not in table  # of step 10


def test_what_could_not_be_checked_is_not_called_sound(
    report: Reported, holdfast: Command, tmp_path: Path
) -> None:
    hf.save({"a": torch.ones(300), "b": torch.ones(300)}, checkpoint_id=tmp_path / "ours", no_dist=True)
    model = tmp_path / "model"
    hf.convert(tmp_path / "ours", model, to="safetensors", max_shard_size="1500B")
    assert ": sound: " in holdfast("verify", model).out
    name = model / "model-00002-of-00002.safetensors"
    save_file({"b": torch.ones(300)}, name)  # as other programs do, without checksums
    assert ": sound as far as it could be checked: " in holdfast("verify", model).out
    _, page = report(model, "--verify")
    assert "Sound as far as it could be checked 1.2 KiB were read" in page.text
    assert ": complete, content not checked: " in holdfast("verify", name).out


def test_steps_of_a_run_are_not_verified_together(holdfast: Command, run_folder: Path) -> None:
    found = holdfast("report", run_folder, "--verify")
    assert found.code == 2
    assert "--verify is for one checkpoint" in found.err


def test_options_that_make_no_sense_are_wrong_usage(holdfast: Command, run_folder: Path) -> None:
    found = holdfast("report", run_folder, "--best", "2")
    assert (found.code, found.out) == (2, "")
    assert "--best and --metric belong together" in found.err


def test_a_policy_is_for_the_folder_of_a_run(holdfast: Command, originals: Path, tmp_path: Path) -> None:
    found = holdfast("report", originals / "tiny", "--last", "2", "-o", tmp_path / "page.html")
    assert found.code == 2
    assert "are for the folder of a run" in found.err
    assert not (tmp_path / "page.html").exists()


def test_the_page_says_which_rank_wrote_which_part(report: Reported, tmp_path: Path) -> None:
    save_sharded(tmp_path / "sharded")
    _, page = report(tmp_path / "sharded")
    parts = {hint for hint in page.hints if hint.startswith("rank ") and "[" in hint}
    quarters = {"rank 0\n[0:4, 0:3]", "rank 1\n[0:4, 3:6]", "rank 2\n[4:8, 0:3]", "rank 3\n[4:8, 3:6]"}
    assert quarters <= parts
    drawn = page.sections["Which rank wrote what"]
    assert "model.weight" in drawn
    assert "4 chunks by 4 ranks" in drawn
    assert {"rank 0", "rank 3"} <= set(re.findall(r"rank \d", page.sections["Bytes by rank"]))
    assert "prepare" in page.sections["How the save went"]


def test_a_slow_rank_is_marked(report: Reported, tmp_path: Path) -> None:
    class Slow(hf.FileSystemWriter):
        def write_data(self, plan: hf.SavePlan, planner: hf.SavePlanner) -> Any:
            if self.rank == 2:
                time.sleep(0.6)
            return super().write_data(plan, planner)

    def save(rank: FakeRank) -> None:
        tensor = rank.distribute(torch.zeros(64, 4), rank.mesh(), [Shard(0)])
        rank.save({"weight": tensor}, storage_writer=Slow(tmp_path / "slow"))

    FakeRanks(4).run(save)
    _, page = report(tmp_path / "slow")
    assert "Rank 2 was slow" in page.sections["How the save went"]
    text = (tmp_path / "page.html").read_text()
    assert re.findall(r'class="mark"[^>]*>(.*?)<', text) == ["rank 2"]
    assert len(re.findall(r'class="bar c\d slow"', text)) == 1


def test_damage_is_on_the_page_and_in_the_exit_code(report: Reported, copy: Copy, holdfast: Command) -> None:
    folder = copy("ours")
    flip_bit(data_file(folder), 5000)
    found, page = report(folder)
    assert found.code == 0  # only sizes were compared
    assert "content was not read" in page.text
    found, page = report(folder, "--verify")
    assert found.code == 1
    assert "Damaged" in page.text
    assert "the bytes are not the ones that were written" in page.sections["What is damaged"]
    document = holdfast("report", folder, "-o", folder.parent / "other.html", "--verify", "--json").document
    assert document["schema"] == "holdfast.report/1"
    assert document["verified"] is True
    assert len(document["wrong"]) == 1
    data_file(folder).unlink()
    found, page = report(folder)
    assert found.code == 1
    assert "missing" in page.sections["What is damaged"]


def test_no_name_can_break_the_page(report: Reported, tmp_path: Path) -> None:
    state = {name: torch.ones(40 + number, 3) for number, name in enumerate(HOSTILE)}
    hf.save(
        {**state, "nested": {HOSTILE[0]: "text", HOSTILE[1]: torch.ones(5)}}, checkpoint_id=tmp_path / "x"
    )
    found, page = report(tmp_path / "x", "--verify")
    assert found.code == 0
    assert page.tags.isdisjoint({"script", "img", "iframe"})
    for name in HOSTILE:
        assert name in page.sections["Largest values"]
    text = (tmp_path / "page.html").read_text()
    assert text.count("<style>") == text.count("</style>") == 1
    assert "default-src 'none'" in text


def test_control_characters_are_spelled_out(report: Reported, tmp_path: Path) -> None:
    hf.save({"a\x00\x1b[31m\u202eb": torch.ones(3)}, checkpoint_id=tmp_path / "x")
    _, page = report(tmp_path / "x")
    assert r"a\x00\x1b[31m\u202eb" in page.sections["Largest values"]
    text = (tmp_path / "page.html").read_text()
    assert not re.search("[\x00\x1b\u202e]", text)


@pytest.mark.slow
@pytest.mark.one_core
def test_a_hundred_thousand_tensors_are_a_small_page(report: Reported, tmp_path: Path) -> None:
    one = torch.zeros(1)
    names = (f"model.layers.{at // 100}.experts.{at % 100}.weight" for at in range(100_000))
    hf.save(dict.fromkeys(names, one), checkpoint_id=tmp_path / "many")
    _, page = report(tmp_path / "many")
    assert (tmp_path / "page.html").stat().st_size < 2_000_000
    assert "100,000 (390.6 KiB)" in page.text


@pytest.mark.slow
@pytest.mark.one_core
def test_many_ranks_and_divisions_are_a_small_page(report: Reported, tmp_path: Path) -> None:
    def save(rank: FakeRank) -> None:
        state = {
            f"w{n}": rank.distribute(torch.zeros(256, n + 1), rank.mesh(), [Shard(0)]) for n in range(40)
        }
        rank.save(state, checkpoint_id=tmp_path / "wide")

    FakeRanks(128).run(save)
    _, page = report(tmp_path / "wide")
    assert (tmp_path / "page.html").stat().st_size < 2_000_000
    assert "Not drawn: 16 more tensors." in page.sections["Which rank wrote what"]
    assert "96 more ranks are not drawn" in page.sections["How the save went"]


def test_bad_places_are_one_line(holdfast: Command, originals: Path, tmp_path: Path) -> None:
    assert holdfast("report", tmp_path / "nothing").code == 3
    found = holdfast("report", originals / "tiny", "-o", tmp_path / "no" / "such" / "folder.html")
    assert found.code == 2
    assert len(found.err.splitlines()) == 1


def test_a_report_needs_no_torch(tmp_path: Path) -> None:
    checkpoint = GOLDEN / "torch-2.13" / "sharded"
    code = (
        "import sys; from holdfast.cli import main; "
        f"assert main(['report', {str(checkpoint)!r}, '-o', {str(tmp_path / 'x.html')!r}]) == 0; "
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
