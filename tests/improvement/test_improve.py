"""`embodied improve`: the race, its journal, and end to end in toy tasks what is left behind."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import embodied as em
from embodied.commands import improve as command
from embodied.commands import serve
from embodied.commands.eval import evaluate_run
from embodied.commands.train import train
from embodied.core import checkpoint
from embodied.core.build import ConfigError, build
from embodied.envs.maze.env import Maze
from embodied.improvement import race
from embodied.improvement.advice import Score
from embodied.improvement.improve import HELD_OUT, TUNING, ImproveConfig
from embodied.improvement.settings import improvement_settings
from embodied.training.logger import read_metrics
from tests.builders import make_policy
from tests.policies.remote.servers import free_port
from tests.tiers import only_all


def score(successes: int, episodes: int = 100) -> Score:
    return Score.of((torch.arange(episodes) < successes).float(), True)


def raced(
    folder: Path,
    ways: Sequence[str],
    run: Callable[..., race.Leg],
    budget: float = 1.0,
    pool: Any = None,
) -> list[race.Leg]:
    rungs = [(count, share * budget) for count, share in race.shares(len(ways))]
    return race.race(
        [*ways], rungs, run, race.Journal(folder / "race.jsonl"), pool or race.AtOnce()
    )


def test_held_out_tasks_are_for_results_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mazes: what chooses plays others; `em.evaluate` reports, as `embodied eval`."""
    given, reset = list[bool](), Maze.reset

    def told(world: Maze, *seed_and_task: Any) -> Any:
        given.append(len(seed_and_task) > 1)
        return reset(world, *seed_and_task)

    monkeypatch.setattr(Maze, "reset", told)
    env = {"_target_": "embodied.envs.maze.env.Maze", "side": 5, "blocks": 6, "horizon": 4}
    world = build({**env, "num_envs": 2}, Maze)
    policy = make_policy("categorical.Categorical", world.spec)
    run = str(checkpoint.save(tmp_path / "run" / "checkpoints" / "00000000", policy, 0))
    config = ImproveConfig(policy=run, out=str(tmp_path), env=env, num_envs=2)
    play = command._commands(env, (), (), config).play
    assert len(play(run, (), 4, TUNING).returns) == 4 and not any(given)
    given.clear()
    assert len(play(run, (), 4, HELD_OUT).returns) == 4
    assert len(em.evaluate(policy, world, episodes=4).returns) == 4 and all(given)


def test_every_rung_has_the_same_share_of_the_budget() -> None:
    for contenders in range(1, 9):
        found = race.shares(contenders)
        assert [count for count, _ in found][-1] == 1
        assert all(count * share == pytest.approx(1 / len(found)) for count, share in found)
    # Minutes are spent by several at once.
    assert race.shares(1) == [(1, pytest.approx(1 / 3))] * 3
    assert race.shares(4, at_once=2) == [(4, pytest.approx(1 / 6)), (2, 1 / 3), (1, 1 / 3)]


def test_the_better_half_goes_on_and_the_last_one_has_most(tmp_path: Path) -> None:
    reached = {"a": 20, "b": 60, "c": 40, "d": 70}

    def run(way: str, rung: int, budget: float) -> race.Leg:
        return race.Leg(way, rung, budget, score=score(reached[way] + rung))

    legs = raced(tmp_path, [*reached], run, 120.0)
    assert [(leg.way, leg.rung) for leg in legs] == [
        *((way, 0) for way in "abcd"),
        *(("d", 1), ("b", 1), ("d", 2)),
    ]
    assert sum(leg.budget for leg in legs) == pytest.approx(120)
    assert sum(leg.budget for leg in legs if leg.way == "d") == pytest.approx(70)
    assert race.best(legs) is legs[-1]


def test_who_cannot_be_measured_is_out_and_the_race_goes_on(tmp_path: Path) -> None:
    def run(way: str, rung: int, budget: float) -> race.Leg:
        if way == "broken":
            return race.Leg(way, rung, budget, problem="it has no noise")
        return race.Leg(way, rung, budget, score=score(50))

    legs = raced(tmp_path, ["broken", "a", "b"], run, pool=ThreadPoolExecutor(2))
    assert [leg.way for leg in legs if leg.rung == 1] == ["a", "b"]


def test_it_ends_where_nothing_is_left_to_win(tmp_path: Path) -> None:
    def run(way: str, rung: int, budget: float) -> race.Leg:
        return race.Leg(way, rung, budget, score=score(100 if way == "a" else 50))

    assert score(100).low >= race.ENOUGH
    assert [leg.way for leg in raced(tmp_path, "ab", run)] == ["a", "b"]


def test_an_interrupted_race_runs_nothing_twice(tmp_path: Path) -> None:
    ran: list[tuple[str, int]] = []
    interrupts = iter([False, False, False, True])  # the fourth leg, once

    def run(way: str, rung: int, budget: float) -> race.Leg:
        if next(interrupts, False):
            raise KeyboardInterrupt
        ran.append((way, rung))
        return race.Leg(way, rung, budget, score=score(len(way) * 10), sampler=("execute=1",))

    ways = ["a", "bb", "ccc"]
    with pytest.raises(KeyboardInterrupt):
        raced(tmp_path, ways, run, 9.0)
    legs = raced(tmp_path, ways, run, 9.0)
    assert len(ran) == len(set(ran)) == len(legs)
    assert race.Journal(tmp_path / "race.jsonl").legs == legs


