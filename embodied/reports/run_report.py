"""RunReport: one self-contained HTML page about a run: curves, result, videos, settings, and what a
reader should notice first in its metrics."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from embodied.core import checkpoint
from embodied.core.build import build
from embodied.core.env import HasLevels, VecEnv
from embodied.core.saved_node import read_run_settings, require_inside
from embodied.core.wrapper import find_protocol
from embodied.evaluation.statistics import rate, wilson
from embodied.evaluation.task_grid import WORST
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
from embodied.teachers.teacher import LEVEL, Floats, LevelSpace, LoggedEpisodes, read_episode_log
from embodied.training.logger import read_metrics
from embodied.training.run_evaluation import TERMS
from embodied.training.warning_signs import evaluations, ever_diverged

Rows = Sequence[Mapping[str, Any]]

APART = 0.3  # of success: training and evaluation are different things
FALLEN = 0.2  # of success, below the best evaluation
FLAT = 0.02  # of the range of the returns: nothing was learned
LEAST = 4  # evaluations or more before a curve says something


@cache
def _words() -> dict[str, str]:
    return yaml.safe_load(Path(__file__).with_name("metric_words.yaml").read_text())


def meaning(name: str) -> str:
    """A sentence about a metric; "" for one that is not known."""
    words = _words()
    prefix = next((key for key in words if key[-1] == "*" and name.startswith(key[:-1])), "")
    return words.get(name) or words.get(prefix, "")


def diagnosis(rows: Rows) -> list[str]:
    return [*_success(rows), *_returns(rows), *_alarms(rows)]


def _success(rows: Rows) -> Iterator[str]:
    measured = series(rows, "eval/success")
    if not len(measured):
        return
    last, best, training = measured[-1], measured.max(), series(rows, "train/success")
    if len(training) and training[-1] - last > APART:
        yield (
            f"training {training[-1]:.0%}, evaluation {last:.0%}: the tasks of training are easier "
            "(a teacher, a narrower start) or exploration helps; the evaluation counts"
        )
    if len(training) and last - training[-1] > APART:
        yield (
            f"evaluation {last:.0%}, training {training[-1]:.0%}: exploration or a teacher makes "
            "training harder; the evaluation counts"
        )
    if best - last > FALLEN:
        yield (
            f"success was {best:.0%} and is {last:.0%} now: an earlier checkpoint is better, or "
            "the learning rate is too high"
        )
    if best == 0:
        yield (
            "no evaluation episode ever succeeded: a sparse reward that is never found needs "
            "demonstrations, shaping or a teacher"
        )


def _returns(rows: Rows) -> Iterator[str]:
    returns = series(rows, "eval/return")
    if len(returns) < LEAST or len(series(rows, "eval/success")):
        return
    spread = np.ptp(returns)
    if spread <= FLAT * abs(returns).max():
        yield "the return has not changed since the first evaluation: nothing was learned"
    elif returns[-1] == returns.max() and returns[-1] - returns[-2] > 0.1 * spread:
        yield "the return was still rising at the end: more steps may help"


def _alarms(rows: Rows) -> Iterator[str]:
    if (series(rows, "reward/alarm") > 0).any():
        yield "the learned reward rose while success fell (reward hacking): see Reward"
    if len(kl := series(rows, "train/kl")) and kl[-1] > 0.1:
        yield f"an update moves the policy far (KL {kl[-1]:.2f}): learner.stop_kl or a lower rate"


def series(rows: Rows, name: str) -> np.ndarray:
    values = np.array([row[name] for row in rows if name in row], dtype=float)
    return values[np.isfinite(values)]


FIRST = ("eval/success", "eval/return", "eval/loss", "eval/action_error", "train/success")
FIRST += ("train/return",)
UNDRAWN = ("step", "seconds", "eval/episodes", "eval/decisions", "eval/best_step")


def write(folder: Path) -> Path:
    """Write RUN/report.html from the files of the run folder; returns its path."""
    folder = Path(folder)
    rows = read_metrics(folder)
    rewards = _goodhart(folder) + _terms(folder)
    lines = f"embodied view {folder}\nembodied eval {folder} episodes=500\n"
    lines += f"embodied train resume={folder} steps=..."
    parts = [
        _header(folder, rows),
        _noticed(rows),
        f'<h2>Reward</h2><div class="grid2 pair">{rewards}</div>' if rewards else "",
        _curves(rows),
        _tasks(folder),
        _films(folder),
        _evaluations(folder),
        _worst(folder),
        f"<h2>Next</h2><pre>{escape(lines)}</pre>",
        _settings(folder),
    ]
    return write_page(folder / "report.html", _name(folder), parts)


def summary(folder: Path) -> str:
    rows = read_metrics(folder)
    ends = [row for row in rows if "eval/return" in row]
    if not ends:
        return f"{_name(folder)}{_held_out(rows) or ': not evaluated'}"
    last = ends[-1]
    text = f"{_name(folder)} at {last['step']:,}: return {last['eval/return']:,.2f}"
    if "eval/success" not in last:
        return text
    won, trials = won_of(last)
    return f"{text}, success {rate(won, trials)} of {trials} held-out initial states"


def _held_out(rows: Sequence[dict[str, Any]]) -> str:
    """What follows the run's name; "" without held-out episodes."""
    if (best := _best(rows)) is None:
        return ""
    return (
        f" at {best['step']:,} (the best, saved): held-out loss {best['eval/loss']:.4g}, action "
        f"error {best['eval/action_error']:.1%} of the range"
    )


