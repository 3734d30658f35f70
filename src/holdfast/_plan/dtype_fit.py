"""Whether the dtypes of a checkpoint may become those of a state."""

import torch

from holdfast._human_units import some_of
from holdfast._plan.fit_report import FitReport
from holdfast._user_warning import warn_user
from holdfast.errors import UsageError

_MOST_NAMED = 20

FLOAT4 = vars(torch).get("float4_e2m1fn_x2")
"""Two numbers in a byte: torch cannot cast them. Older torch does not have them."""


class DtypeFit:
    """Compares dtypes, one key after the other.

    Args:
        report: Gets the dtypes that may not be cast.
        cast: What the caller says of casts; see ``DefaultLoadPlanner``.
    """

    def __init__(self, report: FitReport, cast: bool | None) -> None:
        self.report, self._cast = report, cast
        self._narrowed: list[str] = []

    def check(self, key: str, stored: torch.dtype, wanted: torch.dtype) -> None:
        """Report a dtype that may not be cast; note one whose cast may change values, for a warning."""
        if stored == wanted:
            return
        if FLOAT4 is not None and FLOAT4 in (stored, wanted):
            why = f"and torch cannot cast them; load into {stored}"
            self.report.add("dtype", key, f"the checkpoint has {stored}, the state {wanted}, {why}")
        elif self._cast is False or (self._cast is None and _kind(stored) != _kind(wanted)):
            problem = f"the checkpoint has {stored}, the state {wanted}; pass cast=True to cast it"
            self.report.add("dtype", key, problem)
        elif self._cast is None and not _holds_all(wanted, stored):
            self._narrowed.append(f"{key} from {stored} to {wanted}")

    def warn(self) -> None:
        """Warn of what is cast without the caller's word, though values may change."""
        if self._narrowed:
            warn_user(
                f"tensors are cast on load: {some_of(self._narrowed, _MOST_NAMED, '; ')}. cast=True says it "
                "is meant, cast=False raises."
            )


def _holds_all(wider: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether each value of ``dtype`` is one of ``wider``, a dtype of the same kind."""
    if not (dtype.is_floating_point and wider.is_floating_point):
        return dtype.itemsize < wider.itemsize and (dtype.is_signed <= wider.is_signed)
    one, other = torch.finfo(wider), torch.finfo(dtype)
    return one.eps <= other.eps and one.max >= other.max and one.smallest_normal <= other.smallest_normal


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "float"
    return "bool" if dtype == torch.bool else "int"


def float_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype that floating-point tensors are to be cast to, given as such or as its name; None for none.

    Raises:
        UsageError: It is none that floating-point numbers can be cast to.
    """
    if dtype is None:
        return None
    found = vars(torch).get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not _is_castable(found):
        raise UsageError(f"dtype is a floating-point dtype such as bfloat16, not {dtype}", found=dtype)
    return found


def cast_floats(stored: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype that tensors get if floating-point tensors are cast; all others keep theirs."""
    return wanted if wanted is not None and _is_castable(stored) else stored


def _is_castable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype != FLOAT4
