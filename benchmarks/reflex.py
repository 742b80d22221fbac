"""Compares how often a learned reflex is asked: never, once per decision, at every control step.

    python -m benchmarks.reflex task_run=RUN rate=control seed=1 out=DIR

The task policy of RUN (`experiment=fr3_channel_bresa`) is not trained further. A fault replaces a
share of its decisions: by random ones, or by one that turns the arm into the near wall. The safety
critic and the recovery policy learn from faulty decisions alone, without a reflex (rich in
violations); short segments of random actions, also of the stiffness, stand for what a recovery
policy does. Then they act for the policy in other episodes.

Before, the reliability of the risk is printed: for transitions of other faulty decisions, the mean
predicted risk and the mean outcome (1 at a violation, discounted as the critic's target is).
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from embodied.compose import compose
from embodied.core.actor import Actor
from embodied.core.build import build, parse
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors, under
from embodied.learners.off_policy.bresa import Bresa, risk_target
from embodied.policies.wrappers.reflex_override import ReflexOverride
from embodied.training.collector import Collector

ENVS = 64
BINS = (0.01, 0.03, 0.1, 0.2, 0.4, 0.7)
"""Limits of the bins of predicted risk."""


@dataclass(frozen=True)
class Config:
    """`rate`: "none", or that of the reflex. `faults`: share of wrong decisions. `steps`: control
    steps of experience, of all envs together; `segments`: share of these in random segments;
    `episodes` of the test. The rest: see `embodied.learners.off_policy.bresa`."""

    task_run: str
    out: str
    rate: Literal["none", "decision", "control"] = "control"
    seed: int = 0
    faults: float = 0.5
    steps: int = 16_000
    segments: float = 0.25
    updates: int = 2000
    episodes: int = 200
    threshold: float = 0.1
    calibrated: bool = True
    risk_gamma: float = 0.5
    violation_fraction: float = 0.1


class Faulty(Policy):
    """`base`, a `share` of whose decisions is wrong: half of these are random, half turn the first
    joint into the wall."""

    def __init__(self, base: Policy, share: float) -> None:
        super().__init__()
        self.base, self.share, self.spec = base, share, base.spec

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        lots = torch.rand(n, 2 + self.spec.act.size)
        return torch.cat([lots, self.base.sample_noise(n, explore)], 1)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        faulty, turns, lots = noise[:, :1] < self.share, noise[:, 1:2] < 0.5, noise[:, 2:]
        size = self.spec.act.size
        action, carry = self.base.act(obs, carry, lots[:, size:])
        random = 2 * lots[:, :size] - 1
        into_wall = 0.3 * random
        into_wall[:, 0] = 1 - 0.5 * lots[:, 0]
        wrong = torch.where(turns, into_wall, random)
        return torch.where(faulty[:, None], wrong[:, None], action), carry


class Segments(Policy):
    """`base`, of whose steps a `share` is in segments with one random action instead."""

    def __init__(self, base: ReflexOverride, share: float) -> None:
        super().__init__()
        self.base, self.spec, self.chunk = base, base.spec, base.chunk
        self.calls = base.min_calls
        """Calls of `act` that a segment lasts."""
        self.begin = share / (share + self.calls * (1 - share))

    def initial(self, n: int) -> Tensors:
        random = torch.zeros(n, self.spec.act.size)
        return {**self.base.initial(n), "rest": torch.zeros(n, dtype=torch.int64), "random": random}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        lots = torch.rand(n, 1 + self.spec.act.size)
        return torch.cat([lots, self.base.sample_noise(n, explore)], 1)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        size, rest = self.spec.act.size, carry["rest"]
        plan, after = self.base.act(obs, carry, noise[:, 1 + size :])
        begins = (rest == 0) & (noise[:, 0] < self.begin)
        random = torch.where(begins[:, None], 2 * noise[:, 1 : 1 + size] - 1, carry["random"])
        rest = torch.where(begins, self.calls, rest)
        within = (rest > 0)[:, None]
        return torch.where(within[..., None], random[:, None].expand_as(plan), plan), {
            **after,
            "left": after["left"].masked_fill(within[:, 0], 0),  # as after the reflex
            "row/executed": torch.where(within, random, after["row/executed"]),
            "rest": (rest - 1).clamp(min=0),
            "random": random,
        }


def main(words: list[str]) -> dict[str, float]:
    config = parse(Config, _values(words), "reflex")
    torch.manual_seed(config.seed)
    learner, env = _made(config)
    if config.rate != "none":
        _learn(learner, env, config)
    learner.policy.armed.fill_(config.rate != "none")
    result = test(learner.policy, env, config)
    folder = Path(config.out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text(json.dumps(result) + "\n")
    return result


def _values(words: list[str]) -> dict[str, Any]:
    import yaml

    return {key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in words)}


def _made(config: Config) -> tuple[Bresa, VecEnv]:
    node = compose("train", ["experiment=fr3_channel_bresa"]).node
    env = build({**node["env"], "num_envs": ENVS}, VecEnv)
    settings = {
        "task": {"hidden": [16]},
        "task_run": config.task_run,
        "risk_tau": 0.005,
        "rate": "control" if config.rate == "none" else config.rate,
        "threshold": config.threshold,
        "risk_gamma": config.risk_gamma,
        "violation_fraction": config.violation_fraction,
        "calibrated": config.calibrated,
        "reflex": False,  # until the test
    }
    policy = build(node["policy"], Policy, spec=env.spec)
    learner = build({**node["learner"], **settings}, Bresa, policy=policy, spec=env.spec)
    learner.policy.base = Faulty(learner.policy.base, config.faults)
    return learner, env


def _learn(learner: Bresa, env: VecEnv, config: Config) -> None:
    """Train the safety critic and the recovery policy on faulty decisions without a reflex."""
    faulty = learner.policy.base
    assert isinstance(faulty, Faulty)
    faulty.share = 1.0
    kept = collected(env, Segments(learner.policy, config.segments), config.steps, config.seed)
    rows = {name: torch.cat([each[name] for each in kept]) for name in kept[0]}
    learner.fit(rows)
    for _ in range(config.updates):
        at = torch.randint(len(rows["reward"]), (learner.batch_size,))
        learner.update({name: column[at] for name, column in rows.items()})
    print_reliability(learner, collected(env, learner.policy, config.steps // 4, 500 + config.seed))
    faulty.share = config.faults


def collected(env: VecEnv, policy: Policy, steps: int, seed: int) -> list[Tensors]:
    """The transitions that each control step completed, with the columns `env` and `ended`."""
    collector, kept = Collector(env, policy, 0.99, seed=seed), list[Tensors]()
    for _ in range(steps // ENVS):
        rows, step = collector.step()
        if rows:
            at = torch.arange(ENVS) if collector.finished is None else collector.finished
            kept.append({**rows, "env": at, "ended": step.ended[at]})
    return kept


def outcomes(kept: list[Tensors], gamma: float) -> Tensor:
    """Of each transition: 1 at a violation, gamma (per transition) times the next one's otherwise,
    0 from the end of the episode or of the experience on."""
    later, result = torch.zeros(ENVS), list[Tensor]()
    for rows in reversed(kept):
        goes_on = (~rows["ended"]).float()
        value = risk_target(rows["violated"].float(), goes_on, gamma, later[rows["env"]])
        later[rows["env"]] = value
        result.append(value)
    return torch.cat(result[::-1])


@torch.no_grad()
def print_reliability(learner: Bresa, kept: list[Tensors]) -> None:
    outcome = outcomes(kept, learner.config.risk_gamma ** (1 / learner.held_steps))
    risk = torch.cat([learner.policy.risk(under(rows, "obs"), rows["executed"]) for rows in kept])
    bins = torch.bucketize(risk, torch.tensor(BINS))
    print("risk predicted outcome transitions")
    for number, low in enumerate((0.0, *BINS)):
        inside = bins == number
        if count := int(inside.sum()):
            means = risk[inside].mean().item(), outcome[inside].mean().item()
            print(f">{low:.2f} {means[0]:9.3f} {means[1]:7.3f} {count:11}")


@torch.no_grad()
def test(policy: ReflexOverride, env: VecEnv, config: Config) -> dict[str, float]:
    """Per episode: `violated`, `success`; of all control steps: `reflex`, the share in which the
    reflex acted; `latency_ms`, from a risk above the threshold until it acts."""
    obs = env.reset(1_000 + config.seed)
    actor, first = Actor(policy, ENVS, explore=True), torch.ones(ENVS, dtype=torch.bool)
    count = dict.fromkeys(("episodes", "violated", "success", "reflex", "steps"), 0.0)
    waiting, delays = torch.full((ENVS,), -1), list[Tensor]()
    while count["episodes"] < config.episodes:
        action = actor(obs, first)
        risky = policy.risk(obs, actor.carry["row/action"]) > policy.on
        acting = actor.carry["row/reflex"] > 0
        waiting = torch.where(first, -1, waiting)
        waiting = torch.where(risky & (waiting < 0), 0, waiting)
        delays.append(waiting[acting & (waiting >= 0)])
        waiting = torch.where(acting | ~risky, -1, waiting + (waiting >= 0))
        step = env.step(action)
        obs, first = step.obs, step.ended
        count["episodes"] += int(first.sum())
        count["steps"] += ENVS
        count["reflex"] += float(acting.sum())
        for name in ("violated", "success"):
            count[name] += int(step.log[name].sum())
    late = torch.cat(delays).float()
    return {
        "step": config.steps,
        **{name: count[name] / count["episodes"] for name in ("violated", "success")},
        "reflex": count["reflex"] / count["steps"],
        "latency_ms": 1000 * env.spec.dt * float(late.mean()) if len(late) else 0.0,
    }


if __name__ == "__main__":
    print(main(sys.argv[1:]))
