"""A program that does its work while it is imported, with an exception class of its own: run by a test.

Both ends of a channel are in this one process. Whoever imports this module in another thread waits for ever.
"""

import traceback

from holdfast._ranks.addresses import address_of_port
from holdfast._ranks.coordinator import CoordinatorEnd
from holdfast._ranks.failures import PackedFailure, SessionFailedError, SessionFailure
from holdfast._ranks.ledger import Label
from holdfast._ranks.worker import WorkerEnd


class ProgramError(Exception):
    """Can be unpickled only when this module can be imported."""


LABEL = Label("save", "plan", 5.0)
FAILURE = ProgramError("on purpose"), traceback.StackSummary()

coordinator = CoordinatorEnd(0, 2)
worker = WorkerEnd(1, 0, address_of_port(coordinator.listener.port, is_master=True), coordinator.secret)
for number in range(2):
    worker.begin(number)
    coordinator.begin(number)
    if number == 0:
        worker.deliver(number, 0, LABEL, (), None)
        coordinator.fail(number, SessionFailure("plan", {0: PackedFailure.of(FAILURE)}))
    else:
        worker.deliver(number, 0, LABEL, (), FAILURE)
        try:
            coordinator.gather(number, 0, LABEL, None)
        except SessionFailedError as failed:
            print(f"{failed.failure.to_raise()}")  # noqa: T201
    try:
        worker.receive(number, 0, LABEL)
    except SessionFailedError as failed:
        print(f"{failed.failure.to_raise()}")  # noqa: T201
worker.close()
coordinator.close()
