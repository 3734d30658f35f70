"""One small model in every order of activation checkpointing, ``torch.compile`` and a parallel layout."""

import copy
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.support.states import assert_same
from tests.training.fingerprints import fingerprint
from tests.training.layouts import CLASSES, FEATURES, Model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import holdfast
from holdfast import TrainingState
from holdfast.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict

Wrap = Callable[[Any], Any]
OPTIMIZERS = ["AdamW", "SGD", "Adam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "NAdam", "RAdam", "ASGD"]
"""Those of torch.optim that train DTensors and parameters of any shape."""
FULL = StateDictOptions(full_state_dict=True)


def compiled(module: Any) -> Any:
    return torch.compile(module, backend="eager")


def compiled_in_place(module: Any) -> Any:
    module.compile(backend="eager")
    return module


def checkpointed(module: Any) -> Any:
    return checkpoint_wrapper(module)


def checkpointed_reentrant(module: Any) -> Any:
    return checkpoint_wrapper(module, CheckpointImpl.REENTRANT)


def recomputed(module: Any) -> Any:
    """Activation checkpointing without a wrapper: the forward method calls ``torch.utils.checkpoint``."""
    forward = module.forward
    module.forward = lambda *args: checkpoint(forward, *args, use_reentrant=False)
    return module


def data_parallel(module: Any) -> Any:
    return nn.parallel.DistributedDataParallel(module)


def sharded(module: Any) -> Any:
    # gloo has no mean of its own in every version of torch; other dtypes than float32 are added and divided.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    return fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=policy)


def tensor_parallel(block: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


WRAPS: dict[str, Wrap] = {
    "compile": compiled,
    "inplace": compiled_in_place,
    "ac": checkpointed,
    "reentrant": checkpointed_reentrant,
    "recompute": recomputed,
    "ddp": data_parallel,
    "fsdp": sharded,
    "tp": tensor_parallel,
}


def build(wrapping: str) -> Any:
    """A new model. ``"ac.fsdp/compile"``: each block in ac, then in fsdp, then the whole model compiled."""
    blocks, _, whole = wrapping.partition("/")
    torch.manual_seed(1)
    model: Any = Model()
    model.scales.requires_grad_(False)
    model.tied = model.head
    for name in filter(None, blocks.split(".")):
        model.blocks[0] = WRAPS[name](model.blocks[0])
    for name in filter(None, whole.split(".")):
        model = WRAPS[name](model)
    return model


def orders(kinds: Iterable[str]) -> list[str]:
    """All kinds one after the other, in every order."""
    return [".".join(order) for order in itertools.permutations(kinds)]


def wrappings(layout: str) -> list[str]:
    """Every wrapping that is tried in a layout."""
    extra = [["compile"], ["inplace"], ["ac"], ["recompute"], ["compile", "ac"], ["inplace", "ac"]]
    if layout == "plain":
        # The reentrant kind needs inputs with gradients, which only blocks have.
        forms = [form for kinds in extra for order in orders(kinds) for form in (f"/{order}", f"{order}/")]
        return ["/", *forms, "reentrant/"]
    if layout == "ddp":
        whole = [f"/{order}" for kinds in [[], *extra] for order in orders([*kinds, "ddp"])]
        return whole + [f"{order}/ddp" for kinds in extra for order in orders(kinds)]
    if layout == "fsdp":
        blocks = [f"{order}/fsdp" for kinds in [[], *extra] for order in orders([*kinds, "fsdp"])]
        return blocks + [f"fsdp/{order}" for kinds in extra for order in orders([*kinds, "fsdp"])]
    # parallelize_module looks for the names of the block's layers, which a wrapper would hide.
    blocks = [f"tp.{order}/" for kinds in extra for order in orders(kinds)]
    return ["tp/"] + blocks + [f"tp/{order}" for kinds in extra for order in orders(kinds)]


class Run:
    """A model in training, with random numbers that depend on the step alone."""

    def __init__(self, wrapping: str, optimizer: str = "AdamW") -> None:
        torch._dynamo.reset()
        self.wrapping = wrapping
        self.model = build(wrapping)
        weights = [parameter for parameter in self.model.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in self.model.parameters() if parameter.dim() <= 1]
        groups = [{"params": weights, "lr": 0.02}, {"params": []}, {"params": others}]
        options = {"momentum": 0.9} if optimizer in ("SGD", "RMSprop") else {}
        self.optimizer = getattr(torch.optim, optimizer)(groups, lr=0.01, **options)
        self.state = TrainingState(self.model, self.optimizer)

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        rank = dist.get_rank() if dist.is_initialized() and "tp" not in self.wrapping else 0
        for step in range(first, last + 1):
            torch.manual_seed(10 * step + rank)
            inputs, targets = torch.randn(6, FEATURES), torch.randint(CLASSES, (6,))
            loss = nn.functional.cross_entropy(self.model(inputs), targets)
            torch.autograd.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def whole_values(self) -> Any:
        """All tensors, gathered, by the names of a model without wrappers."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=FULL)
        return copy.deepcopy((dict(model), dict(optimizer["state"])))

    def fingerprints(self) -> dict[str, str]:
        """The same, small enough to be sent to another process."""
        model, states = self.whole_values()
        found = {f"model.{name}": value for name, value in model.items()}
        for name, state in states.items():
            found |= {f"optimizer.{name}.{kind}": value for kind, value in state.items()}
        return {name: fingerprint(value) for name, value in found.items()}


def save_in_every_way(run: Run, folder: Path) -> None:
    names = get_state_dict(run.model, run.optimizer)
    holdfast.save({"model": names[0], "optimizer": names[1]}, checkpoint_id=folder / "names")
    holdfast.save({"training": run.state}, checkpoint_id=folder / "training")
    holdfast.save({"model": run.model, "optimizer": run.optimizer}, checkpoint_id=folder / "objects")


def load(run: Run, folder: Path, way: str) -> None:
    if way == "objects":
        holdfast.load({"model": run.model, "optimizer": run.optimizer}, checkpoint_id=folder / way)
    elif way == "training":
        holdfast.load({"training": run.state}, checkpoint_id=folder / way)
    else:
        names = get_state_dict(run.model, run.optimizer)
        state = {"model": names[0], "optimizer": names[1]}
        holdfast.load(state, checkpoint_id=folder / way)
        set_state_dict(
            run.model, run.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


def check_resumes(folder: Path, layout: str, stride: int) -> None:
    """Every wrapping is resumed in itself, in all ways, and loaded into the one before it in the list."""
    names = list(get_model_state_dict(build("/")))
    before = "/"
    for number, wrapping in enumerate(wrappings(layout)[::stride]):
        try:
            _check_resume(folder / str(number), wrapping, before, names)
        except Exception as error:
            raise AssertionError(f"{wrapping}, and from there to {before}") from error
        before = wrapping


def _check_resume(folder: Path, wrapping: str, other: str, names: list[str]) -> None:
    run = Run(wrapping)
    run.train(1, 2)
    save_in_every_way(run, folder)
    saved = run.whole_values()
    assert list(saved[0]) == names
    expected = run.train(3, 4), run.whole_values()
    for way in ("objects", "training", "names"):
        resumed = Run(wrapping)
        load(resumed, folder, way)
        assert_same(resumed.whole_values(), saved)
        assert resumed.train(3, 4) == expected[0], way
        assert_same(resumed.whole_values(), expected[1])
    for way in ("training", "names"):
        moved = Run(other)
        load(moved, folder, way)
        assert_same(moved.whole_values(), saved)


def cases(layout: str, stride: int) -> list[tuple[str, str]]:
    """Wrappings, each with an optimizer: every optimizer is in some wrapping if there are all of them."""
    return list(zip(wrappings(layout)[::stride], itertools.cycle(OPTIMIZERS), strict=False))


def first_job(folder: Path, layout: str, stride: int) -> list[dict[str, Any]]:
    """Every case, trained, saved, and trained on."""
    found = []
    for number, case in enumerate(cases(layout, stride)):
        run = Run(*case)
        run.train(1, 2)
        holdfast.save({"training": run.state}, checkpoint_id=folder / f"{number}")
        found.append({"saved": run.fingerprints(), "losses": run.train(3, 4), "end": run.fingerprints()})
    return found


def resumed_job(folder: Path, layout: str, stride: int, goes_on: bool) -> list[dict[str, Any]]:
    """Every case, loaded into a fresh model and optimizer; and trained on, if that can be the same."""
    found: list[dict[str, Any]] = []
    for number, case in enumerate(cases(layout, stride)):
        run = Run(*case)
        holdfast.load({"training": run.state}, checkpoint_id=folder / f"{number}", strict=True)
        found.append({"saved": run.fingerprints()})
        if goes_on:
            found[-1] |= {"losses": run.train(3, 4), "end": run.fingerprints()}
    return found
