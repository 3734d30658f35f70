import inspect
import pickle
import traceback

import pytest

from holdfast import errors
from holdfast.errors import CheckpointError, CheckpointException, RemoteError

PLAIN = [
    error
    for _, error in inspect.getmembers(errors, inspect.isclass)
    if issubclass(error, CheckpointError) and error is not CheckpointException
]


class Unpicklable(Exception):
    def __reduce__(self) -> str:
        raise TypeError("not through this door")


class NeedsTwoArguments(Exception):
    def __init__(self, a: str, b: str) -> None:
        super().__init__(f"{a}{b}")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def caught(error: BaseException) -> errors.WRAPPED_EXCEPTION:
    try:
        raise error
    except BaseException as raised:
        return raised, traceback.extract_tb(raised.__traceback__)


@pytest.mark.parametrize("cls", PLAIN)
def test_every_error_pickles_with_its_attributes(cls: type[CheckpointError]) -> None:
    error = cls("what happened", key="a.b", path="f", rank=3, expected=1, found=2)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert str(again) == "what happened"
    assert vars(again) == vars(error)


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.UsageError, ValueError),
        (errors.MissingKeyError, RuntimeError),
        (errors.ShapeMismatchError, ValueError),
        (errors.CheckpointNotFoundError, FileNotFoundError),
        (errors.CheckpointExistsError, RuntimeError),
        (errors.TruncatedFileError, EOFError),
        (errors.UnknownExtensionError, ValueError),
        (errors.ExtensionUnavailableError, ImportError),
    ],
)
def test_except_clauses_written_for_torch_still_catch(
    cls: type[CheckpointError], builtin: type[Exception]
) -> None:
    with pytest.raises(builtin, match="what happened"):
        raise cls("what happened")


def test_every_class_is_listed_and_drawn() -> None:
    for cls in (*PLAIN, CheckpointException):
        assert cls.__name__ in errors.__all__
        assert errors.__doc__ is not None
        assert cls.__name__ in errors.__doc__


def test_a_failed_step_is_an_exception_that_names_ranks_causes_and_places() -> None:
    error = CheckpointException("write", {2: caught(OSError(28, "No space left")), 0: caught(KeyError("k"))})
    assert isinstance(error, Exception)
    assert "ranks 0, 2" in str(error)
    assert "No space left" in str(error)
    assert "test_errors.py" in str(error)
    assert error.failures[2][0].errno == 28  # type: ignore[attr-defined]


def test_what_many_ranks_share_is_told_once_with_the_ranks_and_one_traceback() -> None:
    full = {rank: caught(OSError(28, "No space left")) for rank in (*range(30), 31)}
    error = CheckpointException.of("write", {**full, 30: caught(OSError(5, "disk broken"))})
    lines = str(error).splitlines()
    assert lines[0] == "write failed (failed on ranks 0-31)"
    assert [line for line in lines if "No space left" in line] == [
        "ranks 0-29, 31: OSError: [Errno 28] No space left"
    ]
    assert [line for line in lines if "disk broken" in line] == ["rank 30: OSError: [Errno 5] disk broken"]
    assert str(error).count("in caught") == 2
    assert len(lines) < 10
    assert len(error.failures) == 32


def test_the_reason_comes_last_and_our_own_errors_have_no_frames() -> None:
    failures = {0: caught(errors.MissingKeyError("x: Missing key")), 1: caught(OSError(28, "No space left"))}
    lines = str(CheckpointException.of("plan", failures)).splitlines()
    assert lines[-2:] == [
        "rank 0: holdfast.errors.MissingKeyError: x: Missing key",
        "rank 1: OSError: [Errno 28] No space left",
    ]
    assert str(lines).count("in caught") == 1


@pytest.mark.skipif(not hasattr(OSError, "add_note"), reason="Python 3.10 has no notes")
def test_one_reason_is_told_once_though_notes_differ() -> None:
    failures = {}
    for rank in range(3):
        error = errors.ChecksumError("damaged")
        vars(error)["__notes__"] = [f"{rank // 2} values changed"]
        failures[rank] = caught(error)
    assert str(CheckpointException.of("read", failures)).splitlines()[1:] == [
        "ranks 0-2: holdfast.errors.ChecksumError: damaged",
        "ranks 0-1: 0 values changed",
        "rank 2: 1 values changed",
    ]


def test_a_note_is_printed_once() -> None:
    cause = OSError(28, "No space left")
    vars(cause)["__notes__"] = ["nothing was changed"]
    error = CheckpointException.of("write", {0: caught(cause)})
    printed = "".join(traceback.format_exception_only(error))
    assert printed.count("nothing was changed") == 1


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([5], "rank 5"),
        ([3, 2], "ranks 2-3"),
        ([0, 1, 2, 7, 9, 10], "ranks 0-2, 7, 9-10"),
        ([1, 3], "ranks 1, 3"),
    ],
)
def test_ranks_are_told_as_ranges(ranks: list[int], text: str) -> None:
    assert errors.describe_ranks(ranks) == text


@pytest.mark.parametrize("cause", [Unpicklable("secret"), NeedsTwoArguments("a", "b")])
def test_a_failed_step_pickles_whatever_its_cause(cause: Exception) -> None:
    error = CheckpointException("read", {1: caught(cause)}, step="read")
    again = pickle.loads(pickle.dumps(error))
    described, trace = again.failures[1]
    assert isinstance(described, RemoteError)
    assert type(cause).__name__ in described.type_name
    assert trace[-1].name == "caught"
    assert again.step == "read"
    assert type(cause).__name__ in str(again)


def test_a_failed_step_prints_whatever_its_cause() -> None:
    assert "Unprintable" in str(CheckpointException("read", {1: caught(Unprintable())}))
