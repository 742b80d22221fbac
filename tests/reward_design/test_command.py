"""`embodied reward design` for real, a world in words, the program that is taken from an answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.core.spec import Leaf, Spec
from embodied.reward_design.designer import Board, Experience, Journal, Verdict
from embodied.reward_design.designers.language_model import digests
from embodied.reward_design.prompts import SOFTWARE, about, describe, extract
from embodied.reward_design.run import Budget, Job, Trials, thinned
from embodied.rewards.handcrafted.program import known, variables
from tests.builders import exit_of
from tests.reward_design.instant import WORLD, Recital

LEARN = (
    "learn=policy=diagonal_gaussian learner=ppo env.num_envs=16 learner.horizon=16 "
    "learner.epochs=1 log_every=256 eval.episodes=8 eval.num_envs=8"
)


def test_a_design_trains_chooses_and_reports(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    sizes = ["rounds=1", "samples=2", "finals=1", "tried=256", "controls=1"]
    budget = ["budget.steps=512", "budget.eval_every=256", "budget.halving=false"]
    words = ["go to the goal", "env=two_gap", f"out={out}", LEARN, *sizes, *budget]
    assert exit_of("reward", "design", *words) == 0
    printed = capfd.readouterr().out
    assert "task  go to the goal" in printed and "seed 1000: " in printed
    ledger = Journal(out)
    first, second = ledger.candidates.values()
    assert first.trained and second.trained and first.digest != second.digest
    assert [step for step, _ in first.scores] == [256, 512]
    assert first.terms and set(first.terms[0]["terms"]) >= {"total"}
    assert list(ledger.finals) == [1000]
    report = (out / "report.md").read_text()
    assert "Retrained with fresh seeds" in report and str(first.digest[:8]) in report
    assert (out / "fitness.svg").read_text().startswith("<svg xmlns=")
    assert (out / "best.py").exists() and (out / "control-0.py").exists()
    before = (out / "design.jsonl").read_text()
    assert exit_of("reward", "design", f"resume={out}") == 0  # nothing trains again
    assert (out / "design.jsonl").read_text() == before
    assert json.loads(before.splitlines()[0])["event"] == "candidate"
    spec = build({"_target_": "embodied.envs.toy.two_gap.TwoGap", "num_envs": 1}, VecEnv).spec
    tried = Experience.load(out)
    board = Board("", "", spec, variables(spec), ledger, tried, lambda _: Verdict(), 0)
    told = digests(board, first, episodes=3, last=4)  # 512 steps teach nothing: all fail
    episodes = told.split("\n\n")
    assert len(episodes) == 3 and episodes[0].startswith("episode 1\nstate ")
    assert all(len(text.splitlines()) == 1 + 4 for text in episodes) and "; action " in told


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("push", "it", "env=two_gap"), "one quoted sentence"),
        (("resume=nowhere",), "no design found in"),
        (("x", "env=two_gap", "designer=grammer", "out=nowhere"), 'did you mean "grammar"'),
        (("x", "env=two_gap", "designer=eureka", "out=nowhere", "tried=256"), "chat"),
    ],
)
def test_mistakes_are_one_line(
    words: tuple[str, ...], why: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = [word.replace("nowhere", str(tmp_path / "nowhere")) for word in words]
    assert exit_of("reward", "design", *given) == 2
    assert why in capfd.readouterr().err


@pytest.mark.parametrize(
    ("line", "minutes", "problem"),
    [
        ("import time; time.sleep(600)", 0.02, "timed out after 0.02 minutes"),
        ("print('embodied: it cannot be'); raise SystemExit(2)", 1.0, "it cannot be"),
        ("import os; os.abort()", 1.0, "the process ended without output"),
    ],
)
def test_a_training_that_fails_is_a_problem_of_its_own(
    tmp_path: Path, line: str, minutes: float, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trials, "command", lambda *_: [sys.executable, "-c", line])
    trials = Trials(tmp_path, [], Budget(minutes=minutes))
    jobs = [Job("a", tmp_path / "p.py", 0, 10)]
    ((job, outcome),) = trials.run(jobs)
    assert job == jobs[0] and outcome.problem == problem and outcome.scores == []
    assert not trials.running


def test_success_is_read_from_evaluations_only(tmp_path: Path) -> None:
    """A program's own numbers, and training's, are not what it is chosen by."""
    lines = [
        {"step": 10, "seconds": 1, "train/success": 1.0, "train/reward": 9.0},
        {"step": 10, "seconds": 1, "eval/success": 0.25, "eval/return": 99.0},
        {"step": 20, "seconds": 2, "eval/success": 0.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert Trials.read(tmp_path).scores == [(10, 0.25), (20, 0.5)]


def test_ten_evenly_spaced_values() -> None:
    lines = [{"step": i} for i in range(1, 26)]
    assert [x["step"] for x in thinned(lines)] == [2, 5, 8, 10, 12, 15, 18, 20, 22, 25]
    assert thinned(lines[:3]) == lines[:3]


NAMES = ("q1", "q2", "tool_x", "tool_y", "tool_z", "width", "cup_from_tool_x", "cup_from_tool_y")
NAMES = (*NAMES, "cup_from_tool_z")
SPEC = Spec(
    {"state": Leaf((9,), names=NAMES), "privileged/mass": Leaf((1,), low=0.0, high=2.0, unit="kg")},
    Leaf((2,), low=-1.0, high=1.0, names=("dx", "grip")),
    dt=0.05,
)

TABLE = """\
Task: lift the cup
World: A cup.
One step lasts 0.05 s. An episode ends when the task is achieved, or when its time is over; after \
its end nothing is paid any more. Positions and lengths are in metres, angles in radians, unless a \
unit is given.

