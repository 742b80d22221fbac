"""EnvPool behind our contract: same-step resets, true successors, flat names."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from contextlib import closing

import numpy as np
import pytest
import torch

from embodied.core.env import NotSavable

envpool = pytest.importorskip("envpool")

from embodied.envs.envpool import Config, EnvPool  # noqa: E402
from embodied.envs.row_rng import row_seed  # noqa: E402
from tests.builders import make_policy  # noqa: E402


def test_ended_rows_begin_again_in_the_same_step() -> None:
    """Against raw pools with the same seeds, whose ended rows spend a step on their reset."""
    n = 3
    env = EnvPool(Config("Hopper-v5", n, seed=5, horizon=30))
    options = {"env_type": "gymnasium", "num_threads": 2, "max_episode_steps": 30}
    raws = [
        envpool.make("Hopper-v5", num_envs=1, seed=[row_seed(5, i)], **options) for i in range(n)
    ]
    obs = env.reset()["state"]
    for row, raw in enumerate(raws):
        np.testing.assert_array_equal(obs[row], raw.reset()[0][0].astype(np.float32))
    generator, ends = torch.Generator().manual_seed(0), torch.zeros(2)
    for count in range(120):
        action = torch.rand((n, 3), generator=generator) * 2 - 1
        action[2] = 0.0  # it hops on the spot and so outlives the clock
        step = env.step(action)
        for row, raw in enumerate(raws):
            seen, reward, over, late, _ = raw.step(action[row : row + 1].double().numpy())
            assert np.array_equal(step.next_obs["state"][row], seen[0].astype(np.float32)), count
            assert step.reward[row].item() == reward[0]
            ended = [step.terminated[row].item(), step.truncated[row].item()]
            assert ended == [bool(over[0]), bool(late[0])]
            if any(ended):
                seen, *_ = raw.step(np.zeros((1, 3)))
            assert np.array_equal(step.obs["state"][row], seen[0].astype(np.float32)), count
            ends += torch.tensor(ended)
        assert not (step.terminated & step.truncated).any()
    assert ends.min() >= 2


def test_rows_have_no_seeds_of_their_own() -> None:
    with pytest.raises(ValueError, match="resets all envs together"):
        EnvPool(Config("Hopper-v5", 2)).reset(seed=1, mask=torch.tensor([True, False]))


@pytest.mark.parametrize(
    ("name", "told"),
    [("MetaWorld/Reach-v3", True), ("FetchReach-v4", True), ("WalkerWalk-v1", False)],
)
def test_success_is_logged_where_there_is_one(
    name: str, told: bool, apart: ProcessPoolExecutor
) -> None:
    apart.submit(_family, name, told).result()


def _family(name: str, told: bool) -> None:
    env = EnvPool(Config(name, 2))
    env.reset(seed=0)
    assert ("success" in env.step(torch.zeros(2, *env.spec.act.shape)).log) == told
    with pytest.raises(NotSavable):
        env.get_state()


@pytest.mark.parametrize(
    ("name", "classes", "dtype", "mask"),
    [
        ("RubiksCube-v0", (6, 1, 3), "int32", None),
        ("Cleaner-v0", (4, 4, 4), "int32", (3, 4)),  # a mask of each choice
        ("MultiCVRP-v0", (21, 21), "int16", (2, 21)),
        ("Tetris-v0", (40,), "int32", (4, 10)),  # of each combination
        ("Play2048-v1", (4,), "int32", (4,)),  # in the info
    ],
)
def test_structured_actions_and_their_mask(
    name: str, classes: tuple[int, ...], dtype: str, mask: tuple[int, ...] | None
) -> None:
    """Random allowed actions do the same as in a raw pool with the same seeds."""
    env = EnvPool(Config(name, 2, threads=1))
    assert env.spec.act.choices == classes
    assert (env.spec.obs["action_mask"].shape if mask else None) == mask
    policy, act = make_policy("random.Random", env.spec), env._action
    seeds = [row_seed(0, row) for row in range(2)]
    raw = envpool.make(name, env_type="gymnasium", num_envs=2, num_threads=1, seed=seeds)
    raw.reset()
    obs = env.reset()
    for _ in range(3):
        unit = policy.act(obs, {}, policy.sample_noise(2))[0][:, 0]
        native = act.native(unit)
        assert native.dtype == dtype and torch.equal(act.unit(native), unit)
        step, (seen, reward, over, late, info) = env.step(unit), raw.step(native)
        np.testing.assert_array_equal(step.reward, reward)
        assert step.ended.tolist() == (over | late).tolist()
        if step.ended.any():
            break
        if mask:
            given = seen["action_mask"] if "action_mask" in seen else info["legal_action_mask"]
            np.testing.assert_array_equal(step.obs["action_mask"], given)
        obs = step.obs
    env.close()


def test_it_draws_where_it_is_asked_to() -> None:
    settings = Config("HalfCheetah-v5", num_envs=2, kwargs={"render_mode": "rgb_array"})
    with closing(EnvPool(settings)) as env:
        env.reset()
        before = env.render(1, 320, 240)
        assert before.shape == (240, 320, 3) and before.float().std() > 20
        env.step(torch.ones(2, 6))
        assert (env.render(1, 320, 240) != before).any()
    line = pytest.raises(NotImplementedError, match=r"env\.kwargs\.render_mode=rgb_array")
    with closing(EnvPool(Config("HalfCheetah-v5", num_envs=1))) as env, line:
        env.render()


def test_native_bounds_and_extra_log() -> None:
    """Pendulum's torque goes to 2: the cost 0.001 u^2 shows what reached it."""
    env = EnvPool(Config("Pendulum-v1", 1))
    raw = envpool.make("Pendulum-v1", "gymnasium", num_envs=1, seed=[row_seed(0, 0)])
    env.reset(), raw.reset()
    wanted = raw.step(np.array([[2.0]], np.float32))
    step = env.step(torch.tensor([[1.0]]))
    assert step.reward.item() == pytest.approx(float(wanted[1][0]))
    log = EnvPool(Config("HalfCheetah-v5", 2, log=("x_velocity",)))
    log.reset()
    assert log.step(torch.zeros(2, 6)).log["x_velocity"].shape == (2,)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config("IntersectionMultiAgent-v0"), "players.action; an env here has one action of one"),
        (Config("HalfCheeta-v5"), "HalfCheeta-v5.*did you mean HalfCheetah-v5"),
        (Config("Hopper-v5", 2, kwargs={"foo": 1}), "EnvPool cannot make Hopper-v5.*foo"),
        (Config("Hopper-v5", 2, log=("speed",)), "does not report 'speed'; `log` accepts: "),
    ],
)
def test_mistakes_are_one_line(config: Config, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        EnvPool(config)
    assert "\n" not in str(caught.value)
