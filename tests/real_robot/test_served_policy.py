"""A policy on a server moves an arm: as one in process does, and safely when the server is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied.core import build as core_build
from embodied.core import checkpoint
from embodied.core.build import ConfigError, allow, build
from embodied.core.policy import Policy
from embodied.policies.remote.address import PACKAGE, remote_policy
from embodied.real_robot.daemon.requests import Verb
from embodied.real_robot.ipc.messages import Command, Mode
from embodied.serve.policy_service import PolicyService
from embodied.serve.server import Server
from tests.policies.remote.servers import Process, free_port
from tests.real_robot.test_daemon import SCRIPT, bridging, simulated
from tests.real_robot.test_decide import SPEC, Arm
from tests.real_robot.test_deploy import said, start

FLOW = {"_target_": "embodied.policies.generative.flow.Flow", "chunk": 8, "width": 8}
CHUNKING = {
    "_target_": "embodied.policies.wrappers.real_time_chunking.RealTimeChunking",
    "base": FLOW,
    "delay": 0,
}


@pytest.fixture(autouse=True)
def typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_build, "ASKED", [])
    allow(PACKAGE)


def made(node: dict[str, Any]) -> Policy:
    torch.manual_seed(0)
    return build(node, Policy, spec=SPEC).eval()


@pytest.mark.parametrize("node", [SCRIPT, CHUNKING], ids=["script", "real-time chunking"])
def test_its_chunks_are_stamped_and_followed_as_those_in_process(
    tmp_path: Path, node: dict[str, Any]
) -> None:
    here = made(node)
    with Server(PolicyService(made(node)), port=0) as server:
        there = remote_policy(server.url)
        arms = [Arm(tmp_path / "here", here), Arm(tmp_path / "there", there)]
        for arm in arms:
            torch.manual_seed(1)
            arm.runs()
            arm.run(100)
    assert (arms[0].decider.alignment is None) == (node is SCRIPT)
    for chunk, other in zip(arms[0].chunks, arms[1].chunks, strict=True):
        for name in ("number", "seen", "start", "steps", "actions", "noise"):
            np.testing.assert_array_equal(chunk[name], other[name], name)
    sent = [arm.bench.there.state.fields[0]["sent"] for arm in arms]
    np.testing.assert_array_equal(*sent)
    assert np.ptp([chunk["actions"] for chunk in arms[0].chunks]) > 0.1, "it moves"


def test_a_lost_server_brings_the_arm_to_rest_and_a_reset_goes_on_when_it_is_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = PolicyService(made(SCRIPT))
    server = Server(service, port=0).start()
    arm = Arm(tmp_path, remote_policy(server.url, wait=0.0, timeout=20.0))
    arm.runs()
    arm.run(50)
    assert all(arm.decided)
    arm.decided.clear()
    server.close()
    for _ in range(400):
        arm.run(10)
        if arm.bench.control.mode == Mode.ESTOP:
            break
    assert arm.bench.control.mode == Mode.ESTOP, "it latches"
    assert "the policy's last observation is" in arm.bench.control.fault
    assert not any(arm.decided)
    arm.run(400)
    rests = arm.bench.driver.read().q.copy()
    arm.run(100)
    np.testing.assert_allclose(arm.bench.driver.read().q, rests, atol=1e-3)

    with Server(service, port=server.port):
        arm.run(20)
        assert arm.decided[-1] and arm.bench.control.mode == Mode.ESTOP, "nothing clears itself"
        assert arm.obey(Command.RESET) == Mode.IDLE
        arm.runs()
        arm.run(300)
        assert arm.bench.control.mode == Mode.RUNNING, arm.bench.control.fault
        assert np.abs(arm.bench.driver.read().q - rests).max() > 0.01, "it moves again"
    told = capsys.readouterr().out
    assert told.count("is lost") == 1 and told.count("the server is back") == 1


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.save(tmp_path_factory.mktemp("run") / "0", made(SCRIPT), 0)


@pytest.fixture
def server(script: Path, tmp_path: Path) -> Iterator[Process]:
    process = Process(script, free_port(), tmp_path / "token").ready()
    yield process
    process.process.kill()


def test_the_processes_go_on_after_a_reset_when_a_killed_server_is_back(
    server: Process, script: Path, tmp_path: Path, folder: Path
) -> None:
    asking = remote_policy(server.url, wait=0.0, token_file=str(server.token))
    policy = str(checkpoint.save(tmp_path / "asking", asking, 0))
    with bridging(folder, simulated(tmp_path, policy=policy, served=True)) as bridge:
        pid = bridge.running()["policy"]["pid"]
        server.kill()
        status = bridge.mode("ESTOP")
        assert "the policy's last observation is" in status["fault"]
        assert status["control"]["pid"], "the arm is held"
        server.process = Process(script, int(server.url.rpartition(":")[2]), server.token).process
        Process.ready(server)
        bridge.done(Verb.RESET)
        assert bridge.running()["policy"]["pid"] and pid


def test_deploy_takes_an_address_where_it_takes_a_run(
    server: Process, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBODIED_TOKEN", server.token.read_text().strip())
    file = tmp_path / "server.yaml"
    file.write_text(f"url: {server.url}\ntoken_file: {server.token}\n")
    words = ("robot=sim", f"policy={file}", "robot.driver.world.task=reach")
    deploy = start(tmp_path, folder, *words, "episodes=1")
    text = said(deploy)
    assert deploy.returncode == 0, text
    assert "RemotePolicy" in text and "server        decides in" in text
    assert json.loads((tmp_path / "out/summary.json").read_text())["successes"] == 1, text

    server.kill()
    (tmp_path / "second").mkdir()
    refused = start(tmp_path / "second", folder, *words)
    text = said(refused)
    assert refused.returncode == 2 and "nothing answers at ws://" in text
    assert len([line for line in text.splitlines() if line.startswith("embodied:")]) == 1


def test_a_file_that_names_a_server_is_not_believed(
    server: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither `embodied robot load` nor a run that came with data reaches an address by itself."""
    asking = remote_policy(server.url, token_file=str(server.token))
    folder = checkpoint.save(tmp_path / "asking", asking, 0)
    monkeypatch.setattr(core_build, "ASKED", [])
    with pytest.raises(ConfigError, match="reaches beyond this process"):
        checkpoint.load_policy(folder)
