"""The process of one case: measures it and prints its samples as JSON; progress goes to standard error.

``python -m benchmarks.worker CASE SCALE ROUNDS FOLDER``
"""

import sys
import warnings
from pathlib import Path

import msgspec

from benchmarks.case import Job, SkippedError
from benchmarks.catalog import all_cases

__all__ = ["run_case"]


def run_case(name: str, scale: float, rounds: int, folder: Path) -> dict[str, object]:
    """The samples of a case and which sides are not among them, or the reason why it was skipped."""

    def say(line: str) -> None:
        print(f"  {name}: {line}", file=sys.stderr, flush=True)

    case = next(case for case in all_cases(scale) if case.name == name)
    try:
        job = Job(folder, rounds, say)
        return {"samples": case.run(job), "absent": job.absent}
    except SkippedError as reason:
        return {"skipped": str(reason)}


if __name__ == "__main__":
    # Stock torch warns of its own deprecated calls and of having no process group.
    warnings.simplefilter("ignore")
    name_, scale_, rounds_, folder_ = sys.argv[1:]
    try:
        found = run_case(name_, float(scale_), int(rounds_), Path(folder_))
    except KeyboardInterrupt:
        sys.exit(130)
    sys.stdout.buffer.write(msgspec.json.encode(found))
