"""Owns the way from the URL of an object store to a client for it: credentials, endpoint, timeouts.

The client is obstore's. It finds credentials as the tools of the clouds do: in the environment, in files that
the environment names, and from the metadata service of the machine. Profiles of AWS (``~/.aws``), which it
does not read, are read here.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import obstore.store

from holdfast._io.aws_profile import boto3_credentials, read_aws_profile
from holdfast.errors import StorageError, UsageError

CLASSES = {
    **dict.fromkeys(("s3", "s3a"), "S3Store"),
    **dict.fromkeys(("gs", "gcs"), "GCSStore"),
    **dict.fromkeys(("az", "azure", "adl", "abfs", "abfss"), "AzureStore"),
}
"""Which of obstore's classes serves which URLs. ``places.STORES`` has the same schemes, without obstore."""

# The total time of a request must be enough for a part of 8 MiB on a slow link that ten of them share.
_CLIENT = {"timeout": "15min", "read_timeout": "2min", "connect_timeout": "10s"}
# obstore's own waits are so short that its ten retries may be over after 1.4 s, when a server that was killed
# is not back yet.
_RETRY: dict[str, Any] = {
    "max_retries": 30,
    "retry_timeout": timedelta(minutes=3),
    "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=5), "base": 2},
}
_DEFAULT_REGION = "us-east-1"
_ENDPOINTS = {
    "S3Store": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "GCSStore": ("STORAGE_EMULATOR_HOST", "GOOGLE_BASE_URL"),
    "AzureStore": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
# Where credentials of AWS come from if not from a profile, as obstore looks for them.
_AWS_SOURCES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_PREFIXES = {"S3Store": "aws_", "GCSStore": "google_", "AzureStore": "azure_storage_"}

_KEY_NAMES = ("access_key_id", "secret_access_key", "session_token")

_first_process: int | None = None


class S3Keys(NamedTuple):
    """The keys that requests to S3 are signed with."""

    access_key_id: str
    secret_access_key: str
    token: str | None = None

    def as_options(self) -> dict[str, str]:
        """The keys as settings of obstore's store."""
        return {name: value for name, value in zip(_KEY_NAMES, self, strict=True) if value}


@dataclass(frozen=True)
class BucketAccess:
    """How to reach the bucket of a URL. It can be pickled if the credential provider can.

    Attributes:
        url: The URL of a place in the bucket.
        options: Settings of obstore's store: ``region``, ``endpoint``, ``access_key_id`` and others.
        client_options: Settings of its HTTP client: timeouts, proxies, certificates.
        retry: How often and how long failed requests are tried again.
        credential_provider: A function that returns credentials, as obstore defines it.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict)
    client_options: Mapping[str, Any] = field(default_factory=dict)
    retry: Mapping[str, Any] = field(default_factory=dict)
    credential_provider: Callable[[], Any] | None = None

    def __post_init__(self) -> None:
        if not self.bucket:
            raise UsageError(f"{self.url} names no bucket: write s3://bucket/run/step-100", path=self.url)
        if self.prefix and {"", ".", ".."} & set(self.prefix.split("/")):
            raise UsageError(
                f"{self.url}: a URL of an object store has no '.', no '..' and no empty name between its "
                "slashes; write the names of the objects as the store has them",
                path=self.url,
            )

    @property
    def kind(self) -> str:
        """The name of obstore's class."""
        return CLASSES[urlsplit(self.url).scheme]

    @property
    def bucket(self) -> str:
        """The bucket, or the container."""
        return urlsplit(self.url).netloc

    @property
    def prefix(self) -> str:
        """What the names of all objects of the place begin with, before a slash."""
        _, _, rest = self.url.partition("://")
        return rest.partition("/")[2].strip("/")

    @property
    def endpoint(self) -> str | None:
        """The address of the service, if it is not the cloud's own."""
        for name in ("endpoint", "endpoint_url", "aws_endpoint_url_s3", "base_url"):
            if found := self.option(name):
                return str(found)
        found = next((os.environ[name] for name in _ENDPOINTS[self.kind] if os.environ.get(name)), None)
        return found or (self.profile.get("endpoint_url") if self.kind == "S3Store" else None)

    @property
    def address(self) -> str | None:
        """The address of the service; None for a cloud that has one for each account."""
        if self.endpoint is not None or self.kind != "S3Store":
            return self.endpoint
        return f"https://s3.{self.region}.amazonaws.com"

    @property
    def region(self) -> str:
        """The region of S3."""
        found = self.option("region") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        return str(found or self.profile.get("region") or _DEFAULT_REGION)

    @property
    def profile(self) -> dict[str, str]:
        """The profile of AWS in ``~/.aws``; empty if there is none."""
        return read_aws_profile(must_exist=not self._has_credentials)

    @property
    def _has_credentials(self) -> bool:
        """Whether credentials of AWS come from elsewhere than a profile, or are not wanted."""
        given = self.option("access_key_id") or self.option("skip_signature") or self.credential_provider
        return bool(given) or any(os.environ.get(name) for name in _AWS_SOURCES)

    def option(self, name: str) -> Any:
        """A setting, whether it is given with the prefix that obstore also accepts or without."""
        return self.options.get(name, self.options.get(_PREFIXES[self.kind] + name))

    def settled(self) -> "BucketAccess":
        """The same with what the environment of this process says, for another process."""
        if self.kind != "S3Store":
            return self
        found: dict[str, Any] = {"region": self.region, "endpoint": self.endpoint}
        keys = None if self.credential_provider else self.s3_keys()
        found |= keys.as_options() if keys else {}
        missing = {name: value for name, value in found.items() if value and self.option(name) is None}
        return replace(self, options={**self.options, **missing})

    def s3_keys(self) -> S3Keys | None:
        """The keys of S3, for requests that obstore cannot make; None if only obstore can find them."""
        if self.kind != "S3Store":
            return None
        if self.credential_provider is not None:
            found = self.credential_provider()
            if not isinstance(found, dict):
                return None
            return S3Keys(found["access_key_id"], found["secret_access_key"], found.get("token"))
        profile = {} if self._has_credentials else self.profile
        sources: tuple[tuple[Callable[[str], Any], str], ...] = (
            (self.option, "{}"),
            (lambda name: os.environ.get(name.upper()), "aws_{}"),
            (profile.get, "aws_{}"),
        )
        for get, form in sources:
            key, secret, token = (get(form.format(name)) for name in _KEY_NAMES)
            if key:
                return S3Keys(str(key), str(secret or ""), token)
        return None

    def open(self) -> Any:
        """Obstore's store of the place.

        Raises:
            UsageError: obstore does not know an option, or does not accept the URL.
            StorageError: This process was forked from one that uses obstore.
        """
        refuse_forked_process()
        store_class = getattr(obstore.store, self.kind)
        config = dict(self.options)
        provider = self.credential_provider
        endpoint = self.endpoint
        self._check_address(endpoint)
        if self.kind == "S3Store":
            provider = self._add_s3_settings(config, endpoint)
        elif endpoint and self.kind == "GCSStore":
            config.pop("endpoint", None)  # obstore's name for it is another one here
            config.setdefault("base_url", endpoint if "://" in endpoint else f"http://{endpoint}")
        self._check_retry()
        client = {**_CLIENT, **self.client_options}
        if endpoint and not endpoint.startswith("https://"):
            client.setdefault("allow_http", True)
        scheme, _, rest = self.url.partition("://")
        scheme = "gs" if scheme == "gcs" else scheme  # the only one that fsspec knows and obstore does not
        bucket, _, key = rest.partition("/")
        try:
            return store_class.from_url(
                f"{scheme}://{bucket}/{quote(key.strip('/'))}",
                config=config,
                client_options=client,
                retry_config={**_RETRY, **self.retry},
                credential_provider=provider,
            )
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise UsageError(f"{self.url}: the object store cannot be opened: {reason}") from error
        except BaseException as error:
            # obstore's code in Rust breaks off at such names.
            if "config prefix" not in str(error):
                raise
            raise UsageError(
                f"{self.url}: options has a setting of the HTTP client, such as timeout or allow_http: "
                f"pass it in client_options, without a prefix. It has {', '.join(self.options)}",
                path=self.url,
            ) from error

    def _check_retry(self) -> None:
        """Raise UsageError for names that obstore would ignore."""
        for given, known in ((self.retry, _RETRY), (self.retry.get("backoff") or {}, _RETRY["backoff"])):
            for name in given.keys() - known.keys():
                raise UsageError(
                    f"{self.url}: retry has no {name!r}; it has {', '.join(known)}",
                    path=self.url,
                    found=name,
                )

    def _check_address(self, endpoint: str | None) -> None:
        """Raise UsageError for what obstore would ignore, or take for an address and break off at."""
        if self.kind != "AzureStore" and {"@", ":"} & set(self.bucket):
            # Without the URL: it may hold a password.
            raise UsageError(
                f"a URL of an object store has no user, password or port before its bucket, as this one for "
                f"{self.bucket.rpartition('@')[2]} has: pass credentials and the endpoint by the environment "
                "(AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL) or as options"
            )
        if endpoint and not _is_address(endpoint) and self.kind != "GCSStore":
            raise UsageError(
                f"{self.url}: the endpoint {endpoint!r} is no address such as https://host:9000",
                path=self.url,
                found=endpoint,
            )

    def _add_s3_settings(self, config: dict[str, Any], endpoint: str | None) -> Any:
        """Add what obstore does not find by itself to its settings, and return the credential provider."""
        config.setdefault("region", self.region)
        if endpoint:
            config.setdefault("endpoint", endpoint)
        if "checksum_algorithm" not in config and "aws_checksum_algorithm" not in config:
            if endpoint or self.option("unsigned_payload") is not None:
                # The digest that requests are signed with, sent so that every server compares it.
                config["checksum_algorithm"] = "SHA256"
            else:
                # AWS itself checks a CRC, which takes a quarter of the time. Other servers may not know it.
                # TLS keeps strangers from changing the bytes.
                config.update(checksum_algorithm="CRC64NVME", unsigned_payload=True)
        elif not config.get("checksum_algorithm", True):
            del config["checksum_algorithm"]
        if self._has_credentials:
            return self.credential_provider
        if (keys := self.s3_keys()) is not None:
            config.update(keys.as_options())
            return None
        return boto3_credentials(self.url, self.profile)


def _is_address(endpoint: str) -> bool:
    url = urlsplit(endpoint)
    try:
        has_host = bool(url.hostname) and url.port != 0
    except ValueError:
        return False
    return has_host and url.scheme in {"http", "https"} and endpoint.split() == [endpoint]


def refuse_forked_process() -> None:
    """Raise StorageError if this process was forked from one that has used obstore: requests would hang."""
    global _first_process  # noqa: PLW0603 - the one fact about this process that obstore depends on
    if _first_process is None:
        _first_process = os.getpid()
    elif _first_process != os.getpid():
        raise StorageError(
            "this process was forked from one that has used an object store already, and obstore does not "
            'work in such a process. Start it with multiprocessing\'s method "spawn" or "forkserver".'
        )
