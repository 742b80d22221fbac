"""Exported policies act like the original, in onnxruntime, in C and in TorchScript."""

from __future__ import annotations

import ctypes
import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import yaml
from torch import Tensor

from embodied.core import checkpoint
from embodied.core.affine import Affine
from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, is_history, nest
from embodied.export.c_header import FLAGS, number, write_header
from embodied.export.decision import Decision, facts, write_onnx, write_torchscript
from tests.builders import exit_of, node_of
from tests.export.test_crazyflie import compiled, needs_cc
from tests.tiers import once_per_class, usually

FILES = sorted((Path(__file__).parents[2] / "configs" / "policy").glob("*.yaml"))
ACT = Leaf((2,), low=-1.0, high=1.0, names=("left", "right"))
OBS = {
    "angle": Leaf((), low=-3.0, high=3.0, unit="rad"),
    "critic/state": Leaf((2,)),
    "state": Leaf((4,), unit="m", names=("x", "y", "vx", "vy")),
}
IMAGES = {**OBS, "wrist": Leaf((16, 24, 3), "uint8")}
CAMERAS = {**IMAGES, "front": Leaf((20, 16, 3), "uint8")}
SPECS = {
    "vectors": Spec(OBS, ACT, dt=0.05),
    "images": Spec(IMAGES, ACT, dt=0.05),
    "cameras": Spec(CAMERAS, ACT, dt=0.05, text="go there"),
    "discrete": Spec(OBS, Leaf((), "int64", 0, 3), dt=0.05),
    "history": Spec(CAMERAS, ACT, dt=0.05),
    "degrees": Spec(OBS, Leaf((2,), low=(-90.0, 0.1), high=(60.0, 0.2)), dt=0.05),
    "degrees, history": Spec(IMAGES, Leaf((2,)), dt=0.05),
}


def make(node: dict[str, Any], spec: Spec) -> Policy:
    """Built, its normalisers fitted, as it comes out of a checkpoint."""
    torch.manual_seed(0)
    policy: Policy = build(node, Policy, spec=spec)
    obs = nest({name: leaf.sample(50) for name, leaf in spec.obs.items()}, "obs")
    policy.fit({**obs, "action": torch.rand(50, policy.chunk, *spec.act.shape)})
    return policy.eval()


def small(name: str, spec: Spec, **settings: object) -> Policy:
    target = f"embodied.policies.{name}.{name.capitalize()}"
    return make({"_target_": target, "hidden": [16], **settings}, spec)


def rows(policy: Policy, n: int) -> tuple[Tensors, Tensor]:
    obs = {name: leaf.sample(n) for name, leaf in policy.spec.obs.items()}
    return obs, policy.sample_noise(n, explore=True)


def flat(obs: Tensors) -> Tensor:
    """The observations of "vectors" as the header takes them, [n, 5]."""
    return torch.cat([obs["angle"][:, None], obs["state"]], 1)


def of_world(node: dict[str, Any], world: str) -> Policy:
    """The policy of a YAML file in a world of SPECS; ConfigError if it is not for that world.
    Sampler steps are the same nodes of a graph again: two of them are enough."""
    if node["_target_"].rpartition(".")[2] in ("Diffusion", "NoisyDiffusion"):
        node = {**node, "steps": 2}
    if "history" in world:
        node = {**node, "obs_steps": 2}
    if "degrees" in world:  # as training on a dataset makes it
        units = {"state": Affine((-90.0,) * 4, (90.0,) * 4).to_json()}
        action = Affine((-90.0, 0.1), (60.0, 0.2)).to_json()
        target = "embodied.policies.wrappers.translated.PhysicalUnits"
        node = {"_target_": target, "base": node, "action": action, "obs": units, "reach": 1.5}
    return make(node, SPECS[world])


