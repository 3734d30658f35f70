"""Owns what the errors of an object store become."""

from collections.abc import Iterator
from contextlib import contextmanager

from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

from holdfast.errors import AccessDeniedError, CheckpointNotFoundError, StorageError

_HINTS = {
    "/latest/api/token": "No credentials are in the environment or in ~/.aws, and this machine has none.",
    "/latest/meta-data": "No credentials are in the environment or in ~/.aws, and this machine has none.",
    "NoSuchBucket": "There is no such bucket: make it, or correct the URL.",
    "301": "The bucket is in another region: set AWS_REGION.",
    "PermanentRedirect": "The bucket is in another region: set AWS_REGION.",
    "NotImplemented": 'If the store has no conditional puts, pass options={"conditional_put": "disabled"}.',
}


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
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise AccessDeniedError(
            f"{path}: the store refuses access; are the credentials there, and do they allow this? "
            f"{reason_of(error)}",
            path=path,
        ) from error
    except FileNotFoundError as error:
        if isinstance(error, CheckpointNotFoundError):
            raise
        raise CheckpointNotFoundError(
            f"{path}: there is no such object. {_hint(error)}".rstrip(), path=path
        ) from error
    except (BaseError, OSError, ValueError) as error:
        raise StorageError(f"{path}: {reason_of(error)} {_hint(error)}".rstrip(), path=path) from error


def _hint(error: BaseException) -> str:
    text = str(error)
    return next((hint for word, hint in _HINTS.items() if word in text), "")
