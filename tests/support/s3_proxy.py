"""An HTTP proxy that stands before an S3 server, records what passes, and breaks what a test tells it to."""

import contextlib
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.support.http_wire import Body, Head, Wire, wait_readable
from tests.support.s3_faults import (
    Answer,
    ApplyThenAnswer,
    ApplyThenDrop,
    Call,
    CutAnswer,
    Delay,
    DropBefore,
    DropMidRequest,
    Fault,
    FlipAnswer,
    FlipRequest,
    KeyMatch,
    RequestGate,
    RequestMatch,
    Rule,
    S3Request,
    Stall,
    Trickle,
)
from typing_extensions import Self

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
        self._wires: set[Wire] = set()
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
        rule = Rule(fault, RequestMatch(method, key, query), times=times, after=after, share=share, seed=seed)
        self.rules.append(rule)
        return rule

    def hold(
        self, *, method: str | None = None, key: KeyMatch | None = None, query: str | None = None
    ) -> RequestGate:
        """Add a gate where requests wait that match, as in ``on``, before rules are asked about them."""
        gate = RequestGate(RequestMatch(method, key, query))
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

    def wire(self, connected: socket.socket) -> "Wire":
        """Make it known to ``close``."""
        wire = Wire(connected)
        with self._lock:
            self._wires.add(wire)
            if self.closing.is_set():
                wire.shut()
        return wire

    def unwire(self, wire: "Wire") -> None:
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

    def __init__(self, proxy: S3Proxy, client: "Wire") -> None:
        self._proxy = proxy
        self._client = client
        self._server: Wire | None = None
        self._is_server_spent = False

    def serve(self) -> None:
        """Until the client or a fault closes the connection."""
        while (head := self._client.head()) is not None and self._exchange(head):
            pass

    def close(self) -> None:
        self._leave_server()
        self._proxy.unwire(self._client)

    def _exchange(self, head: "Head") -> bool:
        """One request and its answer; False if the client's connection is to be closed."""
        request = _request(head)
        fault = self._proxy.admit(request)
        body = Body(self._client, head)
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

    def _answer_alone(self, request: S3Request, head: "Head", body: "Body", fault: Fault) -> bool:
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
        self, request: S3Request, head: "Head", body: "Body", fault: Fault | None
    ) -> tuple["Head", bool]:
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

    def _invite(self, server: "Wire") -> "Head | None":
        """Wait until the server asks for the body or the client sends it; an answer if it wants no body."""
        while wait_readable(server, self._client) is server:
            head = server.next_head()
            if head.status >= 200:
                return head
            if head.status == 100:
                self._client.send(head.raw)
                return None
        return None

    @staticmethod
    def _send_piece(server: "Wire", framed: bytes) -> "Head | None":
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

    def _answer_body(self, request: S3Request, answer: "Head") -> "Body | None":
        """None if such an answer has none, whatever its headers say."""
        if request.method == "HEAD" or answer.status in _WITHOUT_BODY:
            return None
        assert self._server is not None
        return Body(self._server, answer, is_answer=True)

    def _pass_on(self, request: S3Request, answer: "Head", body: "Body | None", fault: Fault | None) -> bool:
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

    def _after_answer(self, answer: "Head", body: "Body | None") -> bool:
        """Whether the server keeps the connection open, which the client has been told as well."""
        is_kept = answer.is_kept and (body is None or not body.ends_with_connection)
        if self._is_server_spent or not is_kept:
            self._leave_server()
        return is_kept

    def _connect(self) -> "Wire":
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


def _request(head: Head) -> S3Request:
    method, target = head.words[:2]
    path, _, query = target.partition("?")
    path = unquote(path)
    key = path.removeprefix("/").partition("/")[2]
    return S3Request(method, path, dict(parse_qsl(query, keep_blank_values=True)), key, head.headers)


def _final_head(server: Wire) -> Head:
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
