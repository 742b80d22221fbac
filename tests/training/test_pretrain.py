"""Runs that begin with data: pretraining, a replay that demonstrations begin, purely offline, with
fractions of a batch from several datasets, from labelled pairs of segments; whose steps of
demonstrations are imitated, and in which fine-tuning they are mixed in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.buffers.source import Mixture
from embodied.core import checkpoint
from embodied.core import tensors as tt
from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import Episodes
from embodied.datasets.lerobot.writer import EpisodeWriter
from embodied.learners.imitation.behavior_cloning import BehaviorCloning
from embodied.learners.off_policy import sac
from embodied.policies.scripted.intervener import Intervener
from embodied.rewards.preferences import labellers
from embodied.training.components import RunComponents
from embodied.training.config import read_config
from embodied.training.demonstrations import rows_for
from embodied.training.logger import read_metrics
from embodied.training.offline import OfflineLoop
from tests.builders import node_of, random_demos, recorded, run_folder
from tests.toy_envs import Reach
from tests.training.test_train import resumed, run, same, settings, weights


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two sets of 4 and 8 episodes of 20 steps, by random actions."""
    made = tmp_path_factory.mktemp("demos")
    return [random_demos(made / f"set_{n}", episodes, n) for n, episodes in enumerate((4, 8))]


def run_of(folder: Path, demos: Any, **changes: Any) -> dict[str, Any]:
    return settings(folder, demos=demos, warmup_steps=0, pretrain_steps=60, steps=120, **changes)


def parts(made: Any) -> Any:
    return RunComponents(read_config(made))


def read(made: Any) -> Episodes:
    return parts(made).episodes


def test_the_clock_counts_updates_and_then_steps(tmp_path: Path, demos: list[str]) -> None:
    run(run_of(tmp_path, demos[0], eval_every=60, log_every=20))
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows if "eval/return" in row] == [60, 120, 180]
    assert [row["step"] for row in rows if "train/critic_loss" in row] == [*range(20, 181, 20)]
    # No episode was played in the first 60: they were updates.
    assert min(row["step"] for row in rows if "train/return" in row) > 60
    assert checkpoint.find(tmp_path).name == "00000180"


@pytest.mark.parametrize(("cut", "fraction"), [(40, None), (100, None), (100, 0.5)])
def test_resume_is_exact_while_pretraining_and_while_acting(
    tmp_path: Path, demos: list[str], cut: int, fraction: float | None
) -> None:
    resumed(run_of(tmp_path, demos, demo_fraction=fraction), cut)


@pytest.mark.parametrize("cut", [100, 152])
def test_rows_completed_in_hindsight_resume_too(tmp_path: Path, demos: list[str], cut: int) -> None:
    """Cal-QL's rows wait for their returns: those of running episodes are saved as they wait."""
    learner = node_of("learners.offline.calql.CalQl", hidden=[32], samples=2, batch_size=16)
    made = run_of(tmp_path, demos, learner=learner, data="off_policy")
    whole = checkpoint.load_state(resumed(made, cut), "loop")["loop"]
    # 30 of 120 steps a row: one episode of 20 is stored, 10 steps of the next one wait.
    assert len(whole["replay"]["rows"]["returns"]) == 80
    assert len(whole["trajectory_columns"]["env"]) == 40


def test_demonstrations_begin_the_replay(tmp_path: Path, demos: list[str]) -> None:
    """240 rows of 12 episodes, the older set first, then what the run adds, beside them."""
    made = parts(run_of(tmp_path, demos, demo_fraction=None))
    buffers, steps = made.loop.buffers, made.episodes.steps
    assert buffers.source is buffers.replay is buffers.demos
    assert (len(buffers.replay), buffers.replay.capacity) == (240, 240 + 300)
    assert torch.equal(buffers.replay.take(torch.arange(240))["action"], steps["action"])
    fitted = made.learner.policy.state_dict()["encoder.norm.mean"]  # before any update
    torch.testing.assert_close(fitted, steps["obs/state"].mean(0))


def test_several_sets_are_read_as_one(tmp_path: Path, demos: list[str]) -> None:
    both, one, two = (read(run_of(tmp_path, path)) for path in (demos, *demos))
    assert both.length.tolist() == [20] * 12
    assert both.start.tolist() == [20 * number for number in range(12)]
    for number, source, own in ((3, 0, one.episode(3)), (4, 1, two.episode(0))):
        whole = both.episode(number)
        assert set(whole.pop("source").tolist()) == {source}
        del own["source"]
        assert same(whole, own)
    two_of_each = read(run_of(tmp_path, demos, demo_episodes=2))
    assert torch.equal(two_of_each.episode(3)["action"], two.episode(1)["action"])


