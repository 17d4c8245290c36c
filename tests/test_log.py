"""log.jsonl: damaged lines cost themselves alone, no log is lost, and its first record says where a run comes from."""

import json
import math
import platform
from itertools import count
from types import SimpleNamespace

from parts.cards import CARDS
from tests.helpers import column, during_validation, log_of, remove_after, spoil_gradients, steps_of


def test_damaged_lines_in_the_log_cost_those_lines_alone(short, run_dir):
    short()
    log = run_dir / "log.jsonl"
    lines = log.read_text().splitlines()
    lines[2] = lines[2][:20] + "\x00" + lines[2][25:]
    odd = [dict(kind="val", loss=-math.inf), dict(kind="val", loss=None), dict(kind="run"), dict(kind="note")]
    lines += [json.dumps(dict(step=6) | record) for record in odd]
    log.write_text("\n".join(lines) + '\n{"step": 7, "ki')
    result = short(max_steps=8, resume=True, target_loss=0.1, eval_interval=100)
    assert result.stderr.count(str(log)) == 1
    assert "Infinity" not in log.read_text()
    assert column(run_dir, "train", "step") == [1, 3, 4, 5, 6, 7, 8]


def test_a_log_without_checkpoints_is_kept_when_the_run_starts_again(short, run_dir):
    short()
    before = (run_dir / "log.jsonl").read_bytes()
    remove_after(run_dir, 0)
    short(resume=True)
    assert (run_dir / "log.jsonl.1").read_bytes() == before
    assert column(run_dir, "train", "step") == [1, 2, 3, 4, 5, 6]


def test_a_run_that_is_stopped_and_resumed_logs_every_step_once(short, run_dir, monkeypatch):
    with monkeypatch.context() as context:
        spoil_gradients(context, lambda step: step == 2, float("inf"))
        short(max_steps=4, stop_at=3, checkpoint_interval=3, eval_interval=2)
    short(max_steps=4, checkpoint_interval=3, eval_interval=2, resume=True)
    assert column(run_dir, "train", "step") == [1, 2, 3, 4]
    assert [norm is None for norm in column(run_dir, "train", "grad_norm")] == [False, True, False, False]
    assert column(run_dir, "train", "skipped_steps") == [0, 1, 1, 1]
    assert column(run_dir, "train", "tokens") == [256, 512, 768, 1024]
    assert column(run_dir, "val", "step") == [2, 3, 4]
    first, second = log_of(run_dir, "run")
    operations = first["flops_per_token"]
    assert column(run_dir, "val", "flops") == [512 * operations, 768 * operations, 1024 * operations]
    assert steps_of(run_dir) == [3, 4]
    assert first["machine"].startswith(platform.machine())
    assert "--resume" in second["command"].split()
    assert second["resumed_from"] == str(run_dir / "step_000003")
    assert [start["config"]["stop_at"] for start in (first, second)] == [3, 0]


def test_a_step_is_logged_in_the_units_of_its_names_without_the_time_of_evaluations(short, run_dir, monkeypatch):
    """The clock ticks once whenever it is looked at: at the start of a step that nothing is under way before, and at
    the end of each. An evaluation takes ten ticks."""
    ticks = count()
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    monkeypatch.setattr("resource.getrusage", lambda who: SimpleNamespace(ru_maxrss=3 * 2**19))
    monkeypatch.setitem(CARDS, "cpu", 1e-6)  # a peak of a million operations a second
    during_validation(monkeypatch, lambda: [next(ticks) for _ in range(10)])
    short(max_steps=3, eval_interval=1, checkpoint_interval=1)
    [start] = log_of(run_dir, "run")
    mfu = round(256 * start["flops_per_token"] / 1e6, 4)
    for record in log_of(run_dir, "train"):
        assert (record["dt_ms"], record["tokens_per_sec"], record["mfu"], record["memory_gib"]) == (1000, 256, mfu, 1.5)
