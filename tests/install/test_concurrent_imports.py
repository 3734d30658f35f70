"""``install()`` while another thread imports torch's package: no function of it stays torch's."""

import json
import subprocess
import sys

import pytest
from tests.support.ranks import python_environment

# The other thread is in the middle of a module when it imports `at`. It goes on once install() has begun.
CHILD = """
import json, sys, threading
import torch, holdfast
at = sys.argv[1]
in_the_middle = threading.Event()
assert not holdfast.installed().active  # nothing can be imported for the first time while a finder is at work

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == at:
            in_the_middle.set()
            while not holdfast.installed().active:
                pass

sys.meta_path.insert(0, Finder)
thread = threading.Thread(target=__import__, args=("torch.distributed.checkpoint",))
thread.start()
in_the_middle.wait()
holdfast.install()
thread.join()
print(json.dumps(holdfast.installed().replaced))
"""


@pytest.mark.slow
@pytest.mark.one_core
@pytest.mark.parametrize("at", ["planner", "_traverse", "_async_executor"])
def test_modules_that_another_thread_is_importing_are_replaced(at: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, f"torch.distributed.checkpoint.{at}"],
        env={**python_environment(), "HOLDFAST_INSTALL": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    replaced = json.loads(done.stdout)
    modules = ("", ".state_dict_saver")
    assert {f"torch.distributed.checkpoint{module}.save" for module in modules} <= {*replaced}
    assert "torch.distributed.checkpoint.load" in replaced
