"""An HTTP proxy that stands before an S3 server, records what passes, and breaks what a test tells it to."""

import contextlib
import random
import re
import select
import socket
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

from typing_extensions import Self

_PIECE = 1 << 18  # what one read takes at most: the only part of a body that is in memory
_SECONDS_TO_JOIN = 10.0
_WITHOUT_BODY = {204, 304}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_ERROR_CODES = {
    409: "ConditionalRequestConflict",
    412: "PreconditionFailed",
    429: "SlowDown",
    500: "InternalError",
    503: "SlowDown",
}


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
class _Match:
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


class S3Proxy:
    """A proxy for HTTP/1.1 on a free port of this machine, for a with-block.

    It passes all headers on as they came, because AWS signatures cover them, ``Host`` included. It streams
    bodies. It has one thread and one connection to the server for each connection of a client. If the server
    closes its connection or does not listen, the client's connection is closed.

    At the end of the with-block all connections are closed and all threads have ended. Requests that wait at
    a gate or in a fault are not forwarded any more.

    Args:
        upstream: The URL of the server.

    Attributes:
        endpoint: The URL to give to clients.
        rules: Asked in this order, on threads of the proxy, for each request when its headers have come; the
            first fault counts, and no rule behind it is asked.
        errors: The tracebacks of requests that failed for another reason than a closed connection, for
            example because a rule raised. Their connections were closed.
    """

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        assert parts.scheme == "http", upstream
        assert parts.hostname, upstream
        self.address = (parts.hostname, parts.port or 80)
        self.rules: list[Callable[[S3Request], Fault | None]] = []
        self.errors: list[str] = []
        self.closing = threading.Event()
        self._requests: list[S3Request] = []
        self._gates: list[RequestGate] = []
        self._lock = threading.Lock()
        self._wires: set[_Wire] = set()
        self._handlers: set[threading.Thread] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._acceptor = threading.Thread(target=self._accept, name="s3-proxy", daemon=True)
        self._acceptor.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def requests(self) -> list[S3Request]:
        """All requests whose headers have come, in that order, since the start or the last ``clear``.

        The list is the caller's own. The records in it go on changing until their requests have ended. What
        the client has been sent is recorded before it is sent.
        """
        with self._lock:
            return list(self._requests)

    def clear(self) -> None:
        """Forget the requests so far. Rules and gates stay."""
        with self._lock:
            self._requests.clear()

    def on(
        self,
        fault: Fault,
        *,
        method: str | None = None,
        key: KeyMatch | None = None,
        query: str | None = None,
        times: int | None = None,
        after: int = 0,
        share: float | None = None,
        seed: int = 0,
    ) -> Rule:
        """Add a rule: this fault for each request that matches.

        Args:
            fault: What happens.
            method: Only this method.
            key: Only keys with this suffix, in which this expression is found, or for which this is true.
            query: Only requests whose query has this name.
            times: How often at most.
            after: How many matches pass before the first.
            share: Which fraction of the further matches, chosen at random; all by default.
            seed: For the choice.
        """
        rule = Rule(fault, _Match(method, key, query), times=times, after=after, share=share, seed=seed)
        self.rules.append(rule)
        return rule

    def hold(
        self, *, method: str | None = None, key: KeyMatch | None = None, query: str | None = None
    ) -> RequestGate:
        """Add a gate where requests wait that match, as in ``on``, before rules are asked about them."""
        gate = RequestGate(_Match(method, key, query))
        with self._lock:
            self._gates.append(gate)
        return gate

    def close(self) -> None:
        """Close all connections and wait until all threads have ended. A second call does nothing."""
        self.closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends accept, which close alone does not
        self._acceptor.join()
        self._listener.close()
        with self._lock:
            for gate in self._gates:
                gate.open()
            for wire in self._wires:
                wire.shut()
            handlers = self._handlers - {threading.current_thread()}
        for thread in handlers:
            thread.join(_SECONDS_TO_JOIN)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                if self.closing.is_set():
                    return
                self.errors.append(traceback.format_exc())
                self.closing.wait(0.1)  # no file descriptors, perhaps: not a thousand tracebacks
                continue
            thread = threading.Thread(
                target=self._handle, args=(client,), name="s3-proxy-connection", daemon=True
            )
            with self._lock:
                self._handlers.add(thread)
            thread.start()

    def _handle(self, client: socket.socket) -> None:
        connection = _Connection(self, self.wire(client))
        try:
            connection.serve()
        except ConnectionError:
            pass
        except BaseException:  # pytest.fail in a rule is no Exception
            self.errors.append(traceback.format_exc())
        finally:
            connection.close()
            with self._lock:
                self._handlers.discard(threading.current_thread())

    # What follows is for the connections of this module.

    def wire(self, connected: socket.socket) -> "_Wire":
        """Make it known to ``close``."""
        wire = _Wire(connected)
        with self._lock:
            self._wires.add(wire)
            if self.closing.is_set():
                wire.shut()
        return wire

    def unwire(self, wire: "_Wire") -> None:
        """Close it."""
        with self._lock:  # else ``close`` might shut another file of the same number
            self._wires.discard(wire)
            wire.shut()
            wire.socket.close()

    def sleep(self, seconds: float) -> None:
        """Raises a ConnectionError if the proxy closes meanwhile."""
        if self.closing.wait(seconds):
            raise ConnectionAbortedError("the proxy closes")

    def admit(self, request: S3Request) -> Fault | None:
        """Record it, let it wait at the gates, and ask the rules."""
        with self._lock:
            self._requests.append(request)
            gates = list(self._gates)
        for gate in gates:
            _call(gate.wait, request)
        self.sleep(0)
        for rule in list(self.rules):
            fault = _call(rule, request)
            if isinstance(fault, Fault):
                request.fault = type(fault).__name__
                return fault
            if fault is not None:
                raise TypeError(f"{rule!r} returned {fault!r}, which is no Fault")
        return None