Variables (tensors [N, ...]; `next_NAME` is NAME at the end of the step):
- state: float32[9] elements q1, q2, tool_x, tool_y, tool_z, width, cup_from_tool_x, \
cup_from_tool_y, cup_from_tool_z
- q: float32[2] elements q1, q2
- tool: float32[3] x, y, z in the base frame
- width: float32[]
- cup_from_tool: float32[3] vector from tool to cup
- privileged_mass: float32[1] unit kg; in [0, 2]
- action: float32[2] elements dx, grip; in [-1, 1]"""


def test_the_table_is_this() -> None:
    assert describe(SPEC, "lift the cup", "table", "A cup.") == TABLE


def test_the_class_tree_has_the_same_names() -> None:
    tree = describe(SPEC, "lift the cup", "pythonic")
    assert "class State:\n    state: Tensor[N, 9]" in tree
    assert "class PrivilegedMass:\n    privileged_mass: Tensor[N, 1]  # unit kg; in [0, 2]" in tree
    for name in variables(SPEC):
        assert f"{name}: Tensor[N" in tree


def test_names_of_programs() -> None:
    names = known(SPEC)
    assert "next_cup_from_tool" in names and "next_action" not in names
    assert not {"reward", "success", "discount", "next_reward"} & set(names)


@pytest.mark.parametrize(
    "world",
    [
        WORLD,
        {"_target_": "embodied.envs.gym.Gym", "id": "Pendulum-v1", "num_envs": 1},
        {"_target_": "embodied.envs.fr3.env.Fr3", "task": "reach", "num_envs": 1},
    ],
    ids=lambda world: world["_target_"],
)
def test_no_software_is_named(world: dict[str, object]) -> None:
    env = build(world, VecEnv)
    env.close()
    text = describe(env.spec, env.spec.text, "table", about(env))
    assert SOFTWARE.search(text.replace(" rows", "")) is None, text
    assert "success" not in text


def fenced(body: str, fence: str = "```") -> str:
    return f"{fence}python\ndef reward(x):\n    return {body}\n{fence}\n"


DRAFT = fenced("-x + 0 * x  # a longer draft with the wrong sign")
EXTRACTED = {
    "the last block": DRAFT + "No, the other way round:\n" + fenced("x"),
    "reasoning": f"<think>{DRAFT}</think>\n{fenced('x')}",
    "reasoning without its start": f"{DRAFT}</think>\n{fenced('x')}",
    "reasoning after the answer": f"{fenced('x')}\n<think>Or perhaps\n{DRAFT}",
    "tildes": fenced("x", "~~~"),
    "longer fences": fenced("x", "````"),
    "a block that is not closed": fenced("x") + "or\n```python\ndef reward(x):\n    return -x",
    "a block of another kind": fenced("x") + "```\npip install nothing\n```\n",
    "an indented block": "1. So:\n   " + fenced("x").replace("\n", "\n   "),
    "windows": fenced("x").replace("\n", "\r\n"),
}


@pytest.mark.parametrize("name", EXTRACTED)
def test_extraction_takes_the_last_complete_block(name: str) -> None:
    assert extract(EXTRACTED[name]).source == "def reward(x):\n    return x\n"


def test_extraction_keeps_helpers_and_says_what_is_missing() -> None:
    found = extract(Recital([]).texts["two fences"])
    assert found.source is not None and "x * 1.0" in found.source
    problem = extract(f"<think>Let me see\n{DRAFT}").problem
    assert "ends within its reasoning" in problem and "max_tokens" in problem
    assert extract(fenced("x"), ("sparse", "dense")).problem.endswith("sparse and dense")
