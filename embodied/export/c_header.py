"""C header export: an MLP policy as one C99 file, for microcontrollers.

Weights are `static const float` arrays; it needs no allocation and only headers of the language.
An observation that is not finite is refused: `fminf` and `fmaxf` would turn NaN into a number that
looks like any other. The test is one of bits, which -ffinite-math-only leaves alone.
"""

from __future__ import annotations

import ctypes
import math
import re
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embodied.core.build import ConfigError
from embodied.core.spec import Leaf
from embodied.export.decision import Decision, Export, compare
from embodied.nn.networks import Feedforward

ACTIVATIONS = {
    nn.ReLU: "x > 0.0f ? x : 0.0f",
    nn.Tanh: "tanhf(x)",
    nn.SiLU: "x / (1.0f + expf(-x))",
    nn.GELU: "0.5f * x * (1.0f + erff(x * 0.707106781f))",
    nn.Mish: "x * tanhf(log1pf(expf(x)))",
}
FLAGS = ["-std=c99", "-O2", "-Wall", "-Wextra", "-Werror", "-pedantic"]


def write_header(decision: Decision, facts: dict[str, Any], path: Path) -> Export:
    """Write the C function `policy_evaluate(obs, action)`, without noise, to `path`. It returns
    false, and actions of 0, where an observation or the result is NaN or infinite.

    If this machine has a compiler `cc`, the code is compiled and compared; ConfigError, and no
    file, if it differs from PyTorch by more than the tolerance, or the policy is not an MLP.
    """
    layers = feedforward(decision)
    source = header(layers, decision, facts)
    compiler = shutil.which("cc")
    difference, by = None, "nothing: there is no C compiler (cc) here; compile POLICY_SELF_TEST"
    if compiler is not None:
        difference, by = check(source, layers, decision, compiler), Path(compiler).name
    path.write_text(source)
    return Export(path, difference, by)


def feedforward(decision: Decision) -> Feedforward:
    """The policy as plain layers; ConfigError if it is anything else."""
    find: Callable[[], Feedforward] | None = getattr(decision.policy, "feedforward", None)
    if find is None:
        name = type(decision.policy).__name__
        raise ConfigError(f"a C header holds plain layers, and {name} is more: use --onnx")
    try:
        return find()
    except ConfigError as error:
        raise ConfigError(f"no C header: {error}; use --onnx") from error


def header(layers: Feedforward, decision: Decision, facts: dict[str, Any]) -> str:
    """The text of the C header."""
    spec, chunk = decision.policy.spec, decision.policy.chunk
    inputs = len(layers.norm.mean)
    return "\n".join(
        [
            _about(facts, [(name, spec.obs[name]) for name in layers.leaves], spec.act, chunk),
            "#ifndef POLICY_H",
            "#define POLICY_H",
            "#include <math.h>\n#include <stdbool.h>\n#include <stdint.h>\n#include <string.h>\n",
            f"#define POLICY_INPUTS {inputs}",
            f"#define POLICY_CHUNK {chunk}",
            f"#define POLICY_ACTIONS {spec.act.size}",
            f"#define POLICY_DT {number(spec.dt)} /* seconds */\n",
            *_functions(layers),
            *_network(layers, inputs),
            *_self_test(layers, decision, inputs),
            "#endif\n",
        ]
    )


def _about(facts: dict[str, Any], leaves: list[tuple[str, Leaf]], act: Leaf, chunk: int) -> str:
    lines = [
        f"A policy trained with {facts['producer']} ({facts['policy']}).",
        *([f"Task: {facts['text']}"] if facts["text"] else []),
        *([f"Step {facts['step']}, sha256 {facts['policy_sha256']}."] if "step" in facts else []),
        "",
        f"policy_evaluate(obs, action): POLICY_INPUTS floats in, in their own units (they are "
        f"normalised inside), POLICY_CHUNK x POLICY_ACTIONS floats in [-1, 1] out, step by step. "
        f"Decide every {facts['execute']} step(s) of {facts['dt']:g} s. Histories and filters are "
        "the caller's: elements are expected in exactly the order given here.",
        "",
        "It returns false where an element of obs is NaN or infinite, or the result would be: all "
        "actions are then 0, the middle of their range, and something else has to act.",
        "",
    ]
    start = 0
    for name, leaf in leaves:
        lines += [f"obs[{start}..{start + leaf.size - 1}] {name}{_described(leaf, start)}"]
        start += leaf.size
    lines += [f"action[0..{chunk * act.size - 1}]{_described(act, 0)}"]
    wrapped = [w for line in lines for w in textwrap.wrap(comment(line), 96) or [""]]
    body = "\n".join(f" * {line}".rstrip() for line in wrapped)
    return f"/*\n{body}\n */"


