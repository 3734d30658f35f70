"""Owns the way from a path or a URL to the store that keeps its files."""

import os
import re
from urllib.parse import unquote, urlsplit

from holdfast._io.local import LocalStore
from holdfast._io.store import ByteStore
from holdfast.errors import UsageError

# A path object turns "s3://bucket" into "s3:/bucket". One letter before the colon is a drive.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")


def open_place(place: str | os.PathLike[str]) -> ByteStore:
    """The store of a checkpoint's place. The place need not exist.

    A new kind of store is entered here.

    Raises:
        UsageError: No store serves such a place.
    """
    return LocalStore(local_path(place))


def local_path(place: str | os.PathLike[str]) -> str:
    """The folder that a path or a URL of the scheme ``file`` names.

    Raises:
        UsageError: It is another URL.
    """
    path = os.fspath(place)
    scheme = _URL.match(path)
    if scheme is None:
        return path
    url = urlsplit(path)
    if url.scheme == "file" and url.netloc in {"", "localhost"}:
        if url.query or url.fragment:
            raise UsageError(f"{path}: in a file:// URL write %3F for '?' and %23 for '#'", path=path)
        return unquote(url.path)
    raise UsageError(
        f"Cannot detect which storage serves {path}: paths of folders and file:// URLs are supported. For "
        "other places pass a storage that knows them.",
        path=path,
        found=scheme[1],
    )
