"""The command line: mistakes are one line, help and lists are whole, every experiment runs."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from embodied.cli import main, verbs
from embodied.commands import demo, table
from embodied.commands.train import fresh
from embodied.compose import PACKAGED, compose, options
from embodied.core import checkpoint, tensors
from embodied.core.build import ConfigError, resolve
from embodied.core.config_fields import settings_of
from embodied.core.policy import Policy, PolicyWrapper
from embodied.datasets.transitions import SOURCE
from embodied.envs.process.env import interpreter
from embodied.learners.learner import Learner
from embodied.mistakes import mistake
from embodied.settings_tables import command_rows, regime_rows
from embodied.training.config import facts, read_config
from embodied.training.logger import read_metrics
from tests.builders import exit_of, python, wait_until, write_files
from tests.tiers import once_per_option

# On an arm, in real time: tests/docs runs its page. In a model: tests/training/test_reward.py.
APART = {"robot_reach_rlpd", "fr3_insert_diwa"}
EXPERIMENTS = [name for name in options("experiment", [PACKAGED]) if name not in APART]


@dataclass(frozen=True)
class Outcome:
    code: int | str
    out: str
    err: str


class Shell:
    """Runs a command in this process as the console script does."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *words: str | Path) -> Outcome:
        code = exit_of(*words)
        shown = self.capsys.readouterr()
        return Outcome(code, shown.out, shown.err)

    def refuses(self, says: str, *words: str | Path) -> str:
        """The one line with which a command is refused; `says` is in it."""
        outcome = self(*words)
        assert outcome.code == 2 and outcome.err.count("\n") == 1, outcome.err
        assert outcome.err.startswith("embodied: ") and says in outcome.err, outcome.err
        return outcome.err


