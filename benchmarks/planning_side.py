"""The process of one simulated coordinator, so that its memory is its own.

``python -m benchmarks.planning_side offers|holdfast|torch LAYOUT RANKS TENSORS FOLDER`` leaves the ranks'
offers in the folder, or prints what a save and a load cost that side as JSON.
"""

import sys
import warnings
from pathlib import Path
from typing import cast

import msgspec

from benchmarks.planning_fleet import Fleet, Layout
from benchmarks.planning_ours import run_ours, write_offers
from benchmarks.planning_stages import Stages
from benchmarks.planning_stock import run_stock

__all__ = ["act"]


def act(part: str, fleet: Fleet, folder: Path) -> Stages | None:
    """Play one part; the offers are there before our side plays its own."""
    offers = folder / f"offers-{fleet.layout}-{fleet.ranks}-{fleet.tensors}"
    if part == "offers":
        write_offers(fleet, offers)
        return None
    if part == "holdfast":
        return run_ours(fleet, offers, folder / "holdfast")
    return run_stock(fleet, folder / "torch")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    part_, layout_, ranks_, tensors_, folder_ = sys.argv[1:]
    # The first calls of torch's tensors take memory that no plan needs.
    act("offers", small := Fleet("shards", 2, 2), Path(folder_))
    act("holdfast", small, Path(folder_))
    act("torch", small, Path(folder_))
    found = act(part_, Fleet(cast("Layout", layout_), int(ranks_), int(tensors_)), Path(folder_))
    sys.stdout.buffer.write(msgspec.json.encode(found))
