"""Where the policy runs: in this process, or behind `embodied serve`."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

Obs = dict[str, Tensor]


class Here:
    """The checkpoint, in this process. Memory (a recurrent state) is kept between decisions."""

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

    def reset(self) -> None:
        """An episode begins."""
        self.carry: dict[str, Tensor] = {}

    def decide(self, obs: Obs, noise: Tensor | None, executed: int) -> Tensor:
        """A chunk [n, H, A]; `executed` actions of the last one were executed."""
        n = len(next(iter(obs.values())))
        if not self.carry or len(next(iter(self.carry.values()))) != n:
            self.carry = self.policy.initial(n)
        elif "executed_steps" in self.carry:
            self.carry = {**self.carry, "executed_steps": torch.full((n,), executed)}
        noise = self.policy.sample_noise(n) if noise is None else noise
        seen, carry = self.policy.observe(obs, self.carry, noise)
        actions, self.carry = self.policy.act(seen, carry, noise)
        return actions


class Served:
    """A server that speaks openpi's protocol; one observation at a time, no memory."""

    def __init__(self, url: str, token: str) -> None:
        try:
            from embodied.serve.client import Client

            self.ask = Client(url, token or None).request
        except ImportError:
            from openpi_client.websocket_client_policy import WebsocketClientPolicy

            self.ask = WebsocketClientPolicy(host=url, port=None, api_key=token or None).infer

    def reset(self) -> None:
        """Nothing is kept between decisions."""

    def decide(self, obs: Obs, noise: Tensor | None, executed: int) -> Tensor:
        """A chunk [n, H, A]."""
        rows = []
        for i in range(len(next(iter(obs.values())))):
            request: dict[str, Any] = {name: value[i].cpu().numpy() for name, value in obs.items()}
            if noise is not None:
                request["noise"] = noise[i].cpu().numpy()
            rows.append(np.asarray(self.ask(request)["actions"]))
        return torch.from_numpy(np.stack(rows))
