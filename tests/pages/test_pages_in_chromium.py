"""Pages of ``holdfast report`` in a real browser: both schemes, phone and desk, names of strangers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
from tests.support.browser import Tab, browser
from torch.distributed.tensor import Shard

import holdfast
from holdfast.cli import main
from holdfast.manager import CheckpointManager
from holdfast.testing import FakeRank, FakeRanks

pytestmark = pytest.mark.browser

EVIL = "</svg><script>document.title='owned'</script><img src=https://example.org/x onerror=alert(1)>"
PHONE, DESK = 375, 1280

# The least contrast of any text to the colour behind it, by the formula of WCAG.
CONTRAST = """
(() => {
  const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => {
      v /= 255;
      return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  let least = 21;
  for (const element of document.querySelectorAll("h1,h2,p,dt,dd,td,th,b,span,footer")) {
    const [a, b] = [light(parse(getComputedStyle(element).color)), light(behind(element))];
    least = Math.min(least, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
  }
  return least;
})()
"""

# Texts of drawings that reach beyond their drawing, and boxes that reach beyond the window.
OUTSIDE = """
[...document.querySelectorAll("svg text, section, figure, dl, h1")].filter((one) => {
  const box = one.getBoundingClientRect();
  const frame = one.ownerSVGElement ? one.ownerSVGElement.getBoundingClientRect()
                                    : {left: 0, right: innerWidth};
  return box.width > 0 && (box.right > frame.right + 1 || box.left < frame.left - 1);
}).map((one) => one.textContent.slice(0, 60))
"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages of a sharded checkpoint, of a damaged one, of one with names of a stranger, and of a run."""
    root = tmp_path_factory.mktemp("pages")

    def save(rank: FakeRank) -> None:
        blocks = {
            f"layers.{at}.mlp.{name}.weight": rank.distribute(torch.zeros(64, 32), rank.mesh(), [Shard(0)])
            for at in range(6)
            for name in ("up", "down")
        }
        rank.save({"model": blocks, "step": 1000}, checkpoint_id=root / "sharded")

    FakeRanks(8).run(save)
    holdfast.save({EVIL: torch.zeros(9, 9), "w" * 300: torch.ones(4), "a": EVIL}, checkpoint_id=root / "evil")
    holdfast.save({"model": {"weight": torch.zeros(1000)}}, checkpoint_id=root / "damaged")
    with next((root / "damaged").glob("*.distcp")).open("r+b") as file:
        file.truncate(1000)
    with CheckpointManager(root / "run", no_dist=True) as manager:
        for step in range(100, 1100, 100):
            manager.save(step, {"w": torch.ones(step)}, metrics={EVIL: 1 / step, "loss": 5 / step})
    main(["report", str(root / "run"), "-o", str(root / "run.html"), "--last", "3"])
    for name in ("sharded", "evil", "damaged"):
        main(["report", str(root / name), "-o", str(root / f"{name}.html"), "--verify"])
    return root


@pytest.mark.parametrize(
    ("name", "word"),
    [("sharded", "Sound"), ("evil", "Sound"), ("damaged", "Damaged"), ("run", "Step 1000 is the newest.")],
)
@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_fits_its_window_and_can_be_read(
    tab: Tab, pages: Path, name: str, word: str, width: int, scheme: Literal["light", "dark"]
) -> None:
    tab.open(pages / f"{name}.html", width=width, scheme=scheme)
    assert tab.ask("innerWidth") == width
    assert tab.ask("document.documentElement.scrollWidth") <= width
    assert tab.ask(OUTSIDE) == []
    assert tab.ask(CONTRAST) >= 4.5
    paper = tab.ask("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, paper.removeprefix("rgb(").rstrip(")").split(",")))
    assert brightness < 128 if scheme == "dark" else brightness > 640
    assert tab.ask("document.querySelector('.verdict b').textContent") == word


@pytest.mark.parametrize("name", ["evil", "run"])
def test_no_name_runs_a_script_and_nothing_is_loaded(tab: Tab, pages: Path, name: str) -> None:
    tab.requests.clear()
    tab.complaints.clear()
    tab.open(pages / f"{name}.html", width=DESK, scheme="light")
    assert tab.ask("document.title") == str(pages / name)
    assert tab.ask("document.querySelectorAll('script, img, iframe, link').length") == 0
    assert EVIL in tab.ask("document.body.textContent")
    assert tab.requests == [(pages / f"{name}.html").as_uri()]
    assert tab.complaints == []


@pytest.mark.parametrize("name", ["sharded", "evil", "run"])
def test_a_phone_shows_values_and_facts_without_scrolling_sideways(tab: Tab, pages: Path, name: str) -> None:
    tab.open(pages / f"{name}.html", width=PHONE, scheme="light")
    hidden = """[...document.querySelectorAll("section")]
      .filter((one) => /^(Largest values|Format|Steps)/.test(one.innerText))
      .flatMap((one) => [...one.querySelectorAll("td")])
      .filter((cell) => cell.getBoundingClientRect().right > innerWidth - 20)
      .map((cell) => cell.innerText)"""
    assert tab.ask(hidden) == []
    assert tab.ask("document.querySelectorAll('td').length") > 10


def test_drawings_are_drawn(tab: Tab, pages: Path) -> None:
    tab.open(pages / "sharded.html", width=DESK, scheme="light")
    seen = tab.ask(
        "[...document.querySelectorAll('rect.tile, rect.thin, rect.chunk')].filter((one) => {"
        "const box = one.getBoundingClientRect(); return box.width > 2 && box.height > 2;}).length"
    )
    assert seen >= 12 + 8
    colours = tab.ask(
        "new Set([...document.querySelectorAll('rect.chunk')].map((one) => getComputedStyle(one).fill)).size"
    )
    assert colours == 8
