"""The process of a simulated `Crazyflie`: settings on standard input; it ends when that closes."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

from embodied.envs.hardware_sim.crazyflie import Config
from embodied.envs.hardware_sim.crazyflie_flight import PLACES, Air
from embodied.real_robot.emulators.physics_link import answer, settings

AGE = 1.0  # s: a busy machine is no fault here


def main(folder: str) -> None:
    """Say where it can be reached, and fly; a tracker's numbers are in `folder`."""
    config = settings(Config)
    air = Air(config, Path(folder) if config.external else None)
    said: dict[str, Any] = {"uri": air.uri}
    if config.external:
        target = "embodied.real_robot.ipc.external_state.ExternalStateReader"
        said["tracker"] = {"_target_": target, "folder": folder, "names": PLACES, "age": AGE}
    over = threading.Event()
    threading.Thread(target=answer, args=(said, air.pace.behind, over), daemon=True).start()
    air.serve(over)


if __name__ == "__main__":
    main(sys.argv[1])
