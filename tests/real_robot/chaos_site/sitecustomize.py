"""Read by every Python that the chaos suite starts: its own parts may be built, and the clock of
the control process jumps by as much as the file that TROUBLE names says."""

import os
import sys
import time

from embodied.core.build import allow
from tests.real_robot.trouble import Trouble

allow("tests")
if "embodied.real_robot.control.main" in sys.orig_argv:
    steady, trouble = time.monotonic, Trouble(os.environ["TROUBLE"])
    time.monotonic = lambda: steady() + trouble.jump
