"""Steering a served policy: equal to steering in process, also if the server is killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from embodied.commands import train as command
from embodied.core import build as core_build
from embodied.core import checkpoint
from embodied.core.build import ConfigError, build
from embodied.core.errors import ServerLost
from embodied.core.policy import Policy
from embodied.envs.toy.two_gap import Config, TwoGap
from embodied.policies.remote import connection
from embodied.policies.remote.connection import Connection
from embodied.training import components
from tests.policies.remote.servers import Process, free_port

FLOW = {"_target_": "embodied.policies.generative.flow.Flow", "chunk": 4, "width": 16}
STEPS = 160
DSRL = ["experiment=two_gap_dsrl", "size=debug", "save_every=80", "env.num_envs=4"]
DSRL.append(f"steps={STEPS}")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    policy = build(FLOW, Policy, spec=TwoGap(Config(num_envs=1)).spec)
    return checkpoint.save(tmp_path_factory.mktemp("base") / "checkpoints" / "00000000", policy, 0)


@pytest.fixture
def server(base: Path, tmp_path: Path) -> Iterator[Process]:
    process = Process(base, free_port(), tmp_path / "token").ready()
    yield process
    process.process.kill()


@pytest.fixture(autouse=True)
def same_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every run begins with the same networks and random numbers: a base that is built in process
    draws weights before it loads its own, and a served one does not."""
    monkeypatch.setattr(core_build, "ASKED", [])
    make = components.RunComponents.__init__

    def made(own: components.RunComponents, config: Any) -> None:
        make(own, config)
        torch.manual_seed(7)
        with torch.no_grad():
            for weight in own.learner.parameters():
                weight.normal_(0, 0.2)

    monkeypatch.setattr(components.RunComponents, "__init__", made)


def trained(init: str, output: Path, *more: str) -> dict[str, torch.Tensor]:
    """All that the run saved of what it learned, at its end and half-way."""
    command.train([*DSRL, f"init={init}", f"out={output}", *more])
    found: dict[str, torch.Tensor] = {}
    for folder in sorted((output / "checkpoints").glob("[0-9]*")):
        saved = load_file(folder / "policy.safetensors")
        saved |= flat(checkpoint.load_state(folder, "learner"), "learner")
        own = {k: v for k, v in saved.items() if "base." not in k and v.numel()}
        found |= {f"{folder.name}/{k}": v for k, v in own.items()}
    assert len({name.partition("/")[0] for name in found}) == 2
    return found


def flat(state: Any, name: str) -> dict[str, torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return {name: state}
    if isinstance(state, list | tuple):
        state = dict(enumerate(state))
    parts = state.items() if isinstance(state, dict) else ()
    return {k: v for key, part in parts for k, v in flat(part, f"{name}/{key}").items()}


def assert_equal(here: dict[str, torch.Tensor], there: dict[str, torch.Tensor]) -> None:
    assert here.keys() == there.keys() and len(here) > 20
    for name, value in here.items():
        assert torch.equal(value, there[name]), name


def is_decision(messages: Any) -> bool:
    """Whether a request is one of the training environments, not of the checks at the start."""
    return messages[0]["embodied"]["batch"] == 4


class Killer:
    """Kills the server at the n-th decision of the run: between two requests, or (`stopped`)
    with a request that it has received and not answered. A new one is started beside."""

    def __init__(self, server: Process, run: Path, kills: dict[int, bool]) -> None:
        self.server, self.run, self.kills, self.asked = server, run, kills, 0
        self.ask = Connection.ask

    def __call__(self, own: Connection, messages: Any) -> Any:
        self.asked += is_decision(messages)
        stopped = self.kills.pop(self.asked, None) if is_decision(messages) else None
        if stopped is False:
            self._replace()
        if stopped is True:
            os.kill(self.server.process.pid, signal.SIGSTOP)
            threading.Timer(0.5, self._replace).start()
        return self.ask(own, messages)

    def _replace(self) -> None:
        port = int(self.server.url.rpartition(":")[2])
        self.server.kill()
        self.server.process = Process(self.run, port, self.server.token).process


def test_training_over_the_wire_equals_training_in_process_also_with_kills(
    base: Path,
    server: Process,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("EMBODIED_TOKEN", server.token.read_text().strip())
    here = trained(str(base), tmp_path / "here")
    there = trained(server.url, tmp_path / "there")
    assert_equal(here, there)
    killer = Killer(server, base, {3: False, 6: True})
    monkeypatch.setattr(Connection, "ask", lambda own, messages: killer(own, messages))
    killed = trained(server.url, tmp_path / "killed")
    assert not killer.kills
    assert_equal(here, killed)
    said, warned = capsys.readouterr()
    assert warned.count("is lost") == 2 and warned.count("is back after") == 2
    assert f'eval {tmp_path / "there"} episodes=500 "allow=[embodied.policies.remote]"' in said
    size = (tmp_path / "there/checkpoints/00000160/policy.safetensors").stat().st_size
    assert size < 200_000


def test_a_server_that_stays_away_ends_the_run_with_a_checkpoint(
    base: Path, server: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(f"url: {server.url}\ntoken_file: {server.token}\nwait: 1.0\n")
    ask, asked = Connection.ask, [0]

    def dying(own: Connection, messages: Any) -> Any:
        asked[0] += is_decision(messages)
        if asked[0] == 6:
            server.kill()
        return ask(own, messages)

    monkeypatch.setattr(Connection, "ask", dying)
    monkeypatch.setattr(connection, "PAUSE", 0.1)
    with pytest.raises(ServerLost, match="waited 1 s") as lost:
        command.train([*DSRL, f"init={file}", f"out={tmp_path / 'run'}"])
    saved = checkpoint.find(tmp_path / "run")
    resume = f'embodied train resume={tmp_path / "run"} "allow=[embodied.policies.remote]"'
    assert str(lost.value).endswith(f"saved {saved}; resume with: {resume}"), "also after Ctrl-C"
    assert 0 < int(saved.name) < STEPS

    monkeypatch.setattr(core_build, "ASKED", [])  # another process, which typed no address
    with pytest.raises(ConfigError, match=r'allow=\["embodied.policies.remote"\]'):
        command.train([f"resume={tmp_path / 'run'}"])
    again = Process(base, int(server.url.rpartition(":")[2]), server.token).ready()
    try:
        command.train([f"resume={tmp_path / 'run'}", "allow=[embodied.policies.remote]"])
    finally:
        again.kill()
    assert int(checkpoint.find(tmp_path / "run").name) == STEPS
