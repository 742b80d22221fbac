"""Plugins: the stand-in has none."""


def register_third_party_plugins() -> None:
    """As LeRobot's."""