def open_session(path: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("world", usually(["cameras", "discrete", "degrees, history"], SPECS))
@pytest.mark.parametrize("file", once_per_class(FILES))
def test_every_policy_acts_the_same_elsewhere(file: Path, world: str, tmp_path: Path) -> None:
    try:
        policy = of_world(yaml.safe_load(file.read_text()), world).inference_policy()
    except ConfigError:
        pytest.skip("not for this world")
    carried = [key for key in policy.initial(1) if not key.startswith(("row/", "explore/"))]
    if not all(map(is_history, carried)):
        with pytest.raises(ConfigError, match="no memory"):
            Decision(policy)
        return
    decision = Decision(policy)
    about = facts(decision)
    assert write_onnx(decision, about, tmp_path / "policy.onnx").difference is not None
    write_torchscript(decision, about, tmp_path / "policy.pt")
    session = open_session(tmp_path / "policy.onnx")
    traced = torch.jit.load(str(tmp_path / "policy.pt"))
    for n in (1, 5):
        *seen, noise = given = decision.example(n)
        obs = dict(zip(decision.leaves, seen, strict=True))
        assert ("history" in world) == any(map(is_history, obs))
        expected = policy.act(obs, {}, noise)[0]
        feed = {k: v.numpy() for k, v in zip(decision.inputs, given, strict=True)}
        found = torch.from_numpy(session.run(None, feed)[0])
        near = {"atol": 1e-5, "rtol": 0} if "degrees" not in world else {"atol": 1e-3, "rtol": 1e-5}
        torch.testing.assert_close(found, expected, **near)
        torch.testing.assert_close(traced(*given), expected, **near)
        # What it is given matters: the comparison above is not one of constants.
        still = session.run(None, {**feed, "noise": np.zeros_like(feed["noise"])})[0]
        assert n == 1 or not torch.equal(torch.from_numpy(still), found)


def test_an_onnx_file_says_what_it_is(tmp_path: Path) -> None:
    policy = small("deterministic", SPECS["images"], chunk=3)
    decision = Decision(policy)
    write_onnx(decision, facts(decision), tmp_path / "policy.onnx")
    props = {p.key: p.value for p in onnx.load(tmp_path / "policy.onnx").metadata_props}
    assert Spec.from_json(json.loads(props["spec"])) == policy.spec
    assert json.loads(props["dt"]) == 0.05 and json.loads(props["chunk"]) == 3
    assert json.loads(props["inputs"]) == ["obs/angle", "obs/state", "obs/wrist", "noise"]
    assert props["noise"] == "zeros" and props["policy"].endswith("Deterministic")
    session = open_session(tmp_path / "policy.onnx")
    assert [i.name for i in session.get_inputs()] == json.loads(props["inputs"])
    assert [i.shape for i in session.get_inputs()] == [["n"], ["n", 4], ["n", 16, 24, 3], ["n", 6]]
    assert session.get_inputs()[2].type == "tensor(uint8)"
    assert [o.name for o in session.get_outputs()] == ["actions"]
    assert list(tmp_path.iterdir()) == [tmp_path / "policy.onnx"]
    flow = make(node_of("policies.generative.flow.Flow"), SPECS["vectors"])
    assert facts(Decision(flow))["noise"] == "normal"


def test_a_steered_policy_exports_where_it_has_no_memory(tmp_path: Path) -> None:
    base = {"_target_": "embodied.policies.generative.flow.Flow", "width": 32}
    inner = {"_target_": "embodied.policies.gaussian.Gaussian", "hidden": [8]}
    nodes = {"base": base, "inner": inner}
    policy = make(node_of("policies.steering.dsrl.Dsrl", **nodes), SPECS["vectors"])
    write_onnx(decision := Decision(policy), facts(decision), tmp_path / "policy.onnx")
    obs, noise = rows(policy, 3)
    feed = {f"obs/{k}": v.numpy() for k, v in obs.items() if k in decision.leaves}
    found = open_session(tmp_path / "policy.onnx").run(None, feed | {"noise": noise.numpy()})[0]
    expected = policy.act(obs, policy.initial(3), noise)[0]
    torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-5, rtol=0)
    residual = make(node_of("policies.steering.residual.Residual", **nodes), SPECS["vectors"])
    with pytest.raises(ConfigError, match="Residual carries plan, cursor"):
        Decision(residual)


def test_a_file_that_acts_differently_is_not_written(tmp_path: Path) -> None:
    policy = small("deterministic", SPECS["vectors"])
    act = type(policy).act

    class Baked(type(policy)):
        def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
            total = float(obs["state"].sum())
            return act(self, obs, carry, 0.1 + 0 * noise * total if total > 0 else noise)

    policy.__class__ = Baked
    decision = Decision(policy)
    for write, name in ((write_onnx, "a.onnx"), (write_torchscript, "a.pt")):
        with pytest.raises(ConfigError, match="differs from PyTorch by"):
            write(decision, facts(decision), tmp_path / name)
    assert not list(tmp_path.iterdir())


