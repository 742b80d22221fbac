"""A tiny Llama, built from its configuration class and served by `transformers serve`: fitted to a
conversation, it repeats what the assistant says there. It tests the way to a served model only."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from torch.nn import functional

from embodied.llm.chat import Message

ENDS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_model(folder: Path, conversation: Sequence[Message], updates: int) -> Path:
    """A model in `folder`, fitted for `updates` to what the assistant says in a conversation; its
    tokens are those of the conversation."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer([message.text for message in conversation])
    pad, end = tokenizer.convert_tokens_to_ids(list(ENDS[:2]))
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    size |= {"num_attention_heads": 4, "max_position_embeddings": 8192}
    marks = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": pad}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **size, **marks))
    _fit(model, *_tokens(tokenizer, conversation), updates)
    model.generation_config = GenerationConfig(do_sample=True, eos_token_id=end, pad_token_id=pad)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer(texts: Sequence[str]) -> Any:
    """Byte pairs of these texts: any text has tokens, and theirs are few."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=list(ENDS), initial_alphabet=letters, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, pad_token=ENDS[0], eos_token=ENDS[1])
    fast.chat_template = TEMPLATE
    return fast


def _tokens(tokenizer: Any, conversation: Sequence[Message]) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens [n] of a conversation, and whether the assistant says them."""
    ids: list[int] = []
    own: list[bool] = []
    for message in conversation:
        head = tokenizer(f"<|{message.role}|>", add_special_tokens=False).input_ids
        text = tokenizer(message.text + ENDS[1], add_special_tokens=False).input_ids
        ids += head + text
        own += [False] * len(head) + [message.role == "assistant"] * len(text)
    return torch.tensor(ids), torch.tensor(own)


def _fit(model: Any, ids: torch.Tensor, own: torch.Tensor, updates: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    before = own[1:].nonzero()[:, 0]
    for _ in range(updates):
        optimizer.zero_grad()
        logits = model(ids[None, :-1], logits_to_keep=before).logits[0]
        functional.cross_entropy(logits, ids[before + 1]).backward()
        optimizer.step()


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of `transformers serve` with the model of `folder`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", str(folder), "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    start = "from transformers.cli.transformers import main; main()"
    log = folder.with_suffix(".log")
    with log.open("w") as sink:
        server = subprocess.Popen(
            [sys.executable, "-c", start, *words], stdout=sink, stderr=subprocess.STDOUT
        )
    try:
        _wait(server, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.kill()
        server.wait()


def _wait(server: subprocess.Popen[bytes], address: str, log: Path, seconds: float = 300) -> None:
    """Until the server answers."""
    until = time.monotonic() + seconds
    while server.poll() is None and time.monotonic() < until:
        try:
            if httpx.get(address, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise RuntimeError(f"transformers serve did not start: {log.read_text()[-2000:]}")
