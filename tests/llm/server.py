"""A real server on loopback that speaks the protocol of chat completions, as told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Told:
    """What to answer: `body` (of the request if it is a function; bytes as they are, anything else
    as JSON) with `status`, after
    `event` was set where there is one, and once `full` requests have been with the server at a
    time. `drops`: a space every 10 ms before the body, until `event` is set (some servers keep a
    connection open so)."""

    body: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    event: threading.Event | None = None
    drops: bool = False
    full: int = 0


@dataclass
class Server:
    """`script` is used up from its front, the last entry again and again; `asked` keeps the
    requests, `headers` what came with them, `most` how many were here at a time."""

    url: str
    script: list[Told]
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    now: int = 0
    most: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait_until_full(self, full: int) -> None:
        with self.changed:
            self.now += 1
            self.most = max(self.most, self.now)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.most >= full, 10)
        time.sleep(0.02)  # further requests would be seen now
        with self.changed:
            self.now -= 1

    def node(self, **settings: Any) -> dict[str, Any]:
        """The node of a client of this server."""
        target = "embodied.llm.client.ChatClient"
        return {"_target_": target, "url": self.url, "model": "m", **settings}


def says(text: str | None, **more: Any) -> Told:
    """An ordinary answer."""
    message = {"role": "assistant", "content": text, **more}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    about = {"id": "1", "model": "served-model", "system_fingerprint": "fp7"}
    return Told({**about, "choices": choices, "usage": usage})


@contextmanager
def serving(*script: Told) -> Iterator[Server]:
    """A server that answers so."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            size = int(self.headers["Content-Length"])
            request = json.loads(self.rfile.read(size))
            server.asked.append(request)
            server.headers.append(dict(self.headers))
            told = server.script[0] if len(server.script) == 1 else server.script.pop(0)
            if told.event is not None and not told.drops:
                told.event.wait(10)
            if told.full:
                server.wait_until_full(told.full)
            found = told.body(request) if callable(told.body) else told.body
            body = found if isinstance(found, bytes) else json.dumps(found).encode()
            try:
                self.send_response(told.status)
                for name, value in told.headers.items():
                    self.send_header(name, value)
                if not told.drops:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                while told.event is not None and told.drops and not told.event.wait(0.01):
                    self.wfile.write(b" ")
                self.wfile.write(body)
            except OSError:
                return  # the client has gone, which is what some tests are about

        def log_message(self, format: str, *args: object) -> None:
            """Nothing on the terminal."""

    class Many(ThreadingHTTPServer):
        request_queue_size = 128

    httpd = Many(("127.0.0.1", 0), Handler)
    server = Server(f"http://127.0.0.1:{httpd.server_port}/v1", list(script))
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()