MAIN = """
#define POLICY_SELF_TEST
#include <stdio.h>
#include "policy.h"
int main(void)
{
    float obs[POLICY_INPUTS], action[POLICY_CHUNK * POLICY_ACTIONS];
    printf("%.9g\\n", policy_self_test());
    for (;;) {
        for (int i = 0; i < POLICY_INPUTS; i++) if (scanf("%f", obs + i) != 1) return 0;
        policy_evaluate(obs, action);
        for (int i = 0; i < POLICY_CHUNK * POLICY_ACTIONS; i++) printf("%.9g ", action[i]);
    }
}
"""


def header_of(policy: Policy, folder: Path) -> Path:
    decision = Decision(policy)
    write_header(decision, facts(decision), folder / "policy.h")
    return folder / "policy.h"


def run_c(path: Path, obs: Tensor) -> tuple[float, Tensor]:
    """The header in a program of its own: its self test, and actions for rows of `obs`."""
    (path.parent / "main.c").write_text(MAIN)
    subprocess.run(["cc", *FLAGS, "-o", "a.out", "main.c", "-lm"], cwd=path.parent, check=True)
    text = " ".join(number(v)[:-1] for v in obs.flatten().tolist())
    done = subprocess.run([path.parent / "a.out"], input=text, capture_output=True, text=True)
    own, *values = done.stdout.split()
    return float(own), torch.tensor([float(v) for v in values]).view(len(obs), -1)


@needs_cc
@pytest.mark.parametrize("policy", ["deterministic", "gaussian"])
@pytest.mark.parametrize(
    "settings",
    [
        {"hidden": [64, 64], "activation": "tanh"},
        {"hidden": [33, 7, 5], "activation": "relu", "chunk": 3},
        {"hidden": [], "activation": "relu"},
        {"hidden": [9], "activation": "silu", "layer_norm": True},
        {"hidden": [9, 8], "activation": "gelu"},
        {"hidden": [9, 8], "activation": "mish"},
    ],
    ids=lambda s: f"{s['activation']}{s['hidden']}",
)
def test_the_header_is_the_policy(policy: str, settings: dict[str, Any], tmp_path: Path) -> None:
    made = small(policy, SPECS["vectors"], **settings)
    decision = Decision(made)
    written = write_header(decision, facts(decision), tmp_path / "policy.h")
    assert written.difference is not None and written.difference <= 1e-5
    obs, noise = rows(made, 20)
    obs["state"][0] *= 100  # beyond where the normaliser clips
    own, found = run_c(tmp_path / "policy.h", flat(obs))
    expected = made.act(obs, {}, 0 * noise)[0].detach().flatten(1)
    assert own <= 1e-5
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


WRONG = [math.nan, -math.nan, math.inf, -math.inf]
COMPILERS = [each for each in ("gcc", "clang") if shutil.which(each)]


def library(header: Path, compiler: str, level: str) -> ctypes.CDLL:
    """The header's functions, compiled as a user might."""
    main = '#define POLICY_SELF_TEST\n#include "policy.h"\nbool act(const float *, float *);\n'
    main += "bool act(const float *o, float *a) { return policy_evaluate(o, a); }\n"
    main += "float test(void); float test(void) { return policy_self_test(); }\n"
    made = compiled(header.parent, main, level, compiler)
    made.act.restype, made.test.restype = ctypes.c_bool, ctypes.c_float
    made.act.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return made


@needs_cc
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("level", ["-O0", "-O2", "-Ofast"])
@pytest.mark.parametrize("fitted", [True, False])
def test_what_is_not_a_number_is_refused(
    compiler: str, level: str, fitted: bool, tmp_path: Path
) -> None:
    """PyTorch's NaN is ONNX's NaN and the header's refusal; infinity the header refuses, too."""
    made: Any = small("deterministic", SPECS["vectors"], hidden=[16, 16], activation="relu")
    obs, noise = rows(made, 64)
    if fitted:
        made.fit(nest(obs, "obs"))
    decision = Decision(made)
    write_header(decision, facts(decision), tmp_path / "policy.h")
    write_onnx(decision, facts(decision), tmp_path / "policy.onnx")
    session = open_session(tmp_path / "policy.onnx")
    header = library(tmp_path / "policy.h", compiler, level)
    assert header.test() <= 1e-5
    for number_ in WRONG:
        for element in range(5):
            seen, action = flat(obs)[:1].contiguous(), torch.full((2,), 7.0)
            seen[0, element] = number_
            given = {"angle": seen[:, 0], "state": seen[:, 1:]}
            assert not header.act(seen.data_ptr(), action.data_ptr())
            assert (action == 0).all(), "the middle of the range, where nobody looks at the answer"
            expected = made.act(given, {}, 0 * noise[:1])[0]
            feed = {**nest(given, "obs"), "noise": 0 * noise[:1]}
            (found,) = session.run(["actions"], {k: v.numpy() for k, v in feed.items()})
            assert expected.isnan().any() == np.isnan(found).any()
            if math.isnan(number_):
                assert expected.isnan().all() and np.isnan(found).all()
    seen = flat(obs)[0].contiguous()
    assert header.act(seen.data_ptr(), action.data_ptr()), "and it goes on with the next one"


