"""What scripts/interop.sh promises: the parts of LeRobot and openpi-client that the tests use."""

import importlib
import importlib.metadata
from pathlib import Path

import pytest

from tests.interop import need

need("lerobot", "openpi_client")

LEROBOT = (
    "datasets.lerobot_dataset policies.act.modeling_act policies.diffusion.modeling_diffusion "
    "policies.smolvla.modeling_smolvla policies.pi0.modeling_pi0 robots.so_follower teleoperators "
    "scripts.lerobot_record scripts.lerobot_rollout"
)
PARTS = [f"lerobot.{name}" for name in LEROBOT.split()]
PARTS.append("openpi_client.websocket_client_policy")


@pytest.mark.parametrize("name", PARTS)
def test_part_imports(name: str) -> None:
    importlib.import_module(name)


def test_versions_are_those_asked_for() -> None:
    for line in Path("scripts/interop/requirements.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            assert importlib.metadata.version(name) == version
