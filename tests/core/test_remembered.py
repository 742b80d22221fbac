"""States come back from a checkpoint file, which holds weights only; nothing is shared."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from embodied.checks.check import from_file
from embodied.core.remembered import Remembered, pack, unpack
from embodied.nn.running_stats import RunningMeanStd


@dataclass(frozen=True)
class Fit:
    error: float = 0.0
    sums: list[float] = field(default_factory=list)


class Base(Remembered):
    remembered = ("count", "random")

    def __init__(self) -> None:
        self.count = 0
        self.random = np.random.default_rng(0)


class Part(Base):
    remembered = ("net", "adam", "generator", "moments", "fit", "said", "recent", "points", "rows")

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.adam = torch.optim.Adam(self.net.parameters())
        self.generator = torch.Generator().manual_seed(0)
        self.moments = {"a": RunningMeanStd(1)}
        self.fit = Fit()
        self.said: Counter[str] = Counter()
        self.recent: deque[float] = deque(maxlen=2)
        self.points: dict[int, tuple[Any, str]] = {}
        self.rows = torch.zeros(0)

    def use(self) -> None:
        self.count += 1
        self.adam.zero_grad()
        self.net(torch.rand(3, 2, generator=self.generator)).sum().backward()
        self.adam.step()
        self.moments["a"].update(torch.rand(4, 1, generator=self.generator))
        self.fit = Fit(self.random.random(), [1.0])
        self.said["word"] += 1
        self.recent.append(self.random.random())
        self.points[self.count] = (self.random.random(2), "memo")
        self.rows = torch.rand(self.count, 2, generator=self.generator)


def test_it_goes_on_as_before() -> None:
    one, two = Part(), Part()
    for _ in range(3):
        one.use()
    state = one.get_state()
    assert set(state) == {*Base.remembered, *Part.remembered}
    two.set_state(from_file(state))
    for _ in range(2):
        one.use()
        two.use()
    assert torch.equal(one.net.weight, two.net.weight) and torch.equal(one.rows, two.rows)
    assert one.fit == two.fit and one.said == two.said == Counter(word=5)
    assert one.recent == two.recent and two.recent.maxlen == 2
    assert one.points[4][0].tolist() == two.points[4][0].tolist()
    assert one.points[1][0].tolist() == two.points[1][0].tolist()
    assert torch.equal(one.moments["a"].mean, two.moments["a"].mean)


def test_a_state_does_not_change_with_its_object() -> None:
    one, two = Part(), Part()
    one.use()
    state = one.get_state()
    weight, rows = state["net"]["weight"].clone(), state["rows"].clone()
    two.set_state(state)
    one.use()
    two.use()
    assert torch.equal(state["net"]["weight"], weight) and torch.equal(state["rows"], rows)
    assert state["count"] == 1 and len(state["points"]) == 1


def test_what_a_checkpoint_cannot_hold_is_refused() -> None:
    part = Base()
    part.count = {1, 2}  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError, match="cannot hold a set"):
        part.get_state()


def test_what_is_packed_comes_back_from_a_file_loaded_weights_only(tmp_path: Path) -> None:
    state = {
        "random": np.random.Generator(np.random.PCG64(3)).bit_generator.state,
        3: (np.arange(6.0).reshape(2, 3), "memo", None, True),
        "window": deque([np.float64(0.5), 2], maxlen=5),
        "empty": [np.zeros((0, 4)), torch.ones(2)],
        "number": np.int64(7),
    }
    torch.save(pack(state), tmp_path / "state.pt")
    back = unpack(torch.load(tmp_path / "state.pt", weights_only=True))
    assert back["random"] == state["random"]
    assert (back[3][0] == state[3][0]).all() and back[3][1:] == ("memo", None, True)
    assert back["window"] == deque([0.5, 2], maxlen=5) and back["window"].maxlen == 5
    assert back["empty"][0].shape == (0, 4) and (back["empty"][1] == 1).all()
    assert back["number"] == 7 and type(back["number"]) is int
