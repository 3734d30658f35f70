"""Options for reading and setting state dicts of models and optimizers."""

from dataclasses import dataclass, fields
from typing import Any


@dataclass
class StateDictOptions:
    """How state dicts are read from models and optimizers, and set.

    Attributes:
        full_state_dict: Tensors of the state dict are whole. Sharded tensors are gathered when a state dict
            is read, which is a collective operation of their ranks. When it is set, each rank takes its part.
        cpu_offload: Tensors of the state dict are on the CPU. Together with ``full_state_dict`` only rank 0
            gets a state dict; all other ranks get an empty one.
        ignore_frozen_params: Leave out the parameters that do not require gradients. When a state dict is
            set, they may be missing and stay as they are. The state of optimizers is always complete.
        keep_submodule_prefixes: With ``submodules``: keep the whole names. If False, names begin inside of
            the submodule.
        strict: Raise an error if the state dict does not have exactly the keys of the model, or if it knows
            nothing about a parameter of an optimizer that requires gradients.
        broadcast_from_rank0: Only the state dict of rank 0 counts; it must be whole, and
            ``full_state_dict`` must be True. Rank 0 sends one tensor after the other, and each rank keeps its
            part. All ranks of the default process group must take part. The model may be on the meta device.
        flatten_optimizer_state_dict: Read the state of optimizers as one flat dict with keys such as
            ``state.<parameter>.exp_avg`` and ``param_groups.<parameter>.lr``. Use it if ranks have different
            parameters, as in pipelines. A dict in the state of a parameter is flattened too if all its keys
            are strings without dots. Any other stays a dict, so that its keys keep their types.
        dsd_fqn_modifiers: The name of a method with which a module can say that its hooks rename entries. It
            returns a dict: the key in the state dict to the name of the child that the key leaves out.
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    keep_submodule_prefixes: bool = True
    strict: bool = True
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False
    dsd_fqn_modifiers: str = "_fqn_modifiers"


def checked_options(options: Any) -> StateDictOptions:
    """The options, or the default ones; torch's own class is accepted as well.

    Raises:
        ValueError: They contradict each other.
    """
    if options is None:
        return StateDictOptions()
    if options.broadcast_from_rank0 and not options.full_state_dict:
        raise ValueError("full_state_dict must be True when broadcast_from_rank0 is True")
    if isinstance(options, StateDictOptions):
        return options
    known = {one.name for one in fields(StateDictOptions)}
    return StateDictOptions(**{key: value for key, value in vars(options).items() if key in known})
