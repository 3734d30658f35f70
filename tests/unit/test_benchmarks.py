"""The benchmark's own promises: turns, arithmetic, the results file, the table, and leaving nothing behind.

Nothing here is timed, and no figure is compared with a goal.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest
from benchmarks import planning_growth
from benchmarks.__main__ import main
from benchmarks.case import SIDES, Case, Goal, Quantity, interleave
from benchmarks.catalog import all_cases
from benchmarks.footprint import Footprint
from benchmarks.machine import Busyness, Machine, file_system_of
from benchmarks.peak import extra_memory
from benchmarks.planning_growth import Growth
from benchmarks.planning_plot import Curve, Panel, draw
from benchmarks.results import CaseResult, Results, Row, Spread, read_results, rows_of, write_results
from benchmarks.runner import NoSpaceError, check_space, run_all, scratch_folder
from benchmarks.states import BytesValue, NormalWeights, State, Tensors, bulk
from benchmarks.table import BEGIN, END, render, rewrite_page
from benchmarks.worker import run_case

ROOT = Path(__file__).parents[2]
SECONDS = Quantity("save", "s", Goal(times=2))


def results_of(*cases: CaseResult, scale: float = 1, load: float = 0.5) -> Results:
    machine = Machine(
        date="2030-01-02T03:04:05+00:00",
        command="python -m benchmarks --only x",
        python="3.12.1",
        torch="2.13.0",
        holdfast="1.0",
        zstandard="none",
        cpu="A CPU",
        cores=2,
        memory_gib=16,
        file_system="ext4",
        kernel="Linux 6",
        peers={"safetensors": "0.8"},
    )
    return Results(machine, scale, list(cases), load)


def row(ours: list[float], theirs: list[float], quantity: Quantity = SECONDS) -> Row:
    return Row.of(quantity, {"holdfast": ours, "torch": theirs})


def never(_job: object) -> dict[str, dict[str, list[float]]]:
    raise AssertionError("not to be run")


# Turns


def test_the_sides_take_turns_and_each_round_is_reported_in_one_line() -> None:
    calls: list[str] = []
    lines: list[str] = []

    def act(side: str) -> dict[str, float]:
        calls.append(side)
        return {"save": float(len(calls)), "load": 10.0 * len(calls)}

    samples = interleave(("A", "B"), act, rounds=3, name_of=str.lower, say=lines.append)
    assert calls == ["A", "B", "A", "B", "A", "B"]
    assert samples == {
        "save": {"a": [1, 3, 5], "b": [2, 4, 6]},
        "load": {"a": [10, 30, 50], "b": [20, 40, 60]},
    }
    assert [line.split(":")[0] for line in lines] == ["round 1 of 3", "round 2 of 3", "round 3 of 3"]
    assert "a  save 1.000  load 10.000  |  b  save 2.000  load 20.000" in lines[0]


# Arithmetic


def test_a_spread_is_the_best_the_middle_and_the_worst() -> None:
    assert Spread.of([5, 1, 9, 3, 2]) == Spread(1, 3, 9)
    assert Spread.of([1, 2]) == Spread(1, 1.5, 2)
    assert Spread.of([7]) == Spread(7, 7, 7)


def test_the_ratio_is_of_the_bests_and_the_ratios_are_of_neighbouring_turns() -> None:
    found = row([2, 1, 4], [6, 5, 4])
    assert found.ratio == 4
    assert found.ratios == [3, 5, 1]
    assert found.spread == {"holdfast": Spread(1, 2, 4), "torch": Spread(4, 5, 6)}


@pytest.mark.parametrize(("theirs", "met"), [(2.0, True), (1.99, False)])
def test_a_ratio_goal_is_reached_from_the_goal_on(theirs: float, met: bool) -> None:
    assert row([1, 3], [theirs, 50]).met is met


@pytest.mark.parametrize(("worst", "met"), [(256.0, True), (257.0, False)])
def test_an_upper_bound_must_hold_in_the_worst_round(worst: float, met: bool) -> None:
    assert row([1, worst], [5, 5], Quantity("load", "MiB", Goal(at_most=256))).met is met


def test_a_goal_may_be_to_stay_near_the_best_of_named_peers() -> None:
    near = Quantity("load", "s", Goal(within=1.5, against=("x", "y")))
    samples = {"holdfast": [3.0, 4.0], "torch": [90.0, 90.0], "x": [2.0, 9.0], "y": [5.0, 4.0]}
    found = Row.of(near, samples)
    assert (found.ratio, found.ratios, found.met) == (2 / 3, [2 / 3, 1], True)
    assert Row.of(near, {**samples, "x": [1.9, 9.0]}).met is False
    absent = row([1], [1], near)
    assert (absent.ratio, absent.met) == (None, None)


def test_a_goal_may_compare_the_middle_rounds() -> None:
    usual = Quantity("lost", "s", Goal(times=3, typically=True))
    assert row([1, 2, 30], [1, 6, 7], usual).ratio == 3


def test_without_a_goal_nothing_is_reached_or_missed() -> None:
    assert row([1], [1], Quantity("load", "s")).met is None


def test_memory_has_no_ratio_since_a_side_may_take_none() -> None:
    found = row([0], [0], Quantity("load", "MiB", Goal(at_most=256)))
    assert (found.ratio, found.ratios, found.met) == (None, [], True)


def test_rows_stand_in_the_order_of_the_quantities() -> None:
    quantities = (Quantity("b", "s"), Quantity("a", "s"))
    samples = {name: {side: [1.0] for side in SIDES} for name in "ab"}
    assert [found.quantity for found in rows_of(quantities, samples)] == ["b", "a"]


def test_a_side_that_was_not_measured_has_an_empty_cell() -> None:
    quantity = Quantity("requests", "requests", Goal(at_most=4))
    case = CaseResult("x", "a title", [Row.of(quantity, {"holdfast": [5.0]})], absent={"torch": "no s3fs"})
    shown = render(results_of(case))
    assert "| `x`: a title | requests | 5 requests |  |  |  | at most 4 requests: **missed** |" in shown
    assert "| torch | no s3fs |" in shown


# The states


@pytest.mark.parametrize(
    "contents",
    [Tensors(3, (5, 7)), Tensors(2, (5, 7), transposed=True), NormalWeights(2, 33), BytesValue(3 << 20)],
    ids=["tensors", "views", "weights", "bytes"],
)
def test_a_state_knows_its_values_and_sees_one_that_is_wrong(contents: State) -> None:
    state = contents.filled()
    contents.check(state)
    with pytest.raises(AssertionError, match="loaded wrong"):
        contents.check(contents.blank())
    if isinstance(contents, BytesValue):
        state["blob"] = state["blob"][:-1] + b"\0"
    else:
        last = list(state.values())[-1]
        last[(-1,) * last.dim()] = 0
    with pytest.raises(AssertionError, match="1 values were loaded wrong"):
        contents.check(state)


def test_swapped_tensors_are_seen() -> None:
    contents = Tensors(2, (8,))
    first, second = contents.filled().values()
    with pytest.raises(AssertionError, match="2 values"):
        contents.check({"layers.0.weight": second, "layers.1.weight": first})


def test_views_are_not_contiguous_and_cleared_states_are_blank() -> None:
    contents = Tensors(1, (4, 6), transposed=True)
    state = contents.filled()
    (view,) = state.values()
    assert not view.is_contiguous()
    contents.clear(state)
    assert not view.any()


def test_bulk_is_of_64_mib_tensors_as_long_as_there_are_two() -> None:
    # Nothing is allocated until a state is filled.
    assert (bulk(2 << 30).count, bulk(2 << 30).nbytes) == (32, 2 << 30)
    assert (bulk(8 << 20).count, bulk(8 << 20).nbytes) == (2, 8 << 20)


# The results file


def test_results_come_back_from_their_file_as_they_were(tmp_path: Path) -> None:
    done = CaseResult("x", "title", [row([1, 2], [3, 4])], "note", None, None, 1.5, (0.1, 0.2), 0.25)
    skipped = CaseResult("y", "other", skipped="not permitted")
    path = tmp_path / "new folder" / "results.json"
    results = results_of(done, skipped)
    write_results(path, results)
    assert read_results(path) == results
    assert b'"ratio": 3.0' in path.read_bytes()


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="machine"):
        read_results(tmp_path / "other.json")


# The table


def test_a_row_shows_spread_ratios_and_whether_the_goal_is_reached() -> None:
    text = render(results_of(CaseResult("x", "a title", [row([1, 2, 4], [8, 4, 6])])))
    assert (
        "| `x`: a title | save | 1.000 / 2.000 / 4.000 s | 4.000 / 6.000 / 8.000 s | 4.00x | 1.50 to 8.00 "
        "| 2x: reached |"
    ) in text


def test_a_missed_bound_of_memory_is_shown_as_missed() -> None:
    found = row([1300], [5], Quantity("load", "MiB", Goal(at_most=256)))
    text = render(results_of(CaseResult("x", "t", [found])))
    assert "| load | 1,300 MiB | 5 MiB |  |  | at most 256 MiB: **missed** |" in text


def test_bytes_are_shown_whole_with_their_ratio() -> None:
    found = row([1234], [2468], Quantity("message", "bytes", Goal(at_most=2000)))
    text = render(results_of(CaseResult("x", "t", [found])))
    assert "| message | 1,234 bytes | 2,468 bytes | 2.00x |  | at most 2000 bytes: reached |" in text


def test_everybody_has_a_line_in_a_second_table_also_who_is_absent() -> None:
    near = Quantity("hot load", "s", Goal(within=1.5, against=("x",)))
    samples = {"holdfast": [2.0], "torch": [9.0], "x": [1.0]}
    case = CaseResult("c", "t", [Row.of(near, samples)], absent={"y": "not installed"})
    text = render(results_of(case))
    assert "| hot load | 2.000 s | 9.000 s | 0.50x of x |  | at most 1.5 times x: **missed** |" in text
    assert "| x | 1.000 s (0.50x) |" in text
    assert "| y | not installed |" in text
    unknown = row([1], [1], near)
    assert "at most 1.5 times x: not measured" in render(results_of(CaseResult("c", "t", [unknown])))


def test_skipped_and_failed_cases_give_their_reason() -> None:
    text = render(
        results_of(CaseResult("x", "t", skipped="no right"), CaseResult("y", "t", failed="status 1"))
    )
    assert "| `x`: t | skipped: no right |" in text
    assert "| `y`: t | failed: status 1 |" in text


def test_the_table_says_what_it_was_measured_on_and_whether_the_machine_was_busy() -> None:
    quiet = render(results_of(CaseResult("x", "t", note="a note", load_average=(0.2, 1.75), others=0.25)))
    for fact in (
        "2030-01-02",
        "--only x",
        "torch 2.13.0, safetensors 0.8",
        "Python 3.12.1",
        "ext4",
        "1.75",
        "0.25 cores",
    ):
        assert fact in quiet
    assert "- `x`: a note." in quiet
    assert "busy with other work" not in quiet
    assert "busy with other work" in render(results_of(load=1.2))
    assert "multiplied by 0.1" in render(results_of(scale=0.1))


def test_the_page_keeps_its_text_around_the_table_however_often_it_is_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold table\n{END}\nafter\n")
    for _ in range(2):
        rewrite_page(page, results_of(CaseResult("x", "t", [row([1], [2])])))
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n")
    assert text.endswith(f"{END}\nafter\n")
    assert text.count("`x`: t") == 1
    assert "old table" not in text


def test_a_page_without_marks_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{END}\n{BEGIN}\n")
    with pytest.raises(ValueError, match="once"):
        rewrite_page(page, results_of())
    assert page.read_text() == f"{END}\n{BEGIN}\n"


def test_the_projects_page_has_the_marks() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    assert text.count(BEGIN) == text.count(END) == 1


# The command


def test_list_names_every_case_and_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == [case.name for case in all_cases(1)]
    assert any("100,000 tensors of 16 bytes" in line for line in listed)


def test_names_are_unique_and_sizes_follow_the_scale() -> None:
    full, small = all_cases(1), all_cases(0.01)
    assert len({case.name for case in full}) == len(full)
    assert all(a.disk_nbytes > 10 * b.disk_nbytes > 0 for a, b in zip(full, small, strict=True))


def test_an_unknown_case_is_refused_with_the_names_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "svae"]) == 2
    assert "svae" in (told := capsys.readouterr().err)
    assert "load-hot" in told


@pytest.mark.parametrize("wrong", [["--scale", "0"], ["--rounds", "0"], ["--scale", "nan"]])
def test_senseless_numbers_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(wrong)
    assert caught.value.code == 2


def test_a_disk_that_is_too_small_is_an_error_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case("huge", "t", (SECONDS,), 1 << 60, 1, never)
    with pytest.raises(NoSpaceError, match=r"huge needs .* GB.*--folder"):
        check_space([case], tmp_path)
    assert main(["--scale", "1000", "--only", "save", "--folder", str(tmp_path)]) == 2
    assert "--scale" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_page_can_be_written_from_a_results_file(tmp_path: Path) -> None:
    page, source = tmp_path / "page.md", tmp_path / "results.json"
    page.write_text(f"{BEGIN}\n{END}\n")
    write_results(source, results_of(CaseResult("x", "t", [row([1], [2])])))
    arguments = ["--table", "--page", str(page), "--json", str(source)]
    assert main(arguments) == 0
    assert "`x`: t" in page.read_text()
    source.unlink()
    assert main(arguments) == 2


# Folders and processes


def test_the_scratch_folder_goes_also_when_something_is_raised(tmp_path: Path) -> None:
    def interrupted() -> None:
        with scratch_folder(tmp_path / "made") as folder:
            (folder / "file").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list((tmp_path / "made").iterdir()) == []


def test_the_file_system_is_found_by_its_device(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"1 0 250:9 / /x rw - tmpfs t rw\n2 0 {number} / / rw shared:1 - xfs /dev/a rw\n")
    assert file_system_of(tmp_path, str(mounts)) == "xfs"
    assert file_system_of(tmp_path, str(tmp_path / "missing")) == "unknown"


def test_busyness_is_a_number_of_cores() -> None:
    others = Busyness().cores_of_others()
    assert others is None or others >= 0


# Stock torch warns of its own deprecated calls.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["save", "load-hot", "small", "tiny", "dtensors", "zstd"])
def test_a_case_measures_both_sides_in_every_round(name: str, tmp_path: Path) -> None:
    (case,) = [case for case in all_cases(0.0005) if case.name == name]
    found = run_case(name, 0.0005, 2, tmp_path)
    samples = found["samples"]
    assert isinstance(samples, dict)
    assert [row.quantity for row in rows_of(case.quantities, samples)] == list(samples)
    for of_sides in samples.values():
        assert [len(of_sides[side]) for side in SIDES] == [2, 2]
        assert min(min(of_side) for of_side in of_sides.values()) > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_memory_is_what_a_call_takes_besides_the_state(tmp_path: Path) -> None:
    # Stock torch reads a tensor into memory of its own before it copies it: the measure must see that.
    contents = Tensors(1, (32, 1 << 18))
    extra_memory(contents, "torch", "save", tmp_path / "saved")
    extra = extra_memory(contents, "torch", "load", tmp_path / "saved")
    assert 0.9 * contents.nbytes < extra < 2 * contents.nbytes


def test_the_footprint_counts_what_is_freed_again() -> None:
    footprint = Footprint()
    block = bytearray(32 << 20)
    block[:] = b"x" * len(block)
    del block
    assert footprint.extra() >= 32 << 20


# The simulation of planning


@pytest.mark.slow
def test_planning_is_measured_on_both_sides_in_processes_of_their_own(tmp_path: Path) -> None:
    (case,) = [case for case in all_cases(0.01) if case.name == "planning-hsdp"]
    samples = run_case(case.name, 0.01, 1, tmp_path)["samples"]
    assert isinstance(samples, dict)
    rows = {found.quantity: found for found in rows_of(case.quantities, samples)}
    assert "10 simulated ranks with 10 tensors" in case.title
    first, second = rows["a rank's offer and answer"], rows["the same, unchanged second save"]
    assert first.spread["holdfast"].min > 2 * second.spread["holdfast"].min
    assert second.met
    assert all(found.spread[side].min > 0 for found in rows.values() for side in SIDES if found.unit == "s")


@pytest.mark.slow
def test_growth_is_measured_recorded_and_drawn(tmp_path: Path) -> None:
    source, picture = tmp_path / "new" / "growth.json", tmp_path / "growth.svg"
    arguments = [
        "--most",
        "4",
        "--tensors",
        "2",
        "--rounds",
        "1",
        "--json",
        str(source),
        "--svg",
        str(picture),
    ]
    assert planning_growth.main(arguments) == 0
    growth = msgspec.json.decode(source.read_bytes(), type=Growth)
    assert (growth.numbers, list(growth.jobs), list(growth.shards)) == ([4], list(SIDES), list(SIDES))
    assert all(min(seconds) > 0 for divisions in growth.shards.values() for seconds in divisions.values())
    drawn = ET.fromstring(picture.read_text(encoding="utf-8"))
    assert len(drawn.findall(".//{*}polyline")) == len(SIDES) + 3 * len(SIDES)


def test_a_curve_that_grows_tenfold_crosses_one_line_of_the_picture_and_names_are_escaped() -> None:
    panel = Panel("a < b", "across", "upwards", [64, 128, 256], [Curve("steep & level", [1, 10, 10], "#000")])
    drawn = ET.fromstring(draw([panel]))
    texts = [element.text for element in drawn.iter() if element.text]
    assert {"a < b", "steep & level", "64", "256", "1", "10"} <= {*texts}
    (curve,) = drawn.findall(".//{*}polyline")
    points = [tuple(map(float, point.split(","))) for point in curve.attrib["points"].split()]
    (x1, y1), (x2, y2), (x3, y3) = points
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)
    assert y1 > y2 == y3


@pytest.mark.slow
def test_the_command_runs_a_case_apart_records_it_and_leaves_no_files(tmp_path: Path) -> None:
    source = tmp_path / "out" / "results.json"
    command = [sys.executable, "-m", "benchmarks", "--scale", "0.01", "--rounds", "1", "--only", "slice"]
    command += ["--folder", str(tmp_path / "files"), "--json", str(source)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = read_results(source)
    (case,) = results.cases
    needed, seconds = case.rows
    assert (case.name, needed.unit, seconds.unit) == ("slice", "bytes/byte", "s")
    # Stock torch reads the eight eighths of the tensor.
    assert needed.spread["torch"].min >= 8 > needed.spread["holdfast"].min >= 1
    assert results.machine.command.startswith("python -m benchmarks --scale 0.01 ")
    assert "  slice: round 1 of 1:  holdfast  bytes read" in done.stderr
    assert "`slice`" in done.stdout
    assert list((tmp_path / "files").iterdir()) == []


@pytest.mark.slow
def test_a_case_that_fails_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    unknown = Case("no-such-case", "t", (SECONDS,), 0, 1, never)
    (found,) = run_all([unknown], scale=1, rounds=1, folder=tmp_path, say=lambda _line: None)
    assert found.failed == "its process ended with status 1"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_interrupted_run_removes_its_files(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--scale", "0.01", "--rounds", "1000", "--only", "save"]
    command += ["--folder", str(tmp_path), "--json", str(tmp_path / "results.json")]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "round 1 of" in line:
                break
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == 128 + signal.SIGINT
    assert list(tmp_path.iterdir()) == []
