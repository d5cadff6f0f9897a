"""Checks that a host name resolves, before a rendezvous waits for that host until its timeout."""

import socket
import time
from collections.abc import Callable

RETRY_SECONDS = 30.0
"""DNS entries of a cluster's pods may appear seconds after the pods."""


def require_resolvable(
    host: str, setting: str, *, warn: Callable[[str], None], retry_seconds: float = RETRY_SECONDS
) -> None:
    """Wait up to ``retry_seconds`` until ``host`` resolves.

    Args:
        host: a name or an address.
        setting: the setting with this value, such as ``MASTER_ADDR``, for messages.
        warn: called once with a line, if the name does not resolve at first.
        retry_seconds: how long to wait for DNS.

    Raises:
        ValueError: the name does not resolve.
    """
    deadline, warned = time.monotonic() + retry_seconds, False
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() >= deadline:
            raise ValueError(
                f"{setting} is {host}, which does not resolve on {socket.gethostname()} "
                f"({reason}); give the name or the address of the node whose NODE_RANK is 0"
            )
        if not warned:
            warn(f"{setting} {host} does not resolve ({reason}); retrying for {retry_seconds:g} s")
            warned = True
        time.sleep(min(1.0, retry_seconds))
