"""The worker process: one environment behind JSON lines; its arrays are in shared memory.

It reads requests from stdin and answers each with one line. First `{"backend", "settings",
"num_envs"}`, answered by `{"spec", "partial"}`; then `{"memory", "layout"}`; then any number of
`{"do": "reset" | "step"}`. Rows to reset or to step are in the array `rows`, the seeds of new
episodes in `seeds`. A mistake is answered by `{"error"}`. The process ends with stdin.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any, BinaryIO

from .memory import mapped

BACKENDS = ("gymnasium_rows", "mjlab_rows", "robosuite_rows")


def main() -> None:
    # What the environment prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = sys.stdin.buffer
    try:
        asked = _read(requests)
        if asked["backend"] not in BACKENDS:
            raise ValueError(f"no backend {asked['backend']!r}")
        backend = importlib.import_module(f".{asked['backend']}", __package__)
        rows = backend.Rows(asked["settings"], asked["num_envs"])
        _write(answers, {"spec": rows.spec, "partial": rows.partial})
        where = _read(requests)
        arrays = mapped(where["memory"], where["layout"])
        _write(answers, {})
        while True:
            request = _read(requests)
            chosen = arrays["rows"].nonzero()[0]
            if request["do"] == "reset":
                rows.reset(arrays, chosen, arrays["seeds"][chosen], request["seeded"])
            elif request["do"] == "step":
                rows.step(arrays, chosen)
            else:
                raise ValueError(f"unknown request {request['do']!r}")
            _write(answers, {})
    except EOFError:
        return
    except Exception as error:
        _write(answers, {"error": " ".join(f"{type(error).__name__}: {error}".split())[:2000]})
        raise


def _read(requests: BinaryIO) -> dict[str, Any]:
    line = requests.readline()
    if not line:
        raise EOFError
    return json.loads(line)


def _write(answers: BinaryIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()
