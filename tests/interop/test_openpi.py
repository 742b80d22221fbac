"""openpi's real client asks our server, and our client a server of openpi's own parts.

The package openpi-client holds the client and the packing of arrays; the server that is used here
is written from openpi's protocol with that packing (openpi itself needs JAX and its checkpoints).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch

from tests.interop import need

need("openpi_client")

from openpi_client import base_policy, msgpack_numpy  # noqa: E402
from openpi_client.websocket_client_policy import WebsocketClientPolicy  # noqa: E402

from embodied.core import build as core_build  # noqa: E402
from embodied.core.build import ConfigError, build  # noqa: E402
from embodied.core.policy import Policy  # noqa: E402
from embodied.core.spec import Leaf, Spec  # noqa: E402
from embodied.policies.remote.address import allow_typed, remote_policy  # noqa: E402
from embodied.policies.steering.dsrl import Dsrl  # noqa: E402
from embodied.serve import protocol  # noqa: E402
from embodied.serve.openpi_wrapper import Steerable  # noqa: E402
from embodied.serve.policy_service import PolicyService  # noqa: E402
from embodied.serve.server import Server  # noqa: E402
from tests.policies.remote.servers import stock  # noqa: E402

SPEC = Spec(
    {"state": Leaf((7,)), "image": Leaf((64, 64, 3), "uint8")},
    Leaf((6,), low=-1.0, high=1.0),
    dt=0.05,
)
FLOW = {"_target_": "embodied.policies.generative.flow.Flow", "chunk": 5, "width": 16}
MAPPING = {"obs": {"state": "observation/state", "image": "observation/image"}}
TOKEN = "a token of more than sixteen letters"
HORIZON, WIDE = 10, 8  # the model's action is wider than the robot's


@pytest.fixture(autouse=True)
def typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_build, "ASKED", [])
    monkeypatch.delenv("EMBODIED_TOKEN", raising=False)
    allow_typed(["init=ws://127.0.0.1:1"])


def observation() -> dict[str, Any]:
    random = np.random.default_rng(0)
    image = random.integers(0, 256, (64, 64, 3), dtype=np.uint8)
    return {"state": random.normal(size=7).astype(np.float32), "image": image}


def test_arrays_are_packed_as_openpi_packs_them() -> None:
    message = {**observation(), "prompt": "pick", "deep": {"x": np.float32(1.5), "y": [1, None]}}
    for there in (
        msgpack_numpy.unpackb(protocol.encode(message)),
        protocol.decode(msgpack_numpy.packb(message)),
    ):
        np.testing.assert_array_equal(there["state"], message["state"])
        np.testing.assert_array_equal(there["image"], message["image"])
        assert there["image"].dtype == np.uint8 and there["prompt"] == "pick"
        assert there["deep"]["x"] == np.float32(1.5) and there["deep"]["y"] == [1, None]


def test_openpis_client_asks_our_server() -> None:
    torch.manual_seed(0)
    policy = build(FLOW, Policy, spec=SPEC).eval()
    with Server(PolicyService(policy), port=0, token=TOKEN) as server:
        client = WebsocketClientPolicy("127.0.0.1", server.port, api_key=TOKEN)
        assert client.get_server_metadata()["embodied"]["chunk"] == 5
        torch.manual_seed(3)
        answer = client.infer({**observation(), "prompt": "pick the cube"})
        assert answer["actions"].shape == (5, 6) and answer["server_timing"]["infer_ms"] > 0
        torch.manual_seed(3)
        obs = {name: torch.tensor(value)[None] for name, value in observation().items()}
        wanted = policy.act(obs, {}, policy.sample_noise(1))[0][0]
        np.testing.assert_array_equal(answer["actions"], wanted.detach().numpy())
        noise = np.ones(30, np.float32)
        same = [client.infer({**observation(), "noise": noise})["actions"] for _ in range(2)]
        np.testing.assert_array_equal(*same)
        with pytest.raises(RuntimeError, match="the observation state is missing"):
            client.infer({"image": observation()["image"]})
        assert client.infer(observation())["actions"].shape == (5, 6), "it goes on"
        with pytest.raises(Exception, match="401"):
            WebsocketClientPolicy("127.0.0.1", server.port, api_key="wrong")


class Pi(base_policy.BasePolicy):
    """A policy with openpi's interface: `infer(obs, *, noise=None)`; its transforms drop keys."""

    metadata: dict[str, Any] = {"reset_pose": [0.0] * 6}  # noqa: RUF012

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def infer(self, obs: dict[str, Any], *, noise: np.ndarray | None = None) -> dict[str, Any]:
        kept = {name: obs[name] for name in ("observation/state", "observation/image", "prompt")}
        if noise is None:
            noise = self.random.normal(size=(HORIZON, WIDE))
        assert noise.shape == (HORIZON, WIDE)
        shift = kept["observation/state"][:6] + kept["observation/image"].mean() / 256
        return {"actions": np.tanh(noise[:, :6] + shift), "state": kept["observation/state"]}


def served(policy: Any) -> AbstractContextManager[str]:
    """A server as openpi's, with its packing."""
    return stock(policy.infer, policy.metadata, msgpack_numpy.packb, msgpack_numpy.unpackb)


INNER = {"_target_": "embodied.policies.gaussian.Gaussian", "hidden": [8]}
DSRL = {"_target_": "embodied.policies.steering.dsrl.Dsrl"}


def test_our_client_asks_an_openpi_server_and_learns_no_noise_through_it() -> None:
    policy = Pi()
    with served(policy) as url:
        there = remote_policy(url, SPEC, mapping=MAPPING, prompt="pick")
        obs = {name: torch.tensor(value)[None] for name, value in observation().items()}
        rows = {name: value.expand(12, *value.shape[1:]) for name, value in obs.items()}
        actions = there.act(rows, {}, there.sample_noise(12))[0]
        assert actions.shape == (12, HORIZON, 6) and there.chunk == HORIZON
        assert not torch.equal(actions[0], actions[1]), "the server draws its own noise"
        with pytest.raises(ConfigError, match="openpi_wrapper"):
            Dsrl.wrap(there, DSRL, INNER)


@pytest.mark.parametrize("shared", [False, True])
def test_with_our_wrapper_an_openpi_server_is_steered(shared: bool) -> None:
    policy = Steerable(Pi(), HORIZON, WIDE, shared)
    assert policy.metadata["reset_pose"] == [0.0] * 6
    with served(policy) as url:
        there = remote_policy(url, SPEC, mapping=MAPPING, prompt="pick")
        steered = Dsrl.wrap(there, DSRL, INNER)
        assert steered.inner.spec.act.size == (WIDE if shared else HORIZON * WIDE)
        obs = {name: torch.tensor(value)[None] for name, value in observation().items()}
        noise = torch.randn(1, *([WIDE] if shared else [HORIZON, WIDE]))
        said = there.act(obs, {}, noise)[0]
        assert torch.equal(said, there.act(obs, {}, noise)[0])
        shift = observation()["state"][:6] + observation()["image"].mean() / 256
        wanted = np.tanh(np.broadcast_to(noise[0].numpy(), (HORIZON, WIDE))[:, :6] + shift)
        np.testing.assert_allclose(said[0].numpy(), wanted, rtol=1e-5)
