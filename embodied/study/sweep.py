"""Sweep: Optuna chooses settings, each trial is a training; poor ones are stopped at checkpoints.

A trial is a process of `embodied train`, here, in a Slurm job or on Ray. It evaluates
and saves `rungs` times; after each evaluation Optuna's pruner decides whether it goes on. A stopped
trial saves where it is (as after Ctrl-C), and can be resumed exactly by hand. A sweep that was
interrupted goes on with the same trials: Optuna's journal keeps what was tried, and unfinished runs
are resumed exactly from their last checkpoint.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import Any, Literal
from urllib.parse import quote
from uuid import uuid4

from embodied.core.bounds import Count, CountOrZero, Number
from embodied.core.build import ConfigError, shell_words
from embodied.core.children import interrupt_with_parent
from embodied.study.study import STOPPED, program, resume_words, values_of
from embodied.training.actors.ray_connection import connected, imported

SHARED = 10.0  # s for a file to be found on another machine


class Runner:
    """The actor: runs a training on its machine. Ray calls its methods in two threads."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.asked = False  # to interrupt it

    def run(self, words: Sequence[str], folder: str, at: str, mark: str) -> int | str:
        """Run `words` in the directory `at` to the end; the exit code, or why it did not begin.
        The file FOLDER.ray has to hold `mark`."""
        try:
            require_shared(Path(f"{folder}.ray"), mark)
            with Path(f"{folder}.log").open("a") as log:
                self.process = subprocess.Popen(
                    program(words),
                    cwd=at,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is the sweep's, which interrupts
                    preexec_fn=interrupt_with_parent,
                )
        except (ConfigError, OSError) as error:
            return f"{socket.gethostname()}: {error}"
        if self.asked:
            self.interrupt()
        return self.process.wait()

    def interrupt(self) -> None:
        """SIGINT, also to a training that begins later."""
        self.asked = True
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)


def require_shared(file: Path, mark: str) -> None:
    """ConfigError unless `file` holds `mark`, which the sweep's machine wrote into it."""
    end = time.monotonic() + SHARED
    while not file.exists() or file.read_text() != mark:
        if time.monotonic() > end:
            raise ConfigError(
                f"{file} of the sweep's machine is not here, so no metrics would be seen: "
                "out=DIR should be a folder that all machines of the cluster share"
            )
        time.sleep(0.1)


