"""The header of a safetensors file: built, parsed, and refused if it cannot be."""

import json
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load as load_with_safetensors
from safetensors.torch import save as save_with_safetensors

from holdfast._format.safetensors import (
    ALIGNMENT,
    TORCH_NAMES,
    StoredTensor,
    build_header,
    header_nbytes,
    parse_header,
    place_tensors,
)
from holdfast._format.safetensors_index import (
    files_by_mapping,
    files_by_size,
    missing_numbers,
    name_after_save,
    parse_index,
    parse_size,
    save_in_name,
    temporary_file,
)
from holdfast.errors import IntegrityError, MetadataFormatError, TruncatedFileError, UsageError

ATTRIBUTES = {"format": "pt"}


def file_with(entries: dict[str, Any], payload: int = 0) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + bytes(payload)


def parse(data: bytes) -> Any:
    length = header_nbytes(data[:8], len(data), path="f")
    return parse_header(data[:length], len(data), path="f")


def test_what_is_built_is_parsed_and_begins_at_a_page() -> None:
    tensors = [StoredTensor(name, name, (3, 4)) for name in TORCH_NAMES.values()]
    placed, nbytes = place_tensors([*tensors, StoredTensor("scalar", "int64", ())], ATTRIBUTES)
    header = build_header(placed, ATTRIBUTES)
    assert len(header) % ALIGNMENT == 0
    assert placed[0].begin == len(header)
    found = parse(header + bytes(nbytes - len(header)))
    assert found.tensors == placed
    assert found.attributes == ATTRIBUTES


def test_the_safetensors_package_reads_what_is_built() -> None:
    placed, nbytes = place_tensors([StoredTensor("a", "bool", (3,)), StoredTensor("b", "float64", (2,))], {})
    header = build_header(placed, {})
    found = load_with_safetensors(header + bytes(nbytes - len(header)))
    assert torch.equal(found["b"], torch.zeros(2, dtype=torch.float64))
    # Large elements come first, so that none is misaligned.
    assert [tensor.key for tensor in placed] == ["b", "a"]


def test_what_the_safetensors_package_writes_is_parsed() -> None:
    state = {"x": torch.zeros(2, 3), "y": torch.zeros((), dtype=torch.int8), "z": torch.zeros(0)}
    header = parse(save_with_safetensors(state, {"a": "b"}))
    assert {tensor.key: tensor.shape for tensor in header.tensors} == {"x": (2, 3), "y": (), "z": (0,)}
    assert header.attributes == {"a": "b"}


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def doubled(entries: dict[str, Any]) -> bytes:
    """A file that has the key "a" twice, given it once as "A"."""
    return file_with(entries, 8).replace(b'"A"', b'"a"')


