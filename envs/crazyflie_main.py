"""The process of a `Crazyflie`: settings on standard input; it ends when that does."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from embodied.core.build import parse
from envs.crazyflie import Config
from envs.crazyflie_flown import PLACES, Air
from real_robot.mailbox import memory_folder

AGE = 1.0  # s: a busy machine is no fault here


def main() -> None:
    """Say where it can be reached, and fly."""
    config: Config = parse(Config, json.loads(sys.stdin.readline()), "counterpart")
    with tempfile.TemporaryDirectory(prefix="crazyflie-", dir=memory_folder()) as folder:
        air = Air(config, Path(folder) if config.external else None)
        said: dict[str, Any] = {"uri": air.uri}
        if config.external:
            target = "real_robot.seen.Seen"
            said["tracker"] = {"_target_": target, "folder": folder, "names": PLACES, "age": AGE}
        over = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
        print(json.dumps(said), flush=True)
        air.serve(over)


if __name__ == "__main__":
    main()
