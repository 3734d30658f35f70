"""The proxy that tests of object stores put before their server: what it passes on, records and breaks."""

import contextlib
import http.client
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
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
    S3Request,
    Stall,
    Trickle,
)
from tests.support.s3_proxy import S3Proxy

WAIT = 20.0  # a deadline for tests that hang; nothing waits for it when things work
DATA = bytes(range(256)) * 8
LARGE = DATA * 2048  # 4 MiB: more than the buffers between client and server hold at once


class _Server(ThreadingHTTPServer):
    """Keeps objects. The query of a GET says how the body comes; ``refuse`` lets a PUT be answered early."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.heads: list[list[tuple[str, str]]] = []
        self.clients: set[tuple[str, int]] = set()
        self.stored = threading.Event()
        self.has_closed_one = threading.Event()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self.has_closed_one.set()

    def handle_error(self, *_: object) -> None:
        """Clients that go away are what these tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # it costs 40 ms for each answer
    server: _Server

    def handle_expect_100(self) -> bool:
        if "refuse" in self.path:
            self._refuse()
            return False
        return super().handle_expect_100()

    def do_PUT(self) -> None:
        self._note()
        if "refuse" in self.path:
            self._refuse()
            return
        data = self._chunks() if "Transfer-Encoding" in self.headers else self._body()
        if data is not None:
            self.server.objects[self.path] = data
            self.server.stored.set()
            self._answer(200, b"stored")

    def do_GET(self) -> None:
        self._note()
        path, _, query = self.path.partition("?")
        data = self.server.objects.get(path)
        if query == "unmodified":
            self.send_response(304)
            self.send_header("Content-Length", "7")  # allowed, and no body follows
            self.end_headers()
        elif data is None:
            self._answer(404, b"missing")
        elif query == "chunked":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            half = len(data) // 2
            for part in (data[:half], data[half:]):
                self.wfile.write(b"%X;why=not\r\n%b\r\n" % (len(part), part))
            self.wfile.write(b"0\r\nX-Sum: 1\r\n\r\n")
        elif query == "until-end":
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(data)
        else:
            self.close_connection = query == "leave"  # and it does not say so
            self._answer(200, data)

    do_HEAD = do_GET

    def do_DELETE(self) -> None:
        self._note()
        self.server.objects.pop(self.path, None)
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """The names of the tests say enough."""

    def _note(self) -> None:
        self.server.heads.append(self.headers.items())
        self.server.clients.add(self.client_address)

    def _answer(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", '"one"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _refuse(self) -> None:
        self.close_connection = True
        self.send_response(403)
        self.send_header("Content-Length", "2")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(b"no")

    def _body(self) -> bytes | None:
        length = int(self.headers.get("Content-Length", 0))
        data = self.rfile.read(length)
        return data if len(data) == length else None

    def _chunks(self) -> bytes:
        parts = []
        while nbytes := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(nbytes))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)


class _Reply(NamedTuple):
    status: int
    body: bytes
    headers: Mapping[str, str]


class _Client:
    """One connection to the proxy."""

    def __init__(self, proxy: S3Proxy) -> None:
        address = urlsplit(proxy.endpoint)
        self._connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=WAIT)

    def ask(
        self, method: str, path: str, body: bytes | Iterator[bytes] | None = None, **headers: str
    ) -> _Reply:
        self._connection.request(method, path, body, headers, encode_chunked=not isinstance(body, bytes))
        answer = self._connection.getresponse()
        return _Reply(answer.status, answer.read(), dict(answer.getheaders()))

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server() as made:
        made.objects["/b/data"] = DATA
        made.objects["/b/large"] = LARGE
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def proxy(server: _Server) -> Iterator[S3Proxy]:
    with S3Proxy(server.endpoint) as made:
        yield made
    assert made.errors == []
    assert [thread for thread in threading.enumerate() if thread.name.startswith("s3-proxy")] == []


@pytest.fixture
def client(proxy: S3Proxy) -> Iterator[_Client]:
    made = _Client(proxy)
    yield made
    made.close()


@contextlib.contextmanager
def _raw(proxy: S3Proxy) -> Iterator[socket.socket]:
    """A connection on which a test says every byte itself."""
    address = urlsplit(proxy.endpoint)
    with socket.create_connection((str(address.hostname), address.port or 0), timeout=WAIT) as made:
        yield made


