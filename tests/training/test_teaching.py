"""Teachers in a run, of tasks and levels, and a second agent: they choose, a resume is exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from embodied.cli import main
from embodied.core import checkpoint
from embodied.core.build import ConfigError, build
from embodied.core.config_fields import complete
from embodied.core.device import seed_everything
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.envs.maze.levels import GOAL
from embodied.evaluation.task_grid import FILE, TaskGridEval
from embodied.teachers import teacher
from embodied.teachers.teacher import TaskWrapper, read_episode_log
from embodied.training.components import RunComponents
from embodied.training.config import read_config
from embodied.training.logger import Log
from embodied.training.task_sampling import SEED, TaskValueEstimator, task_value_estimator
from embodied.training.train import train
from embodied.training.trainer import Every, Trainer
from tests.builders import node_of
from tests.tiers import usually

NODE: dict[str, Any] = {
    "name": "taught",
    "env": {"_target_": "embodied.envs.fr3.env.Fr3", "task": "reach", "num_envs": 4, "horizon": 8},
    "policy": {"_target_": "embodied.policies.gaussian.Gaussian", "hidden": [8]},
    "learner": {"_target_": "embodied.learners.off_policy.sac.Sac", "hidden": [8], "batch_size": 8},
    "teacher": node_of(
        "teachers.tasks.alpgmm.AlpGmm",
        box={"goal_x": [0.1, 0.3]},
        signal="return",
        every=20,
    ),
    "steps": 480,
    "data": {"warmup_steps": 32, "utd_ratio": 0.1},
    "eval": {"episodes": 4, "num_envs": 4},
    "video": False,
}
PPO = {
    "policy": {"_target_": "embodied.policies.diagonal_gaussian.DiagonalGaussian", "hidden": [8]},
    "learner": node_of("learners.on_policy.ppo.Ppo", horizon=12, batch_size=16, epochs=1),
    "data": "on_policy",
}


def run(folder: Path, node: dict[str, Any], **changes: Any) -> tuple[list[dict[str, Any]], Any]:
    node = {**node, "out": str(folder), **changes}
    train(node, Log(folder, silent=True))
    lines = (folder / teacher.FILE).read_text().splitlines()
    return [json.loads(line) for line in lines], checkpoint.load_state(folder, "loop")["loop"][
        "parts"
    ]


def resumed(folder: Path, node: dict[str, Any], cut: int) -> tuple[list[dict[str, Any]], Any]:
    """The episodes and the state of a run, which are those of one that is resumed at `cut` too."""
    whole, state = run(folder / "whole", node)
    run(folder / "parts", {**node, "steps": cut})
    with (folder / "parts" / teacher.FILE).open("a") as late:
        late.write('{"half a li')  # what came after the checkpoint is cut off
    again, other = run(folder / "parts", node, resume=str(folder / "parts"))
    assert again == whole
    assert str(other) == str(state)
    return whole, state


@pytest.mark.parametrize("more", usually([PPO], [{}, PPO]), ids=["replay", "rollout"])
def test_tasks_are_the_teachers_and_a_resume_is_exact(tmp_path: Path, more: dict[str, Any]) -> None:
    whole, _ = resumed(tmp_path, {**NODE, **more}, 240)
    assert len(whole) >= 40 and len({row["episode"] for row in whole}) == len(whole)
    assert all(0.1 <= row["task"][0] <= 0.3 for row in whole)
    assert {row["length"] for row in whole} <= set(range(1, 9))


def test_an_offline_learner_has_no_use_for_a_teacher(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="teacher has no effect in offline"):
        run(tmp_path / "run", NODE, data="offline")


def test_the_report_shows_where_the_teacher_sampled(tmp_path: Path) -> None:
    from embodied.reports.run_report import write

    run(tmp_path / "run", NODE)
    page = write(tmp_path / "run").read_text()
    assert "that the teacher sampled" in page and (tmp_path / "run" / "tasks.png").stat().st_size


MEMORY = node_of(
    "policies.recurrent.Recurrent",
    width=8,
    inner={"_target_": "embodied.policies.categorical.Categorical", "hidden": [8]},
)
MAZES: dict[str, Any] = {
    "name": "mazes",
    "env": node_of("envs.maze.env.Maze", side=5, blocks=8, num_envs=4, horizon=9),
    "policy": {"_target_": "embodied.policies.categorical.Categorical", "hidden": [8]},
    "learner": node_of(
        "learners.on_policy.ppo.Ppo", horizon=12, batch_size=16, epochs=1, normalize=False
    ),
    "steps": 960,
    "eval": {"episodes": 6, "num_envs": 4},
    "video": False,
}
SMALL: dict[str, Any] = {
    "size": 12,
    "every": 6,
    "autoencoder": {"pool": 64, "steps": 3, "latent": 4},
}


def maze_node(name: str, **changes: Any) -> dict[str, Any]:
    teacher = complete(yaml.safe_load(Path(f"configs/teacher/{name}.yaml").read_text()))
    small = {key: value for key, value in SMALL.items() if key in teacher}
    return {**MAZES, "teacher": teacher | small, **changes}


TEACHERS = ("accel", "paired", "domain_randomization", "plr")


@pytest.mark.parametrize(
    "policy", usually([MEMORY], [MAZES["policy"], MEMORY]), ids=["plain", "memory"]
)
@pytest.mark.parametrize("name", usually(["paired"], TEACHERS))
def test_a_resume_is_exact(tmp_path: Path, name: str, policy: dict[str, Any]) -> None:
    """In the middle of a batch (and of a round of two students), with episodes whose outcome is
    known and whose steps are not."""
    whole, _ = resumed(tmp_path, maze_node(name, policy=policy), 560)
    assert len(whole) >= (40 if name == "paired" else 80)
    assert {len(row["task"]) for row in whole} == {28}


def parts_of(tmp_path: Path, taught: dict[str, Any]) -> RunComponents:
    seed_everything(0)
    return RunComponents(read_config({**taught, "out": str(tmp_path)}))


@pytest.mark.parametrize("name", ["plr", "accel"])
def test_every_step_is_told_of_once(tmp_path: Path, name: str) -> None:
    """After an update, running episodes have as many steps as the world has counted."""
    parts = parts_of(tmp_path, maze_node(name))
    log = Log(tmp_path, silent=True)
    with Trainer(log, 960, Every(0, 0, 0), lambda step: None, lambda step: None) as keeper:
        parts.loop.run(keeper)
    loop: Any = parts.loop
    estimates, world = loop.estimates, loop.collector.env
    assert estimates is not None and isinstance(world, TaskWrapper) and not estimates.ended
    numbers, steps = (world.memory[key].tolist() for key in ("ticket", "length"))
    lengths = dict(zip(numbers, steps, strict=True))
    told = {number: row[0] for number, row in estimates.sums.items()}
    assert told and told == {number: length for number, length in lengths.items() if length}
    assert world.teacher.dropped == 0
    teacher: Any = world.teacher
    assert set(teacher.pending) == set(lengths) and len(teacher.library) == 12


def test_a_student_that_expects_nothing_is_refused(tmp_path: Path) -> None:
    scaled = {**MAZES["learner"], "scale_rewards": True}
    with pytest.raises(ConfigError, match="advantages and values"):
        run(tmp_path / "a", maze_node("plr"), learner=scaled)


def test_a_world_without_levels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="environment with levels"):
        run(tmp_path / "a", {**NODE, **PPO}, teacher=maze_node("plr")["teacher"])


@pytest.fixture(scope="module")
def mazes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in random mazes."""
    folder = tmp_path_factory.mktemp("mazes") / "run"
    run(folder, maze_node("domain_randomization"))
    return folder


