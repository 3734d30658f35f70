"""Paths into nested states, as the manifest keeps them: plain where keys are strings, typed where not."""

from typing import Any

from typing_extensions import Self

from holdfast.errors import MetadataFormatError, PlanError

_KINDS = ("dict", "OrderedDict", "list")


class TypedKey(str):
    """A key of a dict that is not a string, in a path made of strings.

    Looks like ``str(value)``, as torch's paths have it, and remembers ``value``.
    """

    __slots__ = ("value",)
    value: Any

    def __new__(cls, value: Any) -> Self:
        self = super().__new__(cls, str(value))
        self.value = value
        return self

    def __getnewargs__(self) -> tuple[Any]:
        return (self.value,)


def encode_paths(keys: list[str], paths: dict[str, Any]) -> list[Any]:
    """For each key the steps of its path, or None if that is just the key. Empty if there are no paths."""
    if not paths:
        return []
    return [
        None
        if (path := paths.get(key, (key,))) == (key,) and type(path[0]) is str
        else [_encode_step(step) for step in path]
        for key in keys
    ]


def _encode_step(step: Any) -> Any:
    return encode_key(step.value) if isinstance(step, TypedKey) else step


def encode_key(key: Any) -> list[Any]:
    """A key that is not a string, as a list of the name of its type and what it is made from.

    Raises:
        PlanError: It cannot be kept exactly.
    """
    if key is None:
        return ["none"]
    if type(key) is tuple:
        return ["tuple", [_encode_text(part) if type(part) is str else encode_key(part) for part in key]]
    if type(key) is int:
        # MessagePack has 64 bits.
        return ["int", str(key)]
    if type(key) in (bool, float, bytes):
        return [type(key).__name__, key]
    raise PlanError(
        f"a dict has the key {key!r} of type {type(key).__name__}, which cannot be kept exactly; use str, "
        "int, float, bool, bytes, None, or a tuple of these",
        key=str(key),
    )


def _encode_text(part: str) -> list[Any]:
    try:
        part.encode()
    except UnicodeEncodeError:
        raise PlanError(f"the text {part!r} is not valid: it has half of a character") from None
    return ["str", part]


def decode_paths(keys: list[str], encoded: list[Any], *, path: str) -> dict[str, tuple[Any, ...]]:
    """The path of each key.

    Raises:
        MetadataFormatError: It is not what ``encode_paths`` makes.
    """
    return {
        key: (key,) if steps is None else _decode_path(steps, path)
        for key, steps in zip(keys, encoded, strict=True)
    }


def _decode_path(steps: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(steps, list):
        raise _bad(path, steps)
    if {str}.issuperset(map(type, steps)):  # as almost all are
        return tuple(steps)
    return tuple(_decode_step(step, path) for step in steps)


def _decode_step(step: Any, path: str) -> Any:
    if isinstance(step, str) or (type(step) is int and 0 <= step < 1 << 32):
        return step
    return TypedKey(_decode_key(step, path))


def _decode_key(encoded: Any, path: str) -> Any:
    try:
        if not isinstance(encoded, list):
            raise _bad(path, encoded)
        kind, *rest = encoded
        if kind == "none":
            return None
        (value,) = rest
        if kind == "tuple" and isinstance(value, list):
            return tuple(_decode_key(part, path) for part in value)
        if kind == "int" and isinstance(value, str):
            return int(value)
        wanted = {"str": str, "bool": bool, "float": float, "bytes": bytes}.get(kind)
    except (ValueError, TypeError, RecursionError):
        raise _bad(path, encoded) from None
    if wanted is None or type(value) is not wanted:
        raise _bad(path, encoded)
    return value


def encode_containers(containers: dict[Any, Any]) -> list[Any]:
    """The containers that paths cannot express: for each its steps, its kind, its position.

    If it holds the parts of a tensor, what is known of that tensor comes fourth.
    """
    return [
        [[_encode_step(step) for step in where], kind, position, *([] if tensor is None else [tensor])]
        for where, (kind, position, tensor) in containers.items()
    ]


def decode_containers(
    encoded: list[Any], *, path: str
) -> dict[tuple[Any, ...], tuple[str, int, dict[str, Any] | None]]:
    """The kind of each container, its position, and what is known of the tensor whose parts it holds."""
    found = {}
    for entry in encoded:
        if not isinstance(entry, list) or len(entry) < 3 or entry[1] not in _KINDS:
            raise _bad(path, entry)
        steps, kind, position = entry[:3]
        tensor = entry[3] if len(entry) > 3 else None
        if type(position) is not int or (tensor is not None and not _is_about_tensor(tensor)):
            raise _bad(path, entry)
        found[_decode_path(steps, path)] = (kind, position, tensor)
    return found


def _is_about_tensor(about: Any) -> bool:
    """Whether it tells of a tensor what ``holdfast._tensors.tensor_parts`` keeps."""
    if not isinstance(about, dict) or not about.keys() >= {"class", "shape", "stride", "dtype", "context"}:
        return False
    cls, lengths = about["class"], [about["shape"], about["stride"]]
    return (
        isinstance(cls, list)
        and list(map(type, cls)) == [str, str]
        and all(isinstance(numbers, list) and {int} >= set(map(type, numbers)) for numbers in lengths)
        and isinstance(about["dtype"], str)
    )


def _bad(path: str, found: Any) -> MetadataFormatError:
    return MetadataFormatError(f"{path} has a path that cannot be: {str(found)[:80]}", path=path)
