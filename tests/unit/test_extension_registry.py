"""Descriptors and the registry: what is accepted, and what each refusal says."""

import codecs
import io
import pickle
import subprocess
import sys
from typing import Any

import pytest

import holdfast._extension
import holdfast.extension
from holdfast._io import zstd_backends
from holdfast.errors import (
    ExtensionError,
    ExtensionUnavailableError,
    UnknownExtensionError,
    UsageError,
)
from holdfast.extension import (
    Extension,
    ExtensionRegistry,
    StreamTransformExtension,
    ZStandard,
    split_descriptor,
)
from holdfast.testing.rot13 import Rot13Example, get_test_extension_registry


class Unversioned(Extension):
    """An extension that writes no version, as torch allows."""

    @staticmethod
    def registry_name() -> str:
        return "notes@example.org"

    @staticmethod
    def from_descriptor(version: str) -> "Unversioned":
        if version:
            raise LookupError(f"no version was ever written, got {version}")
        return Unversioned()

    def get_descriptor(self) -> str:
        return "notes@example.org"


@pytest.fixture
def no_zstd_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zstd_backends, "PREFERENCE", ("a_package_that_is_not_there",))


def test_a_new_registry_knows_zstd_and_makes_it_from_its_descriptor() -> None:
    registry = ExtensionRegistry()
    assert registry.extensions == {"stream.zstd": ZStandard}
    (made,) = registry.from_descriptor_list([ZStandard(7).get_descriptor()])
    assert isinstance(made, ZStandard)


def test_extensions_come_in_the_order_of_their_descriptors() -> None:
    registry = get_test_extension_registry()
    made = registry.from_descriptor_list(("stream.rot13/1", "stream.zstd/1", "stream.rot13/1.4"))
    assert [type(extension) for extension in made] == [Rot13Example, ZStandard, Rot13Example]
    assert list(registry.from_descriptor_list([])) == []


@pytest.mark.parametrize(
    ("descriptor", "parts"),
    [
        ("stream.zstd/1", ("stream.zstd", "1")),
        ("a", ("a", "")),
        ("_a-b.c_9@my-org.example/2.0.1+b_7", ("_a-b.c_9@my-org.example", "2.0.1+b_7")),
        ("a@b", ("a@b", "")),
    ],
)
def test_a_descriptor_splits_into_registry_name_and_version(descriptor: str, parts: tuple[str, str]) -> None:
    assert split_descriptor(descriptor) == parts


@pytest.mark.parametrize(
    ("descriptor", "why"),
    [
        (None, "is a NoneType"),
        (b"stream.zstd/1", "is a bytes"),
        ("", "is empty"),
        ("a/1/2", "more than one slash"),
        ("a/", "behind the slash"),
        ("/1", "is not a name"),
        ("a b/1", "is not a name"),
        ("a@b@c/1", "is not a name"),
        ("@b/1", "is not a name"),
        ("a@/1", "is not a name"),
        (".a/1", "is not a name"),
        ("caf\u00e9/1", "is not a name"),
        ("a\n/1", "is not a name"),
        ("a/1 ", "is not a version"),
        ("a/1\n", "is not a version"),
        ("a/\u0661", "is not a version"),
    ],
)
def test_a_malformed_descriptor_is_named_with_the_reason(descriptor: Any, why: str) -> None:
    with pytest.raises(ExtensionError, match=why) as caught:
        ExtensionRegistry().from_descriptor_list([descriptor])
    assert type(caught.value) is ExtensionError
    assert repr(descriptor) in str(caught.value)
    assert "name[@domain][/version]" in str(caught.value)
    assert caught.value.found == descriptor


def test_a_single_string_is_not_taken_for_a_list() -> None:
    with pytest.raises(ExtensionError, match=r"write \['stream.zstd/1'\]"):
        ExtensionRegistry().from_descriptor_list("stream.zstd/1")


def test_an_unknown_name_is_answered_with_the_nearest_one_and_all_others() -> None:
    with pytest.raises(UnknownExtensionError) as caught:
        get_test_extension_registry().from_descriptor_list(["stream.zst/1"])
    message = str(caught.value)
    assert "'stream.zst/1'" in message
    assert "did you mean 'stream.zstd'?" in message
    assert "stream.rot13, stream.zstd" in message
    assert "ExtensionRegistry.register" in message


def test_a_name_far_from_all_others_brings_no_suggestion() -> None:
    with pytest.raises(UnknownExtensionError) as caught:
        ExtensionRegistry().from_descriptor_list(["quite-different/1"])
    assert "did you mean" not in str(caught.value)


def test_nothing_is_made_when_one_of_the_names_is_unknown() -> None:
    made = []

    class Counting(Unversioned):
        @staticmethod
        def from_descriptor(version: str) -> "Counting":
            made.append(version)
            return Counting()

    registry = ExtensionRegistry()
    registry.register(Counting)
    with pytest.raises(UnknownExtensionError):
        registry.from_descriptor_list(["notes@example.org", "unknown/1"])
    assert made == []


@pytest.mark.parametrize("version", ["2", "0", "11", "2.1", "v1", "x.1"])
def test_another_major_version_of_zstd_is_refused(version: str) -> None:
    with pytest.raises(UnknownExtensionError, match=f"'stream.zstd/{version}'.*expected 1"):
        ExtensionRegistry().from_descriptor_list([f"stream.zstd/{version}"])


def test_zstd_without_a_version_is_refused_with_what_was_expected() -> None:
    with pytest.raises(UnknownExtensionError, match=r"no version.*'stream\.zstd/1'"):
        ExtensionRegistry().from_descriptor_list(["stream.zstd"])
    with pytest.raises(ValueError):
        get_test_extension_registry().from_descriptor_list(["stream.rot13"])


