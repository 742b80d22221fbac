"""What the kernel reports: how an episode ended, and every field of a tick's state message."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from embodied.real_robot.kernel.arm_state import ArmState
from embodied.real_robot.kernel.messages import MOST_ACTION, TEXT, Ended, Mode, state_record
from embodied.real_robot.kernel.report import Episode, StateWriter
from embodied.real_robot.kernel.source import SetPoint


class Box:
    """A mailbox that keeps what was sent."""

    def __init__(self) -> None:
        self.fields = np.zeros(1, state_record(joints=2, stages=3, sensed=1))
        self.sent: list[Any] = []
        self.kept: list[Any] = []

    def send(self) -> None:
        self.sent.append(self.fields.copy())

    def add(self, record: Any) -> None:
        self.kept.append(record.copy())


@pytest.fixture
def box() -> Box:
    return Box()


@pytest.fixture
def writer(box: Box) -> StateWriter:
    return StateWriter(box, box)  # pyright: ignore[reportArgumentType]


def test_an_episode_that_has_not_begun_does_not_end() -> None:
    episode = Episode()
    assert not episode.over(1e9)
    episode.watch(Mode.ESTOP)
    assert episode.ended == Ended.NOTHING


def test_an_episode_is_over_at_its_limit_and_only_once() -> None:
    episode = Episode()
    episode.begin(2.0, now=10.0)
    assert not episode.over(11.999) and episode.ended == Ended.NOTHING
    assert episode.over(12.0) and episode.ended == Ended.TIME
    assert not episode.over(13.0)
    episode.watch(Mode.ESTOP)
    assert episode.ended == Ended.TIME


def test_an_episode_without_a_limit_runs_on() -> None:
    episode = Episode()
    episode.begin(0.0, now=10.0)
    episode.watch(Mode.RUNNING)
    assert not episode.over(1e12) and episode.ended == Ended.NOTHING


@pytest.mark.parametrize(
    ("mode", "ended"), [(Mode.ESTOP, Ended.FAULT), (Mode.STOPPING, Ended.STOPPED)]
)
def test_what_ended_an_episode_stays_until_the_next_one(mode: Mode, ended: Ended) -> None:
    episode = Episode()
    episode.begin(5.0, now=0.0)
    episode.watch(mode)
    assert episode.ended == ended and not episode.over(6.0)
    for later in (Mode.ESTOP, Mode.IDLE):
        episode.watch(later)
    assert episode.ended == ended
    episode.begin(5.0, now=7.0)
    assert episode.ended == Ended.NOTHING


@pytest.mark.parametrize(
    ("seconds", "good"), [(0.0, True), (3.0, True), (-1e-9, False), (math.inf, False)]
)
def test_what_can_be_a_limit(seconds: float, good: bool) -> None:
    assert Episode.possible(seconds) is good and not Episode.possible(math.nan)


def test_every_field_of_a_message(box: Box, writer: StateWriter) -> None:
    one, two, three = (np.array([value, value + 0.5]) for value in (1.0, 2.0, 3.0))
    writer.begin(4.0, Mode.RUNNING, "größer", Ended.FAULT, sent=three)
    arm = ArmState(q=one, dq=two, tau=three, t=3.5)
    writer.measured(arm, width=0.04, sensed=np.array([7.0]))
    action = np.linspace(-1, 1, MOST_ACTION + 4).astype(np.float32)
    point = SetPoint(
        q=one, seen=3.25, starved=False, step=9, action=action, intervened=True, paused=0.75
    )
    writer.followed(point, moves=True)
    limiter = SimpleNamespace(wanted=two)
    chain: Any = SimpleNamespace(
        limiter=limiter, changed=np.array([0.1, 0.2, 0.3]), counts=np.array([5, 6, 7])
    )
    writer.commanded(three, chain, width=0.05)
    rate: Any = SimpleNamespace(missed=11, late=0.001, worst=0.002)
    writer.timed(rate)
    writer.answer(21, True)
    writer.answer(22, False)
    writer.explain("x" * (TEXT + 9))
    writer.send()
    sent = box.sent[0][0]
    expected: dict[str, Any] = {
        **{"tick": 1, "now": 4.0, "mode": Mode.RUNNING, "ended": Ended.FAULT, "sent": three},
        **{"fault": "größer".encode(), "measured": 3.5, "width": 0.04, "sensed": [7.0]},
        **{"q": one, "dq": two, "tau": three, "step": 9, "size": MOST_ACTION, "followed": 3.25},
        **{"action": action[:MOST_ACTION], "intervened": 1, "starved": 0, "paused": 0.75},
        **{"reference": one, "proposed": three, "filtered": two, "changed": chain.changed},
        **{"counts": [5, 6, 7], "sent_width": 0.05, "missed": 11, "late": 0.001, "worst": 0.002},
        **{"answered": 21, "refused": 22, "reason": b"x" * TEXT},
    }
    assert set(expected) == set(box.fields.dtype.names or ())
    for name, value in expected.items():
        np.testing.assert_array_equal(sent[name], value, name)
    assert box.kept[0] == box.sent[0]


def test_where_a_step_leads(box: Box, writer: StateWriter) -> None:
    """`reference` is what was sent until a source moves the arm, then where its step leads."""
    place, further = np.array([1.0, 1.5]), np.array([2.0, 2.5])
    writer.begin(0.0, Mode.ARMED, "", Ended.NOTHING, sent=place)
    point = SetPoint(q=place, action=np.array([0.25]), reference=further)
    writer.followed(point, moves=False)
    assert list(box.fields["reference"][0]) == list(place) and box.fields["size"][0] == 1
    writer.followed(point, moves=True)
    assert list(box.fields["reference"][0]) == list(further)
    writer.begin(0.0, Mode.ARMED, "", Ended.NOTHING, sent=place)
    assert box.fields["tick"][0] == 2 and list(box.fields["reference"][0]) == list(place)


def test_a_request_without_an_answer_is_refused(box: Box, writer: StateWriter) -> None:
    writer.refuse_unanswered(5)
    assert (box.fields["answered"][0], box.fields["refused"][0]) == (0, 5)
    writer.answer(6, True)
    writer.refuse_unanswered(6)
    assert (box.fields["answered"][0], box.fields["refused"][0]) == (6, 5)
    writer.refuse_unanswered(5)
    assert box.fields["refused"][0] == 5
    writer.refuse_unanswered(7)
    assert box.fields["refused"][0] == 7


def test_a_message_is_sent_without_a_recorder(box: Box) -> None:
    StateWriter(box, None).send()  # pyright: ignore[reportArgumentType]
    assert len(box.sent) == 1 and not box.kept
