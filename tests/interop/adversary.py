"""A LeRobot teleoperator that does its worst, and LeRobot's own recording command with it.

`python -m tests.interop.adversary ROBOT ACTIONS [FPS [LOST]]` is the long run: it prints what was
seen of the limits. LOST: share of the servo bus's replies that are lost.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from tests.interop.limits_watch import LimitsWatch

ROOT = Path(__file__).parents[2]
TASK = {"franka_sim": ["robot.emulator.world.task=reach"], "sim": ["robot.driver.world.task=reach"]}
TELEOPERATOR = '''
"""A teleoperator that does its worst."""
import math
import random
from dataclasses import dataclass, field
from lerobot.teleoperators import Teleoperator, TeleoperatorConfig


@TeleoperatorConfig.register_subclass("adversary")
@dataclass(kw_only=True)
class AdversaryConfig(TeleoperatorConfig):
    keys: list[str] = field(default_factory=list)
    seed: int = 0
    no_numbers: float = 0.0
    calm: bool = False
    low: float = -100.0
    high: float = 100.0


class Adversary(Teleoperator):
    config_class, name = AdversaryConfig, "adversary"
    is_connected, is_calibrated, feedback_features = False, True, {}

    def __init__(self, config):
        super().__init__(config)
        self.config, self.random = config, random.Random(config.seed)
        self.actions, self.kind, self.aim = 0, 0, {}

    @property
    def action_features(self):
        return dict.fromkeys(self.config.keys, float)

    def connect(self, calibrate=True): self.is_connected = True
    def calibrate(self): pass
    def configure(self): pass
    def send_feedback(self, feedback): pass

    def disconnect(self):
        self.is_connected = False
        print("ACTIONS", self.actions, flush=True)

    def get_action(self):
        self.actions += 1
        draw = self.random.uniform
        if self.actions % 20 == 1:
            self.kind = 1 if self.config.calm else self.random.randrange(6)
            low, high = self.config.low, self.config.high
            self.aim = {key: draw(low, high) for key in self.config.keys}
        action = {
            0: lambda key: draw(-180, 180),
            1: lambda key: self.aim[key],
            2: lambda key: self.random.choice((-1, 1)) * 10.0 ** draw(-3, 38),
            3: lambda key: self.random.choice((-1000.0, 1000.0)),
            4: lambda key: self.aim[key] + draw(-1, 1) * 10.0 ** draw(-9, 1),
            5: lambda key: 0.0 if self.actions % 2 else self.aim[key],
        }[self.kind]
        made = {key: action(key) for key in self.config.keys}
        if draw(0, 1) < self.config.no_numbers:
            key = self.random.choice(self.config.keys)
            made[key] = self.random.choice((math.nan, math.inf, -math.inf))
        return made
'''
KEYS = {
    "so101_sim": ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll"),
    "franka_sim": tuple(f"fr3_joint{i}" for i in range(1, 8)),
}


def installed(folder: Path) -> Path:
    """Our plugins and the adversary, as packages that LeRobot discovers by their metadata; the
    folder of all (pip would need a network to build ours)."""
    place = folder / "plugins"
    place.mkdir()
    for plugin in sorted((ROOT / "plugins").glob("*/pyproject.toml")):
        about = tomllib.loads(plugin.read_text())["project"]
        (place / about["name"]).symlink_to(plugin.parent / about["name"])
        _describe(place, about["name"], about["version"])
    name = "lerobot_teleoperator_adversary"
    (place / f"{name}.py").write_text(TELEOPERATOR)
    _describe(place, name, "0.1")
    return place


def own_python() -> str:
    """The interpreter of this project's environment, where LeRobot's only borrows its packages."""
    for place in map(Path, sys.path):
        python = place.parents[2] / "bin" / "python" if place.name == "site-packages" else None
        if python is not None and python.exists() and str(place.parents[2]) != sys.prefix:
            return str(python)
    return sys.executable


def _describe(place: Path, name: str, version: str) -> None:
    about = place / f"{name}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def environment(plugins: Path, folder: Path) -> dict[str, str]:
    """Of LeRobot's commands: the plugins, this project, and no network."""
    return {
        **os.environ,
        "PYTHONPATH": f"{plugins}:{ROOT}",
        "HF_HUB_OFFLINE": "1",
        "HF_LEROBOT_HOME": str(folder / "lerobot"),
        "HF_HOME": str(folder / "hf"),
        "OMP_NUM_THREADS": "1",
    }


def record(
    robot: str,
    seconds: float,
    fps: int,
    folder: Path,
    settings: tuple[str, ...] = (),
    robot_settings: tuple[str, ...] = (),
    teleop: tuple[str, ...] = (),
    episodes: int = 1,
) -> list[str]:
    """LeRobot's recording command, unmodified; words of it."""
    keys = "[" + ",".join(f'"{key}.pos"' for key in (*KEYS[robot], "gripper")) + "]"
    always = [f"folder={folder / 'daemon'}", "robot.spin=false"]
    words = [*TASK.get(robot, []), *always, *settings]
    listed = "[" + ",".join(f'"{word}"' for word in words) + "]"
    return [
        sys.executable, "-m", "lerobot.scripts.lerobot_record",
        "--robot.type=embodied", f"--robot.robot={robot}", f"--robot.settings={listed}",
        f"--robot.python={own_python()}", f"--robot.fps={fps}",
        f"--robot.out={folder / 'out'}", *robot_settings,
        "--teleop.type=adversary", f"--teleop.keys={keys}", *teleop,
        "--dataset.repo_id=test/adversary", f"--dataset.root={folder / 'dataset'}",
        "--dataset.single_task=worst", f"--dataset.fps={fps}", "--dataset.push_to_hub=false",
        "--dataset.video=false", f"--dataset.num_episodes={episodes}",
        f"--dataset.episode_time_s={seconds}", "--dataset.reset_time_s=1", "--play_sounds=false",
    ]  # fmt: skip


def main(robot: str, actions: int, fps: int = 50, lost: float = 0.0) -> None:
    """The long run."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as temporary:
        folder = Path(temporary)
        plugins = installed(folder)
        settings = (f"robot.emulator.faults={{lose:{lost}}}",) if lost else ()
        words = record(
            robot, actions / fps, fps, folder, settings,
            ("--robot.patience=60",),
            ("--teleop.calm=true",) if lost else ("--teleop.no_numbers=0.002",),
        )  # fmt: skip
        with LimitsWatch(folder / "daemon") as watch:
            done = subprocess.run(words, env=environment(plugins, folder), text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
        said = [line for line in done.stdout.splitlines() if line.startswith("ACTIONS")]
        print(robot, f"rc={done.returncode}", *said, f"ticks={watch.ticks}", flush=True)
        print("share of each limit that was used at most:", watch.worst)
        print(f"farthest that a reset moved the set-point: {watch.reset_jump:.4f} rad")
        print("modes:", dict(watch.modes), "resets:", watch.resets, dict(watch.faults))
        if done.returncode:
            print(done.stdout[-3000:])
        watch.require()


if __name__ == "__main__":
    given = sys.argv[1:]
    main(
        given[0], int(given[1]), *(int(each) for each in given[2:3]), *(float(e) for e in given[3:])
    )