def test_a_minor_version_is_read() -> None:
    (made,) = ExtensionRegistry().from_descriptor_list(["stream.zstd/1.7"])
    assert isinstance(made, ZStandard)


def test_an_extension_that_writes_no_version_gets_an_empty_one() -> None:
    registry = ExtensionRegistry()
    registry.register(Unversioned)
    (made,) = registry.from_descriptor_list([Unversioned().get_descriptor()])
    assert isinstance(made, Unversioned)


def test_what_a_plugin_raises_passes_through() -> None:
    registry = ExtensionRegistry()
    registry.register(Unversioned)
    with pytest.raises(LookupError, match="no version was ever written, got 3"):
        registry.from_descriptor_list(["notes@example.org/3"])


def test_a_later_class_takes_the_place_of_an_earlier_one_in_this_registry_only() -> None:
    class Better(ZStandard):
        pass

    registry = ExtensionRegistry()
    registry.register(ZStandard)
    registry.register(Better)
    registry.register(Better)
    assert registry.extensions == {"stream.zstd": Better}
    assert ExtensionRegistry().extensions == {"stream.zstd": ZStandard}


@pytest.mark.parametrize("thing", [Rot13Example(), "stream.rot13", None, int])
def test_only_extension_classes_can_be_registered(thing: Any) -> None:
    with pytest.raises(UsageError):
        ExtensionRegistry().register(thing)


@pytest.mark.parametrize("name", [None, "", "a/1", "two words", 7])
def test_a_class_whose_name_cannot_be_looked_up_is_not_registered(name: Any) -> None:
    class Nameless(Unversioned):
        @staticmethod
        def registry_name() -> str:
            return name  # type: ignore[no-any-return]

    with pytest.raises(ExtensionError, match="registry_name"):
        ExtensionRegistry().register(Nameless)


def test_a_class_made_for_torch_can_be_registered() -> None:
    class Foreign:
        """Has the methods, but not our base class."""

        registry_name = staticmethod(lambda: "foreign")
        from_descriptor = staticmethod(lambda version: Foreign())

        def get_descriptor(self) -> str:
            return "foreign/1"

    registry = ExtensionRegistry()
    registry.register(Foreign)  # type: ignore[arg-type]
    made: Any = registry.from_descriptor_list(["foreign/1"])[0]
    assert type(made) is Foreign


@pytest.mark.usefixtures("no_zstd_library")
def test_without_a_zstd_library_the_error_says_what_to_install() -> None:
    assert not ZStandard.is_available()
    for make in (ZStandard, lambda: ExtensionRegistry().from_descriptor_list(["stream.zstd/1"])):
        with pytest.raises(ExtensionUnavailableError, match=r"pip install holdfast\[zstd\]") as caught:
            make()
        assert "stream.zstd/1" in str(caught.value)
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, ImportError)


@pytest.mark.usefixtures("no_zstd_library")
def test_an_unknown_version_is_told_before_a_missing_library() -> None:
    with pytest.raises(UnknownExtensionError):
        ExtensionRegistry().from_descriptor_list(["stream.zstd/2"])


def test_the_next_library_is_taken_where_the_first_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zstd_backends, "PREFERENCE", ("not_there", "zstandard"))
    backend = zstd_backends.select_backend()
    assert backend is not None
    assert backend.module == "zstandard"


@pytest.mark.parametrize("level", [23, -131073, "3", 3.0, True, None])
def test_a_level_out_of_range_is_refused(level: Any) -> None:
    with pytest.raises(UsageError, match="level"):
        ZStandard(level)


@pytest.mark.parametrize("level", [-131072, -1, 0, 1, 19, 22])
def test_every_level_of_zstd_round_trips(level: int) -> None:
    class Kept(io.BytesIO):
        content = b""

        def close(self) -> None:
            self.content = self.getvalue()
            super().close()

    output = Kept()
    with ZStandard(level).transform_to(output) as stream:
        stream.write(b"abc" * 1000)
    assert ZStandard().transform_from(io.BytesIO(output.content)).read() == b"abc" * 1000


def test_a_negative_max_size_is_refused() -> None:
    with pytest.raises(UsageError, match="max_size"):
        ZStandard().transform_from(io.BytesIO(), max_size=-1)


def test_a_pickled_transform_keeps_its_level() -> None:
    again = pickle.loads(pickle.dumps(ZStandard(9)))
    assert repr(again) == "ZStandard(level=9)"


@pytest.mark.parametrize("base", [Extension, StreamTransformExtension])
def test_a_plugin_must_have_every_method(base: type) -> None:
    with pytest.raises(TypeError, match="abstract"):
        base()


def test_torchs_private_name_has_the_same_classes() -> None:
    assert holdfast._extension.__all__ == holdfast.extension.__all__
    for name in holdfast.extension.__all__:
        assert getattr(holdfast._extension, name) is getattr(holdfast.extension, name)


def test_importing_the_module_loads_no_zstd_library() -> None:
    code = (
        "import sys, holdfast.extension; print({'zstandard', 'backports.zstd', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("plain", "rotated"),
    [
        (b"Hello, World! 123", b"Uryyb, Jbeyq! 123"),
        (bytes(range(256)), None),
        (b"AMNZamnz", b"NZAMnzam"),
    ],
)
def test_rot13_moves_letters_thirteen_places_and_nothing_else(plain: bytes, rotated: bytes | None) -> None:
    found = Rot13Example(chunk_size=3).transform_from(io.BytesIO(plain)).read()
    assert found == codecs.encode(plain.decode("latin-1"), "rot13").encode("latin-1")
    assert rotated is None or found == rotated


def test_rot13_needs_a_chunk_size() -> None:
    with pytest.raises(UsageError, match="chunk_size"):
        Rot13Example(chunk_size=0)
