"""RunReport: one self-contained HTML page about a run: curves, result, videos, settings, and what a
reader should notice first in its metrics."""

from __future__ import annotations

import json
import platform
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from embodied.core import checkpoint
from embodied.core.build import build
from embodied.core.env import HasLevels, VecEnv
from embodied.core.native import OBJECT_PREFIX
from embodied.core.saved_node import python_names, read_run_settings, require_inside
from embodied.core.wrapper import find_protocol
from embodied.evaluation.statistics import rate, wilson
from embodied.evaluation.task_grid import WORST
from embodied.policies.remote.address import PACKAGE, is_address
from embodied.reports.page import (
    Point,
    against,
    chart,
    data_url,
    figure,
    film_figure,
    head,
    number,
    table,
    write_page,
)
from embodied.teachers.plots import LoggedEpisodes, draw, draw_levels, read_episode_log
from embodied.teachers.teacher import LEVEL, Floats, LevelSpace
from embodied.training.logger import read_metrics
from embodied.training.run_evaluation import TERMS
from embodied.training.warning_signs import evaluations, ever_diverged

Rows = Sequence[Mapping[str, Any]]

APART = 0.3  # of success: training and evaluation are different things
FALLEN = 0.2  # of success, below the best evaluation
FLAT = 0.02  # of the range of the returns: nothing was learned
LEAST = 4  # evaluations or more before a curve says something
FIRST = ("eval/success", "eval/return", "eval/loss", "eval/action_error", "train/success")
FIRST += ("train/return",)
UNDRAWN = ("step", "seconds", "eval/episodes", "eval/decisions", "eval/best_step")


@cache
def _words() -> dict[str, str]:
    return yaml.safe_load(Path(__file__).with_name("metric_words.yaml").read_text())


def meaning(name: str) -> str:
    """A sentence about a metric; "" for one that is not known."""
    words = _words()
    prefix = next((key for key in words if key[-1] == "*" and name.startswith(key[:-1])), "")
    return words.get(name) or words.get(prefix, "")


def diagnosis(rows: Rows) -> list[str]:
    """What a reader should notice first."""
    success, training = series(rows, "eval/success"), series(rows, "train/success")
    returns, kl = series(rows, "eval/return"), series(rows, "train/kl")
    lines: list[str] = []
    if len(success):
        last, best = success[-1], success.max()
        trained = training[-1] if len(training) else last
        if trained - last > APART:
            lines.append(
                f"training {trained:.0%}, evaluation {last:.0%}: the tasks of training are easier "
                "(a teacher, a narrower start) or exploration helps; the evaluation counts"
            )
        if last - trained > APART:
            lines.append(
                f"evaluation {last:.0%}, training {trained:.0%}: exploration or a teacher makes "
                "training harder; the evaluation counts"
            )
        if best - last > FALLEN:
            lines.append(
                f"success was {best:.0%} and is {last:.0%} now: an earlier checkpoint is better, "
                "or the learning rate is too high"
            )
        if best == 0:
            lines.append(
                "no evaluation episode ever succeeded: a sparse reward that is never found needs "
                "demonstrations, shaping or a teacher"
            )
    elif len(returns) >= LEAST:
        spread = np.ptp(returns)
        if spread <= FLAT * abs(returns).max():
            lines.append(
                "the return has not changed since the first evaluation: nothing was learned"
            )
        elif returns[-1] == returns.max() and returns[-1] - returns[-2] > 0.1 * spread:
            lines.append("the return was still rising at the end: more steps may help")
    if (series(rows, "reward/alarm") > 0).any():
        lines.append("the learned reward rose while success fell (reward hacking): see Reward")
    if len(kl) and kl[-1] > 0.1:
        lines.append(
            f"an update moves the policy far (KL {kl[-1]:.2f}): learner.stop_kl or a lower rate"
        )
    return lines


def series(rows: Rows, name: str) -> np.ndarray:
    values = np.array([row[name] for row in rows if name in row], dtype=float)
    return values[np.isfinite(values)]


