"""Every error that Holdfast raises on purpose.

::

    CheckpointError(Exception)
    ├── UsageError(ValueError)                  arguments that make no sense together
    ├── PlanError(ValueError)                   the state and the checkpoint do not fit
    │   ├── MissingKeyError(RuntimeError)
    │   │   └── UnknownKeyError(KeyError)       a view was asked for a key that is not there
    │   ├── ShapeMismatchError
    │   ├── DtypeMismatchError
    │   └── InvalidPlanError
    ├── StorageError(RuntimeError)              the storage could not do its part
    │   ├── CheckpointNotFoundError(FileNotFoundError)
    │   ├── CheckpointExistsError
    │   ├── AccessDeniedError(PermissionError)
    │   ├── NotAFolderError(FileExistsError, NotADirectoryError)
    │   ├── WrongFolderError                    the checkpoints are in folders below
    │   └── IncompleteWriteError
    ├── IntegrityError(RuntimeError)            the bytes are not the ones that were written
    │   ├── IncompleteCheckpointError           a file of a checkpoint is missing
    │   │   └── ReplacedCheckpointError         because another save has replaced the checkpoint
    │   ├── ChecksumError
    │   ├── TruncatedFileError(EOFError)
    │   ├── MetadataFormatError
    │   │   └── NewerFormatError                a newer version of holdfast wrote it
    │   └── UnsafeMetadataError
    ├── ExtensionError(ValueError)              a stream transform cannot be used
    │   ├── UnknownExtensionError
    │   └── ExtensionUnavailableError(ImportError)
    ├── RemoteError                             an error of another process, described in text
    ├── RankLostError                           a rank ended, stopped or was interrupted in a step
    └── CheckpointException                     one step failed on some ranks

Catch ``CheckpointError`` for all of them. Each class also inherits the builtin that
``torch.distributed.checkpoint`` raises in its place, so that ``except`` clauses written for it go on
working. What a message says is in attributes too: ``key``, ``path``, ``rank``, ``expected``, ``found``;
an attribute that does not apply is None.

Errors pickle, because they travel between ranks and processes.
"""

import functools
import pickle
import traceback
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

__all__ = [
    "AccessDeniedError",
    "CheckpointError",
    "CheckpointException",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "ChecksumError",
    "DtypeMismatchError",
    "ExtensionError",
    "ExtensionUnavailableError",
    "IncompleteCheckpointError",
    "IncompleteWriteError",
    "IntegrityError",
    "InvalidPlanError",
    "MetadataFormatError",
    "MissingKeyError",
    "NewerFormatError",
    "NotAFolderError",
    "PlanError",
    "RankLostError",
    "RemoteError",
    "ReplacedCheckpointError",
    "ShapeMismatchError",
    "StorageError",
    "TruncatedFileError",
    "UnknownExtensionError",
    "UnknownKeyError",
    "UnsafeMetadataError",
    "UsageError",
    "WrongFolderError",
]

WRAPPED_EXCEPTION: TypeAlias = tuple[BaseException, traceback.StackSummary]
"""An error as a rank reports it: the exception, and where it was raised."""


class CheckpointError(Exception):
    """The root of the tree; see the module's drawing.

    Args:
        message: What happened, to which key, file or rank, found against expected, and what to do.
        key: The flat name in the checkpoint that it is about.
        path: The file that it is about, as the user would name it.
        rank: The rank on which it happened.
        expected: What should have been there.
        found: What was there.
    """

    def __init__(
        self,
        message: str = "",
        *,
        key: str | None = None,
        path: str | None = None,
        rank: int | None = None,
        expected: Any = None,
        found: Any = None,
    ) -> None:
        super().__init__(message)
        self.key = key
        self.path = path
        self.rank = rank
        self.expected = expected
        self.found = found


class UsageError(CheckpointError, ValueError, RuntimeError):
    """The arguments of a call make no sense, alone or together."""


class PlanError(CheckpointError, ValueError):
    """What the caller wants to save or load does not fit what is there."""


class MissingKeyError(PlanError, RuntimeError):
    """The checkpoint has no such key."""


class UnknownKeyError(MissingKeyError, KeyError):
    """A view of a checkpoint was asked for a key that it does not have."""

    # That of KeyError puts quotes around the message.
    __str__ = Exception.__str__


class ShapeMismatchError(PlanError):
    """The tensor in the checkpoint has another shape than its destination."""


class DtypeMismatchError(PlanError):
    """The tensor in the checkpoint has a dtype that must not be cast into its destination's."""


class InvalidPlanError(PlanError):
    """A plan is wrong in itself: chunks overlap, leave a gap, or reach outside their tensor."""


class StorageError(CheckpointError, RuntimeError):
    """The storage could not do what was asked; nothing was committed."""


