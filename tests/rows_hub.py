"""A hub on 127.0.0.1 with one dataset of parquet files: as much of the protocol as `datasets.load_dataset` asks for."""

import hashlib
import http.server
import json
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.helpers import environment

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class RowsHub(http.server.ThreadingHTTPServer):
    """Serves `folder` as the dataset `repo`; `requests` holds (method, path) of whatever was asked."""

    daemon_threads = True

    def __init__(self, repo: str, folder: Path):
        super().__init__(("127.0.0.1", 0), Request)
        self.repo, self.folder, self.requests = repo, folder, []

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc):
        self.shutdown()
        self.server_close()

    def environment(self, home: Path, **extra) -> dict:
        """Of a process that sees this hub, and keeps what it downloads below `home`."""
        endpoint = f"http://127.0.0.1:{self.server_port}"
        mine = dict(HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0", HF_HOME=str(home), HF_HUB_DISABLE_TELEMETRY="1")
        return environment(**mine | extra)


class Request(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def answer(self, status: int, body: bytes = b"", **headers) -> None:
        self.send_response(status)
        for name, value in (headers | dict(X_Repo_Commit=COMMIT, Content_Length=str(len(body)))).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub, path = self.server, self.path.partition("?")[0]
        hub.requests.append((self.command, path))
        files = {str(p.relative_to(hub.folder)): p for p in sorted(hub.folder.rglob("*")) if p.is_file()}
        api, resolve = f"/api/datasets/{hub.repo}", f"/datasets/{hub.repo}/resolve/"
        tree = f"{api}/tree/{COMMIT}"
        if path.startswith(tree):
            folder = hub.folder / path.removeprefix(tree).strip("/")
            entries = [
                dict(type="file" if p.is_file() else "directory", path=str(p.relative_to(hub.folder)), oid="0" * 40,
                     size=p.stat().st_size)
                for p in (folder.iterdir() if folder.is_dir() else [])
            ]  # fmt: skip
            self.answer(200, json.dumps(entries).encode(), Content_Type="application/json")
        elif path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
            body = dict(id=hub.repo, sha=COMMIT, siblings=[dict(rfilename=name) for name in files], tags=[])
            self.answer(200, json.dumps(body).encode(), Content_Type="application/json")
        elif path.startswith(resolve) and (name := path.removeprefix(resolve).partition("/")[2]) in files:
            body = files[name].read_bytes()
            self.answer(200, body, ETag=f'"{hashlib.sha256(body).hexdigest()}"')
        else:
            known = path.startswith((api, resolve))
            self.answer(404, X_Error_Code="EntryNotFound" if known else "RepoNotFound")


def write_dataset(folder: Path, splits: dict[str, list[dict]]) -> Path:
    """A dataset as the hub has it: a card, and a parquet file for each split."""
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# rows\n")
    for split, rows in splits.items():
        pq.write_table(pa.Table.from_pylist(rows), folder / "data" / f"{split}-00000-of-00001.parquet")
    return folder