def test_evaluation_is_on_the_held_out_mazes(mazes: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (mazes / FILE).read_text().splitlines()]
    parts = parts_of(tmp_path, maze_node("domain_randomization"))
    assert isinstance(parts.evaluation.env, TaskGridEval)
    held: Any = parts.evaluation.env.held_out
    tasks = torch.tensor([line["task"] for line in lines])
    torch.testing.assert_close(tasks, held[:6], atol=1e-4, rtol=0)


def test_the_report_shows_levels(mazes: Path) -> None:
    """Nine of each quarter, drawn as the world draws them, not points over two of 28 numbers."""
    from embodied.datasets.lerobot.video import decode_image
    from embodied.reports.run_report import TASKS, write
    from embodied.teachers.plots.task_density import chosen

    assert "that the teacher sampled" in write(mazes).read_text()
    picture = np.asarray(decode_image((mazes / TASKS).read_bytes()))
    goals = (picture[..., :3] == np.array(GOAL)).all(-1)  # no plot of points has this colour
    assert goals.sum() > 36 * 20
    past = read_episode_log(mazes)
    assert past is not None and past.task.shape[1] == 28
    assert chosen(np.arange(5)) == [0, 1, 2, 3, 4] and chosen(np.arange(17))[-1] == 16


@pytest.mark.parametrize(
    "words", ["learner=sac policy=gaussian", "learner=ppo policy=diagonal_gaussian"]
)
def test_a_teacher_of_tasks_is_in_the_log(tmp_path: Path, words: str) -> None:
    """Off-policy and on-policy, by the command line."""
    small = "steps=600 log_every=200 eval_every=0 save_every=0 video=false eval.episodes=2"
    task = f"env=fr3_reach env.num_envs=2 teacher=mpts out={tmp_path}/run"
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["train", *f"{task} {words} {small}".split()])
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    logged = [line for line in map(json.loads, lines) if "train/steps_per_second" in line]
    assert len(logged) >= 2 and all("train/teacher_correlation" in line for line in logged)


