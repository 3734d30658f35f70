"""Looking at a checkpoint must not pay for torch: what an import brings along."""

import subprocess
import sys

import pytest

import holdfast

HEAVY = ("torch", "numpy", "fsspec", "rich", "asyncio", "importlib.metadata")


def modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import holdfast",
        "import holdfast.errors",
        "import holdfast.api",
        "import holdfast.extension",
        "import holdfast.stateful",
        "import holdfast; dir(holdfast); holdfast.CheckpointException; holdfast.extension.ZStandard",
    ],
)
def test_the_lower_floors_import_nothing_heavy(statement: str) -> None:
    assert not modules_after(statement) & set(HEAVY)


def test_importing_the_package_brings_few_modules() -> None:
    # A count does not vary with the machine's load as milliseconds do.
    brought = modules_after("import holdfast") - modules_after("pass")
    assert len(brought) < 40, sorted(brought)


def test_dir_shows_every_public_name_and_every_name_is_there() -> None:
    assert set(holdfast.__all__) <= set(dir(holdfast))
    for name in holdfast.__all__:
        assert getattr(holdfast, name) is not None


def test_names_for_editors_are_the_names_at_run_time() -> None:
    assert set(holdfast.__all__) == set(holdfast._HOME) | {
        name for name in holdfast._MODULES if not name.startswith("_")
    } | {"__version__"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = holdfast.no_such_thing
