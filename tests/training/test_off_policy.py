"""Off-policy runs: kinds of replay, schedules of the update ratio, exact resume."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.buffers import memmap, replay
from embodied.core import checkpoint
from embodied.core.build import ConfigError
from embodied.core.env import NotSavable, Step
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper
from embodied.envs.gym_object import register
from embodied.learners.acceleration import native_obstacle
from embodied.learners.critics import watch_active_units
from embodied.learners.learner import frozen
from embodied.learners.off_policy import sac
from embodied.nn.networks import Ensemble
from embodied.training.collector import Collector
from embodied.training.components import RunComponents
from embodied.training.config import read_config
from embodied.training.update_ratio import Config, SwitchWhenSteady
from tests.buffers.test_hindsight import plane
from tests.builders import SPEC, make_learner, make_policy, node_of
from tests.contract.test_learner import batch_for, make
from tests.tiers import only_all, usually
from tests.toy_envs import Config as CounterConfig
from tests.toy_envs import Counter, Reach
from tests.training.test_train import resumed, run, settings

KINDS: dict[str, dict[str, Any]] = {
    "prioritized": {"replay": {"_target_": "embodied.buffers.prioritized.PrioritizedReplayBuffer"}},
    "mapped": {"replay": {"_target_": "embodied.buffers.memmap.MemmapReplayBuffer"}},
    "successes": {"success_fraction": 0.5},
    "pictures": {"env": {"_target_": f"{__name__}.Seen"}},
}


@pytest.mark.parametrize("kind", usually({*KINDS} - {"pictures"}, KINDS))
def test_resume_is_exact(kind: str, tmp_path: Path) -> None:
    changes = {"replay_size": 150, "env": {"_target_": f"{__name__}.Near"}} | KINDS[kind]
    if kind == "mapped":  # as it is exact as long as nothing was overwritten
        changes["replay_size"] = 1000
    resumed(settings(tmp_path, **changes, steps=240), 120)


class Near(Reach):
    """A world in which many an episode succeeds by chance."""

    def step(self, action: torch.Tensor) -> Step:
        out = super().step(action)
        out.log["success"] = out.next_obs["state"].norm(dim=1) < 0.5
        return out


class Seen(Wrapper):
    """With a camera, in whose picture the place is a colour."""

    def __init__(self, num_envs: int = 4) -> None:
        near = Near(num_envs)
        super().__init__(near, near.spec.with_obs(eye=Leaf((40, 40, 3), "uint8", 0, 255)))

    def reset(self, *given: Any, **named: Any) -> Tensors:
        return self.transform_obs(super().reset(*given, **named))

    def step(self, action: Tensor) -> Step:
        out = super().step(action)
        seen = {name: self.transform_obs(getattr(out, name)) for name in ("obs", "next_obs")}
        return replace(out, **seen)

    def transform_obs(self, obs: Tensors) -> Tensors:
        colour = ((obs["state"][:, [0, 1, 0]] + 2) * 63).to(torch.uint8)
        return {**obs, "eye": colour[:, None, None].repeat(1, 40, 40, 1)}


UNSAVED: dict[str, dict[str, Any]] = {
    "successes": {"env": {"_target_": f"{__name__}.Unsaved"}, "success_fraction": 0.5},
    "hindsight": {
        "env": node_of("envs.gym.Gym", id=register(plane), num_envs=4),
        "replay": node_of("buffers.hindsight.HindsightReplayBuffer"),
    },
}


class Unsaved(Near):
    def get_state(self) -> Tensors:
        raise NotSavable("no state")


@pytest.mark.parametrize("kind", UNSAVED)
def test_episodes_that_were_not_saved_do_not_go_on(kind: str, tmp_path: Path) -> None:
    """Where the environment cannot be saved, a resumed run begins new episodes."""
    node = settings(tmp_path, **UNSAVED[kind], steps=120)
    folder = run(node | {"steps": 100})  # 25 steps of 4 envs; episodes have 15 or 20
    with closing(RunComponents(read_config(node | {"resume": str(folder)}))) as components:
        components.resume(str(folder))
        buffers: Any = components.loop.buffers  # type: ignore[union-attr]
        steps = buffers.success.count if kind == "successes" else buffers.replay.length
        assert steps.tolist() == [0, 0, 0, 0]


def test_a_learner_that_does_not_say_its_errors_is_refused(tmp_path: Path) -> None:
    td3 = node_of("learners.off_policy.td3.Td3", hidden=[8], batch_size=8)
    policy = node_of("policies.deterministic.Deterministic", hidden=[8])
    with pytest.raises(ConfigError, match="no TD error"):
        run(settings(tmp_path, **KINDS["prioritized"], policy=policy, learner=td3))


GIGABYTE = 10**9


def test_memory_that_is_not_there_is_refused_with_advice_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def needs(**changes: Any) -> str:
        changes = {"replay_size": 10**12, "steps": 10**11, **changes}
        config = read_config(settings(tmp_path / "run", **changes))
        with closing(RunComponents(config)) as components:
            return components.loop.memory

    def advice(says: str, **changes: Any) -> tuple[int, str]:
        """The size that is advised, and what else."""
        with pytest.raises(ConfigError, match=says) as caught:
            needs(**changes)
        size, _, other = str(caught.value).rpartition("data.replay_size=")[2].partition(", or ")
        return int(size), other

    def on_disk(size: int) -> None:
        usage = SimpleNamespace(free=size)
        monkeypatch.setattr(memmap.shutil, "disk_usage", lambda path: usage)

    monkeypatch.setattr(replay, "free_bytes", lambda device: 2 * GIGABYTE)
    wanted = r"transitions of 32 bytes\) needs 3,200.00 GB, and 2.00 GB of memory are there: "
    size, other = advice(wanted)
    assert "1.80 GB, and 2.00 GB" in needs(replay_size=size)
    assert other == "replay=memmap (on disk)"
    assert needs(replay_size=100_000) == "", "little is not worth a line"
    assert needs(steps=1000) == "", "a short run does not fill it"
    both = r"buffer with the buffer of successes \(200,000,000,000 tr.* needs 6,400.00 GB, and 2.00"
    half, _ = advice(both, success_fraction=0.5)
    assert "1.80 GB, and 2.00 GB" in needs(success_fraction=0.5, replay_size=half)
    mapped = KINDS["mapped"]
    on_disk(10**15)
    alone = r"the buffer of successes \(.*3,200.00 GB.* of memory .*, or data.success_fraction=0$"
    advice(alone, **mapped, success_fraction=0.5)
    on_disk(GIGABYTE)
    advice(r"1.00 GB of disk \(.*replay\) are there: .*=\d+$", **mapped)
    assert needs(**mapped, replay_size=10_000_000).startswith("the replay buffer (10,000,000 tr")
    with pytest.raises(ConfigError, match=r"a buffer of .* cannot be had .*: a smaller data"):
        replay.empty((10**15,), torch.float32, "cpu")


def test_priorities_are_the_errors_and_weights_weigh() -> None:
    """Two slices of an update; doubling all weights doubles the critic's loss."""
    losses: list[float] = []
    for weight in (1.0, 2.0):
        learner: Any = make("sac")
        batch = batch_for(learner) | {"weight": torch.full((learner.batch_size,), weight)}
        torch.manual_seed(0)
        losses.append(learner.update(batch)["critic_loss"].item())
    assert losses[1] == pytest.approx(2 * losses[0], rel=1e-5)
    torch.manual_seed(0)
    plain: Any = make("sac")
    q = plain.critic({"state": batch["obs/state"]}, batch["action"])
    torch.manual_seed(0)
    backup = plain._backup(batch["reward"], batch["discount"], {"state": batch["next_obs/state"]})
    torch.testing.assert_close(learner.priority, (q - backup).abs().mean(0).detach())


