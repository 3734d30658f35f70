"""A training job as its owner would write it: FSDP2, AdamW, a schedule, and a manager of its checkpoints.

``make demo`` starts it; so does ``torchrun --nproc-per-node 4 examples/training.py --root run``. It goes on
from the newest sound checkpoint, on as many ranks as it is given (1, 2 or 4). If SIGTERM comes to any rank,
all ranks save the same step and end.

Its losses do not depend on the number of ranks, to the last bit. That is not what sharded training gives by
itself, because sums of rounded numbers depend on their order. Three choices make it so:

- A batch is always the same four micro-batches, each computed alone by one rank, which holds the whole
  parameters by then. So the same rounding happens wherever a micro-batch is computed.
- Gradients are float32 and are added in float64 (``reduce_dtype``). Its 29 spare bits hold the sum of four
  float32 numbers without rounding, whatever the order, unless they differ in size by more than 2**26; where
  they do, what is lost is far below what the sum keeps when it becomes float32 again. With float32 sums the
  losses on 2 and on 4 ranks differ from the second step on.
- World sizes, and so the factors of means, are powers of two: dividing by them does not round.
"""

import argparse
import logging
import os
import signal
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from fatal_planner import FatalPlanner
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import holdfast
from holdfast.manager import CheckpointManager, EverySteps, Last, Preempted

MICRO_BATCHES, SAMPLES = 4, 16
FEATURES, HIDDEN, CLASSES = 128, 768, 10


class Training:
    """Model, optimizer and schedule of a job.

    Attributes:
        state: All of them as one object, to be saved and loaded; also how many steps are done.
    """

    def __init__(self, steps: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            OrderedDict(
                first=nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.GELU()),
                second=nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN), nn.GELU()),
                third=nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN), nn.GELU()),
                head=nn.Linear(HIDDEN, CLASSES),
            )
        )
        self.sharding = shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=steps)
        # Nothing here draws random numbers: the batches have generators of their own.
        self.state = holdfast.TrainingState(self.model, self.optimizer, self.schedule, rng=False)

    def step(self, number: int) -> float:
        """Train on one batch, shared out over the ranks; the loss of the whole batch, on every rank."""
        world_size = dist.get_world_size()
        losses = torch.zeros(MICRO_BATCHES, dtype=torch.float64)
        mine = range(dist.get_rank(), MICRO_BATCHES, world_size)
        for place in mine:
            inputs, classes = make_micro_batch(number, place)
            loss = nn.functional.cross_entropy(self.model(inputs), classes)
            # FSDP takes the mean over the ranks: with this factor it becomes that over the micro-batches.
            self.sharding.set_requires_gradient_sync(place == mine[-1])
            torch.autograd.backward(loss * (world_size / MICRO_BATCHES))
            losses[place] = loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        dist.all_reduce(losses)  # each place is filled by one rank, and zero on the others
        return losses.mean().item()


def shard(model: nn.Sequential) -> FSDPModule:
    """Share the parameters of each part out over all ranks; the same model, as FSDP calls it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    for part in model:
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def make_micro_batch(step: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points around ten centres, and which centre each belongs to; drawn anew for each place of each step."""
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1 + step * MICRO_BATCHES + place)
    classes = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    noise = torch.randn(SAMPLES, FEATURES, generator=generator)
    return 0.3 * centres[classes] + noise, classes


def train(arguments: argparse.Namespace) -> Iterator[tuple[int, float]]:
    """Go on from the newest checkpoint, if there is one, saving on the way; yields the losses."""
    training = Training(arguments.steps)
    state = {"training": training.state}
    when = EverySteps(arguments.save_every) | Preempted()
    with CheckpointManager(arguments.root, keep=Last(3), when=when) as manager:
        restored = manager.restore(state)  # None at the first start
        if restored is not None and dist.get_rank() == 0:
            print(f"restored step {restored.step}, skipped {sorted(restored.skipped)}", flush=True)
        for step in range(training.state.step + 1, arguments.steps + 1):
            loss = training.step(step)
            yield step, loss
            training.state.step = step
            inject_preemption(arguments, step)
            if manager.should_save(step):
                planner = fatal_planner(arguments, step)
                manager.save(step, state, metrics={"loss": loss}, planner=planner)
            if manager.should_stop:
                print(f"pre-empted after step {step}", flush=True)
                return


def inject_preemption(arguments: argparse.Namespace, step: int) -> None:
    """For the demo: SIGTERM for one rank, as a cluster sends it that wants its machine back."""
    if step == arguments.preempt_at and dist.get_rank() == arguments.preempt_rank:
        os.kill(os.getpid(), signal.SIGTERM)


def fatal_planner(arguments: argparse.Namespace, step: int) -> FatalPlanner | None:
    """For the demo: what kills one rank in the middle of the save of a step; None for all others."""
    if step != arguments.kill_at or dist.get_rank() != arguments.kill_rank:
        return None
    return FatalPlanner(arguments.root / f"step-{step}", dist.get_rank())


def main() -> None:
    """One rank of the job; its number and the address of the others are in the environment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="the folder of the run; need not exist")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--save-every", type=int, default=8)
    parser.add_argument("--losses", type=Path, default=Path(os.devnull), help="a line for each step")
    parser.add_argument("--kill-rank", type=int, help="the rank that dies ...")
    parser.add_argument("--kill-at", type=int, help="... in the middle of the save of this step")
    parser.add_argument("--preempt-rank", type=int, help="the rank that gets SIGTERM ...")
    parser.add_argument("--preempt-at", type=int, help="... after this step")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    # More threads than cores only disturb each other, and one adds in the same order every time.
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with arguments.losses.open("a", buffering=1) as lines:
        for step, loss in train(arguments):
            if dist.get_rank() == 0:
                lines.write(f"{step} {loss.hex()}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
