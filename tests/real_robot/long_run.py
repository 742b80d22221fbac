"""A long run of a robot's safety chain: `python -m tests.real_robot.long_run CONFIG [SEQUENCES]
[SEED]`, CONFIG being a simulated robot of configs/robot.

The chain is the deployed one: all joints, every stage that the YAML sets, and those that it leaves
out with settings of this file (energy tank, torque rates, a reflex with random weights, obstacles).
A sequence is one to four ticks of an adversary's commands, on an arm that springs hold and that
goes on from where the sequence before left it, moving; an operator clears what was latched, and now
and then begins elsewhere, also outside of workspace and geometry. Every output is held against the
limits of position, velocity, acceleration and jerk, and against workspace and geometry: never out
by more than TOLERANCE, or than where it began. Every torque, change of torque, and force above its
limit has to end in a latched stop.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embodied.core import checkpoint
from embodied.core.spec import Leaf, Spec
from embodied.policies.wrappers.reflex_override import ReflexOverride
from embodied.real_robot.assemble import build_chain
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.kernel.arm_state import ArmState, Floats
from embodied.real_robot.kernel.checks import DaemonAlive, Enabled, HoldToRun
from embodied.real_robot.kernel.measured import Force
from embodied.real_robot.safety.energy import Config as EnergyConfig
from embodied.real_robot.safety.geometry import Box
from embodied.real_robot.safety.learned_reflex import Config as ReflexConfig
from tests.builders import make_policy, node_of
from tests.real_robot.oracle import Oracle
from tests.real_robot.test_decide import ROBOTS
from tests.real_robot.test_decide import deployment as robot

CONFIGS = tuple(sorted(file.stem for file in ROBOTS.glob("*sim*.yaml")))
TICKS = 4  # of a sequence, at most
BLOCK = 5_000  # ticks that are looked at together
PATIENCE, OVER = 3, 3  # ticks: of a torque above its limit, and that its change is taken over
LIES, PUSHES, ELSEWHERE = 0.02, 0.01, 0.002  # shares of sequences
AMOUNTS = ("start", "most", "least", "power")  # of the energy tank
WORST = (np.nan, np.inf, -np.inf, 1e308, -1e308, 5e-324, 0.0)


def deployment(config: str, folder: Path) -> Deployment:
    """Of configs/robot/CONFIG.yaml, with the stages that it leaves out; `folder` is for the
    reflex."""
    made = robot(config, reflex=None)
    most = np.asarray(made.limits.torque)
    stiffness, damping, _ = springs(made)
    reach = float(np.sum(stiffness)) * 0.01
    sizes: Any = dict(zip(AMOUNTS, reach * np.array([1.0, 2.0, 0.1, 10.0]), strict=True))
    energy = EnergyConfig(**sizes, stiffness=tuple(stiffness), damping=tuple(damping))
    stride = tuple(2 * np.asarray(made.limits.velocity) / made.hertz)
    geometry = made.geometry
    if geometry is not None:  # a post beside the workspace
        assert made.workspace is not None
        low, high = np.asarray(made.workspace.low), np.asarray(made.workspace.high)
        post = Box((float(low[0]), float(high[1]), float(low[2])), (0.02, 0.02, 0.3))
        geometry = replace(geometry, boxes=(*geometry.boxes, post))
    return replace(
        made,
        geometry=geometry,
        hold_to_run=True,
        energy=made.energy or energy,
        torque_rate=made.torque_rate or tuple(15 * most),
        reflex=ReflexConfig(reflex(made, folder), stride),
    )


def springs(made: Deployment) -> tuple[Floats, Floats, Floats]:
    """Stiffness, damping and mass of each joint: slow enough to be stepped at the chain's rate."""
    stiffness = np.asarray(made.limits.torque) / (0.5 * np.asarray(made.limits.tracking))
    mass = stiffness * (3.0 / made.hertz) ** 2
    return stiffness, 1.4 * np.sqrt(stiffness * mass), mass


