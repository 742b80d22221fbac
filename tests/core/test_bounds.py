"""Types of settings: numbers within their bounds, and errors that carry data."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from embodied.core.bounds import Bound, Count, CountOrZero, Fraction, Number, Positive
from embodied.core.build import ConfigError, parse, resolve
from embodied.core.complete_node import require_settings
from embodied.core.config_fields import in_words, settings_of
from embodied.core.policy import Policy


@dataclass(frozen=True)
class Inner:
    """Settings inside of settings."""

    rate: Positive = 1.0


@dataclass(frozen=True)
class Config:
    """One setting of each form."""

    gamma: Fraction = 0.99
    hidden: tuple[Count, ...] = (256, 256)
    subset: Count | None = None
    weights: dict[str, Number] = field(default_factory=dict[str, float])
    limit: Annotated[float, Bound(0.1, 50.0)] = 5.0
    span: tuple[CountOrZero, CountOrZero] = (0, 1)
    scale: Positive | Literal["auto"] = "auto"
    inner: Inner = field(default_factory=Inner)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"gamma": 99}, "gamma=99 should be at least 0, at most 1"),
    ({"gamma": -0.1}, "gamma=-0.1 should be at least 0, at most 1"),
    ({"gamma": float("nan")}, "gamma=nan should be at least 0, at most 1"),
    ({"hidden": [64, 0]}, "hidden=0 should be at least 1"),
    ({"subset": 0}, "subset=0 should be at least 1"),
    ({"weights": {"a": float("inf")}}, "weights=inf should be a finite number"),
    ({"limit": 50.1}, "limit=50.1 should be at least 0.1, at most 50"),
    ({"span": [-1, 2]}, "span=-1 should be at least 0"),
    ({"scale": 0}, "scale=0 should be above 0"),
    ({"inner": {"rate": -1}}, "inner.rate=-1 should be above 0"),
]


@pytest.mark.parametrize(("settings", "line"), WRONG)
def test_a_number_out_of_its_bound_is_refused(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(Config, settings, "here")
    assert str(refused.value) == f"here: {line}"
    key = line.partition("=")[0].rpartition(".")[2]
    assert refused.value.key == key and isinstance(refused.value.allowed, Bound)


def test_numbers_within_their_bounds_are_taken() -> None:
    made = parse(
        Config,
        {"gamma": 1, "hidden": [1], "subset": None, "limit": 50, "scale": "auto", "weights": {}},
        "here",
    )
    assert made == Config(gamma=1.0, hidden=(1,), limit=50.0) and isinstance(made.gamma, float)


def test_errors_carry_data() -> None:
    with pytest.raises(ConfigError) as found:
        parse(Config, {"gama": 1}, "here")
    error = found.value
    assert (error.key, error.hint) == ("gama", "gamma") and "hidden" in error.allowed
    with pytest.raises(ConfigError) as found:
        parse(Config, {"hidden": 3}, "here")
    assert (found.value.key, found.value.value, found.value.allowed) == ("hidden", 3, "list")
    with pytest.raises(ConfigError) as found:
        parse(Config, {"scale": "atuo"}, "here")
    assert (found.value.key, found.value.allowed, found.value.hint) == ("scale", ("auto",), "auto")
    with pytest.raises(ConfigError) as found:
        resolve("embodied.policies.gaussian.Gausian", Policy)
    assert (found.value.key, found.value.hint) == ("_target_", "Gaussian")


MODULE = '''
"""A learner of a user."""
from dataclasses import dataclass
from typing import Literal
from embodied.core.bounds import Count, Fraction
import some.library as lib

Aim = Literal["min", "mean"]

@dataclass(frozen=True)
class Inner:
    """Inside."""
    size: Count = 1  # of it

@dataclass(frozen=True)
class Config:
    """Settings."""

    gamma: Fraction = 0.99  # discount per environment step
    hidden: tuple[Count, ...] = (256, 256)  # units of the hidden layers
    aim: Aim | None = None  # what is taken of the critics
    inner: Inner = Inner()  # more
    kind: lib.Kind | None = None  # of a library

class Own:
    def __init__(self, config: Config) -> None:
        raise RuntimeError("it is not imported")

raise RuntimeError("it is not imported")
'''


def test_bounds_are_read_without_importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bounded_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("embodied.core.build.ALLOWED", ["bounded_module."])
    node = {"_target_": "bounded_module.Own", "gamma": 0.5, "hidden": [3], "aim": "min"}
    require_settings("learner", node | {"inner": {"size": 3}, "kind": "anything"})
    for settings, line in (
        ({"gamma": 99}, "learner.gamma=99 should be at least 0, at most 1"),
        ({"hidden": [0]}, "learner.hidden=0 should be at least 1"),
        ({"aim": "men"}, "learner.aim='men' is not allowed (did you mean \"mean\"?)"),
        ({"hidden": 3}, "learner.hidden=3 should be a list: [3], or [3,3]"),
    ):
        with pytest.raises(ConfigError) as refused:
            require_settings("learner", node | settings)
        assert str(refused.value) == line
    found = {each.name: each for each in settings_of("bounded_module.Own") or []}
    assert found["gamma"].says == "discount per environment step"
    words = [in_words(each.kind) for each in found.values()]
    assert words[:3] == [
        "float, at least 0, at most 1",
        "list of int, at least 1",
        "min | mean; or null",
    ]