def _until(connection: socket.socket, end: bytes) -> bytes:
    found = b""
    while not found.endswith(end) and (more := connection.recv(65536)):
        found += more
    return found


def _wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)  # the other side offers no signal


def _rest_after_drop(client: _Client, method: str, path: str, body: bytes | None = None) -> bytes:
    """What came of the answer's body before the connection was closed; fails if it was not."""
    try:
        client.ask(method, path, body)
    except http.client.IncompleteRead as error:
        return error.partial
    except (ConnectionError, http.client.RemoteDisconnected):
        return b""
    raise AssertionError("the connection was not closed")


# Passing on


@pytest.mark.parametrize("name", ["data", "large"])
def test_objects_pass_unchanged_in_both_directions(client: _Client, server: _Server, name: str) -> None:
    data = server.objects[f"/b/{name}"]
    assert client.ask("PUT", "/b/copy", data)[:2] == (200, b"stored")
    assert server.objects["/b/copy"] == data
    assert client.ask("GET", "/b/copy")[:2] == (200, data)


def test_headers_reach_the_server_in_the_order_and_case_they_were_sent(
    client: _Client, server: _Server
) -> None:
    headers = {"Host": "somewhere.example:99", "X-Amz-Date": "now", "x-AMZ-odd": "  a  b"}
    client.ask("GET", "/b/data", None, **headers)
    assert server.heads[0][-3:] == [
        ("Host", "somewhere.example:99"),
        ("X-Amz-Date", "now"),
        ("x-AMZ-odd", "a  b"),
    ]


def test_headers_reach_the_client(client: _Client) -> None:
    assert client.ask("GET", "/b/data").headers["ETag"] == '"one"'


def test_a_chunked_request_passes(client: _Client, server: _Server, proxy: S3Proxy) -> None:
    assert client.ask("PUT", "/b/new", iter([b"one", b"two" * 50000])).status == 200
    assert server.objects["/b/new"] == b"one" + b"two" * 50000
    assert proxy.requests[0].nbytes_up == 150003


def test_a_chunked_answer_passes_with_its_trailers(client: _Client, proxy: S3Proxy) -> None:
    assert client.ask("GET", "/b/data?chunked")[:2] == (200, DATA)
    assert client.ask("GET", "/b/data?chunked")[:2] == (200, DATA)
    with _raw(proxy) as connection:
        connection.sendall(b"GET /b/data?chunked HTTP/1.1\r\nHost: x\r\n\r\n")
        assert _until(connection, b"X-Sum: 1\r\n\r\n").endswith(b"\r\n0\r\nX-Sum: 1\r\n\r\n")


def test_an_answer_that_ends_with_the_connection_passes(client: _Client) -> None:
    assert client.ask("GET", "/b/large?until-end")[:2] == (200, LARGE)
    assert client.ask("GET", "/b/data")[:2] == (200, DATA)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("HEAD", "/b/data", 200), ("DELETE", "/b/none", 204), ("GET", "/b/data?unmodified", 304)],
)
def test_the_connection_is_used_on_after_answers_without_body(
    client: _Client, server: _Server, method: str, path: str, status: int
) -> None:
    assert client.ask(method, path)[:2] == (status, b"")
    assert client.ask("GET", "/b/data")[:2] == (200, DATA)
    assert len(server.clients) == 1


def test_many_requests_share_a_connection_on_both_sides(client: _Client, server: _Server) -> None:
    for number in range(20):
        assert client.ask("PUT", f"/b/{number}", b"%d" % number).status == 200
    assert len(server.clients) == 1


def test_a_new_connection_replaces_one_that_the_server_has_closed(client: _Client, server: _Server) -> None:
    assert client.ask("GET", "/b/data?leave").status == 200
    assert server.has_closed_one.wait(WAIT)
    assert client.ask("GET", "/b/data").status == 200
    assert len(server.clients) == 2


def test_connections_are_served_at_the_same_time(proxy: S3Proxy) -> None:
    meet = threading.Barrier(3, timeout=WAIT)
    proxy.on(Call(before=lambda _: meet.wait()))
    clients = [_Client(proxy) for _ in range(3)]
    threads = [threading.Thread(target=one.ask, args=("GET", "/b/data")) for one in clients]
    for thread in threads:
        thread.start()
    for thread, one in zip(threads, clients, strict=True):
        thread.join(WAIT)
        one.close()
    assert [request.status for request in proxy.requests] == [200, 200, 200]


