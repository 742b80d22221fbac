"""Runs, checkpoints and datasets of somebody who wants to run code here: all doors, what a user
types or calls with somebody else's folder, refuse them. Each file would write `pwned`, start a
process or open a connection if it were believed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from embodied import cli
from embodied.commands import checked
from embodied.core import checkpoint
from embodied.core.build import ConfigError, Node
from embodied.datasets.collect import CollectConfig, collect
from embodied.envs.toy import two_gap
from embodied.export.c_header import comment
from embodied.mistakes import mistake
from embodied.policies.gaussian import Config, Gaussian
from embodied.policies.scripted.simple import CheckpointConfig as Trained
from embodied.policies.scripted.simple import CheckpointDemonstrator
from embodied.real_robot.policy import decider
from embodied.reports.datasets import make_reward, of_run
from embodied.viewer.launch import open_session
from embodied.viewer.session.recorded_env import open_recorded
from tests.attacks.child import STARTS, WIRES
from tests.builders import node_of, write_files

SPEC = two_gap.TwoGap(two_gap.Config(num_envs=1)).spec
ENV = node_of("envs.toy.two_gap.TwoGap", num_envs=1)
GAUSSIAN = node_of("policies.gaussian.Gaussian", hidden=[8])
RANDOM = node_of("policies.random.Random")
SAC = {"learner": node_of("learners.off_policy.sac.Sac"), "policy": GAUSSIAN}
RESUMED = {**SAC, "data": {"regime": "off_policy"}}
SEEN: list[str] = []
WATCHING = False


def _audit(event: str, _: tuple[Any, ...]) -> None:
    if WATCHING and event in (*STARTS, *WIRES):
        SEEN.append(event)


sys.addaudithook(_audit)


@pytest.fixture
def watched() -> Iterator[list[str]]:
    """What was started or connected to meanwhile, which should be nothing."""
    global WATCHING
    SEEN.clear()
    WATCHING = True
    yield SEEN
    WATCHING = False
    assert not SEEN


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that an attack would write; what lies in the current folder can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # as `embodied` appends the current folder
    yield tmp_path / "pwned"
    sys.modules.pop("run", None)
    sys.modules.pop("run.code", None)
    assert not (tmp_path / "pwned").exists()


def shell(marker: Path) -> list[str]:
    return ["sh", "-c", f"id > {marker}"]


def untrained() -> Gaussian:
    made = Gaussian(Config(hidden=(8,)), SPEC)
    made.node = GAUSSIAN
    return made


def run_of(folder: Path, acts: Any, env: Any = ENV, settings: dict[str, Any] | None = None) -> Path:
    """A run folder with a sound checkpoint whose YAML files are replaced."""
    saved = checkpoint.save(folder / "checkpoints" / "00000001", untrained(), 1, {}, {})
    text = acts if isinstance(acts, str) else yaml.safe_dump(acts)
    (saved / "policy.yaml").write_text(text)
    checkpoint.seal(saved, checkpoint.read_about(saved))  # as an attacker would
    run = {"env": env, "execute": None, **(settings or {})}
    (folder / "run.yaml").write_text(env if isinstance(env, str) else yaml.safe_dump(run))
    SEEN.clear()  # saving it asks git
    return folder


def command(*argv: str) -> str:
    """The one line with which the command line refuses."""
    args = cli.parse(list(argv))
    with pytest.raises(Exception) as caught:
        checked(args)(args)
    line = mistake(caught.value)
    assert line is not None, repr(caught.value)
    assert "\n" not in line
    return line


def refused(opens: Callable[[Path], object]) -> Callable[[Path], str]:
    """The line with which `opens(run)` refuses."""

    def door(run: Path) -> str:
        with pytest.raises((ConfigError, checkpoint.CheckpointError)) as caught:
            opens(run)
        return str(caught.value)

    return door


DOORS: dict[str, Callable[[Path], str]] = {
    "load": refused(checkpoint.load_policy),
    "export": lambda run: command("export", str(run), "--to", str(run / "exported"), "--header"),
    "eval": lambda run: command("eval", str(run), "episodes=1", "num_envs=1"),
    "view": refused(open_session),
    "robot load": refused(lambda run: decider.load_policy(str(checkpoint.find(run).resolve()))),
    "demonstrator": refused(lambda run: CheckpointDemonstrator(Trained(str(run)), SPEC)),
}


def collect_with_a_shell(marker: Path) -> Node:
    """The review's first file: a command line, with a demonstrator of its own."""
    argv = ["demos", "collect", "env=contact_maze", "demonstrator=random"]
    argv += ["demonstrator._target_=subprocess.Popen", f"out={marker.parent / 'demos'}"]
    argv += [f"demonstrator.args={json.dumps(shell(marker))}", "allow=[subprocess]"]
    return node_of("cli.main", argv=argv)