def test_how_the_teacher_does_is_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[dict[str, float]] = []
    monkeypatch.setattr(Log, "write", lambda log, step, row: rows.append(dict(row)))
    run(tmp_path / "run", maze_node("plr", log_every=96))
    seen = [row for row in rows if "train/teacher_library" in row]
    assert seen[-1]["train/teacher_library"] == 12 and 0 < seen[-1]["train/teacher_again"] < 1
    assert 0 <= seen[0]["train/teacher_walls"] <= 8 and seen[0]["train/teacher_way"] >= 1


def test_both_are_counted_and_both_learn(tmp_path: Path) -> None:
    """960 steps are 120 of each of the two students' four rows."""
    parts = parts_of(tmp_path, maze_node("paired"))
    loop: Any = parts.loop
    rival = loop.second_agent
    assert rival is not None
    before = [p.clone() for p in rival.learner.parameters()]
    first = [p.clone() for p in parts.learner.parameters()]
    assert any(not torch.equal(a, b) for a, b in zip(before, first, strict=True))  # two beginners
    steps: list[int] = []
    log = Log(tmp_path, silent=True)
    with Trainer(log, 960, Every(0, 0, 0), steps.append, lambda step: None) as keeper:
        parts.loop.run(keeper)
    assert keeper.step == 960 and parts.learner.done == rival.learner.done == 480  # type: ignore
    for learner, old in ((rival.learner, before), (parts.learner, first)):
        moved = [not torch.equal(a, b) for a, b in zip(learner.parameters(), old, strict=True)]
        assert any(moved)
    assert any(key.startswith("rival_") for update in keeper.updates for key in update)
    assert parts.loop.teacher is rival.teacher and "regret" in rival.teacher.metrics()


def test_what_cannot_have_a_second_agent_is_refused(tmp_path: Path) -> None:
    reward = {"_target_": "embodied.rewards.handcrafted.composite.Scaled"}
    random = {"_target_": "embodied.policies.categorical.Categorical", "hidden": [8]}
    base = build(random, Policy, spec=build(MAZES["env"], VecEnv).spec)
    checkpoint.save(tmp_path / "base" / "checkpoints" / "00000000", base, 0)
    for changes in ({"init": str(tmp_path / "base")}, {"reward": reward}):
        with pytest.raises(ConfigError, match="second agent from scratch"):
            parts_of(tmp_path, maze_node("paired", **changes))


