"""The language tasks: predicates, instructions that matter, exact state, demonstrator, texts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from embodied.core.build import ConfigError
from embodied.core.env import HasInstructions
from embodied.core.text import decode
from embodied.core.wrapper import find_protocol
from embodied.datasets.collect import CollectConfig, collect
from embodied.datasets.lerobot.reader import read_episodes
from embodied.envs.fr3 import language
from embodied.envs.fr3.env import Config as Fr3Config
from embodied.envs.fr3.env import Fr3
from embodied.envs.fr3.language import Config, LanguageTasks, tokens
from embodied.evaluation.evaluate import evaluate
from embodied.policies.scripted import fr3
from embodied.policies.scripted.fr3 import ScriptedTasks


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> None:
    """MuJoCo writes its warnings to a log file where it runs."""
    monkeypatch.chdir(tmp_path)


def made(*tasks: str, rows: int = 2, **settings) -> LanguageTasks:
    env = LanguageTasks(Config(tasks=tasks, num_envs=rows, **settings))
    env.reset(seed=1)
    return env


def put(env: LanguageTasks, name: str, x: float, y: float, z: float, row: int = 0) -> None:
    """Put the origin of a movable body somewhere, upright."""
    at = int(env.model.joint(name).qposadr[0])
    env.batch.qpos[row, at : at + 7] = [x, y, z, 1, 0, 0, 0]


def done(env: LanguageTasks) -> list[str]:
    """Which instructions hold in env 0."""
    view = env.view(np.arange(env.num_envs))
    return [each.name for each in language.INSTRUCTIONS if each.done(view)[0]]


def where(env: LanguageTasks, name: str) -> list[float]:
    return env.view(np.arange(env.num_envs)).place[name][0].tolist()


def slide(env: LanguageTasks, joint: str, value: float) -> None:
    env.batch.qpos[0, int(env.model.joint(joint).qposadr[0])] = value


def test_nothing_is_done_at_the_start() -> None:
    view = made(rows=64).view(np.arange(64))
    assert not any(each.done(view).any() for each in language.INSTRUCTIONS)


@pytest.mark.parametrize(
    ("name", "block", "base", "offset"),
    [
        ("red_into_bowl", "red", "bowl", (0.01, 0.0, 0.03)),
        ("blue_into_bowl", "blue", "bowl", (0.0, -0.01, 0.026)),
        ("green_onto_plate", "green", "plate", (0.02, 0.02, 0.026)),
        ("blue_onto_green", "blue", "green", (0.0, 0.01, 2 * language.BLOCK)),
        ("red_into_drawer", "red", "cabinet", (0.0, -0.12, 0.031)),
        ("green_onto_cabinet", "green", "cabinet", (0.03, -0.03, 0.09)),
    ],
)
def test_a_block_is_where_it_was_asked_to_be_once_it_is_let_go(name, block, base, offset) -> None:
    env = made()
    place = np.add(where(env, base), offset)
    put(env, block, *place)
    assert done(env) == [name]
    env.batch.qpos[0, 7:9] = language.BLOCK
    assert not done(env), "it is still in the hand"
    env.batch.qpos[0, 7:9] = 0.04
    put(env, block, *np.add(place, [0, 0, 0.05]))
    assert not done(env), "it is in the air"
    put(env, block, *np.add(place, [0.09, 0, 0]))
    assert not done(env), "it is beside"


def test_drawer_button_and_plate() -> None:
    env = made()
    slide(env, "drawer", language.TRAVEL - 0.005)
    assert done(env) == ["open_drawer"]
    slide(env, "drawer", 0.005)
    assert done(env) == ["close_drawer"]
    slide(env, "drawer", 0.08)
    slide(env, "cap", 0.008)
    assert done(env) == ["press_button"]
    slide(env, "cap", 0.0)
    x, y, z = where(env, "plate")
    put(env, "plate", x, y + 0.11, z)
    assert done(env) == ["push_plate_left"]
    put(env, "plate", x, y - 0.11, z)
    assert not done(env), "to the right"


@pytest.mark.parametrize("objects", ["seen", "privileged"])
def test_the_scene_does_not_tell_the_tasks_apart(objects) -> None:
    """One seed gives one scene whatever is asked: policies can tell by the sentence only."""
    rows = [made(name, rows=3, objects=objects).reset(seed=5) for name in language.NAMES]
    for number, obs in enumerate(rows):
        for key in obs.keys() - {"instruction", "privileged/task"}:
            assert torch.equal(obs[key], rows[0][key]), key
        assert (obs["instruction"].numpy() == language.TOKENS[number]).all()
        assert (obs["privileged/task"].argmax(1) == number).all()
    assert len({tuple(obs["instruction"][0].tolist()) for obs in rows}) == len(language.NAMES)


def test_only_the_success_of_the_own_instruction_pays_and_ends() -> None:
    env = made("open_drawer", "close_drawer", rows=6)
    env.batch.qpos[:, int(env.model.joint("drawer").qposadr[0])] = language.TRAVEL
    asked = torch.tensor([text == "open the drawer" for text in env.instructions()])
    assert asked.any() and not asked.all()
    step = env.step(torch.zeros(6, 4))
    assert torch.equal(step.log["success"], asked) and torch.equal(step.terminated, asked)
    assert torch.equal(step.reward, asked.float())


def test_the_task_vector_chooses_the_instruction_for_one_episode() -> None:
    env = made(rows=10)
    env.reset(task=(torch.arange(10)[:, None] + 0.5) / 10)
    assert env.instructions() == list(language.SENTENCES)
    assert made("press_button").spec.text == "press the button" and env.spec.text == ""


def test_words_and_texts_of_every_row() -> None:
    env = made(rows=8, text=48)
    obs = env.reset(seed=3)
    assert len(set(env.instructions())) > 2
    for said, numbers in zip(env.instructions(), obs["instruction"].tolist(), strict=True):
        assert " ".join(language.WORDS[number - 1] for number in numbers if number) == said
    assert decode(obs["text"]) == env.instructions()
    assert find_protocol(env, HasInstructions) is env
    with pytest.raises(ValueError, match="not a sentence of these tasks"):
        tokens("fold the towel")


def test_a_wrong_instruction_is_shown_but_the_task_stays() -> None:
    right, wrong = made("open_drawer"), made("open_drawer", wrong_instruction=True)
    assert right.instructions()[0] == "open the drawer"
    assert wrong.instructions()[0] == "close the drawer"
    slide(wrong, "drawer", language.TRAVEL)
    assert wrong.step(torch.zeros(2, 4)).log["success"][0]


def test_settings_that_cannot_be_are_one_line() -> None:
    for make, says in (
        (lambda: made("opn_drawer"), r'unknown task .opn_drawer. \(did you mean "open_dr'),
        (lambda: made("open_drawer", "open_drawer"), "name each task once"),
        (lambda: made(text=5), r"type env\.text="),
        (
            lambda: ScriptedTasks(fr3.TasksConfig(), Fr3(Fr3Config(num_envs=1)).spec),
            r"for env=fr3_tasks only",
        ),
    ):
        with pytest.raises(ConfigError, match=says):
            make()


def test_the_demonstrator_does_what_is_said() -> None:
    env = LanguageTasks(Config(num_envs=20))
    policy = ScriptedTasks(fr3.TasksConfig(), env.spec)
    result = evaluate(policy, env, 20, seed=0)
    assert result.success is not None and result.success.float().mean() >= 0.9


def test_demonstrations_keep_the_sentence_of_every_episode(tmp_path) -> None:
    tasks = {"tasks": ["open_drawer", "press_button"], "objects": "seen"}
    node = {"_target_": "embodied.envs.fr3.language.LanguageTasks", **tasks}
    script = {"_target_": "embodied.policies.scripted.fr3.ScriptedTasks"}
    config = CollectConfig(node, script, episodes=6, out=str(tmp_path / "demos"), num_envs=3)
    assert collect(config, lambda kept, played: None)[0] == 6
    episodes = read_episodes(tmp_path / "demos")
    assert set(episodes.texts) == {"open the drawer", "press the button"}
    for text, start in zip(episodes.texts, episodes.start.tolist(), strict=True):
        assert episodes.steps["obs/instruction"][start].tolist() == tokens(text)
