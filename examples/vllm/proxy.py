"""The smallest router between a prefill and a decode server: OpenAI requests in, answers out, streamed or whole.

python proxy.py [--port 8000] [--prefill http://127.0.0.1:8100] [--decode http://127.0.0.1:8200]
"""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
import uuid
from http.client import HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ASK_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
MAX_BODY_BYTES = 64 << 20
TIMEOUT_S = 600.0


def prefill_request(request: dict[str, Any]) -> dict[str, Any]:
    """The same request for one token, whose cache prefill then keeps for decode."""
    first = {**request, "max_tokens": 1, "stream": False, "kv_transfer_params": ASK_PREFILL}
    first.pop("stream_options", None)
    if "max_completion_tokens" in request:
        first["max_completion_tokens"] = 1
    return first


def post(url: str, request: dict[str, Any], request_id: str) -> HTTPResponse:
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    answer: HTTPResponse = urllib.request.urlopen(
        urllib.request.Request(url, json.dumps(request).encode(), headers), timeout=TIMEOUT_S
    )
    return answer


class Proxy(BaseHTTPRequestHandler):
    prefill = decode = ""

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if self.path not in ("/v1/completions", "/v1/chat/completions"):
            return self.reply(404, b'{"error": "only /v1/completions and /v1/chat/completions are served here"}')
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            return self.reply(413, b'{"error": "a body with a Content-Length is expected"}')
        try:
            request = dict(json.loads(self.rfile.read(int(length))))
        except (ValueError, TypeError):
            return self.reply(400, b'{"error": "a JSON object is expected"}')
        name = self.headers.get("X-Request-Id") or uuid.uuid4().hex
        try:
            with post(self.prefill + self.path, prefill_request(request), name) as answer:
                params = json.load(answer).get("kv_transfer_params")
            # without parameters decode computes the prompt itself
            if params:
                request["kv_transfer_params"] = params
            with post(self.decode + self.path, request, name) as answer:
                self.pass_on(answer)
        except urllib.error.HTTPError as error:
            self.reply(error.code, error.read())
        except OSError as error:
            self.reply(502, json.dumps({"error": f"a server behind this proxy can't be reached: {error}"}).encode())

    def pass_on(self, answer: HTTPResponse) -> None:
        """What decode sends, as it comes; HTTP/1.0: the end of the answer is the end of the connection."""
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.headers.get("Content-Type", "application/json"))
        self.end_headers()
        while block := answer.read1(65536):
            self.wfile.write(block)

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: both servers have logs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", default="http://127.0.0.1:8100", help="URL of the prefill server")
    parser.add_argument("--decode", default="http://127.0.0.1:8200", help="URL of the decode server")
    options = parser.parse_args()
    Proxy.prefill, Proxy.decode = options.prefill.rstrip("/"), options.decode.rstrip("/")
    server = ThreadingHTTPServer(("127.0.0.1", options.port), Proxy)
    print(f"serving on http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
