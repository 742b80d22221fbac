"""Policies, learners, rewards, transitions and runs of the size that unit tests need."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from embodied.cli import main
from embodied.core import checkpoint
from embodied.core.build import Node, build
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.reward import Reward
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.datasets.collect import CollectConfig, collect
from embodied.learners.learner import UNPLANNED, Learner, RunPlan

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
ROOT = Path(__file__).resolve().parents[1]
LINE = Spec({"state": Leaf((1,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)
SPEC = Spec({"state": Leaf((3,))}, Leaf((2,), low=-1.0, high=1.0), dt=0.1)


def node_of(target: str, **settings: Any) -> Node:
    """The node of `embodied.TARGET` with `settings`."""
    return {"_target_": f"embodied.{target}", **settings}


def python(*words: object, folder: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """Python with `words` in a process of its own, in `folder`; it finds this checkout."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def spawn(
    *words: object, env: Mapping[str, str] = {}, text: bool = True, **more: Any
) -> subprocess.Popen[Any]:
    """Start Python with `words`; it finds this checkout too. `more`: settings of `Popen`."""
    paths = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **env}
    command = [sys.executable, *map(str, words)]
    return subprocess.Popen(command, env=environment, text=text, **more)


def shell(folder: Path, commands: str) -> str:
    """What bash prints that runs `commands` in `folder`, `embodied` being this checkout's."""
    text = re.sub(r"(?m)^embodied ", f"{sys.executable} -m embodied.cli ", commands)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", f"set -e\n{text}"], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def rendered(task: str, size: int, fps: float) -> Node:
    """A camera that draws `task` of the simulated FR3, `size` pixels square."""
    scene = node_of("envs.fr3.rendered_camera.RenderedCamera", task=task, size=size)
    return node_of("real_robot.cameras.sources.Rendered", fps=fps, scene=scene)


def exit_of(*words: object) -> int | str:
    """The exit status of `embodied WORDS`."""
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in words])
    return stopped.value.code or 0


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write texts by their path below `folder`."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` of this session that `make` has filled; other workers wait for it."""
    base = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, done = root / name, root / f"{name}.done"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            done.touch()
    return folder


@dataclass
class Clock:
    """A clock that stands still until a test sets `now` (s)."""

    now: float

    def __call__(self) -> float:
        return self.now


def make_policy(target: str, spec: Spec, seed: int | None = 0, **settings: Any) -> Any:
    """`embodied.policies.TARGET` with `settings`, initialised from `seed` (None: as torch is)."""
    if seed is not None:
        torch.manual_seed(seed)
    return build(node_of(f"policies.{target}", **settings), Policy, spec=spec)


def make_learner(
    target: str, policy: Policy, run: RunPlan = UNPLANNED, spec: Spec | None = None, **settings: Any
) -> Any:
    """`embodied.learners.TARGET` of `policy` with `settings`; `spec`: its policy's by default."""
    made = node_of(f"learners.{target}", **settings)
    return build(made, Learner, policy=policy, spec=spec or policy.spec, run=run)


def make_reward(node: Node, spec: Spec, folder: Path) -> Any:
    """The reward of `node`, on the CPU, which keeps its files in `folder`."""
    device = torch.device("cpu")
    return build(node, Reward, spec=spec, device=device, seed=0, folder=folder)


def transitions(n: int, spec: Spec, shift: float | None = None) -> Tensors:
    """`n` random transitions with the rewards 0 to n - 1 and the discount 0.9.

    The next observations are random too, or with `shift` the observations plus `shift`.
    """
    obs = {name: torch.randn(n, *leaf.shape) for name, leaf in spec.obs.items()}
    action = torch.rand(n, spec.act.size) * 2 - 1
    if shift is None:
        after = {name: torch.randn(n, *leaf.shape) for name, leaf in spec.obs.items()}
    else:
        after = {name: value + shift for name, value in obs.items()}
    return {
        **{f"obs/{name}": value for name, value in obs.items()},
        "action": action,
        "reward": torch.arange(float(n)),
        "discount": torch.full((n,), 0.9),
        **{f"next_obs/{name}": value for name, value in after.items()},
    }


