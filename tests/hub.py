"""A hub on 127.0.0.1 for tests of downloads."""

import http.server
import json
import threading
import time
from collections import Counter
from pathlib import Path
from urllib.parse import unquote, urlsplit

from parts.files import sha256
from tests.helpers import environment


class Hub(http.server.ThreadingHTTPServer):
    """As much of the hub's protocol as `datasets` and a download need, with the hub's moods.

    Each folder in `folder` is the dataset some/NAME of one commit. Files are behind a redirect, as on the real hub. As
    many first requests for a file as `busy` says are answered with 429 and a Retry-After of 2 seconds; `hasty` counts
    those that come earlier.
    Each download takes `delay` seconds.
    """

    COMMIT = "0123456789abcdef0123456789abcdef01234567"
    daemon_threads = True

    def __init__(self, folder: Path, busy: dict[str, int] | None = None, delay: float = 0.0):
        super().__init__(("127.0.0.1", 0), HubRequest)
        self.folder = folder
        self.busy = Counter(busy)
        self.delay = delay
        self.requests: list[tuple[str, str, str | None, int]] = []  # method, path, Range, status
        self.now = self.most = self.hasty = 0  # downloads at this moment, the most at one
        self.quiet_until = {}
        self.lock = threading.Lock()

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc):
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
        self.server.requests.append((self.command, self.path, self.headers.get("Range"), status))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        hub = self.server
        with hub.lock:
            name = self.path.rpartition("/")[2]
            hub.busy[name] -= 1
            hub.hasty += time.monotonic() < hub.quiet_until.get(name, 0)
            if busy := hub.busy[name] >= 0:
                hub.quiet_until[name] = time.monotonic() + 2
        if busy:
            return self.answer(429, b"slow down", Retry_After="2")
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        match parts:
            case ["api", "datasets", "some", name, *what] if (hub.folder / name).is_dir():
                self.answer_json(self.about(hub.folder / name, what))
            case ["datasets", "some", name, "resolve", _, *path]:
                self.resolve(hub.folder / name, "/".join(path))
            case ["blob", *path]:
                self.send_file(hub.folder / "/".join(path))
            case _:
                self.answer(404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET

    def answer_json(self, content) -> None:
        self.answer(200, json.dumps(content).encode(), Content_Type="application/json")

    def about(self, folder: Path, what: list[str]):
        paths = sorted(folder.rglob("*"))
        if what[:1] == ["tree"]:
            below = folder / "/".join(what[2:])
            deep = "recursive=true" in self.path.lower()
            found = [path for path in paths if below in (path.parents if deep else [path.parent])]
            return [entry(str(path.relative_to(folder)), path) for path in found]
        siblings = [dict(rfilename=str(path.relative_to(folder))) for path in paths if path.is_file()]
        return dict(id=f"some/{folder.name}", sha=self.server.COMMIT, siblings=siblings, private=False, gated=False)

    def resolve(self, folder: Path, name: str) -> None:
        path = folder / name
        commit = dict(X_Repo_Commit=self.server.COMMIT)
        if not folder.is_dir():
            return self.answer(404, X_Error_Code="RepoNotFound")
        if not path.is_file():
            return self.answer(404, X_Error_Code="EntryNotFound", **commit)
        size = str(path.stat().st_size)
        # another host, as on the real hub
        place = f"http://localhost:{self.server.server_port}/blob/{folder.name}/{name}"
        etag = f'"{sha256(path)}"'
        self.answer(302, Location=place, ETag=etag, X_Linked_Etag=etag, X_Linked_Size=size, **commit)

    def send_file(self, path: Path) -> None:
        hub = self.server
        data = path.read_bytes()
        first, last = 0, len(data) - 1
        if span := self.headers.get("Range"):
            begin, _, end = span.removeprefix("bytes=").partition("-")
            first, last = int(begin), min(int(end or last), last)
        body = data[first : last + 1]
        with hub.lock:
            hub.now += 1
            hub.most = max(hub.most, hub.now)
        time.sleep(hub.delay)
        try:
            headers = dict(Content_Range=f"bytes {first}-{last}/{len(data)}") if span else {}
            headers |= dict(Content_Length=str(len(body)), ETag=f'"{sha256(path)}"')
            self.answer(206 if span else 200, body, **headers)
        except OSError:
            pass  # the client was killed
        finally:
            with hub.lock:
                hub.now -= 1


def entry(name: str, path: Path) -> dict:
    if path.is_dir():
        return dict(type="directory", path=name, oid="0")
    digest = sha256(path)
    lfs = dict(oid=digest, size=path.stat().st_size, pointerSize=100)
    return dict(type="file", path=name, size=path.stat().st_size, oid=digest[:40], lfs=lfs)


def hub_environment(hub_url: str, home: Path) -> dict:
    return environment(HF_ENDPOINT=hub_url, HF_HUB_OFFLINE="0", HF_HOME=str(home), HF_HUB_DISABLE_TELEMETRY="1")