@torch.no_grad()
def reflex(made: Deployment, folder: Path) -> str:
    """A checkpoint of random weights that acts in some states, not in all; its folder."""
    n = made.joints
    spec = Spec({"state": Leaf((4 * n,))}, Leaf((n,), low=-1.0, high=1.0), dt=1 / made.hertz)
    how = {"decision_steps": 1, "threshold": 0.5, "release_ratio": 0.9, "min_duration_steps": 1}
    base = node_of("policies.gaussian.Gaussian", hidden=[8])
    policy: ReflexOverride = make_policy(
        "wrappers.reflex_override.ReflexOverride", spec, base=base, hidden=[16, 16], **how
    )
    low, high = torch.tensor(made.limits.low), torch.tensor(made.limits.high)
    q = low + (high - low) * torch.rand(500, n)
    obs = {"state": torch.cat([q, *(torch.randn(500, n) * size for size in (0.5, 2.0, 0.02))], 1)}
    policy.fit({"obs/state": obs["state"]})
    for weight in [*policy.risks.parameters(), *policy.recovery.parameters()]:
        weight.data.mul_(2)
    policy.risks.biases[-1].data.zero_()
    risk = policy.risk(obs, torch.rand(500, n) * 2 - 1)
    policy.risks.biases[-1].data.fill_(-float(torch.logit(risk).quantile(0.85)))
    policy.armed.fill_(True)
    checkpoint.save(folder / "checkpoints" / "00000000", policy, 0)
    return str(folder)


Adversary = Callable[["World", Floats], Floats]
"""What the chain is told when `sent` [n] was sent last."""


def jumps(world: World, sent: Floats) -> Floats:
    return world.random.uniform(5 * world.low - 4, 5 * world.high + 4)


def poses(world: World, sent: Floats) -> Floats:
    """Somewhere within the limits, held on to for a while."""
    if world.random.random() < 0.02:
        world.aim = world.random.uniform(world.low, world.high)
    return world.aim


def bangs(world: World, sent: Floats) -> Floats:
    return world.high + 9 if world.random.random() < 0.5 else world.low - 9


def trembles(world: World, sent: Floats) -> Floats:
    return sent + world.random.normal(0, 10.0 ** world.random.uniform(-9, 0), len(sent))


def turns_late(world: World, sent: Floats) -> Floats:
    """At full speed to a limit, and away at the last moment."""
    at = world.high - world.random.uniform(0.1, 0.3, len(sent))
    return np.where(sent < at, world.high + 9, world.low - 9)


def leans_out(world: World, sent: Floats) -> Floats:
    """Along one joint's way, far, from where it is: along the edge of what is allowed."""
    way = np.eye(len(sent))[world.leaning]
    return sent + (way if world.ticks % 200 < 100 else -way)


def is_no_number(world: World, sent: Floats) -> Floats:
    q = jumps(world, sent)
    q[world.random.integers(len(q))] = world.random.choice(WORST)
    return q


def has_no_shape(world: World, sent: Floats) -> Floats:
    return np.zeros(int(world.random.integers(0, 2 * len(sent))))


MOVE: tuple[Adversary, ...] = (jumps, poses, bangs, trembles, turns_late, leans_out)
LIE: tuple[Adversary, ...] = (is_no_number, has_no_shape, jumps)  # jumps: with a wrong time
LATE = (0.1, 0.4, 9.0, -0.01, -9.0)  # s ago that a lie comes from; negative: yet to be made