def test_a_learner_with_replay_learns_offline_and_resumes(tmp_path: Path, demos: list[str]) -> None:
    """`steps` are updates, and nothing is played."""
    rows = read_metrics(resumed(mixed(tmp_path, demos, [0.5, 0.5], log_every=2), 4))
    assert [row["step"] for row in rows if "train/critic_loss" in row] == [2, 4, 6, 8]
    assert not any("train/return" in row for row in rows)


CLONING = node_of("learners.imitation.behavior_cloning.BehaviorCloning")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pretrain_steps": 10, "demos": "these", "data": "offline"}, "no effect in offline"),
        ({"data": "offline"}, "needs demonstrations"),
        ({"data": "off_policy", "learner": CLONING}, "cannot use a replay buffer"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    tmp_path: Path, demos: list[str], changes: dict[str, Any], says: str
) -> None:
    if "demos" in changes:
        changes = changes | {"demos": demos[0]}
    refused(settings(tmp_path / "run", **changes), says)


def refused(made: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parts(made)
    assert "\n" not in str(caught.value)


class SourceSac(sac.Sac):
    """SAC that reports which datasets its batch is of."""

    extra_columns = ("source",)

    def update(self, batch: Tensors) -> Tensors:
        assert batch["source"].dtype == torch.int64
        share = (batch["source"] == 1).float().mean()
        return {**super().update(batch), "share": share}


class SourceCloning(BehaviorCloning):
    """Behavior cloning whose batches say which dataset they are of."""

    extra_columns = ("source",)


def mixed(folder: Path, demos: Any, fractions: list[float] | None = None, **more: Any) -> Any:
    more = {"steps": 8, "log_every": 1, "fractions": fractions, **more}
    made = settings(folder, "offline", demos=demos, **more)
    made["learner"]["_target_"] = f"{__name__}.SourceSac"
    return made


def loop_of(made: Any) -> OfflineLoop:
    return parts(made).loop


def test_every_batch_has_the_fractions(tmp_path: Path, demos: list[str]) -> None:
    loop = loop_of(mixed(tmp_path, demos, [0.75, 0.25]))
    assert isinstance(loop.source, Mixture)
    assert loop.data_metrics == {f"data/rows_{n}": len(loop.source.sources[n]) for n in (0, 1)}
    assert len(loop.source.sources[1]) > len(loop.source.sources[0])
    batch = loop.source.sample(32)
    assert batch["source"].tolist() == [0, 0, 0, 1] * 8
    assert float(loop.learner.update(batch)["share"]) == 0.25


def test_without_fractions_rows_are_of_all_datasets_by_their_lengths(
    tmp_path: Path, demos: list[str]
) -> None:
    of_second = loop_of(mixed(tmp_path, demos)).source.sample(4000)["source"].float().mean()
    assert 0.57 < float(of_second) < 0.77  # 8 of 12 episodes, all of the same length
    assert not loop_of(mixed(tmp_path, demos[1])).source.sample(64)["source"].any()


def test_chunks_have_the_column_too(tmp_path: Path, demos: list[str]) -> None:
    made = mixed(tmp_path, demos, [0.5, 0.5])
    made["learner"] = {"_target_": f"{__name__}.SourceCloning", "batch_size": 8}
    made["policy"] = node_of("policies.gaussian.Gaussian", hidden=[8], chunk=2)
    assert loop_of(made).source.sample(8)["source"].tolist() == [0, 1] * 4


def test_a_weighting_acts_within_each_dataset(tmp_path: Path, demos: list[str]) -> None:
    made = mixed(tmp_path, demos, [0.5, 0.5], weighting=node_of("buffers.weighted.Return"))
    assert loop_of(made).source.sample(32)["source"].tolist() == [0, 1] * 16
    made["weighting"] = node_of("buffers.weighted.Top", share=0.01)
    refused(made, r"dataset [01] of demos has no step to train on")


@pytest.mark.parametrize(
    ("fractions", "says"),
    [
        ([0.5], "one share of a batch for each of the 2 datasets"),
        ([0.5, 0.25, 0.25], "for each of the 2 datasets"),
        ([0.5, 0.4], "sum to 1"),
        ([1.0, 0.0], r"data\.fractions=0\.0 should be above 0"),
        ([0.3, 0.7], "batch_size=32 should be a multiple of 10"),
        ([0.005, 0.995], "denominators of at most 64"),
    ],
)
def test_wrong_fractions_are_refused(
    tmp_path: Path, demos: list[str], fractions: list[float], says: str
) -> None:
    refused(mixed(tmp_path, demos, fractions), says)


def test_online_training_has_no_such_column(tmp_path: Path) -> None:
    made = settings(tmp_path)
    made["learner"]["_target_"] = f"{__name__}.SourceSac"
    refused(made, "only offline training has")


SIMULATED = node_of("rewards.preferences.labellers.SimulatedLabeller")


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> str:
    return random_demos(tmp_path_factory.mktemp("walks") / "set", 8)


def paired(folder: Path, walks: Any, pairs: Any = None, **more: Any) -> Any:
    small = {"batch_size": 16, "segment": 5, "alpha": 1.0, "bias": 1.0, "clone": 0.0, "lr": 1e-2}
    more = {"steps": 8, "learner": node_of("learners.offline.cpl.Cpl", **small), **more}
    made = settings(folder, "offline", demos=walks, log_every=1, **more)
    made["policy"] = node_of("policies.deterministic.Deterministic", hidden=[8])
    made["data"]["pairs"] = pairs or {"labeller": SIMULATED, "count": 60}
    return made


def numbered(*lengths: int) -> Episodes:
    """Episodes whose observation is the number of the step, and whose reward is 1 in steps 8 to 11;
    with a picture in which every pixel is that number."""
    length = torch.tensor(lengths)
    step = torch.arange(sum(lengths))
    leaves = {"state": Leaf((1,)), "camera": Leaf((2, 2, 3), "uint8", 0, 255)}
    spec = Spec(leaves, Leaf((2,), low=-1.0, high=1.0), dt=0.1)
    steps = {
        "obs/state": step[:, None].float(),
        "obs/camera": step[:, None, None, None].expand(-1, 2, 2, 3).to(torch.uint8),
        "action": torch.stack([step, -step], 1).float(),
        "reward": ((step >= 8) & (step < 12)).float(),
    }
    return Episodes(spec, steps, length.cumsum(0) - length, length, {})


class Watcher(labellers.Labeller):
    """Prefers the brighter picture; abstains from pictures that are equally bright."""

    needs_images = True

    def __init__(self) -> None:
        super().__init__(0)
        self.seen: list[Tensor] = []

    def label(self, first: Tensors, second: Tensors) -> Tensor:
        one, two = (side["picture"][:, 0, 0, 0].long() for side in (first, second))
        self.seen += [one, two]
        labels = torch.where(two > one, labellers.SECOND, labellers.FIRST)
        labels[one == two] = labellers.ABSTAIN
        return labels


def source_of(
    episodes: Episodes, labeller: Any, count: int = 200, **more: Any
) -> labellers.SegmentPairs:
    rows = {key: episodes.steps[key] for key in ("obs/state", "action")}
    return labellers.SegmentPairs(rows, episodes, labeller, 4, count, **more)


def test_a_batch_is_labelled_pairs_of_segments_of_one_episode() -> None:
    """Episodes of 8, 3 and 9 steps: the second one is too short for 4 steps."""
    episodes = numbered(8, 3, 9)
    source = source_of(episodes, labellers.SimulatedLabeller(labellers.SimulatedConfig()))
    batch = source.sample(500)
    assert batch["action"].shape == (500, 2, 4, 2) and batch["label"].dtype == torch.float32
    steps = batch["obs/state"].squeeze(3)
    assert torch.equal(batch["action"][..., 0], steps)
    assert bool((steps.diff(dim=2) == 1).all())
    assert {*steps[:, :, 0].flatten().tolist()} == {*range(5), *range(11, 17)}
    one, two = episodes.steps["reward"][steps.long()].sum(2).T
    assert torch.equal(batch["label"], torch.where(one == two, 0.5, (two > one).float()))
    assert set(batch["label"].tolist()) == {0.0, 0.5, 1.0}
    assert source.metrics()["data/pairs"] == 200 and 0 < source.metrics()["data/tied_pairs"] < 1


def test_a_labeller_sees_the_last_picture_and_abstentions_are_left_out() -> None:
    watcher = Watcher()
    first, second, target = source_of(numbered(8, 3, 9), watcher, 100).labelled()
    assert len(target) == 100 and bool((first != second).all())
    assert {*torch.cat(watcher.seen).tolist()} <= {*range(3, 8), *range(14, 20)}
    assert torch.equal(target, (second > first).float())


def test_labels_are_asked_for_once() -> None:
    watcher, other = Watcher(), Watcher()
    source, resumed = (source_of(numbered(8, 3, 9), each) for each in (watcher, other))
    assert not watcher.seen
    state = source.get_state()
    asked = len(watcher.seen)
    resumed.set_state(state)
    for each in (source, resumed):
        each.sample(5)
    assert asked == len(watcher.seen) > 0 and not other.seen
    pairs = zip(source.labelled(), resumed.labelled(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


def test_a_resume_has_the_labels_of_the_checkpoint(tmp_path: Path, walks: str) -> None:
    """With labels of another kind the weights would differ."""
    wrong = {"labeller": SIMULATED | {"error": 1.0}, "count": 60}
    half = tmp_path / "half"
    run(paired(tmp_path / "whole", walks))
    run(paired(half, walks, steps=4))
    run(paired(half, walks, wrong, resume=str(half)))
    run(paired(tmp_path / "wrong", walks, wrong))
    assert same(weights(tmp_path / "whole"), weights(half))
    assert not same(weights(tmp_path / "whole"), weights(tmp_path / "wrong"))


def test_what_is_missing_or_has_no_effect_is_refused(tmp_path: Path, walks: str) -> None:
    made = paired(tmp_path, walks)
    refused(made | {"weighting": node_of("buffers.weighted.Top")}, "no effect")
    refused(made | {"data": made["data"] | {"fractions": [1.0]}}, "no effect")
    refused(made | {"data": made["data"] | {"pairs": None}}, r"data\.pairs=\{labeller: NODE\}")
    refused(made | {"learner": made["learner"] | {"segment": 5000}}, "no episode has the 5000")
    refused(made | {"data": {"regime": "off_policy"}}, "only offline training has")
    sac = settings(tmp_path, "offline", demos=walks, pairs={"labeller": SIMULATED})
    refused(sac, "does not learn from pairs")
    never = loop_of(paired(tmp_path, walks, {"labeller": SIMULATED | {"unsure": 1.0}}))
    with pytest.raises(ConfigError, match="gave no label"):
        never.source.sample(4)
    with pytest.raises(ConfigError, match=r"cam is no image of the dataset.*data\.pairs\.picture"):
        source_of(numbered(8), Watcher(), picture="cam")


SPEC = Spec({"state": Leaf((2,))}, Leaf((2,), low=-1.0, high=1.0), dt=0.1, text="go to the origin")
PERSON, POLICY = 0.5, -0.9  # their actions
TAKEN = [False, False, True, True, True, False]  # of each episode: three steps are a person's
FLOW = {"_target_": "embodied.policies.generative.flow.Flow", "chunk": 2}
BC = {"_target_": "embodied.learners.imitation.behavior_cloning.BehaviorCloning", "batch_size": 64}
DAGGER = {"_target_": "embodied.learners.imitation.hg_dagger.HgDagger", "batch_size": 64}
CORRECTED = {
    "_target_": "embodied.rewards.success.interventions.Interventions",
    "pay": "env",
    "intervener": {"_target_": "tests.training.test_pretrain.Always"},
}


class Always(Intervener):
    """A person who has taken over every step."""

    def over(self, obs: dict[str, torch.Tensor], first: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(first)

    def act(self, obs: dict[str, torch.Tensor], first: torch.Tensor) -> torch.Tensor:
        return torch.full((len(first), 2), PERSON)


def record(path: Path, taken: list[bool] | None, episodes: int = 4) -> str:
    """`taken`: whose steps; None: a recording that does not say (a person's)."""
    theirs = torch.tensor(taken or [True] * len(TAKEN))
    count = len(theirs)
    flags = {} if taken is None else {"intervened": theirs}
    with EpisodeWriter(path, SPEC) as writer:
        for _ in range(episodes):
            action = torch.where(theirs, PERSON, POLICY)[:, None].expand(-1, 2)
            seen = {"state": torch.rand(count + 1, 2)}
            last = torch.arange(count) == count - 1
            writer.add(recorded(seen, action, truncated=last, **flags))
    return str(path)


@pytest.fixture(scope="module")
def half_taken(tmp_path_factory: pytest.TempPathFactory) -> str:
    return record(tmp_path_factory.mktemp("demos") / "mixed", TAKEN)


def made(folder: Path, data: str, **changes: Any) -> Any:
    return RunComponents(read_config(settings(folder, data, **changes)))


def cloned_batch(folder: Path, demos: Any, **changes: Any) -> dict[str, torch.Tensor]:
    """What behaviour cloning of `demos` samples, in chunks of two steps."""
    built = made(folder, "offline", learner=BC, demos=demos, policy=FLOW, **changes)
    return built.loop.source.sample(500)


def test_the_policys_own_steps_are_cloned_if_a_setting_says_so(
    tmp_path: Path, half_taken: str
) -> None:
    batch = cloned_batch(tmp_path, half_taken)
    assert batch["valid"][:, 0].all() and not batch["valid"].all(), "a chunk ends where they let go"
    assert (batch["action"][batch["valid"]] == PERSON).all()
    batch = cloned_batch(tmp_path, half_taken, demo_policy_steps=True)
    share = (batch["action"][:, 0, 0] == POLICY).float().mean().item()
    assert share == pytest.approx(0.5, abs=0.1)


def test_whole_demonstrations_are_all_cloned(tmp_path: Path, half_taken: str) -> None:
    """Beside a recording with interventions, too, and where each step is marked as a person's."""
    whole, own = record(tmp_path / "whole", None), record(tmp_path / "own", [True] * 6)
    for demos, count in ((whole, 24), (own, 24), ([whole, half_taken], 24 + 12)):
        states = cloned_batch(tmp_path / "run", demos)["obs/state"].unique(dim=0)
        assert len(states) == count


def test_without_an_environment_held_out_steps_are_a_persons(tmp_path: Path) -> None:
    """Also where some episodes have no intervention at all."""
    quiet, half_taken = (
        record(tmp_path / "quiet", [False] * 6, 30),
        record(tmp_path / "mixed", TAKEN, 3),
    )
    more = {"env": None, "policy": FLOW, "learner": BC, "demos": [quiet, half_taken]}
    held = made(tmp_path / "run", "offline", **more).loop.held_out
    assert len(held.index) > 0
    action, valid = held.rows["action"][held.index], held.rows["valid"][held.index]
    assert valid[:, 0].all() and (action[valid] == PERSON).all()


def test_dagger_learns_from_a_persons_steps_of_a_recording(tmp_path: Path, half_taken: str) -> None:
    """Of chunks, from those that the policy did not end."""

    def buffers(**changes: Any) -> Any:
        more = {"learner": DAGGER, "reward": CORRECTED, "demos": half_taken} | changes
        return made(tmp_path, "off_policy", **more).loop.buffers

    batch = buffers().demos.sample(500)
    assert torch.equal(batch["intervened"], batch["action"][:, 0] == PERSON)
    assert 0.4 < batch["intervened"].float().mean() < 0.6
    chunks = buffers(policy=FLOW, reward=None).demos.sample(500)
    assert torch.equal(chunks["intervened"], (chunks["action"] == PERSON).all(1))
    assert buffers(demo_policy_steps=True).demos.sample(500)["intervened"].all()
    stored = buffers(demo_fraction=None).replay.take(torch.arange(24))
    assert torch.equal(stored["intervened"], stored["action"][:, 0] == PERSON)


def test_dagger_does_not_imitate_its_own_policy(tmp_path: Path, half_taken: str) -> None:
    """Without a person the environment's transitions have no `intervened`."""
    with pytest.raises(ConfigError, match="interventions"):
        made(tmp_path, "off_policy", learner=DAGGER, demos=half_taken, warmup_steps=0).loop._step()


def test_ppo_with_demonstrations_imitates_a_persons_steps(tmp_path: Path, half_taken: str) -> None:
    learner = node_of("learners.on_policy.ppo_demos.PpoDemos", horizon=8)
    policy = node_of("policies.diagonal_gaussian.DiagonalGaussian")
    shown = made(
        tmp_path, "on_policy", learner=learner, policy=policy, demos=half_taken
    ).learner.shown
    assert (shown["action"][shown["valid"]] == PERSON).all()
    assert shown["valid"][:, 0].all() and len(shown["valid"]) == 12


@pytest.mark.parametrize("learner", [BC, DAGGER])
def test_recordings_without_a_persons_step_are_refused(
    tmp_path: Path, learner: dict[str, Any]
) -> None:
    quiet = record(tmp_path / "quiet", [False] * 6)
    data = "offline" if learner is BC else "off_policy"
    with pytest.raises(ConfigError, match="demo_policy_steps=true"):
        made(tmp_path / "run", data, learner=learner, demos=quiet)
    made(tmp_path / "run", data, learner=learner, demos=quiet, demo_policy_steps=True)


@pytest.mark.parametrize(
    ("data", "learner", "taken", "says"),
    [
        ("off_policy", DAGGER, "no", "demos=DIR"),
        ("off_policy", None, TAKEN, "imitates"),
        ("offline", BC, None, "intervention"),
    ],
)
def test_the_setting_is_refused_where_it_has_no_effect(
    tmp_path: Path, data: str, learner: Any, taken: Any, says: str
) -> None:
    more = {"learner": learner} if learner else {}
    more |= {} if taken == "no" else {"demos": record(tmp_path / "demos", taken)}
    with pytest.raises(ConfigError, match=says):
        made(tmp_path / "run", data, demo_policy_steps=True, **more)


SAC = {"_target_": "embodied.learners.off_policy.sac.Sac", "batch_size": 32}
ALIASED = {"_target_": "embodied.learners.finetune.dsrl_na.DsrlNa", "batch_size": 32}


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    """A base in a checkpoint, and demonstrations by somebody else."""
    base = node_of("policies.generative.flow.Flow", chunk=2, width=16)
    reach = {"_target_": "tests.toy_envs.Reach"}
    init = str(run_folder(tmp_path / "base", reach, base, (0,)))
    return {"init": init, "demos": random_demos(tmp_path / "demos", 4), "normalize": True}


def test_executed_actions_take_demonstrations(given: dict[str, Any], tmp_path: Path) -> None:
    steered = node_of("policies.steering.dsrl_na.DsrlNa")
    run(settings(tmp_path / "run", finetune=steered, learner=ALIASED, **given))
    base = checkpoint.load_policy(given["init"]).state_dict()
    learned = checkpoint.load_policy(tmp_path / "run")
    assert same(base, {key: learned.state_dict()[f"base.{key}"] for key in base})
    assert learned.chunk == 2


@pytest.mark.parametrize("execute", [1, 2])
def test_corrections_take_demonstrations(
    given: dict[str, Any], tmp_path: Path, execute: int
) -> None:
    """What a run with corrections recorded is described as that run stored it."""
    steered = node_of("policies.steering.residual.Residual", scale=0.5, execute=execute)
    learner = SAC | {"n_step": 3}
    built = made(tmp_path / "run", "off_policy", finetune=steered, learner=learner, **given)
    policy = built.policy
    policy.base.sample_noise = lambda n, explore=False: torch.zeros(n, *policy.base_noise)
    env = Reach(1)
    obs, carry = env.reset(0), policy.initial(1)
    tape: list[Tensors] = []
    for _ in range(5):
        noise = policy.sample_noise(1, explore=True)
        with torch.no_grad():
            decision, carry = policy.observe(obs, carry, noise)
            action, carry = policy.act(decision, carry, noise)
        step = env.step(action[:, 0])
        seen = {"base": decision["base_action"], "correction": carry["row/action"]}
        acted = {"obs/state": obs["state"], "action": action[:, 0], "reward": step.reward}
        tape.append({**seen, **acted})
        obs = step.obs
    steps = tt.cat(tape)
    base, correction = steps.pop("base"), steps.pop("correction")
    never = torch.zeros(5, dtype=torch.bool)
    steps |= {"terminated": never, "truncated": never}
    start, length, final = torch.tensor([0]), torch.tensor([5]), {"state": obs["state"]}
    whole = Episodes(built.episodes.spec, steps, start, length, final)
    rows = rows_for(whole, policy, built.learner, None)
    torch.testing.assert_close(rows["obs/base_action"], base)
    torch.testing.assert_close(rows["action"], correction)
    torch.testing.assert_close(rows["next_obs/base_action"][:2], base[3:])
    batch = built.loop.buffers.demos.sample(32)
    assert batch["obs/base_action"].shape == batch["action"].shape == (32, 2)


def test_a_run_of_corrections_with_demonstrations(given: dict[str, Any], tmp_path: Path) -> None:
    steered = node_of("policies.steering.residual.Residual", scale=0.5, dims=[1])
    node = settings(tmp_path / "run", finetune=steered, learner=SAC, **given)
    again = run(node | {"out": str(tmp_path / "again")})
    assert same(weights(run(node)), weights(again))


def test_chosen_noise_does_not(given: dict[str, Any], tmp_path: Path) -> None:
    steered = node_of("policies.steering.dsrl.Dsrl")
    with pytest.raises(ConfigError, match="cannot use demonstrations"):
        run(settings(tmp_path / "run", finetune=steered, learner=SAC, **given))
