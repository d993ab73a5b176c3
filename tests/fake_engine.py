"""A small OpenAI-compatible server with vLLM's counters, and a small `vllm` module: engines whose numbers tests choose."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PER_POSITION = (3, 2, 1)  # of every request: four rounds that keep 3, 2 and 1 drafts at positions 1 to 3
ROUNDS = 4


@contextmanager
def fake_server(*, drafts: bool = True, status: int = 200, model: str = "tiny") -> Iterator[str]:
    """URL of a server that answers each chat with its question reversed; eleven tokens an answer."""
    counters = {"requests": 0}
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def _send(self, body: str, code: int = 200) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body.encode())

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._send(json.dumps({"data": [{"id": model}]}))
            elif self.path == "/metrics" and drafts:
                n = counters["requests"]
                lines = [
                    "# HELP vllm:spec_decode_num_drafts_total rounds",
                    f'vllm:spec_decode_num_drafts_total{{engine="0",model_name="{model}"}} {100.0 + ROUNDS * n}',
                    f'vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="{model}"}} {3 * ROUNDS * n}.0',
                    f'vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="{model}"}} {sum(PER_POSITION) * n}.0',
                ]
                lines += [
                    f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{i}"}} {k * n}.0'
                    for i, k in enumerate(PER_POSITION)
                ]
                self._send("\n".join(lines) + "\n")
            else:
                self._send("not found", 404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if status != 200:
                self._send('{"error": "the model is on fire"}', status)
                return
            with lock:
                counters["requests"] += 1
            question = body["messages"][-1]["content"]
            assert len(body["messages"]) % 2 == 1
            self._send(
                json.dumps(
                    {
                        "choices": [{"message": {"content": question[::-1]}, "finish_reason": "stop"}],
                        "usage": {"prompt_tokens": 5, "completion_tokens": 11},
                    }
                )
            )

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


# An engine that steps two tokens at a time and, with a draft, counts one round of which one draft was kept per step.
FAKE_VLLM = """
__version__ = "0.0-fake"
import os, sys
from types import SimpleNamespace as S

class SamplingParams:
    def __init__(self, temperature, max_tokens, seed=None, ignore_eos=False):
        self.temperature, self.max_tokens, self.seed = temperature, max_tokens, seed

class Tokenizer:
    def apply_chat_template(self, messages, add_generation_prompt, tokenize, **options):
        return "".join(m["role"][0] + m["content"] for m in messages)
    def encode(self, text, add_special_tokens):
        return [ord(c) for c in text]

class Engine:
    def __init__(self, owner):
        self.owner, self.flying, self.most = owner, {}, 0
    def add_request(self, name, prompt, params):
        self.flying[name] = [prompt["prompt_token_ids"], params, 0]
        self.most = max(self.most, len(self.flying))
        if self.most > self.owner.max_num_seqs:
            raise RuntimeError("too many requests in flight")
    def step(self):
        done = []
        for name, state in list(self.flying.items()):
            state[2] += 2
            if self.owner.speculative:
                self.owner.rounds += 1
            finished = state[2] >= state[1].max_tokens
            ids = [(sum(state[0]) + i) % 97 for i in range(min(state[2], state[1].max_tokens))]
            if finished:
                del self.flying[name]
            done.append(S(finished=finished, request_id=name,
                          outputs=[S(token_ids=ids, text="t" + str(ids[0]), finish_reason="length")]))
        return done

class LLM:
    def __init__(self, model, disable_log_stats, speculative_config=None, max_num_seqs=8, **engine):
        assert disable_log_stats is False
        if engine.get("dtype") == "broken":
            print("ERROR 12-01 10:00:00 [core.py:1] Traceback (most recent call last):", file=sys.stderr)
            print("(EngineCore pid=7) ERROR 12-01 10:00:00 [core.py:1] AssertionError: Tried to load weights of size [576, 1728] to a parameter of size [576, 1152]", file=sys.stderr)
            raise RuntimeError("Engine core initialization failed. See root cause above.")
        self.speculative, self.rounds, self.max_num_seqs = speculative_config, 0, max_num_seqs
        self.llm_engine = Engine(self)
    def get_tokenizer(self):
        return Tokenizer()
    def get_metrics(self):
        if not self.speculative:
            return []
        n = self.rounds
        return [S(name="vllm:spec_decode_num_drafts", value=n), S(name="vllm:spec_decode_num_accepted_tokens", value=n),
                S(name="vllm:spec_decode_num_draft_tokens", value=3 * n), S(name="vllm:other", value=1.0),
                S(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[n, 0, 0])]
"""


def install_fake_vllm(folder: Path) -> dict[str, str]:
    """Write the module into `folder`; returns the environment under which a worker finds it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vllm.py").write_text(FAKE_VLLM)
    return {"PYTHONPATH": str(folder)}
