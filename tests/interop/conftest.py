"""LeRobot stays off hubs and the home folder; emulated buses need an idle machine."""

import os
import tempfile
import time

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("HF_LEROBOT_HOME", os.path.join(tempfile.gettempdir(), "lerobot-home"))
os.environ.setdefault("SVT_LOG", "1")  # errors only, from the AV1 encoder
PATIENT = 600.0  # s


@pytest.fixture(scope="module")
def idle_machine() -> None:
    """LeRobot asks a servo once and gives up, so that an emulated one has to answer in time."""
    end = time.monotonic() + PATIENT
    while (load := os.getloadavg()[0]) > (os.cpu_count() or 1):
        if time.monotonic() > end:
            pytest.skip(f"the load is {load:.1f}: run these tests again on an idle machine")
        time.sleep(5)
