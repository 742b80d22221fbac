"""What configs/ has, on a device that is not the CPU: train, evaluate, save, resume; and how
often the host waits for it. The device is `tests.pretend_device`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.checks.learner import demonstrated
from embodied.checks.reward import RewardSubject, a_run_with_it_resumes_exactly
from embodied.compose import compose
from embodied.core import tensors as tt
from embodied.core.build import Node, build, resolve
from embodied.core.device import forked, rng_state, set_rng_state
from embodied.core.env import VecEnv
from embodied.core.errors import NotApplicable
from embodied.core.policy import Policy
from embodied.datasets.transitions import SOURCE
from embodied.evaluation.evaluate import evaluate
from embodied.learners.learner import Learner, TakesDemonstrations
from tests import pretend_device
from tests.builders import node_of
from tests.contract import test_learner, test_reward
from tests.pretend_device import cases
from tests.pretend_device.process import Call, on_device
from tests.tiers import once_per_class, only_all, usually

__all__ = ["on_device"]
CONFIGS = Path(__file__).parents[2] / "configs"
DEVICE = "pretend"
OF_DEMONSTRATIONS = ("pretrain_steps", "demo_fraction", "demo_episodes")
CHEAP = (
    *("pendulum", "two_gap", "cartpole", "quadrotor", "contact_maze", "pendulum_positions"),
    *("maze_trials", "point_trials", "minigrid_four", "craft"),
)


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def choices(file: Path) -> dict[str, str]:
    """What an experiment chooses, by group."""
    return dict(re.findall(r"override /(\w+): (\w+)", file.read_text()))


def place(file: Path) -> tuple[int, bool, str]:
    """Experiments of quick environments first, and those with the environment's own reward."""
    chosen = choices(file)
    env = chosen.get("env", "")
    return (CHEAP.index(env) if env in CHEAP else len(CHEAP)), "reward" in chosen, file.stem


EXPERIMENTS = sorted((CONFIGS / "experiment").glob("*.yaml"), key=place)


def case(group: str, name: str) -> tuple[str, ...]:
    """The words of the quickest run with `name` of `group`: of its experiment, or its policy and
    learner in a toy environment where that of the experiment is slow."""
    file = next(file for file in EXPERIMENTS if choices(file).get(group) == name)
    chosen = choices(file)
    if chosen["env"] in CHEAP or chosen["learner"] == "hg_dagger":  # which needs an intervener
        return (f"experiment={file.stem}",)
    chosen["env"] = "cartpole" if "categorical" in chosen.get("policy", "") else "two_gap"
    if chosen.get("finetune") == "dsrl_features":
        chosen["env"] = "two_gap_pictured"
    kept = ("env", "policy", "learner", "finetune")
    return tuple(f"{group}={chosen[group]}" for group in kept if group in chosen)


CHOSEN = {choices(file).get("policy") for file in EXPERIMENTS}
RUNS = {case(group, name) for group in ("learner", "finetune") for name in names(group)}
# Of every policy, it_stays_on_the_device is checked in tests/contract/test_parts.py.
ALSO = {case("policy", name) for name in names("policy") if name in CHOSEN} - RUNS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("device")


def words(given: tuple[str, ...], folder: Path) -> list[str]:
    """`given` with the demonstrations and the base policy that such a run needs, made here."""
    made = compose("train", list(given))
    env, learner = str(made.choices["env"]), resolve(made.node["learner"]["_target_"], Learner)
    group, _, name = given[0].partition("=")
    text = (CONFIGS / group / f"{name}.yaml").read_text() if group == "experiment" else ""
    more = list(given)
    if tuner := made.choices.get("finetune"):
        base = "diffusion" if tuner == "dppo" else "flow"
        more.append(f"init={cases.base_run(env, base, folder)}")
    shown = hasattr(learner, "set_demonstrations")
    if learner.data == "offline" or shown or any(word in text for word in OF_DEMONSTRATIONS):
        shares = 1 + (SOURCE in getattr(learner, "extra_columns", ()))  # the expert's, and others
        demos = ",".join([str(cases.demonstrations(env, folder))] * shares)
        more.append(f"demos=[{demos}]")
    return more


def of_words(given: tuple[str, ...], folder: Path) -> None:
    own = folder / "-".join(word.partition("=")[2] for word in given)
    cases.resumed(cases.run_node(own, *words(given, folder)))


OTHERS = [
    ("experiment=rooms_surprise",),  # two agents
    # Warm-up by a policy without parameters, a world on the CPU.
    ("env=two_gap", "policy=gaussian", "learner=sac", "data.success_fraction=0.5"),
    ("env=quadrotor", "policy=gaussian", "learner=sac", "replay=prioritized"),
    ("env=pendulum", "policy=gaussian", "learner=sac", "replay=memmap", "learner.n_step=3"),
    ("env=pendulum", "policy=gaussian", "learner=sac", "replay=newest"),
    ("env=so101_reach", "policy=gaussian", "learner=sac", "replay=hindsight"),
]