ROOMS: dict[str, Any] = {
    **MAZES,
    "env": node_of(
        "envs.wrappers.stack.Wrapped",
        num_envs=4,
        env=node_of("envs.toy.rooms.Rooms", rooms=2, size=2, noisy=1, horizon=30),
        wrappers=[{"_target_": "embodied.envs.wrappers.episodic_density.EpisodicDensity"}],
    ),
    "teacher": node_of(
        "teachers.exploration.adversarial_surprise.AdversarialSurprise", turns=4, steps=5
    ),
}


def test_a_game_resumes_exactly(tmp_path: Path) -> None:
    """In the middle of a turn of the first student; the second has had its batches meanwhile."""
    states = []
    for name, steps in (("whole", (1200,)), ("parts", (852, 1200))):
        for end in steps:
            resume = str(tmp_path / name) if end != steps[0] else None
            settings = {**ROOMS, "out": str(tmp_path / name), "steps": end, "resume": resume}
            train(settings, Log(tmp_path / name, silent=True))
        kept = checkpoint.load_state(tmp_path / name, "loop")["loop"]["parts"]
        assert kept["teacher"]["games"] == 1200 // (4 * 5 * 4)
        assert kept["second_agent"]["learner"]["done"] == 576  # of 600, by the dozen
        states.append((kept, checkpoint.load_state(tmp_path / name, "learner")))
    assert str(states[0]) == str(states[1])


def test_control_begins_where_explore_stopped(tmp_path: Path) -> None:
    """What it sees is what the body sees then, and its turns are its episodes."""
    parts = parts_of(tmp_path, ROOMS)
    loop: Any = parts.loop
    rival = loop.second_agent
    rollout, rooms = rival.loop.collector, parts.env.env.env  # type: ignore[attr-defined]
    told: list[tuple[bool, bool]] = []
    act = rollout.actor

    def noting(obs: Any, first: torch.Tensor) -> torch.Tensor:
        shown = rooms._observe()
        told.append((bool(first.all()), all(torch.equal(obs[k], shown[k]) for k in shown)))
        return act(obs, first)

    rollout.actor = _Noting(act, noting)
    for _ in range(10):
        loop.advance()
    assert told == [(True, True), *[(False, True)] * 4] * 2


class _Noting:
    """An actor that is watched."""

    def __init__(self, actor: Any, call: Any) -> None:
        self.actor, self.call = actor, call

    def __call__(self, obs: Any, first: torch.Tensor) -> torch.Tensor:
        return self.call(obs, first)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.actor, name)


SPDL = yaml.safe_load(Path("configs/teacher/selfpaced.yaml").read_text())
ASKING = {**NODE, **PPO, "teacher": {**SPDL, "value": "critic", "every": 20, "signal": "return"}}


@pytest.mark.parametrize("policy", [MAZES["policy"], MEMORY], ids=["plain", "memory"])
def test_values_are_the_critics_of_first_observations(
    tmp_path: Path, policy: dict[str, Any]
) -> None:
    """More tasks than rows; with memory, of one that has seen nothing yet."""
    parts = parts_of(tmp_path, {**MAZES, "policy": policy})
    student = task_value_estimator(MAZES["env"], parts.learner, parts.device)
    assert isinstance(student, TaskValueEstimator)
    env: Any = build(MAZES["env"], VecEnv)
    tasks = env.levels.random(6, np.random.default_rng(0))
    found = student.values(tasks)
    assert found.shape == (6,) and np.array_equal(found, student.values(tasks))
    rows = torch.from_numpy(tasks[[4, 5, 4, 5]]).float()
    obs = env.reset(SEED, rows)
    value: Any = parts.learner.value
    if policy is MEMORY:
        batch = {key: leaf[None] for key, leaf in obs.items()}
        wanted = value(batch, torch.zeros(4, 8), torch.ones(1, 4, dtype=torch.bool))[0][0]
    else:
        wanted = value(obs)
    assert np.allclose(found[4:], wanted[:2].detach().numpy(), atol=1e-6)


def test_a_teacher_asks_in_a_run_and_a_resume_is_exact(tmp_path: Path) -> None:
    _, state = resumed(tmp_path, ASKING, 280)
    assert state["teacher"]["updates"] >= 2


def test_who_does_not_know_is_not_asked(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, NODE | {"teacher": None})
    assert task_value_estimator(NODE["env"], parts.learner, parts.device) is None
