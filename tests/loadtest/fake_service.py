"""Fake service for tests of programs that start services: answers every completion after a moment, without a model."""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

METRICS = ("llm_prompt_tokens", "llm_generation_tokens")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    num_requests = 0

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, body: str, status: int = 200, kind: str = "application/json") -> None:
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        metrics = "".join(f"# TYPE {name} counter\n{name}_total {7 * self.num_requests}\n" for name in METRICS)
        models = json.dumps({"data": [{"id": "fake", "max_model_len": 512}]})
        self.reply(metrics if self.path == "/metrics" else models)

    def do_POST(self) -> None:
        asked: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.path.endswith("/completions"):
            self.reply("{}", 404)
            return
        Handler.num_requests += 1
        time.sleep(0.01)
        count = asked["max_tokens"]
        part = {"text": "word"} if "prompt" in asked else {"message": {"content": "word"}, "delta": {"content": "word"}}
        usage = {"prompt_tokens": 7, "completion_tokens": count}
        body = json.dumps({"choices": [part | {"finish_reason": "length"}], "usage": usage})
        streams = bool(asked.get("stream"))
        self.reply(
            f"data: {body}\n\ndata: [DONE]\n\n" if streams else body, kind="text/event-stream" if streams else ""
        )


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
