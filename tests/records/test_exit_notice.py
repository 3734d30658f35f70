"""A program that ends, or is interrupted, while a save runs in the background says what it waits for."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest
import torch
from tests.support.ranks import python_environment

import holdfast

pytestmark = [pytest.mark.slow, pytest.mark.one_core]

PROGRAM = """
import os, sys, time
import torch, holdfast

class Gated(holdfast.FileSystemWriter):
    def write_data(self, plan, planner):
        os.read(0, 1)  # until the test lets it go
        return super().write_data(plan, planner)

future = holdfast.async_save({"x": torch.ones(1 << 18)}, storage_writer=Gated(sys.argv[1]))
print(repr(future), flush=True)
if len(sys.argv) > 2:
    future.result()
"""


def start(folder: Path, *more: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), *more],
        env=python_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_until_notice(stream: "IO[str] | None", folder: Path) -> str:
    assert stream is not None
    for line in stream:
        if line.startswith("holdfast: "):
            assert f"when the save to {folder} in the background has: " in line
            return line
    raise AssertionError("the program ended without a notice")


def let_go(program: "subprocess.Popen[str]") -> int:
    assert program.stdin is not None
    program.stdin.write("x")
    program.stdin.flush()
    return program.wait(60)


def loaded(folder: Path) -> float:
    state = {"x": torch.zeros(1 << 18)}
    holdfast.load(state, checkpoint_id=folder)
    return float(state["x"].mean())


def test_a_program_that_ends_says_what_it_waits_for(tmp_path: Path) -> None:
    program = start(tmp_path)
    try:
        assert program.stdout is not None
        assert program.stdout.readline().startswith(f"<SaveFuture to {tmp_path}: 0 B of 1.0 MiB")
        assert "1.0 MiB" in read_until_notice(program.stderr, tmp_path)
        assert let_go(program) == 0
    finally:
        program.kill()
        program.communicate()
    assert loaded(tmp_path) == 1.0


def test_a_program_that_is_interrupted_says_what_it_waits_for(tmp_path: Path) -> None:
    program = start(tmp_path, "wait")
    try:
        assert program.stdout is not None
        program.stdout.readline()
        os.kill(program.pid, signal.SIGINT)
        read_until_notice(program.stderr, tmp_path)
        assert let_go(program) == -signal.SIGINT
    finally:
        program.kill()
        program.communicate()
    assert loaded(tmp_path) == 1.0
