"""Translation: observations and actions between names and units here and those of a server.

Checks of a policy server, made when a `RemotePolicy` is built: one line for each mistake.

RemotePolicy: a policy on another machine, asked over openpi's websocket protocol.

`act` sends the observations, the noise and the carry of all environments in one request to a server
of this project (`embodied serve`), or one observation after the other, pipelined, to any server
that speaks openpi's protocol. Such a server offers no noise: it can be evaluated, put on a robot
and corrected by a residual policy, but not steered in its noise (docs/remote.md).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from embodied.core.affine import Affine
from embodied.core.bounds import Chunk, NonNegative, Number, Positive
from embodied.core.build import ConfigError, nearest
from embodied.core.device import forked
from embodied.core.errors import RemoteError
from embodied.core.files import MALFORMED, reading
from embodied.core.policy import Policy
from embodied.core.spec import INSTRUCTION, Leaf, Spec, SpecMismatch, hidden, require_same
from embodied.core.tensors import HISTORY, Tensors, is_history, length
from embodied.datasets.mapping import Mapping as NamesAndUnits
from embodied.datasets.mapping import Source, permuted
from embodied.nn.sentences import require_task
from embodied.policies.remote.connection import Connection
from embodied.serve.protocol import FEATURES, NOISE, OURS, Offer


@dataclass(frozen=True)
class Translation:
    """`sources`: for each observation here, its name there as it was written, and its source;
    `action`: the values there that are -1 and +1 here (None: the same there); `order`: for each
    element of the action here its place there (empty: the same); `prompt`."""

    sources: Mapping[str, tuple[str, Source]]
    action: Affine | None
    prompt: str | None
    order: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        spec: Spec,
        mapping: Mapping[str, Any] | None,
        prompt: str | None,
        served: Spec | None = None,
    ) -> Translation:
        """The translation of a `mapping` node (None: the same names and units) to what the server
        says it serves (None: it says nothing); ConfigError."""
        parsed = names_and_units(mapping)
        names = [name for name in spec.obs if not hidden(name)]
        given = (mapping or {}).get("obs") or {}
        # Where a server names no elements, those that the mapping lists are its own.
        known = {} if served is None else served.obs
        own = {
            parsed.source(name).name: known.get(
                _full_name(given.get(name), name), Leaf(spec.obs[name].shape)
            )
            for name in names
        }
        act = Leaf(spec.act.shape) if served is None else served.act
        ordered = parsed.ordered(spec, Spec(own, act, spec.dt))
        sources = {
            name: (_full_name(given.get(name), name), ordered.source(name)) for name in names
        }
        action = parsed.action if isinstance(parsed.action, Affine) else None
        order = parsed.action_order(spec.act, act)
        return cls(sources, action, prompt, order)

    def observations(self, obs: Tensors) -> dict[str, Any]:
        """The arrays that are sent, by their names there."""
        sent: dict[str, Any] = {}
        for name, (there, source) in self.sources.items():
            value = source.there(obs[name])
            sent[there] = np.ascontiguousarray(value.detach().cpu().numpy())
        return sent

    def carry_there(self, carry: Tensors) -> Tensors:
        """A carry as it is sent: past observations by their names and in the units there."""

        def sent(name: str, value: Tensor) -> tuple[str, Tensor]:
            there, source = self.sources[name]
            return there, source.there(value)

        return _with_past(carry, sent)

    def carry_here(self, carry: Tensors) -> Tensors:
        """The inverse of `carry_there`; an observation that is not used here is refused."""
        names = {there: name for name, (there, _) in self.sources.items()}

        def received(there: str, value: Tensor) -> tuple[str, Tensor]:
            if there not in names:
                raise ConfigError(f"the policy needs {there}, and nothing here is mapped to it")
            name = names[there]
            return name, self.sources[name][1].here(value)

        return _with_past(carry, received)

    def text(self) -> dict[str, str]:
        """The task in words, as openpi's policies take it."""
        return {} if self.prompt is None else {"prompt": self.prompt}

    def actions(self, there: Tensor) -> Tensor:
        """Actions in units of here; nothing is clamped."""
        return permuted(there if self.action is None else self.action.to_unit(there), self.order)


def names_and_units(mapping: Mapping[str, Any] | None) -> NamesAndUnits:
    """A `mapping` node, parsed (None: the same names and units); ConfigError."""
    return NamesAndUnits() if mapping is None else NamesAndUnits.parse(mapping, "policy.mapping")


def _with_past(carry: Tensors, convert: Callable[[str, Tensor], tuple[str, Tensor]]) -> Tensors:
    """`carry` with its past observations by the name, and with the value, that `convert` gives."""
    found: Tensors = {}
    for key, value in carry.items():
        start, history, name = key.rpartition(HISTORY)
        name, value = convert(name, value) if history else (name, value)
        found[start + history + name] = value
    return found


def _full_name(given: Any, name: str) -> str:
    """The name there as it was written: servers of LeRobot's policies take `observation.state`."""
    if isinstance(given, Mapping):
        return str(given["name"])
    return name if given is None else str(given)


