"""Runs: exact resume, Ctrl-C, kill -9 while saving, NaN, a full disk; damaged checkpoints; the
kernels of a run."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from embodied.core import checkpoint
from embodied.core.build import ConfigError, allow
from embodied.core.checkpoint import CheckpointError
from embodied.core.env import NotFinite, Step
from embodied.core.errors import ContractWarning, RobotError
from embodied.core.tensors import Tensors
from embodied.mistakes import mistake
from embodied.nn import kernels
from embodied.nn.kernels import Kernels, choose
from embodied.training import logger as logger_module
from embodied.training import trainer
from embodied.training.config import REGIMES, regime_of, settings_of
from embodied.training.logger import Log, newest, read_metrics
from embodied.training.train import train
from embodied.training.trainer import Trainer
from tests.builders import Capture, Patch, exit_of, node_of, python, wait_until
from tests.tiers import usually
from tests.toy_envs import Reach

allow("tests")


DATA_SETTINGS = {name for kind in REGIMES.values() for name in settings_of(kind)}
DATA = {"warmup_steps": 80, "utd_ratio": 0.25, "replay_size": 300}


def settings(folder: Path, data: str | None = None, **changes: Any) -> dict[str, Any]:
    """A small run; settings of its data are put there."""
    own = {key: changes.pop(key) for key in DATA_SETTINGS & changes.keys()}
    node: dict[str, Any] = {
        "env": {"_target_": "tests.toy_envs.Reach", "num_envs": 4},
        "policy": {"_target_": "embodied.policies.gaussian.Gaussian", "hidden": [32, 32]},
        "learner": node_of("learners.off_policy.sac.Sac", hidden=[32, 32], batch_size=32),
        "name": "reach",
        "out": str(folder),
        "steps": 400,
        "log_every": 100,
        "eval": {"episodes": 4, "num_envs": 4},
        "video": False,
        **changes,
    }
    regime = regime_of(node | {"data": data})
    node["data"] = {"regime": regime, **(DATA if regime == "off_policy" else {}), **own}
    return node


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint.find(folder) / "policy.safetensors")


def step_of(folder: Path) -> int:
    return json.loads((checkpoint.find(folder) / "about.json").read_text())["step"]


def run(node: dict[str, Any]) -> Path:
    return train(node, Log(Path(node["out"])))


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def resumed(node: dict[str, Any], cut: int) -> Path:
    """Where a run of `node` is, below its `out`; one that ends at `cut` and is resumed is the same:
    weights, optimiser, replay, environment, generators."""
    whole, half = (Path(node["out"]) / name for name in ("whole", "half"))
    run(node | {"out": str(whole)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "running", property(lambda self: self.step < cut))
        run(node | {"out": str(half)})
    assert step_of(half) == cut
    run(node | {"out": str(half), "resume": str(half)})
    assert same(weights(whole), weights(half))
    for name in ("learner", "loop"):
        one, other = (checkpoint.load_state(folder, name) for folder in (whole, half))
        assert flat(one) == flat(other)
    return whole


@pytest.mark.parametrize(
    "extra", [{}, {"learner_n_step": 3}, {"chunk": 3, "learner_n_step": 2}, {"fr3": True}]
)
def test_resume_is_exact(tmp_path: Path, extra: dict[str, Any]) -> None:
    node = settings(tmp_path, steps=240)
    node["learner"]["n_step"] = extra.get("learner_n_step", 1)
    node["policy"]["chunk"] = extra.get("chunk", 1)
    if "fr3" in extra:
        node["env"] = node_of("envs.fr3.env.Fr3", task="reach", num_envs=4, horizon=9)
    resumed(node, 120)


EXTENDED = {
    "sac": {},
    "td3": {
        "policy": node_of("policies.deterministic.Deterministic", hidden=[32, 32]),
        "learner": node_of("learners.off_policy.td3.Td3", hidden=[32, 32], batch_size=32),
    },
    "ppo": {
        "policy": node_of("policies.diagonal_gaussian.DiagonalGaussian", hidden=[16]),
        "learner": node_of("learners.on_policy.ppo.Ppo", horizon=25, batch_size=50, epochs=2),
        "data": "on_policy",
    },
}


@pytest.mark.parametrize("learner", usually(["sac", "ppo"], EXTENDED))
def test_a_run_that_is_extended_is_the_one_that_was_longer_from_the_start(
    learner: str, tmp_path: Path
) -> None:
    """600 steps, resumed to 1,200: no schedule or count begins again."""
    long, short = (settings(tmp_path / name, **EXTENDED[learner]) for name in ("long", "short"))
    run(long | {"steps": 1200})
    run(short | {"steps": 600})
    run(short | {"steps": 1200, "resume": short["out"]})
    assert step_of(tmp_path / "short") == 1200
    assert same(weights(tmp_path / "long"), weights(tmp_path / "short"))


class Tired(Reach):
    """A robot that gives up in its 60th step, once, where nobody has mended it."""

    taken = 0

    def reset(self, *args: Any, **named: Any) -> Tensors:
        self.taken = 0  # also after the checks before the run
        return super().reset(*args, **named)

    def step(self, action: torch.Tensor) -> Step:
        self.taken += 1
        if self.taken == 60 and not Path(os.environ["MENDED"]).exists():
            raise RobotError("the arm stopped: look at it")
        return super().step(action)


def test_a_robot_that_gives_up_costs_nothing_that_was_learned(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("MENDED", str(tmp_path / "mended"))
    node = settings(tmp_path / "run", env={"_target_": f"{__name__}.Tired", "num_envs": 4})
    with pytest.raises(RobotError) as error:
        run(node)
    assert mistake(error.value) == "the arm stopped: look at it"
    assert step_of(tmp_path / "run") == 59 * 4
    (tmp_path / "mended").touch()
    run(node | {"resume": str(tmp_path / "run")})
    assert step_of(tmp_path / "run") == 400


def flat(value: Any) -> Any:
    """Nested state with tensors as bytes, so that == compares it bit for bit; a folder of the run
    (`resumed`) is that of the other one."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.contiguous().numpy().tobytes())
    if isinstance(value, dict):
        return {key: flat(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [flat(item) for item in value]
    return value.replace("/half/", "/whole/") if isinstance(value, str) else value


def test_the_seed_decides(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(settings(tmp_path / name, steps=200, seed=seed))
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not same(weights(tmp_path / "a"), weights(tmp_path / "c"))


def test_an_interrupt_saves_and_resumes_and_its_echo_is_no_second_one(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """A parent that is killed sends SIGINT for each of its threads; a later one stops at once."""
    advance = Trainer.advance

    def interrupting(self: Trainer, *args: Any) -> None:
        advance(self, *args)
        if self.step == 200:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGINT)

    run(settings(tmp_path / "whole"))
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "advance", interrupting)
        with pytest.raises(KeyboardInterrupt):
            run(settings(tmp_path / "cut"))
        patch.setattr(trainer, "ECHO", -1.0)
        with pytest.raises(KeyboardInterrupt):
            run(settings(tmp_path / "twice"))
    with pytest.raises(CheckpointError):
        checkpoint.find(tmp_path / "twice")
    assert step_of(tmp_path / "cut") == 200
    run(settings(tmp_path / "cut", resume=str(tmp_path / "cut")))
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "cut"))


