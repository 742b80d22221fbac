"""A policy of several tasks behind every door: what it is told is what it observes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import yaml
from torch import Tensor

import embodied as em
from embodied.core import checkpoint
from embodied.core.actor import Actor
from embodied.core.build import ConfigError
from embodied.core.env import Step, VecEnv
from embodied.core.policy import Policy
from embodied.core.spec import INSTRUCTION, SENTENCE, SYMBOL, Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.core.text import encode, text_leaf
from embodied.evaluation.evaluate import evaluate
from embodied.export.decision import Decision, facts, write_onnx
from embodied.nn import sentences
from embodied.nn.sentences import instruction
from embodied.policies.wrappers.translated import with_task
from tests.builders import exit_of, make_policy, node_of
from tests.toy_envs import Reach

TASKS = ("go left, then up", "go right")
NUMBER, VECTOR = Leaf((), "int64", 0, 1, SYMBOL), Leaf((384,), unit=SENTENCE)
UNIT = Leaf((2,), low=-1.0, high=1.0)
INNER = node_of("policies.diagonal_gaussian.DiagonalGaussian", hidden=[16])
FLOW = {"width": 16, "chunk": 3}
POLICIES: dict[str, tuple[str, Leaf, dict[str, Any]]] = {
    "plain": ("deterministic.Deterministic", UNIT, {}),
    "past": ("generative.flow.Flow", UNIT, {**FLOW, "obs_steps": 3}),
    "choices": ("categorical.Categorical", Leaf((), "int64", 0, 4), {}),
    "recurrent": ("recurrent.Recurrent", UNIT, {"inner": INNER}),
}


def listener(kind: str = "plain") -> Policy:
    target, act, settings = POLICIES[kind.partition(",")[0]]
    obs = {"state": Leaf((2,)), INSTRUCTION: VECTOR if "vector" in kind else NUMBER}
    return make_policy(target, Spec(obs, act, 0.1, tasks=TASKS), **settings).eval()


def run_of(folder: Path, policy: Policy) -> Path:
    checkpoint.save(folder / "checkpoints" / "00000001", policy, 1)
    (folder / "run.yaml").write_text(yaml.safe_dump({"env": None, "demos": "theirs"}))
    return folder


def played(policy: Policy, more: Tensors) -> Tensor:
    """Five actions of two rows, at random states and noise."""
    torch.manual_seed(1)
    actor, first = Actor(policy, 2, execute=1), torch.ones(2, dtype=torch.bool)
    actions: list[Tensor] = []
    for _ in range(5):
        actions.append(actor({"state": torch.randn(2, 2), **more}, first))
        first = torch.zeros_like(first)
    return torch.stack(actions)


def observed(base: Policy, task: str) -> Tensors:
    return {INSTRUCTION: instruction(base.spec, [task, task])}


@pytest.mark.parametrize("kind", [*POLICIES, "past, vector"])
def test_it_acts_as_one_that_observes_the_instruction(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "vector" in kind:
        request.getfixturevalue("tiny_encoder")
    base = listener(kind)
    wanted = [played(base, observed(base, task)) for task in TASKS]
    assert not torch.equal(*wanted)
    told = [with_task(base, task) for task in TASKS]
    for task, policy in zip(TASKS, told, strict=True):
        assert (policy.spec.text, policy.spec.listens) == (task, False)
        checkpoint.save(tmp_path / task, policy, 0)
    monkeypatch.delattr(sentences, "_encoder")  # acting needs no encoder
    for task, policy, actions in zip(TASKS, told, wanted, strict=True):
        loaded = checkpoint.load_policy(tmp_path / task)
        for found in (played(policy, {}), played(loaded, {})):
            torch.testing.assert_close(found, actions, atol=1e-6, rtol=0)


class Spoken(Reach):
    """Row i shows the text of task i."""

    says: tuple[str, str] = TASKS

    def __init__(self, num_envs: int = 2) -> None:
        super().__init__(num_envs)
        self.spec = self.spec.with_obs(goal=text_leaf(20))

    def _told(self, obs: Tensors) -> Tensors:
        return {**obs, "goal": encode(self.says, 20)}

    def reset(self, *given: Any, **named: Any) -> Tensors:
        return self._told(super().reset(*given, **named))

    def step(self, action: Tensor) -> Step:
        step = super().step(action)
        step.obs.update(self._told(step.obs))
        step.next_obs.update(self._told(step.next_obs))
        return step


def returns(policy: Policy, env: VecEnv) -> list[float]:
    return evaluate(policy, env, 2, 10_000).returns.tolist()


@pytest.mark.parametrize("kind", ["plain", "past"])
def test_the_text_of_an_environment_says_what_to_do(kind: str) -> None:
    base = listener(kind)
    each = [returns(with_task(base, task), Reach(2)) for task in TASKS]
    assert each[0] != each[1]
    found = em.evaluate(base, Spoken(), episodes=2).returns
    assert found.tolist() == pytest.approx([each[0][0], each[1][1]], abs=1e-4)
    assert em.evaluate(base, Spoken(), 2, task=TASKS[1]).returns.tolist() == each[1]
    strange = Spoken()
    strange.says = ("go up", TASKS[0])
    with pytest.raises(ConfigError, match=r"never saw the task 'go up', it knows 'go left, then"):
        em.evaluate(base, strange, episodes=2)


def test_commands_are_told_by_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`eval` needs one of the tasks; `export` writes one, or the policy that is told."""
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "reach.yaml").write_text("_target_: tests.toy_envs.Reach\n")
    run = run_of(tmp_path / "run", listener())
    words = ["env=reach", "episodes=2", "allow=[tests]", f"--config-dir={tmp_path}"]
    for task in TASKS:
        assert exit_of("eval", run, *words, f"task={task}") == 0
    rows = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    means = [np.mean(returns(with_task(listener(), task), Reach(2))) for task in TASKS]
    assert [row["task"] for row in rows] == [*TASKS]
    assert [row["return"] for row in rows] == pytest.approx(means) and means[0] != means[1]
    capsys.readouterr()
    assert exit_of("eval", run, *words) == 2
    assert "say what to do: task='go left, then up' or 'go right'" in capsys.readouterr().err
    one, both = tmp_path / "one", tmp_path / "both"
    assert exit_of("export", run, f"task={TASKS[0]}", "--to", one) == 0
    assert exit_of("export", run, "--to", both) == 0
    said = capsys.readouterr().out.splitlines()
    inputs = [line for line in said if line.startswith("inputs")]
    assert [INSTRUCTION in line for line in inputs] == [False, True]
    about = onnxruntime.InferenceSession(one / "policy.onnx").get_modelmeta()
    assert about.custom_metadata_map["text"] == TASKS[0]
    for command in (["eval", run, *words], ["export", run, "--to", tmp_path / "none"]):
        assert exit_of(*command, "task=go up") == 2
        assert "never saw the task 'go up', it knows 'go left" in capsys.readouterr().err


