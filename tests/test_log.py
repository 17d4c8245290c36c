"""log.jsonl: damaged lines cost themselves alone, no log is lost, and its first record says where a run comes from."""

import json
import platform
import re
import shutil
import sys
from itertools import chain, count
from types import SimpleNamespace

import torch

from parts import report as log
from parts.checkpoint import checkpoint_steps
from parts.directory import RunDirectory
from parts.run import Run
from tests.helpers import NoWeights, arguments, column, read_lines
from train_gpt2 import Config


def test_damaged_lines_in_the_log_cost_those_lines_alone(short, run_dir):
    short()
    log = run_dir / "log.jsonl"
    lines = log.read_text().splitlines()
    lines[2] = lines[2][:20] + "\x00" + lines[2][25:]
    # the one of null was not finite; the last two are of other programs
    lines += """{"step": 6, "kind": "sample"}
{"step": 6, "kind": "val"}
{"step": 6, "kind": "train", "loss": "x"}
{"step": 6, "kind": "val", "loss": []}
{"step": 6, "kind": "val", "loss": null, "bpb": null}
{"step": 6, "kind": "val", "loss": -Infinity}
{"step": 6, "kind": "val", "loss": 9.0}""".splitlines()
    log.write_text("\n".join(lines) + '\n{"step": 7, "ki')
    result = short(max_steps=8, sample_interval=8, resume=True, target_loss=0.1, eval_interval=100)
    assert "line 3" in result.stderr and "Infinity" not in log.read_text()
    assert column(run_dir, "train", "step") == [1, 3, 4, 5, 6, 7, 8]


def test_a_log_without_checkpoints_is_kept_and_the_restart_is_announced(short, run_dir):
    short()
    before = (run_dir / "log.jsonl").read_bytes()
    for _, path in checkpoint_steps(run_dir):
        shutil.rmtree(path)
    assert "no checkpoint" in short(resume=True).stdout
    assert (run_dir / "log.jsonl.1").read_bytes() == before


SAID = """
step 0: val loss 9.5000, bpb 1.0000
step 1 of 4: loss 9.000, N tok/s
first loss 9.000; if all tokens are equally likely, 6.500
step 2: val loss 8.5000, bpb 1.0000
saved run/step_000003
step 4 of 4: loss 7.500, N tok/s
saved run/step_000004
step 4: val loss 7.5000, bpb 1.0000

validation loss 7.5000 nats per token, 1.0000 bits per byte
67,108,868 tokens in 4 steps, N tokens/s, N GiB at the peak
resuming from run/step_000004; --max_steps 4 is now 6; --sample_prompt Hello, I'm a language model, is now it's two  \
words
the learning rate rises from 0.1 at step 4 to 0.25, because the schedule now spans 6 steps (docs/resume.md)
step 5 of 6: loss 7.000, N tok/s
step 6 of 6: loss 6.000, N tok/s
saved run/step_000006
step 6: val loss 6.0000, bpb 1.0000

validation loss 6.0000 nats per token, 1.0000 bits per byte
100,663,302 tokens in 6 steps, N tokens/s, N GiB at the peak
"""
LOGGED = """
{"step": 0, "kind": "run", "command": "train_gpt2.py --max_steps 4", "flops_per_token": 2.0, "uniform_loss": 6.5, \
"ranks": 1, "tokenizer": "t"}
{"step": 0, "kind": "val", "loss": 9.5, "bpb": 1.0, "flops": 0.0}
{"step": 1, "kind": "train", "loss": 9.0, "lr": 0.1, "grad_norm": 9.0, "tokens": 16777217, \
"dt_ms": 1000.0, "skipped_steps": 0}
{"step": 2, "kind": "train", "loss": 8.5, "lr": 0.1, "grad_norm": null, "tokens": 33554434, \
"dt_ms": 5000.0, "skipped_steps": 1, \
"skipped": true}
{"step": 2, "kind": "val", "loss": 8.5, "bpb": 1.0, "flops": 67108868.0}
{"step": 3, "kind": "train", "loss": 8.0, "lr": 0.1, "grad_norm": 8.0, "tokens": 50331651, \
"dt_ms": 9000.0, "skipped_steps": 1}
{"step": 4, "kind": "train", "loss": 7.5, "lr": 0.1, "grad_norm": 7.5, "tokens": 67108868, \
"dt_ms": 13000.0, "skipped_steps": 1}
{"step": 4, "kind": "val", "loss": 7.5, "bpb": 1.0, "flops": 134217736.0}
{"step": 4, "kind": "run", "command": "train_gpt2.py --max_steps 6 --resume --sample_prompt 'it'\\"'\\"'s two  words'",\
 "flops_per_token": 2.0, "uniform_loss": 6.5, "ranks": 1, "tokenizer": "t", "resumed_from": "run/step_000004", \
"changed": {"max_steps": [4, 6], "sample_prompt": ["Hello, I'm a language model,", "it's two  words"]}}
{"step": 5, "kind": "train", "loss": 7.0, "lr": 0.25, "grad_norm": 7.0, "tokens": 83886085, \
"dt_ms": 17000.0, "skipped_steps": 1}
{"step": 6, "kind": "train", "loss": 6.0, "lr": 0.25, "grad_norm": 6.0, "tokens": 100663302, \
"dt_ms": 21000.0, "skipped_steps": 1}
{"step": 6, "kind": "val", "loss": 6.0, "bpb": 1.0, "flops": 201326604.0}
"""


