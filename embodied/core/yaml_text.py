"""YAML that a person has written: a mistake in it is one line."""

from __future__ import annotations

from typing import Any

import yaml

from embodied.core.build import ConfigError


def parse_yaml(text: str, where: str) -> Any:
    """What a YAML text holds; ConfigError that names `where` (its file) and the line."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{where} is not YAML{line}: {problem}") from error
    except (ValueError, RecursionError) as error:  # a date that is none; nested without end
        raise ConfigError(f"{where} is not YAML: {str(error).splitlines()[0]}") from error
