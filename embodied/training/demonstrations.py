"""Demonstrations: reads recorded episodes as transitions or action chunks for a learner."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embodied.buffers.pending import columns_of_episodes
from embodied.buffers.source import Mixture, Source
from embodied.buffers.weighted import Weighted, Weights, positive_variance
from embodied.core import distributed
from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build
from embodied.core.choices import Choices
from embodied.core.env import HasModel, VecEnv
from embodied.core.policy import Policy
from embodied.core.reward import extra_columns
from embodied.core.spec import (
    INSTRUCTION,
    MASK,
    SENTENCE,
    SYMBOL,
    Leaf,
    Spec,
    SpecMismatch,
    require_same,
)
from embodied.core.tensors import Tensors, history_steps, length, nest, take, under, where
from embodied.core.wrapper import find_protocol
from embodied.datasets.hub import local_folder
from embodied.datasets.lerobot.pictures import load
from embodied.datasets.lerobot.reader import Episodes, read_episodes
from embodied.datasets.lerobot.schema import read_info, skipped
from embodied.datasets.mapping import Mapping, remapped
from embodied.datasets.transitions import (
    INTERVENED,
    SOURCE,
    Dataset,
    chunks,
    flags,
    human_steps,
    in_order_of,
    joined,
    past_observations,
    source_numbers,
    spec_in_order_of,
    transitions,
    unnamed,
    with_steps,
)
from embodied.learners.learner import Learner
from embodied.policies.abilities import Corrects
from embodied.training.config import Offline, RunConfig

if TYPE_CHECKING:
    from embodied.rewards.preferences.labellers import SegmentPairs


def read_demonstrations(config: RunConfig, env: VecEnv | None) -> Episodes | None:
    """The episodes of `config.demos`, in the terms of `env` by `config.mapping` if they are not of
    it; without an environment in their own. SpecMismatch or ConfigError if they do not fit."""
    if config.demos is None:
        return None
    mapping = None if config.mapping is None else Mapping.load(config.mapping)
    parts: list[Episodes] = []
    paths = [config.demos] if isinstance(config.demos, str) else config.demos
    for path in paths:
        folder = local_folder(path)
        part = read_episodes(folder, config.demo_episodes, config.demo_memory_mb / len(paths))
        if left_out := skipped(read_info(folder)):
            say(f"{path}: {', '.join(left_out)} are no numbers or pictures and are not read")
        if env is None:
            if parts:
                if trusted := unnamed(parts[0].spec, part.spec):
                    say(f"{path}: {trusted} have no names: their order is trusted to be the same")
                part = in_order_of(part, parts[0].spec, path)
                require_same(parts[0].spec, part.spec, "the first dataset", f"dataset {path}")
        elif mapping is None or is_same(env.spec, part.spec):
            if (imagined := find_protocol(env, HasModel)) is not None:
                part = imagined.encoded(part, path)
            try:
                part = in_order_of(part, env.spec, path)
                require_same(env.spec, part.spec, "environment", f"dataset {path}")
            except SpecMismatch as error:
                raise SpecMismatch(
                    f"{error}; mapping=FILE names what belongs together, or leave env= out to "
                    "imitate the dataset alone"
                ) from error
        parts.append(part)
    if env is not None and mapping is not None:
        here = env.spec
        foreign = {n: part for n, part in enumerate(parts) if not is_same(here, part.spec)}
        theirs = remapped({paths[n]: part for n, part in foreign.items()}, here, mapping)
        parts = [theirs.get(path, part) for path, part in zip(paths, parts, strict=True)]
    for number, part in enumerate(parts):
        own = torch.full((int(part.length.sum()),), number)
        parts[number] = with_steps(part, {SOURCE: own})
    episodes = joined(parts)
    _require_allowed(episodes)
    if config.demo_policy_steps:
        if INTERVENED not in episodes.steps:
            raise ConfigError(
                "demo_policy_steps has no effect: these recordings have no column intervention, so "
                "all of their steps are imitated"
            )
        steps = {key: value for key, value in episodes.steps.items() if key != INTERVENED}
        episodes = replace(episodes, steps=steps)
    if env is None:
        return instructed(episodes, config.instruction)
    tasks = set(episodes.words())
    has_text = INSTRUCTION in env.spec.obs or any(leaf.is_text for leaf in env.spec.obs.values())
    if len(tasks) > 1 and not has_text:
        say(f"demos have {len(tasks)} tasks, and no observation of env= tells them apart")
    return episodes


def instructed(episodes: Episodes, how: str) -> Episodes:
    """`episodes` with their task in words, or of several tasks with their sentences and the
    observation `instruction`, which says `how` ("number", "vector", "ignore": not at all) what the
    sentence of each step is."""
    words = episodes.words()
    tasks = tuple(sorted(set(words)))
    # No encoder reads text: what an observed sentence says is the instruction.
    seen = {name: leaf for name, leaf in episodes.spec.obs.items() if not leaf.is_text}
    episodes = replace(episodes, spec=replace(episodes.spec, obs=seen))
    if not tasks:
        return episodes
    if len(tasks) == 1:
        return replace(episodes, spec=replace(episodes.spec, text=tasks[0]))
    spec = replace(episodes.spec, text="", tasks=tasks)
    if how == "ignore" or INSTRUCTION in spec.obs:
        return replace(episodes, spec=spec)
    number = {text: place for place, text in enumerate(tasks)}
    said = torch.tensor([number[text] for text in words])
    leaf = Leaf((), "int64", 0, len(tasks) - 1, SYMBOL)
    if how == "vector":
        from embodied.nn.sentences import SIZE, sentence_vectors

        said, leaf = sentence_vectors(tasks)[said], Leaf((SIZE,), unit=SENTENCE)
    last = episodes.start + episodes.length - 1
    return replace(
        episodes,
        spec=spec.with_obs(**{INSTRUCTION: leaf}),
        steps={**episodes.steps, f"obs/{INSTRUCTION}": said},
        final={**episodes.final, INSTRUCTION: said[last]},
    )


def _require_allowed(episodes: Episodes) -> None:
    """ConfigError where a recorded action is one that its mask forbids: no policy can take it."""
    choices, steps = Choices(episodes.spec), episodes.steps
    if not choices.masked:
        return
    chosen, _ = choices.split(steps["action"][:, None])
    allowed = choices.allowed(under(steps, "obs")).gather(3, chosen[..., None])
    wrong = (~allowed).flatten(1).any(1).nonzero().flatten()
    if len(wrong):
        episode = int((episodes.length.cumsum(0) <= wrong[0]).sum())
        raise ConfigError(
            f"{len(wrong)} recorded actions are ones that obs/{MASK} of their step forbids, the "
            f"first in episode {episode}: record the mask that was there before the action"
        )


def say(line: str) -> None:
    """One line for who trains, on the first process."""
    if distributed.rank() == 0:
        print(f"embodied: {line}", file=sys.stderr, flush=True)


def is_same(here: Spec, there: Spec) -> bool:
    """Whether `require_same` accepts the two, whose elements have the same names in any order."""
    try:
        require_same(here, spec_in_order_of(there, here), "", "")
    except SpecMismatch:
        return False
    return True


def rows_for(episodes: Episodes, policy: Policy, learner: Learner, execute: int | None) -> Tensors:
    """What `learner` samples: action chunks, or transitions that span `execute` steps; with the
    past observations that `policy` has in its carry. For a learner of pairs the single steps, of
    which `pairs_of` makes segments.

    Where the learner's actions correct those of a base policy, so do the transitions'.

    ConfigError if the learner imitates, and no step was a person's.
    """
    past = history_steps(learner.policy.initial(1))
    steered = learner.policy is not policy
    if steered and (learner.rows != "decisions" or not isinstance(policy, Corrects)):
        raise ConfigError(
            "this finetune method cannot use demonstrations, because its learner's actions are not "
            "the robot's, nor corrections of a base's: leave out demos, or choose another finetune"
        )
    if learner.imitates() and not human_steps(episodes).any():
        raise ConfigError(
            "no step of these recordings was a person's (column intervention): "
            "demo_policy_steps=true imitates what a policy did"
        )
    if learner.rows == "chunks":
        rows = chunks(episodes, policy.chunk) | _with_past(episodes, past)
        return rows | (
            {SOURCE: source_numbers(episodes)} if SOURCE in extra_columns(learner) else {}
        )
    if learner.rows == "pairs":
        seen = nest(under(episodes.steps, "obs"), "obs") | _with_past(episodes, past)
        return {**seen, "action": episodes.steps["action"]}
    steps = execute or policy.chunk
    own: Tensors = {}
    if steered:
        assert isinstance(policy, Corrects)
        episodes, own = as_corrections(episodes, policy)
    rows = transitions(episodes, learner.gamma, steps, learner.n_step) | own
    del rows["episode"]  # transitions from the environment have no such column
    if not learner.uses_executed_steps:
        rows.pop("executed_steps", None)
    width = steps * learner.n_step
    rows |= past_observations(episodes, past, width)
    rows |= flags(episodes, extra_columns(learner), steps)
    return rows | columns_of_episodes(episodes, rows, learner.columns, learner.gamma, width)


def as_corrections(episodes: Episodes, policy: Corrects) -> tuple[Episodes, Tensors]:
    """The episodes with the observation `base_action`, what the base of `policy` would have done
    (it plans as in a run, from the recorded observations), and the actions as corrections of it;
    and `obs/base_action` [N] of the transitions, which makes the recorded action with them."""
    actor = Actor(policy.base, len(episodes), policy.execute, explore=True)
    final, every = load(episodes.final), torch.arange(len(episodes))
    played: list[Tensor] = []
    for step in range(int(episodes.length.max()) + 1):
        index = episodes.start + (episodes.length - 1).clamp(max=step)
        obs = where(episodes.length > step, load(take(under(episodes.steps, "obs"), index)), final)
        played.append(actor(obs, torch.full((len(episodes),), step == 0)))
    base = torch.stack(played, 1)  # [E, T + 1, A]
    before = base[torch.arange(base.shape[1]) < episodes.length[:, None]]
    own, action = policy.described(before, episodes.steps["action"])
    steps = {**episodes.steps, "obs/base_action": before, "action": action}
    last = {**episodes.final, "base_action": base[every, episodes.length]}
    return replace(episodes, steps=steps, final=last), {"obs/base_action": own}


def _with_past(episodes: Episodes, past: dict[str, int]) -> Tensors:
    """The `past` observations of every step, `obs/history/NAME` [N, k, ...]."""
    return nest(under(past_observations(episodes, past), "obs"), "obs")


def imitated(rows: Tensors) -> Tensor:
    """Which rows [N] (bool) are sampled: all but chunks of a policy's own steps."""
    valid = rows.get("valid")
    return torch.ones(length(rows), dtype=torch.bool) if valid is None else valid[:, 0]