HERE = "import sys; sys.path.insert(0, '.'); from tests.training.test_train import *\n"


def test_killed_while_saving_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    """kill -9 of a process that saves all the time leaves whole checkpoints."""
    code = f"{HERE}run(settings(Path(sys.argv[1]), steps=10**6, save_every=4, warmup_steps=8))"
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.DEVNULL)
    folder = tmp_path / "checkpoints"
    wait_until(lambda: len(list(folder.glob("[0-9]*"))) >= 5, "checkpoints", tick=0.05)
    process.kill()
    process.wait()
    step = step_of(tmp_path)
    assert step > 0
    checkpoint.load_policy(tmp_path)
    run(settings(tmp_path, steps=step + 8, resume=str(tmp_path)))
    assert step_of(tmp_path) == step + 8


def test_full_disk_is_one_line_and_keeps_the_old(tmp_path: Path) -> None:
    """A file-size limit makes the real write fail as a full disk does."""
    code = f"""{HERE}
import resource
folder = Path(sys.argv[1])
run(settings(folder, steps=100))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
policy = checkpoint.load_policy(folder)
try:
    checkpoint.save(folder / "checkpoints" / "00000200", policy, 200)
except CheckpointError as error:
    print("line:", error)
"""
    done = python("-c", code, tmp_path)
    assert "line: could not write" in done.stdout, done.stdout + done.stderr
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["00000100"]
    checkpoint.load_policy(tmp_path)


@pytest.mark.filterwarnings("ignore")  # of a world that counts on
def test_nan_from_an_environment_stops_the_run(tmp_path: Path) -> None:
    world = {"_target_": "tests.training.actors.helper.Counting", "num_envs": 4, "bad": 31}
    with pytest.raises(NotFinite, match=r"reward .*\[0, 1, 2, 3\]"):
        run(settings(tmp_path, env=world))


