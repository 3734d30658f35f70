"""``holdfast prune``: deletes the steps of a run that no policy keeps."""

import argparse
from functools import reduce
from operator import or_
from typing import Any

from holdfast._human_units import some_of
from holdfast._steps.policies import Best, Every, KeepPolicy, Last, Steps, Within
from holdfast._steps.pruning import PrunePlan, Pruning
from holdfast.cli.exit_codes import FINE, UNREADABLE
from holdfast.cli.run_steps import check_is_run, open_root
from holdfast.cli.text import counted, printable, write_json, write_lines
from holdfast.errors import UsageError

__all__ = ["keep_policy", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Delete, or with --dry-run only tell; returns the exit code."""
    pruning = Pruning(open_root(arguments.path, arguments.name), _needed_policy(arguments))
    plan = pruning.plan()
    check_is_run(pruning.root, plan.found)
    if plan.unknown_metric:
        # The steps that a misspelt one was to keep would be deleted.
        raise UsageError(f"--metric: {plan.unknown_metric}. Nothing was deleted", found=arguments.metric)
    _refuse_unknown_steps(arguments, plan)
    doomed = [step.number for step in plan.doomed]
    deleted = doomed if arguments.dry_run else pruning.run()
    if arguments.json:
        kept = [step.number for step in plan.kept]
        document: dict[str, Any] = {"path": arguments.path, "dry_run": arguments.dry_run, "kept": kept}
        write_json({"schema": "holdfast.prune/1", **document, "deleted": deleted})
    else:
        verb = "would delete" if arguments.dry_run else "deleted"
        names = f": {', '.join(map(str, deleted))}" if deleted else ""
        stay = "1 stays" if len(plan.kept) == 1 else f"{len(plan.kept)} stay"
        what = f"{verb} {counted(len(deleted), 'step')}{names}; {stay}"
        write_lines([f"{printable(arguments.path)}: {what}"])
    return UNREADABLE if pruning.failed else FINE


def _refuse_unknown_steps(arguments: argparse.Namespace, plan: PrunePlan) -> None:
    """Raise if steps are all that is to be kept, and none of them is there: then all but one would go."""
    others = (arguments.last, arguments.every, arguments.within, arguments.best)
    there = {step.number for step in plan.found.steps}
    if plan.doomed and arguments.steps and not any(others) and there.isdisjoint(arguments.steps):
        named = ", ".join(map(str, arguments.steps))
        has = some_of(sorted(there), 10)
        raise UsageError(f"--steps: there is no step {named}; the steps are {has}. Nothing was deleted")


def _needed_policy(arguments: argparse.Namespace) -> KeepPolicy:
    policy = keep_policy(arguments)
    if policy is None:
        raise UsageError("what is to be kept? Pass --last, --every, --within, --steps or --best")
    return policy


def keep_policy(arguments: argparse.Namespace) -> KeepPolicy | None:
    """The policy that the options describe; None if none was given.

    Raises:
        UsageError: They make no sense together.
    """
    if (arguments.best is None) != (arguments.metric is None):
        raise UsageError("--best and --metric belong together: --best 2 --metric loss")
    parts: list[KeepPolicy] = []
    parts += [Last(arguments.last)] if arguments.last else []
    parts += [Every(arguments.every)] if arguments.every else []
    parts += [Within(arguments.within)] if arguments.within else []
    parts += [Steps(arguments.steps)] if arguments.steps else []
    parts += [Best(arguments.best, arguments.metric, arguments.highest)] if arguments.best else []
    return reduce(or_, parts) if parts else None
