"""MuJoCo is compiled and brings no types."""

from typing import Any

def __getattr__(name: str) -> Any: ...
