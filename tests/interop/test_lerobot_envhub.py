"""LeRobot's own loader of environments from the hub, on the file that this project ships."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("lerobot", reason="LeRobot is not installed here: sh scripts/interop.sh")

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
