"""ONNX export of a policy, for onnxruntime, TensorRT and others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.export.decision import Decision, Export, compare, tracing

OPSET = 17


def write_onnx(decision: Decision, facts: dict[str, Any], path: Path) -> Export:
    """Write `path`; inputs and the output `actions` have a dynamic batch size n.

    `facts` become metadata, as JSON if not text. The model is first run with onnxruntime on random
    inputs; ConfigError, and no file, if it differs from PyTorch. An input that the policy does not
    use is not in the file.
    """
    try:
        import onnx
        import onnxruntime
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"ONNX needs the package {error.name}: pip install 'embodied-rl[export]'"
        ) from error

    partial = path.with_name(f".{path.name}.partial")
    try:
        names = decision.inputs
        with tracing():
            torch.onnx.export(
                decision,
                decision.example(2),
                str(partial),
                input_names=names,
                output_names=["actions"],
                dynamic_axes={name: {0: "n"} for name in [*names, "actions"]},
                opset_version=OPSET,
                dynamo=False,  # its exporter needs one more package and has no benefit here
            )
        model = onnx.load(str(partial))
        entries = {k: v if isinstance(v, str) else json.dumps(v) for k, v in facts.items()}
        onnx.helper.set_model_props(model, entries)
        onnx.checker.check_model(model, full_check=True)
        onnx.save(model, str(partial))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(
            str(partial), options, providers=["CPUExecutionProvider"]
        )

        def other(given: tuple[Tensor, ...]) -> Tensor:
            feed = {k: v.numpy() for k, v in zip(decision.inputs, given, strict=True)}
            used = {each.name for each in session.get_inputs()}
            feed = {name: value for name, value in feed.items() if name in used}
            return torch.from_numpy(session.run(["actions"], feed)[0])

        difference = compare(decision, other)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return Export(path, difference, f"onnxruntime {onnxruntime.__version__}")


def write_torchscript(decision: Decision, facts: dict[str, Any], path: Path) -> Export:
    """Write `path`; arguments in the order of `decision.inputs`, with a dynamic batch size.

    The file is loaded again and compared; ConfigError, and no file, if it differs from PyTorch.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with tracing():
            traced: Any = torch.jit.trace(decision, decision.example(2), check_trace=False)
            torch.jit.save(traced, str(partial), _extra_files={"facts.json": json.dumps(facts)})
            loaded: Any = torch.jit.load(str(partial))
            difference = compare(decision, lambda given: loaded(*given))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return Export(path, difference, f"torch {torch.__version__}")
