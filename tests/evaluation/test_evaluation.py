"""Evaluations, intervals and grids of tasks by hand; the worst parameters and their command;
off-policy evaluation; the effective horizon."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied.cli import parse as parse_words
from embodied.commands import checked
from embodied.commands.eval import evaluate_run
from embodied.core import checkpoint
from embodied.core.build import ConfigError, parse
from embodied.core.env import Step
from embodied.core.spec import Leaf, Spec
from embodied.core.wrapper import Wrapper
from embodied.datasets.lerobot.reader import Episodes, EpisodeWriter
from embodied.envs.fr3.env import Config as Fr3Config
from embodied.envs.fr3.env import Fr3
from embodied.evaluation import effective_horizon, off_policy, statistics, task_grid
from embodied.evaluation.evaluate import Evaluation, evaluate
from embodied.training.logger import Log, read_metrics
from embodied.training.train import train
from tests.builders import LINE, exit_of, make_policy, node_of, run_folder
from tests.teachers.place import made
from tests.toy_envs import Config as CounterConfig
from tests.toy_envs import Counter, Tree, TreeConfig
from tests.training.test_teaching import NODE


def test_the_worst_tenth_is_the_mean_of_the_lowest_returns() -> None:
    """Of 20 returns the two lowest; of 21 three; of one itself."""
    for returns, worst in (([*range(20)], 0.5), ([*range(21)], 1.0), ([4], 4.0)):
        shuffled = torch.tensor(returns).float()[torch.randperm(len(returns))]
        metrics = Evaluation(None, shuffled, torch.ones(len(returns))).metrics()
        assert metrics["return_cvar10"] == pytest.approx(worst)
        assert metrics["return"] == pytest.approx(sum(returns) / len(returns))


@pytest.mark.parametrize(
    ("won", "of", "interval"),
    [
        # 1/2 -+ z sqrt(1/40 + z^2/400) / (1 + z^2/10) with z = 1.959963984540054
        (5, 10, (0.236593090, 0.763406910)),
        (0, 10, (0.0, 3.841458821 / 13.841458821)),  # z^2 / (n + z^2)
        (10, 10, (1 - 3.841458821 / 13.841458821, 1.0)),
        (0, 0, (0.0, 1.0)),
    ],
)
def test_wilson_by_hand(won: int, of: int, interval: tuple[float, float]) -> None:
    assert statistics.wilson(won, of) == pytest.approx(interval)


def test_more_successes_than_trials_are_refused() -> None:
    with pytest.raises(ValueError, match="11 successes of 10 trials"):
        statistics.wilson(11, 10)


def test_rate_is_what_people_read() -> None:
    assert statistics.rate(5, 10) == "50% [24%, 76%]"
    assert statistics.rate(199, 200) == "99.5% [97%, 99.9%]", "100% is said of all only"
    assert statistics.rate(1, 200).startswith("0.5% [") and statistics.rate(200, 200).startswith(
        "100% ["
    )


def test_iqm_by_hand() -> None:
    """Of eight numbers two go at each end; of five, one; of three, none; the order is no matter."""
    assert statistics.iqm([100, 1, 2, 3, 4, 5, 6, -50]) == pytest.approx((2 + 3 + 4 + 5) / 4)
    assert statistics.iqm([9, 1, 2, 3, 1000]) == pytest.approx((2 + 3 + 9) / 3)
    assert statistics.iqm([0, 0, 3]) == pytest.approx(1.0)
    assert statistics.iqm(np.array([[1.0, 2.0], [3.0, 40.0]])) == pytest.approx(2.5)


def test_bootstrap_of_one_and_of_two_runs_by_hand() -> None:
    """Means of two draws from {0, 1} are 0, 1/2, 1 with 1/4, 1/2, 1/4: the 95% ends are 0 and 1,
    the 40% ends (30th and 70th percentile) both 1/2."""
    assert statistics.bootstrap_interval([0.0, 1.0]) == (0.0, 1.0)
    assert statistics.bootstrap_interval([0.0, 1.0], confidence=0.4) == (0.5, 0.5)
    # Each task keeps its own runs: two tasks without spread have an interval without width.
    scores = np.array([[0.0, 10.0]] * 5)
    assert statistics.bootstrap_interval(scores, statistic=lambda rows: rows.mean(1)) == (5.0, 5.0)
    assert statistics.bootstrap_interval([0.7]) == (0.7, 0.7)
    with pytest.raises(ValueError, match="at least one score"):
        statistics.bootstrap_interval([])


def test_a_profile_is_the_share_of_runs_above_each_score() -> None:
    found = statistics.performance_profile([0.2, 0.5, 0.5, 1.0], [0.0, 0.2, 0.5, 1.0])
    assert found.tolist() == [1, 0.75, 0.25, 0]
    with pytest.raises(ValueError, match="at least one"):
        statistics.performance_profile([], [0.0])


SPEC = Spec({}, Leaf((1,)), 0.1, Leaf((2,), low=0.0, high=1.0, names=("a", "b")))


def test_the_grid_has_the_middles_of_cells() -> None:
    expected = [[0.25, 0.25], [0.25, 0.75], [0.75, 0.25], [0.75, 0.75]]
    assert task_grid.grid(SPEC, 2).tolist() == expected
    for spec, cells, line in ((SPEC, 101, "at most"), (replace(SPEC, task=None), 2, "none")):
        with pytest.raises(ConfigError, match=line):
            task_grid.grid(spec, cells)


class Telling(Wrapper):
    """Pays the first element of its row's task, times ten, in the last step of an episode."""

    def step(self, action: torch.Tensor) -> Step:
        task = torch.from_numpy(self.env.task.copy())[:, 0].float()  # type: ignore[attr-defined]
        step = self.env.step(action)
        return replace(step, reward=10 * task * step.ended)


