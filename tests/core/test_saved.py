"""What is saved: a base by path and hash, which may be gone; a format that may be newer; states, of
which nothing is shared."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from embodied.checks.check import from_file
from embodied.core import checkpoint, formats
from embodied.core.build import ConfigError, build
from embodied.core.checkpoint import CheckpointError
from embodied.core.policy import Policy
from embodied.core.remembered import Remembered, pack, unpack
from embodied.core.saved_node import read_run_settings
from embodied.core.spec import Leaf, Spec
from embodied.datasets.lerobot.schema import OURS, new_info, read_info
from embodied.nn.normalizers import RunningMeanStd
from embodied.policies.steering.dsrl import Dsrl
from embodied.policies.wrappers.best_of_n import BestOfN
from tests.builders import make_policy, node_of

SPEC = Spec({"state": Leaf((5,))}, Leaf((3,), low=-1.0, high=1.0), dt=0.05)
FLOW = node_of("policies.generative.flow.Flow", chunk=4, width=64)
INNER = {"_target_": "embodied.policies.gaussian.Gaussian", "hidden": [8]}
DSRL = {"_target_": "embodied.policies.steering.dsrl.Dsrl", "bound": 1.5}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a base policy."""
    torch.manual_seed(0)
    policy = build(FLOW, Policy, spec=SPEC)
    checkpoint.save(tmp_path / "base" / "checkpoints" / "00000001", policy, 1)
    return tmp_path / "base"


def steered(run: Path) -> Dsrl:
    torch.manual_seed(1)
    return Dsrl.wrap(checkpoint.load_policy(run), DSRL, INNER)


def acts_as(folder: Path, policy: Policy) -> bool:
    return torch.equal(actions(checkpoint.load_policy(folder)), actions(policy))


def entries(folder: Path, content: Any = None) -> Any:
    """The references of a checkpoint, or what an attacker writes in their place."""
    file = folder / "references.json"
    if content is not None:
        file.write_text(json.dumps(content))
        checkpoint.seal(folder, checkpoint.read_about(folder))
    return json.loads(file.read_text())


def saved(policy: Policy, folder: Path, mb: float = 0.0) -> Path:
    return checkpoint.save(folder / "checkpoints" / "00000002", policy, 2, copy_base_mb=mb)


def actions(policy: Policy) -> torch.Tensor:
    torch.manual_seed(2)
    obs = {"state": torch.randn(4, 5)}
    noise = policy.sample_noise(4, explore=True)
    seen, carry = policy.observe(obs, policy.initial(4), noise)
    return policy.act(seen, carry, noise)[0]


def test_only_what_was_trained_is_written(run: Path, tmp_path: Path) -> None:
    policy = steered(run)
    folder, whole = saved(policy, tmp_path / "steered"), saved(policy, tmp_path / "copied", mb=16.0)
    base = run / "checkpoints" / "00000001" / "policy.safetensors"
    small, large = ((each / "policy.safetensors").stat().st_size for each in (folder, whole))
    assert small < large - 0.9 * base.stat().st_size
    assert not (whole / "references.json").exists()
    (entry,) = entries(folder)
    assert (entry["part"], entry["sha256"]) == ("base", checkpoint.file_hash(base))
    assert acts_as(folder, policy) and acts_as(whole, policy)


def test_it_can_be_wrapped_and_saved_again(run: Path, tmp_path: Path) -> None:
    loaded = checkpoint.load_policy(saved(steered(run), tmp_path / "steered"))
    critic = node_of("learners.critics.Critic", n=2, hidden=[8])
    best = BestOfN.wrap(loaded, node_of("policies.wrappers.best_of_n.BestOfN", n=2, critic=critic))
    folder = saved(best, tmp_path / "best")
    assert {entry["part"] for entry in entries(folder)} == {"base", "base.base"}
    assert acts_as(folder, best)


