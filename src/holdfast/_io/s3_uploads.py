"""Owns unfinished multipart uploads of S3: they are listed and aborted by signed requests of our own.

An upload that its process did not finish is in no listing of objects, and costs money until it is aborted.
obstore can neither list nor abort one. Requests are signed by AWS's Signature Version 4.
"""

import hashlib
import hmac
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree as ET

from holdfast._io.bucket_client import BucketAccess, S3Keys

_TIMEOUT_SECONDS = 30.0
_MOST_ANSWER = 16 << 20
_MOST_PAGES = 1000
_NOTHING = hashlib.sha256(b"").hexdigest()


class UnfinishedUpload(NamedTuple):
    """A multipart upload that was begun and neither completed nor aborted."""

    key: str
    upload_id: str


class S3Uploads:
    """The unfinished uploads below one prefix of a bucket.

    Args:
        access: How to reach the bucket.
        keys: What to sign requests with.
    """

    def __init__(self, access: BucketAccess, keys: S3Keys) -> None:
        self._access = access
        self._keys = keys

    def find(self, prefix: str) -> Iterator[UnfinishedUpload]:
        """All whose key begins with ``prefix``.

        Raises:
            OSError: The server does not answer, or refuses.
        """
        marker: dict[str, str] = {}
        for _ in range(_MOST_PAGES):
            root = self._answer("GET", "", {"uploads": "", "prefix": prefix, **marker})
            for upload in root.iterfind("{*}Upload"):
                yield UnfinishedUpload(upload.findtext("{*}Key", ""), upload.findtext("{*}UploadId", ""))
            key, upload_id = root.findtext("{*}NextKeyMarker"), root.findtext("{*}NextUploadIdMarker")
            if root.findtext("{*}IsTruncated") != "true" or not key:
                return
            marker = {"key-marker": key, "upload-id-marker": upload_id or ""}

    def abort(self, upload: UnfinishedUpload) -> None:
        """Abort an upload; one that is gone is fine. Raises OSError as ``find`` does."""
        try:
            self._send("DELETE", upload.key, {"uploadId": upload.upload_id})
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != 404:
                raise

    def _answer(self, method: str, key: str, query: dict[str, str]) -> ET.Element:
        try:
            # The answer of the server that the user has named, bounded; expat does not resolve entities
            # of other files.
            return ET.fromstring(self._send(method, key, query))  # noqa: S314
        except ET.ParseError as error:
            raise OSError(f"{self._access.url}: the list of unfinished uploads is no XML: {error}") from error

    def _send(self, method: str, key: str, query: dict[str, str]) -> bytes:
        """Send a signed request without a body, and return the body of the answer."""
        endpoint = str(self._access.address)
        path = "/".join(filter(None, [urlsplit(endpoint).path.strip("/"), self._access.bucket, key]))
        target = f"/{quote(path, safe='/-_.~')}"
        canonical_query = "&".join(
            f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in sorted(query.items())
        )
        host = urlsplit(endpoint).netloc
        headers = sign(
            self._keys, self._access.region, method, host, target, canonical_query, now=time.gmtime()
        )
        url = f"{endpoint.partition('://')[0]}://{host}{target}?{canonical_query}"
        request = urllib.request.Request(url, method=method, headers=headers)  # noqa: S310 - of the endpoint
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:  # noqa: S310
            content: bytes = answer.read(_MOST_ANSWER)
        return content


def sign(
    keys: S3Keys, region: str, method: str, host: str, path: str, query: str, *, now: time.struct_time
) -> dict[str, str]:
    """The headers of a request without a body, signed.

    Args:
        keys: What to sign with.
        region: The region of the bucket.
        method: The HTTP method.
        host: The host, with its port.
        path: The path, quoted.
        query: The query, quoted and sorted.
        now: The time, in UTC.
    """
    stamp, day = time.strftime("%Y%m%dT%H%M%SZ", now), time.strftime("%Y%m%d", now)
    headers = {"host": host, "x-amz-content-sha256": _NOTHING, "x-amz-date": stamp}
    if keys.token:
        headers["x-amz-security-token"] = keys.token
    signed = ";".join(sorted(headers))
    lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    request = f"{method}\n{path}\n{query}\n{lines}\n{signed}\n{_NOTHING}"
    scope = f"{day}/{region}/s3/aws4_request"
    digest = hashlib.sha256(request.encode()).hexdigest()
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}"
    key = f"AWS4{keys.secret_access_key}".encode()
    for part in (day, region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    credential = f"Credential={keys.access_key_id}/{scope}"
    headers["authorization"] = f"AWS4-HMAC-SHA256 {credential}, SignedHeaders={signed}, Signature={signature}"
    return headers
