"""Two processes that learn together, started by torchrun: the update of one with both batches. They
run this file."""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from embodied.core import distributed
from embodied.core.build import allow, build
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors, each
from embodied.learners.learner import Learner, RunPlan
from embodied.policies.gaussian import Gaussian
from embodied.training.components import RunComponents
from embodied.training.logger import Log
from embodied.training.train import train
from tests.builders import exit_of, make_learner, make_policy, node_of, python
from tests.contract import test_learner as contract
from tests.training.test_train import settings

allow("tests")

ROWS = 16  # of one process


class Told(Gaussian):
    """Its noise is a table's: row i of a batch is row `begin + i` of what all processes draw."""

    begin, calls = 0, 0

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        self.calls += 1
        generator = torch.Generator().manual_seed(self.calls)
        return torch.randn(2 * ROWS, self.size, generator=generator)[self.begin : self.begin + n]


def updated(kind: str, begin: int, rows: int) -> Tensors:
    """Parameters after three updates from rows `begin` .. `begin + rows` of the same batches."""
    make, dim = MADE[kind]
    learner = make(begin, rows)
    for seed in range(3):
        whole = all_rows(kind, seed)
        learner.update(each(whole, lambda leaf: leaf.narrow(dim, begin, rows)))
    return copy.deepcopy(learner.state_dict())


def all_rows(kind: str, seed: int) -> Tensors:
    """What both processes learn from."""
    whole = MADE[kind][0](0, 2 * ROWS)
    if kind == "sac":
        return contract.batch_for(whole, seed)
    torch.manual_seed(seed)
    rows = contract.segment(whole, torch.Generator().manual_seed(seed), 2 * ROWS)
    return {key: value for key, value in rows.items() if not key.startswith("carry/")}


def sac(begin: int, rows: int) -> Learner:
    torch.manual_seed(0)
    policy: Any = build({"_target_": "tests.core.test_parallel.Told"}, Policy, spec=contract.SPEC)
    policy.begin = begin
    return make_learner("off_policy.sac.Sac", policy, hidden=[32], batch_size=rows)


def ppo(begin: int, rows: int) -> Learner:
    policy = make_policy("diagonal_gaussian.DiagonalGaussian", contract.SPEC)
    size: dict[str, Any] = {"horizon": contract.HORIZON, "batch_size": contract.HORIZON * rows}
    return make_learner("on_policy.ppo.Ppo", policy, RunPlan(), epochs=1, advantage="raw", **size)


# How to make it, and the dimension of a batch in which its rows are.
MADE: dict[str, tuple[Callable[[int, int], Learner], int]] = {"sac": (sac, 0), "ppo": (ppo, 1)}


def torchrun(*words: str | Path) -> str:
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = python(*start, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes leave, which do everything of this file, and what they `said`."""
    folder = tmp_path_factory.mktemp("both")
    (folder / "said").write_text(torchrun(__file__, folder))
    return folder


@pytest.mark.parametrize("kind", MADE)
def test_two_processes_make_the_update_of_the_doubled_batch(kind: str, both: Path) -> None:
    parts = [torch.load(both / f"{kind}{rank}.pt", weights_only=True) for rank in (0, 1)]
    whole = updated(kind, 0, 2 * ROWS)
    start = MADE[kind][0](0, ROWS).state_dict()
    learned = [key for key, value in whole.items() if not torch.equal(value, start[key])]
    assert any("policy" in key for key in learned)
    for key, value in whole.items():
        assert torch.equal(parts[0][key], parts[1][key]), key
        torch.testing.assert_close(parts[0][key], value, rtol=0, atol=1e-6, msg=key)


def test_one_process_is_not_changed() -> None:
    values = [torch.tensor([1.0, 2.0]), torch.tensor(3.0)]
    distributed.average(values)
    assert [v.tolist() for v in values] == [[1.0, 2.0], 3.0]
    found = (distributed.world(), distributed.rank(), distributed.mean(2.5), distributed.all_min(3))
    assert found == (1, 0, 2.5, 3)
    assert distributed.own_seed(5) == 5


@pytest.mark.parametrize("kind", ["replay", "chunks", "rollout"])
def test_a_run_of_two_stays_together_and_one_of_them_writes(kind: str, both: Path) -> None:
    """Chunks end at different times in different processes, and yet they update together."""
    folder = both / kind
    digests = [(folder / f"{rank}.txt").read_text() for rank in (0, 1)]
    weights, worlds = zip(*(digest.split() for digest in digests), strict=True)
    assert weights[0] == weights[1] and worlds[0] != worlds[1]
    saved = sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())
    assert saved == ["00000480"]  # of 4 rows in each of 2 processes: 60 steps
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == len({yaml.safe_load(line)["step"] for line in lines}) > 1


def test_the_command_speaks_once(both: Path) -> None:
    said = (both / "said").read_text()
    assert said.count("next: embodied view") == said.count("pendulum_sac, seed 0") == 1


def digest(tensors: Tensors) -> str:
    parts = [tensors[key].contiguous().numpy().tobytes() for key in sorted(tensors)]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def run(kind: str, folder: Path) -> None:
    """Train, and write down what was learned and where the worlds are."""
    made: list[Any] = []
    build_parts = RunComponents.__init__

    def remember(self: Any, config: Any) -> None:
        build_parts(self, config)
        made.append(self)

    RunComponents.__init__ = remember  # type: ignore[method-assign]
    given = settings(folder / "run", steps=480, normalize=True)
    if kind == "chunks":
        given["policy"]["chunk"] = 3
    if kind == "rollout":
        learner = {"horizon": 8, "epochs": 2, "batch_size": 16, "advantage": "raw"}
        given["policy"] = node_of("policies.diagonal_gaussian.DiagonalGaussian")
        given |= {"learner": node_of("learners.on_policy.ppo.Ppo", **learner), "data": "on_policy"}
    rank = distributed.rank()
    train(given, Log(Path(given["out"]), silent=rank > 0))
    learned, world = made[-1].learner.state_dict(), made[-1].env.get_state()
    folder.mkdir(exist_ok=True)
    (folder / f"{rank}.txt").write_text(f"{digest(learned)} {digest(world)}")


def everything(folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.start()
    stop, distributed.stop = distributed.stop, lambda: None  # one group of processes for all runs
    rank = distributed.rank()
    for kind in MADE:
        torch.save(updated(kind, rank * ROWS, ROWS), folder / f"{kind}{rank}.pt")
    for kind in ("replay", "chunks", "rollout"):
        run(kind, folder / kind)
    exit_of("train", "experiment=pendulum_sac", "size=debug", f"out={folder / 'run'}")
    stop()  # threads of the process group that outlive it abort the process


if __name__ == "__main__":
    everything(Path(sys.argv[1]))
