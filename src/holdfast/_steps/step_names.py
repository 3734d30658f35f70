"""Owns the names of the folders that the steps of a run are saved in."""

import re
import string
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from holdfast.errors import UsageError

DEFAULT_NAME = "step-{step}"
KNOWN_FORMS = (DEFAULT_NAME, "checkpoint-{step}", "{step}", "step_{step}", "global_step{step}")
_SAMPLES = (0, 7, 10, 1234, 10**7, 10**18)
"""Steps that a form must write as decimal numbers: ``{step:x}``, ``{step:,}`` and ``{step:g}`` do not."""
_TRAILING_NUMBER = re.compile(r"(.*?)(\d+)")


@dataclass(frozen=True)
class StepNames:
    """How the number of a step becomes the name of its folder, and back.

    Args:
        form: The name with ``{step}`` in it, or ``{step:08d}`` for names with leading zeros.

    Raises:
        UsageError: The form has no step, or more than one, or is not the name of one folder.
    """

    form: str = DEFAULT_NAME

    def __post_init__(self) -> None:
        form: object = self.form
        problem = _problem_of(form) if isinstance(form, str) else "it must be a text"
        if problem:
            raise UsageError(
                f"name={self.form!r}: {problem}. Name folders as in {DEFAULT_NAME!r}, 'checkpoint-{{step}}' "
                "or '{step:08d}'",
                found=self.form,
            )

    @cached_property
    def _pattern(self) -> "re.Pattern[str]":
        before, after = _around(self.form)
        return re.compile(f"{re.escape(before)}(\\d+){re.escape(after)}", re.ASCII)

    def folder(self, step: int) -> str:
        """The folder of a step."""
        return self.form.format(step=step)

    def step(self, folder: str) -> int | None:
        """The step of a folder, with any number of leading zeros; None if it is not called like one."""
        found = self._pattern.fullmatch(folder)
        return int(found[1]) if found else None


def check_step(step: object) -> None:
    """Raise UsageError if something is not the number of a step. Costs a fraction of a microsecond."""
    if type(step) is int and step >= 0:
        return
    if hasattr(step, "item"):  # a tensor, or a number of numpy
        what = f"{step!r}: pass step.item()"
    elif isinstance(step, int | float | str | None):
        what = repr(step)
    else:
        what = f"a {type(step).__name__}. The order is save(step, state) and restore(state, step)"
    raise UsageError(f"a step is a whole number of 0 or more, not {what}", found=step)


def guess_names(folders: Iterable[str]) -> StepNames:
    """The form that most of these folders have, if a number is at their end; else the default."""
    beginnings = Counter(
        found[1] for folder in folders if (found := _TRAILING_NUMBER.fullmatch(folder)) is not None
    )
    # Of equally many the form that people are known to use.
    known = [form.removesuffix("{step}") for form in KNOWN_FORMS]
    best = max(
        beginnings,
        key=lambda text: (beginnings[text], text in known, text),
        default=DEFAULT_NAME[: -len("{step}")],
    )
    return StepNames(best.replace("{", "{{").replace("}", "}}") + "{step}")


def _around(form: str) -> tuple[str, str]:
    before, after, seen = "", "", False
    for text, field, _, _ in string.Formatter().parse(form):
        before, after = (before, after + text) if seen else (before + text, after)
        seen = seen or field is not None
    return before, after


def _problem_of(form: str) -> str | None:
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(form) if field is not None]
        if fields != ["step"]:
            return "it must have {step} once"
        names = {step: form.format(step=step) for step in _SAMPLES}
    except (ValueError, IndexError, KeyError, AttributeError, OverflowError) as error:
        return str(error)
    name = names[7]
    if "\0" in name:
        return "a name cannot have a null character"
    if "/" in name or "\\" in name or name.startswith(".") or name[-1:] in {".", " "}:
        return "a step is one folder directly below the root, and not a hidden one"
    before, after = _around(form)
    if before[-1:].isdigit() or after[:1].isdigit():
        return "a digit beside {step} cannot be told from the number"
    if not all(
        re.fullmatch(f"{re.escape(before)}0*{step}{re.escape(after)}", names[step]) for step in _SAMPLES
    ):
        return "the step must be written as a decimal number"
    return None
