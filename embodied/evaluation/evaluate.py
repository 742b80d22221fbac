"""Evaluates a policy: fixed initial states, the same number of episodes from every parallel env."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from embodied.core.actor import Actor
from embodied.core.device import forked
from embodied.core.env import CanPause, Step, VecEnv, require_finite
from embodied.core.env_contract import called, endless
from embodied.core.errors import ContractError
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors
from embodied.core.wrapper import find_protocol
from embodied.evaluation.statistics import rate


class EpisodeStats:
    """Return, length, success and violations of the running episode of each parallel env.
    `reports_success` and `reports_violations` say whether the environment logs `success` and
    `violated`."""

    def __init__(self) -> None:
        self.running: Tensor | None = None
        self.reports_success = self.reports_violations = False

    def add(self, step: Step) -> Tensor:
        """Add one step of every parallel env. Returns the sums [4, B] (return, length, steps with
        success, steps with a violation), this step included; those of episodes that it ended
        (`step.ended`) are then set to zero."""
        success, violated = step.log.get("success"), step.log.get("violated")
        self.reports_success |= success is not None
        self.reports_violations |= violated is not None
        now = step.reward.new_ones(4, len(step.reward))
        now[0] = step.reward
        now[2] = 0.0 if success is None else success.to(now.dtype)
        now[3] = 0.0 if violated is None else violated.to(now.dtype)
        sums = now if self.running is None else self.running + now
        self.running = sums * ~step.ended
        return sums


class EpisodeMeans:
    """Means over the episodes that have ended since the last `drain`; only that waits for a GPU."""

    def __init__(self) -> None:
        self.stats = EpisodeStats()
        self.totals: Tensor | None = None  # [5]: episodes, and sums over them
        self.chosen: list[Tensor] = []  # of each step: the share of envs in a person's hands

    def add(self, step: Step) -> None:
        """Add one step of every parallel env."""
        returns, lengths, won, violated = self.stats.add(step)
        columns = [torch.ones_like(returns), returns, lengths, won > 0, violated > 0]
        each = torch.stack([column.double() for column in columns])
        totals = torch.where(step.ended, each, 0.0).sum(1)
        self.totals = totals if self.totals is None else self.totals + totals
        if "intervened" in step.log:
            self.chosen.append(step.log["intervened"].double().mean())

    def forget(self, env_ids: Tensor) -> None:
        """Leave out the running episodes of parallel envs `env_ids` [n], which were lost."""
        if self.stats.running is not None:
            self.stats.running[:, env_ids] = 0.0

    def drain(self, prefix: str = "") -> dict[str, float]:
        """The means as metrics with names after `prefix`, then reset; without an episode that ended
        only the share of steps that a person chose, where there may be one."""
        chosen, self.chosen = self.chosen, []
        share = {f"{prefix}intervened": float(torch.stack(chosen).mean())} if chosen else {}
        count, *sums = [0.0] if self.totals is None else self.totals.tolist()
        self.totals = None
        if not count:
            return share
        names = ["return", "length"]
        names += ["success"] if self.stats.reports_success else [""]
        names += ["violated"] if self.stats.reports_violations else [""]
        means = zip(names, sums, strict=True)
        return {f"{prefix}{name}": value / count for name, value in means if name} | share


@dataclass(frozen=True)
class Evaluation:
    """Results per episode [N]. `success` and `violated` are None if the environment does not report
    them. `change` is the mean change of an action's elements from one step to the next (None where
    some are choices). `timed_out` marks the episodes that a time limit ended."""

    success: Tensor | None
    returns: Tensor
    lengths: Tensor
    violated: Tensor | None = None
    change: Tensor | None = None
    timed_out: Tensor | None = None
    achievements: Tensors = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Means as metrics, without the `eval/` prefix; `return_cvar10` is the mean of the lowest
        tenth of the returns, CVaR(10%). `score` is `achievement_score`."""
        worst = self.returns.sort().values[: -(-len(self.returns) // 10)]
        means = {
            "return": self.returns.mean().item(),
            "return_cvar10": worst.mean().item(),
            "length": self.lengths.float().mean().item(),
            "episodes": float(len(self.returns)),
        }
        if self.success is not None:
            means["success"] = self.success.float().mean().item()
        if self.violated is not None:
            means["violated"] = self.violated.float().mean().item()
        if self.change is not None:
            means["change"] = self.change.mean().item()
        if self.achievements:
            rates = {name: flags.float().mean() for name, flags in self.achievements.items()}
            means |= {name: rate.item() for name, rate in rates.items()}
            means["score"] = achievement_score(torch.stack(list(self.achievements.values()), 1))
        return means

    def __str__(self) -> str:
        spread = f"{self.returns.mean():,.2f} +- {self.returns.std(correction=0):,.2f}"
        said = f"return {spread} (mean and std of {len(self.returns)} episodes)"
        if self.success is None:
            return said
        return f"success {rate(int(self.success.sum()), len(self.success))}, {said}"


ACHIEVEMENT = "achievement/"


class Unlocked:
    """What was unlocked by the end of each parallel env's episodes: [quota, n] per name."""

    def __init__(self, quota: int, n: int) -> None:
        self.shape = (quota, n)
        self.flags: Tensors = {}

    def add(self, log: Tensors, played: Tensor, ended: Tensor) -> None:
        """Take the flags of `log` in envs `ended` [k], which have `played` [n] episodes before."""
        for name, now in log.items():
            if name.startswith(ACHIEVEMENT):
                empty = torch.zeros(self.shape, dtype=torch.bool, device=now.device)
                self.flags.setdefault(name, empty)[played[ended], ended] = now[ended].bool()


def achievement_score(unlocked: Tensor) -> float:
    """exp(mean_i ln(1 + s_i)) - 1 in percent, s_i the rate of achievement i in percent, from
    episodes [N, K] (bool or 0/1): Crafter's score (Hafner, 2021)."""
    return math.exp(torch.log1p(100 * unlocked.double().mean(0)).mean().item()) - 1


LONGEST = 50_000  # steps in which an episode of one of the parallel envs should have ended


@torch.no_grad()
def evaluate(
    policy: Policy,
    env: VecEnv,
    episodes: int,
    seed: int,
    execute: int | None = None,
    each_step: Callable[[int], None] | None = None,
    noise_seed: int | None = None,
) -> Evaluation:
    """Run `episodes` episodes from initial states that depend on `seed` only, without exploration.

    Every parallel env contributes its first episodes, as many as any other, so that short episodes
    (early successes) are not over-represented. The global random state is left unchanged.
    `each_step` is called with the number of finished episodes after every step; `noise_seed` is
    that of the policy's noise (None: `seed`).
    """
    n, device = env.num_envs, env.device
    quota = -(-episodes // n)
    with forked(seed if noise_seed is None else noise_seed), _pausing(env) as pause:
        actor, stats = Actor(policy, n, execute), EpisodeStats()
        obs, first = env.reset(seed), torch.ones(n, dtype=torch.bool, device=device)
        played = torch.zeros(n, dtype=torch.int64, device=device)
        table = torch.zeros(quota, n, 6, device=device)
        unlocked = Unlocked(quota, n)
        continuous = env.spec.act.is_continuous
        last, change = env.spec.act.zeros(n, device), torch.zeros(n, device=device)
        quiet = 0  # steps since an episode ended
        while (played < quota).any():
            action = actor(obs, first)
            if continuous:
                change = change + (action - last).abs().flatten(1).mean(1) * ~first
                last = action
            step = env.step(action)
            require_finite(step.reward, step.next_obs, called(env))
            obs, first = step.obs, step.ended
            quiet = 0 if bool(first.any()) else quiet + 1
            if quiet >= LONGEST:
                raise ContractError(f"{called(env)}: {endless(LONGEST)}")
            sums = stats.add(step)
            mean_change = change / (sums[1] - 1).clamp(min=1)
            ended = (first & (played < quota)).nonzero().flatten()
            found = torch.cat([sums, mean_change[None], step.truncated[None].to(sums)])
            table[played[ended], ended] = found[:, ended].T.float()
            unlocked.add(step.log, played, ended)
            played[ended] += 1
            if len(ended):
                pause(played >= quota)
            change = change * ~first
            if each_step is not None:
                each_step(int(played.sum()))
    returns, lengths, won, violated, change, late = table.flatten(0, 1)[:episodes].cpu().unbind(1)
    return Evaluation(
        won > 0 if stats.reports_success else None,
        returns,
        lengths.long(),
        violated > 0 if stats.reports_violations else None,
        change if continuous else None,
        late > 0,
        {name: flags.flatten()[:episodes].cpu() for name, flags in unlocked.flags.items()},
    )


@contextmanager
def _pausing(env: VecEnv) -> Generator[Callable[[Tensor], None]]:
    """A function that pauses envs [B] (bool), where `env` can do that; all play again afterwards.
    Parallel envs that have played their episodes are not simulated any longer."""
    found = find_protocol(env, CanPause)
    if found is None:
        yield lambda rows: None
        return
    try:
        yield found.pause
    finally:
        found.pause(torch.zeros(env.num_envs, dtype=torch.bool))


@torch.no_grad()
def film(
    policy: Policy, env: VecEnv, episodes: int, seed: int, row: int = 0, execute: int | None = None
) -> Tensor:
    """Frames [T, H, W, 3] (uint8) of the first episode of parallel env `row`: the one that
    `evaluate` runs with the same environment, episodes and seed."""
    frames: list[Tensor] = []
    quota = -(-episodes // env.num_envs)
    with forked(seed), _pausing(env) as pause:
        actor = Actor(policy, env.num_envs, execute)
        obs, first = env.reset(seed), torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
        played = torch.zeros(env.num_envs, dtype=torch.int64, device=env.device)
        while not played[row]:
            frames.append(env.render(row))
            step = env.step(actor(obs, first))
            obs, first = step.obs, step.ended
            played += first
            pause(played >= quota)
        return torch.stack(frames)


TERMINAL = 1.0  # s between two reports on a terminal
PLAIN = 30.0  # s between two lines of a log


def counting(total: int) -> Callable[[int], None]:
    """A function to call with the number of finished episodes of `total`: it prints it to standard
    error, on a terminal always in the same line, which is empty in the end."""
    terminal = sys.stderr.isatty()
    every = TERMINAL if terminal else PLAIN
    shown = time.monotonic()

    def show(done: int) -> None:
        nonlocal shown
        over = terminal and done >= total
        if over or time.monotonic() - shown > every:
            shown = time.monotonic()
            line = "" if over else f"{done} of {total} episodes"
            start, end = ("\r\x1b[K", "") if terminal else ("", "\n")
            print(f"{start}{line}", end=end, file=sys.stderr, flush=True)

    return show