def write(folder: Path) -> Path:
    """Write RUN/report.html from the files of the run folder; returns its path."""
    folder = Path(folder)
    rows = read_metrics(folder)
    notices = "".join(f"<li>{escape(line)}</li>" for line in diagnosis(rows))
    rewards = _goodhart(folder) + _terms(folder)
    films = [film_figure(file, file.stem) for file in sorted(folder.glob("videos/*.mp4"))[::-1][:4]]
    lines = f"embodied view {folder}\nembodied eval {folder} episodes=500\n"
    lines += f"embodied train resume={folder} steps=..."
    parts = [
        _header(folder, rows),
        section("Notice", f'<ul class="notice">{notices}</ul>' if notices else ""),
        section("Reward", f'<div class="grid2 pair">{rewards}</div>' if rewards else ""),
        section("Curves", _curves(rows)),
        section("Tasks", _tasks(folder)),
        section("Episodes", "".join(films)),
        section("Evaluations", _evaluations(folder)),
        section("Worst parameters", _worst(folder)),
        section("Next", f"<pre>{escape(lines)}</pre>"),
        section("Versions", table((), _versions(folder).items())),
        section(
            "Configuration",
            f"<pre>{escape(yaml.safe_dump(config_of(folder), sort_keys=False))}</pre>",
        ),
    ]
    return write_page(folder / "report.html", _name(folder), parts)


def section(title: str, body: str) -> str:
    """`body` below a title; "" without a body."""
    return f"<h2>{title}</h2>{body}" if body else ""


def summary(folder: Path) -> str:
    rows = read_metrics(folder)
    name, last, best = _name(folder), _last(rows, "eval/return"), _best(rows)
    if last is not None:
        text = f"{name} at {last['step']:,}: return {last['eval/return']:,.2f}"
        if "eval/success" not in last:
            return text
        won, trials = won_of(last)
        return f"{text}, success {rate(won, trials)} of {trials} held-out initial states"
    if best is not None:
        return (
            f"{name} at {best['step']:,} (the best, saved): held-out loss {best['eval/loss']:.4g}, "
            f"action error {best['eval/action_error']:.1%} of the range"
        )
    return f"{name}: not evaluated"


def allow_word(folder: Path) -> str:
    """The word that the run in `folder` needs: a file that names a server is not believed."""
    named = is_address(read_run_settings(folder / "run.yaml").get("init"))
    return f' "allow=[{PACKAGE}]"' if named else ""


def next_lines(folder: Path) -> str:
    """What to type next, after a training."""
    run, more, path = read_run_settings(folder / "run.yaml"), allow_word(folder), str(folder)
    env, policy = run.get("env") or {}, run.get("policy") or {}
    objects = ""
    if str(env.get("id")).startswith(OBJECT_PREFIX) or python_names(env):
        objects += ", env=..."
    if python_names(policy):
        objects += ", module=..."
    if objects:  # another process has to be given them again
        return f"next: em.evaluate(em.load({path!r}{objects})) in Python"
    shown = shlex.quote(path)
    if env:
        eval_line = f"embodied eval {shown} episodes=500{more}"
        return f"next: embodied view {shown}{more}\n      {eval_line}"
    return (
        f"next: embodied deploy robot=NAME {shlex.quote(f'policy={path}')}\n"
        f"      embodied eval {shown} env=NAME mapping=FILE.yaml"
    )


def _last(rows: Rows, name: str) -> Mapping[str, Any] | None:
    """The last line of metrics that has `name`."""
    return next((row for row in reversed(rows) if name in row), None)


def _best(rows: Rows) -> Mapping[str, Any] | None:
    """The best evaluation on held-out episodes of a run without an environment."""
    ends = [row for row in rows if "eval/best_loss" in row]
    return next((row for row in ends if row["step"] == ends[-1]["eval/best_step"]), None)


def won_of(row: Mapping[str, Any]) -> tuple[int, int]:
    trials = int(row["eval/episodes"])
    return round(row["eval/success"] * trials), trials


def intervals_of(name: str, rows: Rows) -> list[Point]:
    """The Wilson interval of each evaluated success rate; none for other curves."""
    return [wilson(*won_of(row)) for row in rows] if name == "eval/success" else []


def curve_names(
    rows: Iterable[Mapping[str, Any]], first: Sequence[str], not_drawn: Sequence[str]
) -> list[str]:
    """What the lines of metrics have, those of `first` first."""
    names = dict.fromkeys(key for row in rows for key in row if key not in not_drawn)
    return sorted(names, key=lambda name: first.index(name) if name in first else len(first))


def components(config: dict[str, Any], groups: Sequence[str]) -> str:
    nodes = [config[group] for group in groups if isinstance(config.get(group), dict)]
    return " · ".join(str(node["_target_"]).rpartition(".")[2] for node in nodes)


