"""What is sent to the writer process, and how that process starts, without starting one."""

import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import torch

from holdfast._io.progress import ProgressTracker
from holdfast._writer_process.save_request import SaveRequest, pack, unpack, unpack_header

BASE = torch.arange(64, dtype=torch.uint8)


class Views(dict[str, Any]):
    """Makes a view of the staged memory for each entry when it is asked for them."""

    def items(self) -> Any:
        return ((key, BASE[value : value + 1]) for key, value in super().items())


def test_tensors_that_are_made_while_a_request_is_packed_are_sent_each_for_itself() -> None:
    sent: Any = Views((f"k{n}", n) for n in range(8))
    body = bytearray(b"".join(pack(SaveRequest(sent, sent, sent), BASE)))
    memory = bytearray(BASE.numpy().tobytes())
    request: Any = unpack(*unpack_header(body), lambda _: memory, ProgressTracker(lambda _: None))
    values: Iterable[Any] = dict.values(request.writer)
    assert [value.item() for value in values] == list(range(8))


def test_a_niceness_above_that_of_the_writer_process_stays() -> None:
    program = (
        "import os; from holdfast._writer_process.process_start import _lower_priority; "
        "os.setpriority(os.PRIO_PROCESS, 0, 17); _lower_priority(); print(os.getpriority(os.PRIO_PROCESS, 0))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.strip() == b"17"
