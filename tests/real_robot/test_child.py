"""The reason of a subprocess's death is the one that it gave itself."""

from __future__ import annotations

from pathlib import Path

from embodied.real_robot.daemon.child import last_words

LEAKS = """nanobind: leaked 1 instances!
 - leaked instance 0x5562c9733bd8 of type "ruckig.InputParameter"
nanobind: this is likely caused by a reference counting issue in the binding code.
See https://nanobind.readthedocs.io/en/latest/refleaks.html
"""


def test_what_a_library_prints_at_exit_does_not_hide_the_reason(tmp_path: Path) -> None:
    log = tmp_path / "control.log"
    log.write_text("starting\ncontrol: wrist_roll: make limits.low narrower\n" + LEAKS)
    assert last_words(log) == "control: wrist_roll: make limits.low narrower"


def test_without_such_lines_it_is_the_last_one(tmp_path: Path) -> None:
    log = tmp_path / "control.log"
    log.write_text("one\ntwo\n\n")
    assert last_words(log) == "two"
    log.write_text(LEAKS)
    assert last_words(log) == ""