def _name(folder: Path) -> str:
    return str(config_of(folder).get("name", folder.resolve().name))


def config_of(folder: Path) -> dict[str, Any]:
    file = folder / "run.yaml"
    return read_run_settings(file) if file.exists() else {}


def _header(folder: Path, rows: Rows) -> str:
    config = config_of(folder)
    words = components(config, ("env", "policy", "finetune", "learner", "reward"))
    env = config.get("env") or {}
    task = env.get("task") or env.get("id") or ""
    lead = f"{words}{f' · {task}' if task else ''} · seed {config.get('seed', 0)}"
    tiles = "".join(
        f'<div class="tile"><span>{name}</span><b>{value}</b><small>{note}</small></div>'
        for name, value, note in _tiles(rows, config.get("steps", 0))
    )
    return f'{head(_name(folder), lead)}<div class="tiles">{tiles}</div>'


def _tiles(rows: Rows, steps: int) -> Iterator[tuple[str, str, str]]:
    """The name, the value and a note of each number at the top of the page."""
    if last := _last(rows, "eval/return"):
        if "eval/success" in last:
            won, trials = won_of(last)
            low, high = wilson(won, trials)
            note = f"95% interval: {low:.1%} to {high:.1%} (held-out initial states: {trials})"
            yield "success", f"{last['eval/success']:.1%}", note
        yield "return", number(last["eval/return"]), "mean per episode"
    if best := _best(rows):
        note = f"best, at step {best['step']:,}; this policy is saved"
        yield "held-out loss", number(best["eval/loss"]), note
        note = "of half the range of each element of the action"
        yield "action error", f"{best['eval/action_error']:.1%}", note
    if rows:
        yield "steps", f"{rows[-1]['step']:,}", f"of {steps:,}"
        yield "time", _duration(rows[-1]["seconds"]), "wall time, with all resumes"
    if last := _last(rows, "train/actor_hours"):
        note = f"steps a second; {last['train/updates_per_second']:.1f} updates a second"
        yield "throughput", f"{last['train/steps_per_second']:.1f}", note
        waiting = f"{last['train/waiting_steps']:.1f} vector steps wait"
        note = f"versions old are the weights that act; {waiting}"
        yield "policy lag", f"{last['train/policy_lag']:.1f}", note
        note = f"{last['train/actor_deaths']:.0f} actors died and were replaced"
        yield "actor-hours", f"{last['train/actor_hours']:.2g}", note


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


def _curves(rows: Rows) -> str:
    drawn = {name: _curve(name, rows) for name in curve_names(rows, FIRST, UNDRAWN)}
    drawn = {name: each for name, each in drawn.items() if each}
    main = [each for name, each in drawn.items() if name in FIRST] or [*drawn.values()]
    rest = [each for each in drawn.values() if each not in main]
    if not drawn:
        return ""
    fold = f"<summary>all metrics ({len(rest)} more)</summary>"
    more = f'<details>{fold}<div class="grid2">{"".join(rest)}</div></details>' if rest else ""
    return f'<div class="grid2">{"".join(main)}</div>{more}'


def _curve(name: str, rows: Rows) -> str:
    """A curve with what it means below; "" where it has no finite point."""
    own = [row for row in rows if name in row]
    points = [(float(row["step"]), float(row[name])) for row in own]
    bounded = name.endswith("success")
    limits = (0.0, 1.0) if bounded else (None, None)
    drawn = chart(
        {name: points}, name, {name: intervals_of(name, own)}, limits=limits, legend=False
    )
    if not drawn:
        return ""
    last = f"{points[-1][1]:.1%}" if bounded else number(points[-1][1])
    says = f"<small>{escape(meaning(name))}</small>" if meaning(name) else ""
    return figure(drawn + says, name, last)


def _goodhart(folder: Path) -> str:
    """Learned reward and task success at every evaluation (reward hacking)."""
    past = evaluations(folder)
    if len(past) < 2:
        return ""
    proxy = [(float(step), paid) for paid, _, step in past]
    success = [(float(step), won) for _, won, step in past]
    drawn = against(proxy, success, ("mean learned reward", "task success"))
    words = (
        "the learned reward rose while success fell (reward hacking)"
        if ever_diverged(past)
        else "no divergence so far"
    )
    return figure(drawn, "Reward and success", words)


