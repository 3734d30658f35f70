"""Optimizers of parameters that their module has replaced: they train what nobody uses."""

from collections import Counter
from collections.abc import Sequence

import torch

from holdfast._user_warning import warn_user


def warn_of_stale(modules: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Warn of optimizers that were probably made before the modules of the same state got other parameters.

    Such an optimizer has parameters that no module has, while the modules have trainable parameters of the
    same shapes that no optimizer has. An optimizer of a module that is not in the state has other shapes, as
    a rule. It may have the same, so this is no error.

    Args:
        modules: The modules of a state that is saved or loaded.
        optimizers: Its optimizers.
    """
    if not modules or not optimizers:
        return
    held = {id(one): one for module in modules for one in module.parameters()}
    trained = [[one for group in some.param_groups for one in group["params"]] for some in optimizers]
    taken = {id(one) for parameters in trained for one in parameters}
    free = Counter(one.shape for one in held.values() if one.requires_grad and id(one) not in taken)
    for optimizer, parameters in zip(optimizers, trained, strict=True):
        lost = Counter(one.shape for one in parameters if id(one) not in held)
        if lost and lost <= free:
            warn_user(
                f"{type(optimizer).__name__} has {lost.total()} of {len(parameters)} parameters that no "
                "module of this state has, while the modules have parameters of the same shapes that no "
                "optimizer has. It was probably made before the model got the parameters that it has now (by "
                "fully_shard, parallelize_module, to_empty or a wrapper), so that it does not train the "
                "model. Make the optimizer after that. If it belongs to another model, save and load that "
                "model in the same state.",
            )
