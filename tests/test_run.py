"""A run directory: nothing in it is lost, replaced in silence, or written by two."""

import errno
import hashlib
import json
import re
import shutil
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train_gpt2
from cli import UserError
from run import checkpoint
from run import log as runlog
from run.checkpoint import CheckpointWriter, checkpoint_steps, damage, load_train_state
from run.directory import MOVING, OLD_RUN
from run.log import RunLog, duration
from tests.helpers import (
    SHORT,
    SMALL,
    assert_user_error,
    log_of,
    steps_of,
)


def spoil(path: Path) -> None:
    """Cut the weights of a checkpoint."""
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


# ---- checkpoints that stay


def test_what_was_just_written_is_never_pruned_and_damaged_ones_do_not_count(train, tmp_path):
    train(**SHORT | dict(checkpoint_interval=4, max_steps=12))
    for step in (8, 12):
        spoil(tmp_path / "run" / f"step_{step:06d}")
    result = train(**SHORT | dict(max_steps=7, checkpoint_interval=50, keep_checkpoints=2, resume=True))
    assert result.returncode == 0 and "saved" in result.stdout
    assert steps_of(tmp_path / "run") == [4, 7]
    assert damage(tmp_path / "run" / "step_000007") is None
    # those that the resume passed over are set aside
    assert {p.name for p in (tmp_path / "run").glob("damaged_*")} == {"damaged_step_000008", "damaged_step_000012"}


def test_a_checkpoint_damaged_behind_the_run_s_back_is_not_kept_in_place_of_a_sound_one(tmp_path):
    def export(directory):
        for name in ("model.safetensors", "config.json"):
            (directory / name).write_text(str(directory))

    for step in (1, 2, 3):
        writer = CheckpointWriter(tmp_path, 0)
        writer.save(step, export, {}, {}, announce=lambda line: None)
        writer.wait()
    (tmp_path / "step_000003" / "config.json").write_text("changed")
    writer = CheckpointWriter(tmp_path, 2)
    writer.save(4, export, {}, {}, announce=lambda line: None)
    writer.wait()
    assert {2, 4} <= set(steps_of(tmp_path)) and damage(tmp_path / "step_000002") is None


def test_a_best_checkpoint_that_is_damaged_gives_its_place_to_the_next(tmp_path):
    writer = CheckpointWriter(tmp_path, 1)
    losses = {1: 1.0, 2: 2.0, 3: 5.0, 4: 5.0}

    def export(directory):
        (directory / "config.json").write_text("{}")
        (directory / "model.safetensors").write_text("weights")

    for step in (1, 2, 3):
        writer.keep = 0
        writer.save(step, export, {}, losses, print)
        writer.wait()
    (tmp_path / "step_000001" / "model.safetensors").write_text("Weights")
    again = CheckpointWriter(tmp_path, 1)
    again.save(4, export, {}, losses, print)
    again.wait()
    assert {2, 4} <= set(steps_of(tmp_path)) and 3 not in steps_of(tmp_path)


def test_a_list_of_checksums_that_was_cut_between_two_lines_is_damaged(train, tmp_path):
    train(**SHORT | dict(max_steps=1))
    path = tmp_path / "run" / "step_000001"
    lines = (path / "SHA256SUMS").read_text().splitlines(keepends=True)
    for n in range(len(lines)):
        if {line.split()[1] for line in lines[:n]} >= {"train_state.pt", "model.safetensors", "config.json"}:
            continue
        (path / "SHA256SUMS").write_text("".join(lines[:n]))
        assert damage(path), n
    (path / "SHA256SUMS").write_text("".join(lines))
    assert damage(path) is None


def test_a_checkpoint_that_cannot_be_read_for_a_moment_is_not_called_damaged(train, tmp_path, monkeypatch):
    train(**SHORT)

    def stale(path):
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    with monkeypatch.context() as context:
        context.setattr(checkpoint, "sha256", stale)
        assert_user_error(train(**SHORT | dict(resume=True)), "Stale file handle")
    assert steps_of(tmp_path / "run") == [2, 4, 6]


