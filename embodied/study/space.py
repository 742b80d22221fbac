"""The settings that a sweep tries, as they are typed: `learner.lr=log:1e-4..1e-3`.

1e-4..1e-3        a number between          log:1e-4..1e-3    the same, evenly in its logarithm
16..64            a whole number between    log:16..1024      the same, evenly in its logarithm
choice:64,128     one of these              choice:[64],[256,256]
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from embodied.core.bounds import Number
from embodied.core.build import ConfigError

NUMBER = r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"
RANGE = re.compile(rf"^(?:(log|int):)?({NUMBER})\.\.({NUMBER})$")
WHOLE = re.compile(r"^-?\d+$")


@dataclass(frozen=True)
class Searched:
    """A setting and its values, which are choices or a range."""

    key: str  # the setting
    choices: tuple[str, ...] = ()  # its values as they are typed (empty: a range)
    low: Number = 0.0  # begin of the range
    high: Number = 0.0  # end of the range
    log: bool = False  # even in the logarithm
    whole: bool = False  # whole numbers only

    def suggest(self, trial: Any) -> str:
        """The value that an Optuna trial chooses, as it is typed."""
        if self.choices:
            return str(trial.suggest_categorical(self.key, self.choices))
        if self.whole:
            return str(trial.suggest_int(self.key, int(self.low), int(self.high), log=self.log))
        return repr(float(trial.suggest_float(self.key, self.low, self.high, log=self.log)))


def searched(word: str) -> Searched | None:
    """What `word` searches; None for an ordinary setting. ConfigError for a wrong range."""
    key, _, text = word.partition("=")
    if text.startswith("choice:"):
        choices = tuple(split(text.removeprefix("choice:")))
        if len(choices) < 2:
            raise ConfigError(f"{word}: a choice has at least two values: {key}=choice:A,B")
        return Searched(key, choices)
    if ".." not in text or text.startswith(("/", ".")):
        return None
    if (found := RANGE.match(text)) is None:
        if text.startswith(("log:", "int:")):
            raise ConfigError(f"{word} should be {key}={text[:4]}LOW..HIGH")
        return None
    kind, low, high = found[1], float(found[2]), float(found[3])
    whole = kind == "int" or bool(WHOLE.match(found[2]) and WHOLE.match(found[3]))
    if low >= high or (kind == "log" and low <= 0):
        least = "0 < LOW < HIGH" if kind == "log" else "LOW < HIGH"
        raise ConfigError(f"{word}: a range needs {least}")
    return Searched(key, low=low, high=high, log=kind == "log", whole=whole)


def split(text: str) -> list[str]:
    """The parts between commas outside of brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part]