def servo_arm() -> Node:
    joints = [{"name": "a", "id": 1, "low": 0, "high": 4095, "zero": 2048}]
    bus = {"protocol": "feetech", "port": "/dev/ttyACM0", "joints": joints}
    return node_of("real_robot.drivers.servos.driver.ServoBus", **bus)


def popen(marker: Path) -> Node:
    return {"_target_": "subprocess.Popen", "args": shell(marker)}


def wrapped(base: Any) -> Node:
    return node_of("policies.wrappers.real_time_chunking.RealTimeChunking", base=base)


def leader() -> Node:
    kinematics = "embodied.embodiments.so101.forward"
    return node_of("real_robot.teleop.devices.Leader", arm=servo_arm(), kinematics=kinematics)


EMULATOR = node_of("envs.hardware_sim.franka.Franky")
CHAT = node_of("llm.client.ChatClient", url="http://127.9.9.9:1/v1", model="x", key="HOME")
SERVER = node_of("policies.remote.policy.RemotePolicy", url="ws://127.9.9.9:1")
POLICIES: dict[str, Callable[[Path], Any]] = {
    # the review's three
    "command line": collect_with_a_shell,
    "extends the list": lambda m: node_of("core.build.allow", prefix="subprocess"),
    "imports a module": lambda m: node_of(
        "real_robot.drivers.franka.library.import_module", name="antigravity"
    ),
    # functions and what modules have imported
    "a function of ours": lambda m: node_of("core.atomic_write.write_json", path=str(m), value=1),
    "a class of the standard library": lambda m: node_of(
        "real_robot.emulators.process.subprocess.Popen", args=shell(m)
    ),
    "an imported module": lambda m: node_of("core.checkpoint.subprocess"),
    "an imported class": lambda m: node_of("core.checkpoint.Path"),
    "a library's function": lambda m: node_of("core.checkpoint.load_file"),
    "torch.load": lambda m: node_of("core.checkpoint.torch.load", f=str(m)),
    # other ways to name things
    "a method": lambda m: node_of("policies.gaussian.Gaussian.load_state_dict"),
    "a nested module": lambda m: node_of("core.checkpoint.os.system"),
    "dunder": lambda m: node_of("policies.gaussian.__loader__.load_module"),
    "builtins": lambda m: node_of("policies.gaussian.__builtins__.exec"),
    "another package": popen,
    "a path": lambda m: {"_target_": f"policies./../..{m}.x"},
    "not a name": lambda m: {"_target_": ["os.system"]},
    "allow in the file": lambda m: popen(m) | {"allow": ["subprocess"]},
    # classes of ours in the wrong role
    "an emulator": lambda m: EMULATOR,
    "any process": lambda m: node_of(
        "real_robot.emulators.process.Process", module="http.server", config={}, name="x"
    ),
    "a daemon": lambda m: node_of("real_robot.daemon.client.DaemonProcess", folder=str(m)),
    "a trainer": lambda m: node_of("training.components.RunComponents"),
    "an environment": lambda m: ENV,
    "a driver": lambda m: servo_arm(),
    "a chat": lambda m: CHAT,
    "a policy server": lambda m: SERVER,
    "a policy server as a base": lambda m: wrapped(SERVER),
    "the role itself": lambda m: node_of("core.policy.VecEnv"),
    # in a policy's settings
    "a driver as a base": lambda m: wrapped(servo_arm()),
    "a command as a base": lambda m: wrapped(collect_with_a_shell(m)),
    "an emulator as a base of a base": lambda m: wrapped(wrapped(EMULATOR)),
    "a network for a denoiser": lambda m: node_of("policies.generative.flow.Flow", net=popen(m)),
    "a critic that is a policy's": lambda m: node_of(
        "policies.wrappers.best_of_n.BestOfN", base=GAUSSIAN, critic=EMULATOR
    ),
    "a person's hand": lambda m: node_of("real_robot.teleop.teleop.Teleoperator", device=leader()),
    # YAML
    "a YAML tag": lambda m: f"!!python/object/apply:os.system ['id > {m}']",
    "a YAML tag inside": lambda m: (
        "_target_: embodied.policies.gaussian.Gaussian\n"
        f"hidden: !!python/object/apply:subprocess.check_output [[touch, '{m}']]\n"
    ),
    "an anchor that contains itself": lambda m: (
        "&a {_target_: embodied.policies.random.Random, x: *a}"
    ),
    "a text": lambda m: "embodied.policies.gaussian.Gaussian",
    "nothing": lambda m: "",
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("attack", POLICIES)
def test_no_policy_file_runs_code(
    attack: str, door: str, tmp_path: Path, marker: Path, watched: list[str]
) -> None:
    run = run_of(tmp_path / "run", POLICIES[attack](marker))
    DOORS[door](run)


def code_beside(folder: Path, marker: Path) -> None:
    """Python code that came with the run, where `import` would find it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "code.py").write_text(
        f"open({str(marker)!r}, 'w').write('x')\n"
        "from embodied.envs.toy.two_gap import TwoGap\nclass World(TwoGap):\n    pass\n"
    )


def gym(name: str, **kwargs: Any) -> Node:
    return node_of("envs.gym.Gym", id=name, num_envs=1, kwargs=kwargs)


ENVS: dict[str, Callable[[Path], Any]] = {
    "code beside the run": lambda m: {"_target_": "run.code.World"},
    "code that Gymnasium imports": lambda m: gym("run.code:Swim-v0"),
    "code that an adapter imports": lambda m: gym("GymV26Environment-v0", env_id="run.code:X-v0"),
    "a function": lambda m: collect_with_a_shell(m),
    "a policy": lambda m: RANDOM,
    "a process": lambda m: EMULATOR,
    "in a wrapper": lambda m: node_of("envs.wrappers.stack.Wrapped", env=ENV, wrappers=[popen(m)]),
    "a robot": lambda m: node_of(
        "real_robot.rl.robot_env.RealEnv", robot={"driver": servo_arm()}, world=ENV
    ),
    "the environment's variables": lambda m: ENV | {"text": "${oc.env:HOME}"},
    "instructions to Hydra": lambda m: ENV | {"defaults": [{"/env@_global_": "as_trained"}]},
    "a YAML tag": lambda m: f"env: !!python/object/apply:os.system ['id > {m}']",
}


@pytest.mark.parametrize("door", ["eval", "view"])
@pytest.mark.parametrize("attack", ENVS)
def test_no_run_file_runs_code(
    attack: str, door: str, tmp_path: Path, marker: Path, watched: list[str]
) -> None:
    if (door, attack) in (("view", "instructions to Hydra"),):
        pytest.skip("the viewer composes nothing: an unknown setting")
    run = run_of(tmp_path / "run", RANDOM, ENVS[attack](marker))
    code_beside(run, marker)
    DOORS[door](run)


@pytest.mark.parametrize("kind", ["hydra", "defaults", "allow"])
def test_a_run_that_is_resumed_extends_no_list(
    kind: str, tmp_path: Path, marker: Path, watched: list[str]
) -> None:
    search = {"searchpath": [f"file://{tmp_path / 'run'}"]}
    more: dict[str, Any] = {
        "hydra": {"hydra": search},
        "defaults": {"defaults": ["_self_", {"/evil@_global_": "it"}], "hydra": search},
        "allow": {"allow": ["run"]},
    }[kind]
    run = run_of(tmp_path / "run", GAUSSIAN, {"_target_": "run.code.World"}, RESUMED | more)
    code_beside(run, marker)
    write_files(run, {"evil/it.yaml": "allow: [run]\n"})
    command("train", f"resume={run}")


@pytest.mark.parametrize("reward", [{"driver": servo_arm()}, {"chat": CHAT}])
def test_a_run_that_is_resumed_reaches_nothing_outside(
    reward: Node, tmp_path: Path, watched: list[str]
) -> None:
    run = run_of(tmp_path / "run", GAUSSIAN, ENV, RESUMED | {"reward": reward})
    line = command("train", f"resume={run}")
    assert "beyond this process" in line and "allow=[" in line


def test_a_design_that_is_resumed_allows_nothing(tmp_path: Path, watched: list[str]) -> None:
    """Its words become arguments of `embodied train`."""
    for words in (["env=pendulum", "allow=[evil]"], ["--config-dir", "evil"]):
        saved = {"config": {"learn": [], "env": ENV}, "words": words}
        (tmp_path / "design.yaml").write_text(yaml.safe_dump(saved))
        assert "if you trust it" in command("reward", "design", f"resume={tmp_path}")


def test_a_dataset_names_an_environment_and_nothing_else(
    tmp_path: Path, marker: Path, watched: list[str]
) -> None:
    """The viewer reads collect.yaml beside the episodes."""
    how = {"success_only": False, "episodes": 1, "out": str(tmp_path / "data")}
    collect(CollectConfig(ENV, RANDOM, **how), lambda kept, played: None)
    watched.clear()
    sound = {"an environment", "a critic that is a policy's"}
    composed = {"the environment's variables", "instructions to Hydra"}  # nothing is, here
    for name, made in {**ENVS, **POLICIES}.items():
        found = made(marker)
        if not isinstance(found, dict) or name in sound | composed:
            continue
        (tmp_path / "data" / "collect.yaml").write_text(yaml.safe_dump({"env": found}))
        with pytest.raises(ConfigError):
            open_recorded(tmp_path / "data", 0, None)
        assert not marker.exists() and not watched, name


def test_a_reward_of_a_run_is_a_reward(tmp_path: Path, marker: Path, watched: list[str]) -> None:
    secret = {"of": "embodied.core.checkpoint.file_hash", "path": "/etc/passwd"}
    revision = {"function": "embodied.core.checkpoint.git_revision", "start": {}}
    rewards = (
        collect_with_a_shell(marker),
        CHAT,
        node_of("rewards.handcrafted.composite.ScheduledWeights", **revision),
        node_of("rewards.handcrafted.factors.Shaping", potential=secret),
        node_of("rewards.handcrafted.composite.CompositeReward", terms={"a": {"reward": EMULATOR}}),
    )
    for number, reward in enumerate(rewards):
        run = run_of(tmp_path / str(number), GAUSSIAN, settings={"reward": reward})
        state = {"loop": {"reward": 0}}
        checkpoint.save(run / "checkpoints" / "00000001", untrained(), 1, {}, state)
        watched.clear()
        with pytest.raises(ConfigError):
            made, state = of_run(run)
            make_reward(made, state, SPEC, 0.9)
        assert not watched


def test_a_reference_leads_to_the_same_check(
    tmp_path: Path, marker: Path, watched: list[str]
) -> None:
    """A policy that names another run, by `..` and by a link: that one is judged like the first."""
    run_of(tmp_path / "evil", collect_with_a_shell(marker))
    (tmp_path / "link").symlink_to(tmp_path / "evil")
    (tmp_path / "other").mkdir()
    for path in ("other/../evil", "link"):
        demonstrator = "policies.scripted.simple.CheckpointDemonstrator"
        DOORS["load"](run_of(tmp_path / "run", node_of(demonstrator, run=str(tmp_path / path))))
        assert not watched


class Bomb:
    """What pickle would call."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def test_no_tensor_file_runs_code(tmp_path: Path, marker: Path) -> None:
    run = run_of(tmp_path / "run", GAUSSIAN)
    folder = checkpoint.find(run)
    for file in ("learner.pt", "loop.pt", "policy.safetensors"):
        torch.save({"x": Bomb(marker)}, folder / file)
        checkpoint.seal(folder, checkpoint.read_about(run))
    for name in ("learner", "loop"):
        with pytest.raises(Exception, match=r"(?i)weights.only"):
            checkpoint.load_state(run, name)
    DOORS["load"](run)


@pytest.mark.parametrize(
    "text", ["*/ int main(void) { system(0); } /*", "\\\n#include </etc/passwd>", "??/\n", "\r"]
)
def test_no_name_in_a_file_becomes_c_code(text: str) -> None:
    """`embodied export --header` compiles what it writes, and runs it."""
    assert not {*"*\\\n\r#?{}"} & {*comment(text)}