def test_the_checkpoint_is_on_the_disk_before_an_evaluation_of_its_step_begins(train, tmp_path, monkeypatch):
    def crash(*args):
        assert damage(tmp_path / "run" / "step_000004") is None
        raise UserError("the evaluation failed")

    monkeypatch.setattr(train_gpt2, "validate", crash)
    assert_user_error(train(**SHORT | dict(eval_interval=4)), "the evaluation failed")
    assert steps_of(tmp_path / "run") == [2, 4]


def test_all_files_of_a_checkpoint_have_the_mode_that_umask_says(train, tmp_path):
    train(**SHORT | dict(max_steps=1))
    (tmp_path / "plain").write_text("")
    mode = (tmp_path / "plain").stat().st_mode
    assert {f.stat().st_mode for f in (tmp_path / "run" / "step_000001").iterdir()} == {mode}


@pytest.mark.parametrize(
    "key, value", [("step", -5), ("data_step", -7), ("tokens", float("inf")), ("data_step", 10**20)]
)
def test_a_state_with_impossible_counters_is_one_line(train, tmp_path, key, value):
    train(**SHORT)
    path = tmp_path / "run" / "step_000006" / "train_state.pt"
    state = torch.load(path, weights_only=True)
    torch.save(state | {key: value}, path)
    seal(path.parent)
    assert_user_error(train(**SHORT | dict(max_steps=7, resume=True)), "train_state.pt")


