"""`embodied adopt`: older layouts, names and units, and the one line for what does not fit."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from embodied.adopt.adopt import UNUSED, Names, Options, adopt, scaled_inputs
from embodied.adopt.lerobot_config import (
    Feature,
    LeRobotConfig,
    Map,
    read_config,
    read_normalization,
)
from embodied.core import checkpoint
from embodied.core.actor import Actor
from embodied.core.affine import Affine
from embodied.core.policy import Policy
from embodied.core.saved_file import file_hash
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.datasets.mapping import Mapping, Source, short
from embodied.export.decision import Decision
from embodied.policies.wrappers.translated import Mapped
from tests.adopt.checkpoints import (
    DATA,
    ENV,
    STATE,
    adopted,
    embodied,
    random_weights,
    resized,
    two_gap_checkpoint,
    two_gap_mapping,
    untrained,
)
from tests.adopt.formula_weights import weights
from tests.core.test_malicious_files import command
from tests.tiers import usually


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Diffusion checkpoint of LeRobot for env=two_gap, and its mapping file."""
    folder = tmp_path_factory.mktemp("adopt")
    two_gap_mapping(folder / "names.yaml")
    return two_gap_checkpoint(folder / "lerobot")


def refused(*argv: str) -> str:
    """The one line with which `embodied adopt` refuses."""
    return command("adopt", *argv)


