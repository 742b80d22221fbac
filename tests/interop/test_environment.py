"""What scripts/interop.sh promises: the parts of LeRobot and openpi-client that the tests use;
LeRobot's own loader of environments from the hub, on the file that this project ships."""

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


FILE = Path(__file__).parents[2] / "plugins" / "envhub" / "env.py"


def test_lerobot_loads_and_steps_it() -> None:
    from lerobot.envs import utils

    module = utils._load_module_from_path(str(FILE))
    made = utils._normalize_hub_result(utils._call_make_env(module, 2, False, None))
    ((tasks,),) = (tuple(made.values()),)
    env = tasks[0]
    try:
        obs, _ = env.reset(seed=0)
        seen = utils.preprocess_observation(obs)
        assert set(seen) == {"observation.state", "observation.environment_state"}
        assert tuple(seen["observation.state"].shape) == (2, 2)
        env.step(env.action_space.sample())
        utils.check_env_attributes_and_types(env)
    finally:
        env.close()
