"""Tools to test programs and plugins that use Holdfast. The rest of the package does not use them.

The contract suites need pytest: ``pip install holdfast[testing]``. Subclass one, say how to make the thing
to be tested, and pytest runs the whole suite on it; ``docs/testing.md`` shows how.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.testing.decorators import with_checkpoint_logging, with_temp_dir
    from holdfast.testing.drive import drive_load, drive_save
    from holdfast.testing.fake_ranks import FakeRank, FakeRanks
    from holdfast.testing.plain_planner import PlainLoadPlanner, PlainSavePlanner
    from holdfast.testing.planner_contract import PlannerContract
    from holdfast.testing.rot13 import Rot13Example, get_test_extension_registry
    from holdfast.testing.storage_contract import StorageContract
    from holdfast.testing.store_contract import StoreContract
    from holdfast.testing.transform_contract import TransformContract

__all__ = [
    "FakeRank",
    "FakeRanks",
    "PlainLoadPlanner",
    "PlainSavePlanner",
    "PlannerContract",
    "Rot13Example",
    "StorageContract",
    "StoreContract",
    "TransformContract",
    "drive_load",
    "drive_save",
    "get_test_extension_registry",
    "with_checkpoint_logging",
    "with_temp_dir",
]

_HOME = {
    "FakeRank": "fake_ranks",
    "FakeRanks": "fake_ranks",
    "PlainLoadPlanner": "plain_planner",
    "PlainSavePlanner": "plain_planner",
    "PlannerContract": "planner_contract",
    "Rot13Example": "rot13",
    "StorageContract": "storage_contract",
    "StoreContract": "store_contract",
    "TransformContract": "transform_contract",
    "drive_load": "drive",
    "drive_save": "drive",
    "get_test_extension_registry": "rot13",
    "with_checkpoint_logging": "decorators",
    "with_temp_dir": "decorators",
}


if "pytest" in sys.modules:
    # So that a failing assert of a suite shows its values, as one in the author's own tests does.
    sys.modules["pytest"].register_assert_rewrite(
        *(f"holdfast.testing.{module}" for module in {*_HOME.values()} if module.endswith("_contract")),
        "holdfast.testing.store_read_tests",
        "holdfast.testing.store_contract_base",
        "holdfast.testing.store_write_tests",
        "holdfast.testing.transform_damage_tests",
        "holdfast.testing.transform_stream_tests",
        "holdfast.testing.transform_contract_base",
    )


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'holdfast.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"holdfast.testing.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
