"""A fix for franky-sim 1.0: its hand does not answer a command that is broken off.

A real hand replies "aborted". Without that reply the caller's thread waits for ever, and in
libfranka each waiting thread holds the connection for 10 ms at a time: after a few aborted motions
every command is late by tenths of a second.
"""

from __future__ import annotations

from typing import Any

from franky_sim.franka_gripper_protocol import GripperCommandStatus
from franky_sim.franka_gripper_server import FrankaGripperServer
from franky_sim.franka_server import BaseCommand


def answer_all(hand: FrankaGripperServer) -> None:
    """Let `hand` answer what a stop, or the next motion, breaks off."""
    for name in ("stop", "_start_motion"):
        setattr(hand, name, _after_answering(hand, getattr(hand, name)))


def _after_answering(hand: FrankaGripperServer, do: Any) -> Any:
    def answered(*args: Any) -> None:
        kept: dict[str, Any] = vars(hand)
        if kept["_pending_command_id"] is not None:
            BaseCommand.send_response(
                kept["_pending_tcp_socket"],
                kept["_pending_command_type"],
                kept["_pending_command_id"],
                GripperCommandStatus.kAborted,
                command_type_struct="H",
                status_type_struct="H",
            )
            kept["_pending_command_id"] = None
        do(*args)

    return answered