def test_a_changed_base_is_copied(run: Path, tmp_path: Path) -> None:
    """What is trained is never taken from the file."""
    policy = steered(run)
    assert policy.base.saved_file is not None and policy.saved_file is None
    with torch.no_grad():
        next(policy.base.parameters()).add_(1.0)
    folder = saved(policy, tmp_path / "steered")
    assert not (folder / "references.json").exists() and acts_as(folder, policy)


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_policy(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_base_that_moved(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = steered(run)
    folder = saved(policy, tmp_path / "steered")
    moved = tmp_path / "elsewhere"
    run.rename(moved)
    assert "EMBODIED_BASES=RUN" in refused(folder)
    monkeypatch.setenv("EMBODIED_BASES", f"{tmp_path / 'nothing'}:{moved}")
    assert acts_as(folder, policy)


def test_runs_that_moved_together(run: Path, tmp_path: Path) -> None:
    saved(steered(run), tmp_path / "outputs" / "steered")
    shutil.move(run, tmp_path / "outputs" / "base")
    first = checkpoint.load_policy(tmp_path / "outputs" / "base")
    saved(Dsrl.wrap(first, DSRL, INNER), tmp_path / "outputs" / "steered")
    (tmp_path / "outputs").rename(tmp_path / "archive")
    assert isinstance(checkpoint.load_policy(tmp_path / "archive" / "steered"), Dsrl)


def test_a_base_that_changed(run: Path, tmp_path: Path) -> None:
    folder = saved(steered(run), tmp_path / "steered")
    other = build({**FLOW, "depth": 1}, Policy, spec=SPEC)
    checkpoint.save(run / "checkpoints" / "00000001", other, 1)
    line = refused(folder)
    assert "has changed" in line and "EMBODIED_BASES=RUN" in line


ENTRIES: dict[str, Any] = {
    "not a list": {"part": "base"},
    "a number": [1],
    "no hash": [{"part": "base", "file": "x.safetensors", "relative": "x"}],
    "another kind": [{"part": "base", "file": "/etc/passwd", "relative": "x", "sha256": "0"}],
    "a device": [{"part": "base", "file": "/dev/zero", "relative": "/dev/zero", "sha256": "0"}],
    "lines": [{"part": "ba\nse", "file": "x", "relative": "x", "sha256": "0"}],
}


@pytest.mark.parametrize("case", ENTRIES)
def test_files_from_other_people(case: str, run: Path, tmp_path: Path) -> None:
    folder = saved(steered(run), tmp_path / "steered")
    entries(folder, ENTRIES[case])
    refused(folder)


def test_a_pipe_is_not_waited_for(run: Path, tmp_path: Path) -> None:
    folder = saved(steered(run), tmp_path / "steered")
    pipe = tmp_path / "pipe.safetensors"
    os.mkfifo(pipe)
    entries(folder, [entries(folder)[0] | {"file": str(pipe), "relative": "nothing.safetensors"}])
    assert "is not there" in refused(folder)


def test_a_reference_cannot_replace_what_was_saved(run: Path, tmp_path: Path) -> None:
    """A file of the right hash with other names does not fit the policy."""
    folder = saved(steered(run), tmp_path / "steered")
    entries(folder, [entries(folder)[0] | {"part": "inner"}])
    assert "do not fit" in refused(folder)


def newer(what: str, read: Callable[[], Any], file: Path, facts: Any, format: int) -> None:
    """`read` refuses what a newer version wrote."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(facts))
    with pytest.raises(
        ConfigError, match=rf"the {what} has format {format + 1}, .* up to {format}"
    ):
        read()


def test_what_a_newer_version_wrote_is_refused(tmp_path: Path) -> None:
    policy = make_policy("random.Random", SPEC)
    folder = checkpoint.save(tmp_path / "00000001", policy, 1, loop={"step": torch.ones(1)})
    about = checkpoint.read_about(folder)
    format = formats.CHECKPOINT
    assert about["format"] == format
    assert checkpoint.load_state(folder, "loop")["step"] == 1
    for read in (checkpoint.load_policy, lambda path: checkpoint.load_state(path, "loop")):
        facts = about | {"format": format + 1}
        newer("checkpoint", partial(read, folder), folder / "about.json", facts, format)
    info = new_info(SPEC, (), "", "png", 20.0)
    format = formats.DATASET
    assert info[OURS]["format"] == format
    info[OURS] |= {"format": format + 1}
    newer("dataset", partial(read_info, tmp_path), tmp_path / "meta" / "info.json", info, format)
    file, format = tmp_path / "run.yaml", formats.RUN
    file.write_text(yaml.safe_dump({"format": format, "seed": 3}))
    assert read_run_settings(file) == {"seed": 3}
    newer("run folder", partial(read_run_settings, file), file, {"format": format + 1}, format)


@pytest.mark.parametrize("format", [0, True, "1", None])
def test_a_format_that_is_no_number_is_refused(format: Any) -> None:
    with pytest.raises(ConfigError, match="no number from 1 on"):
        formats.upgrade("run folder", {}, format)


@dataclass(frozen=True)
class Fit:
    error: float = 0.0
    sums: list[float] = field(default_factory=list)


class Base(Remembered):
    remembered = ("count", "random")

    def __init__(self) -> None:
        self.count = 0
        self.random = np.random.default_rng(0)


class Part(Base):
    remembered = ("net", "adam", "generator", "moments", "fit", "said", "recent", "points", "rows")

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.adam = torch.optim.Adam(self.net.parameters())
        self.generator = torch.Generator().manual_seed(0)
        self.moments = {"a": RunningMeanStd(1)}
        self.fit = Fit()
        self.said: Counter[str] = Counter()
        self.recent: deque[float] = deque(maxlen=2)
        self.points: dict[int, tuple[Any, str]] = {}
        self.rows = torch.zeros(0)

    def use(self) -> None:
        self.count += 1
        self.adam.zero_grad()
        self.net(torch.rand(3, 2, generator=self.generator)).sum().backward()
        self.adam.step()
        self.moments["a"].update(torch.rand(4, 1, generator=self.generator))
        self.fit = Fit(self.random.random(), [1.0])
        self.said["word"] += 1
        self.recent.append(self.random.random())
        self.points[self.count] = (self.random.random(2), "memo")
        self.rows = torch.rand(self.count, 2, generator=self.generator)


def test_it_goes_on_as_before() -> None:
    one, two = Part(), Part()
    for _ in range(3):
        one.use()
    state = one.get_state()
    assert set(state) == {*Base.remembered, *Part.remembered}
    two.set_state(from_file(state))
    for _ in range(2):
        one.use()
        two.use()
    assert torch.equal(one.net.weight, two.net.weight) and torch.equal(one.rows, two.rows)
    assert one.fit == two.fit and one.said == two.said == Counter(word=5)
    assert one.recent == two.recent and two.recent.maxlen == 2
    assert [one.points[n][0].tolist() for n in (1, 4)] == [
        two.points[n][0].tolist() for n in (1, 4)
    ]
    assert torch.equal(one.moments["a"].mean, two.moments["a"].mean)


def test_a_state_does_not_change_with_its_object() -> None:
    one, two = Part(), Part()
    one.use()
    state = one.get_state()
    weight, rows = state["net"]["weight"].clone(), state["rows"].clone()
    two.set_state(state)
    one.use()
    two.use()
    assert torch.equal(state["net"]["weight"], weight) and torch.equal(state["rows"], rows)
    assert state["count"] == 1 and len(state["points"]) == 1


def test_what_a_checkpoint_cannot_hold_is_refused() -> None:
    part = Base()
    part.count = {1, 2}  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError, match="cannot hold a set"):
        part.get_state()


def test_what_is_packed_comes_back_from_a_file_loaded_weights_only(tmp_path: Path) -> None:
    state = {
        "random": np.random.Generator(np.random.PCG64(3)).bit_generator.state,
        3: (np.arange(6.0).reshape(2, 3), "memo", None, True),
        "window": deque([np.float64(0.5), 2], maxlen=5),
        "empty": [np.zeros((0, 4)), torch.ones(2)],
        "number": np.int64(7),
    }
    torch.save(pack(state), tmp_path / "state.pt")
    back = unpack(torch.load(tmp_path / "state.pt", weights_only=True))
    assert back["random"] == state["random"]
    assert (back[3][0] == state[3][0]).all() and back[3][1:] == ("memo", None, True)
    assert back["window"] == deque([0.5, 2], maxlen=5) and back["window"].maxlen == 5
    assert back["empty"][0].shape == (0, 4) and (back["empty"][1] == 1).all()
    assert back["number"] == 7 and type(back["number"]) is int
