"""Where the policy runs: in this process, or behind `embodied serve`."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

Obs = dict[str, Tensor]
HISTORY, FRESH = "history/", "fresh"  # of a carry: past observations, and rows that have none yet


class Decider(ABC):
    """What the policy carries from one decision to the next (a recurrent state, past observations)
    is kept here, row by row. Call `decide`, and `remember` once in every control step."""

    carry: dict[str, Tensor]

    def reset(self) -> None:
        """An episode begins."""
        self.carry = {}

    def decide(self, obs: Obs, noise: Tensor | None, executed: int) -> Tensor:
        """A chunk [n, H, A]; `executed` actions of the last one were executed."""
        n = len(next(iter(obs.values())))
        if not self.carry or len(next(iter(self.carry.values()))) != n:
            self.carry = self.initial(n)
        elif "executed_steps" in self.carry:
            self.carry = {**self.carry, "executed_steps": torch.full((n,), executed)}
        actions, self.carry = self.act(obs, noise)
        return actions

    def remember(self, obs: Obs) -> None:
        """A control step at `obs`, with a decision or not: the newest of the past observations, or
        all of them at the beginning of an episode."""
        for key in [key for key in self.carry if HISTORY in key]:
            prefix, _, name = key.rpartition(HISTORY)
            past, fresh = self.carry[key], self.carry[prefix + FRESH]
            now = obs[name][:, None].to(past)
            first = fresh.view(-1, *[1] * (past.ndim - 1))
            shifted = torch.cat([past[:, 1:], now], 1)
            self.carry = {**self.carry, key: torch.where(first, now.expand_as(past), shifted)}
        for key in [key for key in self.carry if key.rpartition("/")[2] == FRESH]:
            self.carry = {**self.carry, key: torch.zeros_like(self.carry[key])}

    @abstractmethod
    def initial(self, n: int) -> dict[str, Tensor]:
        """The carry of `n` rows at the beginning of an episode."""

    @abstractmethod
    def act(self, obs: Obs, noise: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """A chunk [n, H, A] and the next carry."""


class Here(Decider):
    """The checkpoint, in this process."""

    def __init__(self, checkpoint: str) -> None:
        try:
            from embodied.core.checkpoint import load_policy
        except ImportError as error:
            raise ImportError(
                "embodied is not installed in LeRobot's environment: install it, or serve the "
                "policy (embodied serve RUN) and give url= and token="
            ) from error
        self.policy = load_policy(checkpoint).eval()
        self.reset()

    def initial(self, n: int) -> dict[str, Tensor]:
        return self.policy.initial(n)

    def act(self, obs: Obs, noise: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        noise = self.policy.sample_noise(len(next(iter(obs.values())))) if noise is None else noise
        seen, carry = self.policy.observe(obs, self.carry, noise)
        return self.policy.act(seen, carry, noise)


class Served(Decider):
    """A server of `embodied serve`, asked for all rows at once. The carry is sent along: what a
    server remembers of its connection would go on from episode to episode, and from row to row."""

    def __init__(self, url: str, token: str) -> None:
        try:
            from embodied.serve.client import Client

            client: Any = Client(url, token or None)
            self.ask, metadata = client.request, client.metadata
        except ImportError:
            from openpi_client.websocket_client_policy import WebsocketClientPolicy

            client = WebsocketClientPolicy(host=url, port=None, api_key=token or None)
            self.ask, metadata = client.infer, client.get_server_metadata()
        self.start: dict[str, Any] = metadata["embodied"]["carry"]
        self.reset()

    def initial(self, n: int) -> dict[str, Tensor]:
        return {name: _tensor([value] * n) for name, value in self.start.items()}

    def act(self, obs: Obs, noise: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        request: dict[str, Any] = {name: value.cpu().numpy() for name, value in obs.items()}
        if noise is not None:
            request["noise"] = noise.cpu().numpy()
        carry = {name: value.cpu().numpy() for name, value in self.carry.items()}
        n = len(next(iter(obs.values())))
        answer = self.ask({**request, "embodied": {"batch": n, "carry": carry}})
        kept = {name: _tensor(value) for name, value in answer["carry"].items()}
        return _tensor(answer["actions"]), kept


def _tensor(values: Any) -> Tensor:
    return torch.from_numpy(np.array(values))  # what was received is read-only
