"""A hub on 127.0.0.1 for tests of downloads."""

import http.server
import json
import socket
import threading
import time
from pathlib import Path

from parts.files import sha256
from tests.helpers import environment


class Hub(http.server.ThreadingHTTPServer):
    """As much of the hub's protocol as a download of a dataset needs, with the hub's moods.

    The files are below `folder`, and behind a redirect, as on the real hub. The first `busy` requests are answered with
    429 and a Retry-After of 2 seconds; `hasty` counts requests that come earlier. `moods` says what happens to the
    first download of a file: `cut` ends it half-way, with the connection, `stall` sends three quarters and no more.
    """

    COMMIT = "0123456789abcdef0123456789abcdef01234567"
    daemon_threads = True

    def __init__(self, folder: Path, busy: int = 0, moods: dict[str, str] | None = None):
        super().__init__(("127.0.0.1", 0), HubRequest)
        self.folder = folder
        self.busy = busy
        self.moods = moods or {}
        self.requests: list[tuple[str, str | None, int]] = []  # path, Range, status
        self.now = self.most = self.hasty = 0
        self.quiet_until = 0.0
        self.lock = threading.Lock()
        self.over = threading.Event()

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc):
        self.over.set()
        self.shutdown()
        self.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class HubRequest(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, status: int, body: bytes = b"", **headers) -> None:
        self.server.requests.append((self.path, self.headers.get("Range"), status))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        hub = self.server
        with hub.lock:
            hub.busy -= 1
            hub.hasty += time.monotonic() < hub.quiet_until
            if busy := hub.busy >= 0:
                hub.quiet_until = time.monotonic() + 2
        if busy:
            return self.answer(429, b"slow down", Retry_After="2")
        if self.path.startswith(
            ("/api/datasets/some/corpus/revision/main", f"/api/datasets/some/corpus/revision/{hub.COMMIT}")
        ):
            files = sorted(path for path in hub.folder.rglob("*") if path.is_file())
            siblings = [
                dict(rfilename=str(path.relative_to(hub.folder)), size=path.stat().st_size, blobId="0",
                     lfs=dict(sha256=sha256(path)))
                for path in files
            ]  # fmt: skip
            body = json.dumps(dict(sha=hub.COMMIT, siblings=siblings)).encode()
            return self.answer(200, body)
        prefix = f"/datasets/some/corpus/resolve/{hub.COMMIT}/"
        if self.path.startswith(prefix):
            return self.answer(302, Location=f"{hub.url}/blob/{self.path.removeprefix(prefix)}")
        if self.path.startswith("/blob/"):
            return self.send_file(hub.folder / self.path.removeprefix("/blob/"))
        self.answer(404, X_Error_Code="RepoNotFound")

    def send_file(self, path: Path) -> None:
        hub = self.server
        data = path.read_bytes()
        span = self.headers.get("Range")
        start = int(span.removeprefix("bytes=").split("-")[0]) if span else 0
        with hub.lock:
            first = not any(p == self.path for p, _, _ in hub.requests)
            hub.now += 1
            hub.most = max(hub.most, hub.now)
        try:
            body = data[start:]
            mood = hub.moods.get(path.name) if first else None
            sent = body[: int(len(body) * dict(cut=0.5, stall=0.75).get(mood, 1))]
            headers = dict(Content_Range=f"bytes {start}-{len(data) - 1}/{len(data)}") if span else {}
            headers |= dict(Content_Length=str(len(body)))
            self.answer(206 if span else 200, sent, **headers)
            if mood == "stall":
                hub.over.wait()
            if len(sent) < len(body):
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
            time.sleep(0.02)
        except OSError:
            pass  # the client was killed
        finally:
            with hub.lock:
                hub.now -= 1


def hub_environment(hub_url: str, home: Path) -> dict:
    return environment(HF_ENDPOINT=hub_url, HF_HUB_OFFLINE="0", HF_HOME=str(home), HF_HUB_DISABLE_TELEMETRY="1")