def changed(base: Path, folder: Path, **settings: Any) -> Path:
    """A copy of `base` with other fields in config.json."""
    shutil.copytree(base, folder)
    node = json.loads((base / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(node))
    return folder


def acted(*runs: Path) -> list[Tensor]:
    """The actions of the policies of runs, at the same observations and noise."""
    obs, noise = {"state": torch.rand(4, 2)}, torch.randn(4, 8, 2)
    return [checkpoint.load_policy(run).act(obs, {}, noise)[0] for run in runs]


def test_a_run_that_acts_and_says_where_it_is_from(base: Path, tmp_path: Path) -> None:
    run = adopted(base, tmp_path / "run", "two_gap", "steps=2")
    policy = checkpoint.load_policy(run)
    assert policy.chunk == 3
    assert policy.node["steps"] == 2
    about = json.loads((checkpoint.find(run) / "about.json").read_text())
    assert about["adopted"]["sha256"] == file_hash(base / "model.safetensors")
    embodied("eval", str(run), "episodes=2", "num_envs=2")


def test_evaluated_elsewhere(base: Path, tmp_path: Path) -> None:
    """Without env: its own names and physical units; a run without an environment can be named."""
    embodied("adopt", str(base), "fps=10", f"out={tmp_path / 'run'}", "steps=2")
    policy = checkpoint.load_policy(tmp_path / "run")
    assert set(policy.spec.obs) == {"state", "environment_state"}
    assert policy.spec.act.high == (1.0, 1.0)
    assert policy.spec.dt == pytest.approx(0.1)


def test_past_observations_are_those_of_the_steps_before(base: Path, tmp_path: Path) -> None:
    policy = checkpoint.load_policy(adopted(base, tmp_path / "run", "two_gap", "steps=2"))
    actor = Actor(policy, 2)
    for step in range(8):
        obs = {"state": torch.full((2, 2), float(step))}
        actor(obs, torch.tensor([step == 0, step in (0, 4)]))
        if step == 0:
            past = actor.decision_obs["history/state"]
            assert past.tolist() == [[[0.0] * 2]] * 2, "the first one is its own past"
        if step in (3, 6):  # a new chunk every third step
            assert actor.decision_obs["history/state"][0].tolist() == [[step - 1.0] * 2]
    # the second row began again at step 4 and decided at step 7
    assert actor.decision_obs["history/state"][1].tolist() == [[6.0] * 2]


def test_past_observations_through_a_mapping(base: Path, tmp_path: Path) -> None:
    """A policy in its own names and units, mapped at evaluation, remembers what it saw there."""
    embodied("adopt", str(base), "fps=10", f"out={tmp_path / 'run'}", "steps=2")
    own = checkpoint.load_policy(tmp_path / "run")
    names = ("environment_state", "state")
    here = replace(own.spec, obs={f"my_{name}": own.spec.obs[name] for name in names})
    here = here.with_act(Leaf((2,), low=-1.0, high=1.0))
    sources = {f"my_{name}": Source(name, 2.0, 1.0) for name in names}
    mapped = Mapped.of(own, here, Mapping(sources, Affine((-2.0, -2.0), (2.0, 2.0))))
    noise = torch.randn(4, 1, 8, 2)
    own.sample_noise = lambda n, explore=False: noise[0]  # pyright: ignore
    actors = [Actor(own, 1), Actor(mapped, 1)]
    for step in range(4):
        there = {name: torch.rand(1, 2) for name in names}
        given = {f"my_{name}": 2 * value + 1 for name, value in there.items()}
        first = torch.tensor([step == 0])
        own_action, action = (a(o, first) for a, o in zip(actors, (there, given), strict=True))
        assert torch.allclose(own_action, 2 * action, atol=1e-5)


def test_older_layout_with_buffers_in_the_model(base: Path, tmp_path: Path) -> None:
    older = changed(base, tmp_path / "older")
    weights = load_file(base / "model.safetensors")
    for buffer, low in (
        (f"normalize_inputs.buffer_{STATE.replace('.', '_')}", 0.0),
        (f"normalize_inputs.buffer_{ENV.replace('.', '_')}", 0.0),
        ("unnormalize_outputs.buffer_action", -1.0),
    ):
        weights |= {f"{buffer}.min": torch.full((2,), low), f"{buffer}.max": torch.ones(2)}
    save_file(weights, older / "model.safetensors")
    for file in older.glob("policy_*"):
        file.unlink()
    one = adopted(base, tmp_path / "one", "two_gap", "steps=2")
    other = adopted(older, tmp_path / "other", "two_gap", "steps=2")
    assert torch.allclose(*acted(one, other), atol=1e-6)


def test_units_of_actions(base: Path, tmp_path: Path) -> None:
    """An action of 1 here is 0.5 there."""
    file = two_gap_mapping(tmp_path / "names.yaml")
    file.write_text(file.read_text() + "action: {low: [-0.5, -0.5], high: [0.5, 0.5]}\n")
    plain = adopted(base, tmp_path / "plain", "two_gap", "steps=2")
    doubled = adopted(base, tmp_path / "doubled", "two_gap", "steps=2", f"mapping={file}")
    first, second = acted(plain, doubled)
    assert torch.allclose((2 * first).clamp(-1, 1), second, atol=1e-6)


def test_units_of_observations() -> None:
    """here = 0.5 there + 1: the same place, normalised from either side, is the same number."""
    source = Source("state", 0.5, 1.0)
    there, low, scale = torch.tensor([0.3, -2.0]), torch.tensor([0.1, 0.2]), torch.tensor([2.0, 3])
    config = LeRobotConfig("diffusion", {STATE: Feature("state", (2,))}, 2, 1, {}, {})
    names = Names(Mapping({"state": source}))
    spec = Spec({"state": Leaf((2,))}, Leaf((2,)), 0.1)
    found = scaled_inputs(config, {STATE: Map(low, scale, 1.0)}, names, spec)[STATE]
    here = 0.5 * there + 1.0
    assert torch.allclose((here - found.low) / found.scale, (there - low) / scale)


LINES: dict[str, tuple[dict[str, Any], str]] = {
    "newer field": ({"denoise_harder": True}, r"denoise_harder.*newer.*ignore=\[denoise_harder\]"),
    "other type": ({"type": "xvla"}, r"type 'xvla'; adopted are diffusion, act\. .*serve_lerobot"),
    "served type": ({"type": "smolvla"}, "serve_lerobot.py.*init=ws://"),
    "no type": ({"type": None}, "type None"),
    "adapters": ({"use_peft": True}, "adapters only"),
    "damaged": ({"horizon": None}, "config.json is damaged"),
    "other network": ({"down_dims": [16, 64]}, "does not fit its config.json"),
    "no features": ({"input_features": None}, "names no features"),
    "long chunk": ({"n_action_steps": 30}, r"chunk=30 is not in 1\.\.7"),
}


@pytest.mark.parametrize("case", LINES)
def test_one_line_for_a_checkpoint_that_does_not_fit(case: str, base: Path, tmp_path: Path) -> None:
    settings, expected = LINES[case]
    folder = changed(base, tmp_path / "other", **settings)
    mapping = f"mapping={base.parent / 'names.yaml'}"
    line = refused(str(folder), "env=two_gap", mapping, f"out={tmp_path / 'run'}")
    assert re.search(expected, line), line
    assert "\n" not in line
    assert not (tmp_path / "run").exists()


def test_one_line_for_settings_that_do_not_fit(base: Path, tmp_path: Path) -> None:
    out, names = f"out={tmp_path / 'run'}", f"mapping={base.parent / 'names.yaml'}"
    filmed, bare = str(DATA / "diffusion_pictures"), tmp_path / "pictures"
    save_file({"x": torch.zeros(1)}, changed(Path(filmed), bare) / "model.safetensors")
    for words, line in {
        (str(base), "env=two_gap"): "needs observation.environment_state.*mapping=FILE",
        (str(base), "env=two_gap", names, "chunk=9"): r"chunk=9 is not in 1\.\.7",
        (str(base),): "fps=30",
        (str(tmp_path / "nowhere"),): "is not a folder",
        (str(base), "env=pendulum"): "action values",
        (str(base), "env=two_gap", "mapping=none.yaml"): "no mapping file",
        (filmed, "env=two_gap"): "model.safetensors",
        (str(bare), "env=fr3_lift"): r"action values|observation.images.top \(a picture\)",
    }.items():
        assert re.search(line, refused(*words, out)), words


def test_units_that_do_not_match(base: Path, tmp_path: Path) -> None:
    folder = changed(base, tmp_path / "degrees")
    for file in folder.glob("*processor.safetensors"):
        stats = load_file(file)
        stats |= {"action.min": torch.full((2,), -165.0), "action.max": torch.full((2,), 160.0)}
        save_file(stats, file)
    names, out = f"mapping={base.parent / 'names.yaml'}", f"out={tmp_path / 'run'}"
    line = refused(str(folder), "env=two_gap", names, out)
    assert "units do not match: the policy's actions are in [-165, 160]" in line
    for file in folder.glob("*processor.safetensors"):
        stats = load_file(file)
        save_file({**stats, f"{STATE}.max": torch.full((2,), 90.0)}, file)
    line = refused(str(folder), "env=two_gap", names, out)
    assert "observation.state is in [0, 90]" in line


def test_states_that_the_policy_does_not_read_are_left_out(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a dataset with velocities, which LeRobot lists as an input and its policy does not read;
    with our own privileged state."""
    config = json.loads((base / "config.json").read_text())
    more = {f"observation.{n}": {"type": "STATE", "shape": [7]} for n in ("velocity", "effort")}
    inputs = {**more, **config["input_features"]}
    folder = changed(base, tmp_path / "more", input_features=inputs)
    run = adopted(folder, tmp_path / "run", "two_gap", "steps=2")
    assert "observation.velocity, observation.effort: LeRobot's" in capsys.readouterr().out
    plain = adopted(base, tmp_path / "plain", "two_gap", "steps=2")
    assert torch.equal(*acted(run, plain))


def with_one_state(folder: Path) -> Path:
    """An ACT checkpoint for env=two_gap whose only input is the state."""
    resized("act_numbers", folder, {STATE: 2, "action": 2})
    config = json.loads((folder / "config.json").read_text())
    del config["input_features"][ENV]
    (folder / "config.json").write_text(json.dumps(config))
    return random_weights(folder)


def test_elements_are_matched_where_the_policy_runs(tmp_path: Path) -> None:
    folder, names = with_one_state(tmp_path / "lerobot"), tmp_path / "names.yaml"
    names.write_text("action: {low: [-1, -1], high: [1, 1], elements: [y, x]}\n")
    where, out = ("env=two_gap", f"mapping={names}"), f"out={tmp_path / 'run'}"
    line = refused(str(folder), *where, out)
    assert "adopt it without env=, and give the mapping to the command that runs it" in line
    embodied("adopt", str(folder), "fps=10", out)
    embodied("eval", str(tmp_path / "run"), *where, "episodes=2", "num_envs=2")


def test_given_back_in_the_units_of_the_checkpoint(tmp_path: Path) -> None:
    """Observations of here are 0.5 there + 0.25, and actions of 1 here 0.5 there."""
    folder = with_one_state(tmp_path / "lerobot")
    state = f"{{name: {STATE}, scale: 0.5, offset: 0.25}}"
    names = tmp_path / "names.yaml"
    names.write_text(f"obs: {{state: {state}}}\naction: {{low: [-0.5, -0.5], high: [0.5, 0.5]}}\n")
    words = ("env=two_gap", f"mapping={names}")
    embodied("adopt", str(folder), *words, f"out={tmp_path / 'run'}")
    embodied("export", str(tmp_path / "run"), "--lerobot", str(tmp_path / "back"))
    embodied("adopt", str(tmp_path / "back"), *words, f"out={tmp_path / 'again'}")
    found = [
        read_normalization(each, read_config(each), {}) for each in (folder, tmp_path / "back")
    ]
    for one, other in zip(*[[*each.inputs.values(), each.action] for each in found], strict=True):
        assert torch.allclose(
            one.low + one.offset * one.scale, other.low + other.offset * other.scale
        )
        assert torch.allclose(one.scale, other.scale)
    obs = {"state": torch.rand(4, 2)}
    first, second = (checkpoint.load_policy(tmp_path / name) for name in ("run", "again"))
    assert torch.allclose(
        *(each.act(obs, {}, torch.zeros(4, 1))[0] for each in (first, second)), atol=1e-6
    )


def test_temporal_ensembling_is_said(tmp_path: Path) -> None:
    settings = {"temporal_ensemble_coeff": 0.01, "n_action_steps": 1}
    folder = changed(
        two_gap_checkpoint(tmp_path / "base", "act_numbers"), tmp_path / "act", **settings
    )
    mapping = two_gap_mapping(tmp_path / "names.yaml")
    words = [str(folder), "env=two_gap", f"mapping={mapping}", f"out={tmp_path / 'run'}"]
    assert "chunk=20" in refused(*words)
    embodied("adopt", *words, "chunk=4")
    assert checkpoint.load_policy(tmp_path / "run").chunk == 4


CASES = sorted(folder.name for folder in DATA.iterdir())
TOLERANCE = 1e-6  # of the largest action; an unclipped sampler with random weights reaches 1,000


def with_weights(case: str, folder: Path) -> Path:
    """A copy of the checkpoint of `case` with its weights."""
    copied = Path(shutil.copytree(DATA / case, folder / case))
    state = untrained(copied)
    made = weights({name: tuple(value.shape) for name, value in state.items()})
    kind = read_config(copied).type
    unused = {f"{name}.layers.0.linear1.weight": torch.ones(2) for name in UNUSED[kind]}
    found = {k: torch.from_numpy(v) for k, v in made.items()}
    save_file({**state, **found, **unused}, copied / "model.safetensors")
    return copied


def play(policy: Policy, played: Tensors) -> Tensor:
    """The actions [steps, rows, A] of the recorded episode, with the recorded noise."""
    noise, rows = list(played["noise"]), played["actions"].shape[1]
    if policy.noise_steps:
        policy.sample_noise = lambda n, explore=False: noise.pop(0)  # pyright: ignore
    actor, actions = Actor(policy, rows), []
    names = {short(key): value for key, value in played.items() if key.startswith("obs/")}
    for step in range(len(played["actions"])):
        obs = {short(name): value[step] for name, value in names.items()}
        actions.append(actor(obs, torch.full((rows,), step == 0)))
    return torch.stack(actions)


def play_in_double(policy: Policy, played: Tensors) -> Tensor:
    """The same in double precision, as recorded: how kernels round is not what is compared."""
    double = {k: v.double() if v.is_floating_point() else v for k, v in played.items()}
    torch.set_default_dtype(torch.float64)
    try:
        return play(policy.double(), double)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("case", CASES)
def test_same_actions_as_lerobot(case: str, tmp_path: Path) -> None:
    policy = adopt(with_weights(case, tmp_path), tmp_path / "run", Options(fps=10.0))
    played = load_file(DATA / case / "played.safetensors")
    actions = play_in_double(policy, played)
    assert actions.std() > 0.05
    size = played["actions"].abs().max().clamp(min=1)
    assert (actions - played["actions"]).abs().max() <= TOLERANCE * size


@pytest.mark.parametrize("case", usually(["act_pictures", "diffusion_numbers"], CASES))
def test_every_case_is_exported(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One and two cameras, crops, resizing, past observations, actions of degrees."""
    monkeypatch.setattr("embodied.export.decision.SIZES", (1, 3))
    folder = with_weights(case, tmp_path)
    file = next(folder.glob("policy_postprocessor*.safetensors"))
    save_file({name: 60 * value for name, value in load_file(file).items()}, file)
    few = ["steps=2"] if case.startswith("diffusion") else []
    embodied("adopt", str(folder), "fps=10", f"out={tmp_path / 'run'}", *few)
    embodied("export", str(tmp_path / "run"), "--to", str(tmp_path), "--onnx", "--torchscript")
    policy = checkpoint.load_policy(tmp_path / "run")
    traced = torch.jit.load(str(tmp_path / "policy.pt"))
    *seen, noise = given = Decision(policy).example(3)
    obs = dict(zip(Decision(policy).leaves, seen, strict=True))
    expected = policy.act(obs, {}, noise)[0]
    assert expected.abs().max() > 30
    torch.testing.assert_close(traced(*given), expected, rtol=1e-5, atol=1e-3)
