"""A server that answers as vLLM's does, with a model of this process: for what goes wrong with one.

As a program, ``python vllm_fake.py --model FOLDER --port PORT``, it stands in for vLLM's own.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from posttrain.models.load import load_policy

SHAPE = ("vocab_size", "hidden_size", "num_hidden_layers")


class FakeServer(ThreadingHTTPServer):
    """``faults[path]`` is called before an answer: it may raise, wait, or return (status, body)."""

    daemon_threads = True

    def __init__(self, folder: str, *, port: int = 0, **told: Any) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.folder, self.told = folder, told
        self.model = self.loaded(folder)
        self.adapters: dict[str, Any] = {}  # by the name that completions are asked of
        self.faults: dict[str, Callable[[], Any]] = {}
        self.asked: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that went away, nor of faults that were asked for."""

    def stop(self) -> None:
        self.shutdown()
        self.server_close()

    def loaded(self, folder: str) -> Any:
        return load_policy(folder, dtype=self.told.get("dtype", "float32")).model

    def call(self, method: str, *arguments: str) -> Any:
        if method == "posttrain_load":
            (self.folder,) = arguments
            if not (Path(self.folder) / "adapter_config.json").exists():
                self.model = self.loaded(self.folder)
            return None
        config = self.model.config
        return {
            "shape": {name: getattr(config, name) for name in SHAPE},
            "dtype": "float32",
            "longest": config.max_position_embeddings,
            "logprobs": "processed_logprobs",
            "weights": self.folder,
            **self.told,
        }

    @torch.no_grad()
    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        random = torch.Generator().manual_seed(request["seed"])
        model = self.adapters[request["model"]] if "model" in request else self.model
        tokens: list[int] = []
        logprobs: list[float] = []
        while len(tokens) < request["max_tokens"]:
            logits = model(torch.tensor([[*request["prompt"], *tokens]])).logits[0, -1].float()
            known = (logits / request["temperature"]).log_softmax(-1)
            tokens.append(int(known.exp().multinomial(1, generator=random)))
            logprobs.append(float(known[tokens[-1]]))
            if tokens[-1] in request["stop_token_ids"]:
                break
        reason = "stop" if tokens[-1] in request["stop_token_ids"] else "length"
        return {
            "token_ids": tokens,
            "logprobs": {"token_logprobs": logprobs},
            "finish_reason": reason,
        }


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self._answer(json.loads(self.rfile.read(length) or b"{}"))

    def _answer(self, body: dict[str, Any]) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        known = {
            "/health": lambda: {},
            "/pause": lambda: {},
            "/resume": lambda: {},
            "/reset_prefix_cache": lambda: {"success": True},
            "/collective_rpc": lambda: {
                "results": [self.server.call(body["method"], *body["args"])]
            },
            "/v1/load_lora_adapter": lambda: self.server.adapters.update(
                {body["lora_name"]: load_policy(body["lora_path"]).model}
            ),
            "/v1/unload_lora_adapter": lambda: self.server.adapters.pop(body["lora_name"]) and {},
            "/v1/completions": lambda: {"choices": [self.server.complete(body)]},
        }
        found = self.server.faults[path]() if path in self.server.faults else None
        status, answer = found or (200, known[path]())
        said = b"<html>" if answer is None else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)


def main() -> None:
    """Serve until somebody ends it."""
    given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
    FakeServer(given["--model"], port=int(given["--port"]))
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main()
