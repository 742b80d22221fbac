"""Sweep: Optuna chooses settings, each trial is a training; poor ones are stopped at checkpoints.

A trial is a process of `embodied train`, here, in a Slurm job or on Ray (`launchers`). It evaluates
and saves `rungs` times; after each evaluation Optuna's pruner decides whether it goes on. A stopped
trial saves where it is (as after Ctrl-C), and can be resumed exactly by hand. A sweep that was
interrupted goes on with the same trials: Optuna's journal keeps what was tried, and unfinished runs
are resumed exactly from their last checkpoint.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import Any, Literal

from embodied.core.bounds import Count, CountOrZero, Number
from embodied.core.build import ConfigError
from embodied.study.launchers import Launcher, Training
from embodied.study.study import STOPPED, resume_words, values_of

# What is searched, as it is typed:
# 1e-4..1e-3       a number between          log:1e-4..1e-3    the same, evenly in its logarithm
# 16..64           a whole number between    log:16..1024      the same, evenly in its logarithm
# choice:64,128    one of these              choice:[64],[256,256]
NUMBER = r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"
RANGE = re.compile(rf"^(?:(log|int):)?({NUMBER})\.\.({NUMBER})$")
WHOLE = re.compile(r"^-?\d+$")


@dataclass(frozen=True)
class Searched:
    """A setting and its values, which are choices or a range."""

    key: str  # the setting
    choices: tuple[str, ...] = ()  # its values as they are typed (empty: a range)
    low: Number = 0.0  # begin of the range
    high: Number = 0.0  # end of the range
    log: bool = False  # even in the logarithm
    whole: bool = False  # whole numbers only

    def suggest(self, trial: Any) -> str:
        """The value that an Optuna trial chooses, as it is typed."""
        if self.choices:
            return str(trial.suggest_categorical(self.key, self.choices))
        if self.whole:
            return str(trial.suggest_int(self.key, int(self.low), int(self.high), log=self.log))
        return repr(float(trial.suggest_float(self.key, self.low, self.high, log=self.log)))


def searched(word: str) -> Searched | None:
    """What `word` searches; None for an ordinary setting. ConfigError for a wrong range."""
    key, _, text = word.partition("=")
    if text.startswith("choice:"):
        choices = tuple(split(text.removeprefix("choice:")))
        if len(choices) < 2:
            raise ConfigError(f"{word}: a choice has at least two values: {key}=choice:A,B")
        return Searched(key, choices)
    if ".." not in text or text.startswith(("/", ".")):
        return None
    if (found := RANGE.match(text)) is None:
        if text.startswith(("log:", "int:")):
            raise ConfigError(f"{word} should be {key}={text[:4]}LOW..HIGH")
        return None
    kind, low, high = found[1], float(found[2]), float(found[3])
    whole = kind == "int" or bool(WHOLE.match(found[2]) and WHOLE.match(found[3]))
    if low >= high or (kind == "log" and low <= 0):
        least = "0 < LOW < HIGH" if kind == "log" else "LOW < HIGH"
        raise ConfigError(f"{word}: a range needs {least}")
    return Searched(key, low=low, high=high, log=kind == "log", whole=whole)


def split(text: str) -> list[str]:
    """The parts between commas outside of brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part]


POLL = 0.5  # s between looks at a trial's metrics
GRACE = 5.0  # s for a training that was interrupted to end by itself
JOURNAL = "optuna.log"
WORDS = "words"


@dataclass(frozen=True)
class Sweep:
    """Settings of a search.

    The pruner "median" ends a trial that is worse than the median of earlier ones at the same step,
    "halving" is successive halving.
    """

    words: tuple[str, ...]  # of `embodied train`, of all trials
    space: tuple[Searched, ...]  # the settings that are searched
    metric: str = "eval/return"  # what is maximized or minimized
    direction: Literal["maximize", "minimize"] = "maximize"  # of the metric
    trials: Count = 20  # in all
    rungs: Count = 4  # evaluations of a trial
    steps: Count = 100_000  # of a whole trial
    pruner: Literal["median", "halving", "none"] = "median"  # which trials end early
    seed: CountOrZero = 0  # of the search
    threads: Count = 1  # CPU threads of a training
    device: str = "auto"  # of a training

    def __post_init__(self) -> None:
        require_space(self.space)

    @property
    def every(self) -> int:
        """Steps between evaluations, which are checkpoints too."""
        return max(1, self.steps // self.rungs)


def require_space(space: Sequence[Searched]) -> None:
    """ConfigError where nothing is searched."""
    if not space:
        raise ConfigError(
            "a sweep needs a setting to search: KEY=log:1e-4..1e-3, KEY=16..64, KEY=choice:A,B"
        )


def open_study(sweep: Sweep, out: Path) -> Any:
    """Optuna's study in OUT/optuna.log; ConfigError if it is one of other settings."""
    try:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
    except ModuleNotFoundError as error:
        raise ConfigError(
            'embodied sweep needs Optuna: pip install optuna (or pip install "embodied-rl[sweep]")'
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    out.mkdir(parents=True, exist_ok=True)
    pruners: dict[str, Any] = {
        "median": optuna.pruners.MedianPruner(n_startup_trials=3),
        "halving": optuna.pruners.SuccessiveHalvingPruner(min_resource=sweep.every),
        "none": optuna.pruners.NopPruner(),
    }
    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(out / JOURNAL))),
        sampler=optuna.samplers.TPESampler(seed=sweep.seed, constant_liar=True),
        pruner=pruners[sweep.pruner],
        study_name="sweep",
        direction=sweep.direction,
        load_if_exists=True,
    )
    asked = shlex.join([*sweep.words, *map(repr, sweep.space), sweep.metric, str(sweep.steps)])
    if study.user_attrs.setdefault(WORDS, asked) != asked:
        raise ConfigError(f"{out} holds a sweep of other settings: choose another folder, out=DIR")
    study.set_user_attr(WORDS, asked)
    return study