def _described(leaf: Leaf, start: int) -> str:
    unit = f" ({leaf.unit})" if leaf.unit else ""
    named = ", ".join(f"{start + i}={name.replace(' ', '_')}" for i, name in enumerate(leaf.names))
    return f"{unit}: {named}" if named else unit


def comment(text: str) -> str:
    """`text` without characters that could end a C comment or continue a line (untrusted)."""
    return re.sub(r"[^\w .,:;()\[\]+=<>%/'-]", " ", text, flags=re.ASCII)


def _functions(layers: Feedforward) -> list[str]:
    kinds = {type(layer) for layer in layers.net} | {nn.Tanh}
    known = {nn.Linear, nn.LayerNorm, *ACTIVATIONS}
    if not kinds <= known:
        names = ", ".join(sorted(kind.__name__ for kind in kinds - known))
        raise ConfigError(f"a C header cannot hold layers of the kind {names}: use --onnx")
    sources = ["policy_linear.h"] + ["policy_layernorm.h"] * (nn.LayerNorm in kinds)
    made = [Path(__file__).with_name(name).read_text() for name in sources]
    return made + [
        f"static inline void policy_{kind.__name__.lower()}(float *v, int n)\n{{\n"
        f"    for (int i = 0; i < n; i++) {{\n        const float x = v[i];\n"
        f"        v[i] = {formula};\n    }}\n}}\n"
        for kind, formula in ACTIVATIONS.items()
        if kind in kinds
    ]


def _network(layers: Feedforward, inputs: int) -> list[str]:
    """The weight arrays and the forward function, with two alternating buffers."""
    norm = layers.norm
    arrays = [array("policy_mean", norm.mean), array("policy_scale", 1 / norm.std)]
    steps = [
        "memset(action, 0, POLICY_CHUNK * POLICY_ACTIONS * sizeof *action);",
        "if (!policy_finite(obs, POLICY_INPUTS)) return false;",
        "for (int i = 0; i < POLICY_INPUTS; i++)",
        f"    a[i] = {clamped('(obs[i] - policy_mean[i]) * policy_scale[i]', norm.limit.item())};",
    ]
    width, here, there, widest = inputs, "a", "b", inputs
    for i, layer in enumerate(layers.net):
        if isinstance(layer, nn.Linear):
            bias = torch.zeros(layer.out_features) if layer.bias is None else layer.bias
            arrays += [array(f"policy_w{i}", layer.weight), array(f"policy_b{i}", bias)]
            out = layer.out_features
            steps += [f"policy_linear({here}, {width}, policy_w{i}, policy_b{i}, {there}, {out});"]
            here, there, width, widest = there, here, out, max(widest, out)
        elif isinstance(layer, nn.LayerNorm):
            arrays += [array(f"policy_w{i}", layer.weight), array(f"policy_b{i}", layer.bias)]
            end = f"policy_w{i}, policy_b{i}, {number(layer.eps)}"
            steps += [f"policy_layernorm({here}, {width}, {end});"]
        else:
            steps += [f"policy_{type(layer).__name__.lower()}({here}, {width});"]
    steps += [
        f"policy_tanh({here}, {width});",
        f"if (!policy_finite({here}, {width})) return false;",
        f"for (int i = 0; i < {width}; i++) action[i] = {here}[i];",
        "return true;",
    ]
    body = "\n".join(f"    {line}" for line in [f"float a[{widest}], b[{widest}];", *steps])
    head = "static inline bool policy_evaluate(const float *obs, float *action)"
    return [*arrays, f"{head}\n{{\n{body}\n}}\n"]


