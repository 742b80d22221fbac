"""RunReport: one self-contained HTML page about a run: curves, result, videos, settings."""

from __future__ import annotations

import base64
import json
import platform
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from embodied.core import checkpoint
from embodied.core.atomic_write import write_durably
from embodied.core.build import build
from embodied.core.env import HasLevels, VecEnv
from embodied.core.saved_node import read_run_settings, require_inside
from embodied.core.wrapper import find_protocol
from embodied.evaluation.statistics import rate, wilson
from embodied.reports.svg import Curve, against, chart, number, several
from embodied.teachers import episode_log
from embodied.teachers.episode_log import LoggedEpisodes
from embodied.teachers.levels.level_teacher import LEVEL, LevelSpace
from embodied.teachers.task_space import Floats
from embodied.training.logger import read_metrics
from embodied.training.reward_components import FILE
from embodied.training.reward_hacking import evaluations, ever_diverged

FIRST = ("eval/success", "eval/return", "eval/loss", "eval/action_error", "train/success")
FIRST += ("train/return",)
UNDRAWN = ("step", "seconds", "eval/episodes", "eval/decisions", "eval/best_step")


def write(folder: Path) -> Path:
    """Write RUN/report.html from the files of the run folder; returns its path."""
    folder = Path(folder)
    rows = read_metrics(folder)
    parts = [
        _header(folder, rows),
        _rewards(folder),
        _curves(rows),
        _tasks(folder),
        _films(folder),
        _evaluations(folder),
        _next(folder),
        _settings(folder),
    ]
    page = PAGE.format(title=escape(_name(folder)), style=STYLE, body="\n".join(parts))
    path = folder / "report.html"
    write_durably(path, lambda sink: sink.write(page.encode()))
    return path


def summary(folder: Path) -> str:
    """The run's result in one line."""
    rows = read_metrics(folder)
    ends = [row for row in rows if "eval/return" in row]
    if not ends:
        return f"{_name(folder)}{_held_out(rows) or ': not evaluated'}"
    last = ends[-1]
    text = f"{_name(folder)} at {last['step']:,}: return {last['eval/return']:,.2f}"
    return f"{text}, success {_success(last)}" if "eval/success" in last else text


def _held_out(rows: Sequence[dict[str, Any]]) -> str:
    """The best evaluation on held-out episodes, after the run's name; "" without one."""
    ends = [row for row in rows if "eval/best_loss" in row]
    if not ends:
        return ""
    best = next(row for row in ends if row["step"] == ends[-1]["eval/best_step"])
    return (
        f" at {best['step']:,} (the best, saved): held-out loss {best['eval/loss']:.4g}, action "
        f"error {best['eval/action_error']:.1%} of the range"
    )


def _success(row: dict[str, Any]) -> str:
    trials = int(row["eval/episodes"])
    return (
        f"{rate(round(row['eval/success'] * trials), trials)} of {trials} held-out initial states"
    )


def _name(folder: Path) -> str:
    return str(_config(folder).get("name", folder.resolve().name))


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "run.yaml"
    return read_run_settings(file) if file.exists() else {}


def _header(folder: Path, rows: Sequence[dict[str, Any]]) -> str:
    config = _config(folder)
    tiles = []
    ends = [row for row in rows if "eval/return" in row]
    if ends:
        last = ends[-1]
        if "eval/success" in last:
            trials = int(last["eval/episodes"])
            low, high = wilson(round(last["eval/success"] * trials), trials)
            share = f"{last['eval/success']:.1%}"
            note = f"95% [{low:.1%}, {high:.1%}], {trials} held-out initial states"
            tiles.append(_tile("success", share, note))
        tiles.append(_tile("return", number(last["eval/return"]), "mean per episode"))
    tiles += _held_out_tiles(rows)
    if rows:
        tiles.append(_tile("steps", f"{rows[-1]['step']:,}", f"of {config.get('steps', 0):,}"))
        tiles.append(_tile("time", _duration(rows[-1]["seconds"]), "wall time, with all resumes"))
    tiles += _actor_tiles(rows)
    words = " · ".join(
        str(config[group]["_target_"]).rpartition(".")[2]
        for group in ("env", "policy", "finetune", "learner", "reward")
        if config.get(group)
    )
    env = config.get("env") or {}
    task = env.get("task") or env.get("id") or ""
    lead = escape(f"{words}{f' · {task}' if task else ''} · seed {config.get('seed', 0)}")
    return (
        f"<header><h1>{escape(_name(folder))}</h1><p>{lead}</p></header>"
        f'<div class="tiles">{"".join(tiles)}</div>'
    )