class Watched(Counter):
    """Row 0 is taken over in its second step."""

    steps = 0

    def step(self, action: torch.Tensor) -> Step:
        out = super().step(action)
        self.steps += 1
        out.log["intervened"] = torch.tensor([self.steps == 2, False])
        return out


@pytest.mark.parametrize(("chunk", "marked"), [(1, [0, 1, 0, 0]), (2, [1, 0])])
def test_an_intervention_marks_its_decision(chunk: int, marked: list[int]) -> None:
    env = Watched(CounterConfig(ends=(100, 100)))
    policy = make_policy("random.Random", env.spec, chunk=chunk)
    rollout = Collector(env, policy, 0.9)
    made = [rows["intervened"] for rows in (rollout.step()[0] for _ in range(4)) if rows]
    assert torch.stack(made).tolist() == [[bool(mark), False] for mark in marked]


TARGET = "embodied.training.update_ratio.SwitchWhenSteady"
QUICK = {"_target_": TARGET, "low": 0.25, "high": 1.0, "every": 4, "window": 2, "threshold": 0.05}


class Probed(sac.Sac):
    """SAC that reports as `active_units` 1 / (number of the update)."""

    def __init__(self, config: sac.Config, policy: Policy, spec: Spec) -> None:
        super().__init__(config, policy, spec)
        self.register_buffer("made", torch.zeros(()))

    def update(self, batch: Tensors) -> Tensors:
        self.made += 1
        return {**super().update(batch), "active_units": 1 / self.made}


