"""RemotePolicy: a policy on another machine, asked over openpi's websocket protocol.

`act` sends the observations, the noise and the carry of all environments in one request to a server
of this project (`embodied serve`), or one observation after the other, pipelined, to any server
that speaks openpi's protocol. Such a server offers no noise: it can be evaluated, put on a robot
and corrected by a residual policy, but not steered in its noise (docs/remote.md).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from embodied.core.bounds import Count, NonNegative, Number, Positive
from embodied.core.build import ConfigError
from embodied.core.errors import RemoteError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, is_history, length
from embodied.policies.remote import checks
from embodied.policies.remote.connection import Connection
from embodied.policies.remote.translation import Translation
from embodied.serve.protocol import FEATURES, NOISE, OURS


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a policy on a server.

    `mapping` holds names and units there (`embodied.datasets.mapping`), for a server of another
    project: `{obs: {front: observation/image}, action: {low: [...], high: [...]}}`.
    """

    url: str  # ws://HOST:PORT of the server
    token_file: str | None = None  # file with its token (null: EMBODIED_TOKEN, or a local server's)
    timeout: Positive = 10.0  # longest wait for one answer, s
    wait: NonNegative = 600.0  # longest wait for a server that is lost, s (0: an error at once)
    mapping: dict[str, Any] | None = None  # names and units there (null: as here)
    prompt: str | None = None  # the task in words, sent with each observation (null: none is sent)
    chunk: Count | None = None  # actions that the server should send (null: whatever it sends)
    policy_hash: str | None = None  # SHA-256 of the served weights; a run refuses another one
    fingerprint: tuple[Number, ...] | None = None  # of a server without a hash: what it answered


