"""Tests with the real LeRobot and openpi-client; run in the environment of scripts/interop.sh."""

import importlib.util

import pytest


def need(*packages: str) -> None:
    """Skip the module that calls this where one of `packages` is not installed."""
    for name in packages:
        if importlib.util.find_spec(name) is None:
            pytest.skip(
                f"{name} is not installed here; run: sh scripts/interop.sh && "
                "${INTEROP:-.venv-interop}/bin/python -m pytest tests/interop",
                allow_module_level=True,
            )
