"""The policy process writes its chunk and its log, and nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from embodied.core.build import allow
from embodied.real_robot.daemon.requests import Verb
from embodied.real_robot.ipc.channels import Channels
from embodied.real_robot.kernel.mailbox import Mailbox
from embodied.real_robot.kernel.messages import REQUEST, VERSION
from embodied.real_robot.policy import lockdown
from tests.builders import ROOT, python
from tests.real_robot.hostile import attempts
from tests.real_robot.test_daemon import bridging, simulated, until

pytestmark = pytest.mark.skipif(bool(lockdown.missing()), reason=lockdown.missing() or "locked")


def tried(folder: Path, how: str) -> dict[str, Any]:
    """What succeeds in a process with (`locked`) or without a lock, in a `folder` that it owns."""
    for name in ("mine", "gone"):
        (folder / name).write_text("x")
    for name in ("moved", "made", "link"):
        assert not (folder / name).exists()
    done = python("-m", "tests.real_robot.hostile", folder, os.getpid(), how, HOME=str(folder))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_locked_process_writes_what_is_mapped_and_nothing_else(tmp_path: Path) -> None:
    for name in ("free", "locked"):
        folder = tmp_path / name
        folder.mkdir()
        Channels.make(folder, 7, 3).chunk.path.unlink()
        reader = Mailbox(folder / "chunk", REQUEST, VERSION, create=True)
        known = set(attempts(folder, os.getpid()))
        found = tried(folder, name)
        assert reader.receive() and reader.fields["number"][0] == 7, "what is mapped, is written"
        assert not found["missing"] and found["read"] > 100
        if name == "locked":
            assert found["found"] == []
            assert (folder / "mine").read_text() == "x" and not (folder / ".hostile").exists()
        else:
            # What a container may forbid anyway.
            assert known - set(found["found"]) <= {"trace it", "make memory a program's"}
            assert "open a socket" in found["found"]


def test_a_hostile_policy_is_refused_and_the_arm_goes_on(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    node = {"_target_": "tests.real_robot.hostile.Hostile", "folder": str(folder)}
    allow("tests")
    made = simulated(tmp_path, node, allow=("tests",))
    with bridging(folder, made) as bridge:
        pressed = bridge.running()["estop"]

        def said() -> str | None:
            log = (folder / "policy.log").read_text()
            assert not (died := [n for n in bridge.status["notes"] if "died" in n]), died
            return log.partition("hostile: ")[2].strip() or None

        assert json.loads(until(said, "it tried")) == []
        assert "not locked" not in (folder / "policy.log").read_text()
        before = bridge.status["policy"]["number"]
        until(lambda: bridge.status["policy"]["number"] > before, "it decides on")
        status = bridge.status
        assert status["mode"] == "RUNNING" and not status["fault"]
        assert status["estop"] == pressed
        assert not any("not locked" in note for note in status["notes"])
        bridge.done(Verb.STOP)


def test_what_is_not_in_force_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockdown, "_version", lambda: 0)
    assert lockdown.missing() == f"Landlock is {lockdown.NONE}"
    monkeypatch.setattr(lockdown.seccomp, "unavailable", lambda: "not available on plan9")
    assert "; seccomp is not available on plan9" in lockdown.missing()