def test_a_run_says_logs_and_saves_what_it_should_when_it_should(rt, run_dir, monkeypatch, capsys):
    """A run without a model, stopped and resumed."""
    losses = [9.5, 9.0, 8.5, 8.0, 7.5, 7.0, 6.0]
    drawn = []
    monkeypatch.setattr(log, "draw", lambda *_: drawn.append(run.step))
    monkeypatch.setattr(log, "LINE_SECONDS", 9999)
    monkeypatch.setattr(type(rt), "mark_time", lambda rt, clock=count(): next(clock) ** 2)
    monkeypatch.chdir(run_dir.parent)
    for changes in (dict(max_steps=4), dict(max_steps=6, resume=True, sample_prompt="it's two  words")):
        monkeypatch.setattr(sys, "argv", ["house/train_gpt2.py", *arguments(**changes)])
        config = Config(out_dir="run", **changes)
        optimizer = SimpleNamespace(state_dict=dict, load_state_dict=len)
        facts = dict(flops_per_token=2.0, uniform_loss=6.5)
        run = Run(RunDirectory(config, rt), config, NoWeights(), optimizer, dict(tokenizer="t"), facts)
        with run:
            for step, batch in chain([(0, 0)], run.steps(iter(range(run.data_step + 1, 99)))):
                loss = torch.tensor(losses[batch])  # whose gradient is infinite in step 2
                if step:
                    run.log_step(loss, loss / (batch != 2), 0.1 + 0.15 * (batch > 4), torch.tensor(2**24 + 1))
                if run.catch_up_if_due(3):
                    run.save()
                if run.catch_up_if_due(2, "val", at_start=True):
                    run.record("val", loss=losses[run.step], bpb=1.0)
                assert not run.catch_up_if_due(0, "sample")
        run.print_results()
    said = re.sub(r"[\d,.]+ (tok/s|tokens/s|GiB)", r"N \1", capsys.readouterr().out)
    assert said == SAID.lstrip()
    assert len(drawn) >= 4  # each half at its end, and before
    records = read_lines(run_dir / "log.jsonl")
    assert records[0]["machine"] == f"{platform.machine()}, {rt.description}"
    for record in records:
        for measured in "versions machine commit config written tokens_per_sec memory_gib mfu".split():
            record.pop(measured, None)
    assert "\n".join(map(json.dumps, records)) == LOGGED.strip()
