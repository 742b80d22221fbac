"""`embodied reward design` for real, a world in words, the program in an answer; the search and its
designers: what each requests, learns and refuses, and how it resumes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
import yaml

from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.core.spec import Leaf, Spec
from embodied.llm.chat import Answer
from embodied.reward_design.designer import Board, Candidate, Experience, Journal, Verdict
from embodied.reward_design.designers import grammar
from embodied.reward_design.designers.language_model import (
    AutoMc,
    AutoMcConfig,
    Eureka,
    EurekaConfig,
    Text2Reward,
    Text2RewardConfig,
    digests,
)
from embodied.reward_design.prompts import SOFTWARE, about, describe, extract
from embodied.reward_design.run import Budget, Job, Search, Trials, row_of, thinned
from embodied.rewards.handcrafted.program import known, variables
from embodied.sandbox.gate import Sandbox
from tests.builders import exit_of
from tests.reward_design.instant import BAD, LOOPS, WORLD, Recital, board, search

LEARN = (
    "learn=policy=diagonal_gaussian learner=ppo env.num_envs=16 learner.horizon=16 "
    "learner.epochs=1 log_every=256 eval.episodes=8 eval.num_envs=8"
)


def test_a_design_trains_and_reports(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
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
        (("resume=HERE",), "no design found in"),
        (("x", "env=two_gap", "designer=grammer", "out=HERE/a"), 'did you mean "grammar"'),
        (("x", "env=two_gap", "designer=eureka", "out=HERE/a", "tried=256"), "chat"),
    ],
)
def test_mistakes_are_one_line(
    words: tuple[str, ...], why: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = [word.replace("HERE", str(tmp_path)) for word in words]
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
    jobs = [Job("a", (), 0, 10)]
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


def test_a_model_that_stops_answering_ends_the_search_with_what_there_is(here: Board) -> None:
    run, said = search(Eureka(EurekaConfig(), Recital(["good"])), here, 5, 1)
    best = run.run()
    assert best is not None and best.id == 0
    assert "  the budget of the model is spent: the search ends" in said
    assert sorted(here.ledger.rounds) == [0, 1]


def test_a_search_goes_on_from_its_ledger(
    here: Board, tmp_path: Path, env: VecEnv, experience: Experience, sandbox: Sandbox
) -> None:
    """Stopped after the first training of a round: nothing is asked or trained twice."""
    run, _ = search(Eureka(EurekaConfig(), Recital(["good", "two fences", "better"])), here, 1, 3)

    def stop(line: str) -> None:
        if "auc" in line:
            raise KeyboardInterrupt

    run.tell = stop
    with pytest.raises(KeyboardInterrupt):
        run.run()
    with (tmp_path / "design.jsonl").open("a") as sink:
        sink.write('{"event": "candidate", "id": 9, "rou')  # killed in a line
    again = board(tmp_path, env, experience, sandbox)
    assert sum(bool(c.scores) for c in again.ledger.candidates.values()) == 1
    silent = Recital([])
    run, _ = search(Eureka(EurekaConfig(), silent), again, 1, 3)
    assert run.run() is not None and silent.asked == []
    assert len(trained(run)) == 2
    assert all(c.trained for c in again.ledger.candidates.values())


def trained(run: Search) -> list[int]:
    """The steps of each candidate's training."""
    return [steps for name, steps in run.trials.trained if name.startswith("cand")]  # type: ignore[attr-defined]


def test_halving_trains_all_a_little_and_the_best_third_to_the_end(here: Board) -> None:
    run, _ = search(grammar.Grammar(grammar.Config()), here, 1, 6, halving=True)
    best = run.run()
    assert trained(run) == [500] * 6 + [1000] * 2
    assert best is not None and best.trained


def test_candidates_are_ranked_by_no_longer_training_than_the_best_gets(here: Board) -> None:
    """Evaluations that are further apart than a training is long."""
    run, _ = search(grammar.Grammar(grammar.Config()), here, 1, 3, halving=True)
    run.trials.budget = replace(run.trials.budget, steps=400, eval_every=8000)
    run.run()
    assert trained(run) == [400] * 3
    words = run.trials.command(Job("a", (), 0, 400), Path("nowhere"))
    assert {"steps=400", "eval_every=400"} <= {*words}


