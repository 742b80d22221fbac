"""Read by every Python that a test starts: the disk of the daemon takes as many s as SLOW_DISK says
to keep anything."""

import os
import sys
import time

if "embodied.real_robot.daemon.daemon" in sys.orig_argv:
    keep, seconds = os.fsync, float(os.environ["SLOW_DISK"])

    def slow(handle: int) -> None:
        time.sleep(seconds)
        keep(handle)

    os.fsync = slow