def run(
    sweep: Sweep, out: Path, workers: int, done: Callable[[Any], object], launcher: Launcher
) -> Any:
    """Run the missing trials, `workers` at a time; `done(study)` after each. Returns the study."""
    study, stop = open_study(sweep, out), Event()
    waiting, lock = _trials(sweep, study), Lock()

    def work() -> None:
        while not stop.is_set():
            with lock:
                trial = next(waiting, None)
            if trial is None:
                return
            _run_trial(sweep, study, trial, out, stop, launcher)
            with lock:
                done(study)

    pool = ThreadPoolExecutor(workers)
    try:
        jobs = [pool.submit(work) for _ in range(workers)]
        for job in wait(jobs, return_when=FIRST_EXCEPTION).done:
            job.result()
    finally:
        stop.set()
        pool.shutdown()
    return study


def _trials(sweep: Sweep, study: Any) -> Iterator[Any]:
    """Trials that were interrupted, then new ones, until there are enough."""
    import optuna

    running = [t for t in study.trials if t.state == optuna.trial.TrialState.RUNNING]
    for frozen in running:
        yield optuna.trial.Trial(study, frozen._trial_id)
    while len(study.trials) < sweep.trials:
        yield study.ask()


def folder_of(out: Path, number: int) -> Path:
    return out / f"trial-{number:03d}"


def line_of(sweep: Sweep, trial: Any, out: Path) -> list[str]:
    """The words of a trial's training."""
    chosen = [f"{each.key}={each.suggest(trial)}" for each in sweep.space]
    every = f"eval_every={sweep.every}", f"save_every={sweep.every}"
    return [
        "embodied",
        "train",
        *sweep.words,
        *chosen,
        f"steps={sweep.steps}",
        *every,
        "video=false",
        f"out={folder_of(out, trial.number)}",
    ]


def _run_trial(
    sweep: Sweep, study: Any, trial: Any, out: Path, stop: Event, launcher: Launcher
) -> None:
    """Run or resume a trial's process and report its evaluations until it ends or is stopped."""
    from optuna.trial import TrialState

    folder, words = folder_of(out, trial.number), line_of(sweep, trial, out)
    if any(folder.glob("checkpoints/[0-9]*/loop.pt")):
        words = [*resume_words(words), f"resume={folder}"]
    print(shlex.join(words), flush=True)
    process = launcher.start(words, folder)
    pruned = _watch(sweep, trial, folder, process, stop, launcher)
    code = process.wait()
    values = values_of(folder, sweep.metric)
    if pruned:
        study.tell(trial, state=TrialState.PRUNED)
    elif code == STOPPED or stop.is_set():  # interrupted: the next sweep goes on with it
        return
    elif code != 0 or not values:
        print(f"trial {trial.number} failed; see {folder}.log", flush=True)
        study.tell(trial, state=TrialState.FAIL)
    else:
        study.tell(trial, values[-1][1])


def _watch(
    sweep: Sweep,
    trial: Any,
    folder: Path,
    process: Training,
    stop: Event,
    launcher: Launcher,
) -> bool:
    """Report evaluations until the process ends; whether it was stopped as a poor one."""
    reported = {step for step in trial.study.trials[trial.number].intermediate_values}
    while process.poll() is None:
        if stop.is_set():
            # Let the training save and end. After Ctrl-C in a terminal it may have its own signal,
            # and a second one would end it at once.
            try:
                process.wait(GRACE if launcher.terminal else 0)
            except subprocess.TimeoutExpired:
                launcher.interrupt(process, folder)
            return False
        if _poor(sweep, trial, folder, reported):
            launcher.interrupt(process, folder)
            return True
        time.sleep(POLL)
    _poor(sweep, trial, folder, reported)
    return False


def _poor(sweep: Sweep, trial: Any, folder: Path, reported: set[int]) -> bool:
    """Report the new evaluations; whether the pruner would stop the trial at one of them."""
    for step, value in values_of(folder, sweep.metric):
        if step not in reported and step < sweep.steps:
            reported.add(step)
            trial.report(value, step)
            if trial.should_prune():
                return True
    return False


def trial_words(sweep: Sweep, params: dict[str, Any]) -> Sequence[str]:
    """The words of `embodied train` with the settings of a trial."""
    return [*sweep.words, *(f"{key}={value}" for key, value in params.items())]