def _terms(folder: Path) -> str:
    file = folder / TERMS
    if not file.exists():
        return ""
    kept = json.loads(file.read_text())
    series = {
        name: [(float(t), float(value)) for t, value in enumerate(values)]
        for name, values in kept["terms"].items()
    }
    ends = {True: "succeeded", False: "failed", None: ""}[kept["success"]]
    words = f"one episode{f' that {ends}' if ends else ''}"
    return figure(chart(series, "reward components"), "Terms of the reward", words)


def _tasks(folder: Path) -> str:
    past = read_episode_log(folder)
    if past is None:
        return ""
    try:
        file = task_picture(folder, past)
    except (ModuleNotFoundError, checkpoint.CheckpointError) as error:
        return f"<p>{escape(str(error))}</p>"
    caption = "tasks that the teacher sampled; inside the red line at least half succeeded"
    image = f'<img alt="tasks" src="{data_url("image/png", file.read_bytes())}">'
    return figure(image, caption)


def _evaluations(folder: Path) -> str:
    file = folder / "evaluations.jsonl"
    if not file.exists():
        return ""
    cells = [
        (
            f"{row['step']:,}",
            rate(row["successes"], row["episodes"]) if "successes" in row else "-",
            number(row["return"]),
            f"{row['length']:.1f}",
            row["episodes"],
            row["seed"],
            "worst parameters" if "worst" in row else "",
        )
        for row in map(json.loads, file.read_text().splitlines())
    ]
    return table(("step", "success [95%]", "return", "length", "episodes", "seed", ""), cells)


def _worst(folder: Path) -> str:
    file = folder / WORST
    if not file.exists():
        return ""
    kept = json.loads(file.read_text())
    points, scores = np.array(kept["points"]), np.array(kept["scores"])
    least = {
        name: [(x, float(scores[points[:, k] == x].min())) for x in np.unique(points[:, k])]
        for k, name in enumerate(kept["names"])
    }
    drawn = figure(chart(least, "least score"), "Least score at each value of a parameter, 0 to 1")
    low, high = kept["interval"]
    rows = [(name, f"{value:.4g} {unit}") for name, (value, unit) in kept["values"].items()]
    rows.append(("return there", f"{number(kept['return'])} [{number(low)}, {number(high)}]"))
    if "successes" in kept:
        rows.append(("success there", rate(kept["successes"], kept["episodes"])))
    return f"{table((), rows)}{drawn}"


def _versions(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {"folder": str(folder.resolve()), "python": platform.python_version()}
    try:
        saved = checkpoint.find(folder)
    except checkpoint.CheckpointError:
        return facts | {"checkpoint": "none"}
    about = checkpoint.read_about(saved)
    versions = about.get("versions")
    facts |= {"checkpoint": saved.name, "git": about.get("git")}
    facts |= versions if isinstance(versions, dict) else {}
    return facts | {k: about[k] for k in ("policy_sha256", "parent", "demos") if about.get(k)}


TASKS = "tasks.png"


def task_picture(folder: Path, past: LoggedEpisodes) -> Path:
    """Write RUN/tasks.png; needs the spec in the run's checkpoint, and matplotlib."""
    task = checkpoint.load_spec(folder).task
    if task is not None and task.unit == LEVEL:
        return _level_picture(folder, past)
    moving = [i for i in range(past.task.shape[1]) if np.ptp(past.task[:, i]) > 1e-6] or [0]
    names = tuple(task.names[i] for i in moving) if task and task.names else ()
    names = names or tuple(f"task{i}" for i in moving)
    return draw(folder / TASKS, past.began, past.task[:, moving], _scores(past), names)


def _level_picture(folder: Path, past: LoggedEpisodes) -> Path:
    node = read_run_settings(folder / "run.yaml")["env"]
    require_inside(node, folder / "run.yaml")
    with closing(build(node | {"num_envs": 1}, VecEnv)) as env:
        levelled = find_protocol(env, HasLevels)
        assert levelled is not None
        space: LevelSpace = levelled.levels
        return draw_levels(folder / TASKS, past.began, past.task, _scores(past), space.picture)


def _scores(past: LoggedEpisodes) -> Floats:
    """[n] in [0, 1]: success or, if the environment does not report it, the normalised return."""
    if np.isfinite(past.success).any():
        return past.success
    return (past.ret - past.ret.min()) / max(float(np.ptp(past.ret)), 1e-9)
