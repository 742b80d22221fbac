"""Designers in the loop: the good program is chosen, bad answers keep their place and do no harm.

Trainings are replaced by a measure of the program itself (how it orders stored steps), so that the
loop is tested alone; `test_command.py` trains for real.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
import yaml

from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.llm.chat import Answer
from embodied.nn.statistics import auc_of_samples
from embodied.reward_design.designer import Board, Designer
from embodied.reward_design.designers import automc, eureka, grammar, text2reward
from embodied.reward_design.experience import Experience, gather
from embodied.reward_design.journal import Candidate, Journal
from embodied.reward_design.parse_answer import extract
from embodied.reward_design.search import Search
from embodied.reward_design.trial import Budget, Job, Outcome, Trials
from embodied.rewards.handcrafted.variables import inputs, known, variables
from embodied.sandbox.gate import Sandbox
from tests.reward_design.recorded import Recital

WORLD = {"_target_": "envs.toy.two_gap.TwoGap", "num_envs": 16}


@pytest.fixture(scope="module")
def env() -> VecEnv:
    return build(WORLD, VecEnv)


@pytest.fixture(scope="module")
def experience(env: VecEnv) -> Experience:
    """Random steps, and steps into the goal from its left."""
    made = gather(env, 600, 0)
    x = 0.8 + 0.1 * torch.rand(64, generator=torch.Generator().manual_seed(0))
    into = torch.stack([x, torch.full((64,), 0.5)], 1)
    rows = {
        "obs/state": into,
        "next_obs/state": into + torch.tensor([0.05, 0.0]),
        "action": torch.tensor([[1.0, 0.0]]).repeat(64, 1),
    }
    assert made.success is not None
    return Experience(
        {key: torch.cat([made.rows[key], rows[key]]) for key in rows},
        torch.cat([made.success, torch.ones(64, dtype=torch.bool)]),
        torch.cat([made.random, torch.zeros(64, dtype=torch.bool)]),
    )


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox()


class Instant(Trials):
    """A training's place is taken by how well the program tells success from chance, times how far
    training came."""

    experience: Experience
    sandbox: Sandbox
    trained: list[tuple[str, int]]

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Outcome]]:
        for job in reversed(jobs):  # they end in any order
            self.trained.append((job.name, job.steps))
            yield job, self._measure(job)

    def _measure(self, job: Job) -> Outcome:
        env = build(WORLD, VecEnv)
        found = variables(env.spec)
        given = inputs(found, tuple(known(env.spec)), self.experience.rows)
        paid = self.sandbox.gate(job.program.read_text(), given)(given)
        won = self.experience.success
        assert won is not None
        value = auc_of_samples(paid.total[won], paid.total[~won]) * job.steps / self.budget.steps
        term = {
            name: [float(p.mean()), float(p.min()), float(p.max())]
            for name, p in paid.components.items()
        }
        terms = [{"step": i * 100, "terms": term} for i in range(1, 11)]
        return Outcome([(job.steps // 2, value / 2), (job.steps, value)], terms)


def board(folder: Path, env: VecEnv, experience: Experience, sandbox: Sandbox) -> Board:
    found = variables(env.spec)
    return Board(
        "go to the goal",
        "",
        env.spec,
        found,
        Journal(folder),
        experience,
        lambda source: experience.check(sandbox, found, source),
        0,
        lambda candidate: folder / f"{candidate.id}",
    )


def search(
    designer: Designer, here: Board, rounds: int, samples: int, halving: bool = False
) -> tuple[Search, list[str]]:
    trials = Instant(here.ledger.folder, [], Budget(steps=1000, eval_every=100, halving=halving))
    trials.experience, trials.sandbox, trials.trained = here.experience, Sandbox(), []
    said: list[str] = []
    return Search(designer, here, trials, rounds, samples, 1, said.append), said


BAD = {
    "no fence": "no code block",
    "truncated": "not closed",
    "prose": "no code block",
    "empty": "no code block",
    "wrong name": "no code block has the function reward",
    "not Python": "no code block is Python",
    "import os": "language: line 1: os cannot be imported",
    "infinite loop": "process: it computes longer",
    "NaN": "result: .*nan",
    "wrong shape": r"result: .*shape \[256, 2\]",
    "other device": "program: line 2: ",
    "unknown input": "signature: .*asks for success",
    "crash": "program: line 2: IndexError",
    "constant": "constant: .*same in every row",
    "hack": "auc: ",
    "silence": "no answer: the server",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_answers_are_told_apart_and_the_good_one_is_chosen(
    name: str, tmp_path: Path, env: VecEnv, experience: Experience, sandbox: Sandbox
) -> None:
    chat = Recital([name, "good", name])
    here = board(tmp_path, env, experience, sandbox)
    best = search(eureka.Eureka(eureka.Config(), chat), here, 1, 3)[0].run()
    first, second, third = here.ledger.of_round(0)
    assert re.search(BAD[name], first.problem), first.problem
    assert third.problem and third.id == 2
    assert best is not None and best == second
    assert best.origin["reply"] == chat.texts["good"]
    assert (tmp_path / "best.py").read_text() == second.source
    assert "import torch" in str(best.source) and "def distance" in str(best.source)
    assert here.ledger.finals == {1000: pytest.approx(best.fitness)}


def test_eureka_keeps_four_messages_and_reflects_on_the_right_program(
    tmp_path: Path, env: VecEnv, experience: Experience, sandbox: Sandbox
) -> None:
    chat = Recital(["no fence", "two fences", "good", "crash", "prose", "constant", "better"])
    here = board(tmp_path, env, experience, sandbox)
    run, _ = search(eureka.Eureka(eureka.Config(repairs=0), chat), here, 3, 3)
    run.run()
    sizes = [len(messages) for messages in chat.asked]
    assert sizes == [2, 2, 2, 4, 4, 4, 4, 4, 4]
    tried = [c for c in here.ledger.of_round(0) if c.scores]
    assert [c.id for c in tried] == [1, 2]
    chosen = max(tried, key=lambda c: c.order)
    role, world, reply, feedback = chat.asked[3]
    assert (role, world) == chat.asked[0] and reply.text == chosen.origin["reply"]
    assert (
        f"the task's score: [{chosen.scores[0][1]:.3g}, {chosen.scores[1][1]:.3g}]" in feedback.text
    )
    for name in chosen.terms[0]["terms"]:
        assert f"{name}: [" in feedback.text
    # Round 2 failed as a whole: the same is asked again.
    assert chat.asked[6] == chat.asked[3]
    assert here.ledger.of_round(2)[0].origin["reply"] == chat.texts["better"]


def test_a_model_that_stops_answering_ends_the_search_with_what_there_is(
    tmp_path: Path, env: VecEnv, experience: Experience, sandbox: Sandbox
) -> None:
    chat = Recital(["good"])
    here = board(tmp_path, env, experience, sandbox)
    run, said = search(eureka.Eureka(eureka.Config(), chat), here, 5, 1)
    best = run.run()
    assert best is not None and best.id == 0
    assert "  the budget of the model is spent: the search ends" in said
    assert sorted(here.ledger.rounds) == [0, 1]


def test_no_valid_program_is_an_end_too(
    tmp_path: Path, env: VecEnv, experience: Experience, sandbox: Sandbox
) -> None:
    here = board(tmp_path, env, experience, sandbox)
    run, _ = search(eureka.Eureka(eureka.Config(), Recital(["prose"] * 4)), here, 2, 2)
    assert run.run() is None and len(here.ledger.candidates) == 4


def test_a_search_goes_on_from_its_ledger(
    tmp_path: Path, env: VecEnv, experience: Experience, sandbox: Sandbox
) -> None:
    """Stopped after the first training of a round: nothing is asked or trained twice."""
    chat = Recital(["good", "two fences", "better"])
    here = board(tmp_path, env, experience, sandbox)
    run, _ = search(eureka.Eureka(eureka.Config(), chat), here, 1, 3)

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
    run, _ = search(eureka.Eureka(eureka.Config(), silent), again, 1, 3)
    best = run.run()
    assert silent.asked == [] and best is not None
    assert len([n for n, _ in run.trials.trained if n.startswith("candidates")]) == 2  # type: ignore[attr-defined]
    assert all(c.trained for c in again.ledger.candidates.values())


def test_halving_trains_all_a_little_and_the_best_third_to_the_end(
    tmp_path: Path, env: VecEnv, experience: Experience, sandbox: Sandbox
) -> None:
    here = board(tmp_path, env, experience, sandbox)
    designer = grammar.Grammar(grammar.Config())
    run, _ = search(designer, here, 1, 6, halving=True)
    best = run.run()
    steps = [s for name, s in run.trials.trained if name.startswith("cand")]  # type: ignore[attr-defined]
    assert steps == [500] * 6 + [1000] * 2
    assert best is not None and best.trained


def test_the_grammar_is_the_same_twice_and_learns_from_the_ledger(
    tmp_path: Path, env: VecEnv, experience: Experience, sandbox: Sandbox
) -> None:
    sources = []
    for name in ("a", "b"):
        here = board(tmp_path / name, env, experience, sandbox)
        search(grammar.Grammar(grammar.Config()), here, 2, 4)[0].run()
        sources.append([c.source for c in here.ledger.candidates.values()])
    assert sources[0] == sources[1] and len(set(sources[0])) == 8
    later = here.ledger.of_round(1)
    assert any(c.origin["parents"] for c in later)
    known = {c.id for c in here.ledger.of_round(0)}
    assert all(set(c.origin["parents"]) <= known for c in later)


def test_text2reward_shows_examples_and_takes_a_persons_words(
    tmp_path: Path, env: VecEnv, experience: Experience, sandbox: Sandbox
) -> None:
    (tmp_path / "words.txt").write_text("it is too slow\n\n")
    shots = [("open the door", "1"), ("go to the far goal", "2"), ("the goal", "3"), ("fly", "4")]
    items = [{"instruction": i, "code": f"def reward(x):\n    return {c} * x"} for i, c in shots]
    (tmp_path / "shots.yaml").write_text(yaml.safe_dump(items))
    config = text2reward.Config(
        examples=str(tmp_path / "shots.yaml"), shots=2, feedback=str(tmp_path / "words.txt")
    )
    chat = Recital(["good", "better", "good"])
    here = board(tmp_path / "run", env, experience, sandbox)
    search(text2reward.Text2Reward(config, chat), here, 5, 1)[0].run()
    assert len(chat.asked) == 2  # an empty line ends it
    world = chat.asked[0][1].text
    assert "class State:" in world and "go to the far goal" in world and "fly" not in world
    assert len(chat.asked[1]) == 4 and "it is too slow" in chat.asked[1][3].text


def test_automc_pays_signs_and_its_critic_has_facts(
    tmp_path: Path, env: VecEnv, experience: Experience, sandbox: Sandbox
) -> None:
    chat = Recital([["one sign", "signs", "critical", "signs", "content"]])
    here = board(tmp_path, env, experience, sandbox)
    best = search(automc.AutoMc(automc.Config(), chat), here, 1, 1)[0].run()
    assert best is not None and len(chat.asked) == 5
    assert "both signs" in chat.asked[1][3].text  # by measurement, without asking the critic
    assert "Measured: sparse" in chat.asked[2][1].text
    assert "look at the wall" in chat.asked[3][3].text
    reviews = best.origin["reviews"]
    assert len(reviews) == 2
    given = {"x": torch.tensor([0.2, 0.5, 0.9]), "next_x": torch.tensor([0.25, 0.4, 0.95])}
    paid = sandbox.gate(str(best.source), given)(given)
    torch.testing.assert_close(paid.total, torch.tensor([0.1, -0.1, 1.1]))
    assert set(paid.components) == {"sparse", "dense"}


def test_automc_gives_up_after_three_reviews(
    tmp_path: Path, env: VecEnv, experience: Experience, sandbox: Sandbox
) -> None:
    chat = Recital([["prose", "one sign", "crash", "prose"]])
    here = board(tmp_path, env, experience, sandbox)
    assert search(automc.AutoMc(automc.Config(), chat), here, 1, 1)[0].run() is None
    assert len(chat.asked) == 4 and len(here.ledger.candidates[0].origin["reviews"]) == 3


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


LOOPS: dict[str, Callable[[Recital], Designer]] = {
    "eureka": lambda chat: eureka.Eureka(eureka.Config(), chat),
    "text2reward": lambda chat: text2reward.Text2Reward(text2reward.Config(), chat),
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("wrong", [name for name in BAD if name not in ("silence", "hack")])
def test_a_refusal_is_returned_to_the_model_once(
    name: str, wrong: str, tmp_path: Path, env: VecEnv, experience: Experience, sandbox: Sandbox
) -> None:
    chat = Recital([[wrong, "good"]])
    here = board(tmp_path, env, experience, sandbox)
    best = search(LOOPS[name](chat), here, 1, 1)[0].run()
    assert best is not None and best.origin["reply"] == chat.texts["good"]
    first, second = chat.asked
    assert second[:2] == first and second[2].text == chat.texts[wrong]
    assert re.search(BAD[wrong], second[3].text) and re.search(
        BAD[wrong], best.origin["refused"][0]
    )


@pytest.mark.parametrize("name", LOOPS)
def test_a_round_without_a_program_is_told_in_the_next(
    name: str, tmp_path: Path, env: VecEnv, experience: Experience, sandbox: Sandbox
) -> None:
    chat = Recital([["crash", "wrong shape"], ["good"]])
    here = board(tmp_path, env, experience, sandbox)
    best = search(LOOPS[name](chat), here, 2, 1)[0].run()
    assert best is not None and best.round == 1
    assert chat.asked[2][2].text == chat.texts["wrong shape"]
    assert re.search(BAD["wrong shape"], chat.asked[2][3].text)


class Together(Recital):
    """Answers once all of a round's requests are in flight."""

    def __init__(self, names: Sequence[str], count: int) -> None:
        super().__init__(names)
        self.barrier = Barrier(count)

    def ask(self, *given: Any, **words: Any) -> Answer:
        self.barrier.wait(20)
        self.heat = words["temperature"]
        return super().ask(*given, **words)