def seal(directory):
    """Write the checksums anew, as somebody would who has changed a file on purpose."""
    names = [line.split("  ")[1] for line in (directory / checkpoint.SUMS).read_text().splitlines()]
    sums = [f"{hashlib.sha256((directory / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (directory / checkpoint.SUMS).write_text("".join(sums))


# ---- overwriting


def test_overwrite_with_a_mistake_in_it_leaves_the_old_run_as_it_was(train, tmp_path):
    train(**SHORT)
    run = tmp_path / "run"
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    for mistake in (dict(data="nowhere"), dict(tokenizer="nowhere.json"), dict(init_from="./nowhere"), dict(n_head=3)):
        assert_user_error(train(**SHORT | dict(overwrite=True) | mistake))
        assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_overwrite_takes_the_run_s_own_files_and_no_others(train, tmp_path):
    train(**SHORT)
    run = tmp_path / "run"
    (run / "step_notes").mkdir()
    (run / "mydata.jsonl").write_text("mine")
    (run / "step_notes" / "page").write_text("mine")
    assert train(**SHORT | dict(max_steps=3, overwrite=True)).returncode == 0
    assert steps_of(run) == [2, 3] and len(log_of(run, "train")) == 3
    assert (run / "mydata.jsonl").read_text() == (run / "step_notes" / "page").read_text() == "mine"
    assert not (run / ".overwritten").exists()


def test_the_old_run_is_there_until_the_new_one_has_a_checkpoint(train, tmp_path, monkeypatch):
    train(**SHORT)
    monkeypatch.setattr(train_gpt2, "to_inputs", lambda *args: (_ for _ in ()).throw(UserError("no first step")))
    for _ in range(2):  # the second attempt replaces the first one, not the old run
        assert_user_error(train(**SHORT | dict(overwrite=True)), "no first step")
        assert damage(tmp_path / "run" / ".overwritten" / "step_000006") is None


def test_an_old_run_stays_as_long_as_the_new_one_has_no_checkpoint(train, tmp_path):
    train(**SHORT)
    assert train(**SHORT | dict(overwrite=True, checkpoint_interval=0)).returncode == 0
    assert steps_of(tmp_path / "run" / OLD_RUN) == [2, 4, 6] and steps_of(tmp_path / "run") == []


def test_an_overwrite_that_was_killed_while_it_moved_the_old_run_loses_none_of_it(train, tmp_path):
    run = tmp_path / "run"
    train(**SHORT)
    (run / MOVING).mkdir()
    for name in ("log.jsonl", "step_000006"):
        (run / name).rename(run / MOVING / name)
    assert_user_error(train(**SHORT | dict(resume=True)), MOVING, "--overwrite")
    assert_user_error(train(**SHORT), MOVING)
    assert train(**SHORT | dict(overwrite=True, checkpoint_interval=0, max_steps=2)).returncode == 0
    assert steps_of(run / OLD_RUN) == [2, 4, 6] and (run / OLD_RUN / "log.jsonl").exists()


def test_resume_and_overwrite_together_are_refused(train):
    assert_user_error(train(resume=True, overwrite=True), "--resume", "--overwrite")


def test_a_checkpoint_on_another_disk_can_be_replaced(train, tmp_path):
    train(**SHORT)
    run, other = tmp_path / "run", tmp_path / "other"
    for _ in range(2):  # what replaces it is replaced in turn, before it has a checkpoint of its own
        other.mkdir(exist_ok=True)
        if not other.joinpath("step_000004").exists():
            (run / "step_000004").rename(other / "step_000004")
            (run / "step_000004").symlink_to(other / "step_000004")
        assert train(**SHORT | dict(overwrite=True, checkpoint_interval=0)).returncode == 0
    assert other.joinpath("step_000004", "model.safetensors").exists()


def test_a_directory_with_files_of_somebody_else_is_no_place_for_a_run(train, tmp_path):
    train(**SHORT)
    model = tmp_path / "run" / "step_000006"
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    for flags in (dict(resume=True), dict(overwrite=True), dict()):
        assert_user_error(train(**SHORT | flags | dict(out_dir=model)), str(model))
    assert {path.name: path.read_bytes() for path in model.iterdir() if path.name != ".lock"} == before


# ---- the log


def test_a_damaged_line_in_the_log_costs_that_line_alone(train, tmp_path):
    train(**SHORT)
    log = tmp_path / "run" / "log.jsonl"
    lines = log.read_text().splitlines()
    lines[2] = lines[2][:20] + "\x00" + lines[2][25:]
    log.write_text("\n".join(lines) + '\n{"step": 7, "ki')
    result = train(**SHORT | dict(max_steps=8, resume=True))
    assert result.returncode == 0 and "line 3" in result.stderr
    assert [r["step"] for r in log_of(tmp_path / "run", "train")] == [1, 3, 4, 5, 6, 7, 8]


def test_records_of_another_form_are_left_out_of_the_log(train, tmp_path):
    train(**SHORT)
    with open(tmp_path / "run" / "log.jsonl", "a") as log:
        for record in (dict(kind="sample"), dict(kind="val"), dict(kind="train", loss="x"), dict(kind="val", loss=[])):
            log.write(json.dumps(dict(step=6) | record) + "\n")
        log.write(json.dumps(dict(step=6, kind="val", loss=None, bpb=None)) + "\n")
        log.write(json.dumps(dict(step=6, kind="train", loss=1.0)) + "\n")
    assert train(**SHORT | dict(max_steps=8, sample_interval=8, resume=True)).returncode == 0


def test_a_log_without_checkpoints_is_kept_and_the_restart_is_announced(train, tmp_path):
    train(**SHORT)
    before = (tmp_path / "run" / "log.jsonl").read_bytes()
    for _, path in checkpoint_steps(tmp_path / "run"):
        shutil.rmtree(path)
    result = train(**SHORT | dict(resume=True))
    assert result.returncode == 0 and "no checkpoint" in result.stdout
    assert (tmp_path / "run" / "log.1.jsonl").read_bytes() == before


def test_the_first_record_says_where_a_run_comes_from(train, tmp_path):
    train(**SHORT)
    train(**SHORT | dict(max_steps=8, resume=True))
    first, second = log_of(tmp_path / "run", "run")
    assert first["step"] == 0 and second["step"] == 6 and second["resumed_from"].endswith("step_000006")
    assert first["versions"]["torch"] == torch.__version__ and first["config"]["n_embd"] == 32
    assert {"command", "machine", "commit", "parameters", "flops_per_token"} <= set(first)
    tokens = [r["tokens"] for r in log_of(tmp_path / "run", "train")]
    assert tokens == [256 * step for step in range(1, 9)]


def test_resuming_a_finished_run_adds_nothing_to_it(train, tmp_path):
    train(**SHORT | dict(sample_interval=3))
    before = (tmp_path / "run" / "samples.txt").read_bytes()
    assert train(**SHORT | dict(sample_interval=3, resume=True)).returncode == 0
    assert (tmp_path / "run" / "samples.txt").read_bytes() == before


@pytest.mark.parametrize("planned, seconds", [(0, 90), (4 * 256 * 90, 360)])
def test_the_time_to_go_follows_from_the_tokens_to_come_or_else_from_the_steps(tmp_path, planned, seconds):
    said = []
    rt = SimpleNamespace(is_main=True, print=said.append, peak_flops=lambda: None, peak_memory=lambda: 0)
    log = RunLog(tmp_path, rt, SimpleNamespace(report_to="none"))
    log.start_bar(0, 100)
    for step in range(1, 11):  # the first one is slow, as if it compiled
        log.train_step(step, dict(loss=1.0, grad_norm=1.0), 30.0 if step == 1 else 1.0, 256, 0.0)
    log.say_how_long(90, planned)
    assert said == [f"about {duration(seconds)} to go at 256 tokens/s, plus evaluations"]
    assert [duration(s) for s in (90, 360, 7200)] == ["90 s", "6 min", "2.0 h"]


def test_a_tracker_that_fails_ends_no_run(train, tmp_path, monkeypatch):
    def fail(record):
        raise ConnectionError("no server")

    monkeypatch.setattr(runlog, "open_tracker", lambda config: (fail, None))
    result = train(**SHORT)
    assert result.returncode == 0 and steps_of(tmp_path / "run")[-1] == 6
    assert (result.stdout + result.stderr).count("no server") == 1


# ---- resuming with other constants


def resume_table() -> dict[str, str]:
    """{constant: what docs/resume.md says a resume does with another value}"""
    text = (Path(__file__).parent.parent / "docs" / "resume.md").read_text()
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.+) \|$", text[text.index("| constant |") :], re.MULTILINE)
    return {name: said for names, said in rows for name in re.findall(r"`(\w+)`", names)}


