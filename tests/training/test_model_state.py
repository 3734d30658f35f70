"""State dicts of models and optimizers that are wrapped, sharded, split or on no device at all."""

import pytest
from tests.support.ranks import run_ranks
from tests.training import broadcast_failures, model_states

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("layouts", [["ddp", "fsdp", "hsdp"], ["tp", "tp_fsdp"]], ids="-".join)
def test_every_layout_gives_the_state_of_the_whole_model_and_takes_it(layouts: list[str]) -> None:
    for kind, value in run_ranks(model_states.check_layouts, 4, layouts):
        assert kind == "returned", value


def test_rank_0_sends_to_models_without_memory_and_to_stages_and_all_ranks_agree() -> None:
    for kind, value in run_ranks(model_states.check_broadcasts, 4):
        assert kind == "returned", value


def test_what_cannot_be_sent_or_taken_raises_on_all_ranks() -> None:
    for kind, value in run_ranks(broadcast_failures.check_failing_broadcasts, 2, timeout=60):
        assert kind == "returned", value
