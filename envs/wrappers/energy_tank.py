"""EnergyTank: the passivity filter of a real arm in front of an impedance-controlled environment.

Set-point and stiffness that the policy commands are done by a share a in [0, 1] that the tank can
pay for (`embodied.real_robot.safety.energy`). A policy that is trained with it sees the tank,
and pays

    reward - price (cost of what was wanted - cost of what was done)        (price per J)

so that it learns to want what the tank can pay for (Zanella et al., 2024).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from embodied.core.bounds import Fraction, NonNegative, Positive
from embodied.core.build import ConfigError
from embodied.core.env import Step, VecEnv
from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper, find_protocol
from embodied.real_robot.kernel.arm_state import Floats
from embodied.real_robot.safety.energy import SHARES, Held, Tank, TankConfig, stiffer

FROZEN = 0.05  # of what was wanted: less than that is done


@runtime_checkable
class HasImpedance(Protocol):
    """Springs that a policy moves and stiffens: `stiffest` (N/m) and their damping then."""

    stiffest: float
    damped: float

    @property
    def places(self) -> Tensor:
        """The positions of the arms [B, m], m."""
        ...

    @property
    def setpoints(self) -> Tensor:
        """The set-points of the springs [B, m], m."""
        ...

    def impedance(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """Set-points [..., B, m] (m) and stiffness (N/m) that actions [..., B, A] ask for."""
        ...

    def scaled(self, action: Tensor, share: Tensor, stiffness: Tensor) -> Tensor:
        """Actions [..., B, A] that move the set-point by `share` [..., B] of what `action` does,
        with `stiffness` [..., B, m]."""
        ...


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the energy tank."""

    start: NonNegative  # energy at the start of an episode, J
    most: Positive  # largest energy, J
    least: NonNegative  # smallest energy, J
    power: Positive  # most that it gives, W
    share: Fraction = 1.0  # of what damping dissipates that refills it
    seen: bool = True  # observe `tank`: the level in units of `most`, and the last share
    price: NonNegative = 0.0  # reward taken per J that was wanted and not done


class EnergyTank(Wrapper):
    """The log has `frozen` (less than 5% of what was wanted was done, for want of energy), `spent`
    (J drawn from the tank in this step) and `clipped` (J that were wanted and not done)."""

    def __init__(self, config: Config, env: VecEnv) -> None:
        inner = find_protocol(env, HasImpedance)
        if inner is None:
            raise ConfigError("EnergyTank needs an impedance-controlled environment: contact_maze")
        super().__init__(env)
        self.config = config
        self.inner = inner
        if config.seen:
            leaf = Leaf((2,), names=("level", "share"))
            self.spec = replace(env.spec, obs={**env.spec.obs, "tank": leaf})
        tank = TankConfig(
            start=config.start, most=config.most, least=config.least, power=config.power,
            share=config.share,
        )  # fmt: skip
        m = inner.places.shape[1]
        self.high = np.full(m, inner.stiffest)
        held = Held(self.high, np.full(m, inner.damped), np.full(m, np.inf))
        self.tank = Tank(tank, held, self.spec.dt)
        self.tank.begin(self._places(), self.high, 0.0)
        self.shares = torch.ones(self.num_envs)
        self.clock = np.zeros(self.num_envs)
        self._save()

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        obs = self.env.reset(seed, task, mask)
        self._restart(self.rows(mask))
        return self.transform_obs(obs)

    def step(self, action: Tensor) -> Step:
        tank = self.tank
        # A hand or a wall may have led the set-point back since.
        tank.command(self._array(self.inner.setpoints))
        tank.measure(self._places(), self.clock)
        executed, clipped, spent = self._filter(action)
        self.clock = self.clock + self.spec.dt
        step = self.env.step(executed)
        self._save()
        following = self.transform_obs(step.next_obs)
        log = {**step.log, "clipped": clipped, "spent": spent.clamp(min=0)}
        log["frozen"] = (self.shares < FROZEN) & (clipped > 0)
        reward = step.reward - self.config.price * clipped
        self._restart(step.ended)
        obs = self.transform_obs(step.obs)
        return replace(step, obs=obs, next_obs=following, reward=reward, log=log)

    def _filter(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(what the tank pays for [B, A], J [B] that were wanted and not done, J [B] done)."""
        tank = self.tank
        rows = np.arange(self.num_envs)
        tries, places, stiff, cost = self._cost_of_shares(action, SHARES[:1])
        asked = cost[0]
        budget = tank.budget(self.spec.dt)
        if (asked > budget).any():
            tries, places, stiff, cost = self._cost_of_shares(action, SHARES)
        fine = cost <= budget
        fine[-1] = True
        chosen = fine.argmax(0)
        tank.command(places[chosen, rows], stiff[chosen, rows])
        self.shares = torch.from_numpy(SHARES[chosen]).float()
        done = cost[chosen, rows]
        clipped = torch.from_numpy(np.maximum(asked - done, 0.0)).float()
        return tries[chosen, rows], clipped, torch.from_numpy(done).float()

    def _cost_of_shares(
        self, action: Tensor, shares: Floats
    ) -> tuple[Tensor, Floats, Floats, Floats]:
        """Try `shares` [G] of `action`; returns actions [G, B, A], set-points and stiffness [G, B,
        m], and what they cost [G, B], J."""
        inner = self.inner
        wanted = self._array(inner.impedance(action)[1])
        stiff = stiffer(self.tank.stiffness, wanted, shares[:, None, None])
        each = torch.from_numpy(shares).float()[:, None].expand(-1, self.num_envs)
        actions = action.expand(len(shares), *action.shape)
        tries = inner.scaled(actions, each, torch.from_numpy(stiff).float())
        places = self._array(inner.impedance(tries)[0])
        return tries, places, stiff, self.tank.cost(places, stiff)

    def transform_obs(self, obs: Tensors) -> Tensors:
        if not self.config.seen:
            return obs
        level = torch.from_numpy(self.tank.level / self.config.most).float()
        return {**obs, "tank": torch.stack([level, self.shares], 1)}

    def set_state(self, state: Tensors) -> Tensors:
        obs = super().set_state(state)
        self.tank.set_state({name: value.numpy() for name, value in self.memory.items()})
        self.shares, self.clock = self.memory["shares"], self.memory["clock"].numpy()
        return self.transform_obs(obs)

    def _restart(self, rows: Tensor) -> None:
        """A full tank for the episodes that begin in `rows` [B] (bool)."""
        if rows.any():
            self.tank.restart(rows.numpy(), self._places(), self.high)
            self.clock = np.where(rows.numpy(), 0.0, self.clock)
            self.shares = self.shares.masked_fill(rows, 1.0)
            self._save()

    def _save(self) -> None:
        books = {name: torch.from_numpy(value) for name, value in self.tank.get_state().items()}
        self.memory = {**books, "shares": self.shares, "clock": torch.from_numpy(self.clock)}

    def _places(self) -> Floats:
        return self._array(self.inner.places)

    @staticmethod
    def _array(x: Tensor) -> Floats:
        return x.double().numpy()