def _held_out_tiles(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The best evaluation on held-out episodes of a run without an environment."""
    ends = [row for row in rows if "eval/best_loss" in row]
    if not ends:
        return []
    best = next(row for row in ends if row["step"] == ends[-1]["eval/best_step"])
    note = f"best, at step {best['step']:,}; this policy is saved"
    error = f"{best['eval/action_error']:.1%}"
    return [
        _tile("held-out loss", number(best["eval/loss"]), note),
        _tile("action error", error, "of half the range of each element of the action"),
    ]


def _actor_tiles(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What a run with actors did, from its newest line that says so."""
    last = next((row for row in reversed(rows) if "train/actor_hours" in row), None)
    if last is None:
        return []
    steps, updates, lag, waiting, died, hours = (
        last[f"train/{name}"]
        for name in (
            "steps_per_second",
            "updates_per_second",
            "policy_lag",
            "waiting_steps",
            "actor_deaths",
            "actor_hours",
        )
    )
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


def _curves(rows: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(key for row in rows for key in row))
    names = [n for n in names if n not in UNDRAWN]
    names.sort(key=lambda n: FIRST.index(n) if n in FIRST else len(FIRST))
    figures = []
    for name in names:
        own = [row for row in rows if name in row]
        points = [(float(row["step"]), float(row[name])) for row in own]
        bounded = name.endswith("success")
        drawn = chart(Curve(points, _band(name, own)), name, *((0.0, 1.0) if bounded else ()))
        if drawn:
            last = f"{points[-1][1]:.1%}" if bounded else number(points[-1][1])
            figures.append(
                f"<figure><figcaption>{escape(name)}<b>{last}</b></figcaption>{drawn}</figure>"
            )
    return f'<h2>Curves</h2><div class="grid2">{"".join(figures)}</div>' if figures else ""


def _rewards(folder: Path) -> str:
    """The learned reward over training, beside the environment's success."""
    figures = _goodhart(folder) + _terms(folder)
    return f'<h2>Reward</h2><div class="grid2 pair">{figures}</div>' if figures else ""


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
    return f"<figure><figcaption>Reward and success<b>{words}</b></figcaption>{drawn}</figure>"


def _terms(folder: Path) -> str:
    """The reward's components over one evaluation episode."""
    file = folder / FILE
    if not file.exists():
        return ""
    kept = json.loads(file.read_text())
    series = {
        name: [(float(t), float(value)) for t, value in enumerate(values)]
        for name, values in kept["terms"].items()
    }
    ends = {True: "succeeded", False: "failed", None: ""}[kept["success"]]
    words = f"one episode{f' that {ends}' if ends else ''}"
    caption = f"<figcaption>Terms of the reward<b>{words}</b></figcaption>"
    return f"<figure>{caption}{several(series, 'reward components')}</figure>"


def _tasks(folder: Path) -> str:
    """The tasks that the run's teacher sampled, by quarter of training."""
    past = episode_log.read_episode_log(folder)
    if past is None:
        return ""
    try:
        file = task_picture(folder, past)
    except (ModuleNotFoundError, checkpoint.CheckpointError) as error:
        return f"<h2>Tasks</h2><p>{escape(str(error))}</p>"
    picture = base64.b64encode(file.read_bytes()).decode()
    caption = (
        "<figcaption>tasks that the teacher sampled; inside the red line at least half succeeded"
    )
    image = f'<img alt="tasks" src="data:image/png;base64,{picture}">'
    return f"<h2>Tasks</h2><figure>{caption}</figcaption>{image}</figure>"


def _band(name: str, rows: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """The Wilson interval of each evaluated success rate; none for other curves."""
    if name != "eval/success":
        return []
    counts = [(float(row[name]), int(row["eval/episodes"])) for row in rows]
    return [wilson(round(share * trials), trials) for share, trials in counts]


def _films(folder: Path) -> str:
    """A strip of frames of each video, and the video itself."""
    files = sorted(folder.glob("videos/*.mp4"), reverse=True)
    if not files:
        return ""
    from embodied.evaluation.video import strip_png

    figures = []
    for file in files[:4]:
        picture = base64.b64encode(strip_png(file)).decode()
        film = base64.b64encode(file.read_bytes()).decode()
        figures.append(
            f"<figure><figcaption>{escape(file.stem)}</figcaption>"
            f'<img alt="{escape(file.stem)}" src="data:image/png;base64,{picture}">'
            f"<details><summary>play</summary>"
            f'<video controls loop muted src="data:video/mp4;base64,{film}"></video></details>'
            "</figure>"
        )
    return f"<h2>Episodes</h2>{''.join(figures)}"


def _evaluations(folder: Path) -> str:
    file = folder / "evaluations.jsonl"
    if not file.exists():
        return ""
    cells = []
    for row in map(json.loads, file.read_text().splitlines()):
        won = rate(row["successes"], row["episodes"]) if "successes" in row else "-"
        values = (f"{row['step']:,}", won, number(row["return"]), f"{row['length']:.1f}")
        line = "".join(f"<td>{value}</td>" for value in (*values, row["episodes"], row["seed"]))
        cells.append(f"<tr>{line}</tr>")
    heads = "step", "success [95%]", "return", "length", "episodes", "seed"
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f"<h2>Evaluations</h2><table><tr>{head}</tr>{''.join(cells)}</table>"


def _next(folder: Path) -> str:
    lines = [
        f"embodied view {folder}",
        f"embodied eval {folder} episodes=500",
        f"embodied train resume={folder} steps=...",
    ]
    return f"<h2>Next</h2><pre>{escape(chr(10).join(lines))}</pre>"


def _settings(folder: Path) -> str:
    text = yaml.safe_dump(_config(folder), sort_keys=False)
    facts: dict[str, Any] = {"folder": str(folder.resolve()), "python": platform.python_version()}
    try:
        saved = checkpoint.find(folder)
    except checkpoint.CheckpointError:
        facts["checkpoint"] = "none"
    else:
        about = json.loads((saved / "about.json").read_text())
        facts |= {"checkpoint": saved.name, **about["versions"], "git": about["git"]}
        facts |= {k: about[k] for k in ("policy_sha256", "parent", "demos") if about.get(k)}
    rows = "".join(
        f"<tr><th>{escape(k)}</th><td>{escape(str(v))}</td></tr>" for k, v in facts.items()
    )
    return f"<h2>Versions</h2><table>{rows}</table><h2>Configuration</h2><pre>{escape(text)}</pre>"


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body><main>
{body}
</main></body></html>
"""

STYLE = """
:root { color-scheme: light dark; --ink: #1c2127; --soft: #68727e; --page: #f6f7f9;
  --card: #fff; --edge: #e1e5ea; --main: #0b6bcb; --second: #c2410c; --third: #15803d;
  --fourth: #7e22ce; --fifth: #a16207; --sixth: #0e7490; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #97a1ad; --page: #14171b;
  --card: #1d2127; --edge: #2e343c; --main: #5aa9f7; --second: #fb923c; --third: #4ade80;
  --fourth: #c084fc; --fifth: #facc15; --sixth: #22d3ee; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1020px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { margin: 0; font-size: 28px; letter-spacing: -.02em; }
h2 { margin: 36px 0 12px; font-size: 17px; }
header p { margin: 2px 0 20px; color: var(--soft); }
.tiles, .grid2 { display: grid; gap: 14px; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); }
.grid2 { grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
.pair { grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); }
.tile, figure, table, pre { background: var(--card); border: 1px solid var(--edge);
  border-radius: 10px; }
.tile { padding: 12px 16px; display: flex; flex-direction: column; }
.tile span, .tile small { color: var(--soft); }
.tile b { font-size: 26px; line-height: 1.25; font-variant-numeric: tabular-nums; }
figure { margin: 0; padding: 12px 14px 8px; }
h2 + figure, figure + figure { margin-bottom: 14px; }
.grid2 figure { margin: 0; }
figcaption { display: flex; justify-content: space-between; font-size: 14px; margin-bottom: 4px; }
svg, img { display: block; width: 100%; height: auto; }
img { border-radius: 6px; }
video { display: block; max-width: 100%; margin: 8px 0; border-radius: 6px; }
summary { cursor: pointer; color: var(--main); padding-top: 6px; }
svg text { font-size: 11px; fill: var(--soft); font-variant-numeric: tabular-nums; }
svg .second { fill: var(--second); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 4px 0; font-size: 13px; }
svg .y { text-anchor: end; } svg .x { text-anchor: middle; }
.grid { stroke: var(--edge); } .line { fill: none; stroke: var(--main); stroke-width: 2;
  stroke-linejoin: round; }
.dot { fill: var(--main); } .band { fill: var(--main); opacity: .16; }
.whisker { stroke: var(--main); stroke-width: 5; opacity: .25; }
pre { padding: 12px 16px; overflow-x: auto; font: 13px/1.55 ui-monospace, monospace; }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-size: 14px;
  table-layout: auto; }
th, td { text-align: left; padding: 7px 14px; font-weight: 400; overflow-wrap: anywhere; }
th { color: var(--soft); } tr + tr > * { border-top: 1px solid var(--edge); }
"""


TASKS = "tasks.png"


def task_picture(folder: Path, past: LoggedEpisodes) -> Path:
    """Write RUN/tasks.png; needs the spec in the run's checkpoint, and matplotlib."""
    task = checkpoint.load_spec(folder).task
    if task is not None and task.unit == LEVEL:
        return _level_picture(folder, past)
    from embodied.teachers.plots.task_density import draw

    moving = [i for i in range(past.task.shape[1]) if np.ptp(past.task[:, i]) > 1e-6] or [0]
    names = tuple(task.names[i] for i in moving) if task and task.names else ()
    names = names or tuple(f"task{i}" for i in moving)
    return draw(folder / TASKS, past.began, past.task[:, moving], _scores(past), names)


def _level_picture(folder: Path, past: LoggedEpisodes) -> Path:
    from embodied.teachers.plots.level_gallery import draw

    node = read_run_settings(folder / "run.yaml")["env"]
    require_inside(node, folder / "run.yaml")
    env = build(node | {"num_envs": 1}, VecEnv)
    levelled = find_protocol(env, HasLevels)
    assert levelled is not None
    space: LevelSpace = levelled.levels
    try:
        return draw(folder / TASKS, past.began, past.task, _scores(past), space.picture)
    finally:
        env.close()


def _scores(past: LoggedEpisodes) -> Floats:
    """[n] in [0, 1]: success or, if the environment does not report it, the normalised return."""
    if np.isfinite(past.success).any():
        return past.success
    return (past.ret - past.ret.min()) / max(float(np.ptp(past.ret)), 1e-9)
