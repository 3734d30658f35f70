"""The error of a failed step under the name of torch's module; its home is :mod:`holdfast.errors`."""

from holdfast.errors import WRAPPED_EXCEPTION, CheckpointException

__all__ = ["WRAPPED_EXCEPTION", "CheckpointException"]
