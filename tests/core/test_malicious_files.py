"""Runs, checkpoints and datasets of somebody who wants to run code here: all doors refuse them.

Every file would write `pwned`, start a process or open a connection if it were believed. A door is
what a user types or calls with somebody else's folder.
"""

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
from embodied.core import checkpoint
from embodied.core.build import ConfigError
from embodied.envs.toy import two_gap
from embodied.policies.gaussian import Config, Gaussian

SPEC = two_gap.TwoGap(two_gap.Config(num_envs=1)).spec
ENV = {"_target_": "embodied.envs.toy.two_gap.TwoGap", "num_envs": 1}
GAUSSIAN = {"_target_": "embodied.policies.gaussian.Gaussian", "hidden": [8]}
RANDOM = {"_target_": "embodied.policies.random.Random"}
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty")
WIRES = ("socket.connect", "socket.bind", "socket.getaddrinfo", "urllib.Request")
SEEN: list[str] = []
WATCHING = False


def _audit(event: str, _: tuple[Any, ...]) -> None:
    if WATCHING and event in (*STARTS, *WIRES):
        SEEN.append(event)


sys.addaudithook(_audit)


@pytest.fixture
def watched() -> Iterator[list[str]]:
    """What was started or connected to meanwhile."""
    global WATCHING
    SEEN.clear()
    WATCHING = True
    yield SEEN
    WATCHING = False


def shell(marker: Path) -> list[str]:
    return ["sh", "-c", f"id > {marker}"]


def run_of(folder: Path, acts: Any, env: Any = ENV, settings: dict[str, Any] | None = None) -> Path:
    """A run folder with a sound checkpoint whose YAML files are replaced."""
    made = Gaussian(Config(hidden=(8,)), SPEC)
    made.node = GAUSSIAN
    saved = checkpoint.save(folder / "checkpoints" / "00000001", made, 1, {}, {})
    text = acts if isinstance(acts, str) else yaml.safe_dump(acts)
    (saved / "policy.yaml").write_text(text)
    run = {"env": env, "execute": None, **(settings or {})}
    (folder / "run.yaml").write_text(env if isinstance(env, str) else yaml.safe_dump(run))
    return folder


def command(*argv: str) -> str:
    """The one line with which the command line refuses."""
    args = cli.parse(list(argv))
    with pytest.raises(Exception) as caught:
        args.run(args)
    line = cli.mistake(caught.value)
    assert line is not None, repr(caught.value)
    assert "\n" not in line
    return line


def load(run: Path) -> str:
    with pytest.raises((ConfigError, checkpoint.CheckpointError)) as caught:
        checkpoint.load_policy(run)
    return str(caught.value)


def export(run: Path) -> str:
    return command("export", str(run), "--to", str(run / "exported"), "--header")


def evaluate(run: Path) -> str:
    return command("eval", str(run), "episodes=1", "num_envs=1")


def view(run: Path) -> str:
    """As the viewer opens it, and plays its newest checkpoint."""
    from embodied.viewer.launch import open_session

    with pytest.raises((ConfigError, checkpoint.CheckpointError)) as caught:
        open_session(run)
    return str(caught.value)


def robot(run: Path) -> str:
    """As the process beside the arm gets it from `embodied robot load RUN`."""
    from embodied.real_robot.policy import main

    with pytest.raises((ConfigError, checkpoint.CheckpointError)) as caught:
        main.load_policy(str(checkpoint.find(run).resolve()))
    return str(caught.value)


def demonstrate(run: Path) -> str:
    """As a demonstrator (`demonstrator=checkpoint demonstrator.run=RUN`)."""
    from embodied.policies.scripted.checkpoint import CheckpointDemonstrator
    from embodied.policies.scripted.checkpoint import Config as Trained

    with pytest.raises((ConfigError, checkpoint.CheckpointError)) as caught:
        CheckpointDemonstrator(Trained(str(run)), SPEC)
    return str(caught.value)


DOORS: dict[str, Callable[[Path], str]] = {
    "load": load,
    "export": export,
    "eval": evaluate,
    "view": view,
    "robot load": robot,
    "demonstrator": demonstrate,
}


def collect_with_a_shell(marker: Path) -> dict[str, Any]:
    """The review's first file: a command line, with a demonstrator of its own."""
    argv = ["demos", "collect", "env=contact_maze", "demonstrator=random"]
    argv += ["demonstrator._target_=subprocess.Popen", f"out={marker.parent / 'demos'}"]
    argv += [f"+demonstrator.args={json.dumps(shell(marker))}", "allow=[subprocess]"]
    return {"_target_": "embodied.cli.main", "argv": argv}


