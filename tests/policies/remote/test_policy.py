"""RemotePolicy: equal to the policy that is served, and one line for what does not fit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from embodied.core import build as core_build
from embodied.core import checkpoint
from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build
from embodied.core.errors import RemoteError
from embodied.core.policy import Policy
from embodied.core.spec import SYMBOL, Leaf, Spec, SpecMismatch
from embodied.policies.remote.address import allow_typed, is_address, remote_policy
from embodied.policies.steering.dsrl import Dsrl
from embodied.policies.steering.residual import Residual
from embodied.policies.steering.steered import Steered
from embodied.serve.policy_service import PolicyService
from embodied.serve.server import Server
from tests.builders import node_of, python
from tests.policies.remote.servers import Process, free_port, stock
from tests.tiers import usually

ACT = Leaf((2,), low=-1.0, high=1.0, names=("x", "y"))
SPEC = Spec({"state": Leaf((3,), unit="m"), "critic/mass": Leaf((1,))}, ACT, dt=0.1, text="go")
SEEN = Spec(
    {"front": Leaf((24, 32, 3), "uint8"), "turn": Leaf((), "int64", 0, 3, unit="symbol")},
    ACT,
    dt=0.1,
)
FLOW = {"_target_": "embodied.policies.generative.flow.Flow", "chunk": 4, "width": 16}
INNER = {"_target_": "embodied.policies.gaussian.Gaussian", "hidden": [8]}
DSRL = {"_target_": "embodied.policies.steering.dsrl.Dsrl"}
NODES: dict[str, dict[str, Any]] = {
    "flow": FLOW,
    "diffusion": node_of("policies.generative.diffusion.Diffusion", chunk=4, width=16),
    "gaussian": INNER,
    "chunking": node_of(
        "policies.wrappers.real_time_chunking.RealTimeChunking", base=FLOW, delay=1
    ),
    "residual": node_of("policies.steering.residual.Residual", base=FLOW, inner=INNER),
    "dsrl": {**DSRL, "base": FLOW, "inner": INNER},
    "past": {**FLOW, "obs_steps": 3},
}


@pytest.fixture(autouse=True)
def typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line named a server."""
    monkeypatch.setattr(core_build, "ASKED", [])
    monkeypatch.delenv("EMBODIED_TOKEN", raising=False)
    allow_typed(["init=ws://127.0.0.1:1"])


def policy_of(name: str, spec: Spec = SPEC) -> Policy:
    torch.manual_seed(0)
    return build(NODES[name], Policy, spec=spec).eval()


def served(policy: Policy) -> Server:
    return Server(PolicyService(policy), port=0)


@pytest.fixture
def flow() -> Iterator[tuple[Policy, str]]:
    policy = policy_of("flow")
    with served(policy) as server:
        yield policy, server.url