def test_a_run_inside_a_thread_works_without_signal_handlers(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run, settings(tmp_path, steps=100)).result() == tmp_path


def test_a_policy_that_init_does_not_hold_is_refused(tmp_path: Path) -> None:
    """Settings of a policy that is loaded would be ignored: one line says so."""
    base = run(settings(tmp_path / "base", steps=120))
    again = settings(tmp_path / "again", steps=120, init=str(base))
    run(again)
    for policy, line in (
        (again["policy"] | {"hidden": [64, 64]}, r"policy\.hidden=\(64, 64\) has no effect"),
        (node_of("policies.deterministic.Deterministic"), "a Gaussian, not a Deterministic"),
    ):
        with pytest.raises(ConfigError, match=line):
            run({**again, "out": str(tmp_path / "other"), "policy": policy})


WORDS = ["env=two_gap", "policy=gaussian", "learner=sac", "size=debug", "steps=300"]
WORDS += ["env.num_envs=4", "save_every=100", "eval_every=0", "video=false"]


def flip(content: bytes) -> bytes:
    """One bit in the middle is another one."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def damage(how: str, folder: Path) -> str:
    """Damage a file of a checkpoint; its name."""
    name, change = DAMAGES[how]
    file = folder / name
    content = change(file.read_bytes())
    file.unlink() if content is None else file.write_bytes(content)
    return name


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes | None]]] = {
    "a bit of the learner": ("learner.pt", flip),
    "half of the loop": ("loop.pt", lambda content: content[: len(content) // 2]),
    "no facts": ("about.json", lambda content: b""),
    "a bit of the policy": ("policy.safetensors", flip),
    "a bit of the spec": ("spec.json", flip),
    "a file is gone": ("learner.pt", lambda content: None),
}


def said(capsys: Capture, status: int, *words: object) -> str:
    """The one line on stderr of a command."""
    capsys.readouterr()
    assert exit_of(*words) == status
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A broken with the checkpoints 100, 200 and 300."""
    broken = tmp_path_factory.mktemp("damaged") / "whole"
    assert exit_of("train", *WORDS, f"out={broken}") == 0
    names = sorted(folder.name for folder in (broken / "checkpoints").iterdir())
    assert names == ["00000100", "00000200", "00000300"]
    kept = [file.parent.name for file in sorted(broken.glob("checkpoints/*/loop.pt"))]
    assert kept == names[1:], "the newest one, and one to fall back to"
    return broken