class CheckpointNotFoundError(StorageError, FileNotFoundError):
    """There is no checkpoint at that place.

    ``found`` is None if there is nothing of one. If there are data files without metadata, ``found`` names
    them: a save was interrupted before its commit, or somebody removed the metadata.
    """


class CheckpointExistsError(StorageError):
    """There is a checkpoint already, and the caller asked not to replace it."""


class AccessDeniedError(StorageError, PermissionError):
    """The storage refuses these credentials, or a right is missing."""


class NotAFolderError(StorageError, FileExistsError, NotADirectoryError):
    """The place of a checkpoint is a file, or lies below one."""


class WrongFolderError(StorageError):
    """The place is not a checkpoint: it has checkpoints in folders of its own, which ``found`` lists.

    The root of a ``CheckpointManager`` can be wrong too: a checkpoint itself, or steps under other names.

    It is not a ``FileNotFoundError``: a program that takes a missing checkpoint for its first start must not
    begin again because its path is one folder too short.
    """


class IncompleteWriteError(StorageError):
    """Not every planned item was written exactly once with its planned size; nothing was committed."""


class IntegrityError(CheckpointError, RuntimeError):
    """The bytes read are not the bytes that were written."""


class IncompleteCheckpointError(IntegrityError):
    """There is a checkpoint, and a file that belongs to it is missing.

    It is not a ``FileNotFoundError``: a program that takes a missing checkpoint for its first start must not
    take a damaged one for it.
    """


class ReplacedCheckpointError(IncompleteCheckpointError):
    """While a checkpoint was loaded, another save replaced it and removed its files; there is a new one.

    Attributes:
        may_have_changed: Whether the rank that it happened to had begun to change its state.
    """

    may_have_changed: bool = False


class ChecksumError(IntegrityError):
    """A block's checksum is not the recorded one."""


class TruncatedFileError(IntegrityError, EOFError):
    """A file ends before the bytes that it should hold."""


class MetadataFormatError(IntegrityError):
    """A checkpoint's metadata is damaged, or of a format that this version does not know."""


class NewerFormatError(MetadataFormatError):
    """A newer version of holdfast wrote the checkpoint. It may be sound, and this version cannot read it."""


class UnsafeMetadataError(IntegrityError):
    """A checkpoint asks for code to be run. Nothing of it was."""


class ExtensionError(CheckpointError, ValueError):
    """A stream transform cannot be used as its descriptor asks."""


class UnknownExtensionError(ExtensionError):
    """No registered extension has that name, or none of that name knows that version."""


class ExtensionUnavailableError(ExtensionError, ImportError):
    """The extension is known, but a package that it needs is not installed."""


class RemoteError(CheckpointError):
    """Stands for an exception of another rank or process that could not be pickled.

    Attributes:
        type_name: The qualified name of the exception's class.
    """

    def __init__(self, message: str = "", *, type_name: str = "", **details: Any) -> None:
        super().__init__(message, **details)
        self.type_name = type_name

    @classmethod
    def from_exception(cls, error: BaseException) -> "RemoteError":
        """Describe ``error`` in text. Never raises, whatever ``error`` does when it is printed."""
        type_name = f"{type(error).__module__}.{type(error).__qualname__}"
        try:
            text = str(error)
        except Exception as failure:  # noqa: BLE001 - a stranger's __str__ may raise anything
            text = f"<its message could not be made: {type(failure).__name__}>"
        return cls(f"{type_name}: {text}", type_name=type_name)


class RankLostError(CheckpointError):
    """A rank took no part in a step to its end: it died, exited, stopped answering or was interrupted."""