class RemotePolicy(Policy):
    """A frozen policy that is asked over a network; it has no parameters here.

    Connects when it is built. ServerLost if nothing answers; ConfigError if the server's policy
    does not fit `spec`. Without `spec` it has that of the server.
    """

    def __init__(self, config: Config, spec: Spec | None = None) -> None:
        super().__init__()
        self.config = config
        self.connection = Connection.to(config.url, config.token_file, config.timeout, config.wait)
        self.offer = self.connection.offer
        checks.require_policy(self.offer, config.policy_hash, config.url)
        served = checks.served_spec(self.offer, config.url)
        if served is not None and served.listens:
            served = checks.told(served, config.prompt, config.url)
        self.spec = checks.require_fit(spec, served, config.mapping, config.url)
        self.translation = Translation.of(self.spec, config.mapping, config.prompt, served)
        self.noise_shape = (0,) if self.offer.noise is None else self.offer.noise
        self.noise_steps = self.offer.noise_steps
        self.chunk = self._probed_chunk()
        self._fingerprint: list[float] | None = None
        if self.offer.policy is None or config.fingerprint is not None:
            self._identify()

    @property
    def node(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The settings, with the hash of the policy that is served; without one, with what it
        answers to fixed observations and noise, if it answers the same twice."""
        if self.offer.policy is not None:
            return {**self._node, "policy_hash": self.offer.policy}
        return {**self._node, "fingerprint": self._known_by}

    @cached_property
    def _known_by(self) -> list[float] | None:
        """The fingerprint; where there is none, a line says so, once."""
        if self._fingerprint is None:
            print(
                f"embodied: {self.config.url} does not say which policy it serves, and does not "
                "answer the same twice: a run that uses it cannot tell another one",
                file=sys.stderr,
                flush=True,
            )
        return self._fingerprint

    def _identify(self) -> None:
        """Learn what a server without a hash answers to fixed observations and noise, by which it
        is known again. ConfigError if that is not what the run was trained with."""
        obs, noise = checks.fixed_request(self)
        carry = _arrays(self.translation.carry_there(self.initial(checks.FIXED)))
        messages = self._messages(obs, {"carry": carry}, noise)
        batch, wanted, url = self.offer.batch, self.config.fingerprint, self.config.url

        def actions(answers: list[dict[str, Any]]) -> Tensor:
            return _tensor(_joined(answers, batch, url).get("actions"))

        first, again = (actions(self.connection.ask(messages)) for _ in range(2))
        if checks.alike(again, first):
            self._fingerprint = checks.fingerprint(self._actions(first, checks.FIXED))
        if wanted is not None:
            checks.require_fingerprint(self._fingerprint, wanted, url)
            self._fingerprint = list(wanted)  # which does not drift from run to run
        if self._fingerprint is not None:
            self.connection.same = lambda client: checks.alike(
                actions(client.request_many(messages)), first
            )

    @node.setter
    def node(self, value: Mapping[str, Any]) -> None:
        self._node = dict(value)

    @property
    def feature_size(self) -> int:
        return self.offer.features

    def initial(self, n: int) -> Tensors:
        start = {name: _tensor(value) for name, value in self.offer.carry.items()}
        rows = {name: value.expand(n, *value.shape).clone() for name, value in start.items()}
        return self.translation.carry_here(rows)

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        """Noise [n, *shape]; [n, 0] if the server lets nobody choose it."""
        if self.offer.noise is None or not self.offer.normal:
            return torch.zeros(n, *self.noise_shape)
        return torch.randn(n, *self.noise_shape)

    def require_noise(self) -> None:
        """Ask for one chunk twice with equal noise and once with other noise; ConfigError unless
        the noise, and nothing else, decides on the chunk."""
        checks.require_noise(self, self.noise_shape, self._probe_obs(), self.config.url)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        sent = _arrays(self.translation.carry_there(carry))
        answer = self._ask(obs, {"carry": sent}, noise)
        actions = self._actions(answer.get("actions"), length(obs))
        kept = answer.get("carry") or {}
        if not isinstance(kept, Mapping):
            raise RemoteError(f"{self.config.url} sent a carry that is no map")
        home = next(iter(obs.values())).device
        named = cast(Mapping[str, Any], kept)
        found = {str(name): _tensor(value).to(home) for name, value in named.items()}
        if any(value.shape[:1] != (length(obs),) for value in found.values()):
            raise RemoteError(f"{self.config.url} sent what the policy carries for other rows")
        # Past observations are the caller's; a server does not change them.
        own = {name: value for name, value in carry.items() if is_history(name)}
        return actions.to(home), {**self.translation.carry_here(found), **own}

    def features(self, obs: Tensors) -> Tensor:
        if not self.offer.features:
            raise ConfigError(
                f"{self.config.url} offers no features of its policy: use finetune=dsrl"
            )
        features = _tensor(self._ask(obs, {"verb": FEATURES}, None).get("features"))
        if features.shape != (length(obs), self.offer.features):
            raise RemoteError(f"{self.config.url} sent features of shape {list(features.shape)}")
        return features.float().to(next(iter(obs.values())).device)

    def _ask(self, obs: Tensors, extra: dict[str, Any], noise: Tensor | None) -> dict[str, Any]:
        """One answer for all rows, whatever the server can take at once."""
        answers = self.connection.ask(self._messages(obs, extra, noise))
        return _joined(answers, self.offer.batch, self.config.url)

    def _messages(
        self, obs: Tensors, extra: dict[str, Any], noise: Tensor | None
    ) -> list[dict[str, Any]]:
        """One request for all rows, or one for each."""
        n = length(obs)
        sent = self.translation.observations(obs)
        if noise is not None and self.offer.noise is not None:
            sent[NOISE] = noise.detach().cpu().float().numpy()
        text = self.translation.text()
        if self.offer.batch:
            return [{**sent, **text, OURS: {"batch": n, **extra}}]
        return [{**{k: v[i] for k, v in sent.items()}, **text} for i in range(n)]

    def _actions(self, there: Any, n: int) -> Tensor:
        """Actions [n, chunk, *shape] of this spec; RemoteError for any others."""
        act = self.spec.act
        actions = _tensor(there)
        if actions.shape[1:] != (self.chunk, *act.shape) or (
            actions.is_floating_point() == (act.dtype == "int64")
        ):
            raise RemoteError(
                f"{self.config.url} sent actions of shape {list(actions.shape[1:])}, not "
                f"{[self.chunk, *act.shape]}: serve the policy that was served before"
            )
        if len(actions) != n:
            raise RemoteError(f"{self.config.url} answered {len(actions)} observations, not {n}")
        if actions.is_floating_point() and not actions.isfinite().all():
            raise RemoteError(f"{self.config.url} sent actions that are not finite numbers")
        return self.translation.actions(actions)

    def _probe_obs(self) -> Tensors:
        """One observation within its bounds, to try the server with."""
        return {name: checks.within(leaf) for name, leaf in checks.visible(self.spec).items()}

    def _probed_chunk(self) -> int:
        """The number of actions that the server sends, found by asking it once; ConfigError."""
        obs = self._probe_obs()
        noise = torch.zeros(1, *self.noise_shape)
        carry = _arrays(self.translation.carry_there(self.initial(1)))
        actions = _tensor(self._ask(obs, {"carry": carry}, noise).get("actions"))
        checks.require_actions(actions, self.spec, self.translation, self.config.url)
        chunk = actions.shape[1]
        wanted = self.config.chunk if self.config.chunk is not None else self.offer.chunk
        if wanted is not None and wanted != chunk:
            raise ConfigError(
                f"{self.config.url} sends {chunk} actions, not {wanted}: policy.chunk={chunk}, and "
                "execute=N to execute only the first N of them"
            )
        return chunk


def _joined(answers: list[dict[str, Any]], batch: bool, url: str) -> dict[str, Any]:
    """The answer to a `batch`, or the actions of one answer for each row; RemoteError."""
    if batch:
        return answers[0]
    try:
        return {"actions": np.stack([np.asarray(each["actions"]) for each in answers])}
    except (KeyError, ValueError) as error:
        raise RemoteError(
            f"{url} is no server of actions: it answered {', '.join(map(str, answers[0]))[:200]}"
        ) from error


def _arrays(carry: Tensors) -> dict[str, np.ndarray[Any, Any]]:
    return {name: value.detach().cpu().numpy() for name, value in carry.items()}


def _tensor(value: Any) -> Tensor:
    """A writable tensor of an array from a message; RemoteError."""
    try:
        array = np.array(value)
    except ValueError:  # lists of other lengths
        array = np.array(None)
    if array.dtype.kind not in "biuf":
        raise RemoteError("the policy server sent no array of numbers where one was expected")
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if math.prod(array.shape) and array.dtype.kind == "f" and array.dtype.itemsize != 4:
        array = array.astype(np.float32)
    return torch.from_numpy(array)