def test_an_agent_is_told_in_every_call_or_for_good(tmp_path: Path) -> None:
    base, state = listener(), np.array([0.3, -0.2], np.float32)
    run = run_of(tmp_path / "run", base)
    agent = em.load(run)
    seen = {"state": torch.tensor([[0.3, -0.2]] * 2), INSTRUCTION: torch.tensor([0, 1])}
    acts = base.act(seen, {}, base.sample_noise(2))[0][:, 0].tolist()
    for i in (0, 1, 0):
        assert agent.predict({"state": state}, task=TASKS[i]).tolist() == pytest.approx(acts[i])
        assert em.load(run, task=TASKS[i]).predict(state).tolist() == pytest.approx(acts[i])
    both = agent.predict(np.stack([state, state]), task=TASKS[1])
    assert both.tolist() == [pytest.approx(acts[1])] * 2
    agent.reset()
    named = agent.predict({"state": state, INSTRUCTION: np.int64(1)})
    assert named.tolist() == pytest.approx(acts[1])
    for given in (state, {"state": state}):
        with pytest.raises(ConfigError, match="say what to do: task='go left, then up' or"):
            agent.predict(given)
    with pytest.raises(ConfigError, match="without an environment: give one, env="):
        em.evaluate(agent, task=TASKS[0])


def test_a_policy_without_tasks_is_not_told() -> None:
    obs, said = {"state": Leaf((2,))}, "lift the cube"
    one, none = (
        make_policy("deterministic.Deterministic", Spec(obs, UNIT, 0.1, text=text))
        for text in (said, "")
    )
    assert with_task(one, said) is one and with_task(none, None) is none
    with pytest.raises(ConfigError, match=f"never saw the task 'go up', it knows '{said}'"):
        with_task(one, "go up")
    with pytest.raises(ConfigError, match="no tasks in words, so task=go up has no effect"):
        with_task(none, "go up")


@pytest.mark.parametrize("kind", ["plain", "past", "choices", "past, vector"])
def test_an_export_hears_its_task_or_does_one_for_good(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if "vector" in kind:
        request.getfixturevalue("tiny_encoder")
    base = listener(kind)
    free, fixed = Decision(base), Decision(with_task(base, TASKS[1]))
    assert [f"obs/{INSTRUCTION}" in each.inputs for each in (free, fixed)] == [True, False]
    torch.manual_seed(0)
    told = instruction(base.spec, [TASKS[1]] * 3)
    feed = {"obs/state": torch.randn(3, 2), "noise": base.sample_noise(3)}
    heard = {f"obs/{INSTRUCTION}": told}
    if "past" in kind:
        feed["obs/history/state"] = torch.randn(3, 2, 2)
        heard[f"obs/history/{INSTRUCTION}"] = told[:, None].expand(-1, 2, *told.shape[1:])
    made: list[Tensor] = []
    for decision, given in ((free, feed | heard), (fixed, feed)):
        made.append(decision(*(given[key] for key in decision.inputs)))
        write_onnx(decision, facts(decision), tmp_path / "policy.onnx")
        session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
        (found,) = session.run(None, {name: value.numpy() for name, value in given.items()})
        made.append(torch.from_numpy(found))
    for other in made[1:]:
        torch.testing.assert_close(other, made[0], atol=1e-5, rtol=0)
