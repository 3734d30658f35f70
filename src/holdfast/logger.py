"""A decorator that logs the beginning and the end of a call, for functions that save and load."""

import functools
import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed import c10d_logger
from typing_extensions import ParamSpec

from holdfast.logging_handlers import DCP_LOGGER_NAME

__all__: list[str] = []

P = ParamSpec("P")
T = TypeVar("T")

_dcp_logger = c10d_logger._get_or_create_logger(DCP_LOGGER_NAME)  # noqa: SLF001 - torch's logs are made so


def _dcp_method_logger(
    log_exceptions: bool = False, **wrapper_kwargs: Any
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Log each call of a function to ``_dcp_logger``, as one dict when it begins and one when it ends.

    Both have the level DEBUG, the same ``uuid``, the function's name, the group, and what is known of the
    checkpoint: ``checkpoint_id``, and the classes of ``storage_writer``, ``storage_reader`` and ``planner``.

    Args:
        log_exceptions: Log a dict with the level ERROR if the function raises. It raises in any case.
        **wrapper_kwargs: Stand for keyword arguments that the calls do not have.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            told = _describe_call(function.__name__, args, {**wrapper_kwargs, **kwargs})
            told["log_exceptions"] = log_exceptions
            begun = time.time_ns()
            _dcp_logger.debug({**told, "event": "start", "time": begun})
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                if log_exceptions:
                    # The traceback is raised; whoever catches it may log it.
                    facts = {"event": "exception", "error": str(error), "time": time.time_ns()}
                    _dcp_logger.error({**told, **facts})  # noqa: TRY400
                raise
            ended = time.time_ns()
            _dcp_logger.debug({**told, "event": "end", "time": ended, "times_spent": ended - begun})
            return result

        return call

    return decorate


def _describe_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    storage = kwargs.get("storage_writer") or kwargs.get("storage_reader")
    place = kwargs.get("checkpoint_id") or getattr(storage, "checkpoint_id", None)
    plugins = {
        role: type(kwargs[role]).__name__
        for role in ("storage_writer", "storage_reader", "planner")
        if kwargs.get(role) is not None
    }
    about_group: dict[str, Any] = c10d_logger._get_msg_dict(name, *args, **kwargs)  # noqa: SLF001
    checkpoint_id = None if place is None else str(place)
    return {"checkpoint_id": checkpoint_id, "uuid": str(uuid.uuid4().int), **plugins, **about_group}
