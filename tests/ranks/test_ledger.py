"""The coordinator's account of a session, without ranks: who fails it, who does not, what late ones hear."""

import socket
import traceback
from typing import Any

import pytest

from holdfast._ranks.failures import PackedFailure, SessionFailure, lost_rank
from holdfast._ranks.ledger import Label, Ledger
from holdfast._ranks.messages import Message, MessageKind, MessageReader, MessageSender, decode, encode

LABEL = Label("save", "write", 8.0)


class Account:
    """A ledger of three ranks, and what it told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, SessionFailure, int | None]] = []
        self.ledger = Ledger(3, lambda number, failed, to: self.told.append((number, failed, to)))

    def deliver(self, *ranks: int, number: int = 0, step: int = 0, label: Label = LABEL) -> None:
        for rank in ranks:
            self.ledger.deliver(number, step, rank, label, [b""], 0.0)

    def failed_ranks(self) -> list[list[int]]:
        return [sorted(failed.failures) for _, failed, _ in self.told]


@pytest.fixture
def account() -> Account:
    return Account()


def failure(text: str = "on purpose") -> Any:
    return PackedFailure.of((OSError(text), traceback.StackSummary()))


def test_a_step_is_decided_when_every_part_is_there(account: Account) -> None:
    account.deliver(0, 2)
    assert not account.ledger.session(0).is_deciding
    account.deliver(1)
    assert account.ledger.session(0).is_deciding
    assert not account.told


def test_a_rank_that_comes_late_with_another_call_learns_what_the_others_did(account: Account) -> None:
    account.ledger.expect(0, 0, 0, Label("load", "read metadata", 8.0), 0.0)
    account.ledger.conclude(0)
    account.deliver(1)
    ((_, failed, _),) = account.told
    said = str(failed.failures[1].unpacked()[0])
    assert "rank 1 is at step 'write' of a save while others are at step 'read metadata' of a load" in said


def test_a_rank_lost_before_its_part_fails_the_step(account: Account) -> None:
    account.deliver(0)
    account.ledger.lose(1, "it died", 0.0)
    assert account.failed_ranks() == [[1]]


def test_a_rank_lost_before_anybody_came_fails_the_step_of_the_first(account: Account) -> None:
    account.ledger.lose(1, "it died", 0.0)
    assert not account.told
    account.deliver(2)
    assert account.failed_ranks() == [[1]]


def test_a_rank_lost_after_its_part_fails_the_next_step_only(account: Account) -> None:
    account.deliver(0, 1)
    account.ledger.lose(1, "it died", 0.0)
    account.deliver(2)
    assert account.ledger.session(0).is_deciding
    account.ledger.conclude(0)
    assert not account.told
    account.deliver(0, step=1)
    assert account.failed_ranks() == [[1]]


def test_a_rank_that_leaves_while_a_step_is_decided_fails_the_next_one(account: Account) -> None:
    account.deliver(0, 1, 2)
    account.ledger.leave(0, 1, SessionFailure("write", lost_rank(1, "it was interrupted")))
    assert account.ledger.session(0).is_deciding
    assert not account.told
    account.ledger.conclude(0)
    assert account.failed_ranks() == [[1]]


def test_a_coordinator_that_is_given_up_while_it_decides_can_know(account: Account) -> None:
    account.deliver(0, 1, 2)
    account.ledger.give_up(0, SessionFailure("write", lost_rank(0, "silent")))
    assert account.ledger.session(0).given_up is not None
    account.ledger.conclude(0)
    assert account.failed_ranks() == [[0]]


def test_all_failures_that_come_in_time_are_raised_together(account: Account) -> None:
    assert account.ledger.deliver(0, 0, 1, LABEL, failure(), 100.0) == 102.0
    account.ledger.deliver(0, 0, 2, LABEL, failure(), 101.0)
    assert not account.told
    account.deliver(0)
    assert account.failed_ranks() == [[1, 2]]


def test_a_failure_does_not_wait_for_a_slow_rank_for_ever(account: Account) -> None:
    account.ledger.deliver(0, 0, 1, LABEL, failure(), 100.0)
    account.ledger.check_deadlines(101.0)
    assert not account.told
    account.ledger.check_deadlines(102.0)
    assert account.failed_ranks() == [[1]]


def test_who_comes_late_to_a_failed_session_is_told_alone(account: Account) -> None:
    account.deliver(0)
    account.ledger.lose(1, "it died", 0.0)
    account.deliver(2)
    assert [to for _, _, to in account.told] == [None, 2]


def test_sessions_do_not_touch_each_other(account: Account) -> None:
    account.deliver(0, number=1)
    account.deliver(0, 1, 2, number=2)
    account.ledger.fail(1, SessionFailure("write", {0: failure()}))
    assert account.ledger.session(2).is_deciding
    assert [number for number, _, _ in account.told] == [1]


@pytest.mark.parametrize(
    ("label", "step"), [(Label("load", "write", 8.0), 0), (Label("save", "plan", 8.0), 0), (LABEL, 1)]
)
def test_ranks_that_do_not_do_the_same_are_told_so(account: Account, label: Label, step: int) -> None:
    account.deliver(0)
    account.deliver(1, label=label, step=step)
    (_, failed, _) = account.told[0]
    assert "same calls in the same order" in str(failed.to_raise())


def test_a_rank_that_left_before_a_step_fails_it(account: Account) -> None:
    account.deliver(0)
    account.ledger.end(0, 1)
    assert account.failed_ranks() == [[1]]


def test_messages_of_all_sizes_arrive_whole_however_they_are_cut() -> None:
    values = [None, b"", b"x" * 3_000_000, {"a": [1, 2]}, bytearray(70_000)]
    left, right = socket.socketpair()
    left.settimeout(0)
    right.settimeout(0)
    sender, reader = MessageSender(), MessageReader()
    for number, value in enumerate(values):
        sender.add(Message(MessageKind.PART, number, 7, encode(value)))
    sender.add(Message(MessageKind.PING))
    got: list[Message] = []
    while sender or len(got) <= len(values):
        sender.send(left)
        got += reader.receive(right)
    left.close()
    right.close()
    assert [message.kind for message in got] == [MessageKind.PART] * len(values) + [MessageKind.PING]
    assert [decode(message.body) for message in got[:-1]] == values
    assert [message.session for message in got[:-1]] == list(range(len(values)))


def test_what_was_said_before_the_end_of_a_connection_is_heard() -> None:
    left, right = socket.socketpair()
    sender, reader = MessageSender(), MessageReader()
    sender.add(Message(MessageKind.ANSWER, 1, 2, encode("last words")))
    sender.send(left)
    left.close()
    right.settimeout(0)
    (message,) = reader.receive(right)
    assert decode(message.body) == "last words"
    with pytest.raises(EOFError):
        reader.receive(right)
    right.close()
