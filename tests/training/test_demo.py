"""The demo runs to its end, every claim that it makes holds, and its page needs nothing but itself."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.mark.slow
def test_the_claims_of_the_demo_hold(tmp_path: Path) -> None:
    shown = subprocess.run(
        [sys.executable, str(DEMO)], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "✗" not in shown.stdout
    page = (tmp_path / "demo-output" / "demo.html").read_text()
    assert len(page) < 100_000
    assert not re.search(r"https?:|<script|<link|@import|url\(", page)
    pictures = [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    titles = [" ".join(title.text or "" for title in picture.iter("title")) for picture in pictures]
    writers = [set(re.findall(r"rank (\d) wrote", text)) for text in titles]
    assert writers == [set(), {"0", "1", "2", "3"}, {"0", "1"}]
