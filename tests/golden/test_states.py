"""Learners and policies go on from a state of made-up values as they did when it was recorded.

`states.json` holds the form of every learner's `get_state()` and of every policy's `state_dict()`:
names, types and shapes, no values. The test fills it with made-up values, loads it as a resumed run
would load `learner.pt` or `policy.safetensors`, and compares what comes of it. Whoever renames an
attribute renames it in `states.json`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf
from embodied.learners.learner import Learner
from tests.contract import test_learner as contract
from tests.golden import fingerprint, test_envs, test_learners

FILE = "states.json"
RECORDED = fingerprint.read(FILE)
LEARNERS = [key for key in RECORDED["records"] if key.startswith("learner/")]
POLICIES = [key for key in RECORDED["records"] if key.startswith("policy/")]
CHOICE = Leaf((), "int64", 0, 3)
ROWS = 4
POSITIVE = ("block_gaussian",)  # policies with a running variance among their weights


def form(value: Any) -> Any:
    """Nested dictionaries and lists with words for tensors; keys may be numbers."""
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return {"tensor": " ".join([kind, *map(str, value.shape)])}
    if isinstance(value, dict):
        return {"dict": [[key, form(item)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {"list": [form(item) for item in value]}
    return {"plain": value}


def made_up(shape: Any, low: float, random: torch.Generator | None = None) -> Any:
    """Values of a form, numbers from `low` to 0.1: moments and counts have to be positive, weights
    of both signs say more."""
    random = random or torch.Generator().manual_seed(0)
    ((kind, value),) = shape.items()
    if kind == "dict":
        return {key: made_up(item, low, random) for key, item in value}
    if kind == "list":
        return [made_up(item, low, random) for item in value]
    return invented(value, low, random) if kind == "tensor" else value


def invented(words: str, low: float, random: torch.Generator) -> Tensor:
    dtype, *size = words.split()
    kind, shape = getattr(torch, dtype), [int(word) for word in size]
    if not kind.is_floating_point:
        return torch.ones(shape, dtype=kind)
    drawn = torch.rand(shape, generator=random)
    return ((low + (0.1 - low) * drawn) if shape else 1 + drawn).to(kind)


def gone_on(learner: Learner, shape: Any) -> list[Tensor]:
    """All values of a learner that went on from a state of this form, by one update."""
    torch.set_num_threads(1)
    learner.set_state(made_up(shape, 0.01))
    contract.updates(learner, 0, 1)
    return list(learner.state_dict().values())


def policy_of(name: str) -> Any:
    """One that refuses continuous actions gets discrete ones."""
    torch.manual_seed(0)
    node = contract.node("policy", name)
    try:
        return build(node, Policy, spec=contract.SPEC)
    except ConfigError:
        return build(node, Policy, spec=contract.SPEC.with_act(CHOICE))


def acted(name: str, policy: Any, shape: Any) -> list[Tensor]:
    """What a policy with weights of this form does, twice."""
    torch.set_num_threads(1)
    policy.load_state_dict(made_up(shape, 0.01 if name in POSITIVE else -0.1))
    policy.eval()
    torch.manual_seed(0)
    carry, played = policy.initial(ROWS), []
    for _ in range(2):
        obs, noise = {"state": torch.randn(ROWS, 3)}, policy.sample_noise(ROWS, explore=True)
        with torch.no_grad():
            actions, carry = policy.act(*policy.observe(obs, carry, noise), noise)
        played.append(actions)
    return played


def record_learner(stem: str) -> dict[str, Any]:
    option = test_learners.accepted(stem)[0]
    learner = test_learners.make(stem, option)
    contract.updates(learner, 0, 2)
    shape = form(learner.get_state())
    return {"learns": option, "form": shape, **fingerprint.figures(gone_on(learner, shape))}


def record_policy(name: str) -> dict[str, Any]:
    policy = policy_of(name)
    shape = form(dict(policy.state_dict()))
    return {"form": shape, **fingerprint.figures(acted(name, policy, shape))}


def record_all() -> dict[str, Any]:
    names = sorted(path.stem for path in (contract.CONFIGS / "policy").glob("*.yaml"))
    learners = {f"learner/{stem}": record_learner(stem) for stem in contract.LEARNERS}
    return learners | {f"policy/{name}": record_policy(name) for name in names}


@pytest.mark.parametrize("key", LEARNERS)
def test_a_learner_goes_on_from_a_state(key: str) -> None:
    then = RECORDED["records"][key]
    learner = test_learners.make(key.split("/")[1], then["learns"])
    fingerprint.compare(gone_on(learner, then["form"]), then, RECORDED)


@pytest.mark.parametrize("key", POLICIES)
def test_a_policy_acts_with_given_weights(key: str) -> None:
    then, name = RECORDED["records"][key], key.split("/")[1]
    fingerprint.compare(acted(name, policy_of(name), then["form"]), then, RECORDED)


@pytest.mark.parametrize("file", [FILE, test_learners.FILE, test_envs.FILE])
def test_there_are_records(file: str) -> None:
    assert fingerprint.read(file)["records"], "run: python -m tests.golden.record"
