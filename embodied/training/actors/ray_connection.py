"""The Ray cluster that a run or a sweep uses; imports no torch."""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
import socket
import sys
from importlib import import_module
from typing import Any

from embodied.core.build import ConfigError

CONNECT = 5.0  # s


def imported(setting: str) -> Any:
    """The module `ray`, which sends no usage statistics unless the user's environment says so;
    ConfigError names the `setting` that needs it. Where RAY_ADDRESS names no cluster, and
    RAY_AUTH_MODE is not set, the one that is started here asks for a token, which is made for it:
    Ray reads these variables when it is imported."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not os.environ.get("RAY_ADDRESS") and "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        if "RAY_AUTH_TOKEN_PATH" not in os.environ:
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    try:
        return import_module("ray")
    except ModuleNotFoundError as error:
        raise ConfigError(f'{setting} needs Ray: pip install "embodied-rl[ray]"') from error


def connected(ray: Any) -> bool:
    """Connect to the cluster of RAY_ADDRESS ("auto": this machine's), else start one here, which
    only this machine reaches. False if this process had one already; ConfigError if there is
    none."""
    if ray.is_initialized():
        return False
    address = os.environ.get("RAY_ADDRESS", "")
    options = {"include_dashboard": False, "log_to_driver": False}
    try:
        host, _, port = address.rpartition(":")
        if port.isdigit() and "/" not in host:  # where nobody answers, Ray would try for minutes
            socket.create_connection((host, int(port)), timeout=CONNECT).close()
        if not address:
            # What Ray does where it has no clusters of machines: its node is 127.0.0.1, and all of
            # it listens there. `_node_ip_address` does not take that address.
            constants: Any = import_module("ray._private.ray_constants")
            constants.ENABLE_RAY_CLUSTER = False
        ray.init(address or "local", logging_level=logging.WARNING, **options)
    except (OSError, RuntimeError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"no Ray cluster at {address or 'this machine'} ({first}): RAY_ADDRESS=HOST:PORT, "
            "as `ray start --head` shows it, and the cluster's RAY_AUTH_MODE and RAY_AUTH_TOKEN"
        ) from error
    here = ray.util.get_node_ip_address()
    if not address and not ipaddress.ip_address(here).is_loopback:
        ray.shutdown()
        raise ConfigError(
            f"Ray {ray.__version__} would listen at {here}, where other machines reach it: install "
            "another version of Ray, or start a cluster with a token and give RAY_ADDRESS=HOST:PORT"
        )
    return True
