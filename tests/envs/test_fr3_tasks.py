"""The language tasks: predicates, instructions that matter, exact state, demonstrator, texts."""

from __future__ import annotations

import pytest
import torch

from embodied.core.build import ConfigError
from embodied.core.env import HasInstructions
from embodied.core.text import decode
from embodied.core.wrapper import find_protocol
from embodied.datasets.collect import CollectConfig, collect
from embodied.datasets.lerobot.reader import read_episodes
from embodied.envs.fr3.language import (
    BLOCK,
    INSTRUCTIONS,
    NAMES,
    SENTENCES,
    TOKENS,
    TRAVEL,
    WORDS,
    Config,
    LanguageTasks,
    tokens,
)
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


def done(env: LanguageTasks) -> dict[str, bool]:
    """Which instructions hold in env 0."""
    view = env.view(torch.arange(env.num_envs).numpy())
    return {each.name: bool(each.done(view)[0]) for each in INSTRUCTIONS}


def where(env: LanguageTasks, name: str) -> list[float]:
    return env.view(torch.arange(env.num_envs).numpy()).place[name][0].tolist()


def slide(env: LanguageTasks, joint: str, value: float) -> None:
    env.batch.qpos[0, int(env.model.joint(joint).qposadr[0])] = value


def hand(env: LanguageTasks, width: float) -> None:
    env.batch.qpos[0, 7:9] = width / 2


def test_nothing_is_done_at_the_start() -> None:
    env = made(rows=64)
    view = env.view(torch.arange(64).numpy())
    assert not any(each.done(view).any() for each in INSTRUCTIONS)


@pytest.mark.parametrize(
    ("name", "block", "base", "offset"),
    [
        ("red_into_bowl", "red", "bowl", (0.01, 0.0, 0.03)),
        ("blue_into_bowl", "blue", "bowl", (0.0, -0.01, 0.026)),
        ("green_onto_plate", "green", "plate", (0.02, 0.02, 0.026)),
        ("blue_onto_green", "blue", "green", (0.0, 0.01, 2 * BLOCK)),
        ("red_into_drawer", "red", "cabinet", (0.0, -0.12, 0.031)),
        ("green_onto_cabinet", "green", "cabinet", (0.03, -0.03, 0.09)),
    ],
)
def test_a_block_is_where_it_was_asked_to_be_once_it_is_let_go(name, block, base, offset) -> None:
    env = made()
    x, y, z = where(env, base)
    put(env, block, x + offset[0], y + offset[1], z + offset[2])
    assert [each for each, holds in done(env).items() if holds] == [name]
    hand(env, 2 * BLOCK)
    assert not any(done(env).values()), "it is still in the hand"
    hand(env, 0.08)
    put(env, block, x + offset[0], y + offset[1], z + offset[2] + 0.05)
    assert not any(done(env).values()), "it is in the air"
    put(env, block, x + offset[0] + 0.09, y + offset[1], z + offset[2])
    assert not any(done(env).values()), "it is beside"


def test_drawer_button_and_plate() -> None:
    env = made()
    slide(env, "drawer", TRAVEL - 0.005)
    assert [name for name, holds in done(env).items() if holds] == ["open_drawer"]
    slide(env, "drawer", 0.005)
    assert [name for name, holds in done(env).items() if holds] == ["close_drawer"]
    slide(env, "drawer", 0.08)
    slide(env, "cap", 0.008)
    assert [name for name, holds in done(env).items() if holds] == ["press_button"]
    slide(env, "cap", 0.0)
    x, y, z = where(env, "plate")
    put(env, "plate", x, y + 0.11, z)
    assert [name for name, holds in done(env).items() if holds] == ["push_plate_left"]
    put(env, "plate", x, y - 0.11, z)
    assert not any(done(env).values()), "to the right"


@pytest.mark.parametrize("objects", ["seen", "privileged"])
def test_the_scene_does_not_tell_the_tasks_apart(objects) -> None:
    """One seed gives one scene whatever is asked: policies can tell by the sentence only."""
    rows = [made(name, rows=3, objects=objects).reset(seed=5) for name in NAMES]
    for number, obs in enumerate(rows):
        for key in obs.keys() - {"instruction", "privileged/task"}:
            assert torch.equal(obs[key], rows[0][key]), key
        assert (obs["instruction"].numpy() == TOKENS[number]).all()
        assert (obs["privileged/task"].argmax(1) == number).all()
    assert len({tuple(obs["instruction"][0].tolist()) for obs in rows}) == len(NAMES)


