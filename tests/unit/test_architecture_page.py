"""The plan of the house names every room that there is, and none that there is not."""

import ast
import re
from collections import defaultdict
from fnmatch import fnmatch
from pathlib import Path

from holdfast.cli import help_texts

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "holdfast"
COMMANDS = {Path("cli", f"{command}.py") for command in help_texts.COMMANDS}  # "a module for each command"
MODULES = [file.relative_to(PACKAGE) for file in sorted(PACKAGE.rglob("*.py")) if file.stem[:2] != "__"]
NAMED = set(re.findall(r"`([\w/*.]+\.(?:py|css)|\w[\w/]*/)`", (ROOT / "ARCHITECTURE.md").read_text()))

# torch's names ask for both.
MAY_BE_TWICE = {"FileSystem", "extension"}


def is_named(file: Path, name: str) -> bool:
    return fnmatch(str(file), name) or fnmatch(file.name, name)


def test_every_module_is_on_the_page() -> None:
    assert [
        str(file)
        for file in MODULES
        if file not in COMMANDS and not any(is_named(file, name) for name in NAMED)
    ] == []


def test_the_page_names_nothing_that_is_not_there() -> None:
    there = [file.relative_to(PACKAGE) for file in PACKAGE.rglob("*")]
    missing = [name for name in NAMED if not any(is_named(file, name.rstrip("/")) for file in there)]
    assert missing == []


def test_no_two_modules_and_no_two_classes_have_one_name() -> None:
    found = defaultdict[str, list[str]](list)
    for file in MODULES:
        found[file.stem.lstrip("_")].append(str(file))
        for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{file}:{node.lineno}")
    twice = {name: places for name, places in found.items() if len(places) > 1}
    assert {name: places for name, places in twice.items() if name not in MAY_BE_TWICE} == {}
