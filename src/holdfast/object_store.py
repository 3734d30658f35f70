"""Checkpoints in object stores: S3 and what speaks its protocol, Google Cloud Storage, Azure Blob Storage."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from holdfast._io.places import open_bucket
from holdfast._storage.store_reader import StoreReader
from holdfast._storage.store_writer import StoreWriter
from holdfast.errors import UsageError
from holdfast.extension import ExtensionRegistry, StreamTransformExtension
from holdfast.staging import BlockingAsyncStager

__all__ = ["ObjectStoreReader", "ObjectStoreWriter"]


@dataclass(eq=False, repr=False)
class _OfBucket:
    """A storage at a URL of an object store, which it reaches with settings of its own."""

    url: str | os.PathLike[str]
    _: KW_ONLY
    options: Mapping[str, Any] | None = None
    client_options: Mapping[str, Any] | None = None
    retry: Mapping[str, Any] | None = None
    credential_provider: Callable[[], Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc] # that of the storage over a store
        self._move_to(self.url)

    def _move_to(self, checkpoint_id: str | os.PathLike[str]) -> None:
        if "://" not in os.fspath(checkpoint_id):
            raise UsageError(
                f"{checkpoint_id}: an object store has a URL, such as s3://bucket/run/step-100",
                path=str(checkpoint_id),
            )
        self._store = open_bucket(
            os.fspath(checkpoint_id),
            options=dict(self.options or {}),
            client_options=dict(self.client_options or {}),
            retry=dict(self.retry or {}),
            credential_provider=self.credential_provider,
        )


@dataclass(eq=False, repr=False)
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

    _: KW_ONLY
    _extensions: Sequence[StreamTransformExtension] | None = None
    # Those of the base that are no arguments here:
    _store: Any = field(init=False, default=None)
    sync_files: bool = field(init=False, default=True)
    extensions: Sequence[StreamTransformExtension] = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.extensions = tuple(self._extensions or ())
        BlockingAsyncStager.__init__(self)


@dataclass(eq=False, repr=False)
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

    _extension_registry: ExtensionRegistry | None = None
    # Those of the base that are no arguments here:
    _store: Any = field(init=False, default=None)
    registry: ExtensionRegistry = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.registry = self._extension_registry or ExtensionRegistry()
