"""Prometheus metrics of the daemon's status, on this machine only; off by default.

Text exposition format 0.0.4: `# TYPE name gauge|counter`, then `name{label="value"} number`.
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from embodied.core.build import ConfigError
from embodied.real_robot.ipc.messages import Mode


def render(status: dict[str, Any]) -> str:
    """The numbers of `StatusMonitor.status` as Prometheus reads them."""
    control, policy = status["control"], status["policy"]
    mode, modes = status["mode"], [each.name for each in Mode]
    lines = [
        _one("mode", "gauge", {f'mode="{name}"': int(name == mode) for name in modes}),
        _one("fault", "gauge", {"": int(bool(status["fault"]))}),
        _one("control_alive", "gauge", {"": int(control["pid"] > 0)}),
        _one("policy_alive", "gauge", {"": int(policy["pid"] > 0)}),
        _one("ticks_total", "counter", {"": control["tick"]}),
        _one("missed_ticks_total", "counter", {"": control["missed"]}),
        _one("rate_hertz", "gauge", {"": control["rate"]}),
        _one("late_seconds", "gauge", {"": control["late"]}),
        _one("worst_late_seconds", "gauge", {"": control["worst"]}),
        _one("tick_age_seconds", "gauge", {"": control["age"]}),
        _one("chunk_age_seconds", "gauge", {"": policy["age"]}),
        _one(
            "interventions_total",
            "counter",
            {f'stage="{name}"': stage["count"] for name, stage in status["stages"].items()},
        ),
    ]
    return "".join(lines)


def _one(name: str, kind: str, values: dict[str, float]) -> str:
    samples = (f"embodied_robot_{name}{f'{{{k}}}' if k else ''} {v}\n" for k, v in values.items())
    return f"# TYPE embodied_robot_{name} {kind}\n{''.join(samples)}"


class Endpoint:
    """`http://127.0.0.1:port/metrics` shows `text`, whatever that is at the time. A thread of its
    own answers, so that no reader keeps the daemon waiting. ConfigError for a port in use."""

    def __init__(self, port: int) -> None:
        self.text = ""
        shown = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 5.0

            def do_GET(self) -> None:
                body = shown.text.encode()
                self.send_response(200 if self.path == "/metrics" else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                if self.path == "/metrics":
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Readers come every few seconds; that is no news."""

        try:
            self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except OSError as error:
            raise ConfigError(f"metrics: port {port} cannot be had ({error})") from error
        self.port = int(self.server.server_address[1])
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Answer no more."""
        self.server.shutdown()
        self.server.server_close()
