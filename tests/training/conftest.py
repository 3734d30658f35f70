"""The jobs of the training tests, each run once: a job costs seconds, a case a second at most."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from tests.support.ranks import run_ranks
from tests.training import jobs

Ranks: TypeAlias = list[dict[tuple[str, ...], Any]]
"""For each rank what it found, by case."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("training")


@pytest.fixture(scope="session")
def first_job(folder: Path) -> Ranks:
    """Four ranks that train, save and train on."""
    return _returned(run_ranks(jobs.first_job, 4, folder))


@pytest.fixture(scope="session")
def resumed_job(folder: Path, first_job: Ranks) -> Ranks:
    """Four new ranks that go on from the checkpoints."""
    return _returned(run_ranks(jobs.resumed_job, 4, folder))


@pytest.fixture(scope="session")
def loading_job(folder: Path, first_job: Ranks) -> Callable[[int], Ranks]:
    """As many new ranks as asked for, that load the checkpoints."""
    done: dict[int, Ranks] = {}

    def load(world_size: int) -> Ranks:
        if world_size not in done:
            done[world_size] = _returned(run_ranks(jobs.loading_job, world_size, folder))
        return done[world_size]

    return load


def _returned(results: list[Any]) -> Ranks:
    for rank, result in enumerate(results):
        assert result[0] == "returned", f"rank {rank}: {result[1]}"
    return [result[1] for result in results]