def _best(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The best evaluation on held-out episodes of a run without an environment."""
    ends = [row for row in rows if "eval/best_loss" in row]
    return next((row for row in ends if row["step"] == ends[-1]["eval/best_step"]), None)


def won_of(row: dict[str, Any]) -> tuple[int, int]:
    trials = int(row["eval/episodes"])
    return round(row["eval/success"] * trials), trials


def intervals_of(name: str, rows: Sequence[dict[str, Any]]) -> list[Point]:
    """The Wilson interval of each evaluated success rate; none for other curves."""
    return [wilson(*won_of(row)) for row in rows] if name == "eval/success" else []


def curve_names(
    rows: Iterable[dict[str, Any]], first: Sequence[str], not_drawn: Sequence[str]
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


def _header(folder: Path, rows: Sequence[dict[str, Any]]) -> str:
    config = config_of(folder)
    tiles = []
    ends = [row for row in rows if "eval/return" in row]
    if ends:
        last = ends[-1]
        if "eval/success" in last:
            won, trials = won_of(last)
            low, high = wilson(won, trials)
            share = f"{last['eval/success']:.1%}"
            note = f"95% interval: {low:.1%} to {high:.1%} (held-out initial states: {trials})"
            tiles.append(_tile("success", share, note))
        tiles.append(_tile("return", number(last["eval/return"]), "mean per episode"))
    tiles += _held_out_tiles(rows)
    if rows:
        tiles.append(_tile("steps", f"{rows[-1]['step']:,}", f"of {config.get('steps', 0):,}"))
        tiles.append(_tile("time", _duration(rows[-1]["seconds"]), "wall time, with all resumes"))
    tiles += _actor_tiles(rows)
    words = components(config, ("env", "policy", "finetune", "learner", "reward"))
    env = config.get("env") or {}
    task = env.get("task") or env.get("id") or ""
    lead = f"{words}{f' · {task}' if task else ''} · seed {config.get('seed', 0)}"
    return f'{head(_name(folder), lead)}<div class="tiles">{"".join(tiles)}</div>'


def _held_out_tiles(rows: Sequence[dict[str, Any]]) -> list[str]:
    if (best := _best(rows)) is None:
        return []
    note = f"best, at step {best['step']:,}; this policy is saved"
    error = f"{best['eval/action_error']:.1%}"
    return [
        _tile("held-out loss", number(best["eval/loss"]), note),
        _tile("action error", error, "of half the range of each element of the action"),
    ]


def _actor_tiles(rows: Sequence[dict[str, Any]]) -> list[str]:
    last = next((row for row in reversed(rows) if "train/actor_hours" in row), None)
    if last is None:
        return []
    names = "steps_per_second updates_per_second policy_lag waiting_steps actor_deaths actor_hours"
    steps, updates, lag, waiting, died, hours = (last[f"train/{name}"] for name in names.split())
    pace = f"steps a second; {updates:.1f} updates a second"
    behind = f"versions old are the weights that act; {waiting:.1f} vector steps wait"
    return [
        _tile("throughput", f"{steps:.1f}", pace),
        _tile("policy lag", f"{lag:.1f}", behind),
        _tile("actor-hours", f"{hours:.2g}", f"{died:.0f} actors died and were replaced"),
    ]


def _tile(name: str, value: str, note: str) -> str:
    return f'<div class="tile"><span>{name}</span><b>{value}</b><small>{note}</small></div>'


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


def _noticed(rows: Sequence[dict[str, Any]]) -> str:
    lines = "".join(f"<li>{escape(line)}</li>" for line in diagnosis(rows))
    return f'<h2>Notice</h2><ul class="notice">{lines}</ul>' if lines else ""


def _curves(rows: Sequence[dict[str, Any]]) -> str:
    drawn = {name: _curve(name, rows) for name in curve_names(rows, FIRST, UNDRAWN)}
    drawn = {name: each for name, each in drawn.items() if each}
    main = [each for name, each in drawn.items() if name in FIRST] or [*drawn.values()]
    rest = [each for each in drawn.values() if each not in main]
    if not drawn:
        return ""
    fold = f"<summary>all metrics ({len(rest)} more)</summary>"
    more = f'<details>{fold}<div class="grid2">{"".join(rest)}</div></details>' if rest else ""
    return f'<h2>Curves</h2><div class="grid2">{"".join(main)}</div>{more}'


def _curve(name: str, rows: Sequence[dict[str, Any]]) -> str:
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
        return f"<h2>Tasks</h2><p>{escape(str(error))}</p>"
    caption = "tasks that the teacher sampled; inside the red line at least half succeeded"
    image = f'<img alt="tasks" src="{data_url("image/png", file.read_bytes())}">'
    return f"<h2>Tasks</h2>{figure(image, caption)}"


def _films(folder: Path) -> str:
    files = sorted(folder.glob("videos/*.mp4"), reverse=True)
    if not files:
        return ""
    return f"<h2>Episodes</h2>{''.join(film_figure(file, file.stem) for file in files[:4])}"


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
    heads = "step", "success [95%]", "return", "length", "episodes", "seed", ""
    return f"<h2>Evaluations</h2>{table(heads, cells)}"


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
    return f"<h2>Worst parameters</h2>{table((), rows)}{drawn}"


def _settings(folder: Path) -> str:
    text = yaml.safe_dump(config_of(folder), sort_keys=False)
    facts: dict[str, Any] = {"folder": str(folder.resolve()), "python": platform.python_version()}
    try:
        saved = checkpoint.find(folder)
    except checkpoint.CheckpointError:
        facts["checkpoint"] = "none"
    else:
        about = checkpoint.read_about(saved)
        versions = about.get("versions")
        facts |= {"checkpoint": saved.name, "git": about.get("git")}
        facts |= versions if isinstance(versions, dict) else {}
        facts |= {k: about[k] for k in ("policy_sha256", "parent", "demos") if about.get(k)}
    versions = table((), facts.items())
    return f"<h2>Versions</h2>{versions}<h2>Configuration</h2><pre>{escape(text)}</pre>"


TASKS = "tasks.png"


def task_picture(folder: Path, past: LoggedEpisodes) -> Path:
    """Write RUN/tasks.png; needs the spec in the run's checkpoint, and matplotlib."""
    task = checkpoint.load_spec(folder).task
    if task is not None and task.unit == LEVEL:
        return _level_picture(folder, past)
    from embodied.teachers.plots import draw

    moving = [i for i in range(past.task.shape[1]) if np.ptp(past.task[:, i]) > 1e-6] or [0]
    names = tuple(task.names[i] for i in moving) if task and task.names else ()
    names = names or tuple(f"task{i}" for i in moving)
    return draw(folder / TASKS, past.began, past.task[:, moving], _scores(past), names)


def _level_picture(folder: Path, past: LoggedEpisodes) -> Path:
    from embodied.teachers.plots import draw_levels

    node = read_run_settings(folder / "run.yaml")["env"]
    require_inside(node, folder / "run.yaml")
    env = build(node | {"num_envs": 1}, VecEnv)
    levelled = find_protocol(env, HasLevels)
    assert levelled is not None
    space: LevelSpace = levelled.levels
    try:
        return draw_levels(folder / TASKS, past.began, past.task, _scores(past), space.picture)
    finally:
        env.close()


def _scores(past: LoggedEpisodes) -> Floats:
    """[n] in [0, 1]: success or, if the environment does not report it, the normalised return."""
    if np.isfinite(past.success).any():
        return past.success
    return (past.ret - past.ret.min()) / max(float(np.ptp(past.ret)), 1e-9)
