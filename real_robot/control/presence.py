"""Beats that a moving arm needs: the daemon's, and in hold-to-run those of an operator's hand."""

from __future__ import annotations

from embodied.real_robot.ipc.channels import Channels
from embodied.real_robot.safety.chain import Chain
from embodied.real_robot.safety.silence import DaemonAlive, HoldToRun


class Presence:
    """Reads the beats and tells them to the chain's stages, which hold the arm and latch. A chain
    without these stages needs no beats. Costs 1 us a tick, 5 us where a beat has come."""

    def __init__(self, chain: Chain, channels: Channels) -> None:
        self.channels = channels
        self.daemon = chain.stage(DaemonAlive)
        self.hand = chain.stage(HoldToRun)

    def listen(self, now: float) -> None:
        """Read the newest beats. The daemon's are timed by our clock alone."""
        if self.daemon is not None and self.channels.heartbeat.receive():
            count = int(self.channels.heartbeat.fields["count"][0])
            self.daemon.silence.hear(count, now, now)
        if self.hand is not None and self.channels.deadman.receive():
            beat = self.channels.deadman.fields[0]
            self.hand.silence.hear(int(beat["count"]), float(beat["time"]), now)

    def daemon_speaks(self, now: float) -> bool:
        """Whether an operator could stop an arm that begins to move."""
        return self.daemon is None or self.daemon.speaks(now)

    def waits(self, now: float, moving: bool) -> bool:
        """Whether an arm that moves by itself has to wait. The daemon is watched only while the arm
        is in a mode that moves (`moving`): one that is held is safe without it."""
        if self.daemon is not None:
            self.daemon.watched = moving
        alive = self.daemon is None or not moving or self.daemon.speaks(now)
        held = self.hand is None or self.hand.held(now)
        return not alive or not held