def _self_test(layers: Feedforward, decision: Decision, inputs: int) -> list[str]:
    """A self-test: an example input and output, and a C function that compares them."""
    given = decision.example(1)
    action = decision(*given[:-1], torch.zeros_like(given[-1])).flatten()
    return [
        "#ifdef POLICY_SELF_TEST",
        array("policy_test_obs", flatten(layers, decision, given)[0]),
        array("policy_test_action", action),
        "/* the largest difference to what PyTorch gave: below 1e-5 where all is well; 1e9 if an",
        " * observation is refused that is sound, or one is taken that is not a number */",
        "static inline float policy_self_test(void)\n{",
        "    const uint32_t nan = 0x7fc00000u;",
        f"    float action[{len(action)}], broken[POLICY_INPUTS], worst = 0.0f;",
        "    memcpy(broken, policy_test_obs, sizeof broken);",
        "    memcpy(&broken[POLICY_INPUTS - 1], &nan, sizeof nan);",
        "    if (policy_evaluate(broken, action)) return 1e9f;",
        "    if (!policy_evaluate(policy_test_obs, action)) return 1e9f;",
        f"    for (int i = 0; i < {len(action)}; i++)",
        "        worst = fmaxf(worst, fabsf(action[i] - policy_test_action[i]));",
        "    return worst;\n}",
        "#endif\n",
    ]


def clamped(value: str, limit: float) -> str:
    """A C expression that clamps `value` to [-limit, limit]; `value` itself without a limit."""
    if math.isinf(limit):
        return value
    return f"fminf(fmaxf({value}, -{number(limit)}), {number(limit)})"


def number(value: float) -> str:
    """A C float that reads back as the same float32."""
    text = f"{value:.9g}"
    return f"{text}f" if set(text) & {".", "e"} else f"{text}.0f"


def array(name: str, values: Tensor) -> str:
    """A constant C array in row-major order."""
    flat = values.detach().float().flatten().tolist()
    if not torch.isfinite(values).all():
        raise ConfigError(f"the policy has weights that are not finite ({name}): train it again")
    lines = textwrap.fill(", ".join(number(v) for v in flat), 98)
    return f"static const float {name}[{len(flat)}] = {{\n{lines}\n}};\n"


def flatten(layers: Feedforward, decision: Decision, given: tuple[Tensor, ...]) -> Tensor:
    """The arguments of a decision as rows [n, inputs] of `obs`."""
    named = dict(zip(decision.leaves, given, strict=False))
    return torch.cat([named[k].reshape(len(given[-1]), -1).float() for k in layers.leaves], 1)


def check(source: str, layers: Feedforward, decision: Decision, compiler: str) -> float:
    """Compile `source` and compare it with PyTorch (without noise)."""
    policy, chunk = decision.policy, decision.policy.chunk
    with tempfile.TemporaryDirectory() as folder:
        evaluate = compiled(source, Path(folder), compiler)

        def other(given: tuple[Tensor, ...]) -> Tensor:
            obs = flatten(layers, decision, given).contiguous()
            action = torch.zeros(len(obs), chunk * policy.spec.act.size)
            for row, out in zip(obs, action, strict=True):
                if not evaluate(row.data_ptr(), out.data_ptr()):
                    out.fill_(math.nan)  # PyTorch's answer to what is not finite
            return action.view(-1, chunk, *policy.spec.act.shape)

        return compare(Calm(policy), other)


class Calm(Decision):
    """The same decision with zero noise; ignores the given noise."""

    def forward(self, *given: Tensor) -> Tensor:
        return super().forward(*given[:-1], torch.zeros_like(given[-1]))


def compiled(source: str, folder: Path, compiler: str) -> Callable[[int, int], bool]:
    """Compile `source` and load `policy_evaluate` as a function of two addresses."""
    (folder / "policy.h").write_text(source)
    main = '#include "policy.h"\nbool evaluate(const float *, float *);\n'
    main += (
        "bool evaluate(const float *obs, float *action) { return policy_evaluate(obs, action); }\n"
    )
    (folder / "main.c").write_text(main)
    library = folder / "policy.so"
    words = [compiler, *FLAGS, "-shared", "-fPIC", "-o", str(library), "main.c", "-lm"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{compiler} cannot compile the header:\n{done.stderr}")
    function = ctypes.CDLL(str(library)).evaluate
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_bool
    return function