@pytest.fixture
def embodied(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


MISTAKES = [
    (line.partition(" | ")[0], line.partition(" | ")[2])
    for line in Path(__file__).with_name("mistakes.txt").read_text().splitlines()
]
"""Commands, and what the line that answers each says."""


@pytest.mark.parametrize(("line", "says"), MISTAKES)
def test_a_mistake_is_one_line(embodied: Shell, tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / "empty").mkdir()
    places = {name: tmp_path / name[1:-1] for name in ("{out}", "{empty}", "{bad}")}
    places["{bad}"].joinpath("env").mkdir(parents=True)
    (places["{bad}"] / "env" / "bad.yaml").write_text("a: [1,\nb: 2\n")
    for mark, place in places.items():
        line = line.replace(mark, str(place))
    embodied.refuses(says, *line.split())


# What these ask for needs torch.
LOADS = re.compile(
    r"\{|\bdata\.|device=|port=many|convert|robot seed|^sweep env"
    r"|^(eval|serve|improve|demos info)$"
)
IN_TURN = """
import sys
from embodied.cli import main
for line in sys.stdin.read().splitlines():
    try:
        main(line.split())
    except SystemExit as stop:
        assert stop.code == 2, line
    assert "torch" not in sys.modules, line
"""


def test_a_mistake_imports_no_torch() -> None:
    """Importing it takes longer than everything else."""
    lines = [line for line, _ in MISTAKES if not LOADS.search(line)]
    assert len(lines) > 100
    words = [sys.executable, "-c", IN_TURN]
    done = subprocess.run(words, input="\n".join(lines), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_fault_of_ours_is_not_hidden(embodied: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    import embodied.commands.list as command

    def broken(name: str) -> str:
        raise RuntimeError("a bug")

    monkeypatch.setattr(command, "plural", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["list", "envs"])


def test_whose_fault_it_is() -> None:
    """A package that is not installed is for the user to mend, one of ours that is not there, and a
    ValueError from the middle of a computation, are not."""
    missing = ModuleNotFoundError("No module named 'viser'", name="viser")
    assert mistake(missing) == 'the package viser is missing: pip install "embodied-rl[all]"'
    assert mistake(ModuleNotFoundError("gone", name="embodied.gone")) is None
    with pytest.raises(ValueError) as found:
        tensors.length({"a": torch.zeros(2), "b": torch.zeros(3)})
    assert mistake(found.value) is None
    file_error = OSError(28, "No space left on device", "run/metrics.jsonl")
    assert mistake(file_error) == "run/metrics.jsonl: No space left on device"
    full = mistake(RuntimeError("std::bad_alloc"))  # of torch.Generator
    assert full is not None and full.startswith("this needs more memory than there is")


def test_help_is_quick_because_it_loads_nothing() -> None:
    """No command's module, torch or Hydra is imported for --help; every verb is in it."""
    code = (
        "import sys\nfrom embodied.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "assert not {'torch', 'hydra', 'numpy', 'rich'} & set(sys.modules)\n"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in verbs())


@pytest.mark.parametrize("verb", verbs())
def test_each_command_explains_itself(embodied: Shell, verb: str) -> None:
    outcome = embodied(verb, "--help")
    assert outcome.code == 0 and f"usage: embodied {verb}" in outcome.out
    assert verbs()[verb].endswith(".")


def test_alone_it_helps_and_it_has_a_version(embodied: Shell) -> None:
    outcome = embodied()
    assert outcome.code == 0 and "usage: embodied" in outcome.out and "train" in outcome.out
    assert embodied("--version").out.startswith("embodied 0.")


def functions(name: str, entry: dict[str, Any], usual: str) -> Iterator[tuple[str, str]]:
    """Every command of the table, with the function that it runs."""
    runs = entry.get("run", usual)
    if "kinds" not in entry:
        yield name, runs.replace("KIND", name.rpartition(" ")[2])
    for kind, each in entry.get("kinds", {}).items():
        yield from functions(f"{name} {kind}", each, runs)


def test_each_command_of_the_table_has_its_function() -> None:
    entries = table().items()
    found = dict(p for name, entry in entries for p in functions(name, entry, f"{name}.run"))
    assert len(found) > 30 and found["robot teleop"] == "deploy.teleop"
    for runs in found.values():
        module, _, name = runs.rpartition(".")
        assert callable(getattr(importlib.import_module(f"embodied.commands.{module}"), name))


def test_train_help_lists_every_setting(embodied: Shell) -> None:
    shown = embodied("train", "--help").out
    rows = [*command_rows(PACKAGED / "train.yaml"), *regime_rows([PACKAGED])]
    assert all(row.key in shown and row.value in shown for row in rows)
    assert not [row.key for row in rows if not row.says], "a sentence each"
    config = settings_of("embodied.training.config.RunConfig") or []
    top = {row.key.partition("=")[0].partition(".")[0] for row in rows}
    assert {setting.name for setting in config} <= top


def test_list_shows_every_option_with_a_sentence(embodied: Shell) -> None:
    listed = embodied("list").out
    for word in ("replays", "chats", "data"):
        assert f"\n{word} " in listed and embodied("list", word).code == 0
    for group, word in (("env", "envs"), ("policy", "policies"), ("experiment", "experiments")):
        assert f"\n{word} " in listed
        lines = embodied("list", word).out.splitlines()
        for name in options(group, [PACKAGED]):
            (line,) = (line for line in lines if line.split()[:1] == [name])
            assert len(line.split()) > 2, line
        heads = {line for line in lines if line.endswith(":") and "   " not in line}
        each = [line for line in lines if len(line.split()) > 1 and line not in heads]
        assert len(each) == len(options(group, [PACKAGED])), "a line for each"


def test_list_knows_the_groups_that_users_fill(embodied: Shell, tmp_path: Path) -> None:
    assert "filter/NAME.yaml" in embodied("list", "filters").out
    write_files(tmp_path, {"filter/near.yaml": "# Near.\n_target_: my_lab.near.Near\n"})
    assert embodied("list", "filters", "--config-dir", tmp_path).out.split() == ["near", "Near."]


def test_show_and_list_show_one_option(embodied: Shell) -> None:
    shown = embodied("show", "learner=sac").out
    assert embodied("list", "sac").out == shown
    line = next(line for line in shown.splitlines() if "learner.gamma" in line)
    assert line.split()[1] == "0.99" and "discount" in line


def test_show_prints_the_configuration_and_runs_nothing(
    embodied: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("learner.gamma=0.9", "learner.batch_size=1e2", "steps=1e4")
    node = yaml.safe_load(embodied("show", "experiment=pendulum_sac", *words).out)
    assert node["learner"]["gamma"] == 0.9 and node["out"] == "outputs/pendulum_sac-0"
    steps = read_config(node).steps
    assert steps == 10_000 and isinstance(steps, int)
    assert not list(tmp_path.iterdir())


DOT = """from dataclasses import dataclass
@dataclass(frozen=True)
class Config:
    size: int = 1
class Dot:
    def __init__(self, config: Config) -> None: ...
"""


def test_own_folders_and_packages(
    embodied: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's YAML is found by flag and by environment variable; classes need `allow`."""
    option = "# A dot.\n_target_: dotworld.Dot\nsize: 3\n"
    write_files(tmp_path, {"yaml/env/dot.yaml": option, "dotworld.py": DOT})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    words = ["env=dot", "policy=gaussian", "learner=sac"]
    allowed = [*words, "allow=[dotworld]"]
    with pytest.raises(ConfigError, match="there is no env"):
        compose("train", words)
    with pytest.raises(ConfigError, match=r'add its package with allow=\["dotworld"\]'):
        compose("train", words, ["yaml"])
    made = compose("train", [*allowed, "env.size=4"], ["yaml"])
    assert made.node["env"] == {"_target_": "dotworld.Dot", "size": 4}
    assert made.choices["env"] == "dot" and "allow" not in made.node
    with pytest.raises(ConfigError, match='no setting "sise"'):
        compose("train", [*allowed, "env.sise=4"], ["yaml"])
    monkeypatch.setenv("EMBODIED_CONFIGS", "yaml")
    assert "A dot." in embodied("list", "envs").out


def test_an_own_option_may_not_hide_ours(tmp_path: Path) -> None:
    write_files(tmp_path, {"env/pendulum.yaml": "_target_: embodied.envs.gym.Gym\n"})
    with pytest.raises(ConfigError, match="rename it"):
        compose("train", ["experiment=pendulum_sac"], [tmp_path])


def test_the_order_of_precedence() -> None:
    """Defaults, then the experiment, then the size, then the command line; all of it plain."""
    node = compose("train", ["experiment=pendulum_sac"]).node
    assert (node["steps"], node["eval"]["episodes"], node["threads"]) == (10000, 50, 1)
    small = compose("train", ["experiment=pendulum_sac", "size=debug", "data.warmup_steps=7"]).node
    assert small["steps"] < 1000 and small["data"]["warmup_steps"] == 7
    assert small["eval"]["episodes"] < 10 and small["learner"]["batch_size"] < 100
    assert type(small) is dict and type(small["learner"]) is dict
    node = compose("train", ["experiment=fr3_insert_diwa", "eval.env.horizon=7"]).node
    assert node["eval"]["env"]["horizon"] == 7


def test_a_group_of_an_experiment_can_be_left_out() -> None:
    def reward(name: str, *words: str) -> Any:
        return compose("train", [f"experiment={name}", *words]).node.get("reward")

    assert reward("quadrotor_hover")["_target_"]
    assert reward("quadrotor_hover", "reward=null") is None
    assert reward("fr3_reach_goal", "reward=null") is None, "its settings of the reward too"
    with pytest.raises(ConfigError, match=r"reward.scale is set but no reward is chosen"):
        reward("fr3_reach_sac", "reward=null", "reward.scale=2")


def test_runs_of_other_seeds_and_sizes_have_other_folders() -> None:
    made = {
        "": "outputs/pendulum_sac-0",
        "seed=3": "outputs/pendulum_sac-3",
        "size=debug": "outputs/pendulum_sac-debug-0",
        "name=mine seed=3": "outputs/mine-3",
        "out=here": "here",
    }
    found = {more: fresh(["experiment=pendulum_sac", *more.split()], [])["out"] for more in made}
    assert found == made


def test_the_header_says_what_is_rewarded_and_taught() -> None:
    words = ["experiment=franka_reach_vlm", "reward.prompt=touch the ball"]
    assert "touch the ball" in facts(read_config(fresh(words, [])))["reward"]
    taught = facts(read_config(fresh(["experiment=fr3_reach_far", "teacher=alpgmm"], [])))
    assert taught["teacher"].startswith("AlpGmm")


ONE_STEP = r"/learner: (sac|rlpd|redq|cql|iql|rebrac)\b"
"""Learners whose experiments decide once a step (on a base policy only `residual` does)."""
SPARSE = r"/env: (fr3|ogbench)_"
NOT_SPARSE = r"/reward: |  reward: (?!sparse)|/finetune: (?!residual)|/env: \w+_mimic"


def test_experiments_with_sparse_rewards_have_n_step_returns() -> None:
    texts = {name: file.read_text() for name, file in options("experiment", [PACKAGED]).items()}
    found = {
        name: yaml.safe_load(text)["learner"].get("n_step", 1)
        for name, text in texts.items()
        if re.search(ONE_STEP, text) and re.search(SPARSE, text) and not re.search(NOT_SPARSE, text)
    }
    assert len(found) > 8 and all(5 <= n <= 10 for n in found.values()), found


def require_packages(env: str) -> None:
    if env.startswith("ogbench_"):
        pytest.importorskip("ogbench", reason="OGBench is not installed (extra: ogbench)")
    if env.startswith("robosuite_"):
        try:
            interpreter("robosuite")
        except ConfigError as reason:
            pytest.skip(str(reason))


class Inputs:
    """A few demonstrations of an environment, and a clone of them, made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def demos(self, env: str) -> Path:
        out = self.folder / f"{env}-demos"
        words = f"demos collect env={env} episodes=3 num_envs=3 out={out}"
        if env == "ogbench_cube":  # the task's own script cannot
            words += " env.play=true env.horizon=20 demonstrator=ogbench_oracle success_only=false"
        elif env == "bodies":
            words += " env.play=true demonstrator=shown success_only=false"
        elif env not in options("demonstrator", [PACKAGED]) and not self.task(env):
            words += f" policy={self.player(env)} success_only=false"
        return self._made(out, words)

    def lost(self, env: str) -> Path:
        out = self.folder / f"{env}-lost"
        words = "demonstrator=random success_only=false episodes=3"
        return self._made(out, f"demos collect env={env} {words} out={out}")

    def task(self, env: str) -> bool:
        node = compose("train", [f"env={env}", "policy=gaussian", "learner=sac"]).node["env"]
        return node.get("task") in options("demonstrator", [PACKAGED])

    def player(self, env: str, kind: str = "sac") -> Path:
        """A run to collect from, where there is no script."""
        out = self.folder / f"{env}-{kind}"
        return self._made(out, f"train experiment={env}_{kind} size=debug steps=90 out={out}")

    def clone(self, env: str, kind: str, *settings: str) -> Path:
        out = self.folder / "-".join((env, kind, *settings)).replace("=", "-")
        words = " ".join((f"size=debug steps=20 demos={self.demos(env)} out={out}", *settings))
        return self._made(out, f"train experiment={env}_{kind} {words}")

    def specialist(self, env: str) -> Path:
        """A run whose policy is a residual of a base."""
        out = self.folder / f"{env}-specialist"
        words = f"size=debug init={self.clone(env, 'base')} out={out}"
        return self._made(out, f"train experiment={env}_residual {words}")

    def knowing(self) -> Path:
        """A run whose policy knows the actuators."""
        out = self.folder / "knowing"
        extractor = "embodied.policies.networks.history.PrivilegedEncoder"
        words = f"size=debug steps=90 learner=td3 policy.extractor={extractor}"
        return self._made(out, f"train experiment=patrol_hib {words} out={out}")

    def critic(self, env: str) -> Path:
        out, demos = self.folder / f"{env}-critic", self.demos(env)
        words = f"size=debug steps=20 demos={demos} out={out}"
        return self._made(out, f"train experiment={env}_gr_rl_critic {words}")

    def _made(self, out: Path, line: str) -> Path:
        if not out.exists():
            assert exit_of(*line.split()) == 0
        return out


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs(tmp_path_factory.mktemp("inputs"))


def needed(experiment: str, inputs: Inputs) -> list[str]:
    made = compose("train", [f"experiment={experiment}"])
    node, env = made.node, str(made.choices["env"])
    require_packages(env)
    words = []
    if "workers" in node["env"]:  # tests/envs/test_maniskill.py: each takes seconds to start
        words.append("env.workers=1")
    data, learner = node["data"], node["learner"]
    if SOURCE in getattr(resolve(learner["_target_"], Learner), "extra_columns", ()):
        words.append(f"demos=[{inputs.demos(env)},{inputs.lost(env)}]")
    elif data["regime"] == "offline" or data.get("pretrain_steps") or node["demo_episodes"]:
        words.append(f"demos={inputs.demos(env)}")
    if learner.get("prior", "") is None and f"{env}_bc" in EXPERIMENTS:
        prior = inputs.clone(env, "bc", f"policy={made.choices['policy']}")
        words.append(f"learner.prior={prior}")
    wrapper = node.get("finetune") or node.get("policy")
    if issubclass(resolve(wrapper["_target_"], Policy), PolicyWrapper):
        diffusion = {"_target_": "embodied.policies.generative.diffusion.Diffusion"}
        flow = {"_target_": "embodied.policies.generative.flow.Flow"}
        base = wrapper.get("base", diffusion if "Diffusion" in wrapper["_target_"] else flow)
        kind = "base" if env == "bodies" else base["_target_"].split(".")[-2]
        words.append(f"init={inputs.clone(env, kind)}")
    if learner.get("teachers") == []:
        one = env == "bodies"
        run = inputs.specialist(env) if one else inputs.player(env, "teacher")
        words += ["env.bodies=[omni]"] if one else ["env.regions=[13]"]
        words += [f"learner.teachers=[{run}]"]
    if learner.get("teacher") == "":
        words.append(f"learner.teacher={inputs.knowing()}")
    reward = node.get("reward") or {}
    if reward.get("demos", "") is None:
        words.append(f"reward.demos={inputs.demos(env)}")
    if reward.get("data", "") is None:
        words.append(f"reward.data=[{inputs.demos(env)},{inputs.lost(env)}]")
    if made.choices.get("weighting") == "critic_progress":
        words.append(f"weighting.run={inputs.critic(env)}")
    teacher = node.get("teacher") or {}
    if teacher.get("run", "") is None and teacher.get("player") is None:
        words.append(f"teacher.run={inputs.player(env)}")
    return words


# Others have what they choose; random shifts: tests/training/test_dataset_run.py.
SLOW = ("fr3_lift_pixels_flow", "fr3_lift_qchunking", "fr3_lift_reverse", "fr3_reach_cql")
SLOW += ("fr3_tasks_flow", "ogbench_cube_qchunking")


@pytest.mark.parametrize("experiment", once_per_option(EXPERIMENTS, SLOW))
def test_every_experiment_runs(
    embodied: Shell, tmp_path: Path, inputs: Inputs, experiment: str
) -> None:
    words = needed(experiment, inputs)
    embodied.capsys.readouterr()  # what making them printed
    run = tmp_path / "run"
    outcome = embodied("train", f"experiment={experiment}", "size=debug", f"out={run}", *words)
    assert outcome.code == 0, outcome.err
    assert outcome.out.split()[:2] == ["run", f"{experiment},"]
    assert f"embodied view {run}" in outcome.out.splitlines()[-2]
    rows = read_metrics(run)
    assert rows[-1]["step"] >= 240 and "eval/return" in rows[-1]
    logged = {key for row in rows for key in row}
    searched = "train/open_vectors" in logged  # a noise, which has no loss
    assert searched or any("loss" in key for key in logged), "no update was logged"
    page = (run / "report.html").read_text()
    assert experiment in page and "eval/return" in page


def test_a_run_is_extended_and_not_overwritten(embodied: Shell, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = ["train", "experiment=pendulum_sac", "size=debug", f"out={run}"]
    assert embodied(*first).code == 0
    embodied.refuses(f"resume={run}", *first)
    assert embodied("resume", run, "steps=300").code == 0
    assert checkpoint.find(run).name == "00000300"
    steps = [row["step"] for row in read_metrics(run)]
    assert steps == sorted(steps) and steps[-1] == 300
    before = {file: (run / file).read_text() for file in ("run.yaml", "metrics.jsonl")}
    embodied.refuses("has 300 steps, and steps=100 asks for fewer", "resume", run, "steps=100")
    embodied.refuses("policy cannot be chosen here", "resume", run, "policy=flow")
    complete = embodied("resume", run)
    assert complete.code == 0 and "300 steps; steps=N extends the run" in complete.out
    assert before == {file: (run / file).read_text() for file in before}
    # Its checkpoints are evaluated, beside another run, and with another policy.
    shutil.copytree(run, tmp_path / "other")
    settings = before["run.yaml"].replace("Pendulum-v1", "CartPole-v1")
    (tmp_path / "other" / "run.yaml").write_text(settings)
    both, few = ("eval", run, tmp_path / "other"), ("episodes=3", "num_envs=3")
    said = embodied.refuses(f"{tmp_path / 'other'} in Gym CartPole-v1", *both)
    assert said.endswith("or name an environment for all: env=NAME\n")
    assert embodied(*both, "env=pendulum", *few).code == 0
    (run / "evaluations.jsonl").unlink()
    assert embodied("eval", run, f"{run}/checkpoints/00000240", *few).code == 0
    assert "Evaluations" in (run / "report.html").read_text()
    best = ("policy=best_of_n", "policy.n=3", "episodes=3", f"out={run}/best")
    assert embodied("eval", run, *best).code == 0
    assert read_metrics(run / "best")[0]["eval/episodes"] == 3
    rows = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert [(row["step"], row["episodes"]) for row in rows] == [(300, 3), (240, 3), (300, 3)]
    assert rows[-1]["policy"]["n"] == 3
    embodied.refuses("cannot be evaluated", "eval", run, "policy=flow", "episodes=3")
    embodied.refuses("do not fit", "eval", run, "policy.hidden=[8]", "episodes=3")
    embodied.refuses("do not fit", "eval", run, "env=hopper", "episodes=3")


def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    """A real SIGINT to a real process: exit 130, a checkpoint, one line with the command."""
    run = tmp_path / "run"
    words = ["train", "experiment=pendulum_sac", "size=debug", "steps=1000000", f"out={run}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "embodied.cli", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until((run / "metrics.jsonl").exists, "metrics", tick=0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)
    saved = checkpoint.find(run)
    assert process.returncode == 130
    assert err == f"embodied: stopped; saved {saved}; resume with: embodied train resume={run}\n"


def test_the_demo_in_its_smallest_size(
    embodied: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "CLONE", [*demo.CLONE, "size=debug"])
    few = ["steps=600", "episodes=6", "held_out=6", "num_envs=3", "ways=[ticket]", "workers=1"]
    done = embodied("demo", "--out", tmp_path / "demo", *few)
    assert done.code == 0, done.err
    assert "3/3" in done.out and "ticket" in done.out
    for part in ("clone", "improved"):
        assert (tmp_path / "demo" / part / "report.html").exists()
    checkpoint.load_policy(tmp_path / "demo/improved/policy")