HOSTILE = {
    "no JSON": b"\x05" + bytes(7) + b"{{{{{",
    "not an object": file_with([]),  # type: ignore[arg-type]
    "an overlap": file_with({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, 12),
    "a gap": file_with({"a": entry(0, 8, [2]), "b": entry(12, 20, [2])}, 20),
    "a gap at the front": file_with({"a": entry(8, 16, [2])}, 16),
    "more bytes than tensors": file_with({"a": entry(0, 8, [2])}, 9),
    "fewer bytes than tensors": file_with({"a": entry(0, 8, [2])}, 7),
    "the wrong size": file_with({"a": entry(0, 8, [3])}, 8),
    "a negative length": file_with({"a": entry(0, 8, [-1, -2])}, 8),
    "a negative offset": file_with({"a": entry(-8, 0, [2])}, 8),
    "an unknown dtype": file_with({"a": entry(0, 8, [1], "F128")}, 8),
    "a dtype that torch does not have": file_with({"a": entry(0, 6, [8], "F6_E2M3")}, 6),
    "half a byte": file_with({"a": entry(0, 1, [3], "F4")}, 1),
    "a huge shape": file_with({"a": entry(0, 8, [1 << 62, 1 << 62])}, 8),
    "many dimensions": file_with({"a": entry(0, 4, [1] * 1000)}, 4),
    "attributes that are no text": file_with({"__metadata__": {"a": 1}}),
    "a key twice": doubled({"a": entry(0, 8, [2]), "A": entry(0, 8, [2], "I32")}),
    "no shape": file_with({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, 4),
    "no offsets": file_with({"a": {"dtype": "F32", "shape": [1]}}, 4),
    "offsets that are text": file_with({"a": {"dtype": "F32", "shape": [1], "data_offsets": "04"}}, 4),
    "deep nesting": file_with({}) and (100_000).to_bytes(8, "little") + b"[" * 100_000,
    "a header beyond the end": (1000).to_bytes(8, "little") + b"{}",
    "a huge header": (1 << 62).to_bytes(8, "little") + b"{}",
    "no header": b"",
    "half a length": b"\x01\x02",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_cannot_be_is_refused(case: str) -> None:
    with pytest.raises(IntegrityError, match=r"^f\b"):
        parse(HOSTILE[case])
    # The format permits many dimensions, and torch does not; the package takes one of two equal keys.
    if case not in {"many dimensions", "a key twice"}:
        with pytest.raises((safetensors.SafetensorError, KeyError)):
            load_with_safetensors(HOSTILE[case])


def test_attributes_may_have_the_names_of_a_tensors_fields() -> None:
    attributes = {"dtype": "any", "shape": "[3]", "data_offsets": ""}
    found = parse(file_with({"__metadata__": attributes, "a": entry(0, 8, [2])}, 8))
    assert found.attributes == attributes
    assert [tensor.key for tensor in found.tensors] == ["a"]


def test_a_file_that_was_cut_is_told_from_a_damaged_one() -> None:
    whole = HOSTILE["fewer bytes than tensors"]
    with pytest.raises(TruncatedFileError, match="cut short"):
        parse(whole)
    with pytest.raises(TruncatedFileError):
        parse(whole[:20])


@pytest.mark.parametrize(
    ("text", "nbytes"), [(5, 5), ("5GB", 5 * 10**9), ("1.5 KiB", 1536), ("200mb", 200_000_000), ("7", 7)]
)
def test_sizes(text: int | str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("wrong", [0, -1, "", "five", "5XB", 1.5, None, True])
def test_what_is_no_size_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="size"):
        parse_size(wrong)


def tensors_of(*sizes: int) -> list[StoredTensor]:
    return [StoredTensor(chr(97 + number), "uint8", (size,)) for number, size in enumerate(sizes)]


def test_files_by_size_keep_the_order_and_the_limit() -> None:
    files = files_by_size(tensors_of(4, 4, 4, 20, 1), 10)
    assert {name: [tensor.key for tensor in of_file] for name, of_file in files.items()} == {
        "model-00001-of-00004.safetensors": ["a", "b"],
        "model-00002-of-00004.safetensors": ["c"],
        "model-00003-of-00004.safetensors": ["d"],
        "model-00004-of-00004.safetensors": ["e"],
    }
    assert list(files_by_size(tensors_of(4, 6), 10)) == ["model.safetensors"]


def test_foreign_file_names_are_kept() -> None:
    mapping = {"a": "model.safetensors-00001-of-00002.safetensors", "b": "b.safetensors"}
    assert {
        name: [t.key for t in some] for name, some in files_by_mapping(tensors_of(1, 1), mapping).items()
    } == {
        "b.safetensors": ["b"],
        "model.safetensors-00001-of-00002.safetensors": ["a"],
    }


@pytest.mark.parametrize(
    ("mapping", "said"),
    [
        ({"a": 1}, "b"),
        ({"a": 1, "b": 1, "c.gone": 2}, r"c\.gone"),
        ({"a": 0, "b": 1}, "from 1 on"),
        ({"a": "../a.safetensors", "b": 1}, "plain name"),
        ({"a": "a.bin", "b": 1}, "plain name"),
    ],
)
def test_mappings_that_do_not_fit_are_refused(mapping: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        files_by_mapping(tensors_of(1, 1), mapping)


def test_names_tell_their_save_and_missing_files() -> None:
    save = "0123456789abcdef" * 2
    assert save_in_name(temporary_file(3, save)) == save_in_name(name_after_save("m.safetensors", save))
    assert save_in_name("model-00001-of-00002.safetensors") is None
    assert missing_numbers(["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors", "x"]) == [
        "model-00002-of-00003.safetensors"
    ]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b'{"weight_map": {"a": "../b"}}',
        b'{"weight_map": {"a": "/etc/b"}}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": "x", "a": "y"}}',
    ],
)
def test_an_index_that_cannot_be_is_refused(text: bytes) -> None:
    with pytest.raises(MetadataFormatError):
        parse_index(text, path="i")


@pytest.mark.parametrize(
    "text",
    [
        b'{"weight_map": {"a": "x", "b": "x", "a": "y"}}',
        b'{"weight_map": {"a": "x", "\\u0061": "y"}}',
        b'{"weight_map": {"a": "x"}, "weight_map": {"a": "y"}}',
        b'{"metadata": {"n": 1, "n": 2}, "weight_map": {"a": "x"}}',
        b'{"metadata": {"of": {"n": 1, "n": 2}}, "weight_map": {"a": "x"}}',
    ],
)
def test_an_index_that_has_a_key_twice_is_refused(text: bytes) -> None:
    with pytest.raises(MetadataFormatError, match="twice"):
        parse_index(text, path="i")


@pytest.mark.parametrize(
    "metadata", [b"null", b'"text"', b'{"total_size": 8, "format": "pt"}', b'{"of": {"a": "b"}}', b'["\\""]']
)
def test_what_stands_beside_the_names_in_an_index_does_not_matter(metadata: bytes) -> None:
    text = b'{"metadata": ' + metadata + b', "weight_map": {"a": "x", "b": "x"}, "more": ["c"]}'
    assert parse_index(text, path="i") == {"a": "x", "b": "x"}
