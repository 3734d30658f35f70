"""Checkpoints in object stores: S3 and what speaks its protocol, Google Cloud Storage, Azure Blob Storage."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast._io.places import open_bucket
from holdfast._io.store import ByteStore
from holdfast._storage.store_reader import StoreReader
from holdfast._storage.store_writer import DEFAULT_BUDGET, StoreWriter
from holdfast.errors import UsageError
from holdfast.extension import ExtensionRegistry, StreamTransformExtension
from holdfast.staging import BlockingAsyncStager

__all__ = ["ObjectStoreReader", "ObjectStoreWriter"]


class _OfBucket:
    """A storage at a URL of an object store, which it reaches with settings of its own."""

    _store: ByteStore
    _settings: dict[str, Any]

    def _open(
        self,
        url: str | os.PathLike[str],
        options: Mapping[str, Any] | None,
        client_options: Mapping[str, Any] | None,
        retry: Mapping[str, Any] | None,
        credential_provider: Callable[[], Any] | None,
    ) -> ByteStore:
        self._settings = {
            "options": dict(options or {}),
            "client_options": dict(client_options or {}),
            "retry": dict(retry or {}),
            "credential_provider": credential_provider,
        }
        return self._open_at(url)

    def _open_at(self, url: str | os.PathLike[str]) -> ByteStore:
        if "://" not in os.fspath(url):
            raise UsageError(
                f"{url}: an object store has a URL, such as s3://bucket/run/step-100", path=str(url)
            )
        return open_bucket(os.fspath(url), **self._settings)

    def _move_to(self, checkpoint_id: str | os.PathLike[str]) -> None:
        self._store = self._open_at(checkpoint_id)


class ObjectStoreWriter(_OfBucket, StoreWriter, BlockingAsyncStager):
    """Writes a checkpoint into an object store.

    ``save(state, checkpoint_id="s3://bucket/run/step-100")`` uses the same with its defaults. Credentials,
    region and endpoint are then found as the tools of the cloud find them: in the environment
    (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ``GOOGLE_APPLICATION_CREDENTIALS``,
    ``AZURE_STORAGE_ACCOUNT_NAME`` and so on), in ``~/.aws``, or from the metadata service of the machine.

    Until ``finish`` the old checkpoint is there, whole; after it, the new one. One put of ``.metadata`` makes
    the difference. With ``overwrite=False`` it is conditional: of several writers one succeeds, and the
    others raise CheckpointExistsError. Data is uploaded in parts of 8 MiB, ten at a time.

    Args:
        url: ``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``az://container/prefix``.
        single_file_per_rank: One object for each thread of a rank. False: an object for each item.
        thread_count: How many objects a rank uploads at the same time.
        overwrite: Whether a checkpoint that is there may be replaced.
        _extensions: Stream transforms that each item goes through.
        options: Settings of the store, by the names of obstore's ``S3Config``, ``GCSConfig`` and
            ``AzureConfig``: ``region``, ``endpoint``, ``access_key_id``, ``server_side_encryption`` ...
            On S3, ``checksum_algorithm`` is what the server compares: CRC64NVME on AWS, SHA256 elsewhere,
            None for nothing.
        client_options: Settings of the HTTP client, by the names of obstore's ``ClientConfig``: ``timeout``
            (of a whole request), ``read_timeout`` (of a stalled one), ``proxy_url``, ``root_certificate`` ...
        retry: How failed requests are tried again, by the names of obstore's ``RetryConfig``:
            ``max_retries``, ``retry_timeout``, ``backoff``.
        credential_provider: A function that returns credentials, for example one of ``obstore.auth``.
        spread_names: Begin the names of data objects with two digits that differ from one to the next, for a
            store that limits the rate of requests for names that begin alike.
        torch_compatible: Write what stock torch needs to read the checkpoint, too.
        memory_budget: The most bytes of memory taken besides the state.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        single_file_per_rank: bool = True,
        thread_count: int = 1,
        overwrite: bool = True,
        _extensions: Sequence[StreamTransformExtension] | None = None,
        options: Mapping[str, Any] | None = None,
        client_options: Mapping[str, Any] | None = None,
        retry: Mapping[str, Any] | None = None,
        credential_provider: Callable[[], Any] | None = None,
        spread_names: bool = False,
        torch_compatible: bool = True,
        memory_budget: int = DEFAULT_BUDGET,
    ) -> None:
        StoreWriter.__init__(
            self,
            self._open(url, options, client_options, retry, credential_provider),
            single_file_per_rank=single_file_per_rank,
            thread_count=thread_count,
            overwrite=overwrite,
            extensions=tuple(_extensions or ()),
            torch_compatible=torch_compatible,
            memory_budget=memory_budget,
            spread_names=spread_names,
        )
        BlockingAsyncStager.__init__(self)


class ObjectStoreReader(_OfBucket, StoreReader):
    """Reads a checkpoint from an object store, ours or torch's.

    Only the needed bytes are asked for, by ranges of up to 16 MiB, eight at a time. Every byte of Holdfast's
    checkpoints is checked; bytes that were changed on their way are asked for once more.

    Args:
        url: As for ``ObjectStoreWriter``, and so are ``options``, ``client_options``, ``retry`` and
            ``credential_provider``.
        _extension_registry: Knows stream transforms besides the built-in ones.
        thread_count: How many requests are under way at the same time; 8 by default.
        memory_budget: The most bytes of memory taken besides the state.
        verify: Compare checksums. False finds no damage.
        allow_pickle: Let planner data in the metadata be unpickled freely, running what code it holds.
        share_reads: Ask the store once for what several ranks need; the rank that reads passes it on.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        _extension_registry: ExtensionRegistry | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        client_options: Mapping[str, Any] | None = None,
        retry: Mapping[str, Any] | None = None,
        credential_provider: Callable[[], Any] | None = None,
        thread_count: int | None = None,
        memory_budget: int = DEFAULT_BUDGET,
        verify: bool = True,
        allow_pickle: bool = False,
        share_reads: bool = True,
    ) -> None:
        StoreReader.__init__(
            self,
            self._open(url, options, client_options, retry, credential_provider),
            registry=_extension_registry or ExtensionRegistry(),
            thread_count=thread_count,
            memory_budget=memory_budget,
            verify=verify,
            allow_pickle=allow_pickle,
            share_reads=share_reads,
        )
