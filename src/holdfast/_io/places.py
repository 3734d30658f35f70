"""Owns the way from a path or a URL to the store that keeps its files."""

import os
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

from holdfast._io.fsspec_files import has_fsspec, knows_scheme
from holdfast._io.fsspec_store import open_fsspec_url
from holdfast._io.local import LocalStore
from holdfast._io.page_cache import PageCache
from holdfast._io.store import ByteStore
from holdfast.errors import UsageError


def open_bucket(url: str, **settings: Any) -> ByteStore:
    """The store of a prefix of a bucket.

    Args:
        url: The URL.
        settings: The other fields of ``holdfast._io.bucket_client.BucketAccess``.

    Raises:
        UsageError: obstore is not installed.
    """
    try:
        # Here, because looking at a folder must not take the time of this import.
        from holdfast._io.bucket import BucketStore  # noqa: PLC0415
        from holdfast._io.bucket_client import BucketAccess  # noqa: PLC0415
    except ImportError as error:
        raise UsageError(
            f"{url}: object stores need obstore: pip install 'holdfast[object-stores]'", path=url
        ) from error
    return BucketStore(BucketAccess(url, **settings))


STORES: dict[str, Callable[[str], ByteStore]] = dict.fromkeys(
    ("s3", "s3a", "gs", "gcs", "az", "azure", "adl", "abfs", "abfss"), open_bucket
)
"""What opens the URLs of each scheme; ``file`` is known besides. A new kind of store is one entry here.

All other URLs are opened by fsspec, if it is installed.
"""

# A path object turns "s3://bucket" into "s3:/bucket". One letter before the colon is a drive. fsspec writes a
# file system over another one as a chain: "zip::s3://bucket/run.zip".
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?:/+|:(?=.*://))")


def open_place(place: str | os.PathLike[str], *, page_cache: PageCache = "auto") -> ByteStore:
    """The store of a checkpoint's place. The place need not exist.

    Args:
        place: The path or URL.
        page_cache: What to leave in the page cache of this machine, if the place is a folder.

    Raises:
        UsageError: No store serves such a place.
    """
    folder = local_path(place)
    if folder is not None:
        return LocalStore(folder, page_cache=page_cache)
    path = os.fspath(place)
    scheme, _, rest = path.partition(":")
    if scheme in STORES:
        # A third slash ends the name of a bucket that is empty: no path object writes that.
        return STORES[scheme](path if rest.startswith("///") else f"{scheme}://{rest.lstrip('/')}")
    if knows_scheme(scheme):
        # A URL that begins with an empty host, hdfs:///run, stays what it is.
        return open_fsspec_url(re.sub(r":/(?![/:])", "://", path, count=1), page_cache=page_cache)
    known = "".join(f", {known}:// URLs" for known in STORES)
    more = (
        "and what fsspec knows" if has_fsspec() else "(pip install holdfast[fsspec] adds all that it knows)"
    )
    raise UsageError(
        f"Cannot detect which storage serves {path}: paths of folders{known}, file:// URLs {more} are "
        "supported. For other places pass a storage that knows them.",
        path=path,
        found=scheme,
    )


def open_file_place(
    place: str | os.PathLike[str], *, follow: bool = False, page_cache: PageCache = "auto"
) -> tuple[ByteStore, str]:
    """The store that a file lies in, and the file's name there. Neither need exist.

    Args:
        place: The path or URL of the file.
        follow: Whether a symbolic link there means the file that it leads to. Not for a file to be written.
        page_cache: As for ``open_place``.

    Raises:
        UsageError: No store serves such a place, or it does not name a file.
    """
    local = local_path(place)
    if local is not None and follow and os.path.islink(local):
        local = os.path.realpath(local)
    # What a URL has behind a question mark stands at its end.
    path, mark, query = os.fspath(place).partition("?") if local is None else (local, "", "")
    folder, slash, name = path.rpartition("/")
    if not name or name in {".", ".."} or folder.endswith(":/"):
        raise UsageError(f"{os.fspath(place)} does not name a file", path=os.fspath(place))
    return open_place((folder or slash or ".") + mark + query, page_cache=page_cache), name


def path_text(place: object, what: str) -> str:
    """The path or URL as text.

    Args:
        place: What a user has passed.
        what: What it is the place of, as a sentence begins: "the root of a run".

    Raises:
        UsageError: It is neither text nor a path object, or it is empty.
    """
    text = os.fspath(place) if isinstance(place, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        found = "an empty text" if isinstance(text, str) else f"{place!r} of type {type(place).__name__}"
        raise UsageError(
            f'{what} must be a path or URL, such as "runs/1" or "s3://bucket/runs/1", and this is {found}',
            found=place,
        )
    return text


def without_end_slashes(path: str) -> str:
    """A path or URL without slashes at its end. The root, and a URL that names nothing, keep them."""
    trimmed = path.rstrip("/")
    return path if not trimmed or trimmed.endswith(":") else trimmed


def local_path(place: str | os.PathLike[str]) -> str | None:
    """The folder that a path or a URL of the scheme ``file`` names; None for another URL.

    Raises:
        UsageError: The URL has a part that no folder has.
    """
    path = os.fspath(place)
    if _URL.match(path) is None:
        return path
    url = urlsplit(path)
    if url.scheme != "file" or url.netloc not in {"", "localhost"}:
        return None
    if url.query or url.fragment:
        raise UsageError(f"{path}: in a file:// URL write %3F for '?' and %23 for '#'", path=path)
    if not url.path:
        raise UsageError(f"{path} names no folder: write file:///runs/1", path=path)
    return unquote(url.path)
