"""Pictures of recordings: which one a row gets, what is said where there is none, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from embodied.datasets.lerobot.reader import EpisodeWriter, read_episodes
from embodied.real_robot.cameras.shared_frames import (
    KEPT,
    FrameHistory,
    FrameReader,
    FrameWriter,
    camera_mailbox,
)
from embodied.real_robot.cameras.sources import CameraError, Picture
from embodied.real_robot.ipc.messages import Mode
from embodied.real_robot.policy.observer import Observer
from embodied.real_robot.recording.recorder import EpisodeBuilder, recorded_spec
from tests.real_robot.test_decide import GOAL, SPEC, tool
from tests.real_robot.test_record import ticks

pytest.importorskip("cv2", reason="OpenCV is not installed")
SIZE = (4, 6)


def grey(level: int, size: tuple[int, int] = SIZE) -> np.ndarray:
    return np.full((*size, 3), level, np.uint8)


def album(*times: float, age: float = 0.5) -> FrameHistory:
    """Pictures taken at those times, of grey levels 1, 2, ..."""
    made = FrameHistory({}, {"front": SIZE}, ("front",), age)
    for level, t in enumerate(times, 1):
        made.add("front", t, grey(level))
    return made


def test_the_newest_that_is_not_later() -> None:
    made = album(1.0, 1.1, 1.2)
    for measured, level, t in ((0.99, 0, 0.0), (1.0, 1, 1.0), (1.15, 2, 1.1), (9.0, 3, 1.2)):
        row = made.at(measured)
        assert (row["obs/front"] == level).all() and row["stamp/front"] == t
    assert (made.decided({"front": 1.1})["decided/front"] == 2).all()
    nothing = made.decided({"front": 1.05})
    assert nothing["stamp/decided/front"] == 0 and not nothing["decided/front"].any()
    for k in range(KEPT):
        made.add("front", 2.0 + k, grey(7))
    assert made.at(1.9)["stamp/front"] == 0, "long gone"


def scribe(made: FrameHistory) -> EpisodeBuilder:
    spec = recorded_spec(SPEC, {"front": SIZE})
    observer = Observer(spec, 7, tool, GOAL, pictures=("front",))
    return EpisodeBuilder(spec, observer, lambda q: tool(q[None])[0], 0, lambda q, s: False, made)


def test_an_episode_ends_before_a_row_without_a_new_picture() -> None:
    """Steps at 10.01, 10.02, ...; the camera shows nothing after 10.021."""
    writes = scribe(album(10.005, 10.021, age=0.0105))
    runs = {"mode": Mode.RUNNING, "size": 4, "followed": 10.0}
    steps = [{**runs, "step": k, "q": 0.1 * k} for k in range(5)]
    made = ticks({"mode": Mode.ARMED}, *steps, {"mode": Mode.STOPPING, "fault": b"why"})
    writes.add_decision(10.0, np.zeros(0, np.float32), np.array([10.005]))
    said = [writes.add_tick(tick) for tick in made]
    episode = said[-1]
    assert said[:-1] == [None] * 6 and episode is not None
    # Ages of the rows: 5 ms, 15 ms: the second one is stale, and there is no step before the first.
    assert episode.steps == {} and "at step 1; 0 steps before it are kept" in episode.lost
    writes.frames = album(10.005, 10.012, 10.03, age=0.0105)
    said = [writes.add_tick(tick) for tick in made]
    episode = said[-1]
    assert episode is not None and episode.fault == "why" and episode.success is False
    # 5, 8, 0 ms, then 10 and (the end, of the same tick) 20: the fifth row is stale.
    assert "for 0.02 s at step 4; 3 steps before it are kept" in episode.lost
    rows = episode.steps
    assert rows["obs/front"][:, 0, 0, 0].tolist() == [1, 2, 3]
    assert rows["stamp/front"].tolist() == [10.005, 10.012, 10.03]
    assert int(rows["next_obs/front"].max()) == 3, "the end is the last moment that was seen"
    names = SPEC.obs["state"].names
    assert float(rows["next_obs/state"][names.index("q1")]) == pytest.approx(0.3)
    assert (rows["decided/front"] == 1).all() and (rows["stamp/decided/front"] == 10.005).all()


@pytest.mark.parametrize("images", ["png", "mp4"])
def test_what_was_decided_upon_is_read_back(tmp_path: Path, images: Literal["png", "mp4"]) -> None:
    steps = torch.arange(5)
    smooth = (steps[:, None, None, None] * 40 + 10).expand(5, 16, 24, 3).to(torch.uint8)
    rows = {"action": torch.zeros(5, 4), "reward": torch.zeros(5), "decided/front": smooth}
    rows |= {"obs/state": torch.zeros(5, 27), "next_obs/state": torch.zeros(27)}
    rows |= {"terminated": steps == 4, "truncated": steps < 0}
    with EpisodeWriter(tmp_path / "d", SPEC, images=images) as writer:
        writer.add(rows)
        early = read_episodes(tmp_path / "d").steps["decided/front"]
        writer.add(rows)
    late = read_episodes(tmp_path / "d").steps["decided/front"]
    assert late.shape == (10, 16, 24, 3) and late[:5].equal(early)
    apart = (early.int() - smooth.int()).abs().max()
    assert int(apart) == 0 if images == "png" else int(apart) < 6


def test_a_view_sees_what_is_shown(tmp_path: Path) -> None:
    now = 5.0
    told = camera_mailbox(tmp_path, "front", create=True)
    with FrameReader(tmp_path, "front", lambda: now) as view:
        now = 5.2
        with pytest.raises(CameraError, match=r"camera front has shown nothing new for 0.20 s"):
            view.newest(0.1)
        shown = FrameWriter(tmp_path, "front")
        for number in range(1, 101):
            shown.add(Picture(grey(number), 5.0 + number / 1000, number))
        newest = view.newest(0.2)
        assert (newest.number, newest.t, int(newest.frame.min())) == (100, 5.1, 100)
        assert [each.number for each in view.since()] == list(range(38, 101)), "of 64, one is open"
        assert view.since() == [] and view.next(99, 1.0).number == 100
        with pytest.raises(CameraError, match="one size"):
            shown.add(Picture(grey(1, (8, 6)), 5.2, 101))
        shown.fail("it broke")
        with pytest.raises(CameraError, match="it broke"):
            view.newest(9.0)
        told.fields[:] = 0
        told.send()
        again = FrameWriter(tmp_path, "front")
        again.add(Picture(grey(9, (8, 6)), 5.3, 1))
        assert view.newest(1.0).frame.shape == (8, 6, 3)
        assert [each.number for each in view.since()] == [1]
    assert (tmp_path / "frames.front").stat().st_mode & 0o777 == 0o600
