"""Hostile programs do no harm and are refused in one line; legitimate ones run and are scored."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from embodied.core.build import ConfigError
from embodied.sandbox import gate as gate_module
from embodied.sandbox.gate import SLICE, TIMED, Limits, Sandbox, Worker, template
from embodied.sandbox.program import ProgramOutput, Rejected
from embodied.sandbox.quaternions import HELPERS
from embodied.sandbox.worker import CALLS
from tests.sandbox.attacks import ESCAPED, FINE, OTHER, PROCESS, body, gives, tries
from tests.sandbox.programs import LEGITIMATE

LIMITS = Limits(cpu=0.4, wall=3.0)
pytestmark = pytest.mark.skipif(
    not (Path("/proc/self/statm").exists() and CALLS), reason="no filter for system calls here"
)


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(LIMITS)


def rows(count: int = 64) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(count, 3, generator=torch.Generator().manual_seed(0))}


def refused(sandbox: Sandbox, source: str, pattern: str) -> None:
    """Refused in one line, nothing left behind, and the next program still runs."""
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Rejected) as caught:
        sandbox.gate(source, rows())
    line = str(caught.value)
    assert re.search(pattern, line), line
    assert len(line) < 2000 and line.isprintable()
    assert not Path(ESCAPED).exists() and template().process.poll() is None
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("name", PROCESS)
def test_the_locked_process_stops_attacks(sandbox: Sandbox, name: str) -> None:
    assert sandbox.status.startswith("seccomp on") and "possible" not in sandbox.status
    *lines, pattern = PROCESS[name]
    refused(sandbox, tries(*lines), pattern)


@pytest.mark.parametrize("name", OTHER)
def test_what_cannot_be_a_reward_is_refused(sandbox: Sandbox, name: str) -> None:
    source, pattern = OTHER[name]
    refused(sandbox, source, pattern)


def test_the_attacks_have_their_tools(sandbox: Sandbox) -> None:
    """`tries` runs without an attack: otherwise the battery above would prove nothing."""
    paid = sandbox.gate(tries("call(39)"), rows())(rows())
    torch.testing.assert_close(paid.total, rows()["x"][:, 0])


def transitions(count: int = 64) -> dict[str, torch.Tensor]:
    """A robot with a tool, a cube and a goal; before and after a step."""
    generator = torch.Generator().manual_seed(1)
    sizes: dict[str, tuple[int, ...]] = {"tool": (3,), "cube": (3,), "goal": (3,), "width": ()}
    sizes |= {"q": (7,), "qd": (7,)}
    names = {**sizes, **{f"next_{name}": size for name, size in sizes.items()}, "action": (4,)}
    return {name: torch.randn(count, *size, generator=generator) for name, size in names.items()}


@pytest.mark.parametrize("name", LEGITIMATE)
def test_legitimate_programs_are_accepted_and_scored(sandbox: Sandbox, name: str) -> None:
    gated = sandbox.gate(LEGITIMATE[name], transitions())
    many = transitions(300)
    output = gated(many)
    assert output.total.shape == (300,) and float(output.total.std()) > 1e-4
    assert all(part.shape == (300,) for part in output.components.values())
    gated.close()


def expected_stage(t: dict[str, np.ndarray]) -> float:
    reach = np.linalg.norm(t["cube"] - t["tool"])
    place = np.linalg.norm(t["goal"] - t["cube"])
    reward = -reach if reach > 0.1 else 1.0 - place if place > 0.1 else 3.0
    return float(reward - 0.01 * np.square(t["action"]).sum())


BY_HAND: dict[str, Any] = {
    "stages with else": expected_stage,
    "a vector and a number": lambda t: (
        -np.linalg.norm(t["tool"] - t["cube"]) - 0.5 * abs(t["width"])
    ),
    "a class with weights": lambda t: (
        -np.linalg.norm(t["tool"] - t["goal"]) - 0.01 * np.square(t["action"]).sum()
    ),
    "one line": lambda t: -np.linalg.norm(t["goal"] - t["next_tool"]),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_programs_pay_what_they_say(sandbox: Sandbox, name: str) -> None:
    given = transitions()
    given["tool"][:8] = given["cube"][:8] + 0.01  # later stages
    given["goal"][:4] = given["cube"][:4]
    paid = sandbox.gate(LEGITIMATE[name], given)(given).total
    each = [{k: v[i].numpy() for k, v in given.items()} for i in range(64)]
    torch.testing.assert_close(paid, torch.tensor([BY_HAND[name](t) for t in each]).float())


GAIN = """
def reward(x, memory):
    near = -x.norm(dim=-1)
    gain = torch.where(memory[:, 1] > 0, near - memory[:, 0], 0.0).clamp(min=0)
    best = torch.where(memory[:, 1] > 0, torch.maximum(near, memory[:, 0]), near)
    return gain, {}, torch.stack([best, torch.ones_like(best), *6 * [0 * best]], -1)
