"""Where credentials, region and endpoint of an object store come from; no server is asked."""

import os
import pickle
import socket
import time
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast._format.names import data_file_name, parse_data_file
from holdfast._io.bucket_client import CLASSES, BucketAccess, S3Keys
from holdfast._io.places import STORES, open_bucket, open_place
from holdfast._io.s3_uploads import sign
from holdfast.cli import main
from holdfast.errors import StorageError, UsageError

URL = "s3://bucket/run/step-1"


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "STORAGE_EMULATOR")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


def test_the_environment_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    access = BucketAccess(URL)
    assert access.s3_keys() == S3Keys("key", "secret", "token")
    assert (access.region, access.endpoint) == ("eu-central-1", "http://127.0.0.1:1")
    access.open()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:2")
    assert BucketAccess(URL).endpoint == "http://127.0.0.1:2"


@pytest.mark.parametrize("name", [None, "work"])
def test_a_profile_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str | None) -> None:
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = key-None\naws_secret_access_key = a%b\n"
        "[work]\naws_access_key_id = key-work\naws_secret_access_key = a%b\naws_session_token = t\n"
    )
    (tmp_path / "config").write_text(
        "[default]\nregion = r-None\n[profile work]\nregion = r-work\nendpoint_url = http://127.0.0.1:3\n"
    )
    if name:
        monkeypatch.setenv("AWS_PROFILE", name)
    access = BucketAccess(URL)
    assert access.s3_keys() == S3Keys(f"key-{name}", "a%b", "t" if name else None)
    assert access.region == f"r-{name}"
    assert access.endpoint == ("http://127.0.0.1:3" if name else None)
    access.open()


def test_a_profile_tells_region_and_endpoint_of_other_credentials_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config").write_text(
        "[default]\nregion = r\naws_access_key_id = other\nservices = mine\n"
        "endpoint_url = http://127.0.0.1:1\n"
        "[services mine]\ns3 =\n  addressing_style = path\n  endpoint_url = http://127.0.0.1:2\n"
    )
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    access = BucketAccess(URL)
    assert (access.region, access.endpoint) == ("r", "http://127.0.0.1:2")
    assert access.s3_keys() == S3Keys("key", "secret")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    assert access.endpoint is None


def test_a_malformed_profile_is_named_if_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config").write_text("no section\n")
    with pytest.raises(UsageError, match="config, in which AWS keeps its profiles"):
        BucketAccess(URL).open()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    BucketAccess(URL).open()


def test_a_profile_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(UsageError, match="nobody"):
        BucketAccess(URL).open()


def test_parameters_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    options = {"access_key_id": "mine", "secret_access_key": "s", "aws_region": "x", "endpoint": "http://h:1"}
    access = BucketAccess(URL, options)
    assert access.s3_keys() == S3Keys("mine", "s", None)
    assert (access.region, access.endpoint) == ("x", "http://h:1")


def test_an_option_that_nobody_knows_is_named() -> None:
    with pytest.raises(UsageError, match="no_such_option"):
        BucketAccess(URL, {"no_such_option": 1, "access_key_id": "a", "secret_access_key": "b"}).open()