# Every learner computes updates in test_an_update_does_not_wait; a run of one learner of each kind
# of data, loop and fine-tuner, those of others and of policies with `--all`.
KINDS = ("sac", "ppo", "iql", "imitate", "h2o", "hg_dagger", "cpl", "recap", "reinflow", "expo")
KINDS += ("ramp",)  # which has a state of its own
USUAL = {case("learner", name) for name in KINDS} | {case("finetune", "dsrl")}


@pytest.mark.parametrize(
    "given",
    [pytest.param(w, marks=() if w in USUAL else only_all) for w in sorted(RUNS | ALSO)] + OTHERS,
    ids=" ".join,
)
def test_a_run_and_its_resume(given: tuple[str, ...], folder: Path, on_device: Call) -> None:
    on_device(of_words, given, folder)


def with_box_teacher(folder: Path) -> None:
    box = {"mass": [0.0, 1.0], "thrust": [0.2, 0.8]}
    given = ["env=quadrotor_randomized", "policy=diagonal_gaussian", "learner=ppo"]
    node = cases.run_node(folder / "box", *given, "teacher=alpgmm")
    node["teacher"] |= {"box": box, "every": 4, "signal": "return"}
    cases.resumed(node)


def test_a_box_teacher_and_its_resume(folder: Path, on_device: Call) -> None:
    on_device(with_box_teacher, folder)


def rewarded(name: str, folder: Path) -> str | None:
    """Check that a run resumes exactly; why there is nothing to run, else None."""

    def run(out: Path) -> Node:
        made = test_reward.node(name, out, folder)
        small = {part: cases.shrunk(made[part]) for part in ("policy", "learner")}
        return {**made, **small, "device": DEVICE}

    try:
        a_run_with_it_resumes_exactly(RewardSubject(run))
    except (pytest.skip.Exception, NotApplicable) as reason:
        return str(reason)
    return None


# They are several of the others, or others fit models as they do.
LIKE_OTHERS = ("annotate", "clip", "composite", "drive_shaped", "heron", "icm", "kinesthetic")
LIKE_OTHERS += ("multiplicative", "preference_simclip", "progress", "scaled", "shaping")


@pytest.mark.parametrize("file", once_per_class(test_reward.FILES, without=LIKE_OTHERS))
def test_a_reward_and_its_resume(file: Path, folder: Path, on_device: Call) -> None:
    own = folder / f"of-{file.stem}"
    own.mkdir()
    if (reason := on_device(rewarded, file.stem, own)) is not None:
        pytest.skip(str(reason))


EXACT = {
    "off-policy": ("env=quadrotor", "policy=gaussian", "learner=sac"),
    "on-policy": ("env=quadrotor", "policy=recurrent", "learner=ppo"),
    "world on the CPU": ("env=pendulum", "policy=gaussian", "learner=sac", "policy.chunk=3"),
}


def exactly(given: tuple[str, ...], folder: Path) -> None:
    whole = cases.run_node(folder / "whole", *given, "eval_every=96")
    half = whole | {"out": str(folder / "half"), "eval_every": 0}
    for node in (whole, half | {"steps": cases.HALF}, half | {"resume": str(folder / "half")}):
        cases.run(node)
    one, other = cases.weights(folder / "whole"), cases.weights(folder / "half")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("kind", usually(["off-policy", "world on the CPU"], EXACT))
def test_resume_is_exact_whatever_is_evaluated(kind: str, tmp_path: Path, on_device: Call) -> None:
    on_device(exactly, EXACT[kind], tmp_path)


def evaluated() -> None:
    torch.manual_seed(1)
    env = build(node_of("envs.gym.Gym", id="Pendulum-v1", num_envs=2), VecEnv)
    policy = build(test_learner.node("policy", "flow"), Policy, spec=env.spec).to(DEVICE).eval()
    before = rng_state()
    first, again = (evaluate(policy, env, 2, seed=3).returns for _ in range(2))
    assert torch.equal(first, again)
    after = rng_state()
    assert torch.equal(before["torch"], after["torch"])
    assert len(after["gpu"]) == 1 and torch.equal(before["gpu"][0], after["gpu"][0])


def fork() -> None:
    torch.manual_seed(1)
    drawn = [torch.rand(2, device=DEVICE)]
    with forked(5):
        inside = torch.rand(2, device=DEVICE)
    drawn.append(torch.rand(2, device=DEVICE))
    torch.manual_seed(1)
    assert all(torch.equal(torch.rand(2, device=DEVICE), each) for each in drawn)
    with forked(5):
        assert torch.equal(torch.rand(2, device=DEVICE), inside)
    state = rng_state()
    set_rng_state(state)
    set_rng_state({"torch": state["torch"], "gpu": []})  # of a machine without a GPU