"""
GAIN_EACH = """
def reward(x, memory):
    near = -float(x.norm())
    gain = max(near - float(memory[0]), 0.0) if memory[1] > 0 else 0.0
    best = max(near, float(memory[0])) if memory[1] > 0 else near
    return gain, {}, torch.tensor([best, 1.0] + 6 * [0.0])
"""
GAIN_SELF = "class Reward:\n" + "".join(
    f"    {line}\n"
    for line in GAIN.replace("x, memory", "self").replace("-x", "-self.x").splitlines()
).replace("memory[", "self.memory[")


@pytest.mark.parametrize(("source", "alone"), [(GAIN, 0), (GAIN_EACH, 1), (GAIN_SELF, 0)])
def test_a_memory_is_what_was_returned_before(sandbox: Sandbox, source: str, alone: int) -> None:
    """The gain over the best so far, of distances 3, 2, 4 and 1, and, a step later, 5, 4, 6, 3."""
    gated = sandbox.gate(source, rows())
    assert gated.program.stateful and gated.report.one_by_one == bool(alone)
    distances, gains = [3.0, 2.0, 4.0, 1.0], []
    memory = torch.zeros(2, 8)
    for near in distances:
        x = torch.tensor([[near, 0.0, 0.0], [0.0, near + 2.0, 0.0]])
        output = gated({"x": x, "memory": memory})
        memory = output.memory
        gains.append(output.total.tolist())
    assert gains == [[0, 0], [1, 1], [0, 0], [1, 1]]
    many = gated({"x": rows(SLICE + 9)["x"], "memory": torch.ones(SLICE + 9, 8)})
    assert many.memory.shape == (SLICE + 9, 8)


def test_more_transitions_than_a_slice(sandbox: Sandbox) -> None:
    many = rows(SLICE + 100)
    gated = sandbox.gate(FINE, rows())
    torch.testing.assert_close(gated(many).total, torch.exp(-many["x"].norm(dim=-1)))
    assert gated.report.rows == 64 and gated.report.cost > 0 and not gated.report.one_by_one


def test_one_slow_call_does_not_reject(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest of a few calls counts: beside busy processes one takes three times as long."""
    run, slow = Worker.run, [0.5, 0.5, 0.001]

    def timed(self: Worker, inputs: Sequence[torch.Tensor], count: int) -> ProgramOutput:
        output = run(self, inputs, count)
        if count == SLICE:
            self.seconds = slow.pop(0)
        return output

    monkeypatch.setattr(Worker, "run", timed)
    assert sandbox.gate(FINE, rows()).report.cost == pytest.approx(1e6 * 0.001 / SLICE, abs=0.01)
    slow[:] = [0.5] * TIMED
    with pytest.raises(Rejected, match="244 microseconds a transition; at most 200"):
        sandbox.gate(FINE, rows())


def test_limits_hold_per_call(sandbox: Sandbox) -> None:
    """Many calls together may take longer, and print more, than one may."""
    strict, work = Sandbox(Limits(cpu=0.1, output=1000)), ["for i in range(300): x.sum()"]
    gated = strict.gate(body("print('a' * 300)", *work, "return x[:, 0]"), rows())
    used = 0.0
    while used < 0.3:
        gated(rows())
        used += gated.worker.seconds
    with pytest.raises(Rejected, match=r"computes longer than 0\.1 s in one call"):
        strict.gate(body("for i in range(10**7): x.sum()", "return x[:, 0]"), rows())


def test_a_cost_that_later_transitions_show_stays_out_of_training(
    sandbox: Sandbox,
) -> None:
    """Memory grows with the cube of the transitions in a mask that the gate never saw."""
    trap = body(
        "v = x[:, 0][x[:, 0] > 100.0].repeat(64)",
        "return x[:, 0] + 0 * (v[:, None, None] * v[None, :, None] * v[None, None, :]).sum()",
    )
    gated = sandbox.gate(trap, rows())
    with pytest.raises(Rejected, match="memory"):
        gated({"x": torch.full((64, 3), 200.0)})