def recorded(obs: Tensors, action: Tensor, **more: Tensor) -> Tensors:
    """An episode as `EpisodeWriter.add` takes it: T + 1 observations, T actions; no reward, cut by
    the clock."""
    never = torch.zeros(len(action), dtype=torch.bool)
    return {
        **{f"obs/{name}": value[:-1] for name, value in obs.items()},
        **{f"next_obs/{name}": value[-1] for name, value in obs.items()},
        **{"action": action, "reward": torch.zeros(len(action))},
        **{"terminated": never, "truncated": never, **more},
    }


def still(state: Tensor, action: Tensor, reward: Tensor, discount: Tensor | None = None) -> Tensors:
    """Transitions that leave `state` as it is; `discount`: 0 by default, which ends the episode."""
    kept = {"action": action, "reward": reward}
    kept["discount"] = torch.zeros_like(reward) if discount is None else discount
    return {"obs/state": state, **kept, "next_obs/state": state}


def random_demos(folder: Path, episodes: int, seed: int = 0) -> str:
    """A dataset in `folder`: episodes of 20 random steps in the toy world `Reach`."""
    env, random = {"_target_": "tests.toy_envs.Reach"}, node_of("policies.random.Random")
    how = CollectConfig(env, random, episodes, str(folder), 4, seed=seed, success_only=False)
    collect(how, lambda kept, played: None)
    return str(folder)


def run_folder(folder: Path, env: Node, policy: Node, steps: tuple[int, ...]) -> Path:
    """A run in `folder`: a checkpoint of an untrained policy at each of `steps`."""
    made = build(env | {"num_envs": 1}, VecEnv)
    for step in steps:
        torch.manual_seed(step)
        place = folder / "checkpoints" / f"{step:08d}"
        checkpoint.save(place, build(policy, Policy, spec=made.spec), step)
    made.close()
    (folder / "run.yaml").write_text(yaml.safe_dump({"env": env, "execute": 2}))
    return folder


def wait_until(
    holds: Callable[[], Any], what: str = "it", limit: float = 600.0, tick: float = 0.005
) -> None:
    """Return as soon as `holds()` is true; fail after `limit` s. It is asked every `tick` s."""
    deadline = time.monotonic() + limit
    while not holds():
        assert time.monotonic() < deadline, f"not within {limit:.0f} s: {what}"
        time.sleep(tick)


def require_same(one: Any, other: Any) -> None:
    """Fail unless nested states are the same, their tensors to 0.1%."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            require_same(one[key], other[key])
    elif isinstance(one, list):
        for a, b in zip(one, other, strict=True):
            require_same(a, b)
    elif isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    else:
        assert one == other


def tiny_sentence_encoder(folder: Path) -> types.ModuleType:
    """The package of `embodied.nn.sentences` with a model of its kind: small, with random weights,
    and letters as word pieces."""
    from string import ascii_lowercase

    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    pieces = [*special, *ascii_lowercase, *(f"##{letter}" for letter in ascii_lowercase)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    words = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    words.normalizer = normalizers.BertNormalizer()  # pyright: ignore[reportAttributeAccessIssue]
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # pyright: ignore[reportAttributeAccessIssue]
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))  # pyright: ignore
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "model_max_length": 64}
    model = folder / "model"
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(model)
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(pieces), hidden_size=384, num_hidden_layers=1)
    config.intermediate_size, config.max_position_embeddings = 8, 64
    BertModel(config).save_pretrained(model)
    package: Any = types.ModuleType("all_minilm_l6_v2")
    archive = shutil.make_archive(str(folder / "model"), "zip", model)
    package.get_model_zip_path = lambda: archive
    return package
