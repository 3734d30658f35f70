"""Calls our functions for those who call torch's: arguments translated, options added, answers as torch's."""

import logging
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist

from holdfast._install.answers import make_torchs, torch_futures, torch_metadata
from holdfast._install.install_options import InstallOptions
from holdfast._install.stock_classes import Translator, full_name, is_stock
from holdfast.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from holdfast.errors import CheckpointException
from holdfast.state_dict_saver import AsyncCheckpointerType

logger = logging.getLogger("holdfast.install")

# Whose frames stand between a caller and us without being the caller.
_BETWEEN = {"holdfast", "torch", "contextlib", "functools", "typing_extensions"}
_NOTE = (
    "holdfast.install() is in effect: options such as strict, cast, check_replicas, allow_pickle and "
    "safe_globals are arguments of install(), or variables of the environment (HOLDFAST_ALLOW_PICKLE=1)."
)


class Calls:
    """Calls our functions as torch's are called.

    Args:
        options: What is added where callers cannot say it.
    """

    def __init__(self, options: InstallOptions) -> None:
        self.options = options
        self.translator = Translator(options)

    def call(self, function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Call ``function``, which stands for torch's of that name, and return what torch's would return."""
        given = self._given(name, args, kwargs)
        try:
            made = function(*given[0], **given[1])
        except CheckpointException as error:
            make_torchs(error)
            _add_note(error)
            raise
        for theirs, ours in [*zip(args, given[0], strict=False), *((kwargs[k], given[1][k]) for k in kwargs)]:
            if ours is not theirs:
                _keep_true(theirs, ours)
        if name == "async_save":
            return _begun(made, kwargs.get("async_stager"), *given)
        if name in _SAVES:
            _tell_who_saved(_caller(), given[1].get("process_group"), _place_of(*given))
            return torch_metadata(made)
        return None if name == "load" else made

    def _given(self, name: str, args: tuple[Any, ...], kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
        """The arguments for our function."""
        checkpoint_id = kwargs.get("checkpoint_id")
        for value in (*args, *kwargs.values()):
            # As torch's functions do it. So the caller's storage knows its new place, too.
            if checkpoint_id and hasattr(value, "validate_checkpoint_id") and is_stock(value):
                value.reset(checkpoint_id)
        ours = [self.translator.translate(value) for value in args]
        named = {key: self.translator.translate(value) for key, value in kwargs.items()}
        if "async_checkpointer_type" in named:
            kind = named["async_checkpointer_type"]
            named["async_checkpointer_type"] = AsyncCheckpointerType(getattr(kind, "value", kind))
        place = _PLANNER_AT.get(name)
        if place is not None and len(ours) <= place and named.get("planner") is None:
            self._add_planner(name, named)
        return ours, named

    def _add_planner(self, name: str, named: dict[str, Any]) -> None:
        """Give the options to those functions that would choose a planner themselves."""
        if name in _LOADS and self.options.for_load_planner() != InstallOptions().for_load_planner():
            named["planner"] = DefaultLoadPlanner(**self.options.for_load_planner())
        elif name not in _LOADS and self.options.for_save_planner():
            named["planner"] = DefaultSavePlanner(**self.options.for_save_planner())


def _keep_true(theirs: Any, ours: Any) -> None:
    """Let the caller's storage or planner say what torch's would say after the call."""
    for name in ("save_id", "load_id"):
        if hasattr(theirs, name) and hasattr(ours, name):
            setattr(theirs, name, getattr(ours, name))
    if isinstance(ours, DefaultLoadPlanner):
        theirs.metadata, theirs.is_coordinator = torch_metadata(ours.metadata), ours.is_coordinator


def _begun(made: Any, stager: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Turn the result of our ``async_save`` into that of torch's."""
    caller, place, answer = _caller(), _place_of(args, kwargs), torch_futures(made)
    if answer is not made and hasattr(stager, "_staging_future"):
        # ``synchronize_staging`` of torch's stager waits for it.
        stager._staging_future = answer.staging_completion  # noqa: SLF001

    def tell(done: "Future[Any]") -> None:
        # By the base class: asking the future itself would count as the caller's look at its failure.
        if not Future.cancelled(done) and Future.exception(done) is None:
            _tell_who_saved(caller, kwargs.get("process_group"), place)

    getattr(answer, "upload_completion", answer).add_done_callback(tell)
    return answer


_SAVES = ("save", "save_state_dict", "_save_state_dict")
_LOADS = ("load", "load_state_dict", "_load_state_dict", "load_sharded_optimizer_state_dict")
_PLANNER_AT = {
    **dict.fromkeys((*_SAVES, "async_save", *_LOADS), 5),
    "save": 2,
    "async_save": 2,
    "load": 2,
    "load_sharded_optimizer_state_dict": 3,
}
"""How many arguments come before the planner where it is passed without its name."""


def _caller() -> str:
    """The module that called torch's function."""
    frame: Any = sys._getframe(1)  # noqa: SLF001 - there is no other way to the frames
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] not in _BETWEEN:
            return name
        frame = frame.f_back
    return "torch"


def _place_of(args: list[Any], kwargs: dict[str, Any]) -> str:
    """Where a save goes to, and whose files these are if not ours."""
    given = [kwargs.get("checkpoint_id"), kwargs.get("storage_writer"), *args[1:2]]
    places = [getattr(value, "checkpoint_id", value) for value in given]
    known = [os.fspath(place) for place in places if isinstance(place, str | os.PathLike)]
    writers = [full_name(type(value)) for value in given if hasattr(value, "write_data")]
    theirs = [name for name in writers if not name.startswith("holdfast.")]
    return ", in files of ".join([*(known or ["a storage of the caller's"])[:1], *theirs])


def _tell_who_saved(caller: str, group: Any, place: str) -> None:
    is_first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank(group) == 0
    if is_first:
        logger.info("saved by holdfast for %s: %s", caller, place)


def _add_note(error: BaseException) -> None:
    """Say where options are given, if the error proposes one. Exceptions of Python 3.10 take no notes."""
    about = (" strict=", " cast=", "allow_pickle=", "safe_globals=", "check_replicas=")
    if hasattr(error, "add_note") and any(option in str(error) for option in about):
        error.add_note(_NOTE)
