"""A dataset of LeRobot's own command becomes a policy, which drives the same arm through our driver
and through LeRobot's: no mapping, rate or controller is said, and it sees what was recorded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from embodied.commands.train import train
from embodied.core import checkpoint
from embodied.datasets.lerobot.reader import read_episodes
from embodied.real_robot.emulators.servos.bus import FakeBus
from tests.interop.adversary import KEYS, installed, record
from tests.interop.test_lerobot_record import run
from tests.real_robot.operators import Operator
from tests.real_robot.test_daemon import PATIENT
from tests.real_robot.test_deploy import ENV, ROOT, said, start

pytest.importorskip("lerobot", reason="LeRobot is not installed here: sh scripts/interop.sh")
pytestmark = pytest.mark.usefixtures("idle_machine")

NAMES = tuple(f"{name}.pos" for name in (*KEYS["so101_sim"], "gripper"))
YAML: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "robot" / "so101_sim.yaml").read_text())
SMALL = ("policy=flow", "learner=imitate", "policy.width=32", "policy.depth=1", "steps=30")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The daemon's, which only this user can open."""
    place = tmp_path / "d"
    place.mkdir(mode=0o700)
    return place


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray[Any, Any]]:
    """The run of a dataset that `lerobot-record` made of so101_sim, and the dataset's first state,
    which is that of the home pose."""
    folder = tmp_path_factory.mktemp("recorded")
    calm = ("--teleop.calm=true", "--teleop.low=0", "--teleop.high=30")
    words = record("so101_sim", 6, 20, folder, teleop=calm, episodes=2)
    run(words, installed(folder), folder)
    out = train([f"demos={folder / 'dataset'}", f"out={folder / 'run'}", *SMALL])
    spec = checkpoint.load_spec(out)
    assert spec.obs["state"].names == spec.act.names == NAMES and spec.dt == 0.05
    return out, read_episodes(folder / "dataset").steps["obs/state"][0].numpy()


def require_seen(recording: Path, home: np.ndarray[Any, Any]) -> None:
    """At home, the policy sees what was recorded there: by name, sign and unit."""
    episodes = read_episodes(recording)
    assert episodes.spec.obs["state"].names == episodes.spec.act.names == NAMES
    seen = episodes.steps["obs/state"].numpy()
    np.testing.assert_allclose(seen[0], home, atol=2.5)
    low, high = seen.min(0), seen.max(0)
    assert (low > -10).all() and (high < 60).all(), "it stays where the data are"


def test_through_our_driver(
    trained: tuple[Path, np.ndarray[Any, Any]], tmp_path: Path, folder: Path
) -> None:
    policy, home = trained
    # LeRobot's degrees of the home pose, of which shoulder_lift counts the other way, and a hand
    # that is half open.
    wanted = [*np.degrees(np.array(YAML["home"]) * [1, -1, 1, 1, 1]), 50.0]
    np.testing.assert_allclose(home, wanted, atol=2.5)
    words = ("robot=so101_sim", f"policy={policy}", "seconds=3", "robot.driver.timeout=0.3")
    deploy = start(tmp_path, folder, *words)
    text = said(deploy)
    assert deploy.returncode == 0 and "FAIL" not in text and "ok   units" in text, text
    require_seen(tmp_path / "out" / "recording", home)


def test_through_lerobots_driver(
    trained: tuple[Path, np.ndarray[Any, Any]],
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the rehearsal of its calibration, which is new."""
    monkeypatch.setitem(ENV, "HOME", str(tmp_path))
    policy, home = trained
    driver = YAML["driver"]
    ends = [(joint["low"], joint["high"]) for joint in driver["joints"]]
    ends.append((driver["hand"]["closed"], driver["hand"]["open"]))
    names = [name.removesuffix(".pos") for name in NAMES]
    rows = {
        name: {"id": i, "drive_mode": 0, "homing_offset": 0, "range_min": low, "range_max": high}
        for i, (name, (low, high)) in enumerate(zip(names, ends, strict=True), 1)
    }
    (tmp_path / "arm.json").write_text(json.dumps(rows))
    with FakeBus("feetech", (2244, 2341, 2452, 2406, 2048, 2500)) as bus:  # near home, and free
        for id, (low, high) in enumerate(ends, 1):
            bus.servos[id].table[9:11] = low.to_bytes(2, "little")
            bus.servos[id].table[11:13] = high.to_bytes(2, "little")
        settings = f"{{id: arm, calibration_dir: {tmp_path}}}"
        words = ("deploy", "robot=lerobot", f"policy={policy}", "seconds=3", "out=out",
                 f"robot.driver.port={bus.path}", f"robot.driver.settings={settings}",
                 f"robot.driver.python={sys.executable}", "robot.driver.silence=2.0",
                 "robot.driver.hertz=20")  # fmt: skip
        operator = Operator(tmp_path, folder, *words)
        try:
            operator.rehearses()
            operator.says("is held. From here on")
            operator.types(b"y\n")
            operator.says("episode 1:")
            assert operator.process.wait(PATIENT) == 0, operator.text.decode()
        finally:
            operator.close()
    assert b"FAIL" not in operator.text and b"ok   units" in operator.text
    require_seen(tmp_path / "out" / "recording", home)
