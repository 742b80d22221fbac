"""Measures what can help a policy, on tuning initial states: `embodied diagnose`.

Results are reported on other initial states (`embodied eval`: seed 10,000). In a part of the tuning
states noise is varied; the others choose a sampler. What is chosen is scored in states that did not
choose it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import NormalDist
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from embodied.core import tensors as tt
from embodied.core.bounds import Bound, Count, CountOrZero
from embodied.core.build import Node, build
from embodied.core.config_fields import settings_of
from embodied.core.device import forked
from embodied.core.env import HasCurrentTask, VecEnv
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.core.wrapper import find_protocol
from embodied.evaluation.evaluate import Evaluation, evaluate
from embodied.improvement.advice import Diagnosis, Region, Score
from embodied.improvement.ways import Sampler, best_sampler, with_steps

CALLS = 8  # of the policy that are kept, or up to twice as many, to compare actions there
EACH = 8  # parallel envs of a call
TRIES = (1, 4, 16)  # k of pass@k
SAME = 1e-4  # actions that differ by less are the same
STIRS = 1e-3  # spread in half ranges from which noise counts
LARGEST = 64  # elements of an observation that may explain failures
PICTURED = 4  # failures
FEWEST = 5  # states of a third whose score is looked at
SHOWN = 5  # regions


@dataclass(frozen=True)
class Config:
    episodes: Count = 100  # initial states; noise is varied in half of them
    num_envs: Count = 50  # parallel envs
    noises: Annotated[int, Bound(2)] = 16  # draws of the noise in each initial state
    seed: CountOrZero = 20_000  # of the initial states


@dataclass(frozen=True)
class Findings:
    """A diagnosis, and what its report draws. `episodes` are those of the policy as it is, one of
    each initial state; `mean` [R] the outcomes over noise, of the states in which it was varied;
    `pictures` the first and last frame side by side [H, 2 W, 3] of failures, by what happened."""

    diagnosis: Diagnosis
    episodes: Evaluation
    mean: Tensor
    pictures: Mapping[str, Tensor]


class Played(Policy):
    """`base` with one noise for all of its decisions (None: its own); it keeps what some of them
    saw."""

    def __init__(self, base: Policy, noise: Tensor | None = None) -> None:
        super().__init__()
        self.base = base
        self.spec = base.spec
        self.chunk = base.chunk
        self.noise = noise
        self.kept: list[tuple[Tensors, Tensors]] = []
        self.calls = 0
        self.stride = 1

    def initial(self, n: int) -> Tensors:
        return self.base.initial(n)

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        own = self.base.sample_noise(n, explore)
        return own if self.noise is None else self.noise.expand_as(own)

    def observe(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensors, Tensors]:
        if self.calls % self.stride == 0:
            n = tt.length(obs)
            each = torch.arange(0, n, max(1, n // EACH), device=noise.device)[:EACH]
            index = (each + self.calls) % n
            self.kept.append((tt.take(obs, index), tt.take(carry, index)))
        if len(self.kept) == 2 * CALLS:
            self.kept = self.kept[::2]
            self.stride *= 2
        self.calls += 1
        return self.base.observe(obs, carry, noise)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        return self.base.act(obs, carry, noise)

    def decisions(self) -> tuple[Tensors, Tensors]:
        """Observations and carries [m, ...] of decisions; those whose carry is like the last."""
        keys = self.kept[-1][1].keys()
        alike = [pair for pair in self.kept if pair[1].keys() == keys]
        return tt.cat([obs for obs, _ in alike]), tt.cat([carry for _, carry in alike])


@torch.no_grad()
def spread(played: Played, noises: int, execute: int) -> dict[str, Any]:
    """Compare the actions of `noises` draws at the decisions that `played` has kept: `noise`,
    `noise_spread`, `obs_spread` and `elements` of a Diagnosis.

    With the actions a[z, o]: sqrt(E_o Var_z a) and sqrt(E_z Var_o a), in half ranges of each
    element, averaged over the elements that move. Noise is hidden where the same draw gives other
    actions the second time.
    """
    policy = played.base
    obs, carry = played.decisions()
    draws = policy.sample_noise(noises)

    def act(draw: Tensor) -> Tensor:
        noise = draw.expand(tt.length(obs), *draw.shape).contiguous()
        seen, after = policy.observe(obs, carry, noise)
        return numbers(policy.act(seen, after, noise)[0][:, :execute], policy.spec.act)

    actions = torch.stack([act(draw) for draw in draws])  # [Z, m, execute, D]
    random = bool((act(draws[0]) - actions[0]).abs().max() > SAME)
    radius = (actions.amax((0, 1)) - actions.amin((0, 1))) / 2
    moves = radius > SAME
    over_noise = actions.var(0, correction=0).mean(0).sqrt() / radius.clamp(min=SAME) * moves
    over_obs = actions.var(1, correction=0).mean(0).sqrt() / radius.clamp(min=SAME) * moves
    count = moves.sum().clamp(min=1)
    total = (over_noise.sum() / count).item()
    size = actions.shape[-1]
    names = policy.spec.act.names
    names = names if len(names) == size else tuple(str(i) for i in range(size))
    pairs = zip(over_noise.mean(0).tolist(), over_obs.mean(0).tolist(), strict=True)
    return {
        "noise": "hidden" if random else "chosen" if total > STIRS else "none",
        "noise_spread": total,
        "obs_spread": (over_obs.sum() / count).item(),
        "elements": dict(zip(names, pairs, strict=True)),
    }


def numbers(actions: Tensor, leaf: Leaf) -> Tensor:
    """Actions [n, H, ...] as numbers [n, H, D]; one of several classes as a one-hot vector."""
    if leaf.dtype == "int64":
        return one_hot(actions.long(), leaf.choices[0]).float()
    return actions.float().flatten(2)


def diagnose(
    make_policy: Callable[[Spec], Policy],
    env: Node,
    config: Config,
    execute: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Findings:
    """Measure the policy that `make_policy` returns for the spec of the environment `env`.
    `execute`: steps of each chunk that are executed (None: all). `say` gets a line for each
    part."""
    batches = max(2, -(-config.episodes // config.num_envs))
    made = build(env | {"num_envs": -(-config.episodes // batches)}, VecEnv)
    try:
        policy = make_policy(made.spec).eval()
        own = Sampler(None, policy.chunk if execute is None else execute)
        return Measurement(policy, made, env, config, own, range(batches), say).run()
    finally:
        made.close()


@dataclass
class Measurement:
    """One diagnosis. Each parallel env plays one episode of a batch; a batch has its own seed."""

    policy: Policy
    env: VecEnv
    node: Node
    config: Config
    own: Sampler
    every: range  # the batches
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self.varied = self.every[: -(-len(self.every) // 2)]  # in these states noise is varied
        self.choosing = self.every[len(self.varied) :]  # these choose a sampler
        self.outcomes: list[Tensor] = []  # of all episodes

    def run(self) -> Findings:
        """Measure everything."""
        played = Played(self.policy)
        base = self.play(played, self.every)
        outcome = outcomes_of(base)
        score = Score.of(outcome, base.success is not None)
        self.say(f"as it is: {score}")
        with forked(self.config.seed):
            found = spread(played, self.config.noises, self.own.execute)
        self.say(
            f"actions: {found['noise_spread']:.0%} of half their range over noise, "
            f"{found['obs_spread']:.0%} over observations"
        )
        columns = self.initial_numbers()
        many = self.env.num_envs * len(self.varied)
        others = range(1, 1 if found["noise"] == "none" else self.config.noises)
        played_again = [outcomes_of(self.play(self.policy, self.varied, draw)) for draw in others]
        draws = torch.stack([outcome[:many], *played_again])  # [K, S]; K = 1 without noise
        d = Diagnosis(
            base=score,
            pass_at={k: best_of(draws, k) for k in TRIES if k <= len(draws)},
            mean_return=base.returns.mean().item(),
            mean_length=base.lengths.float().mean().item(),
            rewarded=bool(base.returns.std(correction=0) > SAME),
            timeouts=timeouts(base),
            continuous=self.env.spec.act.is_continuous,
            regions=regions(columns, torch.cat([draws.mean(0), outcome[many:]])),
            **found,
        )
        if d.noise != "none":
            self.say(f"best of k draws of the noise: {d.tries}")
        if d.noise == "chosen":
            d = self.with_fixed_noise(d, columns)
        d = self.with_sampler(d, outcome[many:])
        d = self.with_more_time(d, base)
        d = self.with_range(d, draws)
        return Findings(d, base, draws.mean(0), self.pictures(base))

    def play(
        self,
        policy: Policy,
        batches: Sequence[int],
        draw: int = 0,
        execute: int | None = None,
        env: VecEnv | None = None,
    ) -> Evaluation:
        """An episode from each initial state of `batches`, with draw number `draw` of the noise."""
        env = self.env if env is None else env
        execute = self.own.execute if execute is None else execute
        n, seed = env.num_envs, self.config.seed
        parts = [
            evaluate(policy, env, n, seed + batch, execute, noise_seed=1000 * draw + batch)
            for batch in batches
        ]
        result = together(parts)
        self.outcomes.append(outcomes_of(result))
        return result

    def with_fixed_noise(self, d: Diagnosis, columns: Mapping[str, Tensor]) -> Diagnosis:
        """Play with some noises that are the same in all decisions and states."""
        with forked(self.config.seed + 1):
            noises = self.policy.sample_noise(self.config.noises)
        played = [self.play(Played(self.policy, noise), self.varied) for noise in noises]
        outcomes = torch.stack([outcomes_of(result) for result in played])
        states = outcomes.shape[1]
        one = torch.zeros(states, dtype=torch.int64)
        groupings = [thirds(values[:states])[0] for values in columns.values()]
        d = replace(
            d,
            fixed=chosen_noise(outcomes, [one]),
            fixed_by_state=chosen_noise(outcomes, [one, *groupings]),
            fixed_any=outcomes.max(0).values.mean().item(),
        )
        self.say(f"one fixed noise: {d.shown(d.fixed)}; by region: {d.shown(d.fixed_by_state)}")
        return d

    def with_sampler(self, d: Diagnosis, outcome: Tensor) -> Diagnosis:
        """Look for settings with which the policy acts best, one after the other, in states where
        its own have `outcome` [S]."""
        score = Score.of(outcome, d.base.is_rate)
        best, _ = best_sampler(
            self.policy,
            self.own,
            score,
            lambda other: Score.of(self.tried(other, self.choosing), d.base.is_rate),
            zero=d.noise == "chosen",
        )
        if best == self.own:
            return d
        sampled = self.tried(best, self.varied).mean().item()
        words = best.words(self.policy, self.own)
        d = replace(d, sampler=words, zero_noise=best.zero, sampled=sampled)
        self.say(f"best sampler: {d.acts_best}: {d.shown(sampled)}")
        return d

    def tried(self, sampler: Sampler, batches: Sequence[int]) -> Tensor:
        """The outcomes [S] of the policy with other settings."""
        policy = self.policy
        if sampler.steps is not None:
            policy = with_steps(policy, sampler.steps)
        noise = torch.zeros_like(policy.sample_noise(1)) if sampler.zero else None
        return outcomes_of(self.play(Played(policy, noise), batches, execute=sampler.execute))

    def with_more_time(self, d: Diagnosis, base: Evaluation) -> Diagnosis:
        """Play with twice the time limit, if one ended episodes that failed. Returns of longer
        episodes do not compare."""
        if base.success is None or base.timed_out is None:
            return d
        first = self.env.num_envs * len(self.varied)
        late = (base.timed_out & ~base.success)[:first]
        if not late.any():
            return d
        limit = int(base.lengths[:first][late].max())
        longer = self.lengthened(limit)
        if longer is None:
            self.say(f"twice the time: not known, no setting `horizon` changes the {limit} steps")
        else:
            self.say(f"twice the time ({2 * limit} steps): {d.shown(longer)}")
        return replace(d, limit=limit, longer=longer)

    def lengthened(self, limit: int) -> float | None:
        """The score with twice the time limit; None where that cannot be set."""
        node = with_horizon(self.node, 2 * limit)
        if node is None:
            return None
        env = build(node | {"num_envs": self.env.num_envs}, VecEnv)
        try:
            result = self.play(self.policy, self.varied, env=env)
        finally:
            env.close()
        return None if result.lengths.max() <= limit else outcomes_of(result).mean().item()

    def with_range(self, d: Diagnosis, draws: Tensor) -> Diagnosis:
        """What all episodes together say."""
        every = torch.cat(self.outcomes)
        low, high = (0.0, 1.0) if d.base.is_rate else (every.min().item(), every.max().item())
        return replace(
            d,
            worst=low,
            best=high,
            episodes=len(every),
            reached=bool(every.max() > every.min() or (d.base.is_rate and every.max() > 0)),
            always=(draws.amin(0) >= high).float().mean().item(),
            never=(draws.amax(0) <= low).float().mean().item(),
        )

    def initial_numbers(self) -> dict[str, Tensor]:
        """Numbers [S] of the initial states that differ, by name: those of observations, also ones
        that only a critic sees, and of task vectors."""
        parts: list[dict[str, Tensor]] = []
        tasked = find_protocol(self.env, HasCurrentTask)
        for batch in self.every:
            obs = self.env.reset(self.config.seed + batch)
            found: dict[str, Tensor] = {}
            for name, leaf in self.env.spec.obs.items():
                if leaf.dtype.startswith("float") and leaf.size <= LARGEST:
                    found |= columns(name, obs[name], leaf.names)
            if tasked is not None and self.env.spec.task is not None:
                found |= columns("task", torch.as_tensor(tasked.task), self.env.spec.task.names)
            parts.append(found)
        whole = tt.cat(parts)
        return {name: values for name, values in whole.items() if values.std() > SAME}

    def pictures(self, base: Evaluation) -> dict[str, Tensor]:
        """The first and the last frame of some failures of the first batch, which is played again;
        nothing where the environment draws none."""
        n = self.env.num_envs
        order = outcomes_of(base)[:n].sort(stable=True)
        failed = [int(i) for v, i in zip(*order, strict=True) if base.success is None or v == 0]
        shown = failed[:: max(1, len(failed) // PICTURED)][:PICTURED]
        last: dict[int, Tensor] = {}

        def keep(ended: Tensor) -> None:
            for i in shown:
                if i not in last and bool(ended[i]):
                    last[i] = self.env.render(i)

        self.env.reset(self.config.seed)
        try:
            first = {i: self.env.render(i) for i in shown}
        except (NotImplementedError, RuntimeError, ImportError) as error:
            self.say(f"no pictures: {error}")
            return {}
        if shown:
            self.env.add_pre_reset_hook(keep)
            self.play(self.policy, self.every[:1])
        return {
            f"initial state {i}: {how_it_ended(base, i)}": torch.cat([first[i], last[i]], 1).cpu()
            for i in shown
            if i in last
        }


def best_of(outcomes: Tensor, k: int) -> float:
    """The mean over S states of the best of `k` draws, without bias (pass@k; Chen et al., 2021).

    `outcomes` [K, S] are those of K draws of the noise: 0 and 1, or returns.

    With those of a state in ascending order x_1 .. x_n, the mean of the best over all
    subsets of k is sum_i C(i - 1, k - 1) x_i / C(n, k).
    """
    n = len(outcomes)
    shares = [math.comb(i, k - 1) / math.comb(n, k) for i in range(n)]
    ordered = outcomes.double().sort(0).values
    return (torch.tensor(shares, dtype=torch.float64) @ ordered).mean().item()


def chosen_noise(outcomes: Tensor, groupings: Sequence[Tensor]) -> float:
    """The score of one noise for each group of states, in states that did not choose it.

    Each of `groupings` [S] (int64, below 3) numbers the group of each state. Every second state
    chooses the grouping and its noises, the others are the score, and the other way round. The
    grouping is chosen by scores that leave one state out: many groups fit anything.
    """
    states = outcomes.shape[1]
    scores: list[float] = []
    for half in (0, 1):
        train = torch.arange(states) % 2 == half
        found: list[tuple[float, float]] = []
        for groups in groupings:
            sums = torch.stack([outcomes[:, train & (groups == g)].sum(1) for g in range(3)])
            others = sums[groups].T - outcomes * train  # a state does not choose for itself
            played = outcomes[others.argmax(0), torch.arange(states)].double()
            found.append((played[train].mean().item(), played[~train].mean().item()))
        scores.append(max(found, key=lambda pair: pair[0])[1])
    return sum(scores) / 2


def thirds(values: Tensor) -> tuple[Tensor, tuple[float, float]]:
    """The third [S] (0, 1, 2) in which each of `values` [S] is, and the edges between them."""
    edges = values.double().quantile(torch.tensor([1 / 3, 2 / 3], dtype=torch.float64))
    return torch.bucketize(values.double(), edges), (edges[0].item(), edges[1].item())


def regions(columns: Mapping[str, Tensor], outcomes: Tensor) -> tuple[Region, ...]:
    """The numbers `columns` [S] of the initial states on whose third the outcomes [S] depend. The
    largest difference between two thirds has to be larger than chance makes one of all differences
    that are looked at, with a probability of 5% (Bonferroni)."""
    limit = NormalDist().inv_cdf(1 - 0.05 / (2 * 3 * max(1, len(columns))))
    deviation = outcomes.double().std(correction=0).item()
    found: list[Region] = []
    for name, values in columns.items():
        groups, edges = thirds(values)
        parts = [outcomes[groups == g].double() for g in range(3)]
        known = [part for part in parts if len(part) >= FEWEST]
        differ = [
            abs(a.mean() - b.mean()) > limit * deviation * (1 / len(a) + 1 / len(b)) ** 0.5
            for a, b in combinations(known, 2)
        ]
        if any(differ):
            scores = [p.mean().item() if len(p) >= FEWEST else None for p in parts]
            found.append(Region(name, edges, (scores[0], scores[1], scores[2])))
    return tuple(sorted(found, key=lambda each: each.worst - each.best)[:SHOWN])


def outcomes_of(result: Evaluation) -> Tensor:
    """Success of episodes as 0 and 1 [N], or their returns."""
    return result.returns if result.success is None else result.success.float()


def together(parts: Sequence[Evaluation]) -> Evaluation:
    """Several evaluations as one."""

    def joined(name: str) -> Tensor | None:
        values = [getattr(part, name) for part in parts]
        return None if any(value is None for value in values) else torch.cat(values)

    returns = torch.cat([part.returns for part in parts])
    lengths = torch.cat([part.lengths for part in parts])
    late = joined("timed_out")
    return Evaluation(joined("success"), returns, lengths, joined("violated"), timed_out=late)


def timeouts(result: Evaluation) -> float:
    """The share of the failures that a time limit ended; 0 without failures."""
    if result.timed_out is None:
        return 0.0
    failed = torch.ones_like(result.timed_out) if result.success is None else ~result.success
    return result.timed_out[failed].float().mean().item() if failed.any() else 0.0


def how_it_ended(result: Evaluation, i: int) -> str:
    late = result.timed_out is not None and bool(result.timed_out[i])
    end = "out of time" if late else "ended"
    return f"{end} after {int(result.lengths[i])} steps, return {result.returns[i]:,.2f}"


def columns(name: str, values: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """The elements [n] of `values` [n, ...], by name."""
    flat = values.detach().cpu().double().flatten(1) if values.ndim > 1 else values[:, None]
    size = flat.shape[1]
    each = names if len(names) == size else [str(i) for i in range(size)]
    return {name if size == 1 else f"{name}.{key}": flat[:, i] for i, key in enumerate(each)}


def with_horizon(node: Node, steps: int) -> Node | None:
    """The environment `node` with another time limit; None if no part of it has that setting."""
    settings = settings_of(str(node.get("_target_"))) or ()
    if any(setting.name == "horizon" for setting in settings):
        return {**node, "horizon": steps}
    inner = node.get("env")
    changed = with_horizon(inner, steps) if isinstance(inner, dict) else None
    return None if changed is None else {**node, "env": changed}