def fed(schedule: SwitchWhenSteady, values: list[Any]) -> list[float]:
    """The ratios that follow metrics; None: no metric yet."""
    metrics = [{} if v is None else {"active_units": torch.tensor(v)} for v in values]
    return [schedule.ratio(each) for each in metrics]


@pytest.mark.parametrize(
    ("config", "values", "low"),
    [
        # Checks after every 3 values, of the mean of the last two: 5.5, 7, 7.0005; then for good.
        (Config(every=3, window=2), [None, 100, 5, 6, -40, 7, 7, 0, 7, 7.001, 100, 0, 55, 3], 9),
        # The threshold is included, and the first check has nothing to compare.
        (Config(every=1, window=1, threshold=0.5), [0, 0.5], 1),
        (Config(every=1, window=1, threshold=0.5), [0, 0.51], 2),
        (Config(every=2, window=1, earliest=8), [1.0] * 9, 7),
    ],
)
def test_it_switches_once_when_the_metric_is_steady(
    config: Config, values: list[Any], low: int
) -> None:
    ratios = [0.5] * low + [2.0] * (len(values) - low)
    assert fed(SwitchWhenSteady(config), values) == ratios


def test_its_state_goes_on() -> None:
    values = [3.0, 2.0, 9.0, 2.0, 4.0, 5.0, 2.0, 4.0, 5.0, 1.0]
    config = Config(every=3, window=2)
    expected = fed(SwitchWhenSteady(config), values)
    assert set(expected) == {0.5, 2.0}
    for cut in range(len(values)):
        half, resumed = SwitchWhenSteady(config), SwitchWhenSteady(config)
        before = fed(half, values[:cut])
        resumed.set_state(half.get_state())
        assert before + fed(resumed, values[cut:]) == expected


def probed(folder: Path, ratio: Any, **more: Any) -> Any:
    made = settings(folder, utd_ratio=ratio, **more)
    made["learner"]["_target_"] = f"{__name__}.Probed"
    return made


def updates_of(folder: Path, ratio: Any, kind: str = f"{__name__}.Probed") -> int:
    """The updates of 20 vector steps."""
    made = probed(folder, ratio, warmup_steps=0)
    made["learner"]["_target_"] = kind
    loop: Any = RunComponents(read_config(made)).loop
    keeper = SimpleNamespace(running=True, step=0, due=[])

    def advance(steps: int, metrics: Any, step: Any, updates: int) -> None:
        keeper.due.append(updates)
        keeper.running = len(keeper.due) < 20

    keeper.advance = advance
    loop.run(keeper)
    return sum(keeper.due)


def test_a_run_switches(tmp_path: Path) -> None:
    """4 transitions per vector step. One update each at 0.25; at the 4th and 8th the means are
    0.29 and 0.13, at the 12th 0.087, which is within 0.05: then 4 updates in each of 8 steps."""
    assert updates_of(tmp_path, QUICK) == 12 + 8 * 4
    assert updates_of(tmp_path, QUICK | {"threshold": 0.0}) == 20


def test_a_learner_that_reports_no_active_units_switches_by_its_critics(tmp_path: Path) -> None:
    """Two checks, at steps 4 and 8, whose shares of active units are within 1 of each other."""
    kind = "embodied.learners.off_policy.sac.Sac"
    assert updates_of(tmp_path, QUICK | {"threshold": 1.0}, kind) == 8 + 12 * 4