BEYOND = 1.5  # an action of this size is in other units than [-1, 1]
SEED = 0


def require_policy(offer: Offer, wanted: str | None, url: str) -> None:
    """ConfigError if another policy is served than the one with the hash `wanted`."""
    if wanted is not None and offer.policy != wanted:
        found = "one without a hash" if offer.policy is None else f"{offer.policy[:12]}..."
        raise ConfigError(
            f"{url} serves another policy ({found}) than this run was trained with "
            f"({wanted[:12]}...): serve that one, or start a new run"
        )


def require_fit(
    spec: Spec | None, served: Spec | None, mapping: Mapping[str, Any] | None, url: str
) -> Spec:
    """The spec of the policy here; ConfigError or SpecMismatch if the served one does not fit."""
    if spec is None and served is None:
        raise ConfigError(
            f"{url} does not say what its policy observes: add spec: to its YAML file "
            "(docs/remote.md, a server of another project)"
        )
    if spec is None or served is None:
        found = served if spec is None else spec
        assert found is not None
        return found
    _require_units(spec, served, mapping, url)
    if mapping is None:
        try:
            require_same(spec, served, "environment", f"policy server {url}", any_order=True)
        except SpecMismatch as error:
            raise SpecMismatch(f"{error}; mapping=FILE names what belongs together") from error
    else:
        _require_mapped(spec, served, mapping, url)
    return spec


def told(served: Spec, prompt: str | None, url: str) -> Spec:
    """The served spec without `instruction`, which the `prompt` stands for; ConfigError
    where there is none, or one that the policy never saw."""
    try:
        require_task(served, prompt, "policy.prompt")
    except ConfigError as error:
        raise ConfigError(f"{url}: {error}") from error
    obs = {name: leaf for name, leaf in served.obs.items() if name != INSTRUCTION}
    return replace(served, obs=obs)


def _require_units(spec: Spec, served: Spec, mapping: Mapping[str, Any] | None, url: str) -> None:
    """ConfigError where both sides name a unit and they differ, and no mapping converts them."""
    parsed = names_and_units(mapping)
    pairs = [(name, leaf, parsed.source(name)) for name, leaf in spec.obs.items()]
    for name, leaf, source in pairs:
        there = served.obs.get(source.name)
        if there is not None and source.same_units and _differ(leaf, there):
            raise ConfigError(
                f"{name} is in {leaf.unit} here and in {there.unit} at {url}: "
                f"policy.mapping.obs.{name}={{name: {source.name}, scale: FACTOR}}"
            )
    if _differ(spec.act, served.act) and isinstance(parsed.action, str):
        raise ConfigError(
            f"actions are in {spec.act.unit} here and in {served.act.unit} at {url}: "
            "policy.mapping.action={low: [...], high: [...]}, the values there of -1 and +1 here"
        )


def _differ(here: Leaf, there: Leaf) -> bool:
    return bool(here.unit and there.unit and here.unit != there.unit)


def _require_mapped(spec: Spec, served: Spec, mapping: Mapping[str, Any], url: str) -> None:
    """SpecMismatch where shapes of mapped observations, the action or the control period differ."""
    for name, (there, _) in Translation.of(spec, mapping, None).sources.items():
        leaf = served.obs.get(there)
        if leaf is None:
            known = nearest(there, served.obs)
            raise ConfigError(f"the policy at {url} has no observation {there}{known}")
        here = spec.obs[name]
        if (leaf.shape, leaf.dtype) != (here.shape, here.dtype):
            raise SpecMismatch(
                f"{name} is {here.dtype}{list(here.shape)} here, and {there} is "
                f"{leaf.dtype}{list(leaf.shape)} at {url}"
            )
    if served.act.shape != spec.act.shape:
        raise SpecMismatch(
            f"an action is {list(spec.act.shape)} here and {list(served.act.shape)} at {url}"
        )
    if not math.isclose(served.dt, spec.dt, rel_tol=1e-6):
        raise SpecMismatch(
            f"the control period is {spec.dt:g} s here and {served.dt:g} s at {url}: serve a "
            f"policy for this one (scripts/serve_lerobot.py --fps {1 / spec.dt:g})"
        )


def require_actions(actions: Tensor, spec: Spec, translation: Translation, url: str) -> None:
    """ConfigError if the first answer of a server holds no actions of this spec, in its units."""
    shape = list(actions.shape[2:])
    if actions.ndim < 2 or shape != list(spec.act.shape) or not actions.isfinite().all():
        raise ConfigError(f"{url} sends actions of {shape} numbers, and {list(spec.act.shape)} fit")
    if spec.act.dtype != "float32" or spec.act.low != -1.0 or spec.act.high != 1.0:
        return
    largest = float(translation.actions(actions).abs().max())
    if largest > BEYOND:
        raise ConfigError(
            f"{url} sends actions as large as {largest:.3g}, and they should be in [-1, 1]: "
            "policy.mapping.action={low: [...], high: [...]}, the values there of -1 and +1 here"
        )