@pytest.mark.parametrize("check", [evaluated, fork], ids=lambda check: check.__name__)
def test_the_generators_are_restored(check: Callable[[], None], on_device: Call) -> None:
    on_device(check)


def update_waits(name: str) -> str:
    learner = test_learner.make(name)
    batches = [test_learner.batch_for(learner, seed) for seed in range(3)]
    learner.to(DEVICE)
    if isinstance(learner, TakesDemonstrations) and learner.rows == "decisions":
        learner.set_demonstrations(tt.to(demonstrated(learner), DEVICE))
    *first, last = (tt.to(batch, DEVICE) for batch in batches)
    for batch in first:
        learner.update(batch)
    with pretend_device.watched() as traffic:
        learner.update(last)
    return traffic.report()


ONCE = (
    *("ppo", "ppo_shared", "ppo_demos", "reinflow", "dppo", "hnpg", "mdpo", "ppo_prior", "props"),
    *("asaf", "vsc_rl"),
)
WAITS_OF_UPDATES = dict.fromkeys(ONCE, 1) | {
    "sqirl": 2,
    "ppo_rapid": 7,
    **dict.fromkeys(("unizero", "scalezero"), 5),  # episodes are followed on the CPU
    "exp3": 8,  # its weights are on the CPU
    "ticket": 12,  # its search is on the CPU
}
"""Waits of one update where there are any; of a whole on-policy batch, not of its minibatches."""


@pytest.mark.parametrize("file", once_per_class(test_learner.FILES))
def test_an_update_does_not_wait(file: Path, on_device: Call) -> None:
    name = file.stem
    report = str(on_device(update_waits, name))
    waits = sum(int(line.split()[0]) for line in report.splitlines())
    assert waits <= WAITS_OF_UPDATES.get(name, 0), report


ON_DEVICE = {
    "ppo": ("policy=diagonal_gaussian", "learner=ppo"),
    "td3": ("policy=deterministic", "learner=td3", "reward=quadrotor_hover"),
    "flashsac": ("policy=block_gaussian", "learner=flashsac"),
    "sac": ("policy=gaussian", "learner=sac"),
}
STEPS = 24


def step_waits(given: tuple[str, ...], folder: Path) -> tuple[int, int, str]:
    node = cases.run_node(folder, "env=quadrotor", *given)
    traffic, updates = cases.steps_of(node, 20, STEPS)
    return len(traffic.waits), updates, traffic.report()


@pytest.mark.parametrize("name", ON_DEVICE)
def test_a_vector_step_waits_once(name: str, tmp_path: Path, on_device: Call) -> None:
    """For the quadrotors that crashed, whose rows it has to know; PPO twice more an update."""
    waits, updates, report = on_device(step_waits, ON_DEVICE[name], tmp_path)  # pyright: ignore
    assert updates > 0
    allowed = STEPS + (2 * updates if name == "ppo" else 0)
    assert waits <= allowed, f"{waits} waits in {STEPS} steps and {updates} updates\n{report}"


WRAPPERS: dict[str, dict[str, Any]] = {
    "episodes.ActionRepeat": {"times": 2},
    "delays.ObservationDelay": {"low": 1, "high": 2},
    "delays.ActionDelay": {"low": 1, "high": 2, "show": True},
    "delays.FrameStack": {"frames": 2},
    "actuators.Actuators": {"gain": [0.5, 1.0], "turn": [-1.0, 1.0]},
    "nan_guard.NanGuard": {},
    "observations.ObservationNoise": {"deviation": {"x": 0.1}},
    "episodes.TimeLimit": {"steps": 3},
}


def wrapped(name: str) -> None:
    world = node_of("envs.quadrotor.hover_env.Quadrotor", device=DEVICE, horizon=5)
    wrappers = [node_of(f"envs.wrappers.{name}", **WRAPPERS[name])]
    node = node_of("envs.wrappers.stack.Wrapped", env=world, wrappers=wrappers, num_envs=3)
    env = build(node, VecEnv)
    env.reset(seed=1)
    action = torch.zeros(3, 4, device=DEVICE)
    for _ in range(4):
        env.step(action)
    state = tt.to(env.get_state(), "cpu")
    ends: list[torch.Tensor] = []
    for _ in range(2):
        env.set_state(state)
        steps = [env.step(action) for _ in range(8)]
        assert all(value.device.type == DEVICE for value in steps[-1].obs.values())
        ends.append(torch.cat([step.next_obs["state"] for step in steps]))
    assert torch.equal(*ends)


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_of_a_world_on_the_device(name: str, on_device: Call) -> None:
    on_device(wrapped, name)
