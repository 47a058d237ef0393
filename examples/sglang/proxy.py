"""proxy.py [--port 31004] [--prefill HOST:PORT:BOOTSTRAP_PORT] [--decode HOST:PORT]: the smallest router.

Every POST goes to both servers with the same bootstrap address and room; the answer is the decode server's. Any path
works: /v1/completions, /v1/chat/completions, /generate.
"""

from __future__ import annotations

import argparse
import http.client
import json
import secrets
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TIMEOUT_S = 300.0


def post(address: str, path: str, body: bytes) -> tuple[int, str, bytes]:
    """(status, content type, body) of an answer; 502 where the server is not there."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=TIMEOUT_S)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.headers.get("Content-Type", "application/json"), response.read()
    except (OSError, http.client.HTTPException) as error:
        return 502, "application/json", json.dumps({"error": f"{address}: {error or type(error).__name__}"}).encode()
    finally:
        connection.close()


class Proxy(BaseHTTPRequestHandler):
    prefill = decode = bootstrap = ""

    def do_POST(self) -> None:
        try:
            request = json.loads(self.rfile.read(int(self.headers.get("Content-Length", "0"))))
            host, _, port = self.bootstrap.rpartition(":")
            # a room names this request on both servers: never the same twice at a time
            room = {"bootstrap_host": host, "bootstrap_port": int(port), "bootstrap_room": secrets.randbits(62)}
            body = json.dumps({**request, **room}).encode()
        except (ValueError, TypeError) as error:
            return self.answer(400, "application/json", json.dumps({"error": f"no JSON object: {error}"}).encode())
        threading.Thread(target=post, args=(self.prefill, self.path, body), daemon=True).start()
        self.answer(*post(self.decode, self.path, body))

    def answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    parser = argparse.ArgumentParser(description="the smallest router for one prefill and one decode server")
    parser.add_argument("--port", type=int, default=31004)
    parser.add_argument("--prefill", default="127.0.0.1:31001:31002", help="HOST:PORT:BOOTSTRAP_PORT")
    parser.add_argument("--decode", default="127.0.0.1:31003", help="HOST:PORT")
    options = parser.parse_args()
    host, port, bootstrap_port = options.prefill.rsplit(":", 2)
    Proxy.prefill, Proxy.bootstrap, Proxy.decode = f"{host}:{port}", f"{host}:{bootstrap_port}", options.decode
    with ThreadingHTTPServer(("127.0.0.1", options.port), Proxy) as server:
        print(f"listening on http://127.0.0.1:{server.server_address[1]}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
