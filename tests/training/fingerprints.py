"""Values in a form in which processes can compare them: exact, and small."""

import hashlib
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def fingerprint(value: Any) -> str:
    """Dtype, shape and a digest of a tensor's bytes, put together over the ranks if it is a DTensor.

    Other values are as ``repr`` shows them.
    """
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if not isinstance(value, torch.Tensor):
        return repr(value)
    data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()}"