def source_of(
    rows: Tensors,
    episodes: Episodes,
    config: RunConfig,
    device: torch.device,
    gamma: float,
    held: Tensor | None = None,
) -> Dataset | Weighted | Mixture:
    """A source of the demonstrations' `rows`, weighted by `config.weighting` if it is set (`gamma`:
    the learner's discount); with `data.fractions` a mixture of one such source of each dataset.
    Rows of the episodes `held` [E] (bool), and a policy's own steps, are never sampled."""
    kept, own = torch.ones(len(episodes)) if held is None else (~held).double(), imitated(rows)
    fractions = config.data.fractions if isinstance(config.data, Offline) else None
    if fractions is None and config.weighting is None and bool(kept.all()) and bool(own.all()):
        return Dataset(rows, device)
    each = kept.repeat_interleave(episodes.length) * own
    if config.weighting is not None:
        weigh = build(config.weighting, Weights, gamma=gamma)
        weights = weigh(episodes)  # of episodes [E], or of steps [N]
        if len(weights) == len(episodes):
            weights = weights.repeat_interleave(episodes.length)
        each = each * weights
    if fractions is None:
        return Weighted(rows, each, device)
    numbers, parts = source_numbers(episodes), list[Source]()
    for number in range(len(fractions)):
        index = ((numbers == number) & (each > 0)).nonzero().flatten()
        if not len(index):
            raise ConfigError(f"dataset {number} of demos has no step to train on: leave it out")
        parts.append(Weighted(take(rows, index), each[index], device))
    # The mixture; ConfigError for fractions that it can only round.
    try:
        mixture = Mixture(parts, fractions)
    except ValueError:
        mixture = None
    shares = [] if mixture is None else [count / mixture.period for count in mixture.counts]
    if mixture is None or max(abs(a - b) for a, b in zip(shares, fractions, strict=True)) > 1e-3:
        raise ConfigError(
            f"data.fractions={list(fractions)} should be fractions with denominators of at most 64"
        )
    return mixture


