"""log.jsonl: damaged lines cost themselves alone, no log is lost, and its first record says where a run comes from."""

import json
import platform
import shutil
import sys
from itertools import chain, count
from types import SimpleNamespace

import pytest
import torch

from parts import report
from parts.checkpoint import checkpoint_steps
from parts.run import Run, RunDirectory, continue_constants
from tests.helpers import arguments, column, log_of, no_weights
from train_gpt2 import Config


def test_damaged_lines_in_the_log_cost_those_lines_alone(short, run_dir):
    short()
    log = run_dir / "log.jsonl"
    lines = log.read_text().splitlines()
    lines[2] = lines[2][:20] + "\x00" + lines[2][25:]
    # the one of null was not finite; the last two are of other programs
    lines += """{"step": 6, "kind": "sample"}
{"step": 6, "kind": "val"}
{"step": 6, "kind": "val", "loss": null, "bpb": null}
{"step": 6, "kind": "val", "loss": -Infinity}
{"step": 6, "kind": "val", "loss": 9.0}""".splitlines()
    log.write_text("\n".join(lines) + '\n{"step": 7, "ki')
    result = short(max_steps=8, sample_interval=8, resume=True, target_loss=0.1, eval_interval=100)
    assert "skipped 2 damaged lines: 3, 13" in result.stderr
    assert "Infinity" not in log.read_text()
    assert column(run_dir, "train", "step") == [1, 3, 4, 5, 6, 7, 8]


def test_a_log_without_checkpoints_is_kept_and_the_restart_is_announced(short, run_dir):
    short()
    before = (run_dir / "log.jsonl").read_bytes()
    for _, path in checkpoint_steps(run_dir):
        shutil.rmtree(path)
    assert "no checkpoint" in short(resume=True).stdout
    assert (run_dir / "log.jsonl.1").read_bytes() == before


def test_a_run_logs_saves_and_evaluates_when_it_should(rt, run_dir, monkeypatch, capsys):
    """A run without a model, stopped and resumed: seven losses, of which that of step 2 has an infinite gradient."""
    losses = [9.5, 9.0, 8.5, 8.0, 7.5, 7.0, 6.0]
    n_targets = 2**24 + 1  # more than fp32 counts
    seconds = count()
    monkeypatch.setattr(report, "draw", lambda *_: None)
    monkeypatch.setattr(type(rt), "mark_time", lambda rt: next(seconds) ** 2)
    monkeypatch.chdir(run_dir.parent)
    for changes in (dict(max_steps=4), dict(max_steps=6, resume=True, out_dir="two  words")):
        monkeypatch.setattr(sys, "argv", ["house/train_gpt2.py", *arguments(**changes)])
        config = Config(**changes | dict(out_dir="run"))
        directory = RunDirectory(config, rt)
        if directory.checkpoint:
            config = continue_constants(config, {*changes}, directory, (), {})
        optimizer = SimpleNamespace(state_dict=dict, load_state_dict=print, check_resumable=print)
        run_info = dict(flops_per_token=2.0, uniform_loss=6.5)
        run = Run(directory, config, no_weights, optimizer, dict(tokenizer="t"), run_info)
        with run:
            for step in chain([0], run.steps()):
                loss = torch.tensor(losses[step])
                if step:
                    run.log(loss, loss / (step != 2), 0.1 + 0.15 * (step > 4), n_targets)
                if run.due(3):
                    run.save()
                if run.due(2, "val", at_start=True):
                    run.record("val", loss=losses[run.step], bpb=1.0)
                assert not run.due(0, "sample")
    assert column(run_dir, "train", "step") == [1, 2, 3, 4, 5, 6]
    assert column(run_dir, "train", "loss") == losses[1:]
    assert column(run_dir, "train", "grad_norm") == [9.0, None, 8.0, 7.5, 7.0, 6.0]
    assert column(run_dir, "train", "skipped_steps") == [0, 1, 1, 1, 1, 1]
    assert column(run_dir, "train", "tokens") == [n_targets * step for step in range(1, 7)]
    assert column(run_dir, "val", "step") == [0, 2, 4, 6]
    assert column(run_dir, "val", "loss") == [9.5, 8.5, 7.5, 6.0]
    assert column(run_dir, "val", "flops") == [2.0 * n_targets * step for step in (0, 2, 4, 6)]
    assert [step for step, _ in checkpoint_steps(run_dir)] == [3, 4, 6]
    said = capsys.readouterr().out
    assert "first loss 9.000; if all tokens are equally likely, 6.500" in said
    assert "resuming from run/step_000004; --max_steps 4 is now 6" in said
    first, second = log_of(run_dir, "run")
    assert first["machine"] == f"{platform.machine()}, {rt.description}"
    assert second["command"] == "train_gpt2.py --max_steps 6 --resume --out_dir 'two  words'"
    assert second["resumed_from"] == "run/step_000004"
    assert [start["config"]["max_steps"] for start in (first, second)] == [4, 6]


def test_a_step_s_time_leaves_out_evaluations_and_saves(rt, run_dir, monkeypatch):
    """The clock ticks once whenever it is looked at: at the start of a step that nothing is under way before, and at
    the end of each."""
    ticks = count()
    monkeypatch.setattr(type(rt), "mark_time", lambda rt: next(ticks))
    config = Config(out_dir=str(run_dir), max_steps=3)
    optimizer = SimpleNamespace(state_dict=dict, load_state_dict=print, check_resumable=print)
    run = Run(RunDirectory(config, rt), config, no_weights, optimizer, {}, {})
    with run:
        for _ in run.steps():
            run.log(torch.tensor(1.0), torch.tensor(1.0), 0.1, 1)
            next(ticks)  # an evaluation
    assert column(run_dir, "train", "dt_ms") == [1000, 1000, 1000]


@pytest.mark.parametrize(
    "record",
    [
        dict(step=4, kind="run", command=None),
        dict(step=4, kind="run"),
        dict(step=4, kind="run", command="x", base=7),
    ],
)
def test_no_odd_record_of_a_log_ends_a_run_that_resumes(short, run_dir, record):
    short()
    with open(run_dir / "log.jsonl", "a") as log:
        log.write(json.dumps(record) + "\n")
    short(resume=True, max_steps=7)
