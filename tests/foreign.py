"""Datasets as other projects record them: physical units, their own names, no key of ours."""

from __future__ import annotations

import json
import shutil
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq
import torch

from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.datasets.collect import play
from embodied.datasets.editing.edit import drop
from embodied.datasets.lerobot.reader import EpisodeWriter

DEGREES = 45.0  # degrees of an action of 1
MILLIMETRES = 1000.0  # of a position of 1
SPEC = Spec(
    {"state": Leaf((2,), names=("x.pos", "y.pos"))},
    Leaf((2,), names=("x.vel", "y.vel")),
    dt=0.1,
    text="pass the wall",
)
MAPPING = f"""
obs:
  state: {{name: observation.state, scale: {1 / MILLIMETRES}, elements: [x, y]}}
action: {{low: [-{DEGREES}, -{DEGREES}], high: [{DEGREES}, {DEGREES}], elements: [x, y]}}
"""


def foreign_two_gap(folder: Path, episodes: int, camera: bool = False) -> Path:
    """Demonstrations of env=two_gap in millimetres and degrees, without our key in info.json."""
    env = build({"_target_": "embodied.envs.toy.two_gap.TwoGap", "num_envs": 8}, VecEnv)
    node = {"_target_": "embodied.policies.scripted.simple.TwoGapDemonstrator"}
    demonstrator = build(node, Policy, spec=env.spec)
    top = {"top": Leaf((16, 24, 3), "uint8")} if camera else {}
    spec = SPEC.with_obs(**top)
    with EpisodeWriter(folder, spec, images="png") as writer:
        for rows, _ in islice(play(demonstrator, env, 0), episodes):
            writer.add(_foreign(rows, camera))
    file = folder / "meta" / "info.json"
    info = json.loads(file.read_text())
    del info["embodied"]
    file.write_text(json.dumps(info))
    return folder


def _foreign(rows: dict[str, torch.Tensor], camera: bool) -> dict[str, torch.Tensor]:
    made = {key: rows[key] for key in ("reward", "terminated", "truncated")}
    made["action"] = rows["action"] * DEGREES
    for when in ("obs", "next_obs"):
        place = rows[f"{when}/state"]
        made[f"{when}/state"] = place * MILLIMETRES
        if camera:
            shade = (place[..., :1, None, None] * 200).clamp(0, 255).to(torch.uint8)
            made[f"{when}/top"] = shade.expand(*place.shape[:-1], 16, 24, 3).contiguous()
    return made


def as_version_2(dataset: Path, out: Path, version: str = "v2.1") -> Path:
    """The episodes of a dataset of version 3 in the layout of LeRobot's version 2: a file and a
    film for each of them, and lists of JSON lines."""
    info = json.loads((dataset / "meta/info.json").read_text())
    count = info["total_episodes"]
    tasks = pq.read_table(dataset / "meta/tasks.parquet").to_pylist()
    lines: dict[str, list[dict[str, object]]] = {"tasks": tasks, "episodes": []}
    lines["episodes_stats"] = []
    for number in range(count):
        others = [other for other in range(count) if other != number]
        one = out.with_name(f"{out.name}-{number}")
        drop(dataset, one, lambda _, others=others: others)
        name = f"chunk-000/episode_{number:06d}"
        whole = pq.read_table(next((dataset / "data").rglob("*.parquet")))
        table = whole.filter([index == number for index in whole["episode_index"].to_pylist()])
        (out / "data/chunk-000").mkdir(parents=True, exist_ok=True)
        pq.write_table(table, out / f"data/{name}.parquet")
        for film in (one / "videos").rglob("*.mp4"):
            camera = film.parent.parent.name
            target = out / f"videos/chunk-000/{camera}/episode_{number:06d}.mp4"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(film, target)
        (row,) = pq.read_table(next((one / "meta/episodes").rglob("*.parquet"))).to_pylist()
        told = {"episode_index": number, "tasks": row["tasks"], "length": row["length"]}
        lines["episodes"].append(told)
        stats: dict[str, dict[str, object]] = {}
        for key in (key for key in row if key.startswith("stats/") and "/q" not in key):
            feature, _, kind = key.removeprefix("stats/").rpartition("/")
            stats.setdefault(feature, {})[kind] = row[key]
        lines["episodes_stats"].append({"episode_index": number, "stats": stats})
        shutil.rmtree(one)
    for key in ("data_files_size_in_mb", "video_files_size_in_mb"):
        del info[key]
    info |= {"codebase_version": version, "total_chunks": 1, "total_videos": 0}
    info["data_path"] = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
    if info["video_path"]:
        place = "chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
        info["video_path"] = f"videos/{place}"
    (out / "meta").mkdir()
    if version == "v2.0":
        del lines["episodes_stats"]
        shutil.copyfile(dataset / "meta/stats.json", out / "meta/stats.json")
    for name, each in lines.items():
        (out / f"meta/{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in each))
    (out / "meta/info.json").write_text(json.dumps(info))
    return out
