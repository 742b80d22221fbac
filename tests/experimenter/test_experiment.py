"""Experiments: five rounds by rules and behind a server, the library, what is open, a resume."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from embodied.core.build import ConfigError
from embodied.experimenter.experiment import Budget, Experiment, ExperimentConfig
from embodied.experimenter.scripted import Config as ScriptConfig
from embodied.experimenter.scripted import ScriptedExperimenter, matching, subtasks
from embodied.experimenter.skills import Config as Skills
from embodied.llm.chat import Chat
from embodied.llm.client import open_chat
from embodied.reward_design.run import Budget as TrialBudget
from embodied.reward_design.run import Job, Outcome, Trials
from tests.builders import exit_of
from tests.llm.server import Told, says, serving

TASKS = ("get to the goal", "unlock the door", "unlock the door and get to the goal", "fly")
SKILLS = Skills("a grid", ("env=maze",), (), {task: (f"env.id={task}",) for task in TASKS})
FLAT = [0.1, 0.6, 0.95, 0.95, 0.95, 0.95, 0.95, 0.95]


class Instant(Trials):
    """A training's place is taken by the curve of its task; a composite is learned only from a
    skill of the library, and "fly" never."""

    seen: list[Job]
    rising: tuple[str, ...]

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Outcome]]:
        (job,) = jobs
        self.seen.append(job)
        task = job.words[0].partition("=")[2]
        started = any(word.startswith("init=") for word in job.words)
        rates = FLAT if task in TASKS[:2] or (task == TASKS[2] and started) else [0.0] * 8
        rates = [0.1 * n for n in range(8)] if task in self.rising else rates
        (self.folder / job.name).mkdir(parents=True)
        lines = [{"step": 10 * n, "seconds": 1, "eval/success": r} for n, r in enumerate(rates)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (self.folder / job.name / "metrics.jsonl").write_text(text)
        yield job, Outcome()


def made(folder: Path, chat: Chat | None = None, rounds: int = 5, **more: Any) -> Experiment:
    config = ExperimentConfig({}, {}, str(folder), Budget(rounds=rounds, steps=80), **more)
    trials = Instant(folder, [], TrialBudget())
    trials.seen = []
    trials.rising = ()
    chat = chat or ScriptedExperimenter(ScriptConfig())
    return Experiment(config, SKILLS, chat, trials, lambda _: None)


def instant(run: Experiment) -> Instant:
    assert isinstance(run.trials, Instant)
    return run.trials


def test_the_library_grows_to_a_composite_in_five_rounds(tmp_path: Path) -> None:
    run = made(tmp_path)
    run.run()
    composite = run.library[TASKS[2]]
    assert composite.parts == (TASKS[1], TASKS[0]) and composite.start == TASKS[1]
    assert run.trained["fly"].status == "stuck" and "fly" not in run.library
    (job,) = (job for job in instant(run).seen if job.words[0].endswith(TASKS[2]))
    assert f"init={tmp_path}/skills/01-0/run" in job.words and job.steps == 80
    log = (tmp_path / "log.md").read_text()
    assert f"## Round 1: {run.events[0]['skill']['task']}" in log
    assert "unlock the door -> unlock the door; get to the goal -> get to the goal" in log
    assert "flat since step 20" in log and "simulated experimenter" in log
    saved = json.loads((tmp_path / "library.json").read_text())
    assert {*saved} == {*run.library} and saved[TASKS[2]]["run"] == "skills/02-0/run"


def test_a_stuck_task_is_open_again_after_the_library_has_grown(tmp_path: Path) -> None:
    run = made(tmp_path, rounds=1)
    assert run.open_tasks() == list(TASKS)
    run.run()
    assert run.trained["fly"].library == 0  # the fewest words: first, and stuck
    assert "fly" not in run.open_tasks()
    assert "Do not propose again: fly." in run.state(1)
    run.config = replace(run.config, budget=Budget(rounds=2, steps=80))
    run.run()
    assert len(run.library) == 1 and "fly" in run.open_tasks()


def test_a_curve_that_rises_goes_on_in_the_same_folder(tmp_path: Path) -> None:
    run = made(tmp_path, rounds=1)
    instant(run).rising = ("fly",)
    run.run()
    assert run.trained["fly"].status == "learning"
    again = run._begun({"propose": {"task": "fly"}})
    assert (again.steps, again.attempt, run.run_of(again)) == (160, 0, "skills/03-0/run")


def test_a_resume_asks_no_question_twice(tmp_path: Path) -> None:
    """Killed during a training: the decision stands, and the rounds before it are not repeated."""
    whole = made(tmp_path / "whole")
    whole.run()
    lines = (tmp_path / "whole" / "experiment.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "experiment.jsonl").write_text("".join(lines[:3]))  # a decision is last
    rest = made(tmp_path / "cut")
    rest.run()
    assert rest.trained == whole.trained
    assert len(instant(rest).seen) == len(instant(whole).seen) - 1


def test_behind_a_server(tmp_path: Path) -> None:
    """Every question is one request with its schema; the state of the experiment is in it."""
    script = ScriptedExperimenter(ScriptConfig())

    def answer(request: dict[str, Any]) -> Any:
        from embodied.llm.chat import Message

        messages = [Message(m["role"], m["content"]) for m in request["messages"]]
        schema = request["response_format"]["json_schema"]["schema"]
        return says(script.ask(messages, schema).text).body

    with serving(Told(answer)) as server:
        run = made(tmp_path, open_chat(server.node(), tmp_path))
        run.run()
    assert TASKS[2] in run.library
    assert "Library of skills: empty." in server.asked[0]["messages"][1]["content"]
    assert len(server.asked[0]["messages"]) == 3


def test_without_usable_answers_nothing_is_trained(tmp_path: Path) -> None:
    with serving(says('{"task": "dance", "why": ""}')) as server:
        run = made(tmp_path, open_chat(server.node(limits={"retries": 0}), tmp_path), rounds=2)
        run.run()
    assert run.trained == {} and [e["event"] for e in run.events] == ["silence"] * 2
    assert "no usable answer" in (tmp_path / "log.md").read_text()


def test_a_spent_budget_ends_the_experiment(tmp_path: Path) -> None:
    lines: list[str] = []
    with serving(says("{}")) as server:
        run = made(tmp_path, open_chat(server.node(limits={"calls": 0}), tmp_path))
        run.tell = lines.append
        run.run()
    assert run.events == [] and "budget of 0 calls" in lines[-1]


def test_rules_of_the_script() -> None:
    assert subtasks(TASKS[2]) == [TASKS[1], TASKS[0]]
    assert matching("get to the goal", TASKS[:2]) == TASKS[0]
    assert matching("open the drawer", ["open the door"]) == "open the door"  # two of three words
    assert matching("press the button", ["fly"]) == "none" and matching("a b", []) == "none"


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="should choose an environment"):
        replace(SKILLS, tasks={"a": ("learner=x",)})
    with pytest.raises(ConfigError, match="at least one task"):
        replace(SKILLS, tasks={})
    with pytest.raises(ConfigError, match="is no setting of a training"):
        replace(SKILLS, learn=("--config-dir=x",))
    with pytest.raises(ConfigError, match="at least 5"):
        Budget(evaluations=2)
    with pytest.raises(ConfigError, match="at least 10"):
        Budget(steps=9)


def test_the_command_trains_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("envpool")
    out = f"out={tmp_path / 'x'}"
    short = ("budget.rounds=1", "budget.steps=5000", "episodes=5", "budget.evaluations=5")
    assert exit_of("experimenter", "skills=minigrid", *short, out) == 0
    assert (tmp_path / "x" / "log.md").is_file()
    assert exit_of("experimenter", "skills=minigrid", *short, out) == 2
    assert "already contains an experiment" in capsys.readouterr().err
    assert exit_of("experimenter", f"resume={tmp_path / 'x'}") == 0
    assert exit_of("experimenter", f"resume={tmp_path / 'x'}", "seed=3") == 2
