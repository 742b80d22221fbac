"""UpdateRatio: a schedule of `data.utd_ratio`, the updates per stored transition, by the metrics.

`SwitchWhenSteady` is the schedule of the adaptive replay ratio (Ma et al., 2024, "Revisiting
plasticity in visual reinforcement learning"). A high ratio from the start costs a critic the
ability to fit new targets; later it saves environment steps. The fraction of the critic's active
units (hidden units above 0) falls while that ability is lost. Once it changes no more, the ratio
is raised, for good. The metric with that fraction comes from the learner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from embodied.core.bounds import Count, CountOrZero, NonNegative
from embodied.core.build import ConfigError, unknown
from embodied.core.remembered import Remembered


class UpdateRatio(Protocol):
    """A schedule of the number of updates per stored transition, with a state to resume from."""

    def ratio(self, metrics: Mapping[str, Tensor]) -> float:
        """The ratio (at least 0) from now on. It is called once before the first update, with no
        metrics, then after each environment step with updates: `metrics` are 0-d tensors of the
        last of them, as `update` of the learner and of the reward return them. Reading a tensor's
        value waits for the device."""
        ...

    def get_state(self) -> dict[str, Any]: ...
    def set_state(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Config:
    """Settings of the switch; the defaults are for DrQ-v2 with episodes of 1,000 frames."""

    metric: str = "active_units"  # the metric that is watched, as update returns it
    low: NonNegative = 0.5  # updates per transition before the switch
    high: NonNegative = 2.0  # updates per transition after it
    threshold: NonNegative = 1e-3  # largest change between two checks that counts as steady
    every: Count = 12_500  # calls between two checks (50 episodes of 250 updates)
    window: Count = 1_250  # calls before a check of which the metric is averaged (5 episodes)
    earliest: CountOrZero = 0  # calls before which the switch is not made


class SwitchWhenSteady(Remembered, UpdateRatio):
    """`low` until the mean of a metric changes by at most `threshold` from one check to the next,
    then `high`."""

    remembered = ("calls", "switched", "sum", "previous")

    def __init__(self, config: Config) -> None:
        if config.window > config.every:
            raise ConfigError(
                f"utd_ratio.window={config.window} should be at most every={config.every}"
            )
        self.config = config
        self.calls = 0
        self.switched = False
        self.sum = torch.zeros(())  # of the metric since the window began, on the metrics' device
        self.previous: float | None = None  # the mean at the last check

    def ratio(self, metrics: Mapping[str, Tensor]) -> float:
        if metrics and not self.switched:
            self._watch(metrics)
        return self.config.high if self.switched else self.config.low

    def _watch(self, metrics: Mapping[str, Tensor]) -> None:
        config = self.config
        if config.metric not in metrics:
            line = f"data.utd_ratio: this learner reports no metric {config.metric}"
            raise unknown(line, config.metric, metrics, key="metric")
        self.calls += 1
        position = (self.calls - 1) % config.every + 1  # from 1 to `every`
        if position > config.every - config.window:
            value = metrics[config.metric].detach().float()
            self.sum = self.sum.to(value.device) + value
        if position < config.every:
            return
        mean = self.sum.item() / config.window
        steady = self.previous is not None and abs(mean - self.previous) <= config.threshold
        self.switched = steady and self.calls >= config.earliest
        self.previous, self.sum = mean, torch.zeros_like(self.sum)