def test_equal_scores_go_to_the_cheaper_one() -> None:
    dear, cheap = (
        race.Leg("a", 0, minutes=9, score=score(60)),
        race.Leg("b", 0, minutes=1, score=score(60)),
    )
    assert race.best([dear, cheap]) is cheap
    assert race.best([race.Leg("c", 0)]) is None


def test_a_gain_has_the_interval_of_a_difference_of_rates() -> None:
    """56 of 70 against 48 of 80: 0.2 with [0.0524, 0.3339] (Newcombe, 1998, example a)."""
    change, low, high = race.gain(score(56, 70), score(48, 80))
    assert (change, low, high) == pytest.approx((0.2, 0.0524, 0.3339), abs=1e-4)


def test_returns_where_the_environment_reports_no_success() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0, 4.0])
    found = Score.of(returns, False)
    error = returns.std().item() / 2
    assert (found.mean, found.low, found.is_rate) == (2.5, pytest.approx(2.5 - 1.96 * error), False)


QUICK = {
    "quick_dsrl": """
_target_: embodied.improvement.ways.Training
words: >-
  finetune=dsrl finetune.bound=2.0 finetune.shared_noise=true
  policy=gaussian policy.hidden=[64,64] policy.activation=tanh
  learner=sac learner.hidden=[64,64] learner.gamma=0.97 learner.initial_temperature=0.005
  learner.target_entropy=0.0 learner.entropy_in_backup=false learner.batch_size=64
  data.normalize=true data.warmup_steps=400 data.utd_ratio=1.0
""",
    "quick_own": """
_target_: embodied.improvement.ways.OwnSuccesses
words: policy=flow learner=imitate
updates: 150
""",
    "quick_clone": """
_target_: embodied.improvement.ways.Training
words: policy=flow learner=imitate
demos: needed
init: false
""",
}


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "way").mkdir()
    for name, text in QUICK.items():
        (folder / "way" / f"{name}.yaml").write_text(text)
    return str(folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that goes through either of two gaps, in a task where one of them is closed."""
    folder = tmp_path_factory.mktemp("base")
    em.collect("two_gap", folder / "demos", episodes=40)
    words = ["experiment=two_gap_flow", f"demos={folder / 'demos'}", f"out={folder / 'run'}"]
    train([*words, "steps=600", "video=false", "eval.episodes=1"], verbose=False)
    return folder / "run"


def improved(
    base: Path, recipes: str, out: Path, ways: str, *words: str, tell: Any = print
) -> race.Improvement:
    """`embodied improve` of the base in a task where one of the gaps is closed."""
    task = ["env=two_gap", "env.gaps=[0.75]", f"ways={ways}", f"out={out}"]
    small = ["episodes=40", "held_out=60", "num_envs=20", "steps=1500"]
    return command.improve(str(base), [*task, *small, *words], [recipes], tell)


def test_the_better_policy_is_left_behind_with_the_proof(
    base: Path, recipes: str, tmp_path: Path
) -> None:
    result = improved(base, recipes, tmp_path, "[quick_dsrl,quick_own,quick_clone]")
    assert {"base", "quick_dsrl", "quick_own"} <= result.rows.keys()
    assert "demos=DIR" in result.problems["quick_clone"]
    assert result.gain[1] > 0 and result.chosen.way != "base"
    row = evaluate_run(Path(result.policy), ["episodes=60", "num_envs=20"], [])
    assert row["successes"] == round(result.rows[result.chosen.way].mean * 60)
    page = result.report.read_text()
    assert all(name in page for name in result.rows) and "needs demonstrations" in page
    assert yaml.safe_load((tmp_path / "result.yaml").read_text())["chosen"] == result.chosen.way
    line = read_metrics(tmp_path)[-1]
    assert line["eval/success"] == line[f"held_out/{result.chosen.way}"] == row["successes"] / 60
    again = command.improve(str(tmp_path), [], [recipes])
    assert (again.rows, again.chosen) == (result.rows, result.chosen)


@only_all
def test_two_at_once_and_one_that_is_interrupted_come_to_the_same_result(
    base: Path, recipes: str, tmp_path: Path
) -> None:
    def interrupt(line: str) -> None:
        if line.startswith("rung 2"):
            raise KeyboardInterrupt

    def means(result: race.Improvement) -> dict[str, float]:
        return {leg: score.mean for leg, score in result.rows.items()}

    out = tmp_path / "out"
    how = (base, recipes, out, "[quick_dsrl,quick_own]", "steps=90", "episodes=10")
    how = (*how, "held_out=10", "num_envs=10")
    kept = means(improved(*how, "workers=2"))
    assert (out / "log.txt").exists()
    shutil.rmtree(out)
    with pytest.raises(KeyboardInterrupt, match="go on with: embodied improve"):
        improved(*how, tell=interrupt)
    assert means(command.improve(str(out), [], [recipes])) == kept


@only_all
def test_a_policy_of_another_origin_and_the_best_way_even_if_it_is_worse(
    base: Path, recipes: str, tmp_path: Path
) -> None:
    """A mapping that changes nothing gives the same base. 60 steps are too few to learn."""
    mapping = tmp_path / "names.yaml"
    mapping.write_text("action: {low: [-1, -1], high: [1, 1]}\n")
    few = ("[quick_dsrl]", "only_better=false", "steps=60", "episodes=20", "held_out=20")
    plain = improved(base, recipes, tmp_path / "plain", *few)
    mapped = improved(base, recipes, tmp_path / "mapped", *few, f"mapping={mapping}")
    assert mapped.rows["base"] == plain.rows["base"]
    assert type(checkpoint.load_policy(tmp_path / "mapped" / "joined")).__name__ == "Mapped"
    assert (plain.chosen.way, mapped.chosen.way) == ("quick_dsrl", "quick_dsrl")
    lines = read_metrics(tmp_path / "plain")
    assert [line["step"] for line in lines] == [20, 40, 60]
    assert lines[-1]["eval/success"] == plain.rows["quick_dsrl"].mean


def test_every_recipe_can_begin(base: Path, tmp_path: Path) -> None:
    """From a flow policy: all but the one for diffusion policies. PPO only where there is time."""
    words = ["env=two_gap", f"out={tmp_path}", f"demos={base.parent / 'demos'}"]
    words.append("recipes={clone: {updates: 7}}")
    node = improvement_settings(str(base), words, [])
    improver = command.improver_of(node, [], [], lambda _: None)
    assert improver.ways["clone"].config.updates == 7  # type: ignore[attr-defined]
    score = Score.of(torch.ones(4), True)
    leg = race.Leg(
        "base", 0, budget=1000.0, minutes=1.0, score=score, policy=str(checkpoint.find(base))
    )
    setup = improver.setup(leg, leg)
    assert improver.problems(replace(setup, whole=math.inf)).keys() == {"dppo"}
    acting = replace(leg, sampler=("policy.steps=2", "execute=1"))
    words = [improver.ways[way].begin(tmp_path, acting) for way in ("residual", "dsrl")]  # type: ignore
    assert words == [[f"init={tmp_path / 'start'}", "finetune.execute=1"], [f"init={leg.policy}"]]
    assert checkpoint.load_policy(tmp_path / "start").steps == 2  # type: ignore[attr-defined]
    few = improver.problems(setup)
    assert few.keys() == {"dppo", "reinflow", "residual_ppo"} and "30,000" in few["reinflow"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("[quick_dsrl]", "env.horizon=3"), "none of 40 episodes succeeded"),
        (("[quick_dsrk]",), "there is no way"),
        (("[quick_dsrl]", "minutes=0"), "minutes=0"),
        (("[quick_own]", "task=go"), "never saw the task"),
    ],
)
def test_one_line_for_what_cannot_be_improved(
    base: Path, recipes: str, tmp_path: Path, words: tuple[str, ...], line: str
) -> None:
    with pytest.raises(ConfigError, match=line):
        improved(base, recipes, tmp_path, *words)


def test_what_is_not_known_or_would_be_overwritten(
    base: Path, recipes: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="name the environment"):
        command.improve("ws://127.0.0.1:1", ["minutes=1"], [recipes])
    (tmp_path / "improve.yaml").write_text("policy: another\n")
    with pytest.raises(ConfigError, match="choose another: out=DIR"):
        improved(base, recipes, tmp_path, "[quick_own]")


@only_all
def test_a_served_policy_is_improved_in_its_noise_by_corrections_and_its_own_successes(
    base: Path, recipes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = serve.parsed([f"port={free_port()}"])
    few = ("steps=300", "episodes=10", "held_out=10", "num_envs=10")
    with serve.serving(checkpoint.load_policy(base), settings) as server:
        address = tmp_path / "served.yaml"
        address.write_text(yaml.safe_dump({"url": server.url, "timeout": 60.0}))
        result = improved(
            address, recipes, tmp_path / "out", "[quick_dsrl,quick_own,residual]", *few
        )
    assert {
        "base",
        "quick_dsrl",
        "quick_own",
        "residual",
    } <= result.rows.keys() and not result.problems
    assert result.policy in (str(address), str(tmp_path / "out" / "policy"))


def test_a_torch_module_without_successes_is_ranked_by_its_return(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    settings = {"steps": 600, "ways": ["residual", "own_successes"], "episodes": 10, "held_out": 10}
    result = em.improve(module, "Pendulum-v1", out=tmp_path, verbose=False, num_envs=10, **settings)
    assert not result.rows["base"].is_rate
    assert "which episodes succeeded" in result.problems["own_successes"]
    assert result.rows["residual"].episodes == 10
