"""The Ray cluster that a run or a sweep uses; imports no torch."""

from __future__ import annotations

import logging
import os
import socket
from importlib import import_module
from typing import Any

from embodied.core.build import ConfigError

CONNECT = 5.0  # s


def imported(setting: str) -> Any:
    """The module `ray`, which sends no usage statistics unless the user's environment says so;
    ConfigError names the `setting` that needs it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        return import_module("ray")
    except ModuleNotFoundError as error:
        raise ConfigError(f'{setting} needs Ray: pip install "embodied-rl[ray]"') from error


def connected(ray: Any) -> bool:
    """Connect to the cluster of RAY_ADDRESS ("auto": this machine's), else start one here. False if
    this process had one already; ConfigError if there is none."""
    if ray.is_initialized():
        return False
    address = os.environ.get("RAY_ADDRESS", "")
    options = {"include_dashboard": False, "log_to_driver": False}
    try:
        host, _, port = address.rpartition(":")
        if port.isdigit() and "/" not in host:  # where nobody answers, Ray would try for minutes
            socket.create_connection((host, int(port)), timeout=CONNECT).close()
        ray.init(address or "local", logging_level=logging.WARNING, **options)
    except (OSError, RuntimeError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"no Ray cluster at {address or 'this machine'} ({first}): RAY_ADDRESS=HOST:PORT, "
            "as `ray start --head` shows it, and the cluster's RAY_AUTH_MODE and RAY_AUTH_TOKEN"
        ) from error
    return True