class RayTraining:
    """As `subprocess.Popen`. One whose machine is lost counts as interrupted: the next sweep goes
    on with it."""

    def __init__(self, ray: Any, words: Sequence[str], folder: Path, needs: dict[str, int]) -> None:
        self.ray, self.folder = ray, folder
        mark, name = uuid4().hex, str(folder.resolve())
        Path(f"{name}.ray").write_text(mark)
        options = {"max_concurrency": 2, "num_cpus": needs["CPU"], "num_gpus": needs["GPU"]}
        self.runner = ray.remote(Runner).options(**options).remote()
        self.placed = self.runner.__ray_ready__.remote()
        self.end = self.runner.run.remote(list(words), name, os.getcwd(), mark)
        self.code: int | None = None

    def poll(self, timeout: float | None = 0.0) -> int | None:
        if self.code is None and self.ray.wait([self.end], timeout=timeout)[0]:
            self.code = self._ended()
            self.ray.kill(self.runner)
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        code = self.poll(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("embodied train", timeout or 0.0)
        return code

    def _ended(self) -> int:
        try:
            code = self.ray.get(self.end)
        except self.ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[0]
            print(f"{self.folder} ended with its machine: {reason}", file=sys.stderr, flush=True)
            return STOPPED
        if isinstance(code, str):
            raise ConfigError(code)
        return code


Training = subprocess.Popen[bytes] | RayTraining


class Here:
    """Starts trainings as processes of this machine, and asks them to save and end. `terminal`:
    whether Ctrl-C in the sweep's terminal reaches them without `interrupt`."""

    terminal = True

    def start(self, words: Sequence[str], folder: Path) -> Training:
        """Begin the training `words`. FOLDER.log has what it prints."""
        with Path(f"{folder}.log").open("a") as log:
            return subprocess.Popen(program(words), stdout=log, stderr=subprocess.STDOUT)

    def interrupt(self, process: Training, folder: Path) -> None:
        """SIGINT: the training of `folder` saves a checkpoint and ends."""
        assert isinstance(process, subprocess.Popen)
        process.send_signal(signal.SIGINT)

    def close(self) -> None:
        """After the sweep."""


class Ray(Here):
    """The cluster of RAY_ADDRESS, whose machines share the folder; else one that is started here.
    A training has `threads` cores, and a GPU with `device` cuda."""

    terminal = False

    def __init__(self, threads: int, device: str) -> None:
        self.needs = {"CPU": threads, "GPU": int(device.startswith("cuda"))}
        self.ray = imported("on=ray")
        self.ours = connected(self.ray)
        try:
            # A training that fits on no machine would wait for ever.
            have = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
            if not any(all(each.get(k, 0) >= n for k, n in self.needs.items()) for each in have):
                largest = {key: int(max(each.get(key, 0) for each in have)) for key in self.needs}
                raise ConfigError(
                    f"a training needs {_text(self.needs)} on one machine of the Ray cluster, "
                    f"which has at most {_text(largest)}: fewer threads=, or device=cpu"
                )
        except ConfigError:
            self.close()
            raise

    def start(self, words: Sequence[str], folder: Path) -> Training:
        return RayTraining(self.ray, words, folder, self.needs)

    def interrupt(self, process: Training, folder: Path) -> None:
        assert isinstance(process, RayTraining)
        if self.ray.wait([process.placed], timeout=0)[0]:
            process.runner.interrupt.remote()
        else:  # it waits for a machine, and has nothing to save
            process.code = STOPPED
            self.ray.kill(process.runner)

    def close(self) -> None:
        if self.ours:
            self.ray.shutdown()


def _text(resources: dict[str, int]) -> str:
    return f"{resources['CPU']} cores and {resources['GPU']} GPUs"


WARNED = 120  # s before a job's time limit in which its training saves where it is


class Slurm(Here):
    """Jobs of `sbatch --wait`, whose folder all machines share; `options` are more words of it."""

    terminal = False

    def __init__(self, options: Sequence[str] = ()) -> None:
        self.options = list(options)
        for name in ("sbatch", "scancel"):
            if shutil.which(name) is None:
                raise ConfigError(f"on=slurm needs {name}, which is not on this machine: on=here")

    def start(self, words: Sequence[str], folder: Path) -> Training:
        script = Path(f"{folder}.sbatch")
        lines = [
            "#!/bin/bash",
            "#SBATCH --open-mode=append",
            f"#SBATCH --signal=B:INT@{WARNED}",
            f"cd {shlex.quote(os.getcwd())}",
            f"exec {shlex.join(program(words))}",  # signals go to the training itself
        ]
        script.write_text("\n".join(lines) + "\n")
        output = f"{folder.resolve()}.log".replace("%", "%%")  # Slurm fills in %j and the like
        # Not in the script, where no name may have a space or begin another line.
        named = [f"--job-name={_name(folder)}", f"--output={output}"]
        with Path(f"{folder}.slurm").open("a") as said:
            return subprocess.Popen(
                ["sbatch", "--wait", *named, *self.options, str(script.resolve())],
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C: `interrupt` ends the job, then sbatch ends
            )

    def interrupt(self, process: Training, folder: Path) -> None:
        job = f"--name={_name(folder)}"
        subprocess.run(["scancel", "--state=PENDING", job])  # has nothing to save
        subprocess.run(["scancel", "--batch", "--signal=INT", job])


def _name(folder: Path) -> str:
    """The job's, which no other sweep of this user has: a list of names has commas."""
    return "-".join(quote(part) for part in folder.resolve().parts[1:])


def launcher(on: str, options: str | None, threads: int = 1, device: str = "auto") -> Here:
    """`on` is here, slurm or ray; `options` (None: not given) are words of sbatch; `threads` and
    `device` of each training."""
    if on not in ("here", "slurm", "ray"):
        raise ConfigError(f"on={on} should be here, slurm or ray")
    if on == "slurm":
        return Slurm(shell_words(options or "", "slurm"))
    if options is not None:
        raise ConfigError("slurm= has an effect with on=slurm only")
    if on == "here":
        return Here()
    return Ray(threads, device)


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
    aim = (sweep.metric, sweep.direction, str(sweep.steps))
    asked = shlex.join([*sweep.words, *map(repr, sweep.space), *aim])
    if study.user_attrs.setdefault(WORDS, asked) != asked:
        raise ConfigError(f"{out} holds a sweep of other settings: choose another folder, out=DIR")
    study.set_user_attr(WORDS, asked)
    return study


def run(
    sweep: Sweep, out: Path, workers: int, done: Callable[[Any], object], launcher: Here
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

    for frozen in [t for t in study.trials if t.state == optuna.trial.TrialState.RUNNING]:
        yield optuna.trial.Trial(study, frozen._trial_id)
    while len(study.trials) < sweep.trials:
        yield study.ask()


def folder_of(out: Path, number: int) -> Path:
    return out / f"trial-{number:03d}"


def line_of(sweep: Sweep, trial: Any, out: Path) -> list[str]:
    chosen = [f"{each.key}={each.suggest(trial)}" for each in sweep.space]
    own = f"steps={sweep.steps} eval_every={sweep.every} save_every={sweep.every} video=false"
    out = folder_of(out, trial.number)
    return ["embodied", "train", *sweep.words, *chosen, *own.split(), f"out={out}"]


def _run_trial(
    sweep: Sweep, study: Any, trial: Any, out: Path, stop: Event, launcher: Here
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
    sweep: Sweep, trial: Any, folder: Path, process: Training, stop: Event, launcher: Here
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
    return [*sweep.words, *(f"{key}={value}" for key, value in params.items())]