def test_order_is_by_the_best_then_by_all() -> None:
    tried = [
        Candidate(0, 0, "", "", {}, scores=list(enumerate(values)))
        for values in ([], [0.9, 0.9], [0.0, 1.0], [0.5, 1.0])
    ]
    assert sorted(reversed(tried), key=lambda candidate: candidate.order) == tried


@pytest.mark.parametrize("name", BAD)
def test_of_bad_answers_the_good_one_is_chosen(name: str, here: Board, tmp_path: Path) -> None:
    chat = Recital([name, "good", name])
    best = search(Eureka(EurekaConfig(), chat), here, 1, 3)[0].run()
    first, second, third = here.ledger.of_round(0)
    assert re.search(BAD[name], first.problem), first.problem
    assert third.problem and third.id == 2
    assert best is not None and best == second
    assert best.origin["reply"] == chat.texts["good"]
    assert (tmp_path / "best.py").read_text() == second.source
    assert "import torch" in str(best.source) and "def distance" in str(best.source)
    assert here.ledger.finals == {1000: pytest.approx(best.fitness)}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("wrong", [name for name in BAD if name not in ("silence", "hack")])
def test_a_refusal_is_returned_to_the_model_once(name: str, wrong: str, here: Board) -> None:
    chat = Recital([[wrong, "good"]])
    run, said = search(LOOPS[name](chat), here, 1, 1)
    best = run.run()
    assert best is not None and best.origin["reply"] == chat.texts["good"]
    assert best.origin["tokens"] == 14  # of both answers
    first, second = chat.asked
    assert second[:2] == first and second[2].text == chat.texts[wrong]
    row = row_of(best).replace("&#x27;", "'")
    for pattern, text in (
        (f"0  returned  .*{BAD[wrong]}", "\n".join(said)),
        (f"repaired: .*{BAD[wrong]}", row),
        (BAD[wrong], second[3].text),
        (BAD[wrong], best.origin["refused"][0]),
    ):
        assert re.search(pattern, text), text


@pytest.mark.parametrize("name", LOOPS)
def test_a_round_without_a_program_is_told_in_the_next(name: str, here: Board) -> None:
    chat = Recital([["crash", "wrong shape"], ["good"]])
    best = search(LOOPS[name](chat), here, 2, 1)[0].run()
    assert best is not None and best.round == 1
    assert chat.asked[2][2].text == chat.texts["wrong shape"]
    assert re.search(BAD["wrong shape"], chat.asked[2][3].text)


def test_eureka_keeps_four_messages_and_reflects_on_the_right_program(here: Board) -> None:
    chat = Recital(["no fence", "two fences", "good", "crash", "prose", "constant", "better"])
    search(Eureka(EurekaConfig(repairs=0), chat), here, 3, 3)[0].run()
    assert [len(messages) for messages in chat.asked] == [2] * 3 + [4] * 6
    tried = [c for c in here.ledger.of_round(0) if c.scores]
    assert [c.id for c in tried] == [1, 2]
    chosen = max(tried, key=lambda c: c.order)
    role, world, reply, feedback = chat.asked[3]
    assert (role, world) == chat.asked[0] and reply.text == chosen.origin["reply"]
    scores = ", ".join(f"{score:.3g}" for _, score in chosen.scores)
    assert f"the task's score: [{scores}]" in feedback.text
    assert all(f"{name}: [" in feedback.text for name in chosen.terms[0]["terms"])
    # Round 2 failed as a whole: the same is asked again.
    assert chat.asked[6] == chat.asked[3]
    assert here.ledger.of_round(2)[0].origin["reply"] == chat.texts["better"]


def test_the_grammar_is_the_same_twice_and_learns_from_the_ledger(
    tmp_path: Path, env: VecEnv, experience: Experience, sandbox: Sandbox
) -> None:
    boards = [board(tmp_path / name, env, experience, sandbox) for name in "ab"]
    for here in boards:
        search(grammar.Grammar(grammar.Config()), here, 2, 4)[0].run()
    one, two = ([c.source for c in here.ledger.candidates.values()] for here in boards)
    assert one == two and len(set(one)) == 8
    known = {c.id for c in here.ledger.of_round(0)}
    parents = [set(c.origin["parents"]) for c in here.ledger.of_round(1)]
    assert any(parents) and all(each <= known for each in parents)


