"""SPRING: words of an observation, nine questions of a step, a legal action every time."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("crafter")

from embodied.commands.eval import print_table, result_row
from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.envs.crafter import rules
from embodied.envs.crafter.env import Config as WorldConfig
from embodied.envs.crafter.env import Crafter
from embodied.evaluation.evaluate import Evaluation, evaluate
from embodied.policies.llm import spring
from embodied.policies.llm.reader import answer_to
from tests.builders import exit_of
from tests.llm.server import Told, says, serving

READER = {"_target_": "embodied.policies.llm.reader.ManualReader"}


def world(rows: int = 1, **settings: Any) -> Crafter:
    return Crafter(WorldConfig(num_envs=rows, workers=0, **settings))


def made(env: Crafter, chat: dict[str, Any] = READER, **settings: Any) -> spring.Spring:
    node = {"_target_": "embodied.policies.llm.spring.Spring", "chat": chat, **settings}
    policy = build(node, Policy, spec=env.spec)
    assert isinstance(policy, spring.Spring)
    return policy


def answer(request: dict[str, Any]) -> Any:
    """The scripted reader's answer to a request of the protocol."""
    text = "\n".join(message["content"] for message in request["messages"])
    schema = request["response_format"]["json_schema"]["schema"]
    return says(json.dumps(answer_to(text, schema))).body


def test_names_are_those_of_the_environment() -> None:
    assert rules.ACTIONS == spring.ACTIONS and rules.SYMBOLS == spring.SYMBOLS
    assert rules.ITEMS[spring.VITALS :] == spring.ITEMS
    assert rules.AHEAD == spring.AHEAD
    assert [rules.WAY_NAMES[way] for way in rules.WAYS] == list(spring.FACING)


def test_the_manual_has_the_numbers_of_the_game() -> None:
    text = " ".join(spring.MANUAL.read_text().split())
    assert "place_table uses two wood" in text and rules._data["place"]["table"]["uses"] == {
        "wood": 2
    }
    assert "place_furnace uses four stone" in text
    assert rules._data["place"]["furnace"]["uses"] == {"stone": 4}
    for name, recipe in rules._data["make"].items():
        assert f"make_{name}" in text and all(count == 1 for count in recipe["uses"].values())


def test_an_observation_in_words() -> None:
    cells = torch.full((7, 9), spring.SYMBOLS.index("grass"), dtype=torch.uint8)
    cells[3, 4] = spring.SYMBOLS.index("player")
    cells[3, 5] = spring.SYMBOLS.index("tree")
    cells[0, 2] = spring.SYMBOLS.index("water")
    inventory = torch.zeros(16)
    inventory[:4] = torch.tensor([9.0, 8.0, 3.0, 9.0])
    inventory[5] = 2
    obs = {"symbols": cells, "facing": torch.tensor([1]), "body": torch.tensor([0.0, 0.5])}
    now = {name: value.numpy() for name, value in {**obs, "inventory": inventory}.items()}
    assert spring.described(now).splitlines() == [
        "- It is awake and faces right; in front of it: tree.",
        "- In view: grass 1 up, tree 1 right, water 3 up 2 left.",
        "- health 9/9, food 8/9, drink 3/9, energy 9/9; daylight 50%.",
        "- It has 2 wood.",
    ]
    text = spring.seen_text(now, now, spring.ACTIONS.index("do"))
    assert "chose the action do." in text and text.count("In view") == 2
    assert "Before" not in spring.seen_text(now, now, -1)


def test_nine_questions_a_step_and_one_for_what_was_seen_before() -> None:
    """Behind a server: each question sees the manual, both observations and its parents."""
    env = world(length=50)
    with serving(Told(answer)) as server:
        policy = made(env, server.node())
        obs = env.reset(0)
        noise = policy.sample_noise(1)
        action, carry = policy.act(obs, policy.initial(1), noise)
        again, _ = policy.act(obs, policy.initial(1), noise)
        assert len(server.asked) == 9 and action.equal(again)
        step = env.step(action[:, 0])
        policy.act(step.obs, carry, noise)
    assert len(server.asked) == 18 and policy.failed == 0
    for sent in server.asked:
        system, scene, *dialogue = (message["content"] for message in sent["messages"])
        assert "place_table uses two wood" in system
        assert len(dialogue) % 2 == 1 and scene.startswith(("The episode begins", "Before:"))
    name = spring.ACTIONS[int(action)]
    assert f"chose the action {name}." in server.asked[-1]["messages"][1]["content"]


