"""A server of a policy as `embodied serve` starts it, and what it says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from embodied.core.bounds import Bound, Count, Positive
from embodied.core.policy import Policy
from embodied.serve.policy_service import PolicyService
from embodied.serve.protocol import Offer, is_loopback, make_token, token_file
from embodied.serve.server import Server


@dataclass(frozen=True)
class Settings:
    port: Annotated[int, Bound(0, 65535)] = 8000  # TCP port; 0: any free one
    host: str = "127.0.0.1"  # address to listen at; default: this machine only
    token: bool = True  # false: no token is needed, at a loopback address only
    token_file: str | None = None  # null: ~/.cache/embodied/serve/PORT.token, which is made
    connections: Count = 16  # clients at a time
    message_mb: Positive = 64.0  # largest request, MB
    device: str = "auto"  # torch device
    threads: Count = 1  # CPU threads
    chunks: Literal["guided", "hard"] | None = None  # real-time chunking of the policy; null: none


def serving(policy: Policy, settings: Settings) -> Server:
    """The server of `policy`, which does not listen yet."""
    token = make_token(token_path(settings)) if settings.token else None
    limits = (int(settings.message_mb * 2**20), settings.connections)
    return Server(PolicyService(policy), settings.host, settings.port, token, *limits)


def token_path(settings: Settings) -> Path:
    given = settings.token_file
    return token_file(settings.port) if given is None else Path(given).expanduser()


def lines(policy: Policy, saved: Path, server: Server, settings: Settings) -> list[str]:
    assert isinstance(server.service, PolicyService)
    said = [
        f"  policy   {type(policy).__name__}, {saved}",
        f"  offers   {offered(server.service.offer)}",
        f"  address  {server.url}",
    ]
    if not settings.token:
        said.append("  token    none: every user of this machine may ask")
    else:
        path = token_path(settings)
        finds = " (clients of this user on this machine find it)"
        found = finds if settings.token_file is None and is_loopback(settings.host) else ""
        said.append(f"  token    {path}{found}")
    if not is_loopback(settings.host):
        said.append(
            "  note     the wire is not encrypted; better leave host out, and type on the other "
            f"machine: ssh -N -L {server.port}:127.0.0.1:{server.port} THIS_MACHINE"
        )
    return [*said, f"next: embodied eval {server.url} env=NAME (Ctrl-C ends the server)"]


def offered(offer: Offer) -> str:
    if offer.noise is None:
        noise = "noise that the server samples"
    else:
        noise = f"{'normal ' if offer.normal else ''}noise {list(offer.noise)}"
    return f"chunks of {offer.chunk}, {noise}, {offer.features or 'no'} features"
