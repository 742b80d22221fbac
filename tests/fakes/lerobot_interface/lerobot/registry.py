"""Configurations by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Registry:
    """As draccus' ChoiceRegistry, as far as it is used here."""

    known: dict[str, Any]

    def __init_subclass__(cls) -> None:
        if "known" not in vars(cls) and Registry in cls.__bases__:
            cls.known = {}

    @classmethod
    def get_known_choices(cls) -> dict[str, Any]:
        return cls.known

    @classmethod
    def get_choice_class(cls, name: str) -> Any:
        return cls.known[name]

    @classmethod
    def register_subclass(cls, name: str) -> Callable[[Any], Any]:
        def register(made: Any) -> Any:
            cls.known[name] = made
            return made

        return register
