"""The two ends of a channel, both in this process: what one does when the other, or its own thread, fails."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from holdfast._ranks.addresses import address_of_port
from holdfast._ranks.coordinator import CoordinatorEnd
from holdfast._ranks.ledger import Label
from holdfast._ranks.worker import WorkerEnd

LABEL = Label("save", "plan", 5.0)


@pytest.fixture
def coordinator() -> Iterator[CoordinatorEnd]:
    made = CoordinatorEnd(0, 2)
    yield made
    made.close()


@pytest.fixture
def worker(coordinator: CoordinatorEnd) -> Iterator[WorkerEnd]:
    address = address_of_port(coordinator.listener.port, is_master=True)
    made = WorkerEnd(1, 0, address, coordinator.secret)
    yield made
    made.close()


def test_failures_travel_while_the_program_is_being_imported() -> None:
    program = "import tests.ranks.importing_program"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.count("ProgramError: on purpose") == 3