def pairs_of(
    rows: Tensors, episodes: Episodes, learner: Learner, config: RunConfig, device: torch.device
) -> SegmentPairs:
    """Labelled pairs of segments of `rows`, which are single steps; ConfigError for a setting that
    is missing or has no effect."""
    from embodied.rewards.preferences.labellers import Labeller, SegmentPairs

    assert isinstance(config.data, Offline)
    pairs = config.data.pairs
    if pairs is None:
        raise ConfigError("this learner learns from labelled pairs: data.pairs={labeller: NODE}")
    if config.weighting is not None or config.data.fractions is not None:
        raise ConfigError(
            "weighting and data.fractions have no effect with a learner of pairs: leave them out"
        )
    if distributed.world() > 1:
        raise ConfigError("pairs are labelled in one process: start without torchrun")
    return SegmentPairs(
        rows,
        episodes,
        build(pairs.labeller, Labeller, seed=config.seed, folder=Path(config.out)),
        learner.segment,
        pairs.count,
        picture=pairs.picture,
        seed=config.seed,
        device=device,
    )


def metrics_of(
    source: Source | None, episodes: Episodes, held: Tensor | None = None
) -> dict[str, float]:
    """Metrics of a weighted source (its number of transitions, the effective sample size, and the
    positive-sided variance of the returns) or of a mixture (the number of transitions of each), and
    the number of episodes that are held out."""
    found: dict[str, float] = {}
    if isinstance(source, Mixture):
        found = {f"data/rows_{n}": float(len(part)) for n, part in enumerate(source.sources)}
    if isinstance(source, Weighted):
        found = {"data/rows": len(source), "data/effective_rows": source.effective}
        found["data/positive_variance"] = positive_variance(episodes)
    if held is not None and bool(held.any()):
        found["data/held_out_episodes"] = float(held.sum())
    return found