@needs_cc
@pytest.mark.parametrize("level", ["-O0", "-O2"])
def test_a_result_that_is_not_a_number_is_refused(level: str, tmp_path: Path) -> None:
    """Before a normaliser is fitted nothing clips: huge numbers overflow inside."""
    spec = Spec({"x": Leaf((2,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)
    policy: Any = small("deterministic", spec, hidden=[])
    with torch.no_grad():
        policy.net[0].weight.copy_(torch.tensor([[100.0, -100.0]]))
        policy.encoder.norm.limit.fill_(math.inf)
    header_of(policy, tmp_path)
    header = library(tmp_path / "policy.h", COMPILERS[0], level)
    obs, action = torch.tensor([3e38, 3e38]), torch.full((1,), 7.0)
    assert policy.act({"x": obs[None]}, {}, torch.zeros(1, 1))[0].isnan().all()
    assert not header.act(obs.data_ptr(), action.data_ptr()) and action.item() == 0


@needs_cc
def test_the_header_documents_and_does_not_obey(tmp_path: Path) -> None:
    evil = "*/ int evil = 1; /* \\\n??/"
    names = ("x*/", "y\n#error", "vx", "vy")
    obs = {**OBS, "state": Leaf((4,), unit=evil, names=names)}
    policy = small("deterministic", Spec(obs, ACT, dt=0.05, text=f"fly there {evil}"))
    text = header_of(policy, tmp_path).read_text()  # compiles with -Werror
    about, code = text.split("*/", 1)
    assert "fly there" in about and "obs[0..0] angle (rad)" in about and "obs[1..4] state" in about
    assert "3=vx, 4=vy" in about and "0=left, 1=right" in about
    assert "evil" not in code and "#error" not in code
    assert "malloc" not in text and "#define POLICY_INPUTS 5" in code


def test_headers_are_for_plain_layers(tmp_path: Path) -> None:
    flow = make({"_target_": "embodied.policies.generative.flow.Flow"}, SPECS["vectors"])
    for policy, words in (
        (flow, "holds plain layers, and Flow is more"),
        (small("deterministic", SPECS["images"]), "sees images, symbols or points"),
    ):
        with pytest.raises(ConfigError, match=words):
            header_of(policy, tmp_path)
    broken = small("deterministic", SPECS["vectors"])
    next(broken.parameters()).data.fill_(float("nan"))
    with pytest.raises(ConfigError, match="not finite"):
        header_of(broken, tmp_path)
    assert not list(tmp_path.iterdir())


def test_numbers_read_back_exactly() -> None:
    values = torch.cat([torch.randn(200), torch.randn(200) * 1e-30, torch.tensor([0.0, 1.0, -2.0])])
    for value in values.tolist():
        assert number(value).endswith("f") and np.float32(number(value)[:-1]) == np.float32(value)
        assert set(number(value)) & {".", "e"}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = small("deterministic", SPECS["vectors"])
    checkpoint.save(tmp_path / "run" / "checkpoints" / "00000007", policy, 7)
    (tmp_path / "run" / "run.yaml").write_text("execute: null\n")
    assert exit_of("export", tmp_path / "run", "--to", tmp_path / "to") == 0
    out = capsys.readouterr().out
    assert "obs/angle float32[n], obs/state float32[n, 4], noise float32[n, 2]" in out
    assert "largest difference to PyTorch" in out
    props = {p.key: p.value for p in onnx.load(tmp_path / "to" / "policy.onnx").metadata_props}
    assert props["step"] == "7" and props["execute"] == "1"
    assert exit_of("export", tmp_path / "run", "--to", tmp_path / "run" / "run.yaml") == 2
    assert "is a file" in capsys.readouterr().err