@pytest.mark.parametrize(
    ("url", "bucket", "prefix"),
    [
        (URL, "bucket", "run/step-1"),
        ("s3://bucket", "bucket", ""),
        ("s3://bucket/a b%20c/", "bucket", "a b%20c"),
        ("gs://bucket/x", "bucket", "x"),
        ("az://container/x/y", "container", "x/y"),
    ],
)
def test_urls_are_taken_as_they_are(
    url: str, bucket: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    access = BucketAccess(url, {} if url.startswith("az") else {"skip_signature": True})
    assert (access.bucket, access.prefix) == (bucket, prefix)
    assert (access.open().prefix or "") == prefix
    store = open_place(url)
    assert pickle.loads(pickle.dumps(store)).url == store.url == url.rstrip("/")


@pytest.mark.parametrize("url", ["s3://me:secret@bucket/run", "gs://me@bucket/run", "s3://bucket:9000/run"])
def test_a_url_with_a_user_or_a_port_is_refused_and_not_shown(url: str) -> None:
    """They would have no effect."""
    with pytest.raises(UsageError, match=r"for bucket\S* has: .*AWS_ENDPOINT_URL") as caught:
        holdfast.load({"a": 0}, checkpoint_id=url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["s3://", "s3:///run/step-1", "gs:///", "az:////x"])
def test_a_url_without_a_bucket_is_refused_and_no_folder_is_made(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one made from a variable that is empty."""
    monkeypatch.chdir(tmp_path)
    for act in (
        lambda: holdfast.save({"a": 0}, checkpoint_id=url),
        lambda: holdfast.load({"a": 0}, checkpoint_id=url),
        lambda: holdfast.ObjectStoreWriter(url),
        lambda: holdfast.open(url),
        lambda: holdfast.CheckpointManager(url),
    ):
        with pytest.raises(UsageError, match="names no bucket"):
            act()
    assert main(["ls", url]) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("prefix", ["a//b", "a/./b", "../a", "a/.."])
def test_names_that_a_store_does_not_have_are_refused(prefix: str) -> None:
    """A URL parser would take them for a way through folders, and the store for a name."""
    with pytest.raises(UsageError, match=r"no '\.\.' and no empty name"):
        holdfast.save({"a": 0}, checkpoint_id=f"s3://bucket/{prefix}")


@pytest.mark.parametrize(
    "endpoint",
    [
        "127.0.0.1:9000",
        "localhost:9000",
        "http://h:99999",
        "http://",
        "ftp://h",
        " http://h:1",
        "http://h:1\n",
    ],
)
def test_an_endpoint_that_is_no_address_is_refused(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(UsageError, match=r"is no address such as https://") as caught:
        holdfast.load({"a": 0}, checkpoint_id=URL)
    assert caught.value.found == endpoint


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"options": {"allow_http": True}}, "client_options, without a prefix. It has allow_http"),
        ({"options": {"AWS_TIMEOUT": "5s"}}, "pass it in client_options"),
        ({"client_options": {"tiemout": "5s"}}, "tiemout"),
        ({"retry": {"max_retry": 5}}, "no 'max_retry'; it has max_retries, retry_timeout, backoff"),
        ({"retry": {"backoff": {"bas": 2}}}, "no 'bas'; it has init_backoff"),
    ],
)
def test_a_setting_at_the_wrong_place_or_with_a_typing_error_is_named(
    settings: dict[str, Any], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    reader = holdfast.ObjectStoreReader(URL, **settings)
    with pytest.raises(UsageError, match=words):
        holdfast.load({"a": 0}, storage_reader=reader)
    capfd.readouterr()


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "AWS_REGION"])
def test_a_newline_at_the_end_of_a_key_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    """Files with secrets have one. obstore's answer is none that ``except Exception`` would notice."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
        for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION"):
            monkeypatch.setenv(key, "text\n" if key == name else "text")
        with pytest.raises(StorageError, match=r"a newline at its end"):
            holdfast.load({"a": 0}, checkpoint_id=URL)
    capfd.readouterr()


def test_a_writer_for_object_stores_wants_a_url() -> None:
    with pytest.raises(UsageError, match="s3://bucket"):
        holdfast.ObjectStoreWriter("checkpoints/1")


def test_signatures_are_those_of_the_documentation_of_aws() -> None:
    """The example "Get bucket lifecycle" in the chapter on Signature Version 4."""
    keys = S3Keys("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
    now = time.strptime("20130524T000000Z", "%Y%m%dT%H%M%SZ")
    headers = sign(keys, "us-east-1", "GET", "examplebucket.s3.amazonaws.com", "/", "lifecycle=", now=now)
    assert headers["authorization"].endswith(
        "Signature=fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"
    )


def test_spread_names_begin_differently_and_tell_the_same() -> None:
    names = {data_file_name(rank, 0, "0123456789abcdef", spread=True) for rank in range(64)}
    assert len({name[:2] for name in names}) > 32
    assert {parse_data_file(name) for name in names} == {
        parse_data_file(data_file_name(rank, 0, "0123456789abcdef")) for rank in range(64)
    }


def test_every_scheme_of_a_bucket_is_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    assert {scheme for scheme, opens in STORES.items() if opens is open_bucket} == set(CLASSES)
    for scheme, kind in CLASSES.items():
        options = {} if kind == "AzureStore" else {"skip_signature": True}
        assert BucketAccess(f"{scheme}://bucket/run", options).open().prefix == "run"
