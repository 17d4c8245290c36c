"""log.jsonl: damaged lines cost themselves alone, no log is lost, and its first record says where a run comes from."""

import shlex
import shutil

import torch

from run.checkpoint import checkpoint_steps
from tests.helpers import column, log_of


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
    result = short(resume=True)
    assert "no checkpoint" in result.stdout
    assert (run_dir / "log.jsonl.1").read_bytes() == before


def test_the_first_record_says_where_a_run_comes_from(short, run_dir):
    short()
    result = short(max_steps=8, resume=True, sample_prompt="it's two  words")
    assert "the learning rate rises from 0 at step 6 to " in result.stdout
    first, second = log_of(run_dir, "run")
    assert first["step"] == 0 and second["step"] == 6 and second["resumed_from"].endswith("step_000006")
    assert first["versions"]["torch"] == torch.__version__ and first["config"]["n_embd"] == 32
    assert {"command", "machine", "commit", "parameters", "flops_per_token"} <= set(first)
    assert shlex.split(second["command"])[-2:] == ["--sample_prompt", "it's two  words"]
    tokens = column(run_dir, "train", "tokens")
    assert tokens == [256 * step for step in range(1, 9)]