@pytest.mark.parametrize("name", LOOPS)
def test_a_rounds_answers_are_sampled_together(
    name: str, tmp_path: Path, env: VecEnv, experience: Experience, sandbox: Sandbox
) -> None:
    chat = Together(["good", "better", "two fences"], 3)
    here = board(tmp_path, env, experience, sandbox)
    proposals = LOOPS[name](chat).propose(here, 0, 3)
    replies = [str(p.origin["reply"]) for p in proposals]
    assert replies == [chat.texts[n] for n in ("good", "better", "two fences")]
    assert chat.heat > 0  # otherwise they would be the same


def test_text2reward_goes_on_without_a_person(
    tmp_path: Path, env: VecEnv, experience: Experience, sandbox: Sandbox
) -> None:
    chat = Recital(["good", "better", "two fences"])
    here = board(tmp_path, env, experience, sandbox)
    search(text2reward.Text2Reward(text2reward.Config(), chat), here, 3, 1)[0].run()
    assert len(chat.asked) == 3 and "A person" not in chat.asked[1][3].text


def test_nobody_is_asked_about_a_round_in_which_nothing_was_trained(
    tmp_path: Path, env: VecEnv, experience: Experience, sandbox: Sandbox
) -> None:
    (tmp_path / "words.txt").write_text("\nfaster\n")
    config = text2reward.Config(feedback=str(tmp_path / "words.txt"), repairs=0)
    chat = Recital(["prose", "good"])
    here = board(tmp_path / "run", env, experience, sandbox)
    best = search(text2reward.Text2Reward(config, chat), here, 2, 1)[0].run()
    assert best is not None and best.round == 1


def test_auc_by_hand() -> None:
    """Pairs (3, 1) (3, 2) (2, 1) win, (2, 2) is half: 3.5 of 4."""
    assert auc_of_samples(torch.tensor([3.0, 2.0]), torch.tensor([1.0, 2.0])) == pytest.approx(
        3.5 / 4
    )


def test_order_is_by_the_best_then_by_all() -> None:
    def tried(*values: float) -> Candidate:
        return Candidate(0, 0, "", "", {}, scores=list(enumerate(values)))

    assert tried(0.0, 1.0).order > tried(0.9, 0.9).order
    assert tried(0.5, 1.0).order > tried(0.0, 1.0).order > Candidate(0, 0, "", "", {}).order
