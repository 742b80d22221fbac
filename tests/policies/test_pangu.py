"""Pangu-Agent: order of the functions, what stays in the memory, and whose memory it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

pytest.importorskip("crafter")

from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.text import decode
from embodied.evaluation.evaluate import evaluate
from embodied.policies.llm.pangu import Pangu, remembered
from embodied.policies.llm.reader import answer_to
from tests.llm.server import Server, Told, says, serving
from tests.policies.test_spring import READER, world


def made(env: Any, chat: dict[str, Any] = READER, **settings: Any) -> Pangu:
    node = {"_target_": "embodied.policies.llm.pangu.Pangu", "chat": chat, **settings}
    policy = build(node, Policy, spec=env.spec)
    assert isinstance(policy, Pangu)
    return policy


def answer(request: dict[str, Any]) -> Any:
    """The scripted reader's answer; a lesson names what is in front of the player."""
    text = "\n".join(message["content"] for message in request["messages"])
    schema = request["response_format"]["json_schema"]["schema"]
    data = answer_to(text, schema)
    if "lesson" in data:
        data["lesson"] = "before " + text.split("in front of it: ")[-1].split(".")[0]
    return says(json.dumps(data)).body


def names(server: Server) -> list[str]:
    """The questions in the order in which they came, by what their answers hold."""
    schemas = [sent["response_format"]["json_schema"]["schema"] for sent in server.asked]
    return [next(iter(schema["properties"])) for schema in schemas]


@pytest.mark.parametrize(
    ("functions", "order"),
    [("think", ["thought", "action"]), ("plan", ["lesson", "tasks", "thought", "action"])],
)
def test_functions_come_in_order_and_the_action_last(functions: str, order: list[str]) -> None:
    env = world(length=50)
    with serving(Told(answer)) as server:
        policy = made(env, server.node(), functions=functions)
        obs, noise = env.reset(0), policy.sample_noise(1)
        action, carry = policy.act(obs, policy.initial(1), noise)
        assert names(server) == order
        step = env.step(action[:, 0])
        policy.act(step.obs, carry, noise)
    (memory,) = decode(carry["memory"])
    assert names(server) == order * 2 and policy.failed == 0
    scenes = [sent["messages"][1]["content"] for sent in server.asked]
    assert not any(scene.startswith("Memory") for scene in scenes[: len(order)])
    kept = functions == "plan"
    assert ("plan: tree" in memory) == kept == ("lesson: before" in memory)
    assert all(scene.startswith(f"Memory:\n{memory}") == kept for scene in scenes[len(order) :])


def test_each_environment_has_its_own_memory() -> None:
    """Row 1 alone does the same as beside row 0, whose memory is of another world."""
    env = world(2, length=50)
    with serving(Told(answer)) as server:
        policy = made(env, server.node())
        obs = env.reset(0)
        carry = policy.initial(2)
        carry["memory"][0, :3] = torch.tensor([*b"abc"], dtype=torch.uint8)
        _, both = policy.act(obs, carry, policy.sample_noise(2))
        alone = {name: leaf[1:] for name, leaf in obs.items()}
        _, one = policy.act(alone, policy.initial(1), policy.sample_noise(1))
    first, second = decode(both["memory"])
    assert first.startswith("abc\n") and [second] == decode(one["memory"])


def test_memory_by_hand() -> None:
    first = {"reflect": {"lesson": "trees  give\nwood"}, "plan": {"tasks": ["wood", "table"]}}
    kept = remembered("", first, 100)
    assert kept == "lesson: trees give wood\nplan: wood; table"
    assert remembered(kept, first, 100) == kept
    second = {"reflect": {"lesson": "water is left"}, "plan": {"tasks": ["drink"]}}
    both = "lesson: trees give wood\nlesson: water is left\nplan: drink"
    assert remembered(kept, second, 100) == both
    assert remembered(kept, second, 40) == "lesson: water is left\nplan: drink"
    assert remembered(kept, {}, 100) == kept
    assert remembered("", {"reflect": {"lesson": "\ud800"}}, 100) == "lesson: ?"


def test_an_answer_that_cannot_be_used_leaves_the_memory() -> None:
    env = world(length=50)
    with serving(Told({}, 500)) as server:
        policy = made(env, server.node(limits={"retries": 0, "backoff": 0.0}))
        action, carry = policy.act(env.reset(0), policy.initial(1), policy.sample_noise(1))
    assert action.tolist() == [[5]] and policy.failed == 1 and decode(carry["memory"]) == [""]


def test_the_simulated_reader_collects_wood() -> None:
    env = world(2, length=150)
    found = evaluate(made(env), env, 2, seed=3)
    assert found.metrics()["achievement/collect_wood"] > 0


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigError, match="functions"):
        made(world(length=50), functions="dream")
