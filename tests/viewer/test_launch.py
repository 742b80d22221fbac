"""Opening the viewer: what is wrong is said in one line; Ctrl-C ends it with one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from embodied.core.build import ConfigError
from embodied.core.checkpoint import CheckpointError
from embodied.viewer import ViewerError, serve
from embodied.viewer.launch import read_run, require_port

WALKER = {"_target_": "embodied.envs.mujoco.locomotion.Locomotion", "id": "Hopper-v5"}


def one_line(caught: pytest.ExceptionInfo[Exception]) -> str:
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_taken_port_is_refused_with_one_that_is_free() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ViewerError) as caught:
            serve(None, WALKER, port=port, block=False)
        assert one_line(caught).startswith(f"port {port} is in use; try port=")
        require_port(int(str(caught.value).rpartition("=")[2]))
    with pytest.raises(ViewerError, match="between 0 and 65535"):
        require_port(70000)
    with pytest.raises(ViewerError, match=r"host=192\.0\.2\.7 is not an address of this machine"):
        require_port(0, "192.0.2.7")


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ViewerError, match="is not a folder"):
        serve(tmp_path / "nowhere", port=0, block=False)
    with pytest.raises(CheckpointError) as caught:
        serve(tmp_path, port=0, block=False)
    assert "holds no checkpoint" in one_line(caught)
    with pytest.raises(ViewerError, match="nothing to view"):
        serve(port=0, block=False)


def test_a_run_without_its_configuration_needs_an_environment(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "00000010"
    folder.mkdir(parents=True)
    (folder / "about.json").write_text("{}")
    (folder / "policy.yaml").write_text("{}")
    with pytest.raises(ViewerError, match=r"has no run\.yaml"):
        read_run(tmp_path)
    assert read_run(tmp_path, WALKER).chosen == folder
    (tmp_path / "run.yaml").write_text("env: [")
    with pytest.raises(ViewerError) as caught:
        read_run(tmp_path)
    assert "is not YAML" in one_line(caught)
    (tmp_path / "run.yaml").write_text(
        "env: {_target_: embodied.envs.gym.Gym, id: Hopper-v5}\nexecute: 3"
    )
    opened = read_run(folder)
    assert (opened.execute, opened.checkpoints) == (3, (folder,))


def test_a_wrong_environment_leaves_no_server(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        serve(None, WALKER | {"horizn": 3}, port=0, block=False)
    assert (error.value.key, error.value.hint) == ("horizn", "horizon")


def test_without_viser_the_line_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "viser", None)
    for name in ("viewer", "page", "scene", "plots"):
        monkeypatch.delitem(sys.modules, f"embodied.viewer.{name}", raising=False)
    with pytest.raises(ViewerError, match=r"pip install 'embodied-rl\[view\]'"):
        serve(None, WALKER, port=0, block=False)


def test_ctrl_c_ends_with_one_line(tmp_path: Path) -> None:
    code = f"from embodied.viewer import serve; serve(None, {WALKER}, port=0)"
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": root},
        # A shell that runs the tests in the background has its children ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        first = process.stdout.readline()
        assert first.startswith("viewing ") and " at http://127.0.0.1:" in first
        assert process.stdout.readline().startswith("ready after ")
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=600)
    finally:
        process.kill()
    assert rest.split() == ["viewer", "closed"] and process.returncode == 0
