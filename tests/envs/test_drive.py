"""Drive against a plain per-env reference; flags at the end, score and obstacles by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from embodied.core.env import Step
from embodied.core.tensors import Tensors
from embodied.envs.toy import drive
from embodied.envs.toy.drive import CLOCKS, EVENTS, Config, Drive


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
        """Reward, and the events that need no driver's model: the second and third end it."""
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
        turned = abs(self.yaw - heading)
        events = [progress, 1.0 * hit, 1.0 * (off > 3.5), off, over, turned, change]
        return (0.5 * self.legal if lost else self.legal) - before, events


def follow(env: Drive, obs: Tensors, noise: Tensor) -> Tensor:
    """Actions that follow the route, with noise in [-1, 1]."""
    left = obs["route"][:, env.spec.obs["route"].names.index("route_y6")]
    return torch.stack([0.5 + 0.5 * noise[:, 0], 0.3 * left + 0.1 * noise[:, 1]], 1).clamp(-1, 1)


def test_equals_the_reference() -> None:
    """Also where a car hits an obstacle, and where one leaves the road."""
    env = Drive(Config(num_envs=12, length=60, horizon=400))
    obs, alive, lost = env.reset(3), [*range(12)], torch.zeros(2)
    models = [Reference(env, row) for row in range(12)]
    generator = torch.Generator().manual_seed(0)
    kept = [at for at, name in enumerate(EVENTS) if name != "speed_error"]
    kept_clocks = [at for at, name in enumerate(CLOCKS) if at > 0 and name != "since_conflict"]
    for _ in range(120):
        action = follow(env, obs, torch.rand(12, 2, generator=generator) * 2 - 1)
        action[0] = 1.0
        step = env.step(action)
        obs = step.obs
        for row in alive:
            reward, events = models[row].step(*action[row].double().tolist())
            known, clocks = step.next_obs, models[row].clocks
            seen = [step.reward[row].item(), *known["privileged/events"][row, kept].tolist()]
            assert seen == pytest.approx([reward, *events], abs=2e-3)
            shown = known["critic/clocks"][row, kept_clocks].tolist()
            assert shown == pytest.approx([clocks[0], *clocks[2:]], abs=1e-3)
            over = any(events[1:3])
            assert bool(step.terminated[row]) == bool(step.log["violated"][row]) == over
            lost += torch.tensor(events[1:3])
        alive = [row for row in alive if not step.ended[row]]
    assert len(alive) < 6 and (lost > 0).all()


def at(env: Drive, station: float, speed: float) -> None:
    """Put the car on a straight route at a station."""
    env.roads.table[..., :4] = 0.0
    env.roads.table[..., 0] = torch.arange(env.roads.table.shape[1])
    env.car[:], env.place[:] = 0.0, 0.0
    env.car[:, 0], env.car[:, 3] = station, speed
    env.place[:, 0] = env.place[:, 2] = station


def played(env: Drive, action: list[float]) -> list[Step]:
    """Steps of that action until an episode ends."""
    actions = torch.tensor([action] * env.num_envs)
    steps = [env.step(actions)]
    while not steps[-1].ended.any():
        steps.append(env.step(actions))
    return steps


@pytest.mark.parametrize("goal_terminates", [False, True])
def test_the_end_of_the_route(goal_terminates: bool) -> None:
    """It bootstraps, or with `goal_terminates` has the value 0; never both, and it is a success."""
    env = Drive(Config(num_envs=2, obstacles=0, goal_terminates=goal_terminates))
    env.reset(0)
    at(env, 199.5, speed=2.0)
    steps = played(env, [0.0, 0.0])
    last = steps[-1]
    assert last.terminated.tolist() == [goal_terminates] * 2
    assert last.truncated.tolist() == [not goal_terminates] * 2
    assert last.log["success"].all() and not last.log["violated"].any()
    assert last.next_obs["critic/clocks"][:, CLOCKS.index("remaining")].abs().max() < 1e-6
    assert sum(float(step.reward[0]) for step in steps) == pytest.approx(0.25)  # 0.5 m of 200


def test_the_time_limit_truncates() -> None:
    env = Drive(Config(num_envs=1, obstacles=0, horizon=3))
    env.reset(0)
    *_, last = steps = played(env, [-1.0, 0.0])
    assert len(steps) == 3 and last.truncated.all()
    assert not last.terminated.any() and not last.log["success"].any()


def straight(*obstacles: tuple[float, float, float, float]) -> drive.Obstacles:
    """On the x axis as the route: x, y and velocity of each."""
    values = torch.tensor(obstacles)[None]
    return drive.Obstacles(values[..., 0], values[..., 1], values[..., :2], values[..., 2:])


@pytest.mark.parametrize(
    ("obstacle", "expected"),
    [
        ((6.2, 0.0, 0.0, 0.0), True),  # 4.9 m to contact: 0.98 s
        ((6.4, 0.0, 0.0, 0.0), False),
        ((3.0, 1.4, 0.0, 0.0), False),  # beside
        ((3.0, 3.0, 0.0, -5.0), True),  # crosses
        ((-2.0, 0.0, 0.0, 0.0), False),  # behind
        ((3.0, 0.0, 6.0, 0.0), False),  # drives away
    ],
)
def test_conflicts_by_hand(obstacle: tuple[float, float, float, float], expected: bool) -> None:
    car = torch.tensor([[0.0, 0.0, 0.0, 5.0, 0.0, 0.0, 0.0]])  # 5 m/s along x
    assert drive.conflict(car, straight(obstacle)).item() is expected


def test_what_is_seen_and_how_fast_a_careful_driver_goes() -> None:
    car = torch.tensor([[0.0, 0.0, 0.0, 5.0, 0.0, 0.0, 0.0]])
    obstacles = straight((20.0, 1.0, 0.0, 0.0), (6.0, -1.0, 2.0, 0.0), (-5.0, 0.0, 0.0, 0.0))
    seen = drive.nearest(car, torch.zeros(1), obstacles, 3)[0].tolist()
    assert seen == [6.0, -1.0, 20.0, 1.0, drive.FAR, 0.0, -3.0, 0.0, -5.0, 0.0, 0.0, 0.0]
    place, limit, still = torch.zeros(1, 4), torch.full((1,), 8.0), torch.zeros(1)
    beside = straight((6.0, 1.6, 0.0, 0.0))
    for seen, curvature, speed in (
        (obstacles, still, 4.0),  # 6 of 2 to 10 m
        (beside, still, 8.0),
        (beside, still + 0.25, 4.0),
    ):
        assert drive.desired_speed(seen, place, limit, curvature).item() == speed


def test_routes_are_smooth_and_do_not_cross_themselves() -> None:
    env = Drive(Config(num_envs=64))
    table = env.roads.table
    assert (table[:, 1:, 0] > table[:, :-1, 0]).all()  # x always grows
    length = (table[:, 1:, :2] - table[:, :-1, :2]).norm(dim=2)
    torch.testing.assert_close(length, torch.ones_like(length), atol=1e-4, rtol=0)
    turn = table[:, 1:, 2] - table[:, :-1, 2] - 0.5 * (table[:, 1:, 3] + table[:, :-1, 3])
    assert turn.abs().max() < 1e-3
