"""Reasoning of language models in their answers: what is between `<think>` and `</think>`."""

from __future__ import annotations

import re

TAG = re.compile(r"<(/?)(?:think|thinking|thought|reasoning)>", re.IGNORECASE)


def without_reasoning(text: str) -> str:
    """`text` without its reasoning, stripped. Reasoning that is not closed lasts to the end; what
    is before a closing tag alone is reasoning, as some servers drop the opening tag."""
    kept = ""
    depth = 0
    at = 0
    for tag in TAG.finditer(text):
        if depth == 0:
            kept += text[at : tag.start()]
        if tag[1]:
            kept = "" if depth == 0 else kept
            depth = max(0, depth - 1)
        else:
            depth += 1
        at = tag.end()
    return (kept if depth else kept + text[at:]).strip()
