"""The process of one rank of a framework: it saves and loads with the other one, both sides in turns.

``python -m benchmarks.framework_rank FRAMEWORK NBYTES ROUNDS FOLDER RANK OUTPUT``; rank 0 writes the samples
to OUTPUT, as JSON. One process is both sides: ``install()`` and ``uninstall()`` are called between turns.
"""

import importlib
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from benchmarks.case import SIDES, Job, Samples, interleave
from benchmarks.rank import by_the_first, finish, say_for, slowest_of
from benchmarks.ranks import RANKS
from benchmarks.states import MIB
from benchmarks.turns import read_through

__all__ = ["Framework", "measure"]

_WIDTH = 1024


class Framework(NamedTuple):
    """A framework with a state of its own, which it saves into a folder and loads from it."""

    save: Callable[[Path], object]
    load: Callable[[Path], object]


def _model(nbytes: int) -> torch.nn.Module:
    """A model that has a third of the bytes: AdamW has two numbers for each of its numbers."""
    layers = max(1, nbytes // 3 // (4 * _WIDTH**2))
    return torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers)))


def _step(model: torch.nn.Module, optimizer: Any) -> None:
    model(torch.ones(1, _WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _accelerate(nbytes: int) -> Framework:
    package: Any = importlib.import_module("accelerate")
    importlib.import_module("tests.frameworks.jobs.sharding_on_cpus").shard_on_cpus()
    plugin = package.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        reshard_after_forward=True,
        auto_wrap_policy="NO_WRAP",
    )
    accelerator = package.Accelerator(cpu=True, fsdp_plugin=plugin)
    model = _model(nbytes)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    _step(model, optimizer)
    return Framework(lambda to: accelerator.save_state(str(to)), lambda at: accelerator.load_state(str(at)))


def _lightning(nbytes: int) -> Framework:
    package: Any = importlib.import_module("lightning.fabric")

    def shard(model: torch.nn.Module, mesh: Any) -> torch.nn.Module:
        fully_shard(model, mesh=mesh["data_parallel"])
        return model

    strategy = package.strategies.ModelParallelStrategy(
        shard, data_parallel_size=RANKS, tensor_parallel_size=1
    )
    fabric = package.Fabric(accelerator="cpu", devices=RANKS, strategy=strategy)
    fabric.launch()
    model = fabric.setup(_model(nbytes))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
    _step(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "step": 1}
    return Framework(lambda to: fabric.save(str(to), state), lambda at: fabric.load(str(at), state))


class _Optimizers:
    """As torchtitan's: they give and take a flat state."""

    def __init__(self, model: torch.nn.Module, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer
        self.helpers: Any = importlib.import_module("torch.distributed.checkpoint.state_dict")
        self.options = self.helpers.StateDictOptions(flatten_optimizer_state_dict=True)

    def state_dict(self) -> Any:
        return self.helpers.get_optimizer_state_dict(self.model, self.optimizer, options=self.options)

    def load_state_dict(self, state: Any) -> None:
        self.helpers.set_optimizer_state_dict(
            self.model, self.optimizer, optim_state_dict=state, options=self.options
        )


class _Progress:
    def state_dict(self) -> Any:
        return {"step": torch.tensor(1)}

    def load_state_dict(self, state: Any) -> None:
        pass


def _torchtitan(nbytes: int) -> Framework:
    package: Any = importlib.import_module("torchtitan.components.checkpoint")
    _join()
    model = _model(nbytes)
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, optimizer)

    def manager(folder: Path) -> Any:
        return package.CheckpointManager(
            package.CheckpointManager.Config(enable=True, folder=str(folder), interval=1, keep_latest_k=0),
            dataloader=None,
            model_parts=[model],
            optimizers=_Optimizers(model, optimizer),
            lr_schedulers=_Progress(),
            states={"train_state": _Progress()},
            sd_adapter=None,
        )

    return Framework(lambda to: manager(to).save(1), lambda at: manager(at).load(step=1))


def _transformers(nbytes: int) -> Framework:
    package: Any = importlib.import_module("transformers")
    _join()
    size = {"vocab_size": 1024, "hidden_size": _WIDTH, "intermediate_size": 2816, "num_attention_heads": 16}
    layers = max(1, nbytes // (49 * MIB))
    config = package.LlamaConfig(**size, num_hidden_layers=layers)
    distributed = importlib.import_module("transformers.distributed").DistributedConfig(fsdp_size=RANKS)

    def load(folder: Path) -> Any:
        return package.LlamaForCausalLM.from_pretrained(str(folder), distributed_config=distributed)

    begin = Path(sys.argv[4]) / "begin"
    by_the_first(lambda: package.LlamaForCausalLM(config).save_pretrained(begin))
    model = load(begin)
    return Framework(lambda to: model.save_pretrained(str(to), distributed_checkpoint=True), load)


def _join() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


_FRAMEWORKS = {
    "accelerate": _accelerate,
    "lightning": _lightning,
    "torchtitan": _torchtitan,
    "transformers": _transformers,
}


def measure(framework: Framework, job: Job) -> Samples:
    """What this rank measures; all ranks call it at once. The first round warms both sides up."""

    def act(side: str) -> dict[str, float]:
        (holdfast.install if side == SIDES[0] else holdfast.uninstall)()
        place = job.folder / side
        by_the_first(lambda: shutil.rmtree(place, ignore_errors=True))
        saved = slowest_of(lambda: framework.save(place))
        assert bool([*place.rglob("*-*.distcp"), *place.rglob(".holdfast*")]) == (side == SIDES[0]), side
        by_the_first(lambda: read_through(place))
        return {"save": saved, "load": slowest_of(lambda: framework.load(place))}

    found = interleave(SIDES, act, rounds=job.rounds + 1, name_of=str, say=job.say)
    return {name: {side: taken[1:] for side, taken in sides.items()} for name, sides in found.items()}


def _main(name: str, nbytes: str, rounds: str, folder: str, rank: str, output: str) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getppid() % 20000)}
    os.environ.update(place, RANK=rank, LOCAL_RANK=rank, GROUP_RANK="0", TORCHELASTIC_RUN_ID="bench")
    os.environ.update(WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
    framework = _FRAMEWORKS[name](int(nbytes))
    finish(measure(framework, Job(Path(folder), int(rounds), say_for(name))), output)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    _main(*sys.argv[1:])