class CheckpointException(CheckpointError):  # noqa: N818 - the name is torch's
    """One step of a save or a load failed, on one rank or several; every rank raises this.

    It derives from ``Exception``; torch's class of that name derives from ``BaseException``, so that
    ``except Exception`` misses it. Interrupts are never wrapped in it.

    Args:
        msg: What was being done.
        failures: For each rank that failed, the exception and the stack summary of where it was raised.
        step: The step of the save or load that failed, such as ``"plan"`` or ``"write"``.
    """

    def __init__(
        self, msg: str, failures: Mapping[int, WRAPPED_EXCEPTION], *, step: str | None = None
    ) -> None:
        super().__init__(msg)
        # torch keeps both in args, and people read them there.
        self.args = (msg, dict(failures))
        self.step = step
        self.failures = dict(failures)

    def __str__(self) -> str:
        if len(self.failures) == 1 and self.__cause__ in [error for error, _ in self.failures.values()]:
            # A process alone: the cause's traceback is printed before this, and there are no ranks to tell.
            return f"{self.args[0]}: {''.join(_describe(self.__cause__)).rstrip()}"
        if not self.failures:
            return str(self.args[0])
        # What many ranks share (a full disk, a missing file) is told once. It comes last, where people look;
        # the frames come first, and only those of errors that nobody has written a message for.
        alike: dict[str, dict[str, list[int]]] = {}
        for rank, (error, _) in sorted(self.failures.items()):
            reason, notes = _reason_and_notes(error)
            alike.setdefault(reason, {}).setdefault(notes, []).append(rank)
        frames, reasons = list[str](), list[str]()
        for reason, by_notes in alike.items():
            ranks = [rank for some in by_notes.values() for rank in some]
            error, trace = self.failures[ranks[0]]
            if trace and not isinstance(error, CheckpointError):
                frames += [f"rank {ranks[0]}:", "".join(traceback.format_list(trace)).rstrip()]
            reasons.append(f"{describe_ranks(ranks)}: {reason}")
            for notes, of_ranks in by_notes.items():
                who = "" if len(by_notes) == 1 else f"{describe_ranks(of_ranks)}: "
                reasons += [f"{who}{notes}"] if notes else []
        return "\n".join([f"{self.args[0]} (failed on {describe_ranks(self.failures)})", *frames, *reasons])

    @classmethod
    def of(cls, step: str, failures: Mapping[int, WRAPPED_EXCEPTION]) -> "CheckpointException":
        """The exception for a failed step, which is also an instance of its cause's class.

        If all ranks failed with the same class of error, ``except`` clauses for that class catch this
        one too, and its attributes (``errno``, ``key``, ``path`` ...) are those of the first failure.
        """
        causes = {type(error) for error, _ in failures.values()}
        first = failures[min(failures)][0]
        made: CheckpointException
        try:
            kind = _joined_class(causes.pop()) if len(causes) == 1 else cls
            made = kind(f"{step} failed", failures, step=step)
            for name, value in {**_os_details(first), **vars(first)}.items():
                # Notes are printed with the failure that they belong to.
                if name not in ("step", "failures", "__notes__"):
                    setattr(made, name, value)
        except Exception:  # noqa: BLE001 - a stranger's class may refuse to be inherited from in any way
            made = cls(f"{step} failed", failures, step=step)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        portable = {rank: portable_failure(failure) for rank, failure in self.failures.items()}
        if type(self) in _JOINED.values():
            return CheckpointException.of, (self.step, portable)
        return functools.partial(type(self), step=self.step), (self.args[0], portable)


_JOINED: dict[type[BaseException], type[CheckpointException]] = {}


def _joined_class(cause: type[BaseException]) -> type[CheckpointException]:
    if issubclass(cause, CheckpointException):
        return cause
    if cause not in _JOINED:
        _JOINED[cause] = type("CheckpointException", (CheckpointException, cause), {"__module__": __name__})
    return _JOINED[cause]


def _os_details(error: BaseException) -> dict[str, Any]:
    if not isinstance(error, OSError):
        return {}
    return {"errno": error.errno, "strerror": error.strerror, "filename": error.filename}


def describe_ranks(ranks: Iterable[int]) -> str:
    """Ranks in words, neighbours as a range: "rank 5", or "ranks 0-2, 7"."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    told = ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)
    return f"ranks {told}" if len(runs) > 1 or runs[0][0] != runs[0][1] else f"rank {told}"


def portable_failure(failure: WRAPPED_EXCEPTION) -> WRAPPED_EXCEPTION:
    """A failure in a form that survives pickle, whatever its exception is."""
    error, trace = failure
    return _portable(error), portable_trace(trace)


def _describe(error: BaseException | None) -> list[str]:
    assert error is not None
    try:
        return traceback.format_exception_only(type(error), error)
    except Exception:  # noqa: BLE001 - a stranger's __str__ may raise anything
        return [str(RemoteError.from_exception(error))]


def _reason_and_notes(error: BaseException) -> tuple[str, str]:
    """The message of an error, and its notes, which may differ between ranks if the message does not."""
    text = "".join(_describe(error)).rstrip()
    notes = "\n".join(map(str, getattr(error, "__notes__", ())))
    return (text.removesuffix(notes).rstrip(), notes) if notes else (text, "")


def _portable(error: BaseException) -> BaseException:
    """The error itself where it survives a pickle round trip, else a description of it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - __reduce__ and __init__ of strangers may raise anything
        return RemoteError.from_exception(error)
    return error


def portable_trace(trace: traceback.StackSummary | None) -> Any:
    """A stack summary in a form that survives pickle."""
    # From Python 3.13 on a frame summary holds its code object, which cannot be pickled.
    if trace is None:
        return None
    return traceback.StackSummary.from_list([(f.filename, f.lineno or 0, f.name, f.line) for f in trace])
