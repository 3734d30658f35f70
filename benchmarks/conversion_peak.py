"""The process of one conversion, and its peak of memory; or of making what is converted.

``python -m benchmarks.conversion_peak make|convert FORMAT SOURCE TARGET SCALE`` prints a number of bytes.
"""

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

import holdfast
from benchmarks.conversions import conversion_contents
from benchmarks.footprint import Footprint
from benchmarks.sides import both_sides


def _make(format_: str, place: Path, state: dict[str, Any]) -> None:
    ours, theirs = both_sides()
    if format_ == "torch_save":
        torch.save(state, place)
    elif format_ == "safetensors":
        holdfast.save(state, storage_writer=holdfast.HuggingFaceStorageWriter(place), no_dist=True)
    else:
        (ours if format_ == "holdfast" else theirs).save(state, place)


def _convert(format_: Any, source: Path, target: Path) -> int:
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "small"
        _make("holdfast", small, {"x": torch.ones(4)})
        holdfast.convert(small, Path(folder) / "other", to=format_)
    footprint = Footprint()
    holdfast.convert(source, target, to=format_)
    return footprint.extra()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    task_, name_, source_, target_, scale_ = sys.argv[1:]
    if task_ == "make":
        _make(name_, Path(source_), conversion_contents(float(scale_)).filled())
        print(0)
    else:
        print(_convert(name_, Path(source_), Path(target_)))