def test_nan_on_later_transitions_is_one_clear_line(sandbox: Sandbox) -> None:
    """The gate saw none; training does. A program that was stopped says so."""
    gated = sandbox.gate(gives("torch.log(x[:, 0] + 100)"), rows())
    with pytest.raises(Rejected, match="the reward is nan in 1 of 2 transitions"):
        gated({"x": torch.tensor([[0.0, 0, 0], [-101.0, 0, 0]])})
    gated.close()
    with pytest.raises(Rejected, match="stopped before"):
        gated(rows())


def test_inputs_in_this_process_are_not_changed(sandbox: Sandbox) -> None:
    given = rows()
    before = given["x"].clone()
    sandbox.gate(body("x *= 2", "return x[:, 0]"), given)(given)
    assert given["x"].equal(before)


def test_a_machine_that_cannot_lock_needs_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"seccomp": "not available on here", "user": "own", "test": ["open"]}
    free = SimpleNamespace(state=state, close=lambda: None)
    monkeypatch.setattr(gate_module, "Worker", lambda *_: free)
    with pytest.raises(ConfigError, match=r"need a locked process.*open.*require_lock=false"):
        Sandbox(LIMITS)
    loose = Sandbox(LIMITS, require_lock=False)
    assert loose.status == "seccomp not available on here, user own; still possible there: open"


FORGETFUL = {
    "the best so far in a class": """
class Reward:
    def __init__(self):
        self.best = -1e9

    def reward(self):
        near = -self.x.norm(dim=-1)
        gain = (near - self.best).clamp(min=0)
        self.best = max(self.best, float(near.max()))
        return gain
""",
    "the distance of the call before": """
def reward(self):
    near = -self.x.norm(dim=-1)
    if not hasattr(self, "before"):
        self.before = near
    gain = near - self.before
    self.before = near
    return gain
""",
    "a counter": """
class Reward:
    count = 0

    def reward(self):
        self.count += 1
        return self.x[:, 0] + self.count
""",
    "the best so far in the module": """
best = [-1e9]

def reward(x):
    near = -x.norm(dim=-1)
    best[0] = max(best[0], float(near.max()))
    return near - best[0]
""",
}


@pytest.mark.parametrize("name", FORGETFUL)
def test_a_program_that_counts_on_memory_is_told_that_it_has_none(
    sandbox: Sandbox, name: str
) -> None:
    given = {"x": rows()["x"] * torch.linspace(2, 0.1, 64)[:, None]}  # later rows are better
    with pytest.raises(Rejected, match=r"(kept|nothing) between calls|depends on other"):
        sandbox.gate(FORGETFUL[name], given)


def test_a_program_that_waits_is_stopped() -> None:
    """It uses no CPU, so that its cost is nothing; half a second in each call is too much too."""
    strict = Sandbox(Limits(wait=0.5))
    wait = "__import__('threading').Event().wait({})"
    with pytest.raises(Rejected, match=r"waits without computing, longer than 0\.5 s"):
        strict.gate(body(wait.format(20), "return x[:, 0]"), rows())
    with pytest.raises(Rejected, match=r"waits without computing, longer than 0\.5 s"):
        strict.gate(body(wait.format(0.3), "return x[:, 0]"), rows())
    strict.gate(FINE, rows()).close()


def test_an_answer_to_another_call_is_no_answer(sandbox: Sandbox) -> None:
    stale = """
os, json, struct = map(__import__, ("os", "json", "struct"))

def reward(x):
    t = json.dumps({"call": 1, "names": [], "one_by_one": False, "arrays": [["float32", [16]]]})
    os.write(4, struct.pack("<II", len(t), 64) + t.encode() + bytes(64))
    return x[:, 0]
"""
    refused(sandbox, stale, "answers another call")


def test_rotations_by_hand() -> None:
    half = math.sqrt(0.5)
    turn = torch.tensor([[0.0, 0.0, half, half]])  # a quarter turn about z: x to y
    x = torch.tensor([[1.0, 0.0, 0.0]])
    y = torch.tensor([[0.0, 1.0, 0.0]])
    torch.testing.assert_close(HELPERS["quat_rotate"](turn, x), y)
    torch.testing.assert_close(HELPERS["quat_rotate_inverse"](turn, y), x)
    torch.testing.assert_close(HELPERS["quat_axis"](turn, 0), y)
    twice = HELPERS["quat_mul"](turn, turn)
    torch.testing.assert_close(twice, torch.tensor([[0.0, 0.0, 1.0, 0.0]]))
    angle = HELPERS["quat_diff_rad"](twice, turn)
    torch.testing.assert_close(angle, torch.tensor([math.pi / 2]))
    made = HELPERS["quat_from_angle_axis"](torch.tensor([math.pi / 2]), torch.tensor([[0.0, 0, 3]]))
    torch.testing.assert_close(made, turn)
