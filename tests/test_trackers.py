"""--report_to: the real packages, offline, hold the figures of a run afterwards. Skipped where one is not installed."""

import json

import pytest

from tests.helpers import log_of

SHORT = dict(max_steps=4, eval_interval=2, eval_steps=1, checkpoint_interval=0, sample_interval=0)


def expected(run) -> dict[tuple[str, int], float]:
    """{(name, step): value} of what the log says of losses and rates."""
    found = {("train/loss", r["step"]): r["loss"] for r in log_of(run, "train")}
    found |= {("train/lr", r["step"]): r["lr"] for r in log_of(run, "train")}
    found |= {("val/bpb", r["step"]): r["bpb"] for r in log_of(run, "val")}
    assert len(found) == 10
    return found


def test_tensorboard_holds_the_figures(train, tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert train(**SHORT, report_to="tensorboard").returncode == 0
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    held = {(tag, e.step): e.value for tag in events.Tags()["scalars"] for e in events.Scalars(tag)}
    for key, value in expected(tmp_path / "run").items():
        assert held[key] == pytest.approx(value, rel=1e-6), key


def test_trackio_holds_the_figures(train, tmp_path, monkeypatch):
    pytest.importorskip("trackio", reason="needs trackio")
    from trackio import sqlite_storage

    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path)
    assert train(**SHORT, report_to="trackio").returncode == 0
    logs = sqlite_storage.SQLiteStorage.get_logs("gpt2", "run")
    held = {(name, log["step"]): value for log in logs for name, value in log.items()}
    assert expected(tmp_path / "run").items() <= held.items()
    assert train(**SHORT | dict(max_steps=6, resume=True), report_to="trackio").returncode == 0
    assert sqlite_storage.SQLiteStorage.get_runs("gpt2") == ["run"]  # the same one goes on


def test_wandb_holds_the_figures(train, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert train(**SHORT, report_to="wandb").returncode == 0
    (file,) = (tmp_path / "run").glob("wandb/offline-run-*/*.wandb")
    held = {}
    for row in wandb_history(file.read_bytes()):
        held |= {(name, int(row["_step"])): value for name, value in row.items()}
    assert expected(tmp_path / "run").items() <= held.items()


def wandb_history(data: bytes) -> list[dict]:
    """The rows of an offline run: after 7 bytes a log as LevelDB has it, of protobuf records.

    In blocks of 32 KB, each record in pieces with a header of 7 bytes: checksum, length, and 1 for a whole record, 2, 3
    and 4 for a first, a middle and a last piece. No piece begins in the last 6 bytes of a block.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    rows, at, whole = [], 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            items = Record.FromString(whole).history.item
            rows += [{i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}] if items else []
            whole = b""
    return rows