def test_text2reward_shows_examples_and_takes_a_persons_words(here: Board, tmp_path: Path) -> None:
    """An empty line ends it."""
    shots = [("open the door", "1"), ("go to the far goal", "2"), ("the goal", "3"), ("fly", "4")]
    items = [{"instruction": i, "code": f"def reward(x):\n    return {c} * x"} for i, c in shots]
    (tmp_path / "shots.yaml").write_text(yaml.safe_dump(items))
    first, second = told(here, tmp_path, "it is too slow\n\n", examples=f"{tmp_path}/shots.yaml")
    world = first[1].text
    assert "class State:" in world and "go to the far goal" in world and "fly" not in world
    assert len(second) == 4 and "it is too slow" in second[3].text


def told(here: Board, folder: Path, words: str | None, *names: str, **settings: Any) -> Any:
    """What Text2Reward asks in up to three rounds, while a person says `words`."""
    if words is not None:
        (folder / "words.txt").write_text(words)
        settings["feedback"] = str(folder / "words.txt")
    chat = Recital(names or ["good", "better", "two fences"])
    designer = Text2Reward(Text2RewardConfig(shots=2, **settings), chat)
    search(designer, here, 3, 1)[0].run()
    return chat.asked


def test_text2reward_goes_on_without_a_person(here: Board, tmp_path: Path) -> None:
    asked = told(here, tmp_path, None)
    assert len(asked) == 3 and "A person" not in asked[1][3].text


def test_nobody_speaks_of_a_round_without_a_training(here: Board, tmp_path: Path) -> None:
    """Only the third answer is a program, and its round is the first of which somebody speaks."""
    asked = told(here, tmp_path, "\nfaster\n", "prose", "prose", "good", repairs=0)
    assert len(asked) == 3 and [c.round for c in here.ledger.candidates.values() if c.scores] == [2]


def test_automc_pays_signs_and_its_critic_has_facts(here: Board, sandbox: Sandbox) -> None:
    chat = Recital([["one sign", "signs", "critical", "signs", "content"]])
    best = search(AutoMc(AutoMcConfig(), chat), here, 1, 1)[0].run()
    assert best is not None and len(chat.asked) == 5
    assert "both signs" in chat.asked[1][3].text  # by measurement, without asking the critic
    assert "Measured: sparse" in chat.asked[2][1].text
    assert "look at the wall" in chat.asked[3][3].text
    reviews = best.origin["reviews"]
    assert len(reviews) == 2 and best.origin["tokens"] == 3 * 7
    given = {"x": torch.tensor([0.2, 0.5, 0.9]), "next_x": torch.tensor([0.25, 0.4, 0.95])}
    paid = sandbox.gate(str(best.source), given)(given)
    torch.testing.assert_close(paid.total, torch.tensor([0.1, -0.1, 1.1]))
    assert set(paid.components) == {"sparse", "dense"}


def test_automc_gives_up_after_three_reviews(here: Board) -> None:
    chat = Recital([["prose", "one sign", "crash", "prose"]])
    assert search(AutoMc(AutoMcConfig(), chat), here, 1, 1)[0].run() is None
    assert len(chat.asked) == 4 and len(here.ledger.candidates[0].origin["reviews"]) == 3


class Together(Recital):
    """Answers once all of a round's requests are in flight."""

    def __init__(self, names: Sequence[str], count: int) -> None:
        super().__init__(names)
        self.barrier = Barrier(count)

    def ask(self, *given: Any, **words: Any) -> Answer:
        self.barrier.wait(600)
        self.heat = words["temperature"]
        return super().ask(*given, **words)


@pytest.mark.parametrize("name", LOOPS)
def test_a_rounds_answers_are_sampled_together(name: str, here: Board) -> None:
    chat = Together(["good", "better", "two fences"], 3)
    proposals = LOOPS[name](chat).propose(here, 0, 3)
    replies = [str(p.origin["reply"]) for p in proposals]
    assert replies == [chat.texts[n] for n in ("good", "better", "two fences")]
    assert chat.heat > 0  # otherwise they would be the same
