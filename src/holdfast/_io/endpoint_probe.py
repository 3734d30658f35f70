"""Finds out whether a server listens at the endpoint of an object store, before the first request.

obstore tries a request for half a minute and longer if nobody listens. That is right for a server that was
there a moment ago, and wrong for an address with a typing error.
"""

import socket
import time
import urllib.request
from urllib.parse import urlsplit

from holdfast.errors import StorageError

_PAUSES = (0.25, 0.75, 1.5)
"""Seconds between attempts: a server that is just being restarted is not missed at once."""
_SECONDS_TO_CONNECT = 5.0

_asked: set[str] = set()


def expect_listener(endpoint: str, *, path: str) -> None:
    """Raise if the endpoint's host is unknown or refuses connections. A process asks each endpoint once.

    Anything else, such as a host that does not answer, is left to the first request. So is an endpoint that
    is reached through a proxy of the environment.

    Args:
        endpoint: Its URL.
        path: What is wanted there, for the message.

    Raises:
        StorageError: Nobody listens; tried for about three seconds.
    """
    if endpoint in _asked:
        return
    url = urlsplit(endpoint)
    host, port = url.hostname, url.port or (443 if url.scheme == "https" else 80)
    if host is not None and not _has_proxy(url.scheme, host):
        _connect(endpoint, host, port, path)
    _asked.add(endpoint)


def _connect(endpoint: str, host: str, port: int, path: str) -> None:
    for pause in (*_PAUSES, None):
        try:
            socket.create_connection((host, port), _SECONDS_TO_CONNECT).close()
        except (ConnectionRefusedError, socket.gaierror) as error:  # noqa: PERF203 - four attempts at most
            if pause is None:
                raise StorageError(
                    f"{path}: nobody listens at {endpoint}: {error.strerror}. Start the server, or correct "
                    "the endpoint (AWS_ENDPOINT_URL, AWS_REGION, the options of the reader or writer).",
                    path=path,
                ) from error
            time.sleep(pause)
        except OSError:
            return
        else:
            return


def _has_proxy(scheme: str, host: str) -> bool:
    proxies = urllib.request.getproxies()
    return bool(proxies.get(scheme) or proxies.get("all")) and not urllib.request.proxy_bypass(host)
