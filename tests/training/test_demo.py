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
    output = tmp_path / "demo-output"
    page = (output / "demo.html").read_text()
    assert len(page) < 100_000
    assert not re.search(r"https?:|<script|<link|@import|url\(", page)
    picture = ET.fromstring(re.findall(r"<svg.*?</svg>", page, re.DOTALL)[0])
    assert len(list(picture.iter("circle"))) > 48
    reports = re.findall(r'<a href="(step-\d+\.html)">', page)
    assert reports
    assert {path.name for path in output.glob("step-*.html")} == set(reports)
    assert "step-48.html" in reports
    last = (output / "step-48.html").read_text()
    assert "Sound" in last
    assert "rank 1" in last
