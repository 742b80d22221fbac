"""Teachers in a run, of tasks and levels, and a second agent: they choose, a resume is exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from embodied.core import checkpoint
from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build
from embodied.core.config_fields import complete
from embodied.core.device import seed_everything
from embodied.core.env import VecEnv
from embodied.envs.maze.levels import GOAL
from embodied.evaluation.task_grid import FILE, TaskGridEval
from embodied.reports.run_report import TASKS, write
from embodied.teachers import teacher
from embodied.teachers.plots import read_episode_log
from embodied.teachers.teacher import TaskWrapper
from embodied.training.components import RunComponents
from embodied.training.config import read_config
from embodied.training.logger import Log, read_metrics
from embodied.training.task_sampling import SEED, TaskValueEstimator, task_value_estimator
from embodied.training.train import train
from embodied.training.trainer import Every, Trainer
from tests.builders import Patch, node_of, run_folder
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
    """The log of episodes of a run, and the state of its parts."""
    train({**node, "out": str(folder), **changes}, Log(folder))
    lines = (folder / teacher.FILE).read_text().splitlines()
    state = checkpoint.load_state(folder, "loop")["loop"]["parts"]
    return [json.loads(line) for line in lines], state


def resumed(folder: Path, node: dict[str, Any], cut: int) -> tuple[list[dict[str, Any]], Any]:
    """The episodes and the state of a run, which are those of one that is resumed at `cut` too."""
    whole, state = run(folder / "whole", node)
    run(folder / "parts", {**node, "steps": cut})
    with (folder / "parts" / teacher.FILE).open("a") as late:
        late.write('{"half a li')  # what came after the checkpoint is cut off
    again, other = run(folder / "parts", node, resume=str(folder / "parts"))
    assert (again, str(other)) == (whole, str(state))
    return whole, state


@pytest.mark.parametrize("more", usually([PPO], [{}, PPO]), ids=["replay", "rollout"])
def test_tasks_are_the_teachers_and_a_resume_is_exact(tmp_path: Path, more: dict[str, Any]) -> None:
    whole, _ = resumed(tmp_path, {**NODE, **more}, 240)
    assert len(whole) >= 40 and len({row["episode"] for row in whole}) == len(whole)
    assert all(0.1 <= row["task"][0] <= 0.3 for row in whole)
    assert {row["length"] for row in whole} <= set(range(1, 9))
    assert "that the teacher sampled" in write(tmp_path / "whole").read_text()
    assert (tmp_path / "whole" / TASKS).stat().st_size


@pytest.mark.parametrize("more", [{}, PPO], ids=["replay", "rollout"])
def test_a_teacher_of_tasks_is_in_the_log(tmp_path: Path, more: dict[str, Any]) -> None:
    mpts = yaml.safe_load(Path("configs/teacher/mpts.yaml").read_text())
    run(tmp_path, {**NODE, **more, "teacher": mpts, "steps": 600, "log_every": 200})
    rows = [row for row in read_metrics(tmp_path) if "train/steps_per_second" in row]
    assert len(rows) >= 2 and all("train/teacher_correlation" in row for row in rows)


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


def trained(folder: Path, node: dict[str, Any]) -> tuple[RunComponents, Trainer]:
    parts = parts_of(folder, node)
    nothing = Every(0, 0, 0)
    log = Log(folder, silent=True)
    with Trainer(log, 960, nothing, lambda step: None, lambda step: None) as keeper:
        parts.loop.run(keeper)
    return parts, keeper


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
    loop: Any = trained(tmp_path, maze_node(name))[0].loop
    estimates, world = loop.estimates, loop.collector.env
    assert isinstance(world, TaskWrapper) and not estimates.ended
    numbers, steps = (world.memory[key].tolist() for key in ("ticket", "length"))
    lengths = dict(zip(numbers, steps, strict=True))
    told = {number: row[0] for number, row in estimates.sums.items()}
    assert told and told == {number: length for number, length in lengths.items() if length}
    teacher: Any = world.teacher
    assert teacher.dropped == 0
    assert set(teacher.pending) == set(lengths) and len(teacher.library) == 12


def test_students_and_worlds_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    scaled = {**MAZES["learner"], "scale_rewards": True}
    with pytest.raises(ConfigError, match="advantages and values"):
        run(tmp_path, maze_node("plr"), learner=scaled)
    with pytest.raises(ConfigError, match="environment with levels"):
        run(tmp_path, {**NODE, **PPO}, teacher=maze_node("plr")["teacher"])


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
    from embodied.teachers.plots import chosen

    assert "that the teacher sampled" in write(mazes).read_text()
    picture = np.asarray(decode_image((mazes / TASKS).read_bytes()))
    goals = (picture[..., :3] == np.array(GOAL)).all(-1)  # no plot of points has this colour
    assert goals.sum() > 36 * 20
    past = read_episode_log(mazes)
    assert past is not None and past.task.shape[1] == 28
    assert chosen(np.arange(5)) == [0, 1, 2, 3, 4] and chosen(np.arange(17))[-1] == 16


def test_how_the_teacher_does_is_in_the_log(tmp_path: Path) -> None:
    run(tmp_path, maze_node("plr", log_every=96))
    seen = [row for row in read_metrics(tmp_path) if "train/teacher_library" in row]
    assert seen[-1]["train/teacher_library"] == 12 and 0 < seen[-1]["train/teacher_again"] < 1
    assert 0 <= seen[0]["train/teacher_walls"] <= 8 and seen[0]["train/teacher_way"] >= 1


def test_both_are_counted_and_both_learn(tmp_path: Path) -> None:
    """960 steps are 120 of each of the two students' four rows."""
    beginners: Any = parts_of(tmp_path, maze_node("paired"))
    parts, keeper = trained(tmp_path, maze_node("paired"))
    loop: Any = parts.loop
    learners = [parts.learner, loop.second_agent.learner]
    before = [beginners.learner, beginners.loop.second_agent.learner]
    moved = zip([*before, before[0]], [*learners, before[1]], strict=True)
    for one, other in moved:  # and they began as two
        pairs = zip(one.parameters(), other.parameters(), strict=True)
        assert any(not torch.equal(a, b) for a, b in pairs)
    assert keeper.step == 960 and [each.done for each in learners] == [480, 480]
    assert any(key.startswith("rival_") for update in keeper.updates for key in update)
    assert loop.teacher is loop.second_agent.teacher and "regret" in loop.teacher.metrics()


