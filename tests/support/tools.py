"""What tests need of the machine. A test fails where it is missing, and says how to get it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

_PACKAGES = {
    "chromium": "chromium",
    "ip": "iproute2",
    "mkfs.ext4": "e2fsprogs",
    "mount": "mount",
    "openssl": "openssl",
    "strace": "strace",
    "umount": "mount",
}
"""The package of Debian and Ubuntu that has each command. scripts/setup.sh installs them, and
``make pages`` the browser."""


def need_command(name: str) -> str:
    """The path of a command that a test starts; fails the test if it is not installed."""
    # A user's PATH may be without the commands of the administrator.
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if path is None:
        pytest.fail(
            f"this test needs the command {name}. Install it: apt-get install {_PACKAGES[name]}",
            pytrace=False,
        )
    return path


def need_root(purpose: str) -> None:
    """Fail a test that only root can run."""
    if os.geteuid() != 0:
        pytest.fail(f"this test needs root, {purpose}. Run the tests as root.", pytrace=False)


def run_as_root(*command: str, purpose: str) -> None:
    """Run a command that only root may; fails the test if it is not allowed or not installed."""
    need_root(purpose)
    words = [need_command(command[0]), *command[1:]]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.fail(
            f"this machine does not let root run '{' '.join(command)}', which this test needs {purpose}: "
            f"{done.stderr.strip()}. In a container, start it with --privileged.",
            pytrace=False,
        )


@contextmanager
def small_disk(kind: str, folder: Path, mib: int = 24) -> Iterator[Path]:
    """A file system of its own, ``"tmpfs"`` or ``"ext4"``, mounted at ``folder`` for the with-block."""
    purpose = "to mount a small file system"
    folder.mkdir()
    if kind == "tmpfs":
        run_as_root("mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder), purpose=purpose)
    else:
        image = folder.with_name(f"{folder.name}.image")
        with image.open("wb") as file:
            file.truncate(mib << 20)
        run_as_root(f"mkfs.{kind}", "-q", "-O", "^has_journal", str(image), purpose=purpose)
        run_as_root("mount", "-o", "loop", str(image), str(folder), purpose=purpose)
    try:
        yield folder
    finally:
        run_as_root("umount", str(folder), purpose=purpose)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Without the rights of root, for the with-block."""
    need_root("to become a user without rights")
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def traced_calls(program: str, *arguments: str, calls: Sequence[str], log: Path) -> list[str]:
    """Run a Python program under strace; the lines of those system calls, of all its threads, in order."""
    command = [need_command("strace"), "-f", "-y", "-o", str(log), "-e", f"trace={','.join(calls)}"]
    command += [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    if "ptrace" in done.stderr:
        pytest.fail(
            f"strace may not trace here: {done.stderr.strip()}. Run the tests as root. In a container, start "
            "it with --cap-add=SYS_PTRACE.",
            pytrace=False,
        )
    assert done.returncode == 0, done.stderr
    return log.read_text().splitlines()
