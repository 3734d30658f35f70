"""Owns what the errors of an object store become, and which requests are made again after one."""

import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from obstore.exceptions import BaseError, GenericError, PermissionDeniedError, UnauthenticatedError

from holdfast.errors import AccessDeniedError, CheckpointError, CheckpointNotFoundError, StorageError

T = TypeVar("T")
logger = logging.getLogger(__name__)

PAUSES = (0.2, 0.5, 1.0, 2.0, 4.0)
"""The seconds to wait, about, before a request is made again."""
_HINTS = {
    "/latest/api/token": "No credentials are in the environment or in ~/.aws, and this machine has none.",
    "/latest/meta-data": "No credentials are in the environment or in ~/.aws, and this machine has none.",
    **dict.fromkeys(
        ("redirect without LOCATION", "PermanentRedirect", "AuthorizationHeaderMalformed"),
        "The bucket is in another region: set AWS_REGION.",
    ),
    "ExpiredToken": "The credentials have expired: get new ones, or pass a credential_provider that does.",
    "RequestTimeTooSkewed": "The clock of this machine is wrong.",
    "SignatureDoesNotMatch": "The secret key is wrong, or a proxy has changed the request.",
    "NotImplemented": (
        'If the store knows no SHA-256 checksums, pass options={"checksum_algorithm": None}; if it has no '
        'conditional puts, {"conditional_put": "disabled"}.'
    ),
}

_FINAL = ("max_retries", "status code: 4", "redirect without LOCATION")
_REFUSED = ("status code: 403 ", "ExpiredToken")  # what a listing is answered, and 400 or 403


def reason_of(error: BaseException) -> str:
    """What an error of obstore says: the request, and the answer to it."""
    return str(error).partition("\n\nDebug source")[0].strip() or repr(error)


@contextmanager
def translated(path: str) -> Iterator[None]:
    """Raise our errors, which name the object and the request, in the place of obstore's.

    Raises:
        CheckpointNotFoundError: There is no such object.
        AccessDeniedError: The credentials are missing, wrong, or not enough.
        StorageError: Anything else that the store, or the way to it, did.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (BaseError, OSError, ValueError) as error:
        if "NoSuchBucket" in str(error):
            # Not "not found": a program that takes that for its first start must not begin again for a wrong
            # URL.
            text = f"{path}: there is no such bucket. Make it, or correct the URL or the endpoint."
            raise StorageError(text, path=path) from error
        if isinstance(error, FileNotFoundError):
            raise CheckpointNotFoundError(f"{path}: there is no such object.", path=path) from error
        if isinstance(error, PermissionDeniedError | UnauthenticatedError) or any(
            words in str(error) for words in _REFUSED
        ):
            text = (
                f"{path}: the store refuses access. The credentials are wrong, or do not allow this, or (if "
                f"they do not allow to list) there is no such object. {reason_of(error)} {_hint(error)}"
            )
            raise AccessDeniedError(text.rstrip(), path=path) from error
        raise StorageError(f"{path}: {reason_of(error)} {_hint(error)}".rstrip(), path=path) from error
    except BaseException as error:
        # obstore's code in Rust breaks off if a key or a region cannot stand in the head of a request. That
        # would be taken for an interrupt, since it is no Exception.
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise StorageError(
            f"{path}: no request can be made: {error}. Most often a key, a token or the region has a space "
            "or a newline at its end.",
            path=path,
        ) from error


def persist(path: str, request: Callable[[], T], on_retry: Callable[[], object] | None = None) -> T:
    """Make a request that may be made any number of times; again after errors that may pass.

    obstore does not do so if the answer breaks off in its middle. Errors are ``translated``. ``on_retry`` is
    called before the request is made again.
    """
    for pause in PAUSES:
        try:
            with translated(path):
                return request()
        except StorageError as error:  # noqa: PERF203 - requests take longer than that
            if not may_pass(error):
                raise
            logger.warning("%s Trying again.", error)
            if on_retry is not None:
                on_retry()
            rest(pause)
    with translated(path):
        return request()


def may_pass(error: StorageError) -> bool:
    """Whether a request may succeed if it is made again: the server did not refuse it, and obstore has not
    tried it for minutes already.
    """
    cause = error.__cause__
    return isinstance(cause, GenericError) and not any(words in reason_of(cause) for words in _FINAL)


def rest(seconds: float) -> None:
    """Wait, at most so long; clients that failed together do not come back together."""
    time.sleep(seconds * random.uniform(0.5, 1))  # noqa: S311 - nothing is to be kept secret


def _hint(error: BaseException) -> str:
    text = str(error)
    return next((hint for word, hint in _HINTS.items() if word in text), "")