class World:
    """Joints that springs hold (semi-implicit Euler), now and then pushed; a chain before them."""

    def __init__(self, made: Deployment, seed: int) -> None:
        self.made, self.dt = made, 1 / made.hertz
        self.random = np.random.default_rng(seed)
        self.chain = build_chain(made)
        self.enabled = self.chain.required(Enabled)
        self.hand = self.chain.required(HoldToRun)
        self.daemon = self.chain.required(DaemonAlive)
        self.daemon.watched = True
        self.force = self.chain.stage(Force)
        self.low, self.high = self.chain.limiter.low, self.chain.limiter.high
        self.most, self.rate = np.asarray(made.limits.torque), np.asarray(made.torque_rate)
        self.stiffness, self.damping, self.mass = springs(made)
        self.q, n = np.asarray(made.home), made.joints
        self.dq, self.tau, self.taus = np.zeros(n), np.zeros(n), np.zeros((OVER, n))
        self.now, self.ticks, self.above, self.beats, self.leaning = 0.0, 0, 0, 0, 0
        self.push, self.pushing, self.hurry = np.zeros(n), np.zeros(n), 1.0
        self.still, self.adversary = np.zeros(n), MOVE[0]
        self.aim = self.q
        self.faults: Counter[str] = Counter()
        self.oracle = Oracle(made, self.q)
        self.place(self.q)

    def place(self, q: Floats) -> None:
        """The arm stands at `q`; nothing of before counts."""
        self.q, self.dq, self.tau = q.copy(), self.still.copy(), self.still.copy()
        self.oracle.begin(q)
        self.begin()

    def begin(self) -> None:
        """An operator's reset."""
        self.chain.clear()
        sent = self.oracle.sent[-1]
        self.chain.begin(ArmState(sent.copy(), self.still, self.tau.copy(), self.now))
        self.enabled.on, self.above = True, 0
        for each in (self.hand, self.daemon):  # a person is there
            self.beats += 1
            each.silence.hear(self.beats, self.now, self.now)
        self.taus[:] = self.tau

    def tick(self, told: Floats, push: Floats, late: float = 0.0) -> None:
        """One tick of the chain, which is `told` where to go, by what was seen `late` s ago."""
        self.now, self.ticks = self.now + self.dt, self.ticks + 1
        self.beats += 1
        if (self.ticks + 1500) % 3001 > 0.4 * self.made.hertz:  # the hand lets go now and then
            self.hand.silence.hear(self.beats, self.now, self.now)
        if (self.ticks + 8000) % 20011 > 3 * self.made.hertz:  # the daemon hangs, more rarely
            self.daemon.silence.hear(self.beats, self.now, self.now)
        arm = ArmState(self.q.copy(), self.dq.copy(), self.tau.copy(), self.now)
        arm.external = push.copy()
        self.above = self.above + 1 if (np.abs(self.tau) > self.most).any() else 0
        change = np.abs(self.tau - self.taus[self.ticks % OVER]) / (OVER * self.dt)
        self.taus[self.ticks % OVER] = self.tau
        sent = self.chain(told, self.now - late, arm, self.now)
        assert self.chain.fault or self.above < PATIENCE, "a torque above its limit went on"
        pressed = self.force is not None and self.force.newtons(arm) > self.force.most
        assert self.chain.fault or not pressed, "a force above its limit went on"
        assert self.chain.fault or (change <= self.rate).all(), "a blow went on"
        self.tau = self.stiffness * (sent - self.q) - self.damping * self.dq
        self.dq = self.dq + (self.tau + push) / self.mass * self.dt
        self.q = self.q + self.dq * self.dt
        self.oracle.take(sent)

    def sequence(self) -> None:
        random = self.random
        lies = random.random() < LIES
        if random.random() < 0.02:
            self.adversary = MOVE[random.integers(len(MOVE))]
            self.leaning = int(random.integers(len(self.q)))
        adversary = LIE[random.integers(len(LIE))] if lies else self.adversary
        if random.random() < PUSHES:  # a blow, or somebody leans on it; the next one ends it
            self.push = random.normal(0, 1, len(self.q)) * self.most * random.integers(0, 3)
            self.hurry = 1.0 if random.random() < 0.3 else 0.02
        for _ in range(int(random.integers(1, TICKS + 1))):
            self.pushing += self.hurry * (self.push - self.pushing)
            late = float(random.choice(LATE)) if adversary is jumps and lies else 0.0
            self.tick(adversary(self, self.chain.limiter.q), self.pushing, late)
            if self.chain.fault:
                self.recover()
                break
        if random.random() < ELSEWHERE:
            self.oracle.check()
            self.place(random.uniform(self.low, self.high))

    def recover(self) -> None:
        """Whatever is asked, it brakes, rests, and stays there; then somebody resets it."""
        self.faults[self.chain.fault.split(" is ")[0].split(" measures ")[0][:32]] += 1
        self.push, self.pushing = self.still, np.zeros(len(self.q))
        for _ in range(600):
            self.tick(jumps(self, self.oracle.sent[-1]), self.still)
            calm = bool((np.abs(self.dq) < 1e-2).all() and (np.abs(self.tau) < self.most).all())
            if self.chain.resting and calm:
                break
        assert self.chain.resting and self.chain.fault, "it did not come to rest"
        self.begin()


def run(config: str, sequences: int, seed: int = 0) -> World:
    """AssertionError as soon as one output is outside of a limit. The world, for its counts."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(deployment(config, Path(folder)), seed)
    for number in range(1, sequences + 1):
        world.sequence()
        if len(world.oracle.sent) > BLOCK or number == sequences:
            world.oracle.check()
    return world


def main(config: str, sequences: str = "1000000", seed: str = "0") -> None:
    torch.set_num_threads(1)
    world = run(config, int(sequences), int(seed))
    out = ", ".join(f"{1e3 * each:.2f}" for each in world.oracle.worst)
    print(f"{config}: {world.ticks} ticks within the limits; out of regions by at most {out} mm")
    print(dict(world.faults), dict(zip(world.chain.names, world.chain.counts, strict=True)))


if __name__ == "__main__":
    main(*sys.argv[1:])