OTHER = dict(  # another sound value for every constant
    n_layer=1, n_head=4, n_embd=64, sequence_length=16, vocab_size=512, total_batch_size=512, optimizer="adamw",
    seed=7, micro_batch_size=4, max_steps=9, target_loss=0.1, warmup_steps=3,
    max_lr=1e-3, min_lr=1e-4, lr_schedule="cosine", decay_fraction=0.3, muon_lr=0.01, weight_decay=0.2, beta1=0.8,
    beta2=0.9, eps=1e-7, grad_clip=0.5, max_bad_steps=3, spike_threshold=2.0, eval_interval=3, eval_steps=1,
    sample_interval=4, sample_prompt="A", sample_tokens=4, checkpoint_interval=3, keep_checkpoints=5, dropout=0.1,
    attention="naive", activation_checkpointing=True, hellaswag_data="rows.jsonl",
)  # fmt: skip


def test_every_constant_is_in_the_table():
    assert set(resume_table()) == {field.name for field in fields(train_gpt2.Config)}


def test_what_the_table_calls_refused_is_refused_by_name_and_changes_nothing(train, tmp_path):
    train(**SHORT)
    run = tmp_path / "run"
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    refused = [name for name, said in resume_table().items() if said == "refused"]
    assert set(refused) == set(train_gpt2.FIXED)
    for name in refused:
        change = {"no-shuffle": True} if name == "shuffle" else {name: OTHER[name]}
        assert_user_error(train(**SHORT | dict(resume=True, max_steps=9) | change), name)
        assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_what_the_table_says_takes_effect_does_and_is_noted(train, tmp_path):
    train(**SHORT)
    changes = {name: OTHER[name] for name, said in resume_table().items() if said == "takes effect" and name in OTHER}
    assert len(changes) > 25
    result = train(**SHORT | changes | dict(resume=True))
    assert result.returncode == 0, result.stderr
    record = log_of(tmp_path / "run", "run")[-1]
    assert {name: new for name, (_, new) in record["changed"].items()} == changes
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert {name: config[name] for name in changes} == changes
    # the optimizer goes on with its moments, and with the constants of now
    adamw, muon = load_train_state(tmp_path / "run" / "step_000009")["optimizer"]["optimizers"]
    decayed, plain = adamw["param_groups"]
    assert decayed["betas"] == (0.8, 0.9) and decayed["eps"] == 1e-7
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.2, 0.0)
    assert (decayed["initial_lr"], muon["param_groups"][0]["initial_lr"]) == (1e-3, 0.01)
    assert [r["step"] for r in log_of(tmp_path / "run", "val")] == [6, 9]  # the first, due by now, is made up for