def require_noise(policy: Policy, shape: tuple[int, ...], obs: Tensors, url: str) -> None:
    """ConfigError unless equal noise [1, *shape] gives equal chunks, and other noise others."""
    cure = (
        "put embodied/serve/openpi_wrapper.py around the policy on the server, or learn a "
        "correction of its actions (finetune=residual)"
    )
    if not math.prod(shape):
        raise ConfigError(f"{url} does not offer the noise of its policy: {cure}")
    first, other = torch.randn(2, 1, *shape, generator=torch.Generator().manual_seed(SEED))
    said = [policy.act(obs, policy.initial(1), noise)[0] for noise in (first, first, other)]
    if not torch.equal(said[0], said[1]):
        raise ConfigError(f"{url} ignores the noise (equal noise gave two chunks): {cure}")
    if torch.equal(said[0], said[2]):
        raise ConfigError(
            f"the policy at {url} does not depend on its noise: finetune=residual corrects its "
            "actions"
        )


FIXED = 3  # observations of a fingerprint
NEAR = 0.01  # of the largest answer: what other kernels and precisions may change


def fingerprint(actions: Tensor) -> list[float]:
    """The first and last actions of `actions` [n, chunk, *shape], rounded."""
    ends = actions[:, (0, -1)].flatten().float()
    return [float(f"{value:.6g}") for value in ends.tolist()]


def require_fingerprint(found: Sequence[float] | None, wanted: Sequence[float], url: str) -> None:
    """ConfigError if a server with the fingerprint `found` is not that with `wanted`."""
    if found is None or not alike(torch.tensor(found), torch.tensor(wanted)):
        raise ConfigError(
            f"{url} serves another policy than this run was trained with: its answers to "
            f"{FIXED} fixed observations are others. Serve that one, or start a new run"
        )


def alike(found: Tensor, expected: Tensor) -> bool:
    """Whether two answers are those of one policy."""
    return found.shape == expected.shape and bool(
        (found - expected).abs().max() <= NEAR * _size(expected)
    )


def _size(actions: Tensor) -> float:
    return max(float(actions.abs().max()), 1e-3)


def visible(spec: Spec) -> dict[str, Leaf]:
    """The observations that a policy acts on."""
    return {name: leaf for name, leaf in spec.obs.items() if not hidden(name)}


def within(leaf: Leaf) -> Tensor:
    """A value [1, *shape] of `leaf` inside its bounds, nearest to 0."""
    value = leaf.zeros(1)
    for bound, inside in ((leaf.low, torch.maximum), (leaf.high, torch.minimum)):
        if bound is not None:
            edge = torch.tensor(bound, dtype=value.dtype)
            value = inside(value, edge.view(1, *leaf.shape) if edge.ndim else edge)
    return value


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
    chunk: Chunk | None = None  # actions that the server should send (null: whatever it sends)
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
        require_policy(self.offer, config.policy_hash, config.url)
        with reading(f"what {config.url} says of its policy", *MALFORMED):
            served = None if self.offer.spec is None else Spec.from_json(self.offer.spec)
        if served is not None and served.listens:
            served = told(served, config.prompt, config.url)
        self.spec = require_fit(spec, served, config.mapping, config.url)
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
        with forked(SEED):  # always the same
            obs = {name: leaf.sample(FIXED) for name, leaf in visible(self.spec).items()}
            noise = self.sample_noise(FIXED)
        carry = _arrays(self.translation.carry_there(self.initial(FIXED)))
        messages = self._messages(obs, {"carry": carry}, noise)
        batch, wanted, url = self.offer.batch, self.config.fingerprint, self.config.url

        def actions(answers: list[dict[str, Any]]) -> Tensor:
            return _tensor(_joined(answers, batch, url).get("actions"))

        first, again = (actions(self.connection.ask(messages)) for _ in range(2))
        if alike(again, first):
            self._fingerprint = fingerprint(self._actions(first, FIXED))
        if wanted is not None:
            require_fingerprint(self._fingerprint, wanted, url)
            self._fingerprint = list(wanted)  # which does not drift from run to run
        if self._fingerprint is not None:
            self.connection.same = lambda client: alike(
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
        require_noise(self, self.noise_shape, self._probe_obs(), self.config.url)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        sent = _arrays(self.translation.carry_there(carry))
        answer = self._ask(obs, {"carry": sent}, noise)
        actions = self._actions(answer.get("actions"), length(obs))
        kept = answer.get("carry")
        kept = {} if kept is None else kept
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
        return {name: within(leaf) for name, leaf in visible(self.spec).items()}

    def _probed_chunk(self) -> int:
        """The number of actions that the server sends, found by asking it once; ConfigError."""
        obs = self._probe_obs()
        noise = torch.zeros(1, *self.noise_shape)
        carry = _arrays(self.translation.carry_there(self.initial(1)))
        actions = _tensor(self._ask(obs, {"carry": carry}, noise).get("actions"))
        require_actions(actions, self.spec, self.translation, self.config.url)
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
    except (KeyError, ValueError, ArithmeticError) as error:
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