@pytest.fixture
def broken(whole: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "run"
    shutil.copytree(whole, copy)
    yaml = copy / "run.yaml"
    yaml.write_text(yaml.read_text().replace(str(whole), str(copy)))
    return copy


@pytest.mark.parametrize("how", DAMAGES)
def test_a_resume_falls_back_to_the_newest_whole_checkpoint(
    how: str, broken: Path, whole: Path, capsys: Capture
) -> None:
    newest = checkpoint.find(broken)
    name = damage(how, newest)
    line = said(capsys, 0, "resume", broken)
    assert f"{newest} is damaged ({name} " in line and "going on from 00000200" in line
    again, before = (checkpoint.load_state(each, "learner") for each in (broken, whole))
    assert checkpoint.find(broken) == newest, "trained again"
    for key, value in before["module"].items():
        assert torch.equal(again["module"][key], value), "as it was without damage"
    assert newest.with_name(f"damaged-{newest.name}").is_dir(), "kept for who wants to look"


def test_where_none_is_whole_one_line_says_so(broken: Path, capsys: Capture) -> None:
    for number in (200, 300):
        damage("half of the loop", broken / "checkpoints" / f"{number:08d}")
    damaged = "is damaged (loop.pt is not what was saved)"
    assert f"00000300 {damaged}, and no earlier" in said(capsys, 2, "resume", broken)
    earlier = broken / "checkpoints" / "00000200"
    assert f"00000200 {damaged}" in said(capsys, 2, "resume", earlier)
    assert len(list((broken / "checkpoints").iterdir())) == 3, "nothing was set aside"


@pytest.mark.parametrize("how", [how for how, (name, _) in DAMAGES.items() if name[0] != "l"])
def test_eval_and_view_of_a_damaged_one_are_one_line(
    how: str, broken: Path, capsys: Capture
) -> None:
    from embodied.viewer.launch import open_session

    name = damage(how, checkpoint.find(broken))
    line = said(capsys, 2, "eval", broken, "episodes=1", "num_envs=1")
    with pytest.raises(CheckpointError) as refused:
        open_session(broken)
    for each in (line, str(refused.value)):
        assert "00000300 is damaged" in each and name in each and "\n" not in each


def test_a_checkpoint_without_hashes_is_loaded_and_said_to_be_unchecked(broken: Path) -> None:
    """Format 1, of earlier versions."""
    file = checkpoint.find(broken) / "about.json"
    facts = json.loads(file.read_text())
    assert facts.pop("format") == 2 and len(facts.pop("files")) == 5
    file.write_text(json.dumps(facts))
    with pytest.warns(ContractWarning, match="has no hashes .* its files are not checked"):
        checkpoint.load_policy(broken)
    file.write_text(json.dumps({**facts, "format": 2}))
    with pytest.raises(CheckpointError, match=r"damaged \(about.json"):
        checkpoint.load_policy(broken)


CPU = torch.device("cpu")
PPO = "experiment=pendulum_ppo size=debug device=cpu video=false"


def command(line: str) -> None:
    assert exit_of(*line.split()) == 0


def saved(folder: Path) -> dict[str, Any]:
    return checkpoint.read_about(checkpoint.find(folder))["kernels"]


def test_torch_is_as_it_was_after_the_choice_and_after_a_run() -> None:
    state = torch.get_rng_state()
    made = choose(CPU)
    assert made.native and "float32 product" in made.note
    assert torch.equal(torch.get_rng_state(), state)
    with Kernels("onednn").active():
        assert torch.get_float32_matmul_precision() == "medium"
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(
    ("exact", "ratio", "product", "says"),
    [
        (True, 1.9, "onednn", "1.90 times"),
        (True, 1.1, "torch", "1.10 times"),
        (False, 3.0, "torch", "not exact"),
    ],
)
def test_the_product_is_exact_and_faster(
    monkeypatch: Patch, exact: bool, ratio: float, product: str, says: str
) -> None:
    monkeypatch.setattr(kernels, "is_exact", lambda: exact)
    monkeypatch.setattr(kernels, "speed_ratio", lambda: ratio)
    made = choose(CPU)
    assert made.product == product and says in made.note
    resumed = choose(CPU, saved={"product": "onednn", "native": False})
    assert (resumed.product == "onednn") == exact and not resumed.native


def test_kernels_of_a_damaged_checkpoint_are_one_line() -> None:
    for saved in ({"product": "fast", "native": True}, {"product": "torch", "native": []}, {}):
        with pytest.raises(ConfigError, match="kernels"):
            choose(CPU, saved=saved)


def test_runs_on_a_machine_use_the_same_product(tmp_path: Path, monkeypatch: Patch) -> None:
    """Else two runs of one seed differ in the last bits whenever the machine is busy."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = iter((1.4, 0.9, 0.8))
    monkeypatch.setattr(kernels, "_measured_ratio", lambda: next(measured))
    another_process = kernels.speed_ratio.__wrapped__
    assert [another_process(), another_process()] == [1.4, 1.4]
    (kept,) = (tmp_path / "embodied" / "float32_product").iterdir()
    kept.write_text("not a number")
    assert another_process() == 0.9


def test_a_product_of_bfloat16_is_not_exact(monkeypatch: Patch) -> None:
    """Both are computed here: whether oneDNN rounds to bfloat16 depends on the CPU's units."""

    def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.double() @ b.double()).to(a.dtype) if a.dtype == torch.float32 else product(a, b)

    def rounded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        short = torch.get_float32_matmul_precision() == "medium" and a.dtype == torch.float32
        return exact(a.bfloat16().float(), b.bfloat16().float()) if short else product(a, b)

    product = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", exact)
    assert kernels.is_exact()
    monkeypatch.setattr(torch.Tensor, "__matmul__", rounded)
    assert not kernels.is_exact()


