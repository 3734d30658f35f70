"""Those who save into a bucket of S3, each called as its users call it, as far as it is installed.

The environment says where the server is and who may use it, as the tools of AWS have it.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader as stock_loader
from torch.distributed.checkpoint import state_dict_saver as stock_saver

import holdfast
from benchmarks.sides import ALONE

__all__ = ["BUCKET_SIDES", "CONNECTOR", "BucketSide", "bucket_side"]

CONNECTOR = "s3torchconnector"
BUCKET_SIDES = {"holdfast": "obstore", "torch": "s3fs", CONNECTOR: "s3torchconnector"}
"""By the name in the table: the package that must be installed. Stock torch reaches S3 through s3fs."""


@dataclass(frozen=True)
class BucketSide:
    """One who saves and loads, as functions of a state and a URL."""

    name: str
    save: Callable[[dict[str, Any], str], object]
    load: Callable[[dict[str, Any], str], object]

    def warm_up(self, url: str) -> None:
        """Save and load next to nothing, so that imports and first calls are in nobody's time or memory."""
        self.save({"x": torch.ones(4), "step": 1}, url)
        self.load({"x": torch.zeros(4), "step": 1}, url)


def bucket_side(name: str, *, together: bool = False) -> BucketSide:
    """The side of a name in ``BUCKET_SIDES``.

    Args:
        name: Which.
        together: The ranks of the process group save and load together; otherwise each process alone.
    """
    if name == "holdfast":
        return BucketSide(
            name,
            lambda state, url: holdfast.save(state, checkpoint_id=url, no_dist=not together),
            lambda state, url: holdfast.load(state, checkpoint_id=url, no_dist=not together),
        )
    writer_of, reader_of = _fsspec() if name == "torch" else _connector()
    alone = {} if together else ALONE
    return BucketSide(
        name,
        lambda state, url: stock_saver.save(state, storage_writer=writer_of(url), **alone),
        lambda state, url: stock_loader.load(state, storage_reader=reader_of(url), **alone),
    )


_Makers = tuple[Callable[[str], Any], Callable[[str], Any]]


def _fsspec() -> _Makers:
    module = import_module("torch.distributed.checkpoint._fsspec_filesystem")
    return module.FsspecWriter, module.FsspecReader


def _connector() -> _Makers:
    module, package = import_module("s3torchconnector.dcp"), import_module("s3torchconnector")
    region = os.environ["AWS_REGION"]
    # A server at an address has no host name of its own for each bucket.
    config = package.S3ClientConfig(force_path_style=True)
    return (
        lambda url: module.S3StorageWriter(region, url, s3client_config=config),
        lambda url: module.S3StorageReader(region, url, s3client_config=config),
    )
