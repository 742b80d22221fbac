"""Diagnosis: what was measured of a policy; rules that say which ways may improve it.

A rule is a function of a Diagnosis alone. It says what a way may add to the policy's score, as far
as the measurements tell, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from embodied.evaluation.statistics import rate, wilson

LEAST = 0.1  # a smaller gain is not told from chance
SELDOM = 0.05  # a success rate below which own successes are too few to imitate


@dataclass(frozen=True)
class Score:
    """The success rate of some episodes, or their mean return where the environment reports no
    success; `low`, `high`: the 95% interval."""

    mean: float
    low: float
    high: float
    episodes: int
    is_rate: bool

    @classmethod
    def of(cls, outcomes: Tensor, is_rate: bool) -> Score:
        """The score of episodes with `outcomes` [N]: 0 and 1, or returns."""
        count, mean = len(outcomes), outcomes.double().mean().item()
        if is_rate:
            return cls(mean, *wilson(round(mean * count), count), count, True)
        error = outcomes.double().std(correction=1).item() / count**0.5 if count > 1 else 0.0
        return cls(mean, mean - 1.96 * error, mean + 1.96 * error, count, False)

    def __str__(self) -> str:
        if self.is_rate:
            return rate(round(self.mean * self.episodes), self.episodes)
        return f"{self.mean:,.2f} [{self.low:,.2f}, {self.high:,.2f}]"


@dataclass(frozen=True)
class Region:
    """The score by thirds of one number `name` of the initial state; None: hardly a state is in it.
    The thirds are those below, between and above `edges`."""

    name: str
    edges: tuple[float, float]
    scores: tuple[float | None, float | None, float | None]

    @property
    def best(self) -> float:
        return max(score for score in self.scores if score is not None)

    @property
    def worst(self) -> float:
        return min(score for score in self.scores if score is not None)

    @property
    def place(self) -> str:
        """Where the score is worst, in words."""
        low, high = self.edges
        words = (f"below {low:.3g}", f"from {low:.3g} to {high:.3g}", f"above {high:.3g}")
        return f"{self.name} {words[self.scores.index(self.worst)]}"


@dataclass(frozen=True)
class Diagnosis:
    """Measurements of a policy on tuning initial states. Scores are success rates, or returns where
    the environment reports no success."""

    base: Score  # as it acts by itself
    pass_at: Mapping[int, float]  # by k: the best of k draws of the noise, in each initial state
    worst: float = 0.0  # the lowest score that an episode can have, or had
    best: float = 1.0  # the highest one
    episodes: int = 0  # of all measurements
    mean_return: float = 0.0  # of the episodes of `base`
    mean_length: float = 0.0  # of the same, in steps
    reached: bool = True  # whether an episode succeeded (without a success signal: returns differ)
    rewarded: bool = True  # whether the returns of episodes differ
    fixed: float | None = None  # one noise for all decisions, in states where it was not chosen
    fixed_by_state: float | None = None  # one for each third of one number of the initial state
    fixed_any: float | None = None  # the best one of each initial state
    sampler: tuple[str, ...] = ()  # settings with which it acts best, as `embodied eval` takes them
    zero_noise: bool = False  # whether zeros in place of the noise belong to them
    sampled: float | None = None  # with these, in states on which they were not chosen
    limit: int | None = None  # the time limit in steps (None: no episode reached it)
    longer: float | None = None  # with twice the time limit
    timeouts: float = 0.0  # share of the failures that the time limit ended
    noise: Literal["chosen", "hidden", "none"] = "none"  # what makes its actions differ
    continuous: bool = True  # whether all elements of its actions are numbers
    noise_spread: float = 0.0  # of actions over noise, in half ranges of each element
    obs_spread: float = 0.0  # the same over observations
    elements: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # both, of each one
    always: float = 0.0  # share of the initial states in which it always succeeds
    never: float = 0.0  # share of the initial states in which it never does
    regions: tuple[Region, ...] = ()  # numbers of the initial state that matter

    @property
    def ceiling(self) -> float:
        """What choosing the noise reaches at most, as far as was tried."""
        return max([*self.pass_at.values(), *known(self.fixed_any)])

    @property
    def simple(self) -> float:
        """What a simple choice of the noise, or none, has reached in states that did not choose."""
        return max([self.pass_at[1], *known(self.fixed, self.fixed_by_state)])

    @property
    def steered(self) -> float:
        """What choosing the noise by the state may reach: half-way to the ceiling from what a
        simple choice has reached in states where it was not chosen. Luck makes a ceiling too."""
        return (self.simple + self.ceiling) / 2

    def gain(self, score: float | None, before: float | None = None) -> float:
        """By how much a score is better than `before` (None: a draw of the noise), as a share of
        the range of scores."""
        before = self.pass_at[1] if before is None else before
        wide = self.best - self.worst
        return 0.0 if score is None or wide <= 0 else (score - before) / wide

    @property
    def tries(self) -> str:
        """The best of k draws, in words."""
        return ", ".join(f"k={k} {self.shown(score)}" for k, score in self.pass_at.items())

    @property
    def acts_best(self) -> str:
        """The settings with which it acts best, in words; "" for its own."""
        return " ".join([*self.sampler, *(["zero noise"] if self.zero_noise else [])])

    def shown(self, score: float | None) -> str:
        """A score for people."""
        if score is None:
            return "-"
        return f"{score:.0%}" if self.base.is_rate else f"{score:,.2f}"

    def __str__(self) -> str:
        lines = [f"{name}: {value}" for name, value in measured(self)]
        ways = [f"{each.way} (+{each.gain:.0%}): {each.reason}" for each in advise(self)]
        return "\n".join([*lines, *(ways or [NOTHING])])


def known(*scores: float | None) -> list[float]:
    """Those of `scores` that were measured."""
    return [score for score in scores if score is not None]


@dataclass(frozen=True)
class Advice:
    """A way that may improve a policy. `gain`: what it may add, as a share of the range of scores;
    `reason`: a sentence."""

    way: str
    gain: float
    reason: str


def demonstrations(d: Diagnosis) -> Advice | None:
    """Nothing can be learned from a reward that never comes."""
    if d.reached:
        return None
    reason = f"no success was ever seen ({d.episodes} episodes): nothing can be learned from a "
    reason += "reward that never comes; record demonstrations, or begin nearer to the goal"
    return Advice("demonstrations", 1.0, reason)


def sampler(d: Diagnosis) -> Advice | None:
    """Other settings cost nothing."""
    before = d.shown(d.pass_at[1])
    reason = f"{d.shown(d.sampled)} instead of {before} with {d.acts_best}, without training"
    return Advice("sampler", d.gain(d.sampled), reason)


def more_time(d: Diagnosis) -> Advice | None:
    """A policy that is only slow needs no learning."""
    before = d.shown(d.pass_at[1])
    reason = f"{d.shown(d.longer)} instead of {before} with twice the {d.limit} steps"
    return Advice("more_time", d.gain(d.longer), reason)


def ticket(d: Diagnosis) -> Advice | None:
    """A searched noise needs episodes and no network."""
    if d.noise != "chosen":
        return None
    one, few = d.gain(d.fixed), d.gain(d.fixed_by_state)
    if one + LEAST >= few:
        reason = f"one fixed noise has {d.shown(d.fixed)}"
    else:
        reason = f"a fixed noise for each of three regions has {d.shown(d.fixed_by_state)}"
    return Advice("ticket", max(one, few), f"{reason}, in states that did not choose it")


def offer_noise(d: Diagnosis) -> Advice | None:
    """Noise that its server keeps to itself cannot be chosen."""
    if d.noise != "hidden":
        return None
    reason = (
        f"the best of {max(d.pass_at)} tries has {d.shown(d.ceiling)}, and its noise cannot be "
    )
    return Advice("offer_noise", d.gain(d.ceiling), f"{reason}chosen: serve it with its noise")


def own_successes(d: Diagnosis) -> Advice | None:
    """Imitating what succeeded makes it more likely."""
    if not d.base.is_rate or d.pass_at[1] < SELDOM:
        return None
    reason = f"it succeeds in {d.shown(d.pass_at[1])}, and in {d.shown(d.ceiling)} at its best try"
    return Advice("own_successes", d.gain(d.ceiling) / 2, reason)


def dsrl(d: Diagnosis) -> Advice | None:
    """A choice of the noise that depends on the state."""
    if d.noise != "chosen":
        return None
    reason = f"the best of its noises has {d.shown(d.ceiling)}, simple choices {d.shown(d.simple)}"
    return Advice("dsrl", d.gain(d.steered), f"{reason}: which is right depends on the state")


def residual(d: Diagnosis) -> Advice | None:
    """What no noise reaches, corrections of every step may."""
    if not d.continuous or not (d.reached or d.rewarded):
        return None
    if d.noise == "none":
        return Advice("residual", d.gain(d.best), "its actions do not depend on a noise")
    left = d.shown(d.best - d.steered)
    reason = f"choosing its noise leaves {left} to corrections of its actions"
    return Advice("residual", d.gain(d.best, d.steered), reason)


def demonstrations_there(d: Diagnosis) -> Advice | None:
    """A region in which it fails more often than elsewhere."""
    if not d.regions:
        return None
    region = max(d.regions, key=lambda each: each.best - each.worst)
    reason = f"{d.shown(region.worst)} where {region.place}, up to {d.shown(region.best)} elsewhere"
    return Advice("demonstrations_there", d.gain(region.best), reason)


Rule = Callable[[Diagnosis], Advice | None]
NOTHING = "no way promises more, by what was measured"
RULES: tuple[Rule, ...] = (
    demonstrations,
    sampler,
    more_time,
    ticket,
    offer_noise,
    own_successes,
    dsrl,
    residual,
    demonstrations_there,
)
"""The cheapest first: of ways that may add the same to a tenth, the cheaper one is tried first."""


def advise(d: Diagnosis) -> list[Advice]:
    """The ways that may improve a policy, best first; empty where nothing promises `LEAST`."""
    found = [advice for rule in RULES if (advice := rule(d)) is not None]
    return sorted((a for a in found if a.gain >= LEAST), key=lambda a: -round(a.gain, 1))


def measured(d: Diagnosis) -> list[tuple[str, str]]:
    """What was measured, as lines for people."""
    lines = [("as it is", f"{d.base} of {d.base.episodes} initial states")]
    lines.append(("return, length", f"{d.mean_return:,.2f}, {d.mean_length:.1f} steps"))
    if d.acts_best:
        lines.append((f"best sampler: {d.acts_best}", d.shown(d.sampled)))
    if d.longer is not None:
        lines.append((f"twice the time limit of {d.limit} steps", d.shown(d.longer)))
    lines += [("best of k draws of the noise", d.tries)] if d.noise != "none" else []
    if d.fixed is not None:
        lines.append(("one fixed noise", d.shown(d.fixed)))
        lines.append(("one for each of three regions", d.shown(d.fixed_by_state)))
    lines.append(("noise", NOISE[d.noise]))
    lines.append(("spread of actions over noise", f"{d.noise_spread:.0%} of half their range"))
    lines.append(("spread over observations", f"{d.obs_spread:.0%} of half their range"))
    if d.base.mean < d.best:
        lines.append(("failures that ran out of time", f"{d.timeouts:.0%}"))
    for region in d.regions:
        scores = ", ".join(map(d.shown, region.scores))
        lines.append((f"by {region.name} ({region.edges[0]:.3g}, {region.edges[1]:.3g})", scores))
    return lines


NOISE = {
    "chosen": "decides on its actions, and can be chosen",
    "hidden": "its actions are random, and nothing that can be chosen decides on them",
    "none": "its actions do not depend on a noise",
}
