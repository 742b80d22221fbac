"""Sampled transitions with the environment's success signal, to check programs before training.

Transitions are of random actions and, if given, of a demonstrator. Checks (after Eureka) that a
program must pass to be trained:

    finite, not constant, components within a factor of 1000 in scale,
    AUC = P(r(success) > r(random)) > 0.8.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.actor import Actor
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors
from embodied.nn.statistics import auc_of_samples
from embodied.rewards.handcrafted.program import ACTION, NEXT, Variable, inputs
from embodied.sandbox.gate import Sandbox
from embodied.sandbox.program import Rejected

GATE = 256  # transitions for the sandbox's gate
ENOUGH = 8  # successes needed for the AUC
LEAST_AUC, LARGEST_RATIO = 0.8, 1000.0


@dataclass(frozen=True)
class Verdict:
    """`problem`: "" if the program may be trained; `layer`: the check that failed."""

    problem: str = ""
    layer: str = ""
    report: dict[str, Any] = field(default_factory=dict)


@dataclass
class Experience:
    """`rows` [N]: transitions; `success` [N] (None: the environment has no such signal); `random`
    [N]: whether they are of random actions."""

    rows: Tensors
    success: Tensor | None
    random: Tensor

    def save(self, folder: Path) -> None:
        more = {} if self.success is None else {"success": self.success}
        save_file({**self.rows, **more, "random": self.random}, folder / "experience.safetensors")
        picked = tt.take(self.rows, self._tried())
        save_file({k: v.contiguous() for k, v in picked.items()}, folder / "rows.safetensors")

    @classmethod
    def load(cls, folder: Path) -> Experience:
        rows = load_file(folder / "experience.safetensors")
        return cls(rows, rows.pop("success", None), rows.pop("random"))

    def check(self, sandbox: Sandbox, variables: dict[str, Variable], source: str) -> Verdict:
        """Check a program in the sandbox and on the transitions."""
        try:
            names = (*variables, *(NEXT + name for name in variables if name != ACTION))
            given = inputs(variables, names, self.rows)
            gated = sandbox.gate(source, tt.take(given, self._tried()))
            output = gated(given)
            gated.close()
        except Rejected as error:
            return Verdict(error.reason, error.layer)
        facts, total, auc = gated.report, output.total, None
        if self.success is not None and int(self.success.sum()) >= ENOUGH:
            failures = total[self.random & ~self.success]
            auc = round(auc_of_samples(total[self.success], failures), 4)
        report: dict[str, Any] = {"cost": facts.cost, "terms": facts.terms, "lock": facts.lock}
        report |= {"one_by_one": facts.one_by_one, "auc": auc}
        report["shares"] = {
            name: [float((part > 0).float().mean()), float((part < 0).float().mean())]
            for name, part in output.components.items()
        }
        return Verdict(*_gates(report, output.total, output.components), report)

    def _tried(self) -> Tensor:
        """Indices of GATE transitions, up to a quarter of them successes."""
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(len(self.random), generator=generator)
        if self.success is None:
            return order[:GATE]
        won = order[self.success[order]][: GATE // 4]
        return torch.cat([won, order[~self.success[order]]])[:GATE]


def gather(
    env: VecEnv, count: int, seed: int, demonstrator: Policy | None = None, shown: int = 0
) -> Experience:
    """About `count` transitions of random actions and `shown` of the demonstrator."""
    parts = [_play(env, count, seed, None)]
    if demonstrator is not None and shown:
        parts.append(_play(env, shown, seed + 1, demonstrator))
    rows = tt.cat([rows for rows, _ in parts])
    flags = [won for _, won in parts]
    success = None if flags[0] is None else torch.cat([won for won in flags if won is not None])
    random = torch.zeros(tt.length(rows), dtype=torch.bool)
    random[: tt.length(parts[0][0])] = True
    return Experience(rows, success, random)


@torch.no_grad()
def _play(
    env: VecEnv, count: int, seed: int, policy: Policy | None
) -> tuple[Tensors, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    actor = None if policy is None else Actor(policy, env.num_envs, explore=True)
    obs, first = env.reset(seed), torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
    parts: list[Tensors] = []
    flags: list[Tensor] = []
    for _ in range(-(-count // env.num_envs)):
        action = actor(obs, first) if actor is not None else _random(env, generator)
        step = env.step(action.to(env.device))
        row = {**tt.nest(obs, "obs"), ACTION: action, **tt.nest(step.next_obs, "next_obs")}
        parts.append({key: value.clone().cpu() for key, value in row.items()})
        if "success" in step.log:
            flags.append(step.log["success"].clone().cpu())
        obs, first = step.obs, step.ended
    return tt.cat(parts), torch.cat(flags) if flags else None


def _random(env: VecEnv, generator: torch.Generator) -> Tensor:
    act = env.spec.act
    if act.dtype == "float32":
        return 2 * torch.rand(env.num_envs, *act.shape, generator=generator) - 1
    assert isinstance(act.high, int | float), "discrete actions need an upper bound"
    return torch.randint(0, int(act.high) + 1, (env.num_envs, *act.shape), generator=generator)


def _gates(report: dict[str, Any], total: Tensor, parts: Tensors) -> tuple[str, str]:
    """(problem, layer), both "" if all checks are passed."""
    if float(total.max() - total.min()) < 1e-6:
        return "the reward is the same in every row", "constant"
    sizes = [float(p.abs().mean()) for p in parts.values() if float(p.abs().mean()) > 0]
    if sizes and max(sizes) > LARGEST_RATIO * min(sizes):
        return f"components differ {max(sizes) / min(sizes):.0f}-fold in size", "scale"
    if report["auc"] is not None and report["auc"] <= LEAST_AUC:
        word = f"success is rewarded more than random in {report['auc']:.0%} of pairs"
        return f"{word}; more than {LEAST_AUC:.0%} is required", "auc"
    return "", ""