def test_a_lower_learning_rate_is_the_one_that_steps_are_taken_with(train, tmp_path):
    train(**SHORT)
    train(**SHORT | dict(max_steps=7, max_lr=1e-9, muon_lr=1e-9, weight_decay=0.0, resume=True))
    old, new = (tmp_path / "run" / f"step_{step:06d}" / "model.safetensors" for step in (6, 7))
    from safetensors.torch import load_file

    for a, b in zip(load_file(old).values(), load_file(new).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_other_data_or_another_tokenizer_is_refused_and_moved_data_is_not(train, tmp_path):
    train(**SHORT)
    shutil.copy(tmp_path / "text.txt", tmp_path / "moved.txt")
    assert train(**SHORT | dict(max_steps=7, data=tmp_path / "moved.txt", resume=True)).returncode == 0
    (tmp_path / "other.txt").write_text((tmp_path / "text.txt").read_text().replace("e", "a"))
    assert_user_error(train(**SHORT | dict(data=tmp_path / "other.txt", resume=True)), "another tokenizer")
    tokenizer = tmp_path / "run" / "step_000006" / "tokenizer.json"
    other = SHORT | dict(data=tmp_path / "other.txt", tokenizer=tokenizer, resume=True)
    assert_user_error(train(**other), "another data")


def test_a_run_that_began_with_another_model_s_sizes_is_resumed_by_the_same_line(train, tmp_path):
    train(out="first", **SHORT)
    sizes = {key: value for key, value in SMALL.items() if key not in ("n_layer", "n_head", "n_embd", "vocab_size")}
    options = sizes | SHORT | dict(data=tmp_path / "text.txt", out_dir=tmp_path / "second", vocab_size=384)
    options |= dict(init_from=tmp_path / "first" / "step_000006", tokenizer=tmp_path / "first" / "step_000006")
    del options["vocab_size"]
    from tests.helpers import run_script

    for resume in ({}, dict(resume=True, max_steps=8)):  # the recipe's own sizes are others
        result = run_script("train_gpt2.py", "tiny", **options | resume)
        assert result.returncode == 0, result.stderr[-2000:]
    assert json.loads((tmp_path / "second" / "config.json").read_text())["n_embd"] == 32


def test_shards_that_are_not_complete_are_announced(train, tmp_path):
    train(**SHORT)
    shards = next((tmp_path / "cache").glob("text-*"))
    manifest = json.loads((shards / "manifest.json").read_text()) | dict(next=dict(file=0, row=0))
    (shards / "manifest.json").write_text(json.dumps(manifest))
    result = train(out="other", **SHORT | dict(data=shards))
    assert result.returncode == 0 and "not complete" in result.stderr
