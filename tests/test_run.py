"""A run directory: nothing in it is lost, replaced in silence, or written by two."""

import errno
import hashlib
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

import train_gpt2
from bpe.tokenizer import Tokenizer
from parts.checkpoint import (
    SUMS,
    find_damage,
    find_model,
    load_train_state,
)
from parts.files import sha256
from tests.helpers import (
    SHORT,
    SMALL,
    arguments,
    assert_changes_take_effect,
    assert_refused,
    assert_refused_by_name,
    assert_user_error,
    column,
    files_of,
    log_of,
    read_json,
    steps_of,
    weights,
)
from tests.token_shards import write_shards


def damage_weights(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


# ---- checkpoints that stay


def test_the_last_checkpoint_before_the_decay_stays_and_another_decay_begins_there(short, tmp_path, run_dir):
    """The decay of wsd takes the last half of the steps here."""
    options = dict(warmup_steps=0, decay_fraction=0.5)
    short(max_steps=10, keep_checkpoints=1, **options)
    assert steps_of(run_dir) == [4, 10]
    for out, max_steps in (("same", 10), ("early", 8)):
        shutil.copytree(run_dir / "step_000004", tmp_path / out / "step_000004")
        short(out=out, max_steps=max_steps, resume=True, **options)
    assert weights(tmp_path / "same", 10) == weights(run_dir, 10)
    assert column(tmp_path / "early", "train", "lr")[-1] == 0


def test_damaged_checkpoints_that_a_resume_skips_are_kept_and_block_nothing(short, run_dir):
    short(checkpoint_interval=4, max_steps=12)
    for step in (8, 12):
        damage_weights(run_dir / f"step_{step:06d}")
    damaged = {step: files_of(run_dir / f"step_{step:06d}") for step in (8, 12)}
    result = short(max_steps=9, checkpoint_interval=8, keep_checkpoints=2, resume=True)
    for step in (8, 12):
        assert f"step_{step:06d}" in result.stderr
        assert files_of(run_dir / f"step_{step:06d}.1") == damaged[step]
    assert steps_of(run_dir) == [4, 8, 9]
    assert find_damage(run_dir / "step_000008") is None


def test_a_checkpoint_that_cannot_be_read_for_a_moment_is_not_called_damaged(short, run_dir, monkeypatch):
    short()

    def fail(file, algorithm):
        raise OSError(errno.EIO, os.strerror(errno.EIO))  # as read(2): without the name of the file

    with monkeypatch.context() as context:
        context.setattr(hashlib, "file_digest", fail)
        short.error("step_000006", resume=True)
    assert steps_of(run_dir) == [2, 4, 6]


def test_all_files_of_a_checkpoint_have_the_mode_that_umask_says(short, run_dir):
    before = os.umask(0o027)
    short(max_steps=1)
    os.umask(before)
    assert {f.stat().st_mode & 0o777 for f in (run_dir / "step_000001").iterdir()} == {0o640}


# ---- overwriting


def test_overwrite_with_a_mistake_in_it_leaves_the_old_run_as_it_was(short, tmp_path, run_dir):
    short()
    before = files_of(run_dir)
    for mistake in (dict(data="nowhere"), dict(tokenizer="nowhere.json"), dict(init_from="./nowhere")):
        short.error(*mistake.values(), overwrite=True, **mistake)
    short.error("n_embd 32", "n_head 3", overwrite=True, n_head=3)
    assert files_of(run_dir) == before
    assert not (tmp_path / "run.1").exists()


def test_overwrite_renames_the_old_run_and_deletes_none(short, tmp_path):
    run = tmp_path / "run"
    old = []
    short()
    (run / "notes").write_text("mine")
    short.error("--resume", "--overwrite")  # never in silence
    for max_steps in (3, 4):
        old.append(files_of(run))
        result = short(max_steps=max_steps, checkpoint_interval=0, overwrite=True)
        assert f"run.{len(old)}" in result.stdout
        assert [files_of(tmp_path / f"run.{i + 1}") for i in range(len(old))] == old
        assert len(log_of(run, "train")) == max_steps
        assert not (run / "notes").exists()
    short(out="run.1", max_steps=8, resume=True)  # the old one can be continued


def test_runs_stay_on_the_disk_that_out_dir_links_to(short, tmp_path, run_dir):
    (tmp_path / "disk" / "place").mkdir(parents=True)
    run_dir.symlink_to(tmp_path / "disk" / "place")
    for _ in range(2):
        short(max_steps=2, overwrite=True)
    assert run_dir.is_symlink()
    assert steps_of(tmp_path / "disk" / "place") == steps_of(tmp_path / "disk" / "place.1") == [2]


def test_a_place_that_holds_other_things_or_does_not_exist_is_refused(train, short, tmp_path):
    short()
    model = tmp_path / "run" / "step_000006"
    before = files_of(model)
    for flags in (dict(resume=True), dict(overwrite=True), dict()):
        short.error(str(model), out_dir=model, **flags)
    assert files_of(model) == before
    (tmp_path / "project" / "src").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    train.error("/", out_dir="/")
    train.error("project", out="project")
    train.error(str(tmp_path / "link"), out="link")
    assert [path.name for path in (tmp_path / "project").iterdir()] == ["src"]


@pytest.mark.parametrize("name", ["config.json", "learning_curve.png"])
def test_a_file_of_others_that_a_run_would_replace_is_refused(short, run_dir, name):
    run_dir.mkdir()
    (run_dir / name).write_text("mine")
    short.error(str(run_dir), name)
    assert (run_dir / name).read_text() == "mine"
    (run_dir / name).rename(run_dir / "train.log")  # as of `> out/run/train.log`
    short(max_steps=1)


@pytest.mark.parametrize("typo", ["out/tiyn", "./gpt2", str(Path(__file__).parent)])
def test_a_path_without_a_model_is_not_asked_of_the_hub(typo):
    assert_refused(re.escape(typo), find_model, typo)


# ---- resuming with other constants


def test_a_constant_that_differs_and_that_no_flag_names_ends_the_command_with_both_values(short, run_dir):
    """As one that was edited in the script does."""
    short(max_lr=1e-3, beta1=0.8)
    before = files_of(run_dir)
    short.error("--beta1 0.8", "--beta1 0.9", resume=True, max_lr=1e-3)
    short.error("--max_lr 0.001", "--max_lr 0.003", "--beta1 0.8", "--beta1 0.9", resume=True)
    short.error("--no_shuffle", resume=True, max_lr=1e-3, beta1=0.8, **{"no-shuffle": True})
    assert files_of(run_dir) == before
    short(resume=True, max_lr=1e-3, beta1=0.8)


def test_resume_keeps_trial_results(short, run_dir):
    short(micro_batch_size=0)
    assert read_json(run_dir / "config.json")["micro_batch_size"] == 8
    short(micro_batch_size=2, max_steps=7, resume=True)
    short(micro_batch_size=0, max_steps=8, resume=True)
    assert read_json(run_dir / "config.json")["micro_batch_size"] == 2


def test_max_steps_that_are_taken_already_are_an_error_and_a_finished_run_says_so(short, run_dir):
    short()
    short.error("5", "6", resume=True, max_steps=5)
    short(max_steps=8, resume=True)
    short.error("6", "8", resume=True)
    assert "step 8" in short(max_steps=8, resume=True).stdout


def test_stop_at_ends_on_the_schedule_of_all_steps(short, tmp_path, run_dir):
    short(out="whole")
    short(stop_at=3, checkpoint_interval=0)
    assert steps_of(run_dir) == [3]
    short.error("3", resume=True, stop_at=3)
    short(resume=True)
    assert weights(run_dir, 6) == weights(tmp_path / "whole", 6)


def test_a_constant_that_no_longer_exists_is_no_obstacle(short, run_dir):
    short()
    path = run_dir / "step_000006"
    state = load_train_state(path)
    torch.save(state | dict(config=state["config"] | dict(shard="none")), path / "new.pt")
    (path / "new.pt").replace(path / "train_state.pt")
    sums = [f"{sha256(file)}  {file.name}\n" for file in path.iterdir() if file.name != SUMS]
    (path / SUMS).write_text("".join(sums))
    short(resume=True, max_steps=7)
    assert steps_of(run_dir)[-1] == 7


def test_another_validation_split_is_refused(short, run_dir, tmp_path):
    write_shards(tmp_path / "shards", [4000], "train", vocab_size=257)
    write_shards(tmp_path / "shards", [900], "val", vocab_size=257)
    Tokenizer.train(["ab"], 257).save(tmp_path / "shards" / "tokenizer.json")
    options = dict(data=tmp_path / "shards", eval_interval=3)
    short(**options)
    write_shards(tmp_path / "shards", [800], "val", vocab_size=257)
    short.error("validation", resume=True, max_steps=7, **options)


# another valid value for every constant
OTHER = dict(
    n_layer=1, n_head=4, n_embd=64, sequence_length=16, vocab_size=512, total_batch_size=512, optimizer="adamw",
    seed=7, micro_batch_size=4, max_steps=9, target_loss=0.1, warmup_steps=3, max_lr=0.001, min_lr=0.0001,
    lr_schedule="cosine", decay_fraction=0.3, muon_lr=0.01, weight_decay=0.2, beta1=0.8, beta2=0.9, eps=1e-07,
    grad_clip=0.5, max_bad_steps=3, eval_interval=3, eval_steps=1, sample_interval=4, sample_prompt="A",
    sample_tokens=4, checkpoint_interval=3, keep_checkpoints=5, dropout=0.1, attention="naive",
    activation_checkpointing=True, hellaswag_data="rows.jsonl",
)  # fmt: skip


def test_what_the_table_calls_refused_is_refused_by_name_and_changes_nothing(short, run_dir):
    short()
    assert_refused_by_name(short, run_dir, "run.md", dict(max_steps=9), OTHER)


def test_what_the_table_says_takes_effect_does_and_is_noted(train, short, run_dir):
    short()
    assert len(assert_changes_take_effect(train, run_dir, "run.md", SHORT, OTHER)) > 25
    # the optimizer keeps its moments, and has the new constants
    adamw, muon = load_train_state(run_dir / "step_000009")["optimizer"]["optimizers"]
    decayed, plain = adamw["param_groups"]
    assert decayed["betas"] == (0.8, 0.9)
    assert decayed["eps"] == 1e-7
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.2, 0.0)
    assert (decayed["peak"], muon["param_groups"][0]["peak"]) == (1e-3, 0.01)
    assert column(run_dir, "val", "step") == [6, 9]  # the first, due by now, is made up for