def test_the_users_own_precision_and_deterministic_and_a_gpu_use_pytorch_only() -> None:
    for made in (choose(CPU, deterministic=True), choose(torch.device("cuda", 0))):
        assert (made.product, made.native) == ("torch", False)
    torch.set_float32_matmul_precision("high")
    try:
        assert choose(CPU).product == "torch"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_run_prints_its_kernels_and_resumes_with_them(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "run"
    command(f"train {PPO} out={folder}")
    assert "update: native code" in capsys.readouterr().out
    assert saved(folder)["native"]
    about = checkpoint.find(folder) / "about.json"
    facts = json.loads(about.read_text())
    del facts["kernels"]  # a checkpoint of an earlier version
    about.write_text(json.dumps(facts))
    command(f"resume {folder} steps=1200")
    assert "as in the checkpoint" in capsys.readouterr().out
    assert saved(folder) == {"product": "torch", "native": False}


def test_deterministic_is_a_setting(tmp_path: Path, capsys: Capture) -> None:
    command(f"train {PPO} deterministic=true out={tmp_path / 'run'}")
    assert "deterministic=true" in capsys.readouterr().out
    assert saved(tmp_path / "run") == {"product": "torch", "native": False}


def steps_in(folder: Path) -> list[int]:
    return [row["step"] for row in read_metrics(folder)]


def test_one_object_a_line(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.write(10, {"train/critic_loss": torch.tensor(0.5), "train/return": 2})
    log.write(20, {"eval/success": 0.25})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    first, second = map(json.loads, lines)
    assert first["step"] == 10 and first["train/critic_loss"] == 0.5 and first["seconds"] >= 0
    assert second == {"step": 20, "seconds": second["seconds"], "eval/success": 0.25}
    assert log.last == {"train/critic_loss": 0.5, "train/return": 2.0, "eval/success": 0.25}


def logged_at(folder: Path, *at: int) -> Log:
    log = Log(folder)
    for step in at:
        log.write(step, {"train/loss": step, "train/extra": step})
    return log


@pytest.mark.parametrize("cut", [b'{"step": 40, "tra', b"\0\0\0\0\n", b""])
def test_a_resume_drops_a_cut_line_and_steps_after_the_checkpoint(
    tmp_path: Path, cut: bytes
) -> None:
    logged_at(tmp_path, 10, 20, 30)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(cut)
    assert steps_in(tmp_path) == [10, 20, 30]
    again = Log(tmp_path)
    again.begin({}, 100, 20)
    again.write(35, {"train/loss": 7.0})
    assert steps_in(tmp_path) == [10, 20, 35]
    assert (tmp_path / "metrics.jsonl").read_bytes().count(b"\n") == 3
    assert again.last == {"train/loss": 7.0, "train/extra": 20.0}


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    """A limit on the size of files makes the real write fail as a full disk does."""
    log = logged_at(tmp_path, 10)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match=r"metrics\.jsonl"):
            log.write(20, {"train/loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert steps_in(tmp_path) == [10]


def test_the_clock_goes_on(tmp_path: Path) -> None:
    row = {"step": 10, "seconds": 1000.0, "train/loss": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    log = Log(tmp_path)
    log.begin({}, 100, 10)
    log.write(20, {"train/loss": 1.0})
    assert read_metrics(tmp_path)[-1]["seconds"] >= 1000.0


def test_a_new_run_starts_anew(tmp_path: Path) -> None:
    logged_at(tmp_path, 10)
    log = Log(tmp_path)
    log.begin({}, 100, 0)
    log.write(5, {"train/loss": 1.0})
    log.write(6, {})  # nothing to say
    assert steps_in(tmp_path) == [5]


def test_lines_without_a_terminal(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr(logger_module, "PLAIN", -1.0)
    with Log(tmp_path) as log:
        log.begin({"env": "Fr3 [odd]", "folder": "here"}, 200, 0)
        log.write(50, {"eval/success": 0.5})
        log.advance(50)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["env", "Fr3", "[odd]"]
    assert lines[-1].startswith("50/200") and lines[-1].endswith("eval success 50%")


def test_a_bar_on_a_terminal(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    for name, value in {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, value)
    with Log(tmp_path) as log:
        log.begin({"env": "world"}, 200, 0)
        log.write(50, {"train/success": 0.25})
        log.advance(200)
    shown = capsys.readouterr().out
    assert "200/200" in shown and "train success 25%" in shown


def test_what_people_wait_for_comes_first() -> None:
    less = {"train/loss": 0.1, "train/return": 5.0, "eval/return": 7.0}
    assert newest({**less, "eval/success": 1.0}) == "eval success 100%"
    assert newest(less) == "eval return 7.0" and newest({"train/loss": 0.1}) == "loss 0.1"


def test_wandb_offline(tmp_path: Path, monkeypatch: Patch) -> None:
    """Without a login nothing leaves the machine; what is logged_at is in the run folder."""
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    with Log(tmp_path / "run", "wandb") as log:
        log.begin({}, 20, 0, {"seed": 0})
        log.write(10, {"train/loss": 1.0})
    written = list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(written) == 1 and written[0].stat().st_size > 0