def test_active_units_by_hand() -> None:
    """Two networks of two hidden units and one input: 1 of 4 units is above 0 at 1, 2 are at -1."""
    net = Ensemble(2, 1, (2,))
    with torch.no_grad():
        net.weights[0].copy_(torch.tensor([[[1.0, -1.0]], [[-1.0, -2.0]]]))
        net.biases[0].copy_(torch.tensor([[[0.5, 0.5]], [[0.5, -3.0]]]))
    net(torch.ones(1, 1))
    assert net.active is None
    net.watch()
    net(torch.tensor([[1.0], [-1.0]]))
    assert net.active is not None and net.active.item() == 3 / 8
    with torch.no_grad():
        net(torch.ones(1, 1))
    with frozen([*net.parameters()]):
        net(torch.ones(1, 1))
    assert net.active.item() == 3 / 8  # only passes that train the weights count


def test_native_code_gives_way_to_the_probe() -> None:
    learner = make_learner("off_policy.td3.Td3", make_policy("deterministic.Deterministic", SPEC))
    watch_active_units(learner)
    assert native_obstacle(learner) == "its active units are measured"


@only_all
@pytest.mark.parametrize("cut", [148, 360])
def test_update_ratio_resume_is_exact_before_and_after_the_switch(tmp_path: Path, cut: int) -> None:
    ratio = QUICK | {"every": 20, "window": 7, "threshold": 0.02}  # at step 320
    resumed(probed(tmp_path, ratio), cut)


class Constant:
    """No UpdateRatio: it does not have that class as a base."""

    def ratio(self, metrics: Mapping[str, Tensor]) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("ratio", "says"),
    [
        (QUICK | {"low": -1}, "low=-1 should be at least 0"),
        (QUICK | {"window": 9}, "window=9 should be at most every=4"),
        ({"_target_": f"{__name__}.Constant"}, "is no UpdateRatio"),
        ("often", "data.utd_ratio='often'"),
    ],
)
def test_wrong_schedules_are_refused(tmp_path: Path, ratio: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RunComponents(read_config(probed(tmp_path, ratio)))


def test_a_metric_that_is_not_reported_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'no metric active_unit .*"active_units"'):
        run(probed(tmp_path, QUICK | {"metric": "active_unit"}))


def implicit(folder: Path, **changes: Any) -> dict[str, Any]:
    """A run of IQL that acts, as it may after its offline training."""
    node = settings(folder, steps=80, warmup_steps=40, **changes)
    node["policy"] = node_of("policies.deterministic.Deterministic", hidden=[8])
    node["learner"] = node_of("learners.offline.iql.Iql", hidden=[8], batch_size=8)
    return node


@pytest.mark.parametrize("ratio", [0.5, 3.0])
def test_a_rate_that_falls_is_0_at_the_end_of_a_run_that_acts(ratio: float, tmp_path: Path) -> None:
    """40 transitions after the warm-up; at 3 updates each the policy stood still from step 54 on,
    when steps were taken for updates."""
    parts = RunComponents(read_config(implicit(tmp_path, utd_ratio=ratio)))
    run(implicit(tmp_path, utd_ratio=ratio))
    saved = checkpoint.load_state(tmp_path, "learner")
    assert saved["done"] == parts.learner.total == 40 * ratio


def test_a_rate_falls_along_a_known_number_of_updates_only(tmp_path: Path) -> None:
    node = implicit(tmp_path, utd_ratio=QUICK)
    with pytest.raises(ConfigError, match=r"learner\.cosine=false"):
        RunComponents(read_config(node))
    node["learner"]["cosine"] = False
    RunComponents(read_config(node))


def test_each_of_several_processes_makes_its_share_of_the_decisions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learners count their own: schedules would end after 1 / N of the way with N processes."""
    config = read_config(settings(tmp_path, steps=240, warmup_steps=0, utd_ratio=2.0))
    alone = config.plan(3)
    monkeypatch.setattr("embodied.core.distributed._processes", 4)
    shared = config.plan(3)
    assert (alone.decisions, shared.decisions) == (80, 20)
    assert shared.updates == alone.updates / 4
