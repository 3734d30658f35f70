"""What a test tells the proxy before an S3 server to do with requests: faults, rules, gates."""

import random
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(eq=False)
class S3Request:
    """One request, as rules see it and as the record keeps it.

    Attributes:
        method: As it was sent.
        path: Decoded and without the query.
        query: Decoded; a name without a value has the value "".
        key: The path without the bucket; "" for a request to the bucket itself.
        headers: Of the request, the names in lower case.
        nbytes_up: Bytes of the request's body that the proxy has read.
        nbytes_down: Bytes of the answer's body that the client was sent.
        status: What the client was answered; None if it was dropped or is not answered yet.
        server_status: What the server answered to the proxy; None if it has not.
        fault: The name of the fault's class, or None.
    """

    method: str
    path: str
    query: dict[str, str]
    key: str
    headers: dict[str, str]
    nbytes_up: int = 0
    nbytes_down: int = 0
    status: int | None = None
    server_status: int | None = None
    fault: str | None = None


class Fault:
    """What happens to one request in place of being passed on and answered."""


@dataclass(frozen=True)
class Delay(Fault):
    """Forward after so many seconds, also if the client has sent all and gone away until then."""

    seconds: float


@dataclass(frozen=True)
class Stall(Fault):
    """Read the request and answer nothing, until the client goes away or the proxy closes."""


@dataclass(frozen=True)
class Answer(Fault):
    """Answer this in place of the server. Without a body, 409, 412, 429, 500 and 503 get that of S3."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ApplyThenAnswer(Fault):
    """Let the server do it, throw its answer away, and answer like ``Answer(status)``."""

    status: int


@dataclass(frozen=True)
class ApplyThenDrop(Fault):
    """Let the server do it, then close the client's connection without an answer."""


@dataclass(frozen=True)
class DropBefore(Fault):
    """Close the client's connection; the server sees nothing."""


@dataclass(frozen=True)
class DropMidRequest(Fault):
    """Close the client's connection after so many bytes of the request's body; the server sees nothing."""

    nbytes: int


@dataclass(frozen=True)
class CutAnswer(Fault):
    """Send the server's headers and so many bytes of the body, then close the client's connection."""

    nbytes: int


@dataclass(frozen=True)
class FlipAnswer(Fault):
    """Flip one bit of the byte at this offset of the answer's body; a negative one counts from the end.

    An answer that has no body by its nature (HEAD, 204, 304) passes unchanged. If another one has no such
    byte, then ``S3Proxy.errors`` says so and the connection is closed. A chunked body is held in memory if
    the offset is negative.
    """

    at: int


@dataclass(frozen=True)
class FlipRequest(Fault):
    """Like ``FlipAnswer``, of the request's body on its way to the server.

    SeaweedFS stores such a body if only ``x-amz-content-sha256`` tells. It refuses it with 400 BadDigest if
    the client sends ``x-amz-checksum-sha256`` too (obstore: ``checksum_algorithm="sha256"``).
    """

    at: int


@dataclass(frozen=True)
class Trickle(Fault):
    """Pass both bodies on at this rate at most. Buffers of the system hide some of it from a sender."""

    bytes_per_second: int


@dataclass(frozen=True)
class Call(Fault):
    """Forward as usual, and call these functions with the request.

    Args:
        before: Called when the server has not seen anything of the request.
        after: Called when the server has answered and the client has not seen anything of the answer.
    """

    before: Callable[[S3Request], object] | None = None
    after: Callable[[S3Request], object] | None = None


KeyMatch = str | re.Pattern[str] | Callable[[str], bool]
"""A suffix of the key, an expression to search in it, or a function of it."""


@dataclass(frozen=True)
class RequestMatch:
    method: str | None
    key: KeyMatch | None
    query: str | None

    def __call__(self, request: S3Request) -> bool:
        if self.method not in {None, request.method} or not (
            self.query is None or self.query in request.query
        ):
            return False
        if isinstance(self.key, str):
            return request.key.endswith(self.key)
        if isinstance(self.key, re.Pattern):
            return self.key.search(request.key) is not None
        return self.key is None or self.key(request.key)


class Rule:
    """What ``S3Proxy.on`` adds: a fault for those requests that match.

    Attributes:
        count: How often it fired.
        fired: Set when it fires for the first time.
    """

    def __init__(
        self,
        fault: Fault,
        match: Callable[[S3Request], bool],
        *,
        times: int | None,
        after: int,
        share: float | None,
        seed: int,
    ) -> None:
        self.count = 0
        self.fired = threading.Event()
        self._fault, self._match, self._times = fault, match, times
        self._to_skip, self._share, self._random = after, share, random.Random(seed)
        self._lock = threading.Lock()

    def __call__(self, request: S3Request) -> Fault | None:
        if not self._match(request):
            return None
        with self._lock:
            if self._to_skip > 0:
                self._to_skip -= 1
                return None
            if self._count_is_full() or (self._share is not None and self._random.random() >= self._share):
                return None
            self.count += 1
        self.fired.set()
        return self._fault

    def _count_is_full(self) -> bool:
        return self._times is not None and self.count >= self._times


class RequestGate:
    """What ``S3Proxy.hold`` adds: requests that match wait here until ``open``, and pass from then on.

    Attributes:
        reached: Set when the first one waits.
    """

    def __init__(self, match: Callable[[S3Request], bool]) -> None:
        self.reached = threading.Event()
        self._match = match
        self._opened = threading.Event()

    def open(self) -> None:
        """Let them go, also those whose clients have sent all and gone away."""
        self._opened.set()

    def wait(self, request: S3Request) -> None:
        """Called by the proxy for each request; returns at once if the request does not match."""
        if not self._opened.is_set() and self._match(request):
            self.reached.set()
            self._opened.wait()
