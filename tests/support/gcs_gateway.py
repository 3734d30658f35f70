"""Google Cloud Storage as far as its XML interface differs from S3, in front of a real S3 server.

No server of Google Cloud Storage can be installed. Its XML interface has the paths, queries and bodies of S3.
What differs is translated here, both ways: who asks, and conditions by generation instead of by ETag.
"""

import hashlib
import hmac
import http.client
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from tests.support.s3_server import ACCESS_KEY, REGION, SECRET_KEY
from typing_extensions import Self

_PASSED_ON = ("content-type", "range", "if-match", "if-none-match")
_HOP_BY_HOP = {"connection", "transfer-encoding", "keep-alive", "date", "server", "content-length"}


class GcsGateway:
    """The gateway as a process with a free port of this machine, for a with-block.

    Args:
        upstream: The URL of the S3 server.
        token: The token that requests must have; any will do by default.

    Attributes:
        endpoint: The URL to give to clients.
    """

    def __init__(self, upstream: str, token: str = "") -> None:
        command = [sys.executable, "-m", "tests.support.gcs_gateway", upstream, token]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.endpoint = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    upstream, token = "", ""

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        scheme, _, token = self.headers.get("authorization", "").partition(" ")
        if scheme != "Bearer" or token != (self.token or token):
            self._send(401, {}, b"<Error><Code>AuthenticationRequired</Code></Error>")
            return
        headers = {name: self.headers[name] for name in _PASSED_ON if self.headers[name]}
        if self.headers.get("x-goog-if-generation-match") == "0":
            headers["if-none-match"] = "*"  # no generation: only if there is no such object
        answer, content = _forward(self.upstream, self.command, self.path, headers, body)
        self._send(answer.status, dict(answer.getheaders()), content)

    def _send(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        headers = {name.lower(): value for name, value in headers.items()}
        for name, value in headers.items():
            if name not in _HOP_BY_HOP and not name.startswith("x-amz-"):
                self.send_header(name, value)
        if etag := headers.get("etag"):
            digest = hashlib.sha256(etag.encode()).digest()
            self.send_header("x-goog-generation", str(int.from_bytes(digest[:6], "big")))
        length = headers.get("content-length") if self.command == "HEAD" else None
        self.send_header("content-length", length or str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer


def _forward(
    address: str, method: str, target: str, headers: dict[str, str], body: bytes
) -> tuple[http.client.HTTPResponse, bytes]:
    path, _, query = target.partition("?")
    path = quote(unquote(path), safe="/-_.~")  # as it is signed
    query = "&".join(sorted(part if "=" in part else f"{part}=" for part in query.split("&") if part))
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        signed = _sign(address, method, path, query, body)
        connection.request(method, f"{path}?{query}" if query else path, body, {**headers, **signed})
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


def _sign(address: str, method: str, path: str, query: str, body: bytes) -> dict[str, str]:
    """The headers of AWS's Signature Version 4."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    digest = hashlib.sha256(body).hexdigest()
    headers = {"host": address, "x-amz-content-sha256": digest, "x-amz-date": stamp}
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    request = f"{method}\n{path}\n{query}\n{lines}\n{';'.join(headers)}\n{digest}"
    scope = f"{stamp[:8]}/{REGION}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = f"AWS4{SECRET_KEY}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    fields = f"Credential={ACCESS_KEY}/{scope}, SignedHeaders={';'.join(headers)}, Signature={signature}"
    return {**headers, "authorization": f"AWS4-HMAC-SHA256 {fields}"}


if __name__ == "__main__":
    _Handler.upstream, _Handler.token = urlsplit(sys.argv[1]).netloc, sys.argv[2]
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()