def test_what_cannot_have_a_second_agent_is_refused(tmp_path: Path) -> None:
    run_folder(tmp_path / "base", MAZES["env"], MAZES["policy"], (0,))
    reward = node_of("rewards.handcrafted.composite.Scaled")
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
    for name, ends in (("whole", (1200,)), ("parts", (852, 1200))):
        folder = tmp_path / name
        for end in ends:
            resume = str(folder) if folder.exists() else None
            settings = {**ROOMS, "out": str(folder), "steps": end, "resume": resume}
            train(settings, Log(folder, silent=True))
        kept = checkpoint.load_state(folder, "loop")["loop"]["parts"]
        assert kept["teacher"]["games"] == 1200 // (4 * 5 * 4)
        assert kept["second_agent"]["learner"]["done"] == 576  # of 600, by the dozen
        states.append((kept, checkpoint.load_state(folder, "learner")))
    assert str(states[0]) == str(states[1])


def test_control_begins_where_explore_stopped(tmp_path: Path, monkeypatch: Patch) -> None:
    """What it sees is what the body sees then, and its turns are its episodes."""
    parts = parts_of(tmp_path, ROOMS)
    loop: Any = parts.loop
    rooms: Any = parts.env.env.env  # type: ignore[attr-defined]
    controls = loop.second_agent.loop.collector.actor
    told: list[tuple[bool, bool]] = []
    act = Actor.__call__

    def noting(actor: Actor, obs: Any, first: torch.Tensor) -> torch.Tensor:
        if actor is controls:
            shown = rooms.observe(torch.arange(rooms.num_envs))
            told.append((bool(first.all()), all(torch.equal(obs[k], shown[k]) for k in shown)))
        return act(actor, obs, first)

    monkeypatch.setattr(Actor, "__call__", noting)
    for _ in range(10):
        loop.advance()
    assert told == [(True, True), *[(False, True)] * 4] * 2


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
    obs = env.reset(SEED, torch.from_numpy(tasks[[4, 5, 4, 5]]).float())
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
