"""Experiment: a language model decides, round by round, which skill is trained next.

    task -> sub-tasks -> skills of the library -> training from one of them -> is it learned?

Game On (Zhang et al., 2024). Each round, the model chooses a task from the closed list of tasks
whose success the environment measures, splits it into sub-tasks, finds each sub-task among the
skills of the library, and chooses the skill from which training begins. After the training it
reads the learning curve. The plateau test decides whether a curve is flat; the model's answer is a
second opinion and is logged beside it. A flat curve above `mastered` joins the library; a flat one
below it is stuck, and its task is offered again after the library has grown.

Differences from the source: a policy per skill, started from a skill of the library, in place of
one language-conditioned policy; text in place of images; proposals from a closed list; the model's
reading of the curve does not decide.

`experiment.jsonl` holds every decision and every result; an experiment resumes from it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from embodied.core.bounds import Count, CountOrZero, Positive, PositiveFraction
from embodied.core.build import ConfigError, Node, build
from embodied.core.children import module_command
from embodied.experimenter import page
from embodied.experimenter.plateau import LEAST, Plateau, plateau
from embodied.experimenter.skills import NONE, Skills
from embodied.experimenter.skills import Config as SkillsConfig
from embodied.llm.budget import AppendLog
from embodied.llm.chat import BudgetSpent, Chat, ChatError, Message, object_schema
from embodied.llm.client import open_chat
from embodied.llm.prompt_graph import PromptGraph, Question
from embodied.reward_design.run import Budget as TrialBudget
from embodied.reward_design.run import Job, Trials
from embodied.training.logger import read_metrics

FILE = "experiment.jsonl"
KEY = "eval/success"
LEARNING, MASTERED, STUCK = "learning", "mastered", "stuck"
ROLE = (
    "You run the experiments of a robot that learns skills by training. You decide what is trained "
    "next, so that as many tasks as possible are learned with the trainings that are left. A task "
    "is easier to learn from a skill that already does a part of it."
)
TEXT = {"type": "string"}
CONVERGED = object_schema({"converged": {"type": "boolean"}, "why": TEXT})
EXAMPLES = (
    "0.02 0.04 0.10 0.20 0.34 0.50 0.64: still rising. 0.10 0.62 0.84 0.90 0.88 0.92 0.90: "
    "converged. 0.00 0.02 0.00 0.00 0.02 0.00 0.00: converged, nothing is learned."
)


@dataclass(frozen=True)
class Budget:
    """Budget of an experiment."""

    rounds: Count = 5  # trainings, one at a time
    steps: Count = 60_000  # environment steps of a training (updates, where it needs none)
    evaluations: Count = 10  # of a training, at equal distances
    minutes: Positive = 30.0  # time limit of a training, minutes

    def __post_init__(self) -> None:
        if self.evaluations < LEAST:
            raise ConfigError(f"budget.evaluations={self.evaluations} should be at least {LEAST}")
        if self.steps < self.evaluations:
            raise ConfigError(f"budget.steps={self.steps} should be at least {self.evaluations}")


@dataclass(frozen=True)
class ExperimentConfig:
    """Settings of an experiment."""

    skills: Node  # the tasks (group `skills`)
    chat: Node  # language model
    out: str  # folder of the experiment
    budget: Budget = field(default_factory=Budget)  # rounds, and steps of each
    episodes: Count = 50  # of an evaluation
    mastered: PositiveFraction = 0.9  # success rate of a skill that joins the library
    tolerance: PositiveFraction = 0.1  # change of the success rate over a flat curve's window
    seed: CountOrZero = 0  # of the trainings


@dataclass(frozen=True)
class Skill:
    """A task that is trained. `parts`: the skills of the library that its sub-tasks are; `steps`:
    to train in all; `attempt`: how often training began anew; `curve`: [[step, success], ...];
    `library`: the size of the library when it was last trained."""

    task: str
    start: str = NONE
    parts: tuple[str, ...] = ()
    steps: int = 0
    attempt: int = 0
    curve: tuple[tuple[int, float], ...] = ()
    status: str = LEARNING
    library: int = 0

    @property
    def success(self) -> float:
        """The last success rate."""
        return self.curve[-1][1] if self.curve else 0.0

    @classmethod
    def read(cls, node: Mapping[str, Any]) -> Skill:
        """A skill of the journal."""
        curve = tuple((int(step), float(rate)) for step, rate in node["curve"])
        return cls(**{**node, "parts": tuple(node["parts"]), "curve": curve})

    def rates(self) -> str:
        """The success rates of its evaluations."""
        return " ".join(f"{rate:.2f}" for _, rate in self.curve) or "none"

    def in_words(self) -> str:
        """Its status in a line."""
        return f"{self.status} after {self.steps:,} steps, success rates {self.rates()}"


class Experiment:
    """The rounds of one experiment, in `folder`."""

    def __init__(
        self,
        config: ExperimentConfig,
        skills: SkillsConfig,
        chat: Chat,
        trials: Trials,
        tell: Callable[[str], None],
    ) -> None:
        self.config = config
        self.skills = skills
        self.chat = chat
        self.trials = trials
        self.tell = tell
        self.folder = Path(config.out)
        self.log = AppendLog(self.folder / FILE)
        self.events: list[dict[str, Any]] = self.log.read()
        self.trained: dict[str, Skill] = {}
        for event in self.events:
            self._take(event)

    def run(self) -> None:
        """The rounds that are left. Ends early where nothing is left to train, and where the budget
        of the language model is spent."""
        done = {event["round"] for event in self.events if event["event"] != "decision"}
        for number in range(self.config.budget.rounds):
            if number in done:
                continue
            if not self.open_tasks():
                self.tell("every task is mastered, or stuck without a new skill to begin from")
                break
            try:
                self._round(number)
            except BudgetSpent as error:
                self.tell(f"the experiment ends: {error}")
                break
            except ChatError as error:
                self.tell(f"round {number + 1}: no usable answer: {error}")
                self._write({"event": "silence", "round": number, "why": str(error)})

    @property
    def library(self) -> dict[str, Skill]:
        """The skills that are mastered, in order."""
        return {name: skill for name, skill in self.trained.items() if skill.status == MASTERED}

    def run_of(self, skill: Skill) -> str:
        """The folder of a skill's training, below that of the experiment."""
        number = [*self.skills.tasks].index(skill.task)
        return f"skills/{number:02d}-{skill.attempt:d}/run"

    def open_tasks(self) -> list[str]:
        """The tasks that may be proposed: not mastered, and not stuck since the library grew."""
        closed = {
            name
            for name, skill in self.trained.items()
            if skill.status == MASTERED
            or (skill.status == STUCK and skill.library >= len(self.library))
        }
        return [task for task in self.skills.tasks if task not in closed]

    def _decision(self, number: int) -> dict[str, Any]:
        """What is trained in a round: asked for once, and read from the journal on a resume."""
        for event in self.events:
            if event["event"] == "decision" and event["round"] == number:
                return event
        context = [Message("system", ROLE), Message("user", self.state(number))]
        said = PromptGraph(self.questions()).answers(self.chat, context)
        decision = {
            "event": "decision",
            "round": number,
            "why": said["propose"]["why"],
            "subtasks": said["decompose"]["subtasks"],
            "found": said["retrieve"]["skills"] if "retrieve" in said else [],
            "skill": asdict(self._begun(said)),
            "model": self.chat.name,
        }
        self._write(decision)
        return decision

    def _begun(self, said: Mapping[str, Any]) -> Skill:
        """The skill that the answers train: one that is still learning goes on from itself."""
        task = said["propose"]["task"]
        steps = self.config.budget.steps
        before = self.trained.get(task)
        if before is not None and before.status == LEARNING:
            return replace(before, steps=before.steps + steps)
        attempt = 0 if before is None else before.attempt + 1
        if not self.library:
            return Skill(task, steps=steps, attempt=attempt)
        parts = tuple(dict.fromkeys(x for x in said["retrieve"]["skills"] if x != NONE))
        return Skill(task, said["start"]["start"], parts, steps, attempt)

    def questions(self) -> list[Question]:
        """The questions of a round; those about the library only if there is one."""
        known = [*self.library, NONE]
        propose = {"task": {"enum": self.open_tasks()}, "why": TEXT}
        subtasks = {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 5}
        skills = {"type": "array", "items": {"enum": known}, "maxItems": 5}
        asked = [
            Question("propose", "Which task should be trained next?", object_schema(propose)),
            Question(
                "decompose",
                "Split this task into its sub-tasks, in order. A simple task is its own sub-task.",
                object_schema({"subtasks": subtasks}),
                ("propose",),
            ),
        ]
        if not self.library:
            return asked
        return [
            *asked,
            Question(
                "retrieve",
                "Name for each sub-task, in the same order, the skill of the library that does it, "
                f'or "{NONE}".',
                object_schema({"skills": skills}),
                ("propose", "decompose"),
            ),
            Question(
                "start",
                f'From which skill should training begin? "{NONE}": from nothing.',
                object_schema({"start": {"enum": known}}),
                ("propose", "decompose", "retrieve"),
            ),
        ]

    def state(self, number: int) -> str:
        """What the model knows in a round, in words."""
        lines = [self.skills.about, "", "Tasks:"]
        for task in self.skills.tasks:
            skill = self.trained.get(task)
            status = "not trained yet" if skill is None else skill.in_words()
            lines.append(f"- {task}: {status}")
        budget = self.config.budget
        left = budget.rounds - number
        lines += ["", f"Library of skills: {'; '.join(self.library) or 'empty'}."]
        closed = [task for task in self.skills.tasks if task not in self.open_tasks()]
        lines += [f"Do not propose again: {'; '.join(closed)}."] if closed else []
        return "\n".join([*lines, f"Trainings left: {left}, of {budget.steps:,} steps each."])

    def _round(self, number: int) -> None:
        """Decide, train, and read the curve; each is written before the next begins."""
        skill = Skill.read(self._decision(number)["skill"])
        self.tell(f"round {number + 1}: {skill.task} (from {skill.start})")
        problem = self._train(skill)
        curve = self._curve(skill)
        if not problem and not curve:
            raise ConfigError(f"{skill.task}: its evaluations have no eval/success")
        rates = [rate for _, rate in curve]
        found = plateau(rates, self.config.episodes, self.config.tolerance)
        skill = replace(skill, curve=curve, library=len(self.library))
        opinion = None if problem else self._opinion(skill)
        skill = replace(skill, status=STUCK if problem else self._status(skill, found))
        facts = {"problem": problem, "plateau": asdict(found), "opinion": opinion}
        facts["run"] = self.run_of(skill)
        self._write({"event": "result", "round": number, "skill": asdict(skill), **facts})
        self.tell(f"  {skill.in_words()}{problem and f'; {problem}'}")

    def _train(self, skill: Skill) -> str:
        """Train a skill to its steps; "" or why that ended early."""
        words = list(self.skills.tasks[skill.task])
        if skill.start != NONE:
            words.append(f"init={self.folder / self.run_of(self.library[skill.start])}")
        if self.skills.demos:
            demos = (self.folder / self.run_of(skill)).with_name("demos")
            if problem := self._record(skill.task, demos):
                return problem
            words.append(f"demos={demos}")
        job = Job(self.run_of(skill), tuple(words), self.config.seed, skill.steps)
        ((_, outcome),) = self.trials.run([job])
        return outcome.problem

    def _record(self, task: str, out: Path) -> str:
        """Record the scripted episodes of a task, once; "" or why there are none."""
        if (out / "meta" / "info.json").exists():
            return ""
        out.parent.mkdir(parents=True, exist_ok=True)
        words = (*self.skills.env, *self.skills.tasks[task], f"episodes={self.skills.demos}")
        command = module_command("embodied.cli", "demos", "collect", *words, f"out={out}")
        return self.trials.process(command, out.with_name("demos.log"))

    def _curve(self, skill: Skill) -> tuple[tuple[int, float], ...]:
        rows = read_metrics(self.folder / self.run_of(skill))
        rates = {int(row["step"]): float(row[KEY]) for row in rows if KEY in row}
        return tuple(sorted(rates.items()))

    def _status(self, skill: Skill, found: Plateau) -> str:
        if not found.flat:
            return LEARNING
        return MASTERED if skill.success >= self.config.mastered else STUCK

    def _opinion(self, skill: Skill) -> dict[str, Any] | None:
        """The model's own reading of the curve; None if it has no usable one."""
        asked = (
            f"A skill is trained: {skill.task}. Its success rates, in the order of training: "
            f"{skill.rates()}. Has it converged? Examples: {EXAMPLES}"
        )
        try:
            return self.chat.ask([Message("system", ROLE), Message("user", asked)], CONVERGED).data
        except ChatError as error:
            self.tell(f"  no second opinion: {error}")
            return None

    def _write(self, event: dict[str, Any]) -> None:
        self.log.append(event)
        self.events.append(event)
        self._take(event)
        page.write(self.folder, self.skills.about, self.events)

    def _take(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "result":
            skill = Skill.read(event["skill"])
            self.trained[skill.task] = skill


def run(config: ExperimentConfig, tell: Callable[[str], None]) -> Experiment:
    """Run an experiment, or the rest of one, in `config.out`."""
    skills = build(config.skills, Skills).config
    folder = Path(config.out)
    folder.mkdir(parents=True, exist_ok=True)
    budget = config.budget
    trials = Trials(
        folder,
        [*skills.learn, *skills.env, f"eval.episodes={config.episodes}"],
        TrialBudget(
            steps=budget.steps,
            eval_every=budget.steps // budget.evaluations,
            minutes=budget.minutes,
        ),
    )
    experiment = Experiment(config, skills, open_chat(config.chat, folder), trials, tell)
    experiment.run()
    return experiment
