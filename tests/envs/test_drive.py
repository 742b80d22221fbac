"""Drive against a plain per-env reference; flags at the end, score and obstacles by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from embodied.core.tensors import Tensors
from envs.toy.drive import CLOCKS, EVENTS, Config, Drive


class Reference:
    """One env of `Drive` in plain Python; the nearest entry is looked for in the whole table."""

    def __init__(self, env: Drive, row: int) -> None:
        self.table = env.roads.table[row].double().tolist()
        self.traffic = env.roads.traffic[row].double().tolist()
        self.x, self.y, self.yaw, self.v, self.a, self.w, self.c = env.car[row].double().tolist()
        self.station, self.offset, self.best, self.legal = env.place[row].double().tolist()
        self.length, self.age, self.steer = env.config.length, 0, 0.0
        self.clocks = [0.0, *[20.0] * 7]

    def drive(self, throttle: float, steer: float) -> None:
        wanted = (2.5 if throttle > 0 else 5.0) * throttle
        v = min(max(self.v + 0.1 * (self.a + 0.5 * (wanted - self.a)), 0.0), 10.0)
        self.c += 0.5 * (0.2 * steer - self.c)
        most = 6.0 / max(v, 0.1)
        w = min(max(v * self.c, -most), most)
        self.x += 0.1 * v * math.cos(self.yaw + 0.05 * w)
        self.y += 0.1 * v * math.sin(self.yaw + 0.05 * w)
        self.yaw += 0.1 * w
        self.tick((v - self.v) / 0.1, v, w)
        self.age += 1

    def tick(self, a: float, v: float, w: float) -> None:
        """Which limits of comfort the step exceeded, then the new speeds."""
        jerk, side = (a - self.a) / 0.1, (v * w - self.v * self.w) / 0.1
        broken = [a > 2.4 or a < -4.05, abs(v * w) > 4.89, math.hypot(jerk, side) > 8.37]
        broken += [abs(jerk) > 4.13, abs(w) > 0.95, abs(w - self.w) / 0.1 > 1.93]
        self.a, self.v, self.w = a, v, w
        self.clocks[2:] = [
            0.0 if hit else min(t + 0.1, 20.0)
            for hit, t in zip(broken, self.clocks[2:], strict=True)
        ]

    def locate(self) -> None:
        """Project on the route."""
        away = [math.hypot(self.x - e[0], self.y - e[1]) for e in self.table]
        i = away.index(min(away))
        x, y, heading, curvature, _ = self.table[i]
        dx, dy, cos, sin = self.x - x, self.y - y, math.cos(heading), math.sin(heading)
        ahead = dx * cos + dy * sin
        self.station, self.offset = i + ahead, dy * cos - dx * sin - 0.5 * curvature * ahead**2
        self.clocks[0] = self.clocks[0] + 0.1 if abs(self.offset) > 0.5 else 0.0

    def at(self, station: float) -> list[float]:
        i = min(round(station), len(self.table) - 1)
        x, y, heading, curvature, limit = self.table[i]
        ahead = min(station, len(self.table) - 1) - i
        middle = heading + 0.5 * ahead * curvature
        where = [x + ahead * math.cos(middle), y + ahead * math.sin(middle)]
        return [*where, heading + ahead * curvature, curvature, limit]

    def obstacles(self) -> list[tuple[float, float]]:
        places: list[tuple[float, float]] = []
        for start, speed, mean, amplitude, rate, phase in self.traffic:
            t = 0.1 * self.age
            x, y, heading, *_ = self.at(start + speed * t)
            d = mean + amplitude * math.sin(rate * t + phase)
            places.append((x - d * math.sin(heading), y + d * math.cos(heading)))
        return places

    def step(self, throttle: float, steer: float) -> tuple[float, list[float]]:
        """Reward, and the events that need no driver's model."""
        self.drive(throttle, steer)
        self.locate()
        before, best = self.legal, self.best
        self.best = max(best, min(self.station, self.length))
        progress = 100 / self.length * (self.best - best)
        hit = any(math.hypot(x - self.x, y - self.y) < 1.3 for x, y in self.obstacles())
        _, _, heading, _, limit = self.at(self.station)
        over = max(self.v - limit, 0.0)
        off = abs(self.offset)
        self.legal += 0.0 if off > 1.75 or over > 0.5 else progress
        lost = hit or off > 3.5
        change, self.steer = abs(steer - self.steer), steer
        events = [
            progress,
            float(hit),
            float(off > 3.5),
            off,
            over,
            abs(self.yaw - heading),
            change,
        ]
        return (0.5 * self.legal if lost else self.legal) - before, events


def follow(env: Drive, obs: Tensors, noise: Tensor) -> Tensor:
    """Actions that follow the route, with noise in [-1, 1]."""
    left = obs["route"][:, env.spec.obs["route"].names.index("route_y6")]
    return torch.stack([0.5 + 0.5 * noise[:, 0], 0.3 * left + 0.1 * noise[:, 1]], 1).clamp(-1, 1)


def test_equals_the_reference() -> None:
    env = Drive(Config(num_envs=12, length=60, horizon=400))
    obs, alive = env.reset(3), [True] * 12
    models = [Reference(env, row) for row in range(12)]
    generator = torch.Generator().manual_seed(0)
    kept = [at for at, name in enumerate(EVENTS) if name != "speed_error"]
    kept_clocks = [at for at, name in enumerate(CLOCKS) if at > 0 and name != "since_conflict"]
    for _ in range(120):
        action = follow(env, obs, torch.rand(12, 2, generator=generator) * 2 - 1)
        step = env.step(action)
        obs = step.obs
        for row in [row for row in range(12) if alive[row]]:
            reward, events = models[row].step(*action[row].double().tolist())
            assert step.reward[row].item() == pytest.approx(reward, abs=2e-3)
            seen = step.next_obs["privileged/events"][row, kept].tolist()
            assert seen == pytest.approx(events, abs=2e-3)
            clocks = step.next_obs["critic/clocks"][row, kept_clocks].tolist()
            assert clocks == pytest.approx(
                [*models[row].clocks[:1], *models[row].clocks[2:]], abs=1e-3
            )
            alive[row] = not bool(step.ended[row])
    assert alive.count(False) > 6
