"""The examples of the page on object stores run, against a real server."""

from pathlib import Path

import pytest
from tests.support.s3_server import S3Server
from tests.unit.test_docs import BLOCK, ROOT


def test_the_examples_of_the_page_run_in_order(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "example"}
    blocks = BLOCK.findall((ROOT / "docs" / "object_stores.md").read_text())
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "object_stores.md", "exec"), namespace)
    assert list(tmp_path.iterdir()) == []