@pytest.mark.parametrize(
    "told", [says("move left, I think"), says('{"action": "fly"}'), Told({}, 500), Told(b"", 200)]
)
def test_the_action_is_legal_whatever_the_server_says(told: Told) -> None:
    env = world(2, length=50)
    with serving(told) as server:
        policy = made(env, server.node(limits={"retries": 0, "backoff": 0.0}))
        actor = Actor(policy, 2, None)
        obs, first = env.reset(0), torch.ones(2, dtype=torch.bool)
        for _ in range(3):
            action = actor(obs, first)
            step = env.step(action)
            obs, first = step.obs, step.ended
            assert action.tolist() == [spring.ACTIONS.index(spring.FALLBACK)] * 2
    assert policy.failed == 6


def test_a_budget_that_is_spent_ends_the_episode_in_one_line() -> None:
    env = world()
    with serving(Told(answer)) as server:
        policy = made(env, server.node(limits={"calls": 5}))
        with pytest.raises(ConfigError, match="budget of 5 calls"):
            policy.act(env.reset(0), policy.initial(1), policy.sample_noise(1))


def test_paragraphs_that_are_not_relevant_are_left_out(tmp_path: Path) -> None:
    manual = tmp_path / "rules.txt"
    manual.write_text("Wood is good.\n\nThe authors thank their friends.\n")

    def relevance(request: dict[str, Any]) -> Any:
        text = request["messages"][-1]["content"]
        if "relevant" not in json.dumps(request["response_format"]):
            return answer(request)
        return says(json.dumps({"relevant": "authors" not in text})).body

    env = world()
    with serving(Told(relevance)) as server:
        policy = made(env, server.node(), manual=str(manual), relevant=True)
        policy.act(env.reset(0), policy.initial(1), policy.sample_noise(1))
        assert list(policy.rules()) == ["Wood is good."]
    assert len(server.asked) == 2 + 9
    assert server.asked[-1]["messages"][0]["content"] == "Wood is good."


def test_the_simulated_reader_makes_a_tool() -> None:
    """300 steps by rules: wood at least, and the score of the evaluation is that of the rates."""
    env = world(2, length=300)
    found = evaluate(made(env), env, 2, seed=3)
    facts = found.metrics()
    assert facts["achievement/collect_wood"] == 1.0
    rates = torch.tensor([v for k, v in facts.items() if k.startswith("achievement/")])
    assert len(rates) == 22
    assert facts["score"] == pytest.approx(float((100 * rates).log1p().mean().exp() - 1), rel=1e-5)


def test_the_score_is_in_what_eval_prints(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"run": "a", "step": 7, "episodes": 2, "return": 1.0, "length": 9.0}
    print_table([{**row, "score": 4.567}, row])
    shown = capsys.readouterr().out
    assert "score" in shown and "4.57" in shown
    flags = {"achievement/a": torch.tensor([True, False]), "achievement/b": torch.ones(2) > 0}
    found = Evaluation(None, torch.zeros(2), torch.ones(2), achievements=flags)
    subject: Any = SimpleNamespace(name="a", step=7, node={"seed": 0, "env": {}, "task": None})
    facts = result_row(subject, found)
    assert facts["achievement/a"] == 0.5 and facts["score"] == pytest.approx(70.77, abs=0.01)


def test_other_environments_are_refused() -> None:
    env = world(observe=("image",))
    with pytest.raises(ConfigError, match=r"spring plays env=crafter.*symbols is missing"):
        made(env)


def test_the_command_runs_without_a_server(tmp_path: Path) -> None:
    out = tmp_path / "played"
    words = ("env=crafter", "env.length=12", "env.num_envs=1", "env.workers=0")
    more = ("demonstrator=spring", "success_only=false", "episodes=1", f"out={out}")
    assert exit_of("demos", "collect", *words, *more) == 0
    assert (out / "meta").is_dir()
