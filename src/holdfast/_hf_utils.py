"""Names and headers of Hugging Face's safetensors files, under the names of torch's module."""

import io
import json
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast._format.item_table import StorageInfo
from holdfast._format.safetensors import LARGEST_HEADER, TORCH_NAMES
from holdfast.errors import MetadataFormatError

_metadata_fn: str = "model.safetensors.index.json"

FILE_NAME = "model-{cpt_idx}-of-{num_files}"
SHARDED_FILE_NAME = "shard-{shard_idx}-model-{cpt_idx}-of-{num_files}"
SUFFIX = ".safetensors"
SHARDED_DIR_NAME = "sharded"

# The words of a header.
CUSTOM_METADATA_KEY = "DCP_SHARDING_INFO"
DCP_SHARDING_INFO_KEY = CUSTOM_METADATA_KEY
DEFAULT_EXTRA_METADATA_KEY = "__metadata__"
SAVED_OFFSETS_KEY = "saved_offsets"
SHAPE_KEY = "shape"
DATA_KEY = "data"
DTYPE_KEY = "dtype"
DATA_OFFSETS_KEY = "data_offsets"
FORMAT_KEY = "format"
FORMAT_VALUE = "pt"
DCP_VERSION_KEY = "DCP_VERSION"
HF_DCP_VERSION: float = 1.0

NUM_BYTES_FOR_HEADER_LEN = 8

DTYPE_MAP: dict[str, torch.dtype] = {
    code: getattr(torch, name) for code, name in TORCH_NAMES.items() if hasattr(torch, name)
}
"""The dtypes by their names in a header."""


@dataclass
class _HFStorageInfo:
    """Where a tensor of a safetensors checkpoint is: its file, and its shape and dtype there.

    Attributes:
        relative_path: The file. Our readers give its whole path, as torch's do.
        shape: The shape.
        dtype: The dtype.
        place: Its bytes in the file, with their checksums, of a record that our reader has made. Without
            it the file is opened with ``safetensors.safe_open``.
    """

    relative_path: str
    shape: torch.Size
    dtype: torch.dtype
    place: StorageInfo | None = field(default=None, repr=False, compare=False)


def _gen_file_name(index: int, largest_index: int, shard_index: int | None = None) -> str:
    """The name of file ``index`` of ``largest_index``, or of the part of it that a rank wrote."""
    numbers = {"cpt_idx": f"{index:05}", "num_files": f"{largest_index:05}"}
    if shard_index is None:
        return FILE_NAME.format(**numbers) + SUFFIX
    return SHARDED_FILE_NAME.format(**numbers, shard_idx=f"{shard_index:05}") + SUFFIX


def _get_safetensors_file_metadata(file_bytes: io.IOBase) -> tuple[Any, int]:
    """The header of a safetensors file, and where the data begins; the stream stands at its beginning.

    Raises:
        MetadataFormatError: The file is too short, or has no header.
    """
    stream: Any = file_bytes
    length = stream.read(NUM_BYTES_FOR_HEADER_LEN)
    nbytes = int.from_bytes(length, "little")
    header = stream.read(min(nbytes, LARGEST_HEADER))
    if len(length) < NUM_BYTES_FOR_HEADER_LEN or len(header) < nbytes:
        raise MetadataFormatError("a safetensors file ends before the end of its header")
    try:
        return json.loads(header), NUM_BYTES_FOR_HEADER_LEN + nbytes
    except ValueError as error:
        raise MetadataFormatError(f"the header of a safetensors file is not JSON: {error}") from error


def _get_dtype(dtype_str: str) -> torch.dtype:
    """The dtype with that name in a header.

    Raises:
        MetadataFormatError: torch has no such dtype. Another one would give wrong values.
    """
    if dtype_str not in DTYPE_MAP:
        raise MetadataFormatError(f"a safetensors file has the dtype {dtype_str!r}, which is not known")
    return DTYPE_MAP[dtype_str]


def _get_dcp_custom_metadata(metadata: Any) -> Any | None:
    """The chunks that a rank wrote, as a header lists them; None if it does not."""
    noted = metadata.get(DEFAULT_EXTRA_METADATA_KEY, {}).get(CUSTOM_METADATA_KEY)
    return None if noted is None else json.loads(noted)
