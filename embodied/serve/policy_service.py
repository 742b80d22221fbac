"""PolicyService: one of our policies as what a `Server` offers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from embodied.core.build import ConfigError, nearest
from embodied.core.device import device_of, forked
from embodied.core.policy import Policy
from embodied.core.spec import INSTRUCTION, Leaf, hidden
from embodied.core.tensors import Tensors, each, remembered
from embodied.nn.normalizers import MeanStdNormalizer, MinMaxNormalizer
from embodied.nn.sentences import instruction, require_task
from embodied.serve.protocol import ACT, FEATURES, NOISE, OURS, RESET, Offer, RequestError

PROMPT = "prompt"  # what openpi's clients call the task instruction
LARGEST_BATCH = 4096


class PolicyService:
    """Answers requests with `policy`, one batch of decisions at a time. What the policy carries is
    in the requests, or, of clients that do not know it, in the memory of their connection.
    ConfigError for a policy whose observations have names that the protocol needs."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy.eval()
        self.leaves = {name: leaf for name, leaf in policy.spec.obs.items() if not hidden(name)}
        if taken := {OURS, NOISE, RESET, PROMPT} & set(self.leaves):
            raise ConfigError(f"an observation called {sorted(taken)[0]} cannot be served: rename")
        self.device = device_of(policy)
        self.carry = _start(policy)
        self.offer = self._offer()

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.offer.to_metadata()

    @torch.no_grad()
    def infer(
        self, request: dict[str, Any], memory: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The actions, or the features, of one request; RequestError. `memory`: of its connection
        (None: of none), in which the carry of a client is kept that does not send it."""
        extra = self._extra(request)
        batch: int | None = extra.get("batch")
        if batch is not None and (type(batch) is not int or not 1 <= batch <= LARGEST_BATCH):
            raise RequestError(f"batch={batch!s:.20} is not in 1..{LARGEST_BATCH}")
        n = 1 if batch is None else batch
        obs = self._observations(request, n, batch is not None)
        if extra.get("verb", ACT) == FEATURES:
            return {"features": _out(self.policy.features(obs), batch)}
        noise = self._noise(request.get(NOISE), n, batch is not None)
        own = None if OURS in request else memory
        if own is not None:
            begins = request.get(RESET, False)
            if not isinstance(begins, bool):
                raise RequestError(f"{RESET} is true or false, not {begins!s:.20}")
            if begins:
                own.clear()
        carry = (own or {}).get("carry") or self._carry(extra.get("carry"), n, batch is not None)
        if own is not None and "executed_steps" in carry:
            raise RequestError(
                "this policy needs to know how many actions were executed: use policy=remote of "
                "this project, which says it"
            )
        decision_obs, carry = self.policy.observe(obs, carry, noise)
        actions, carry = self.policy.act(decision_obs, carry, noise)
        if own is not None:  # its requests are control steps
            own["carry"] = remembered(carry, obs)
        answer: dict[str, Any] = {"actions": _out(actions, batch)}
        if OURS in request:
            answer["carry"] = {name: _out(value, batch) for name, value in carry.items()}
        return answer

    def _offer(self) -> Offer:
        shape, normal = _noise_of(self.policy)
        kinds = (MeanStdNormalizer, MinMaxNormalizer)
        parts = [each for each in self.policy.named_modules() if isinstance(each[1], kinds)]
        normalizers = {
            f"{name}.{key}": value
            for name, part in parts
            for key, value in nn.Module.state_dict(part).items()
        }
        return Offer(
            batch=True,
            chunk=self.policy.chunk,
            noise=shape,
            normal=normal,
            noise_steps=0 if shape is None else self.policy.noise_steps,
            features=self.policy.feature_size,
            carry={name: value[0].cpu().numpy() for name, value in self.carry.items()},
            spec=self.policy.spec.to_json(),
            policy=_hash(self.policy.state_dict()),
            normalizer=_hash(normalizers),
            software=f"embodied-rl {version('embodied-rl')}",
        )

    def _extra(self, request: Mapping[str, Any]) -> dict[str, Any]:
        extra = request.get(OURS, {})
        known = ("batch", "verb", "carry")
        if not isinstance(extra, dict) or not set(cast(dict[str, Any], extra)) <= set(known):
            raise RequestError(f"{OURS} is a map with {', '.join(known)}")
        verb = cast(dict[str, Any], extra).get("verb", ACT)
        known = (ACT, FEATURES) if self.policy.feature_size else (ACT,)
        if not isinstance(verb, str) or verb not in known:
            raise RequestError(f"this policy has no {verb!s:.40}")
        return cast(dict[str, Any], extra)

    def _observations(self, request: Mapping[str, Any], n: int, batched: bool) -> Tensors:
        for name in request:
            if name not in (*self.leaves, OURS, NOISE, RESET, PROMPT):
                raise RequestError(
                    f"the policy has no observation {name!s:.60}{nearest(str(name), self.leaves)}"
                )
        spec = self.policy.spec
        prompt: Any = request.get(PROMPT)
        try:
            if prompt is not None or INSTRUCTION not in request:
                require_task(spec, prompt, PROMPT)
        except ConfigError as error:
            raise RequestError(str(error)) from error
        obs: Tensors = {}
        for name, leaf in self.leaves.items():
            if name == INSTRUCTION and name not in request and spec.listens:
                told = instruction(spec, [str(prompt)])
                obs[name] = told.expand(n, *leaf.shape).to(self.device)
                continue
            if name not in request:
                raise RequestError(f"the observation {name} is missing")
            value = _tensor(request[name], leaf.shape, n, batched, name)
            obs[name] = _as(value, leaf, name).to(self.device)
        return obs

    def _noise(self, value: Any, n: int, batched: bool) -> Tensor:
        if value is None:
            return self.policy.sample_noise(n)
        if self.offer.noise is None:
            raise RequestError("the noise of this policy cannot be chosen")
        noise = _tensor(value, self.offer.noise, n, batched, NOISE)
        return _finite(noise.float(), NOISE).to(self.device)

    def _carry(self, given: Any, n: int, batched: bool) -> Tensors:
        if given is None:
            return each(self.carry, lambda value: value.expand(n, *value.shape[1:]).clone())
        if not isinstance(given, dict) or set(cast(Tensors, given)) != set(self.carry):
            raise RequestError(f"carry is a map of {', '.join(sorted(self.carry)) or 'nothing'}")
        found: Tensors = {}
        for name, start in self.carry.items():
            value = _tensor(cast(Any, given)[name], start.shape[1:], n, batched, name)
            if value.dtype != start.dtype:
                raise RequestError(f"{name} is {value.dtype}, and should be {start.dtype}")
            found[name] = _finite(value, name).to(self.device)
        return found


def _start(policy: Policy) -> Tensors:
    """The carry [1, ...] at the start of an episode; ConfigError if it depends on the row."""
    carry = policy.initial(2)
    if any(not torch.equal(value[0], value[1]) for value in carry.values()):
        raise ConfigError(
            f"{type(policy).__name__} starts each environment differently: not served"
        )
    return each(carry, lambda value: value[:1])


def _noise_of(policy: Policy) -> tuple[tuple[int, ...] | None, bool]:
    """The shape of a decision's noise, and whether it is normal; None: it cannot be chosen."""
    with forked(0):
        noise = policy.sample_noise(3)
        torch.manual_seed(0)
        normal = torch.randn(noise.shape, device=noise.device)
    shape = tuple(noise.shape[1:])
    if noise.numel() and torch.equal(noise, normal):
        return shape, True
    return (shape if noise.numel() and not noise.any() else None), False


def _hash(state: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        flat = value.detach().cpu().contiguous().reshape(-1)
        digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return digest.hexdigest()


def _tensor(value: Any, shape: tuple[int, ...], n: int, batched: bool, name: str) -> Tensor:
    """`value` as a tensor [n, *shape]; RequestError if it has another shape."""
    try:
        array = np.array(value)  # a copy: what was received is read-only
    except (ValueError, TypeError, ArithmeticError) as error:
        raise RequestError(f"{name} is no array") from error
    wanted = (n, *shape) if batched else tuple(shape)
    if array.dtype.kind not in "biuf" or array.shape != wanted:
        raise RequestError(
            f"{name} is {array.dtype}{list(array.shape)}, and should have the shape {list(wanted)}"
        )
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(native).reshape(n, *shape)


def _as(value: Tensor, leaf: Leaf, name: str) -> Tensor:
    """`value` with the dtype of `leaf`; RequestError where that would change numbers."""
    wanted: torch.dtype = getattr(torch, leaf.dtype)
    if leaf.is_depth and not value.is_floating_point():
        raise RequestError(f"{name} is {value.dtype}, and should be distances in m, float32")
    if value.dtype == wanted or (wanted.is_floating_point and value.is_floating_point()):
        return _finite(value.to(wanted), name)
    whole = not (wanted.is_floating_point or value.is_floating_point())
    if whole and torch.equal(value.to(wanted).to(value.dtype), value):
        return value.to(wanted)
    raise RequestError(f"{name} is {value.dtype}, and should be {leaf.dtype}")


def _finite(value: Tensor, name: str) -> Tensor:
    if value.is_floating_point() and not value.isfinite().all():
        raise RequestError(f"{name} has numbers that are not finite")
    return value


def _out(value: Tensor, batch: int | None) -> np.ndarray[Any, Any]:
    array = value.detach().cpu().numpy()
    return array if batch is not None else array[0]
