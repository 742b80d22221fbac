"""Improve a policy: measure it, let ways to improve it race, and leave the best one with the proof.

Ways are chosen by episodes from initial states (seed `TUNING`) that no training sees; what is
reported was measured once, at the end, on others (seed `HELD_OUT`).
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from embodied.core import checkpoint
from embodied.core.bounds import Count, CountOrZero, Positive
from embodied.core.build import ConfigError, Node, build
from embodied.core.errors import ContractError
from embodied.core.saved_node import read_saved
from embodied.datasets.lerobot.reader import DatasetError
from embodied.evaluation.evaluate import Evaluation
from embodied.evaluation.video import write_mp4
from embodied.improvement.advice import Score
from embodied.improvement.diagnosis import outcomes_of
from embodied.improvement.pages import write_report
from embodied.improvement.race import (
    BASE,
    SAMPLER,
    AtOnce,
    Improvement,
    Journal,
    Leg,
    amount,
    best,
    race,
    shares,
)
from embodied.improvement.ways import (
    Commands,
    Sampler,
    Setup,
    Way,
    acting_best,
    best_sampler,
    executed,
    save_run,
)
from embodied.policies.remote.address import is_address

TUNING, HELD_OUT = 20_000, 10_000
SEARCH_SHARE = 0.1  # of the budget, in which the best sampler is looked for


@dataclass(frozen=True)
class ImproveConfig:
    policy: str  # a run, a checkpoint or a policy server (ws://HOST:PORT)
    out: str  # folder of everything; the better policy is in out/policy
    env: Node  # the environment
    mapping: str | None = None  # a file that joins a policy of another origin with env
    task: str | None = None  # the sentence that a policy of several tasks is told
    minutes: Positive = 30.0  # wall time in all (with steps: not used)
    steps: Count | None = None  # environment steps of the race, in place of minutes
    ways: tuple[str, ...] | None = None  # that race (null: all that apply)
    recipes: Mapping[str, Node] = field(default_factory=dict)  # settings of ways, by name
    demos: str | tuple[str, ...] | None = None  # dataset folder(s) of demonstrations
    episodes: Count = 100  # of a measurement that chooses
    held_out: Count = 200  # episodes of the last measurement
    num_envs: Count = 50  # parallel envs that measure
    workers: Count = 1  # ways and measurements at the same time, each on a core of its own
    video: bool = True  # films of the base and of the better policy
    only_better: bool = True  # leave the base behind if no way is better (false: the best way)
    seed: CountOrZero = 0  # of the trainings
    device: str = "auto"  # auto | cpu | cuda
    threads: Count = 1  # CPU threads of torch


class Improver:
    """One improvement, which goes on where it was when it is run again."""

    def __init__(
        self,
        config: ImproveConfig,
        commands: Commands,
        ways: Mapping[str, Node],
        tell: Callable[[str], None],
        elsewhere: Callable[..., Any] | None = None,
    ) -> None:
        """`elsewhere` calls a method, by its name, of an Improver of the same folder in another
        process, one for each thread."""
        self.config, self.commands, self.tell = config, commands, tell
        self.elsewhere = elsewhere if config.workers > 1 else None
        self.pool: Executor = ThreadPoolExecutor(config.workers) if self.elsewhere else AtOnce()
        self.out = Path(config.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.ways = {name: build(node, Way) for name, node in ways.items()}
        self.journal = Journal(self.out / "race.jsonl")
        self.final = Journal(self.out / "held_out.jsonl")
        self.measuring: dict[tuple[str, int], Future[Leg]] = {}  # by way and rung, held out
        self.unit: Literal["minutes", "steps"] = "minutes" if config.steps is None else "steps"

    def run(self) -> Improvement:
        try:
            return self.raced()
        finally:  # after Ctrl-C nothing more is started
            self.pool.shutdown(cancel_futures=True)

    def raced(self) -> Improvement:
        base = self.journal.find(BASE, 0) or self.journal.add(self.measured_base())
        self.tell(f"{BASE}: {base.score}")
        searched = self.journal.find(SAMPLER, 0) or self.journal.add(self.searched_base(base))
        start = best([base, searched]) or base
        if start.way == SAMPLER:
            self.tell(f"{SAMPLER}: {start.score} ({' '.join(start.sampler)})")
        self.require_something(start)
        setup = self.setup(base, start)
        problems = self.problems(setup)
        racing = [name for name in self.ways if name not in problems]

        def run(way: str, rung: int, budget: float) -> Leg:
            self.tell(f"rung {rung + 1}: {way}, {amount(budget)} {self.unit}")
            return self.there("leg", way, rung, budget)

        def finished(leg: Leg) -> None:
            self.tell(f"  {leg.way}: {leg.problem or leg.score}")

        def out(leg: Leg) -> None:
            for each in (base, searched, leg):
                self.held_out(each)

        rungs = self.rungs(base, len(racing))
        race(racing, rungs, run, self.journal, self.pool, finished, out)
        problems |= {leg.way: leg.problem for leg in self.journal.legs if leg.problem}
        return self.finished(start, problems)

    def there(self, method: str, *given: Any) -> Any:
        """What a method returns, called in another process where several work."""
        return self.elsewhere(method, *given) if self.elsewhere else getattr(self, method)(*given)

    def measured(self, policy: str, sampler: Sequence[str]) -> Score:
        return scored(self.commands.play(policy, sampler, self.config.episodes, TUNING))

    def measured_base(self) -> Leg:
        """The base as it is; `budget` are the environment steps that were played."""
        began = time.monotonic()
        policy = self.config.policy
        result = self.commands.play(policy, (), self.config.episodes, TUNING)
        minutes = (time.monotonic() - began) / 60
        found = policy if is_address(policy) else str(checkpoint.find(policy))
        steps = float(result.lengths.sum())
        change = 0.0 if result.change is None else result.change.mean().item()
        return Leg(BASE, 0, steps, minutes, scored(result), found, change=change)

    def searched_base(self, base: Leg) -> Leg:
        began = time.monotonic()
        sampler, score = self.best_sampler(base.policy, base.score)
        minutes = (time.monotonic() - began) / 60
        return replace(base, way=SAMPLER, budget=0.0, minutes=minutes, score=score, sampler=sampler)

    def best_sampler(self, policy: str, own: Score | None = None) -> tuple[tuple[str, ...], Score]:
        """How a policy acts best, as words of `embodied eval`; with a budget of minutes, as much is
        tried as a share of it allows. `own`: its score with its own settings, if known."""
        minutes = SEARCH_SHARE * self.config.minutes if self.unit == "minutes" else math.inf
        until = time.monotonic() + 60 * minutes
        score = self.measured(policy, ()) if own is None else own
        if is_address(policy):
            return (), score
        loaded = checkpoint.load_policy(policy)
        run = Path(policy).parent.parent / "run.yaml"
        trained = read_saved(run).get("execute") if run.exists() else None
        usual = Sampler(None, loaded.chunk if trained is None else trained)

        def measure(sampler: Sampler) -> Score:
            return self.measured(policy, sampler.words(loaded, usual))

        found, score = best_sampler(loaded, usual, score, measure, until=until)
        return found.words(loaded, usual), score

    def require_something(self, base: Leg) -> None:
        """ConfigError for a policy from whose episodes nothing can be learned."""
        score = base.score
        assert score is not None
        if score.is_rate and score.mean == 0 and not self.config.demos:
            raise ConfigError(
                f"none of {score.episodes} episodes succeeded, and what is never rewarded cannot "
                "be learned: give demonstrations (demos=DIR), or train with easier initial states "
                "first (embodied train teacher=reverse) or a reward that grows (reward=NAME)"
            )

    def setup(self, base: Leg, start: Leg) -> Setup:
        """What the ways have in common."""
        config = self.config
        words = ["env=as_trained", f"seed={config.seed}", f"threads={config.threads}"]
        words += [f"device={config.device}", "video=false", "eval.episodes=1", "eval.num_envs=1"]
        words += [f"eval.seed={TUNING}", "eval_every=0", "save_every=0"]
        pace = base.budget / max(base.minutes, 1e-6)
        demos = [config.demos] if isinstance(config.demos, str) else config.demos or ()
        whole = math.inf if config.ways is not None else config.steps or config.minutes * pace
        return Setup(
            commands=self.commands,
            base=start,
            common=tuple(words),
            demos=tuple(demos),
            unit=self.unit,
            pace=pace,
            whole=whole,
            seed=config.seed,
        )

    def problems(self, setup: Setup) -> dict[str, str]:
        """The ways that do not apply, and why."""
        found: dict[str, str] = {}
        for name, way in self.ways.items():
            try:
                way.require(setup)
            except (ConfigError, ContractError) as error:
                found[name] = str(error)
                self.tell(f"{name}: does not apply: {error}")
        return found

    def rungs(self, base: Leg, racing: int) -> list[tuple[int, float]]:
        """How many ways race in each rung, and what each may spend: of the steps, or of the time
        without that of the measurements."""
        config = self.config
        if config.steps is not None:
            return [(count, share * config.steps) for count, share in shares(racing)]
        found = shares(racing, config.workers)
        measured = sum(math.ceil(count / config.workers) for count, _ in found)
        last = math.ceil((racing + 2) / config.workers) * config.held_out / config.episodes
        others = sum(leg.minutes for leg in self.journal.legs if leg.way in (BASE, SAMPLER))
        others += base.minutes * (measured + last)
        budget = max(config.minutes / 2, config.minutes - others)
        return [(count, share * budget) for count, share in found]

    def leg(self, name: str, rung: int, budget: float) -> Leg:
        """Let a way spend `budget` more, and measure it; the base was measured before."""
        base, searched = self.journal.find(BASE, 0), self.journal.find(SAMPLER, 0)
        assert base is not None and searched is not None
        setup = self.setup(base, best([base, searched]) or base)
        way = self.ways[name]
        began = time.monotonic()
        legs = self.journal.of(name)
        leg = Leg(name, rung, budget)
        try:
            run = way.advance(self.out / "ways" / name, legs, budget, setup)
            policy = str(checkpoint.find(run))
            if way.searches_sampler:
                found = self.best_sampler(policy)
            else:
                found = (), self.measured(policy, ())
            leg = replace(leg, policy=policy, sampler=found[0], score=found[1])
        except (ConfigError, ContractError, DatasetError) as error:
            leg = replace(leg, problem=str(error))
        return replace(leg, minutes=(time.monotonic() - began) / 60)

    def finished(self, start: Leg, problems: dict[str, str]) -> Improvement:
        """Measure once on held-out states, and write what is left behind."""
        raced = [leg for leg in self.journal.legs if leg.way in self.ways]
        chosen = best(self.journal.legs)
        if not self.config.only_better:
            chosen = best(raced) or chosen
        assert chosen is not None
        lasts = {leg.way: leg for leg in self.journal.legs if leg.score is not None}
        lasts |= {chosen.way: chosen}
        ahead = self.lines(chosen) if self.elsewhere else []
        for leg in (*lasts.values(), *ahead):
            self.held_out(leg)
        finals = {name: self.held_out(leg).result() for name, leg in lasts.items()}
        rows = {name: score for name, leg in finals.items() if (score := leg.score) is not None}
        page = self.out / "report.html"
        result = Improvement("", start, chosen, rows, problems, page)
        left = chosen if result.found or not self.config.only_better else start
        result = replace(result, policy=self.left_behind(left))
        films: dict[str, Path] = {}
        if result.found and self.config.video:
            films = self.films([finals[start.way], finals[chosen.way]])
        write_report(result, self.journal, self.config.policy, self.unit, films)
        facts: dict[str, Any] = {
            "chosen": chosen.way,
            "policy": chosen.policy,
            "sampler": [*chosen.sampler],
            "held_out": {name: str(score) for name, score in rows.items()},
            "does_not_apply": problems,
            "result": str(result),
        }
        (self.out / "result.yaml").write_text(yaml.safe_dump(facts, sort_keys=False))
        lines = map(json.dumps, self.metrics(rows, left))
        (self.out / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return result

    def metrics(self, rows: Mapping[str, Score], left: Leg) -> list[dict[str, float]]:
        """The last measurements as a run's metrics, which a study reads: a line for each leg of the
        way that is left behind, with the best policy until then; the last one has all `rows`."""
        legs = self.journal.of(left.way)
        lines: list[dict[str, float]] = []
        for count, found in enumerate(self.lines(left), 1):
            score = self.held_out(found).result().score
            assert score is not None
            lines.append(
                {
                    "step": round(sum(leg.budget for leg in legs[:count])),
                    "seconds": 60 * sum(leg.minutes for leg in legs[:count]),
                    "eval/success" if score.is_rate else "eval/return": score.mean,
                }
            )
        lines[-1] |= {f"held_out/{way}": score.mean for way, score in rows.items()}
        return lines

    def lines(self, left: Leg) -> list[Leg]:
        """The best leg of the way of `left` until each of its rungs."""
        legs = self.journal.of(left.way)
        found = [best(legs[: count + 1]) for count in range(len(legs))]
        return [leg for leg in found if leg is not None]

    def films(self, legs: Sequence[Leg]) -> dict[str, Path]:
        """Videos of episodes from an initial state that the last of `legs`, measured on held-out
        states, makes most of, by way; none where the environment draws no pictures."""
        first, last = legs[0].outcomes, legs[-1].outcomes
        rows = range(min(self.config.num_envs, self.config.held_out))
        row = max(rows, key=lambda k: last[k] - first[k])
        made = [self.pool.submit(self.there, "filmed", leg, row) for leg in legs]
        found = {leg.way: each.result() for leg, each in zip(legs, made, strict=True)}
        problems = [each for each in found.values() if not isinstance(each, Path)]
        if problems:
            self.tell(f"no videos: {problems[0]}")
        return {} if problems else found

    def filmed(self, leg: Leg, row: int) -> Path | str:
        """The video of the first held-out episode of a parallel env, or why there is none."""
        try:
            count = self.config.held_out
            frames, dt = self.commands.film(leg.policy, leg.sampler, count, HELD_OUT, row)
        except (NotImplementedError, RuntimeError, ImportError) as error:
            return str(error)
        name = leg.way.replace(" ", "_")
        return write_mp4(self.out / "videos" / f"{name}.mp4", frames, 1 / dt)

    def held_out(self, leg: Leg) -> Future[Leg]:
        """The last measurement of `leg`, which begins now if it has not yet."""
        key = (leg.way, leg.rung)
        if key not in self.measuring:
            self.measuring[key] = self.pool.submit(self._held_out, leg)
        return self.measuring[key]

    def _held_out(self, leg: Leg) -> Leg:
        if known := self.final.find(leg.way, leg.rung):
            return known
        return self.final.add(self.there("measured_last", leg))

    def measured_last(self, leg: Leg) -> Leg:
        """`leg` with its score and outcomes on held-out states."""
        result = self.commands.play(leg.policy, leg.sampler, self.config.held_out, HELD_OUT)
        outcomes = tuple(outcomes_of(result).tolist())
        return replace(leg, score=scored(result), outcomes=outcomes)

    def left_behind(self, chosen: Leg) -> str:
        """Write the chosen policy as a run folder; returns it. A policy server stays where it is.
        The learner's state goes with it, for what needs a critic; it is not resumed."""
        if is_address(chosen.policy):
            return chosen.policy
        folder, saved = self.out / "policy", Path(chosen.policy)
        shutil.rmtree(folder, ignore_errors=True)
        acting = acting_best(chosen)
        place = save_run(folder, acting, saved, self.config.env, executed(chosen))
        if (saved / "learner.pt").exists():
            shutil.copy(saved / "learner.pt", place)
            checkpoint.seal(place, checkpoint.read_about(place))
        return str(folder)


def scored(result: Evaluation) -> Score:
    """The score of an evaluation."""
    return Score.of(outcomes_of(result), result.success is not None)
