"""CLIP and SigLIP from a folder: pictures, texts and embeddings as the package itself has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from embodied.core.build import ConfigError
from embodied.vision.contrastive import Contrastive, open_image_text

transformers = pytest.importorskip("transformers")
SENTENCES = ["a red cube", "the hand holds a green ball"]
SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
SMALL["num_attention_heads"] = 2
WORDS = ["a", "red", "cube", "the", "hand", "holds", "green", "ball"]


def pictures(height: int = 40, width: int = 52) -> Tensor:
    random = torch.Generator().manual_seed(0)
    return torch.randint(256, (3, height, width, 3), generator=random).to(torch.uint8)


def clip_folder(folder: Path) -> Path:
    """A tiny random CLIP with a byte-pair vocabulary of whole words and letters."""
    letters = sorted(set("".join(WORDS)))
    ends = [f"{letter}</w>" for letter in letters]
    tokens = ["<|startoftext|>", "<|endoftext|>", *letters, *ends]
    merges: list[str] = []
    for word in WORDS:
        parts = [*word[:-1], f"{word[-1]}</w>"]
        while len(parts) > 1:
            merge = f"{parts[0]} {parts[1]}"
            parts = [parts[0] + parts[1], *parts[2:]]
            if merge not in merges:
                merges.append(merge)
                tokens.append(parts[0])
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    config = transformers.CLIPConfig(
        text_config=SMALL
        | {"vocab_size": len(vocabulary), "max_position_embeddings": 20}
        | {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1},
        vision_config=SMALL | {"image_size": 32, "patch_size": 8},
        projection_dim=12,
    )
    torch.manual_seed(0)
    transformers.CLIPModel(config).save_pretrained(folder)
    about = {"size": {"shortest_edge": 36}, "crop_size": 32, "resample": 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(about))
    return folder


def siglip_folder(folder: Path) -> Path:
    """A tiny random SigLIP with a word-level vocabulary."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    vocabulary = {word: number for number, word in enumerate(["<pad>", "<unk>", *WORDS])}
    made = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)
    config = transformers.SiglipConfig(
        text_config=SMALL | {"vocab_size": len(vocabulary), "max_position_embeddings": 12},
        vision_config=SMALL | {"image_size": 32, "patch_size": 8},
    )
    torch.manual_seed(0)
    transformers.SiglipModel(config).save_pretrained(folder)
    about = {"size": {"height": 32, "width": 32}, "resample": 2, "image_mean": [0.4] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(about))
    return folder


MAKE = {"clip": clip_folder, "siglip": siglip_folder}


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_embeddings_are_those_of_the_package(kind: str, tmp_path: Path) -> None:
    folder = MAKE[kind](tmp_path)
    model = open_image_text(str(folder))
    assert isinstance(model, Contrastive)
    seen, said = model.images(pictures()), model.texts(SENTENCES)
    assert seen.shape == (3, model.size) and said.shape == (2, model.size)
    assert seen.dtype == said.dtype == torch.float32 and model.side == 32
    long: Any = (
        {"padding": "max_length", "max_length": 12} if kind == "siglip" else {"padding": True}
    )
    read = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = read(SENTENCES, return_tensors="pt", **long)
    if kind == "siglip":
        tokens = {"input_ids": tokens["input_ids"]}
    with torch.no_grad():
        whole = model.model(pixel_values=model.prepared(pictures()), **tokens)
    torch.testing.assert_close(seen, whole.image_embeds, atol=1e-5, rtol=0)
    torch.testing.assert_close(said, whole.text_embeds, atol=1e-5, rtol=0)
    logits = model.scale * seen @ said.T
    if kind == "siglip":
        logits = logits + model.model.logit_bias
    torch.testing.assert_close(logits, whole.logits_per_image, atol=1e-4, rtol=1e-4)


def test_batches_do_not_change_embeddings(tmp_path: Path) -> None:
    model = open_image_text(str(clip_folder(tmp_path)))
    many = pictures().repeat(30, 1, 1, 1)
    torch.testing.assert_close(model.images(many)[:3], model.images(many[:3]), atol=1e-6, rtol=0)


def test_two_views_look_like_their_mean(tmp_path: Path) -> None:
    model = open_image_text(str(clip_folder(tmp_path)))
    square = pictures()[:, :32, :32]
    other = square.flip(2)
    mean = functional.normalize((model.images(square) + model.images(other)) / 2, dim=1)
    torch.testing.assert_close(model.images(torch.cat([square, other], 2)), mean)


@pytest.mark.parametrize("name", ["/no/such/folder", "./missing", "just-a-word"])
def test_a_wrong_path_is_one_clear_line(name: str) -> None:
    with pytest.raises(ConfigError, match="no model at") as caught:
        open_image_text(name)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_model_and_another_kind_of_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be opened") as caught:
        open_image_text(str(tmp_path))
    assert "\n" not in str(caught.value)
    transformers.BertConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="is a bert; supported image-text encoders"):
        open_image_text(str(tmp_path))