def test_every_task_is_played_once_and_listed_in_order() -> None:
    """Five tasks in two rows: the sixth episode is not counted."""
    env = Telling(Fr3(Fr3Config(task="reach", num_envs=2, threads=1, horizon=3)))
    tasks = torch.tensor([[0.1, 0.5, 0.5], [0.3] * 3, [0.5] * 3, [0.7] * 3, [0.9] * 3])
    policy = make_policy("gaussian.Gaussian", env.spec, seed=None, hidden=[8])
    result = evaluate(policy, task_grid.TaskGridEval(env, tasks), 5, 0)
    assert result.returns.tolist() == pytest.approx([1, 3, 5, 7, 9])


def test_a_run_writes_down_every_tasks_outcome(tmp_path: Path) -> None:
    settings = {"eval": {"num_envs": 4, "grid": 2}, "eval_every": 32, "teacher": None}
    node = {**NODE, **settings, "out": str(tmp_path)}

    def rows(steps: int) -> list[dict[str, Any]]:
        log = Log(tmp_path)
        train(node | {"steps": steps}, log)
        assert log.last["eval/episodes"] == 8
        return [json.loads(line) for line in (tmp_path / task_grid.FILE).read_text().splitlines()]

    both = rows(64)
    assert [row["step"] for row in both] == [32] * 8 + [64] * 8
    reach = Fr3(Fr3Config(task="reach", num_envs=1)).spec
    assert [row["task"] for row in both[:8]] == task_grid.grid(reach, 2).tolist()
    assert {row["success"] for row in both} <= {True, False}
    assert rows(32) == both[:8], "what came later is of another run"


PLACE = (0.3, 0.85)


def bowl(point: task_grid.Floats) -> float:
    return float(np.square(point - PLACE).sum())


def found_by(**settings: Any) -> task_grid.Found:
    return task_grid.search(("a", "b"), parse(task_grid.Config, settings, "search"), bowl)