def servo_arm() -> dict[str, Any]:
    target = "embodied.real_robot.drivers.servos.driver.ServoBus"
    joints = [{"name": "a", "id": 1, "low": 0, "high": 4095, "zero": 2048}]
    return {"_target_": target, "protocol": "feetech", "port": "/dev/ttyACM0", "joints": joints}


def franka_sim() -> dict[str, Any]:
    return {"_target_": "embodied.envs.hardware_sim.franka.Franky"}


def wrapped(base: Any) -> dict[str, Any]:
    target = "embodied.policies.wrappers.real_time_chunking.RealTimeChunking"
    return {"_target_": target, "base": base}


POLICIES: dict[str, Callable[[Path], Any]] = {
    # the review's three
    "command line": collect_with_a_shell,
    "extends the list": lambda m: {"_target_": "embodied.core.build.allow", "prefix": "subprocess"},
    "imports a module": lambda m: {
        "_target_": "embodied.real_robot.drivers.franka.errors.import_module",
        "name": "antigravity",
    },
    # functions and what modules have imported
    "a function of ours": lambda m: {
        "_target_": "embodied.core.atomic_write.write_json",
        "path": str(m),
        "value": 1,
    },
    "a class of the standard library": lambda m: {
        "_target_": "embodied.real_robot.emulators.process.subprocess.Popen",
        "args": shell(m),
    },
    "an imported module": lambda m: {"_target_": "embodied.core.checkpoint.subprocess"},
    "an imported class": lambda m: {"_target_": "embodied.core.checkpoint.Path"},
    "a library's function": lambda m: {"_target_": "embodied.core.checkpoint.load_file"},
    "torch.load": lambda m: {"_target_": "embodied.core.checkpoint.torch.load", "f": str(m)},
    # other ways to name things
    "a method": lambda m: {"_target_": "embodied.policies.gaussian.Gaussian.load_state_dict"},
    "a nested module": lambda m: {"_target_": "embodied.core.checkpoint.os.system"},
    "dunder": lambda m: {"_target_": "embodied.policies.gaussian.__loader__.load_module"},
    "builtins": lambda m: {"_target_": "embodied.policies.gaussian.__builtins__.exec"},
    "another package": lambda m: {"_target_": "subprocess.Popen", "args": shell(m)},
    "a path": lambda m: {"_target_": f"policies./../..{m}.x"},
    "not a name": lambda m: {"_target_": ["os.system"]},
    "allow in the file": lambda m: {
        "_target_": "subprocess.Popen",
        "args": shell(m),
        "allow": ["subprocess"],
    },
    "an old name of what is outside": lambda m: {
        "_target_": "embodied.foundation.endpoint.Endpoint"
    },
    # classes of ours in the wrong role
    "an emulator": lambda m: franka_sim(),
    "any process": lambda m: {
        "_target_": "embodied.real_robot.emulators.process.Process",
        "module": "http.server",
        "config": {},
        "name": "x",
    },
    "a daemon": lambda m: {
        "_target_": "embodied.real_robot.daemon.client.DaemonProcess",
        "folder": str(m),
    },
    "a trainer": lambda m: {"_target_": "embodied.training.components.RunComponents"},
    "an environment": lambda m: ENV,
    "a driver": lambda m: servo_arm(),
    "a chat": lambda m: {
        "_target_": "embodied.llm.client.ChatClient",
        "url": "http://127.9.9.9:1/v1",
        "model": "x",
        "key": "HOME",
    },
    "a policy server": lambda m: {
        "_target_": "embodied.policies.remote.policy.RemotePolicy",
        "url": "ws://127.9.9.9:1",
    },
    "a policy server as a base": lambda m: wrapped(
        {"_target_": "embodied.policies.remote.policy.RemotePolicy", "url": "ws://127.9.9.9:1"}
    ),
    "the role itself": lambda m: {"_target_": "embodied.core.policy.VecEnv"},
    # in a policy's settings
    "a driver as a base": lambda m: wrapped(servo_arm()),
    "a command as a base": lambda m: wrapped(collect_with_a_shell(m)),
    "an emulator as a base of a base": lambda m: wrapped(wrapped(franka_sim())),
    "a network for a denoiser": lambda m: {
        "_target_": "embodied.policies.generative.flow.Flow",
        "net": {"_target_": "subprocess.Popen", "args": shell(m)},
    },
    "a critic that is a policy's": lambda m: {
        "_target_": "embodied.policies.wrappers.best_of_n.BestOfN",
        "base": GAUSSIAN,
        "critic": franka_sim(),
    },
    "a person's hand": lambda m: {
        "_target_": "embodied.real_robot.teleop.teleop.Teleoperator",
        "device": {
            "_target_": "embodied.real_robot.teleop.devices.Leader",
            "arm": servo_arm(),
            "kinematics": "embodied.embodiments.so101.forward",
        },
    },
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
    attack: str, door: str, tmp_path: Path, watched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    marker = tmp_path / "pwned"
    run = run_of(tmp_path / "run", POLICIES[attack](marker))
    watched.clear()  # saving it asks git
    DOORS[door](run)
    assert not marker.exists()
    assert not watched


def code_beside(folder: Path, marker: Path) -> None:
    """Python code that came with the run, where `import` would find it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "code.py").write_text(
        f"open({str(marker)!r}, 'w').write('x')\n"
        "from embodied.envs.toy.two_gap import TwoGap\nclass World(TwoGap):\n    pass\n"
    )


def gym(name: str, **kwargs: Any) -> dict[str, Any]:
    return {"_target_": "embodied.envs.gym.Gym", "id": name, "num_envs": 1, "kwargs": kwargs}


ENVS: dict[str, Callable[[Path], Any]] = {
    "code beside the run": lambda m: {"_target_": "run.code.World"},
    "code that Gymnasium imports": lambda m: gym("run.code:Swim-v0"),
    "code that an adapter imports": lambda m: gym("GymV26Environment-v0", env_id="run.code:X-v0"),
    "a function": lambda m: collect_with_a_shell(m),
    "a policy": lambda m: RANDOM,
    "a process": lambda m: franka_sim(),
    "in a wrapper": lambda m: {
        "_target_": "embodied.envs.wrappers.stack.Wrapped",
        "env": ENV,
        "wrappers": [{"_target_": "subprocess.Popen", "args": shell(m)}],
    },
    "a robot": lambda m: {
        "_target_": "embodied.real_robot.rl.robot_env.RealEnv",
        "robot": {"driver": servo_arm()},
        "world": ENV,
    },
    "the environment's variables": lambda m: ENV | {"text": "${oc.env:HOME}"},
    "instructions to Hydra": lambda m: ENV | {"defaults": [{"/env@_global_": "as_trained"}]},
    "a YAML tag": lambda m: f"env: !!python/object/apply:os.system ['id > {m}']",
}


@pytest.mark.parametrize("door", ["eval", "view"])
@pytest.mark.parametrize("attack", ENVS)
def test_no_run_file_runs_code(
    attack: str, door: str, tmp_path: Path, watched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if (door, attack) in (("view", "instructions to Hydra"),):
        pytest.skip("the viewer composes nothing: an unknown setting")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # as `embodied` appends the current folder
    marker = tmp_path / "pwned"
    run = run_of(tmp_path / "run", RANDOM, ENVS[attack](marker))
    code_beside(run, marker)
    watched.clear()
    try:
        DOORS[door](run)
    finally:
        sys.modules.pop("run", None)
        sys.modules.pop("run.code", None)
    assert not marker.exists()
    assert not watched


@pytest.mark.parametrize("kind", ["hydra", "defaults", "allow"])
def test_a_run_that_is_resumed_extends_no_list(
    kind: str, tmp_path: Path, watched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    marker = tmp_path / "pwned"
    more: dict[str, Any] = {
        "hydra": {"hydra": {"searchpath": [f"file://{tmp_path / 'run'}"]}},
        "defaults": {
            "defaults": ["_self_", {"/evil@_global_": "it"}],
            "hydra": {"searchpath": [f"file://{tmp_path / 'run'}"]},
        },
        "allow": {"allow": ["run"]},
    }[kind]
    learner = {"_target_": "embodied.learners.off_policy.sac.Sac"}
    settings = {"learner": learner, "policy": GAUSSIAN, "data": {"regime": "off_policy"}, **more}
    run = run_of(tmp_path / "run", GAUSSIAN, {"_target_": "run.code.World"}, settings)
    code_beside(run, marker)
    (run / "evil").mkdir()
    (run / "evil" / "it.yaml").write_text("allow: [run]\n")
    watched.clear()
    try:
        command("train", f"resume={run}")
    finally:
        sys.modules.pop("run", None)
        sys.modules.pop("run.code", None)
    assert not marker.exists()
    assert not watched


@pytest.mark.parametrize("node", [{"driver": servo_arm()}, {"chat": POLICIES["a chat"](Path("x"))}])
def test_a_run_that_is_resumed_reaches_nothing_outside(
    node: dict[str, Any], tmp_path: Path, watched: list[str]
) -> None:
    learner = {"_target_": "embodied.learners.off_policy.sac.Sac"}
    settings = {"learner": learner, "policy": GAUSSIAN, "data": {"regime": "off_policy"}}
    run = run_of(tmp_path / "run", GAUSSIAN, ENV, settings | {"reward": node})
    watched.clear()
    line = command("train", f"resume={run}")
    assert "beyond this process" in line and "allow=[" in line
    assert not watched


def test_a_design_that_is_resumed_allows_nothing(tmp_path: Path, watched: list[str]) -> None:
    """Its words become arguments of `embodied train`."""
    for words, learn in (["env=pendulum", "allow=[evil]"], []), (["--config-dir", "evil"], []):
        saved = {"config": {"learn": learn, "env": ENV}, "words": words}
        (tmp_path / "design.yaml").write_text(yaml.safe_dump(saved))
        assert "if you trust it" in command("reward", "design", f"resume={tmp_path}")
    assert not watched


def test_a_dataset_names_an_environment_and_nothing_else(
    tmp_path: Path, watched: list[str]
) -> None:
    """The viewer reads collect.yaml beside the episodes."""
    from embodied.datasets.collect import CollectConfig, collect
    from embodied.viewer.session.recorded_env import open_recorded

    config = CollectConfig(env=ENV, demonstrator=RANDOM, episodes=1, out=str(tmp_path / "data"))
    collect(CollectConfig(**{**vars(config), "success_only": False}), lambda kept, played: None)
    marker = tmp_path / "pwned"
    for name, made in {**ENVS, **POLICIES}.items():
        node = made(marker)
        if not isinstance(node, dict) or name in ("an environment", "a critic that is a policy's"):
            continue
        if name in ("the environment's variables", "instructions to Hydra"):
            continue  # nothing is composed
        (tmp_path / "data" / "collect.yaml").write_text(yaml.safe_dump({"env": node}))
        watched.clear()
        with pytest.raises(ConfigError):
            open_recorded(tmp_path / "data", 0, None)
        assert not marker.exists(), name
        assert not watched, name


def test_a_reward_of_a_run_is_a_reward(tmp_path: Path, watched: list[str]) -> None:
    from embodied.reports.datasets import make_reward, of_run

    marker = tmp_path / "pwned"
    for number, node in enumerate(
        (
            collect_with_a_shell(marker),
            POLICIES["a chat"](marker),
            {"_target_": "embodied.rewards.handcrafted.scheduled.ScheduledWeights"}
            | {"function": "embodied.core.checkpoint.git_revision", "start": {}},
            {"_target_": "embodied.rewards.handcrafted.factors.Shaping"}
            | {"potential": {"of": "embodied.core.checkpoint.file_hash", "path": "/etc/passwd"}},
            {"_target_": "embodied.rewards.handcrafted.composite.CompositeReward"}
            | {"terms": {"a": {"reward": franka_sim()}}},
        )
    ):
        run = run_of(tmp_path / str(number), GAUSSIAN, settings={"reward": node})
        checkpoint.save(run / "checkpoints" / "00000001", _saved(), 1, {}, {"loop": {"reward": 0}})
        watched.clear()
        with pytest.raises(ConfigError):
            made, state = of_run(run)
            make_reward(made, state, SPEC, 0.9)
        assert not marker.exists()
        assert not watched


def _saved() -> Gaussian:
    made = Gaussian(Config(hidden=(8,)), SPEC)
    made.node = GAUSSIAN
    return made


def test_a_reference_leads_to_the_same_check(tmp_path: Path, watched: list[str]) -> None:
    """A policy that names another run, by `..` and by a link: that one is judged like the first."""
    marker = tmp_path / "pwned"
    run_of(tmp_path / "evil", collect_with_a_shell(marker))
    (tmp_path / "link").symlink_to(tmp_path / "evil")
    target = "embodied.policies.scripted.checkpoint.CheckpointDemonstrator"
    for path in (tmp_path / "other" / ".." / "evil", tmp_path / "link"):
        (tmp_path / "other").mkdir(exist_ok=True)
        run = run_of(tmp_path / "run", {"_target_": target, "run": str(path)})
        watched.clear()
        load(run)
        assert not marker.exists()
        assert not watched


class Bomb:
    """What pickle would call."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def test_no_tensor_file_runs_code(tmp_path: Path) -> None:
    marker = tmp_path / "pwned"
    run = run_of(tmp_path / "run", GAUSSIAN)
    for name in ("learner", "loop"):
        torch.save({"x": Bomb(marker)}, checkpoint.find(run) / f"{name}.pt")
        with pytest.raises(Exception, match=r"(?i)weights.only"):
            checkpoint.load_state(run, name)
    torch.save({"x": Bomb(marker)}, checkpoint.find(run) / "policy.safetensors")
    load(run)
    assert not marker.exists()


def test_no_name_in_a_file_becomes_c_code(tmp_path: Path) -> None:
    """`embodied export --header` compiles what it writes, and runs it."""
    from embodied.export.c_header import comment

    for text in (
        "*/ int main(void) { system(0); } /*",
        "\\\n#include </etc/passwd>",
        "??/\n",
        "\r",
    ):
        assert not {*"*\\\n\r#?{}"} & {*comment(text)}