def test_a_body_is_sent_when_the_server_asks_for_it(proxy: S3Proxy, server: _Server) -> None:
    with _raw(proxy) as connection:
        for _ in range(2):
            connection.sendall(b"PUT /b/new HTTP/1.1\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
            assert _until(connection, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            connection.sendall(b"abc")
            assert _until(connection, b"stored").startswith(b"HTTP/1.1 200 ")
    assert server.objects["/b/new"] == b"abc"


def test_a_body_passes_that_did_not_wait_for_the_server_to_ask(proxy: S3Proxy, server: _Server) -> None:
    with _raw(proxy) as connection:
        connection.sendall(b"PUT /b/new HTTP/1.1\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\na")
        _wait_for(lambda: server.heads)  # it asks now
        connection.sendall(b"bc")
        assert b"HTTP/1.1 200 " in _until(connection, b"stored")
    assert server.objects["/b/new"] == b"abc"


def test_a_server_may_refuse_instead_of_asking_for_the_body(proxy: S3Proxy) -> None:
    with _raw(proxy) as connection:
        connection.sendall(b"PUT /b/n?refuse HTTP/1.1\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        assert _until(connection, b"never").startswith(b"HTTP/1.1 403 ")
    assert (proxy.requests[0].status, proxy.requests[0].nbytes_up) == (403, 0)


def test_the_client_gets_an_answer_that_the_server_gave_before_it_had_the_body(
    client: _Client, proxy: S3Proxy
) -> None:
    assert client.ask("PUT", "/b/new?refuse", LARGE)[:2] == (403, b"no")
    assert proxy.requests[0].nbytes_up == len(LARGE)


def test_the_server_sees_no_whole_request_if_the_client_ends_within_it(
    proxy: S3Proxy, server: _Server
) -> None:
    with _raw(proxy) as connection:
        connection.sendall(b"PUT /b/new HTTP/1.1\r\nContent-Length: 3\r\n\r\nab")
        _wait_for(lambda: server.heads)
    _wait_for(lambda: not proxy._handlers)
    assert "/b/new" not in server.objects
    assert proxy.requests[0].status is None


def test_the_client_is_dropped_if_no_server_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with S3Proxy(f"http://127.0.0.1:{port}") as proxy:
        client = _Client(proxy)
        assert _rest_after_drop(client, "GET", "/b/data") == b""
        client.close()
    assert (proxy.requests[0].status, proxy.errors) == (None, [])


# Recording


def test_a_record_says_what_was_asked_and_answered(client: _Client, proxy: S3Proxy) -> None:
    client.ask("PUT", "/b/a%20folder/%C3%A4?partNumber=2&uploadId=a%2Fb&flag", b"12345", **{"If-Match": "x"})
    (request,) = proxy.requests
    assert (request.method, request.path, request.key) == ("PUT", "/b/a folder/ä", "a folder/ä")
    assert request.query == {"partNumber": "2", "uploadId": "a/b", "flag": ""}
    assert request.headers["if-match"] == "x"
    assert (request.nbytes_up, request.nbytes_down) == (5, len(b"stored"))
    assert (request.status, request.server_status, request.fault) == (200, 200, None)


@pytest.mark.parametrize("path", ["/b", "/b/", "/b?list-type=2"])
def test_a_request_to_the_bucket_has_an_empty_key(client: _Client, proxy: S3Proxy, path: str) -> None:
    client.ask("GET", path)
    assert proxy.requests[0].key == ""


def test_clear_forgets_the_requests_so_far(client: _Client, proxy: S3Proxy) -> None:
    client.ask("GET", "/b/data")
    proxy.clear()
    client.ask("HEAD", "/b/data")
    assert [request.method for request in proxy.requests] == ["HEAD"]


# Rules


def _is_hit(client: _Client, method: str = "GET", path: str = "/b/data") -> bool:
    return client.ask(method, path).status == 418


@pytest.mark.parametrize(
    "key", ["data", re.compile("^da"), lambda key: key == "data"], ids=["suffix", "expression", "function"]
)
def test_a_rule_chooses_by_key(
    client: _Client, proxy: S3Proxy, key: str | re.Pattern[str] | Callable[[str], bool]
) -> None:
    proxy.on(Answer(418), key=key)
    assert [_is_hit(client, path=path) for path in ("/b/data", "/b/large", "/data/x")] == [True, False, False]


def test_a_rule_chooses_by_method_and_query(client: _Client, proxy: S3Proxy) -> None:
    proxy.on(Answer(418), method="PUT", query="partNumber")
    assert not _is_hit(client, "PUT", "/b/x")
    assert not _is_hit(client, "GET", "/b/x?partNumber=1")
    assert _is_hit(client, "PUT", "/b/x?partNumber=1")


def test_a_rule_fires_a_number_of_times_after_a_number_of_matches(client: _Client, proxy: S3Proxy) -> None:
    rule = proxy.on(Answer(418), method="GET", after=2, times=2)
    assert (rule.count, rule.fired.is_set()) == (0, False)
    assert [_is_hit(client, method) for method in ("GET", "DELETE", "GET")] == [False] * 3
    assert [_is_hit(client, path="/b/large") for _ in range(3)] == [True, True, False]
    assert (rule.count, rule.fired.is_set()) == (2, True)


def test_a_rule_fires_for_the_same_share_each_time(proxy: S3Proxy) -> None:
    def choices(seed: int) -> list[bool]:
        rule = proxy.on(Answer(418), share=0.3, seed=seed)
        return [rule(S3Request("GET", "/b/k", {}, "k", {})) is not None for _ in range(1000)]

    assert choices(7) == choices(7) != choices(8)
    assert 200 < sum(choices(7)) < 400


def test_the_first_fault_counts_and_later_rules_are_not_asked(client: _Client, proxy: S3Proxy) -> None:
    proxy.rules.append(lambda request: Answer(418) if request.key == "data" else None)
    second = proxy.on(Answer(419))
    assert client.ask("GET", "/b/data").status == 418
    assert second.count == 0
    assert client.ask("GET", "/b/large").status == 419


def _fail(_: S3Request) -> Fault:
    raise ConnectionResetError("a rival's connection, not the client's")


@pytest.mark.parametrize(
    "rule",
    [
        _fail,
        lambda _: Call(before=_fail),
        lambda _: Call(after=_fail),
        lambda _: Stall,
        lambda _: FlipAnswer(9**9),
    ],
    ids=["rule", "before", "after", "no-fault", "no-such-byte"],
)
def test_what_fails_for_another_reason_than_a_closed_connection_is_told(
    server: _Server, rule: Callable[[S3Request], Fault | None]
) -> None:
    with S3Proxy(server.endpoint) as proxy:
        proxy.rules.append(rule)
        client = _Client(proxy)
        _rest_after_drop(client, "GET", "/b/data")
        client.close()
    (error,) = proxy.errors
    assert "Traceback" in error


# Faults


def test_delay_forwards_later(client: _Client, proxy: S3Proxy) -> None:
    proxy.on(Delay(0.05))
    start = time.monotonic()
    assert client.ask("GET", "/b/data")[:2] == (200, DATA)
    assert time.monotonic() - start >= 0.05
    assert proxy.requests[0].fault == "Delay"


def test_stall_reads_the_request_and_answers_nothing_until_the_client_goes(
    proxy: S3Proxy, server: _Server
) -> None:
    proxy.on(Stall())
    with _raw(proxy) as connection:
        connection.sendall(b"PUT /b/new HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc")
        _wait_for(lambda: proxy.requests and proxy.requests[0].nbytes_up == 3)
        connection.settimeout(0.02)
        with pytest.raises(TimeoutError):
            connection.recv(1)
    _wait_for(lambda: not proxy._handlers)
    assert (proxy.requests[0].status, server.heads) == (None, [])


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (409, b"ConditionalRequestConflict"),
        (412, b"PreconditionFailed"),
        (429, b"SlowDown"),
        (500, b"InternalError"),
        (503, b"SlowDown"),
    ],
)
def test_answer_has_the_error_that_s3_gives(
    client: _Client, proxy: S3Proxy, server: _Server, status: int, code: bytes
) -> None:
    proxy.on(Answer(status))
    for _ in range(2):  # on the same connection
        found = client.ask("PUT", "/b/new", LARGE)
        assert found.status == status
        assert b"<Error><Code>%b</Code>" % code in found.body
    assert server.heads == []
    assert (proxy.requests[0].status, proxy.requests[0].nbytes_up) == (status, len(LARGE))


def test_answer_has_the_body_and_headers_that_the_test_says(client: _Client, proxy: S3Proxy) -> None:
    proxy.on(Answer(503, b"busy", {"Retry-After": "7"}))
    found = client.ask("GET", "/b/data")
    assert (found.status, found.body, found.headers["Retry-After"]) == (503, b"busy", "7")
    assert client.ask("HEAD", "/b/data")[:2] == (503, b"")
    assert proxy.requests[1].nbytes_down == 0
    assert client.ask("GET", "/b/data").body == b"busy"


def test_answer_asks_for_a_body_that_waits_to_be_asked_for(proxy: S3Proxy) -> None:
    proxy.on(Answer(503, b"busy"))
    with _raw(proxy) as connection:
        connection.sendall(b"PUT /b/new HTTP/1.1\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        assert _until(connection, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"abc")
        assert _until(connection, b"busy").startswith(b"HTTP/1.1 503 ")


def test_apply_then_answer_lets_the_server_do_it(client: _Client, proxy: S3Proxy, server: _Server) -> None:
    proxy.on(ApplyThenAnswer(500), times=1)
    found = client.ask("PUT", "/b/new", b"abc")
    assert found.status == 500
    assert b"InternalError" in found.body
    assert server.objects["/b/new"] == b"abc"
    assert (proxy.requests[0].status, proxy.requests[0].server_status) == (500, 200)
    assert client.ask("GET", "/b/new")[:2] == (200, b"abc")
    assert len(server.clients) == 1


def test_apply_then_drop_lets_the_server_do_it(client: _Client, proxy: S3Proxy, server: _Server) -> None:
    proxy.on(ApplyThenDrop(), times=1)
    assert _rest_after_drop(client, "PUT", "/b/new", LARGE) == b""
    assert server.objects["/b/new"] == LARGE
    assert (proxy.requests[0].status, proxy.requests[0].server_status) == (None, 200)


def test_drop_before_forwards_nothing(client: _Client, proxy: S3Proxy, server: _Server) -> None:
    proxy.on(DropBefore())
    assert _rest_after_drop(client, "PUT", "/b/new", b"abc") == b""
    assert server.heads == []
    assert (proxy.requests[0].status, proxy.requests[0].fault) == (None, "DropBefore")


@pytest.mark.parametrize(("nbytes", "read"), [(0, 0), (100_000, 100_000), (9**9, len(LARGE))])
def test_drop_mid_request_reads_so_much_and_forwards_nothing(
    client: _Client, proxy: S3Proxy, server: _Server, nbytes: int, read: int
) -> None:
    proxy.on(DropMidRequest(nbytes))
    assert _rest_after_drop(client, "PUT", "/b/new", LARGE) == b""
    assert server.heads == []
    assert (proxy.requests[0].status, proxy.requests[0].nbytes_up) == (None, read)


@pytest.mark.parametrize("path", ["/b/large", "/b/large?chunked"])
@pytest.mark.parametrize("nbytes", [0, 1, 300_000, len(LARGE) - 1])
def test_cut_answer_sends_so_much_and_closes(proxy: S3Proxy, path: str, nbytes: int) -> None:
    proxy.on(CutAnswer(nbytes))
    with _raw(proxy) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        head, _, found = _until(connection, b"never").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert (_complete_chunks(found) if "chunked" in path else found) == LARGE[:nbytes]
    assert (proxy.requests[0].status, proxy.requests[0].nbytes_down) == (200, nbytes)


def _complete_chunks(data: bytes) -> bytes:
    """The chunks of a body, which must not have its end."""
    found = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        nbytes = int(size, 16)
        assert nbytes, "the body has its end"
        found += data[:nbytes]
        data = data[nbytes + 2 :]
    return found


def _bits_that_differ(one: bytes, other: bytes) -> list[tuple[int, int]]:
    assert len(one) == len(other)
    return [(at, a ^ b) for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]


@pytest.mark.parametrize("path", ["/b/data", "/b/data?chunked", "/b/data?until-end"])
@pytest.mark.parametrize(("at", "changed"), [(0, 0), (1500, 1500), (-1, 2047), (-2048, 0)])
def test_flip_answer_changes_one_bit(
    client: _Client, proxy: S3Proxy, path: str, at: int, changed: int
) -> None:
    proxy.on(FlipAnswer(at), times=1)
    found = client.ask("GET", path)
    assert _bits_that_differ(found.body, DATA) == [(changed, 1)]
    assert client.ask("GET", path).body == DATA


def test_flip_answer_finds_a_byte_in_a_later_piece(client: _Client, proxy: S3Proxy) -> None:
    proxy.on(FlipAnswer(-5))
    found = client.ask("GET", "/b/large").body
    assert found[:-5] == LARGE[:-5]
    assert found[-5] == LARGE[-5] ^ 1
    assert found[-4:] == LARGE[-4:]


def test_flip_answer_leaves_answers_without_body_alone(client: _Client, proxy: S3Proxy) -> None:
    proxy.on(FlipAnswer(0))
    assert client.ask("HEAD", "/b/data").status == 200
    assert client.ask("DELETE", "/b/data").status == 204


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize(("at", "changed"), [(0, 0), (-1, 2047)])
def test_flip_request_changes_one_bit(
    client: _Client, proxy: S3Proxy, server: _Server, is_chunked: bool, at: int, changed: int
) -> None:
    proxy.on(FlipRequest(at))
    client.ask("PUT", "/b/new", iter([DATA[:9], DATA[9:]]) if is_chunked else DATA)
    assert _bits_that_differ(server.objects["/b/new"], DATA) == [(changed, 1)]


@pytest.mark.parametrize("method", ["PUT", "GET"])
def test_trickle_passes_bodies_on_slowly(
    client: _Client, proxy: S3Proxy, server: _Server, method: str
) -> None:
    proxy.on(Trickle(len(DATA) * 20))
    start = time.monotonic()
    assert client.ask(method, "/b/data", DATA if method == "PUT" else None).status == 200
    assert time.monotonic() - start >= 0.05
    assert server.objects["/b/data"] == DATA


def test_call_acts_before_the_server_has_seen_the_request(
    client: _Client, proxy: S3Proxy, server: _Server
) -> None:
    seen: list[object] = []
    proxy.on(
        Call(before=lambda request: seen.append((request.key, list(server.heads), request.server_status)))
    )
    assert client.ask("PUT", "/b/new", b"abc").status == 200
    assert seen == [("new", [], None)]


def test_call_acts_between_the_server_s_answer_and_the_client(
    client: _Client, proxy: S3Proxy, server: _Server
) -> None:
    seen: list[object] = []
    proxy.on(
        Call(
            after=lambda request: seen.append(
                (server.objects["/b/new"], request.server_status, request.status)
            )
        )
    )
    assert client.ask("PUT", "/b/new", b"abc").status == 200
    assert seen == [(b"abc", 200, None)]


# Gates and the end


def test_a_gate_holds_what_matches_until_it_is_opened(
    client: _Client, proxy: S3Proxy, server: _Server
) -> None:
    gate = proxy.hold(method="PUT", key="new")
    assert client.ask("PUT", "/b/other", b"1").status == 200
    assert not gate.reached.is_set()
    held = _Client(proxy)
    thread = threading.Thread(target=held.ask, args=("PUT", "/b/new", b"abc"))
    thread.start()
    assert gate.reached.wait(WAIT)
    assert client.ask("GET", "/b/data").status == 200
    assert "/b/new" not in server.objects
    gate.open()
    thread.join(WAIT)
    held.close()
    assert server.objects["/b/new"] == b"abc"
    assert client.ask("PUT", "/b/new", b"later").status == 200


def test_a_held_request_arrives_though_its_client_has_gone(proxy: S3Proxy, server: _Server) -> None:
    gate = proxy.hold(key="new")
    with _raw(proxy) as connection:
        connection.sendall(b"PUT /b/new HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc")
        assert gate.reached.wait(WAIT)
    gate.open()
    assert server.stored.wait(WAIT)
    assert server.objects["/b/new"] == b"abc"


@pytest.mark.parametrize("fault", [None, Stall(), Delay(WAIT * 9), Trickle(1)])
def test_closing_ends_what_waits_and_forwards_nothing_more(server: _Server, fault: Fault | None) -> None:
    proxy = S3Proxy(server.endpoint)
    reached = proxy.hold().reached if fault is None else proxy.on(fault).fired
    with _raw(proxy) as idle, _raw(proxy) as connection:
        connection.sendall(b"PUT /b/new HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc")
        assert reached.wait(WAIT)
        proxy.close()
        assert _until(idle, b"never") == b""
        with contextlib.suppress(ConnectionResetError):  # if it was closed before all was read
            assert _until(connection, b"never") == b""
    proxy.close()
    assert proxy.errors == []
    assert [thread for thread in threading.enumerate() if thread.name.startswith("s3-proxy")] == []
    assert "/b/new" not in server.objects
    with pytest.raises(ConnectionError), _raw(proxy):
        pass
