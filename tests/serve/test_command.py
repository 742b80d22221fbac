"""`embodied serve` and `embodied eval ADDRESS` as a user types them."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from embodied import cli
from embodied.commands import serve
from embodied.commands.eval import evaluate_served
from embodied.core import build as core_build
from embodied.core import checkpoint
from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import SpecMismatch
from embodied.envs.toy.two_gap import Config, TwoGap
from embodied.evaluation.evaluate import evaluate
from embodied.policies.remote.address import allow_typed
from embodied.serve import access
from embodied.serve.client import Client

FLOW = {"_target_": "embodied.policies.generative.flow.Flow", "chunk": 4, "width": 16}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(access.VARIABLE, raising=False)
    monkeypatch.setattr(core_build, "ASKED", [])
    torch.manual_seed(0)
    policy = build(FLOW, Policy, spec=TwoGap(Config(num_envs=1)).spec)
    checkpoint.save(tmp_path / "run" / "checkpoints" / "00000000", policy, 0)
    return tmp_path / "run"


def line(*words: str) -> str:
    args = cli.parse(list(words))
    with pytest.raises(Exception) as caught:
        args.run(args)
    said = cli.mistake(caught.value)
    assert said is not None and "\n" not in said, repr(caught.value)
    return said


def free_port() -> int:
    with socket.socket() as wire:
        wire.bind(("127.0.0.1", 0))
        return wire.getsockname()[1]


def test_it_says_what_is_served_and_needs_its_token(run: Path) -> None:
    _, settings = serve.parsed([str(run), f"port={free_port()}"])
    policy = checkpoint.load_policy(run)
    with serve.serving(policy, settings) as server:
        said = "\n".join(serve.lines(policy, run, server, settings))
        assert "chunks of 4, normal noise [8], 2 features" in said and server.url in said
        assert str(access.token_file(settings.port)) in said and "not encrypted" not in said
        token = access.read_token(access.token_file(settings.port))
        assert token not in said
        with Client(server.url, token) as client:
            assert client.metadata["embodied"]["chunk"] == 4


def test_another_address_has_a_token_and_a_warning(run: Path) -> None:
    words = [str(run), "host=0.0.0.0", f"port={free_port()}", "token=false"]
    with pytest.raises(ConfigError, match="needs a token"):
        serve.serving(checkpoint.load_policy(run), serve.parsed(words)[1])
    settings = serve.parsed(words[:-1])[1]
    server = serve.serving(checkpoint.load_policy(run), settings)
    assert "not encrypted" in "\n".join(serve.lines(server.service.policy, run, server, settings))  # pyright: ignore


def test_an_evaluation_over_the_wire_is_that_in_process(run: Path) -> None:
    _, settings = serve.parsed([str(run), f"port={free_port()}"])
    policy = checkpoint.load_policy(run)
    words = ["env=two_gap", "episodes=8", "num_envs=4", "policy.timeout=60"]
    with serve.serving(policy, settings) as server:
        allow_typed([server.url])
        row = evaluate_served(server.url, words, [])
    result = evaluate(policy, TwoGap(Config(num_envs=4)), 8, 10_000)
    assert row["return"] == result.returns.mean().item() and row["episodes"] == 8
    assert row["length"] == result.lengths.float().mean().item()
    assert json.dumps(row)


def test_an_evaluation_over_the_wire_takes_a_mapping(run: Path, tmp_path: Path) -> None:
    spec = TwoGap(Config(num_envs=1)).spec
    other = replace(spec, obs={"place": spec.obs["state"]})
    policy, file = build(FLOW, Policy, spec=other), tmp_path / "names.yaml"
    file.write_text("obs: {state: place}\naction: {low: [-1, -1], high: [1, 1]}\n")
    words = ["env=two_gap", "episodes=2", "num_envs=2", "policy.timeout=60"]
    _, settings = serve.parsed([str(run), f"port={free_port()}"])
    with serve.serving(policy, settings) as server:
        allow_typed([server.url])
        with pytest.raises(SpecMismatch, match=r"obs/place: absent .* mapping=FILE"):
            evaluate_served(server.url, words, [])
        row = evaluate_served(server.url, [*words, f"mapping={file}"], [])
    assert row["episodes"] == 2


def test_mistakes_are_one_line(run: Path, tmp_path: Path) -> None:
    assert "name the run to serve" in line("serve")
    assert 'no setting "prt" (did you mean "port"?)' in line("serve", str(run), "prt=1")
    assert "port=70000 should be at least 0, at most 65535" in line("serve", str(run), "port=70000")
    assert "message_mb" in line("serve", str(run), "message_mb=0")
    assert "holds no checkpoint" in line("serve", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "cannot listen at ws://" in line("serve", str(run), f"port={port}", "device=cpu")
    assert "env=NAME" in line("eval", "ws://127.0.0.1:1")
    assert "nothing answers at ws://127.0.0.1:1 " in line("eval", "ws://127.0.0.1:1", "env=two_gap")
    address = "init=ws://127.0.0.1:1"
    assert "nothing answers" in line("train", "experiment=two_gap_dsrl", address, "size=debug")