def test_other_data_or_another_tokenizer_is_refused_and_moved_data_is_not(short, tmp_path):
    short()
    shutil.copy(tmp_path / "text.txt", tmp_path / "moved.txt")
    short(max_steps=7, data=tmp_path / "moved.txt", resume=True)
    (tmp_path / "other.txt").write_text((tmp_path / "text.txt").read_text().replace("e", "a"))
    result = short.result(data=tmp_path / "other.txt", resume=True)
    assert_user_error(result, "--data")
    assert "other.txt" not in result.stdout
    tokenizer = tmp_path / "run/step_000006/tokenizer.json"
    short.error("data", data=tmp_path / "other.txt", tokenizer=tokenizer, resume=True)


def test_a_run_that_began_with_another_model_s_sizes_is_resumed_by_the_same_line(short, tmp_path, inline):
    short(out="first")
    sizes = {key: value for key, value in SMALL.items() if key not in ("n_layer", "n_head", "n_embd", "vocab_size")}
    options = sizes | SHORT | dict(data=tmp_path / "text.txt", out_dir=tmp_path / "second")
    options |= dict(init_from=tmp_path / "first" / "step_000006", tokenizer=tmp_path / "first" / "step_000006")
    for resume in ({}, dict(resume=True, max_steps=8)):  # the recipe's own sizes are others
        words = arguments(**options | resume)
        assert inline(train_gpt2.main, "tiny", *words).returncode == 0
    assert [start["config"]["n_embd"] for start in log_of(tmp_path / "second", "run")] == [32, 32]
