"""Labelled pairs of segments: what a learner of pairs is fed, its labels, exact resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import Episodes
from embodied.rewards.preferences.labellers import ABSTAIN, FIRST, SECOND, CountingLabeller
from embodied.rewards.preferences.offline import SegmentPairs
from embodied.training.components import RunComponents
from embodied.training.config import read_config
from embodied.training.logger import read_metrics
from embodied.training.offline import OfflineLoop
from tests.builders import random_demos
from tests.training.test_train import run, same, settings, weights

LOSS = "train/contrastive_loss"
SIMULATED = {"_target_": "embodied.rewards.preferences.labellers.SimulatedLabeller"}


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> str:
    return random_demos(tmp_path_factory.mktemp("demos") / "set", 8)


def node(folder: Path, demos: Any, pairs: Any = None, **more: Any) -> Any:
    made = settings(folder, "offline", demos=demos, steps=8, log_every=1, **more)
    made["learner"] = {
        "_target_": "embodied.learners.offline.cpl.Cpl",
        **{"batch_size": 16, "segment": 5, "alpha": 1.0, "bias": 1.0, "clone": 0.0, "lr": 1e-2},
    }
    made["policy"] = {"_target_": "embodied.policies.deterministic.Deterministic", "hidden": [8]}
    made["data"]["pairs"] = pairs or {"labeller": SIMULATED, "count": 60}
    return made


def loop_of(made: Any) -> OfflineLoop:
    loop = RunComponents(read_config(made)).loop
    assert isinstance(loop, OfflineLoop)
    return loop


def numbered(lengths: list[int]) -> Episodes:
    """Episodes whose observation is the number of the step, and whose reward is 1 in steps 8 to 11;
    with a picture in which every pixel is that number."""
    length = torch.tensor(lengths)
    step = torch.arange(int(length.sum()))
    leaves = {"state": Leaf((1,)), "camera": Leaf((2, 2, 3), "uint8", 0, 255)}
    spec = Spec(leaves, Leaf((2,), low=-1.0, high=1.0), dt=0.1)
    steps = {
        "obs/state": step[:, None].float(),
        "obs/camera": step[:, None, None, None].expand(-1, 2, 2, 3).to(torch.uint8),
        "action": torch.stack([step, -step], 1).float(),
        "reward": ((step >= 8) & (step < 12)).float(),
    }
    return Episodes(spec, steps, length.cumsum(0) - length, length, {})


class Watcher(CountingLabeller):
    """Prefers the brighter picture; abstains from pictures that are equally bright."""

    needs_images = True

    def __init__(self) -> None:
        super().__init__(0)
        self.seen: list[Tensor] = []

    def label(self, first: Tensors, second: Tensors) -> Tensor:
        one, two = (side["picture"][:, 0, 0, 0].long() for side in (first, second))
        self.seen += [one, two]
        labels = torch.where(two > one, SECOND, FIRST)
        labels[one == two] = ABSTAIN
        return labels


def source_of(episodes: Episodes, labeller: Any, count: int = 200) -> SegmentPairs:
    rows = {key: episodes.steps[key] for key in ("obs/state", "action")}
    return SegmentPairs(rows, episodes, labeller, 4, count)


def test_a_batch_is_labelled_pairs_of_segments_of_one_episode() -> None:
    """Episodes of 8, 3 and 9 steps: the second one is too short for 4 steps."""
    from embodied.rewards.preferences.labellers import SimulatedConfig, SimulatedLabeller

    episodes = numbered([8, 3, 9])
    source = source_of(episodes, SimulatedLabeller(SimulatedConfig()))
    batch = source.sample(500)
    assert batch["action"].shape == (500, 2, 4, 2) and batch["obs/state"].shape == (500, 2, 4, 1)
    assert batch["label"].dtype == torch.float32 and batch["label"].shape == (500,)
    steps = batch["obs/state"].squeeze(3)
    assert torch.equal(batch["action"][..., 0], steps)
    assert bool((steps.diff(dim=2) == 1).all())
    begin = steps[:, :, 0].long()
    assert set(begin.flatten().tolist()) <= {0, 1, 2, 3, 4, 11, 12, 13, 14, 15, 16}
    assert {4, 11, 16} <= set(begin.flatten().tolist())  # up to the last step of an episode
    reward = episodes.steps["reward"][steps.long()].sum(2)
    better = torch.where(reward[:, 0] == reward[:, 1], 0.5, (reward[:, 1] > reward[:, 0]).float())
    assert torch.equal(batch["label"], better)
    assert set(batch["label"].tolist()) == {0.0, 0.5, 1.0}
    assert source.metrics()["data/pairs"] == 200 and 0 < source.metrics()["data/tied_pairs"] < 1


def test_a_labeller_sees_the_last_picture_and_abstentions_are_left_out() -> None:
    watcher = Watcher()
    source = source_of(numbered([8, 3, 9]), watcher, 100)
    first, second, target = source.labelled()
    assert len(target) == 100 and bool((first != second).all())
    assert set(torch.cat(watcher.seen).tolist()) <= {3, 4, 5, 6, 7, 14, 15, 16, 17, 18, 19}
    assert torch.equal(target, (second > first).float())


def test_labels_are_asked_for_once(tmp_path: Path) -> None:
    watcher, other = Watcher(), Watcher()
    source = source_of(numbered([8, 3, 9]), watcher)
    assert not watcher.seen
    state = source.get_state()
    asked = len(watcher.seen)
    source.sample(5)
    resumed = source_of(numbered([8, 3, 9]), other)
    resumed.set_state(state)
    resumed.sample(5)
    assert asked == len(watcher.seen) > 0 and not other.seen
    pairs = zip(source.labelled(), resumed.labelled(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


def test_it_learns_what_is_preferred(tmp_path: Path, demos: str) -> None:
    run(node(tmp_path / "run", demos) | {"steps": 300})
    rows = read_metrics(tmp_path / "run")
    assert rows[0]["data/pairs"] == 60 and 0 <= rows[0]["data/tied_pairs"] < 1
    losses = [row[LOSS] for row in rows if LOSS in row]
    assert sum(losses[-50:]) / 50 < sum(losses[:10]) / 10


def test_resume_is_exact(tmp_path: Path, demos: str) -> None:
    run(node(tmp_path / "whole", demos))
    run(node(tmp_path / "half", demos) | {"steps": 4})
    # Labels come from the checkpoint: with labels of another kind the weights would differ.
    wrong = {"labeller": SIMULATED | {"error": 1.0}, "count": 60}
    run(node(tmp_path / "half", demos, wrong) | {"resume": str(tmp_path / "half")})
    run(node(tmp_path / "wrong", demos, wrong))
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "half"))
    assert not same(weights(tmp_path / "whole"), weights(tmp_path / "wrong"))


def test_what_is_missing_or_has_no_effect_is_refused(tmp_path: Path, demos: str) -> None:
    def says(made: Any, text: str) -> None:
        with pytest.raises(ConfigError, match=text) as refused:
            loop_of(made)
        assert "\n" not in str(refused.value)

    made = node(tmp_path, demos)
    says(made | {"weighting": {"_target_": "embodied.buffers.weighted.Top"}}, "no effect")
    says(made | {"data": made["data"] | {"fractions": [1.0]}}, "no effect")
    says(made | {"data": made["data"] | {"pairs": None}}, r"data\.pairs=\{labeller: NODE\}")
    says(made | {"learner": made["learner"] | {"segment": 5000}}, "no episode has the 5000 steps")
    never = {"labeller": SIMULATED | {"unsure": 1.0}}
    loop = loop_of(node(tmp_path, demos, never))
    with pytest.raises(ConfigError, match="gave no label"):
        loop.source.sample(4)
    sac = settings(tmp_path, "offline", demos=demos, steps=8)
    sac["data"]["pairs"] = {"labeller": SIMULATED}
    says(sac, "does not learn from pairs")
    online = made | {"data": {"regime": "off_policy"}}
    with pytest.raises(ConfigError, match="only offline training has"):
        RunComponents(read_config(online))


def test_a_labeller_with_images_needs_one(demos: str) -> None:
    episodes = numbered([8])
    rows = {"action": episodes.steps["action"]}
    with pytest.raises(ConfigError, match=r"cam is no image of the dataset.*data\.pairs\.picture"):
        SegmentPairs(rows, episodes, Watcher(), 4, 10, picture="cam")