def observations(spec: Spec, n: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(n)
    made = {"critic/mass": torch.randn(n, 1), "state": torch.randn(n, 3)}
    made |= {"front": torch.randint(256, (n, 24, 32, 3)).to(torch.uint8)}
    made |= {"turn": torch.randint(4, (n,))}
    return {name: made[name] for name in spec.obs}


@pytest.mark.parametrize("spec", [SPEC, SEEN], ids=["numbers", "pictures"])
@pytest.mark.parametrize("name", NODES)
def test_episodes_over_the_wire_equal_those_in_process(name: str, spec: Spec) -> None:
    """Whole episodes of five environments with their own resets: noise, carry and plans too."""
    here = policy_of(name, spec)
    with served(here) as server:
        there = remote_policy(server.url, spec)
        assert there.chunk == here.chunk and there.spec == here.spec
        assert there.noise_steps == here.noise_steps
        acted: list[torch.Tensor] = []
        for policy in (here, there):
            torch.manual_seed(1)
            actor = Actor(policy, 5, execute=min(2, policy.chunk))
            obs = [observations(spec, 5) for _ in range(9)]
            first = [torch.rand(5) < 0.2 for _ in range(9)]
            acted.append(torch.stack([actor(o, f) for o, f in zip(obs, first, strict=True)]))
        assert torch.equal(*acted)


def test_a_policy_of_several_tasks_is_told_by_the_prompt(tmp_path: Path) -> None:
    which = Leaf((), "int64", 0, 1, SYMBOL)
    here = policy_of("flow", replace(SPEC.with_obs(instruction=which), tasks=("go", "stop")))
    obs, noise = observations(SPEC, 3), torch.randn(3, 8)
    with served(here) as server:
        with pytest.raises(ConfigError, match=r"to do: policy\.prompt='go' or 'stop'"):
            remote_policy(server.url, SPEC)
        file = tmp_path / "server.yaml"
        file.write_text(yaml.safe_dump({"url": server.url, "prompt": "stop"}))
        there = remote_policy(str(file), SPEC)
        acted = there.act(obs, there.initial(3), noise)[0]
    for number, same in ((1, True), (0, False)):
        seen = {**obs, "instruction": torch.full((3,), number)}
        assert torch.allclose(acted, here.act(seen, {}, noise)[0], atol=1e-6) == same


PROGRAM = """
import sys
from embodied.policies.remote.address import allow_typed, remote_policy
allow_typed([f"init={sys.argv[1]}"])
policy = remote_policy(sys.argv[1])
print(policy.chunk)
"""


def test_a_program_with_a_remote_policy_ends(flow: tuple[Policy, str]) -> None:
    """Also where the policy is a module's own, which is deleted when threads no longer run."""
    done = python("-c", PROGRAM, flow[1])
    assert done.returncode == 0 and done.stdout == "4\n" and not done.stderr, done.stderr


def test_copies_share_a_connection_and_features_are_those_of_the_encoder(
    flow: tuple[Policy, str],
) -> None:
    here, url = flow
    there, obs = remote_policy(url, SPEC), observations(SPEC, 6)
    for twin in (copy.deepcopy(there), remote_policy(url, SPEC)):
        assert twin.connection is there.connection
    assert there.feature_size == here.feature_size == 3
    assert torch.equal(there.features(obs), here.features(obs))
    state = torch.random.get_rng_state()
    there.require_noise()  # accepts a server that follows the noise, and draws none from torch
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("kind", [Dsrl, Residual])
def test_a_served_base_is_steered_as_one_in_process(
    kind: type[Steered], flow: tuple[Policy, str]
) -> None:
    node = {"_target_": f"{kind.__module__}.{kind.__name__}"}
    bases = flow[0], remote_policy(flow[1], SPEC)
    here, there = (kind.wrap(base, node, INNER).eval() for base in bases)
    there.inner.load_state_dict(here.inner.state_dict())
    acted: list[torch.Tensor] = []
    for policy in (here, there):
        torch.manual_seed(1)
        actor = Actor(policy, 5)
        first = torch.ones(5, dtype=torch.bool)
        acted.append(torch.stack([actor(observations(SPEC, 5), first) for _ in range(3)]))
    assert torch.allclose(*acted, atol=1e-6)


def test_a_steered_checkpoint_is_small_and_names_the_policy_that_it_steers(
    flow: tuple[Policy, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = {"_target_": "embodied.policies.steering.dsrl.Dsrl", "bound": 1.5}
    steered = Dsrl.wrap(remote_policy(flow[1], SPEC), node, INNER)
    folder = checkpoint.save(tmp_path / "0", steered, 0)
    assert not any(name.startswith("base.") for name in steered.state_dict())
    saved = yaml.safe_load((folder / "policy.yaml").read_text())["base"]
    assert len(saved["policy_hash"]) == 64 and "token" not in saved
    assert checkpoint.load_policy(folder).chunk == 4
    monkeypatch.setattr(core_build, "ASKED", [])
    with pytest.raises(ConfigError, match=r'allow=\["embodied.policies.remote"\]'):
        checkpoint.load_policy(folder)
    with pytest.raises(ConfigError, match=r'allow=\["embodied.policies.remote"\]'):
        remote_policy(flow[1], SPEC)


@pytest.mark.parametrize(
    ("spec", "settings", "line"),
    [
        (SPEC.with_obs(more=Leaf((1,))), {}, "obs/more: float32.* | absent"),
        (SPEC.with_act(Leaf((5,), low=-1.0, high=1.0)), {}, "act: "),
        (SPEC.with_obs(state=Leaf((3,), unit="mm")), {}, r"state is in mm here and in m at ws://"),
        (SPEC, {"chunk": 8}, r"sends 4 actions, not 8: policy.chunk=4"),
        (SPEC, {"mapping": {"obs": {"state": "joints"}}}, "has no observation joints"),
        (SPEC, {"mapping": {"observations": {}}}, 'no setting "observations"'),
        (SPEC, {"token_file": "/nowhere"}, "cannot be read"),
        (SPEC, {"policy_hash": "0" * 64}, "serves another policy"),
    ],
)
def test_what_does_not_fit_is_one_line(
    flow: tuple[Policy, str], spec: Spec, settings: dict[str, Any], line: str
) -> None:
    with pytest.raises((ConfigError, SpecMismatch), match=line) as caught:
        remote_policy(flow[1], spec, **settings)
    assert "\n" not in str(caught.value)


def test_elements_are_joined_by_the_names_that_the_server_says(flow: tuple[Policy, str]) -> None:
    here, url = flow
    there = remote_policy(url, replace(SPEC, act=replace(ACT, names=("y", "x"))))
    obs, noise = observations(SPEC, 3), here.sample_noise(3)
    got, wanted = (policy.act(obs, policy.initial(3), noise)[0] for policy in (there, here))
    torch.testing.assert_close(got, wanted.flip(-1))
    with pytest.raises(ConfigError, match="the action is a, b here and x, y there: write"):
        remote_policy(url, replace(SPEC, act=replace(ACT, names=("a", "b"))))


def test_units_and_names_are_converted_by_a_mapping_in_past_observations_too() -> None:
    here = policy_of("past")
    spec = Spec({"joints": Leaf((3,), unit="mm"), "critic/mass": Leaf((1,))}, ACT, dt=0.1)
    mapping = {
        "obs": {"joints": {"name": "state", "scale": 1000.0, "offset": 5.0}},
        "action": {"low": [-2.0, -1.0], "high": [2.0, 3.0]},
    }
    with served(here) as server:
        there = remote_policy(server.url, spec, mapping=mapping)
        assert there.initial(2)["history/joints"].shape == (2, 2, 3)
        acted: list[torch.Tensor] = []
        for policy, name, scale, offset in ((here, "state", 1, 0), (there, "joints", 1000, 5)):
            torch.manual_seed(1)
            actor = Actor(policy, 4, execute=2)
            seen = [torch.randn(4, 3) for _ in range(6)]
            obs = [{name: scale * each + offset, "critic/mass": torch.zeros(4, 1)} for each in seen]
            first = [torch.rand(4) < 0.2 for _ in seen]
            acted.append(torch.stack([actor(o, f) for o, f in zip(obs, first, strict=True)]))
        wanted = (acted[0] - torch.tensor([0.0, 1.0])) / 2
        torch.testing.assert_close(acted[1], wanted, atol=1e-5, rtol=0)


class Stock:
    """A policy of another project: state and prompt in, six actions out, its own noise."""

    def __init__(self, scale: float = 0.5, follows: bool = False, length: int = 6) -> None:
        self.scale, self.follows, self.length = scale, follows, length
        self.seen: list[dict[str, Any]] = []
        self.random = np.random.default_rng(0)

    def __call__(self, obs: dict[str, Any]) -> dict[str, Any]:
        self.seen.append(obs)
        noise = self.random.normal(size=(self.length, 2))
        if self.follows:
            noise = obs["noise"].astype(float)
        start = obs["observation/state"][:2].astype(float)
        return {"actions": np.tanh(start + noise) * self.scale}


STOCK = {"mapping": {"obs": {"state": "observation/state"}}}


def test_a_stock_server_is_asked_row_by_row_and_offers_no_noise() -> None:
    policy = Stock()
    with stock(policy) as url:
        there = remote_policy(url, SPEC, **STOCK, prompt="pick the cube")
        obs = observations(SPEC, 20)
        actions = there.act(obs, there.initial(20), there.sample_noise(20))[0]
        assert actions.shape == (20, 6, 2) and actions.dtype == torch.float32
        assert there.sample_noise(3).shape == (3, 0) and there.initial(2) == {}
        assert set(policy.seen[-1]) == {"observation/state", "prompt"}
        asked = np.stack([each["observation/state"] for each in policy.seen[-20:]])
        np.testing.assert_array_equal(asked, obs["state"].numpy())
        with pytest.raises(ConfigError, match=r"does not offer the noise.*openpi_wrapper") as said:
            Dsrl.wrap(there, DSRL, INNER)
        assert "\n" not in str(said.value)
        with pytest.raises(ConfigError, match="offers no features"):
            there.features(obs)


def offering(shape: tuple[int, ...]) -> dict[str, Any]:
    return {"embodied": {"version": 1, "noise": {"shape": list(shape), "normal": True}}}


def test_a_base_without_a_hash_is_known_by_its_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a VLA behind openpi's server: weights of 1.3 times the size are another policy."""
    policy = Stock(follows=True)
    with stock(policy, offering((6, 2))) as url:
        steered = Dsrl.wrap(remote_policy(url, SPEC, **STOCK), DSRL, INNER)
        folder = checkpoint.save(tmp_path / "0", steered, 0)
        saved = yaml.safe_load((folder / "policy.yaml").read_text())["base"]
        assert len(saved["fingerprint"]) == 3 * 2 * 2 and "policy_hash" not in saved
        assert checkpoint.load_policy(folder).chunk == 6
        policy.scale *= 1.3
        with pytest.raises(ConfigError, match=r"another policy than this run .*fixed observations"):
            checkpoint.load_policy(folder)
    assert not capsys.readouterr().err
    with stock(Stock()) as url:  # with noise of its own
        there = remote_policy(url, SPEC, **STOCK)
        assert there.node["fingerprint"] is None
        assert "cannot tell another one" in capsys.readouterr().err


@pytest.mark.parametrize("hashed", usually([False], [True, False]))
def test_a_server_that_is_back_with_another_policy_is_refused(
    hashed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the middle of a run and started again: with the same weights it goes on, with 1.3
    times the weights it does not, although it says no hash."""
    policy, port, token = policy_of("flow"), free_port(), tmp_path / "token"
    first = checkpoint.save(tmp_path / "0", policy, 0)
    with torch.no_grad():
        for weight in policy.parameters():
            weight *= 1.3
    other = checkpoint.save(tmp_path / "1", policy, 0)
    server = Process(first, port, token, hashed).ready()
    try:
        if hashed:
            monkeypatch.setenv("EMBODIED_TOKEN", token.read_text().strip())
        there = remote_policy(server.url, SPEC)
        assert ("policy_hash" in there.node) == hashed != ("fingerprint" in there.node)
        obs, noise = observations(SPEC, 2), torch.randn(2, 8)
        acted = there.act(obs, {}, noise)[0]
        for run, same in ((first, True), (other, False)):
            server.kill()
            server = Process(run, port, token, hashed)
            if same:
                assert torch.equal(there.act(obs, {}, noise)[0], acted)
            for _ in range(0 if same else 2):
                with pytest.raises(RemoteError, match="serves another policy than before"):
                    there.act(obs, {}, noise)
    finally:
        server.kill()


def test_a_server_that_promises_noise_and_ignores_it_is_found_out() -> None:
    with stock(Stock(), offering((6, 2))) as url:
        there = remote_policy(url, SPEC, **STOCK)
        with pytest.raises(ConfigError, match=r"ignores the noise.*openpi_wrapper.py"):
            Dsrl.wrap(there, DSRL, INNER)
    wanted = pytest.raises(ConfigError, match="does not depend on its noise")
    with stock(lambda obs: {"actions": np.zeros((6, 2))}, offering((6, 2))) as url, wanted:
        Dsrl.wrap(remote_policy(url, SPEC, **STOCK), DSRL, INNER)
    with stock(Stock(follows=True), offering((6, 2))) as url:
        steered = Dsrl.wrap(remote_policy(url, SPEC, **STOCK), DSRL, INNER)
        assert steered.noise_shape == (6, 2)


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        ({"actions": np.full((6, 2), 80.0)}, r"as large as 80.*policy.mapping.action"),
        ({"actions": np.zeros((6, 7))}, r"actions of \[7\] numbers"),
        ({"actions": np.zeros(2)}, "numbers"),
        ({"actions": np.full((6, 2), np.nan)}, "numbers"),
        ({"action": np.zeros((6, 2))}, "no server of actions"),
        ({"actions": "none"}, "no array of numbers"),
    ],
)
def test_answers_that_are_no_actions_are_one_line(answer: dict[str, Any], line: str) -> None:
    with stock(lambda obs: answer) as url:
        with pytest.raises((ConfigError, RemoteError), match=line) as caught:
            remote_policy(url, SPEC, **STOCK)
        assert "\n" not in str(caught.value)


def test_a_missing_key_and_a_chunk_of_another_length_are_said() -> None:
    with stock(Stock()) as url, pytest.raises(RemoteError, match="KeyError: 'observation/state'"):
        remote_policy(url, SPEC)
    policy = Stock()
    with stock(policy) as url:
        there = remote_policy(url, SPEC, **STOCK)
        policy.length = 5
        with pytest.raises(RemoteError, match=r"actions of shape \[5, 2\], not \[6, 2\]"):
            there.act(observations(SPEC, 1), {}, there.sample_noise(1))


@pytest.mark.parametrize(
    "metadata",
    [
        {"embodied": {"version": 99}},
        {"embodied": "yes"},
        {"embodied": {"version": 1, "noise": {"shape": [-1]}}},
        {"embodied": {"version": 1, "chunk": "many"}},
        {"embodied": {"version": 1, "noise": 3}},
    ],
)
def test_metadata_of_another_kind_are_one_line(metadata: dict[str, Any]) -> None:
    with stock(Stock(), metadata) as url:
        with pytest.raises(ConfigError, match=r"another version|metadata are damaged") as caught:
            remote_policy(url, SPEC, **STOCK)
        assert "\n" not in str(caught.value)


def test_a_yaml_file_says_what_a_stock_server_does_not(tmp_path: Path) -> None:
    file = tmp_path / "vla.yaml"
    with stock(Stock()) as url:
        state = {"shape": [3], "names": ["q1", "q2", "q3"]}
        node = {"url": url, **STOCK, "prompt": "go"}
        spec = {"obs": {"state": state}, "act": {"shape": [2]}, "dt": 0.1}
        file.write_text(yaml.safe_dump({**node, "spec": spec}))
        assert is_address(str(file)) and not is_address(str(tmp_path))
        there = remote_policy(str(file))
        assert there.spec.obs["state"].names == ("q1", "q2", "q3") and there.chunk == 6
        file.write_text(yaml.safe_dump({**node, "spec": {"obs": {}}}))
        with pytest.raises(ConfigError, match="spec should be"):
            remote_policy(str(file))
        file.write_text(yaml.safe_dump(node))
        with pytest.raises(ConfigError, match="does not say what its policy observes"):
            remote_policy(str(file))
        file.write_text("- 1\n")
        with pytest.raises(ConfigError, match="should say `url"):
            remote_policy(str(file))
