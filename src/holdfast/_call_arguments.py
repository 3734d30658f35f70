"""Owns how ``save``, ``async_save`` and ``load`` may be called: what by position, and what by which name."""

import difflib
import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

from holdfast._user_warning import warn_user

__all__ = ["checked_call"]

F = TypeVar("F", bound=Callable[..., Any])

_WRITER = (
    "single_file_per_rank sync_files thread_count per_thread_copy_ahead cache_staged_state_dict _extensions "
    "serialization_format torch_compatible memory_budget"
)
_SAVE_PLANNER = (
    "flatten_state_dict flatten_sharded_tensors dedup_replicated_tensors dedup_save_to_lowest_rank "
    "enable_plan_caching"
)
_OPTIONS = {
    "storage_writer": {
        "give it to FileSystemWriter(path, {name}=...), and pass that as storage_writer=": _WRITER,
        "give it to DefaultSavePlanner({name}=...), and pass that as planner=": _SAVE_PLANNER,
        "it is an option of load": "strict cast allow_partial_load allow_pickle safe_globals",
    },
    "storage_reader": {
        "give it to FileSystemReader(path, {name}=...), and pass that as storage_reader=": (
            "thread_count memory_budget verify share_reads _extension_registry"
        ),
        "give it to DefaultLoadPlanner({name}=...), and pass that as planner=": (
            "flatten_state_dict flatten_sharded_tensors"
        ),
        "it is an option of save": "overwrite check_replicas use_collectives",
        "leave it out: tensors are loaded to where the state has them": "map_location",
        "leave it out: no code of a checkpoint is run, unless allow_pickle=True": "weights_only",
    },
}
"""By the keyword of a function's storage: where options belong that people pass to the function."""

_SPELLINGS = {
    "checkpoint_id": (
        "path dir folder directory file filename file_name f url root location checkpoint checkpoint_dir "
        "checkpoint_path checkpoint_folder ckpt ckpt_dir ckpt_path save_dir save_path load_dir load_path "
        "output_dir resume_from"
    ),
    "state_dict": "state states model obj sd",
    "storage_writer": "writer storage",
    "storage_reader": "reader storage",
    "process_group": "group pg",
    "peer_timeout": "timeout",
    "progress": "on_progress callback",
}
"""By the name of an argument: what people call it."""


def checked_call(storage: str) -> Callable[[F], F]:
    """Let a function take the place as its second argument, and say where arguments belong that it lacks.

    A storage may come second, too, as it did before torch 2.2.

    Args:
        storage: The keyword of the function's storage.
    """

    def decorate(function: F) -> F:
        known = {"state_dict", *(function.__kwdefaults__ or ())}

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs.keys() - known:
                raise _unknown_argument(function.__name__, name, known, storage)
            if args and isinstance(args[0], str | os.PathLike):
                raise TypeError(
                    f"{function.__name__}() takes the state first, then the checkpoint's path, such as "
                    f'{function.__name__}({{"model": model}}, "checkpoints/100")'
                )
            if len(args) < 2:
                return function(*args, **kwargs)
            # What is no storage was meant as the place: the check of places says what is wrong with it.
            name = storage if hasattr(args[1], "reset") else "checkpoint_id"
            if len(args) > 2 or kwargs.get(name) is not None:
                given = f"{name} twice" if len(args) == 2 else f"{len(args)} arguments without a name"
                raise TypeError(
                    f"{function.__name__}() got {given}. Pass the state and the checkpoint's path, and "
                    "everything else by its name."
                )
            if name == storage:
                warn_user(
                    f"pass the second argument of {function.__name__} by its name: {storage}=", FutureWarning
                )
            return function(args[0], **{**kwargs, name: args[1]})

        return call  # type: ignore[return-value]

    return decorate


def _unknown_argument(function: str, name: str, known: set[str], storage: str) -> TypeError:
    """The error for an argument that a function does not have."""
    meant = [right for right, wrong in _SPELLINGS.items() if right in known and name in wrong.split()]
    meant += difflib.get_close_matches(name, known, n=1)
    hints = [place.format(name=name) for place, names in _OPTIONS[storage].items() if name in names.split()]
    hints += [f"do you mean {right}=?" for right in meant]
    text = f"{function}() got an unexpected keyword argument {name!r}"
    return TypeError(f"{text}: {hints[0]}" if hints else text)
