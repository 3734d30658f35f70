"""Places in Google Cloud Storage: its XML interface, as a gateway before a real S3 server speaks it."""

import itertools
import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from tests.object_stores.states import ONCE, load, rival_for, save, state_of, store_of
from tests.object_stores.test_s3_commit import FAULTS, METADATA
from tests.support.gcs_gateway import GcsGateway
from tests.support.s3_proxy import S3Proxy
from tests.support.s3_server import BUCKET, S3Server
from tests.support.tools import need_command

import holdfast
from holdfast._io.places import open_place
from holdfast._io.store import ByteStore
from holdfast.errors import AccessDeniedError, CheckpointExistsError
from holdfast.state_dict_saver import AsyncCheckpointerType
from holdfast.testing import StorageContract
from holdfast.testing.store_contract import StoreContract

pytestmark = [pytest.mark.slow, pytest.mark.one_core]

_numbers = itertools.count()


@pytest.fixture(scope="session")
def account(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The key file of a service account, as the console of Google Cloud gives it."""
    make_key = (need_command("openssl"), "genpkey", "-quiet", "-algorithm", "RSA")
    key = subprocess.run(make_key, check=True, capture_output=True, text=True).stdout
    path = tmp_path_factory.mktemp("google") / "account.json"
    names = {"client_email": "trainer@example.com", "private_key_id": "1", "token_uri": ""}
    path.write_text(json.dumps({"type": "service_account", "private_key": key, **names}))
    return path


@pytest.fixture(scope="session")
def running(s3_server: S3Server) -> Iterator[GcsGateway]:
    """The gateway."""
    with GcsGateway(s3_server.endpoint) as gateway:
        yield gateway


@pytest.fixture(autouse=True)
def gateway(running: GcsGateway, account: Path, monkeypatch: pytest.MonkeyPatch) -> GcsGateway:
    """The gateway; the environment of the test names it, and the service account."""
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(account))
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", running.endpoint)
    return running


@pytest.fixture
def proxy(gateway: GcsGateway, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    """What stands between the test and the gateway, and can be told to fail."""
    with S3Proxy(gateway.endpoint) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.endpoint)
        yield proxy
    assert proxy.errors == []


@pytest.fixture
def place() -> str:
    """The URL of a place that no other test uses."""
    return f"gs://{BUCKET}/gcs-{next(_numbers)}/step-1"


class TestGcsStore(StoreContract):
    refuses_taken_names = False

    def make_store(self, tmp_path: Path) -> ByteStore:
        return open_place(f"gs://{BUCKET}/gcs-store-{next(_numbers)}")


def _url(place: Path) -> str:
    return f"gs://{BUCKET}/{'/'.join(place.parts[-3:])}"


class TestGcsStorage(StorageContract):
    def make_writer(self, place: Path) -> holdfast.StorageWriter:
        return holdfast.ObjectStoreWriter(_url(place))

    def make_reader(self, place: Path) -> holdfast.StorageReader:
        return holdfast.ObjectStoreReader(_url(place))

    def stored_files(self, place: Path) -> dict[str, bytes]:
        store = open_place(_url(place))
        return {name: bytes(store.read(name, max_bytes=1 << 30)) for name in store.names()}

    def replace_stored_file(self, place: Path, name: str, data: bytes | None) -> None:
        store = open_place(_url(place))
        if data is None:
            store.delete([name])
        else:
            store.replace(name, data)


def test_the_url_alone_is_enough(place: str) -> None:
    holdfast.save(state_of(3.0, 40 << 20), checkpoint_id=place)  # in several parts
    state = state_of(0.0, 40 << 20)
    holdfast.load(state, checkpoint_id=place)
    assert torch.equal(state["a"], state_of(3.0, 40 << 20)["a"])
    holdfast.save(state_of(4.0), checkpoint_id=place)
    assert len(open_place(place).names()) == 2, "the files of the replaced checkpoint are gone"


def test_a_token_of_a_credential_provider_is_sent(
    place: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with GcsGateway(s3_server.endpoint, token="right") as gateway:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", gateway.endpoint)
        right, wrong = (
            (lambda token=token: {"token": token, "expires_at": None}) for token in ("right", "wrong")
        )
        save(place, 1.0, credential_provider=right)
        assert load(place, credential_provider=right) == 1.0
        with pytest.raises(AccessDeniedError, match="credentials"):
            load(place, credential_provider=wrong)


def test_a_save_in_the_background_by_a_process_reaches_it(place: str) -> None:
    by_process = AsyncCheckpointerType.PROCESS
    future = holdfast.async_save(state_of(5.0), checkpoint_id=place, async_checkpointer_type=by_process)
    assert isinstance(future, Future)
    future.result()
    assert load(place) == 5.0


@pytest.mark.parametrize("name", FAULTS)
def test_a_conditional_commit_loses_against_a_rival_and_wins_without(
    proxy: S3Proxy, gateway: GcsGateway, place: str, name: str
) -> None:
    fault, times = FAULTS[name]
    rule = proxy.on(fault, method="PUT", key=METADATA, times=times)
    save(place, 1.0, overwrite=False, client_options=ONCE)
    assert rule.count >= 1
    assert load(place) == 1.0

    contested = f"{place}-contested"
    act, done = rival_for(contested, 7.0, gateway), list[bool]()

    def rival_comes_first(request: object) -> None:
        if (
            not done
            and getattr(request, "method", "") == "PUT"
            and getattr(request, "key", "").endswith(METADATA)
        ):
            done.append(True)
            act(request)

    proxy.rules.clear()
    proxy.rules.append(rival_comes_first)
    proxy.on(fault, method="PUT", key=METADATA, times=times)
    with pytest.raises(CheckpointExistsError, match="overwrite=False"):
        save(contested, 2.0, overwrite=False, client_options=ONCE)
    assert load(contested) == 7.0
    assert len(store_of(contested, gateway).names()) == 2, "the loser's data are gone"