def test_the_grid_has_both_ends_and_the_nearest_point_is_found() -> None:
    """Of 0, 1/2, 1 the nearest to 0.3 is 1/2 (0.2 against 0.3), to 0.85 it is 1."""
    found = found_by(cells=3, generations=0)
    assert found.points == [[a, b] for a in (0, 0.5, 1) for b in (0, 0.5, 1)]
    assert found.worst == [0.5, 1.0] and min(found.scores) == pytest.approx(0.04 + 0.0225)


def test_the_search_goes_on_where_the_grid_ends() -> None:
    pytest.importorskip("scipy")
    found = found_by(cells=3, generations=20)
    assert found.worst == pytest.approx(PLACE, abs=0.05)
    assert found.points == found_by(cells=3, generations=20).points
    assert len(found.points) == len({*map(tuple, found.points)}) <= 9 + 20 * 10 + 1
    assert np.min(found.points) >= 0 and np.max(found.points) <= 1


def test_a_grid_that_is_too_large_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"at most 2,000.*search.names=\[...\] of a, b"):
        found_by(cells=100)


def test_only_the_named_parameters_are_searched() -> None:
    """The return is ten times goal_x: worst at 0. With goal_y alone it is the mean of ten times the
    drawn goal_x, the same for every point, so that the first one is taken."""
    env = Telling(Fr3(Fr3Config(task="reach", num_envs=2, threads=1, horizon=2)))
    policy = make_policy("gaussian.Gaussian", env.spec, hidden=[8])
    drawn = torch.rand(6, 3, generator=torch.Generator().manual_seed(1))[:, 0].mean().item()
    for name, expected in (("goal_x", 0.0), ("goal_y", 10 * drawn)):
        config = task_grid.Config(names=(name,), cells=2, episodes=4, generations=0)
        worst = task_grid.worst_case(policy, env, config, 6, 1)
        assert len(worst.found.points) == 2 and worst.found.worst == [0.0]
        assert worst.metrics()["worst_return"] == pytest.approx(expected, abs=1e-5)
        low, high = worst.interval
        assert low <= expected + 1e-5 and expected <= high + 1e-5
        assert worst.values[name][1] == "m"
    with pytest.raises(ConfigError, match="goal_z"):
        task_grid.worst_case(policy, env, task_grid.Config(names=("goal_z1",)), 4, 0)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("maze_trials", "cannot begin in the middle"),
        ("cartpole num_envs=2", "target=NUMBER"),
        ("cartpole dept=2", "depth"),
    ],
)
def test_the_command_refuses_what_cannot_be_measured(
    words: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_of("env", "horizon", *words.split()) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert line in said


ENV = {**node_of("envs.fr3.env.Fr3", task="reach", horizon=2), "threads": 1}
RANDOM = {"randomize": {"gain": [0.5, 1.0], "damping": [1.0, 3.0]}}
POLICY = node_of("policies.gaussian.Gaussian", hidden=[8], chunk=2)


def test_the_command_writes_what_a_teacher_reads(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", ENV | RANDOM, POLICY, (1,))
    words = ["worst_case=true", "search.names=[gain]", "search.cells=2", "search.generations=0"]
    words += ["search.episodes=2", "episodes=3", f"out={tmp_path / 'worst'}"]
    row = evaluate_run(run, words, [])
    kept = json.loads((tmp_path / "worst" / task_grid.WORST).read_text())
    assert kept["points"] == [[0.0], [1.0]] and row["episodes"] == kept["episodes"] == 3
    at = kept["worst"]["gain"]
    assert row["worst"] == {"gain": [pytest.approx(0.5 + at / 2), ""]}
    last = read_metrics(tmp_path / "worst")[-1]
    assert last["eval/worst_return"] == pytest.approx(row["return"])
    evaluate_run(run, [*words[:-1], "search.cells=2"], [])
    assert "Worst parameters" in (run / "report.html").read_text()
    with pytest.raises(ConfigError, match="worst_case"):
        evaluate_run(run, ["worst_case=maybe"], [])


def test_a_teacher_fixes_the_worst_parameters(tmp_path: Path) -> None:
    file = tmp_path / task_grid.WORST
    file.write_text(json.dumps({"worst": {"y": 0.25}}))
    teacher = made("tasks.uniform.Uniform", fixed=str(file))
    tasks, _ = teacher.sample(50)
    assert (tasks[:, 1] == 0.25).all() and tasks[:, 0].std() > 0.1
    within = made("tasks.uniform.Uniform", fixed=str(file), box={"y": [0.2, 0.4]})
    assert within.sample(3)[0][:, 1].tolist() == pytest.approx([0.25] * 3)
    for settings, says in (
        ({"fixed": str(file), "box": {"y": [0.5, 1.0]}}, "outside its box"),
        ({"fixed": str(tmp_path / "none.json")}, "worst_case=true"),
    ):
        with pytest.raises(ConfigError, match=says):
            made("tasks.uniform.Uniform", **settings)


def test_weighted_estimates_by_hand() -> None:
    """Two episodes, of two decisions and of one: ratios 3 and 2, and 1."""
    ratio = torch.tensor([[3.0, 2.0], [1.0, 1.0]])
    weight = off_policy.weights(ratio.log())
    torch.testing.assert_close(weight, torch.tensor([[3 / 4, 6 / 7], [1 / 4, 1 / 7]]))
    reward = torch.tensor([[1.0, 2.0], [4.0, 0.0]])
    discount = torch.tensor([[0.5, 0.0], [0.0, 0.0]])
    expected = 3 / 4 * 1 + 0.5 * 6 / 7 * 2 + 1 / 4 * 4
    assert off_policy.pdis(weight, reward, discount) == pytest.approx(expected)
    q, v = torch.tensor([[2.0, 1.0], [3.0, 0.0]]), torch.tensor([[2.5, 1.5], [2.0, 0.0]])
    first = 3 / 4 * (1 - 2) + 1 / 2 * 2.5 + 1 / 4 * (4 - 3) + 1 / 2 * 2
    second = 0.5 * (6 / 7 * (2 - 1) + 3 / 4 * 1.5)
    assert off_policy.doubly_robust(weight, reward, discount, q, v) == pytest.approx(first + second)
    even = off_policy.weights(torch.zeros(2, 2))  # the behaviour policy itself: the mean return
    assert off_policy.pdis(even, reward, discount) == pytest.approx((1 + 0.5 * 2 + 4) / 2)
    zeros = torch.zeros(2, 2)
    assert off_policy.doubly_robust(weight, reward, discount, zeros, zeros) == pytest.approx(
        expected
    )


def test_a_gaussian_by_hand() -> None:
    error, std = torch.tensor([[0.5, -1.0]]), torch.tensor([0.5, 2.0])
    expected = torch.distributions.Normal(0.0, std).log_prob(error).sum(1)
    torch.testing.assert_close(off_policy.log_density(error, std), expected)


def test_portfolios_by_hand() -> None:
    """Estimates put 3, then the behaviour policy (2), then 0 in front; the best, 5, is last."""
    estimates, true, behaviour = [9.0, 1.5, 1.0], [3.0, 0.0, 5.0], 2.0
    two = off_policy.portfolio(estimates, true, behaviour, 2)
    assert (two.best, two.worst, two.mean, two.std) == (3, 2, 2.5, 0.5)
    assert two.sharpe == 2 and two.regret == pytest.approx(2 / 5) and two.unsafe == 0
    three = off_policy.portfolio(estimates, true, behaviour, 3)
    assert three.std == pytest.approx((14 / 9) ** 0.5) and three.unsafe == pytest.approx(1 / 3)
    whole = off_policy.portfolio(estimates, true, behaviour, 4)
    assert (whole.gain, whole.regret) == (3, 0)
    assert off_policy.portfolio([3.0, 2.0], [2.0, 2.0], 2.0, 2).sharpe == 0
    assert off_policy.portfolio([3.0, 3.0], [4.0, 4.0], 2.0, 2).sharpe == float("inf")
    assert off_policy.portfolio([3.0, 3.0], [4.0, 4.0], 5.0, 2).unsafe == 0.5, (
        "the behaviour is in front"
    )
    with pytest.raises(ConfigError, match="there are 4 policies"):
        off_policy.portfolio(estimates, true, behaviour, 5)


def chain(episodes: int, seed: int = 0) -> Episodes:
    """Three steps from state 0; the reward of a step is (1 + action) / 2, actions are uniform."""
    generator = torch.Generator().manual_seed(seed)
    n = 3 * episodes
    action = 2 * torch.rand(n, 1, generator=generator) - 1
    steps = {
        "obs/state": torch.arange(3.0).repeat(episodes)[:, None],
        "action": action,
        "reward": (1 + action[:, 0]) / 2,
        "terminated": (torch.arange(3) == 2).repeat(episodes),
    }
    start = torch.arange(0, n, 3)
    length = torch.full((episodes,), 3)
    return Episodes(LINE, steps, start, length, {"state": torch.full((episodes, 1), 3.0)})


def test_all_three_estimate_a_better_and_a_worse_policy() -> None:
    """A policy that always acts with a is worth 1.5 (1 + a) with gamma 1; the recordings 1.5."""
    config = off_policy.Config(
        gamma=1.0, updates=600, batch_size=128, lr=2e-3, tau=0.05, hidden=(32,)
    )
    recorded = off_policy.Recorded(chain(600), config, 1)
    found = {}
    for action in (-0.5, 0.5):
        policy = make_policy("deterministic.Deterministic", LINE, hidden=[4], std=0.05)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.zero_()
            list(policy.parameters())[-1].fill_(torch.atanh(torch.tensor(action)))
        found[action] = off_policy.estimate(policy, recorded)
    for action, result in found.items():
        true = 1.5 * (1 + action)
        assert result.fqe == pytest.approx(true, abs=0.25)
        assert result.pdis == pytest.approx(true, abs=0.3)
        assert result.dr == pytest.approx(true, abs=0.3)
        assert 5 < result.effective < 400
    with pytest.raises(ConfigError, match="without memory"):
        off_policy.estimate(make_policy("generative.flow.Flow", LINE, obs_steps=2), recorded)


def test_the_unit_of_the_reward_does_not_matter() -> None:
    """Values of hundreds, as of Pendulum, would not be reached by a network that begins near 0."""
    config = off_policy.Config(gamma=1.0, updates=600, lr=2e-3, hidden=(32,))
    policy = make_policy("deterministic.Deterministic", LINE, hidden=[4], std=0.05)
    found: list[float] = []
    for unit in (1.0, -1000.0):
        episodes = chain(200)
        episodes.steps["reward"] = unit * episodes.steps["reward"]
        found.append(off_policy.estimate(policy, off_policy.Recorded(episodes, config, 1)).fqe)
    assert found[1] == pytest.approx(-1000 * found[0], rel=0.02)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded, demos = chain(8), tmp_path / "demos"
    with EpisodeWriter(demos, LINE) as writer:
        for number in range(8):
            ended = torch.zeros(3, dtype=torch.bool)
            writer.add({**recorded.episode(number), "truncated": ended, "success": ended})
    runs = [tmp_path / name for name in ("one", "two")]
    for run in runs:
        policy = make_policy("generative.flow.Flow", LINE, chunk=2, width=8, depth=1)
        checkpoint.save(run / "checkpoints" / "00000000", policy, 0)

    def says(*words: str) -> str:
        given = [f"policies=[{runs[0]},{runs[1]}]", f"demos={demos}", "updates=5", *words]
        args = parse_words(["score", *given])
        checked(args)(args)
        return capsys.readouterr().out

    shown = says("gamma=1")
    assert all(word in shown for word in ("FQE", "PDIS", "DR", "the recordings", "the 2 to try"))
    for words, wrong in (
        ("k=1", "at least 2"),
        ("k=4", "are 3 policies"),
        ("env=two_gap", "without truth"),
    ):
        with pytest.raises(ConfigError, match=wrong):
            says(words)


TRAP = {"0": 0.5, "13": 1.0}  # of four actions: 1/4 in the mean after 1, but 1 for who knows


def measured(
    tree: TreeConfig, **settings: Any
) -> tuple[effective_horizon.Gorp, list[effective_horizon.Attempt]]:
    gorp = effective_horizon.Gorp(
        effective_horizon.Config(num_envs=64, **settings), Tree(replace(tree, num_envs=64))
    )
    return gorp, [*gorp.attempts()]


def test_a_reward_at_once_needs_one_look() -> None:
    """k = 1, m = 1: in every step the action that pays."""
    rewards = {"1": 10.0, "11": 10.0, "111": 10.0}
    gorp, tried = measured(TreeConfig(rewards, length=3, goal="111"))
    assert tried == [effective_horizon.Attempt(1, 1, 1.0, 5)]
    assert gorp.length == 3
    # Of each step t: A runs of T - t steps, and the step itself.
    assert gorp.used == 5 * (2 * (3 + 2 + 1) + 3)


def test_a_trap_needs_a_look_two_steps_ahead() -> None:
    """However many completions, one step ahead the mean is 1/4 < 1/2; all 4^2 sequences find it."""
    gorp, tried = measured(TreeConfig(TRAP, actions=4, goal="13"))
    assert [(each.depth, each.completions) for each in tried] == [(1, 1), (1, 2), (1, 4), (2, 1)]
    assert [each.horizon for each in tried] == pytest.approx([1.0, 1.5, 2.0, 2.0])
    assert tried[-1].solved == 5
    assert not any(gorp.solves(gorp.starts[0], 1, 256) for _ in range(3))


def test_a_lock_needs_as_many_looks_as_digits_and_a_potential_none_fewer() -> None:
    """Rewards of right digits help; those of a potential that is 0 at the end change nothing."""
    digits = "1" * 6
    lock = {digits: 1.0}
    dense = lock | {digits[:n]: 1.0 for n in range(1, 6)}
    lost = {f"{digits[:n]}0": -float(n) for n in range(6)}
    potential = dense | lost | {digits: 1.0 - 5.0}
    sparse, shaped, quick = (
        measured(TreeConfig(rewards, length=6, goal=digits))[1]
        for rewards in (lock, potential, dense)
    )
    assert shaped == sparse
    assert sparse[-1].horizon >= 4 and quick[-1].horizon <= 2


def test_the_steps_are_a_bound() -> None:
    digits = "1" * 8
    gorp, tried = measured(TreeConfig({digits: 1.0}, length=8, goal=digits), steps=500)
    assert tried and tried[-1].solved < 3
    assert gorp.used < 1000


def test_a_target_is_a_return() -> None:
    found = [
        measured(TreeConfig(TRAP, actions=4), target=target)[1][-1].depth for target in (0.5, 1.0)
    ]
    assert found == [1, 2]


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="Tree is random"):
        measured(TreeConfig({}, noise=1.0))
    with pytest.raises(ConfigError, match="state_roles"):
        effective_horizon.Gorp(effective_horizon.Config(num_envs=2), Counter(CounterConfig()))
    with pytest.raises(ConfigError, match="4,782,969 combinations"):
        wide = Counter(CounterConfig())
        wide.spec = wide.spec.with_act(Leaf((14,), low=-1.0, high=1.0))
        effective_horizon.Gorp(effective_horizon.Config(num_envs=2), wide)


def test_the_command_says_what_it_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_of("env", "horizon", "CartPole-v1", "target=20", "num_envs=8", "tries=2") == 0
    shown = capsys.readouterr().out
    assert "k + log_A m" in shown and "effective horizon 1.00: 2 actions" in shown
