"""All cases, in the order in which they run."""

from benchmarks.async_save import async_save_cases
from benchmarks.bulk import bulk_cases
from benchmarks.case import Case
from benchmarks.commands import command_cases
from benchmarks.compressed import compressed_cases
from benchmarks.conversions import conversion_cases
from benchmarks.frameworks import framework_cases
from benchmarks.memory import memory_cases
from benchmarks.neighbour import neighbour_cases
from benchmarks.object_store import object_store_cases
from benchmarks.one_slice import slice_cases
from benchmarks.planning import planning_cases
from benchmarks.ranks import rank_cases
from benchmarks.recording import recording_cases
from benchmarks.restarts import restart_cases
from benchmarks.safetensors_files import safetensors_cases
from benchmarks.small import small_cases
from benchmarks.staging import staging_cases
from benchmarks.thousand_steps import thousand_steps_cases

__all__ = ["all_cases"]


def all_cases(scale: float) -> list[Case]:
    """Every case, its sizes multiplied by ``scale``."""
    groups = (
        bulk_cases,
        restart_cases,
        neighbour_cases,
        small_cases,
        slice_cases,
        rank_cases,
        safetensors_cases,
        compressed_cases,
        memory_cases,
        conversion_cases,
        planning_cases,
        staging_cases,
        async_save_cases,
        object_store_cases,
        recording_cases,
        thousand_steps_cases,
        command_cases,
        framework_cases,
    )
    return [case for group in groups for case in group(scale)]