def test_only_the_success_of_the_own_instruction_pays_and_ends() -> None:
    env = made("open_drawer", "close_drawer", rows=6)
    slot = int(env.model.joint("drawer").qposadr[0])
    env.batch.qpos[:, slot] = TRAVEL
    said = env.instructions()
    assert len(set(said)) == 2
    step = env.step(torch.zeros(6, 4))
    asked = torch.tensor([text == "open the drawer" for text in said])
    assert torch.equal(step.log["success"], asked) and torch.equal(step.terminated, asked)
    assert torch.equal(step.reward, asked.float())


def test_the_task_vector_chooses_the_instruction_for_one_episode() -> None:
    env = made(rows=10)
    env.reset(task=(torch.arange(10)[:, None] + 0.5) / 10)
    assert env.instructions() == list(SENTENCES)
    assert made("press_button").spec.text == "press the button" and env.spec.text == ""


def test_words_and_texts_of_every_row() -> None:
    env = made(rows=8, text=48)
    obs = env.reset(seed=3)
    assert len(set(env.instructions())) > 2
    for said, numbers in zip(env.instructions(), obs["instruction"].tolist(), strict=True):
        assert " ".join(WORDS[number - 1] for number in numbers if number) == said
    assert decode(obs["text"]) == env.instructions()
    assert find_protocol(env, HasInstructions) is env
    with pytest.raises(ValueError, match="not a sentence of these tasks"):
        tokens("fold the towel")


def test_a_wrong_instruction_is_shown_but_the_task_stays() -> None:
    right, wrong = made("open_drawer"), made("open_drawer", wrong_instruction=True)
    assert right.instructions()[0] == "open the drawer"
    assert wrong.instructions()[0] == "close the drawer"
    slide(wrong, "drawer", TRAVEL)
    assert wrong.step(torch.zeros(2, 4)).log["success"][0]


def test_settings_that_cannot_be_are_one_line() -> None:
    with pytest.raises(ConfigError, match=r'unknown task .opn_drawer. \(did you mean "open_dr'):
        made("opn_drawer")
    with pytest.raises(ConfigError, match="name each task once"):
        made("open_drawer", "open_drawer")
    with pytest.raises(ConfigError, match=r"type env\.text="):
        made(text=5)
    with pytest.raises(ConfigError, match=r"for env=fr3_tasks only"):
        from embodied.envs.fr3 import env as fr3_env

        ScriptedTasks(fr3.TasksConfig(), fr3_env.Fr3(fr3_env.Config(num_envs=1)).spec)


def test_the_demonstrator_does_what_is_said() -> None:
    env = LanguageTasks(Config(num_envs=20))
    policy = ScriptedTasks(fr3.TasksConfig(), env.spec)
    result = evaluate(policy, env, 20, seed=0)
    assert result.success is not None and result.success.float().mean() >= 0.9


def test_the_demonstrator_moves_in_the_steps_of_its_settings() -> None:
    env = made("press_button", rows=1)
    script = ScriptedTasks(fr3.TasksConfig(quality=1.0, step=0.05), env.spec)
    assert script.config.step == 0.05
    assert script.config.hesitation == 0 and script.pause == 0


def test_demonstrations_keep_the_sentence_of_every_episode(tmp_path) -> None:
    settings = {"tasks": ["open_drawer", "press_button"], "objects": "seen"}
    target = "embodied.envs.fr3.language.LanguageTasks"
    script = {"_target_": "embodied.policies.scripted.fr3.ScriptedTasks"}
    node = {"_target_": target, **settings}
    config = CollectConfig(node, script, episodes=6, out=str(tmp_path / "demos"), num_envs=3)
    assert collect(config, lambda kept, played: None)[0] == 6
    episodes = read_episodes(tmp_path / "demos")
    assert set(episodes.texts) == {"open the drawer", "press the button"}
    for text, start in zip(episodes.texts, episodes.start.tolist(), strict=True):
        assert episodes.steps["obs/instruction"][start].tolist() == tokens(text)


def test_two_cameras_see_the_objects() -> None:
    env = made("press_button", rows=1, cameras=("front", "wrist"), image_size=64)
    obs = env.reset(seed=0)
    for name in ("front", "wrist"):
        assert obs[name].shape == (1, 64, 64, 3) and obs[name].dtype == torch.uint8
        red = obs[name][0].int()
        seen = (red[..., 0] > 120) & (red[..., 1] < 60) & (red[..., 2] < 60)
        if name == "front":
            assert seen.any(), "the red block is in the picture"
        assert obs[name].float().std() > 20
