"""Budget: what a run may spend on a language model, and what it has spent, also before a resume.

A response costs (prompt_tokens price.prompt + completion_tokens price.completion) / 10^6.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from embodied.llm.append_log import AppendLog
from embodied.llm.chat import BudgetSpent, ChatError
from embodied.llm.limits import Limits

FILE = "chat_usage.jsonl"


class Budget:
    """Counts the responses of `model`; `calls`, `tokens` and `cost` are the sums so far.

    With a `folder` (of the run), each response is a line of `folder/chat_usage.jsonl`; a resumed
    run, and other processes of the run, read it. A response that arrives after the run was killed
    is not counted. Thread-safe.
    """

    def __init__(self, limits: Limits, model: str, folder: Path | None = None) -> None:
        self.limits = limits
        self.model = model
        self.log = None if folder is None else AppendLog(folder / FILE)
        self.calls = self.tokens = self.in_flight = 0
        self.cost = 0.0
        self.lock = threading.Lock()

    def reserve(self) -> None:
        """Begin a request; BudgetSpent if none is left. Requests in flight count as calls, so that
        threads cannot overspend together."""
        with self.lock:
            self._read()
            limits = self.limits
            if limits.calls is not None and self.calls + self.in_flight >= limits.calls:
                self._spent(f"{limits.calls} calls")
            if limits.tokens is not None and self.tokens >= limits.tokens:
                self._spent(f"{limits.tokens} tokens")
            if limits.cost is not None and self.cost >= limits.cost:
                self._spent(f"{limits.cost:g} (cost)")
            self.in_flight += 1

    def settle(self, usage: Mapping[str, Any] | None) -> None:
        """End a request; `usage` as the server reports it (empty: it does not, None: there was no
        answer to pay for)."""
        with self.lock:
            self.in_flight -= 1
            if usage is None:
                return
            if self.log is None:
                self._add(self._record(usage))
            else:
                self.log.append(self._record(usage))
                self._read()

    def require_usage(self, usage: Any) -> None:
        """ChatError if tokens are limited and the server does not report them."""
        for name in ("tokens", "cost"):
            if getattr(self.limits, name) is not None and not isinstance(usage, Mapping):
                raise ChatError(
                    f"the server of {self.model} does not report token usage: "
                    f"set chat.limits.{name}=null"
                )

    def _record(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """One line of the file."""
        prompt, completion = (
            int(usage.get(f"{part}_tokens") or 0) for part in ("prompt", "completion")
        )
        price = self.limits.price
        return {
            "model": self.model,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "tokens": int(usage.get("total_tokens") or prompt + completion),
            "cost": (prompt * price.prompt + completion * price.completion) / 1e6,
        }

    def _read(self) -> None:
        """Add the lines of this run that are not counted yet."""
        for record in self.log.read() if self.log else ():
            if isinstance(record, dict) and record.get("model") == self.model:
                self._add(record)

    def _add(self, record: Mapping[str, Any]) -> None:
        self.calls += 1
        self.tokens += int(record["tokens"])
        self.cost += float(record["cost"])

    def _spent(self, what: str) -> None:
        before = f" ({self.log.path})" if self.log is not None else ""
        raise BudgetSpent(f"the budget of {what} of {self.model} is spent{before}")
