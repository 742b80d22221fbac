"""The protocol of openpi's policy servers, and what this project adds to it.

openpi: the server sends one map (metadata) when a client connects; then each request is one map of
observations and each answer one map with `actions` [H, A] and `server_timing`, or one line of text:
an error. A client with a key sends the header `Authorization: Api-Key KEY`.

A server that has the additions says so in its metadata, under the key `embodied` (see `Offer`).
Where they are offered, a request may have, beside the observations,

    noise     [*noise.shape], or [B, *noise.shape]: the noise of the decision
    embodied  {"batch": B: all arrays have a leading dimension B, and so have the answer's,
               "verb": "act" or "features": the frozen encoder's features [size] of the observation,
               "carry": {name: array}: what the policy carries between decisions}

and an answer then also has `carry`, or `features` in place of `actions`. Between two such requests
a server keeps nothing, so one can be sent again after a server was lost. For a client that sends no
`embodied`, a server keeps what the policy carries, from one request of its connection to the next,
each of which is a control step; `reset` (true) begins a new episode.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

VERSION = 1
PORT = 8000
"""Where openpi's servers listen by default, and ours."""
MAX_MESSAGE = 64 * 2**20  # bytes
MAX_NOISE = 2**22  # numbers of the noise of a decision
OURS, NOISE, RESET = "embodied", "noise", "reset"
"""Keys of a request that are no observations."""
ACT, FEATURES = "act", "features"
HEADER, SCHEME = "Authorization", "Api-Key"

Array = NDArray[Any]
Message = Mapping[str, Any]


class RequestError(ValueError):
    """A request that a server cannot answer; one line that says what was wrong with it."""


@dataclass(frozen=True)
class Offer:
    """What a server's metadata say beyond openpi's protocol; all None, 0 or empty: nothing.

    `batch`: several observations in one request; `chunk`: actions in an answer; `noise`: the shape
    of a decision's noise, without the batch (None: it cannot be chosen); `normal`: the policy was
    trained with normal noise (else it acts without any); `noise_steps`: if > 0, the noise is one
    vector for each of that many time steps; `features`: their number (0: none);
    `carry`: of the start of an episode, by name, without the batch; `spec`: JSON of the policy's
    `Spec`; `policy`, `normalizer`: SHA-256 of its weights and of its normalisers; `software`: name
    and version.
    """

    batch: bool = False
    chunk: int | None = None
    noise: tuple[int, ...] | None = None
    normal: bool = True
    noise_steps: int = 0
    features: int = 0
    carry: Mapping[str, Array] = field(default_factory=dict[str, Array])
    spec: Mapping[str, Any] | None = None
    policy: str | None = None
    normalizer: str | None = None
    software: str = ""

    def to_metadata(self) -> dict[str, Any]:
        """The map that a server sends; other keys may be added to it."""
        shape, steps = self.noise, self.noise_steps
        noise = (
            None if shape is None else {"shape": [*shape], "normal": self.normal, "steps": steps}
        )
        rest = ("batch", "chunk", "features", "carry", "spec", "policy", "normalizer", "software")
        values = {name: getattr(self, name) for name in rest}
        return {OURS: {"version": VERSION, "noise": noise, **values}}

    @classmethod
    def from_metadata(cls, metadata: Message) -> Offer:
        """What `metadata` offer; nothing if they lack our key. RequestError if they are damaged."""
        if OURS not in metadata:
            return cls()
        said = metadata[OURS]
        version = cast(Message, said).get("version") if isinstance(said, Mapping) else None
        if not isinstance(version, int) or version != VERSION:
            raise RequestError(
                "the server speaks another version of the protocol; install the same version of "
                "embodied-rl on both machines"
            )
        try:
            return cls._parsed(cast(Message, said))
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
            line = " ".join(str(error).split())[:200]
            raise RequestError(f"the server's metadata are damaged ({line})") from error

    @classmethod
    def _parsed(cls, said: Message) -> Offer:
        noise = said.get("noise")
        if noise is not None and math.prod(map(_size, noise["shape"])) > MAX_NOISE:
            raise ValueError(f"noise of more than {MAX_NOISE:,} numbers")
        return cls(
            batch=bool(said.get("batch", False)),
            chunk=None if said.get("chunk") is None else _size(said["chunk"]),
            noise=None if noise is None else tuple(_size(n) for n in noise["shape"]),
            normal=True if noise is None else bool(noise.get("normal", True)),
            noise_steps=0 if noise is None else _size(noise.get("steps", 0)),
            features=_size(said.get("features", 0)),
            carry={str(k): np.asarray(v) for k, v in dict(said.get("carry") or {}).items()},
            spec=None if said.get("spec") is None else dict(said["spec"]),
            policy=None if said.get("policy") is None else str(said["policy"]),
            normalizer=None if said.get("normalizer") is None else str(said["normalizer"]),
            software=str(said.get("software", ""))[:80],
        )


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**31:
        raise ValueError(f"{value!s:.20} is no size")
    return value