class _Connection:
    """A client's connection, and the one to the server that carries its requests."""

    def __init__(self, proxy: S3Proxy, client: "_Wire") -> None:
        self._proxy = proxy
        self._client = client
        self._server: _Wire | None = None
        self._is_server_spent = False

    def serve(self) -> None:
        """Until the client or a fault closes the connection."""
        while (head := self._client.head()) is not None and self._exchange(head):
            pass

    def close(self) -> None:
        self._leave_server()
        self._proxy.unwire(self._client)

    def _exchange(self, head: "_Head") -> bool:
        """One request and its answer; False if the client's connection is to be closed."""
        request = _request(head)
        fault = self._proxy.admit(request)
        body = _Body(self._client, head)
        if isinstance(fault, (DropBefore, DropMidRequest, Stall, Answer)):
            return self._answer_alone(request, head, body, fault)
        if isinstance(fault, Delay):
            self._proxy.sleep(fault.seconds)
        if isinstance(fault, Call) and fault.before:
            _call(fault.before, request)
        answer, is_client_usable = self._forward(request, head, body, fault)
        request.server_status = answer.status
        found = self._answer_body(request, answer)
        if isinstance(fault, (ApplyThenAnswer, ApplyThenDrop)):
            _exhaust(found.pieces() if found else iter(()))
            self._after_answer(answer, found)
            if isinstance(fault, ApplyThenAnswer):
                self._send_answer(request, Answer(fault.status))
            return is_client_usable and head.is_kept and isinstance(fault, ApplyThenAnswer)
        if isinstance(fault, Call) and fault.after:
            _call(fault.after, request)
        is_whole = self._pass_on(request, answer, found, fault)
        return self._after_answer(answer, found) and is_whole and is_client_usable and head.is_kept

    def _answer_alone(self, request: S3Request, head: "_Head", body: "_Body", fault: Fault) -> bool:
        """For faults that forward nothing."""
        if isinstance(fault, DropBefore):
            return False
        if head.expects_continue:
            self._client.send(_CONTINUE)
        limit = fault.nbytes if isinstance(fault, DropMidRequest) else None
        _exhaust(self._count_up(request, _first(body.pieces(), limit)))
        if isinstance(fault, Stall):
            _exhaust(iter(self._client.some, b""))
        if not isinstance(fault, Answer):
            return False
        self._send_answer(request, fault)
        return head.is_kept

    def _send_answer(self, request: S3Request, answer: Answer) -> None:
        body = answer.body or _error_body(answer.status, request)
        lines = [f"HTTP/1.1 {answer.status} Injected"]
        headers = {"Content-Type": "application/xml", **answer.headers}
        if answer.status not in _WITHOUT_BODY:
            headers["Content-Length"] = str(len(body))
        if request.method == "HEAD" or answer.status in _WITHOUT_BODY:
            body = b""
        lines += [f"{name}: {value}" for name, value in headers.items()]
        request.status, request.nbytes_down = answer.status, len(body)
        self._client.send("\r\n".join([*lines, "", ""]).encode("latin-1") + body)

    def _forward(
        self, request: S3Request, head: "_Head", body: "_Body", fault: Fault | None
    ) -> tuple["_Head", bool]:
        """Send the request. Returns the answer's headers, and whether the client's whole body was read."""
        server = self._connect()
        server.send(head.raw)
        if head.expects_continue and (answer := self._invite(server)):
            self._is_server_spent = True
            return answer, False
        pieces = self._count_up(request, body.pieces())
        if isinstance(fault, FlipRequest):
            pieces = _flip(pieces, fault.at, body.length)
        pieces = self._at_rate(pieces, fault)
        for piece in pieces:
            if (early := self._send_piece(server, body.frame(piece))) is not None:
                # It has answered without the rest, and may read it or not: its connection is of no more use.
                _exhaust(pieces)
                self._is_server_spent = True
                return early, True
        with contextlib.suppress(ConnectionError):  # it may have answered already
            server.send(body.end())
        return _final_head(server), True

    def _invite(self, server: "_Wire") -> "_Head | None":
        """Wait until the server asks for the body or the client sends it; an answer if it wants no body."""
        while _wait_readable(server, self._client) is server:
            head = server.next_head()
            if head.status >= 200:
                return head
            if head.status == 100:
                self._client.send(head.raw)
                return None
        return None

    @staticmethod
    def _send_piece(server: "_Wire", framed: bytes) -> "_Head | None":
        """Send a piece of the body; the answer if there is one already."""
        while server.is_readable():
            head = server.next_head()
            if head.status >= 200:
                return head
        try:
            server.send(framed)
        except ConnectionError:
            return _final_head(server)  # it may have said why
        return None

    def _answer_body(self, request: S3Request, answer: "_Head") -> "_Body | None":
        """None if such an answer has none, whatever its headers say."""
        if request.method == "HEAD" or answer.status in _WITHOUT_BODY:
            return None
        assert self._server is not None
        return _Body(self._server, answer, is_answer=True)

    def _pass_on(
        self, request: S3Request, answer: "_Head", body: "_Body | None", fault: Fault | None
    ) -> bool:
        """Send the server's answer; False if it was cut."""
        if body is not None and isinstance(fault, FlipAnswer):
            pieces = _flip(body.pieces(), fault.at, body.length)
        else:
            pieces = body.pieces() if body is not None else iter(())
        pieces = self._at_rate(pieces, fault)
        if isinstance(fault, CutAnswer):
            pieces = _first(pieces, fault.nbytes)
        request.status = answer.status
        self._client.send(answer.raw)
        if body is None:
            return not isinstance(fault, CutAnswer)
        for piece in pieces:
            request.nbytes_down += len(piece)
            self._client.send(body.frame(piece))
        if isinstance(fault, CutAnswer):
            return False
        self._client.send(body.end())
        return True

    def _after_answer(self, answer: "_Head", body: "_Body | None") -> bool:
        """Whether the server keeps the connection open, which the client has been told as well."""
        is_kept = answer.is_kept and (body is None or not body.ends_with_connection)
        if self._is_server_spent or not is_kept:
            self._leave_server()
        return is_kept

    def _connect(self) -> "_Wire":
        if self._server is not None and self._server.is_readable():
            self._leave_server()  # it has closed the idle connection, or was started again
        if self._server is None:
            self._server = self._proxy.wire(socket.create_connection(self._proxy.address))
            self._is_server_spent = False
        return self._server

    def _leave_server(self) -> None:
        if self._server is not None:
            self._proxy.unwire(self._server)
            self._server = None

    @staticmethod
    def _count_up(request: S3Request, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            request.nbytes_up += len(piece)
            yield piece

    def _at_rate(self, pieces: Iterator[bytes], fault: Fault | None) -> Iterator[bytes]:
        if not isinstance(fault, Trickle):
            yield from pieces
            return
        step = max(1, fault.bytes_per_second // 20)
        for piece in pieces:
            for start in range(0, len(piece), step):
                part = piece[start : start + step]
                self._proxy.sleep(len(part) / fault.bytes_per_second)
                yield part


@dataclass(frozen=True)
class _Head:
    """The first line and the headers of a request or an answer, as they came and as they are understood."""

    raw: bytes
    words: list[str]
    headers: dict[str, str]

    @property
    def status(self) -> int:
        return int(self.words[1])

    @property
    def is_kept(self) -> bool:
        """Whether the connection stays open after the message, if the other side agrees."""
        option = self.headers.get("connection", "").lower()
        return "keep-alive" in option if "HTTP/1.0" in self.words else "close" not in option

    @property
    def expects_continue(self) -> bool:
        return self.headers.get("expect", "").lower() == "100-continue"


class _Wire:
    """A connection, and what was read of it and not used yet."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connected
        self._unread = bytearray()

    def shut(self) -> None:
        """End the connection for both sides; a thread that reads or writes here is told so."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def some(self, most: int = _PIECE) -> bytes:
        """At least one byte; b"" if the connection has ended."""
        if not self._unread:
            return self.socket.recv(min(most, _PIECE))
        data = bytes(self._unread[:most])
        del self._unread[:most]
        return data

    def line(self) -> bytes:
        """The next line with its end; what there is if the connection ends before."""
        while (end := self._unread.find(b"\n") + 1) == 0:
            more = self.socket.recv(_PIECE)
            if not more:
                end = len(self._unread)
                break
            self._unread += more
        data = bytes(self._unread[:end])
        del self._unread[:end]
        return data

    def head(self) -> _Head | None:
        """None if the connection ends before it begins."""
        lines = [self.line()]
        if not lines[0]:
            return None
        headers: dict[str, str] = {}
        while (line := self.line()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            name = name.lower()
            headers[name] = f"{headers[name]}, {value.strip()}" if name in headers else value.strip()
            lines.append(line)
        if not line:
            raise ConnectionResetError("the connection ended within the headers")
        return _Head(b"".join([*lines, line]), lines[0].decode("latin-1").split(), headers)

    def next_head(self) -> _Head:
        """Raises a ConnectionError if there is none."""
        if (head := self.head()) is None:
            raise ConnectionResetError("the connection ended before the headers")
        return head

    def is_readable(self) -> bool:
        """Whether there is something to read, the end included."""
        return bool(self._unread) or bool(_poll(0, self))


class _Body:
    """The body behind a head.

    Attributes:
        length: In bytes; None if only its end shows it.
        ends_with_connection: Whether the end of the connection is that of the body.
    """

    def __init__(self, wire: _Wire, head: _Head, *, is_answer: bool = False) -> None:
        self._wire = wire
        self._is_chunked = "chunked" in head.headers.get("transfer-encoding", "").lower()
        length = head.headers.get("content-length")
        self.ends_with_connection = is_answer and not self._is_chunked and length is None
        is_open = self._is_chunked or self.ends_with_connection
        self.length = None if is_open else int(length or 0)
        self._trailers = b""

    def pieces(self) -> Iterator[bytes]:
        """The body without the marks of its chunks; raises a ConnectionError if it is not whole."""
        if self.ends_with_connection:
            yield from iter(self._wire.some, b"")
        elif self.length is not None:
            yield from self._exactly(self.length)
        else:
            while nbytes := self._chunk_length():
                yield from self._exactly(nbytes)
                self._wire.line()
            while (line := self._wire.line()).strip():
                self._trailers += line
            if not line:
                raise ConnectionResetError("the connection ended within the trailers")

    def frame(self, piece: bytes) -> bytes:
        """A piece as it is sent on."""
        return b"%x\r\n%b\r\n" % (len(piece), piece) if self._is_chunked else piece

    def end(self) -> bytes:
        """What is sent on after the last piece."""
        return b"0\r\n%b\r\n" % self._trailers if self._is_chunked else b""

    def _exactly(self, nbytes: int) -> Iterator[bytes]:
        while nbytes:
            piece = self._wire.some(nbytes)
            if not piece:
                raise ConnectionResetError(f"the connection ended {nbytes} bytes too early")
            nbytes -= len(piece)
            yield piece

    def _chunk_length(self) -> int:
        line = self._wire.line()
        if not line:
            raise ConnectionResetError("the connection ended between chunks")
        return int(line.partition(b";")[0], 16)


def _poll(milliseconds: int | None, *wires: _Wire) -> list[int]:
    poll = select.poll()
    for wire in wires:
        poll.register(wire.socket, select.POLLIN)
    return [number for number, _ in poll.poll(milliseconds)]


def _wait_readable(first: _Wire, second: _Wire) -> _Wire:
    """The one of both from which something can be read; the first if from both."""
    for wire in (first, second):
        if wire.is_readable():
            return wire
    return first if first.socket.fileno() in _poll(None, first, second) else second


def _request(head: _Head) -> S3Request:
    method, target = head.words[:2]
    path, _, query = target.partition("?")
    path = unquote(path)
    key = path.removeprefix("/").partition("/")[2]
    return S3Request(method, path, dict(parse_qsl(query, keep_blank_values=True)), key, head.headers)


def _final_head(server: _Wire) -> _Head:
    while (head := server.next_head()).status < 200:
        pass  # the client was told to send its body, or did not ask
    return head


def _error_body(status: int, request: S3Request) -> bytes:
    if status not in _ERROR_CODES:
        return b""
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{_ERROR_CODES[status]}</Code>'
        f"<Message>injected by a test</Message><RequestId>{id(request):X}</RequestId></Error>"
    ).encode()


def _call(function: Callable[[S3Request], object], request: S3Request) -> object:
    """Call what a test gave us. A closed connection of its own must not pass for one of the proxy."""
    try:
        return function(request)
    except BaseException as error:
        raise RuntimeError(f"{function!r} failed for {request.method} {request.path}") from error


def _exhaust(pieces: Iterator[bytes]) -> None:
    for _ in pieces:
        pass


def _first(pieces: Iterator[bytes], nbytes: int | None) -> Iterator[bytes]:
    """So many bytes of them at most; it asks for no more than it needs."""
    if nbytes is None:
        yield from pieces
        return
    while nbytes > 0 and (piece := next(pieces, None)) is not None:
        yield piece[:nbytes]
        nbytes -= len(piece)


def _flip(pieces: Iterator[bytes], at: int, length: int | None) -> Iterator[bytes]:
    if at < 0 and length is None:
        whole = b"".join(pieces)
        pieces, length = iter([whole] if whole else []), len(whole)
    wanted = at + length if at < 0 and length is not None else at
    if wanted < 0 or (length is not None and wanted >= length):
        raise IndexError(f"there is no byte {at} to flip in a body of {length}")
    start = 0
    for piece in pieces:
        if start <= wanted < start + len(piece):
            flipped = bytearray(piece)
            flipped[wanted - start] ^= 1
            yield bytes(flipped)
        else:
            yield piece
        start += len(piece)
    if wanted >= start:
        raise IndexError(f"there is no byte {at} to flip in a body of {start}")
