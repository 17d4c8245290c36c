"""A run directory: nothing in it is lost, replaced in silence, or written by two."""

import errno
import hashlib
import itertools
import json
import math
import shlex
import shutil
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train_gpt2
from cli import UserError
from files import exclusive_lock
from run import checkpoint, directory
from run.checkpoint import (
    SUMS,
    CheckpointWriter,
    Snapshot,
    checkpoint_steps,
    find_damage,
    find_model,
    load_train_state,
    remove_after,
)
from run.log import RunLog
from run.run import Run
from run.spikes import SpikeDetector
from tests.helpers import (
    SHORT,
    SMALL,
    arguments,
    assert_changes_take_effect,
    assert_user_error,
    files_of,
    log_of,
    losses,
    resume_table,
    run_inline,
    steps_of,
)


def damage_weights(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


# ---- checkpoints that stay


@pytest.mark.parametrize(
    "keep, losses, damaged, left",
    [
        (0, {}, [], [1, 2, 3, 4, 5]),
        (2, {}, [], [4, 5]),
        (1, {1: 3.0, 2: 2.0, 4: 2.5}, [], [2, 5]),
        (1, {1: 2.0}, [], [1, 5]),  # the later ones inherit its loss, and are not better
        (2, {}, [4], [3, 4, 5]),  # a damaged one does not count, and is left for a person to look at
        (1, {1: 3.0, 2: 2.0, 4: 2.5}, [2], [2, 3, 5]),  # nor is it the best
    ],
)
def test_the_newest_intact_checkpoints_stay_and_the_one_of_the_lowest_loss(tmp_path, keep, losses, damaged, left):
    def write(directory):
        for name in ("model.safetensors", "config.json"):
            (directory / name).write_text(str(directory))

    files = SimpleNamespace(write=write)
    for step in (1, 2, 3, 4):
        writer = CheckpointWriter(tmp_path, 0)
        writer.save(Snapshot(step, [files], {}), {})
        writer.wait()
    for step in damaged:
        damage_weights(tmp_path / f"step_{step:06d}")
    writer = CheckpointWriter(tmp_path, keep)
    writer.save(Snapshot(5, [files], {}), losses)
    writer.wait()
    assert steps_of(tmp_path) == left


def test_damaged_checkpoints_that_a_resume_skips_are_set_aside(train, tmp_path):
    train(**SHORT | dict(checkpoint_interval=4, max_steps=12))
    for step in (8, 12):
        damage_weights(tmp_path / "run" / f"step_{step:06d}")
    result = train(**SHORT | dict(max_steps=7, checkpoint_interval=50, keep_checkpoints=2, resume=True))
    assert result.returncode == 0 and "step_000012" in result.stderr
    assert steps_of(tmp_path / "run") == [4, 7] and find_damage(tmp_path / "run" / "step_000007") is None
    assert {p.name for p in (tmp_path / "run").glob("damaged_*")} == {"damaged_step_000008", "damaged_step_000012"}


def test_a_list_of_checksums_that_was_cut_between_two_lines_is_damaged(train, tmp_path):
    train(**SHORT | dict(max_steps=1))
    path = tmp_path / "run" / "step_000001"
    lines = (path / SUMS).read_text().splitlines(keepends=True)
    for n in range(len(lines) + 1):
        (path / SUMS).write_text("".join(lines[:n]))
        listed = {line.split()[1] for line in lines[:n]}
        assert (find_damage(path) is None) == ({"train_state.pt", "model.safetensors", "config.json"} <= listed), n


def test_a_checkpoint_that_cannot_be_read_for_a_moment_is_not_called_damaged(train, tmp_path, monkeypatch):
    train(**SHORT)

    def stale(file, algorithm):
        raise OSError(errno.ESTALE, "Stale file handle", file.name)

    with monkeypatch.context() as context:
        context.setattr(hashlib, "file_digest", stale)
        assert_user_error(train(**SHORT | dict(resume=True)), "Stale file handle")
    assert steps_of(tmp_path / "run") == [2, 4, 6]


def test_the_checkpoint_is_on_the_disk_before_an_evaluation_of_its_step_begins(train, tmp_path, monkeypatch):
    def crash(*args):
        assert find_damage(tmp_path / "run" / "step_000004") is None
        raise UserError("the evaluation failed")

    monkeypatch.setattr(train_gpt2, "validate", crash)
    assert_user_error(train(**SHORT | dict(eval_interval=4)), "the evaluation failed")
    assert steps_of(tmp_path / "run") == [2, 4]


def test_all_files_of_a_checkpoint_have_the_mode_that_umask_says(train, tmp_path):
    train(**SHORT | dict(max_steps=1))
    (tmp_path / "plain").write_text("")
    mode = (tmp_path / "plain").stat().st_mode
    assert {f.stat().st_mode for f in (tmp_path / "run" / "step_000001").iterdir()} == {mode}


# ---- overwriting


def test_overwrite_with_a_mistake_in_it_leaves_the_old_run_as_it_was(train, tmp_path):
    train(**SHORT)
    before = files_of(tmp_path / "run")
    for mistake in (dict(data="nowhere"), dict(tokenizer="nowhere.json"), dict(init_from="./nowhere"), dict(n_head=3)):
        assert_user_error(train(**SHORT | dict(overwrite=True) | mistake))
        assert files_of(tmp_path / "run") == before and not (tmp_path / "run.1").exists()


def test_overwrite_renames_the_old_run_and_deletes_none(train, tmp_path):
    run, old = tmp_path / "run", []
    train(**SHORT)
    (run / "notes").write_text("mine")
    assert_user_error(train(**SHORT), "--resume", "--overwrite")  # never in silence
    for max_steps in (3, 4):
        old.append(files_of(run))
        result = train(**SHORT | dict(max_steps=max_steps, checkpoint_interval=0, overwrite=True))
        assert result.returncode == 0 and f"run.{len(old)}" in result.stdout
        assert [files_of(tmp_path / f"run.{i + 1}") for i in range(len(old))] == old
        assert len(log_of(run, "train")) == max_steps and not (run / "notes").exists()
    assert train(out="run.1", **SHORT | dict(max_steps=8, resume=True)).returncode == 0  # the old one can be continued


def test_an_old_run_that_cannot_be_renamed_is_unchanged(train, tmp_path, monkeypatch):
    train(**SHORT)
    before, real = files_of(tmp_path / "run"), Path.rename

    def rename(path, target):
        if path == tmp_path / "run":
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))  # as a mount point
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    assert_user_error(train(**SHORT | dict(overwrite=True)), "Device or resource busy", str(tmp_path / "run"))
    assert files_of(tmp_path / "run") == before


def test_while_a_run_replaces_another_one_its_directory_is_locked_and_the_old_one_is_not(train, tmp_path, monkeypatch):
    train(**SHORT)
    real, free = train_gpt2.validate, []

    def validate(*args):
        for name in ("run", "run.1"):
            try:
                with exclusive_lock(tmp_path / name / ".lock", name, seconds=0.1):
                    free.append(name)
            except UserError:
                pass
        return real(*args)

    monkeypatch.setattr(train_gpt2, "validate", validate)
    assert train(**SHORT | dict(max_steps=2, eval_interval=2, overwrite=True)).returncode == 0
    assert free == ["run.1"]


def test_runs_stay_on_the_disk_that_out_dir_links_to(train, tmp_path):
    (tmp_path / "disk" / "place").mkdir(parents=True)
    (tmp_path / "run").symlink_to(tmp_path / "disk" / "place")
    for _ in range(2):
        assert train(**SHORT | dict(max_steps=2, overwrite=True)).returncode == 0
    assert (tmp_path / "run").is_symlink()
    assert steps_of(tmp_path / "disk" / "place") == steps_of(tmp_path / "disk" / "place.1") == [2]


def test_a_checkpoint_that_is_a_link_is_pruned_and_what_it_links_to_stays(train, tmp_path):
    train(**SHORT)
    moved = (tmp_path / "run" / "step_000004").rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "step_000004").symlink_to(moved)
    assert train(**SHORT | dict(max_steps=7, keep_checkpoints=1, resume=True)).returncode == 0
    assert steps_of(tmp_path / "run") == [7] and find_damage(moved) is None


def test_a_place_that_holds_other_things_or_does_not_exist_is_refused(train, tmp_path):
    assert_user_error(train(resume=True, overwrite=True), "--resume", "--overwrite")
    train(**SHORT)
    model = tmp_path / "run" / "step_000006"
    before = files_of(model)
    for flags in (dict(resume=True), dict(overwrite=True), dict()):
        assert_user_error(train(**SHORT | flags | dict(out_dir=model)), str(model))
    assert files_of(model) == before
    (tmp_path / "project" / "src").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert_user_error(train(out_dir="/"), "/ contains")
    assert_user_error(train(out="project"), "src")
    assert_user_error(train(out="link"), str(tmp_path / "nowhere"))
    assert [path.name for path in (tmp_path / "project").iterdir()] == ["src"]


# ---- a directory that is renamed, removed or changed under a living run


MOMENTS = {  # what a renaming precedes, with another run in the old place or none
    "a line of the log": (train_gpt2, "validate", True),
    "a checkpoint": (Run, "save", True),
    "a rollback": (Run, "_roll_back", True),
    "the end": (RunLog, "close", True),
    "its files": (checkpoint, "save_model", False),
    "the removal of old ones": (CheckpointWriter, "_prune", True),
}


QUICK = ("a line of the log", "a checkpoint", "its files")
SLOW = [pytest.param(moment, marks=pytest.mark.slow) for moment in MOMENTS if moment not in QUICK]


@pytest.mark.parametrize("moment", [*QUICK, *SLOW])
def test_a_run_whose_directory_was_renamed_ends_and_touches_no_other(train, tmp_path, monkeypatch, moment):
    owner, name, another = MOMENTS[moment]
    real = getattr(owner, name)
    place, moved = tmp_path / "run", tmp_path / "moved"
    options = SHORT | dict(eval_interval=2, keep_checkpoints=1)
    train(out="other", **options | dict(max_steps=4, keep_checkpoints=0))
    n_losses = itertools.count(1)

    def rename_and_work(*args):
        if not moved.exists():
            place.rename(moved)
            if another:
                shutil.copytree(tmp_path / "other", place)
        return real(*args)

    with monkeypatch.context() as context:
        context.setattr(owner, name, rename_and_work)
        context.setattr(SpikeDetector, "add", lambda *_: next(n_losses) == 6 and moment == "a rollback")
        assert_user_error(train(**options | dict(max_steps=100)), f"{place} was renamed or removed")
    before, after = (files_of(tmp_path / "other") if another else {}), files_of(place)
    for files in (before, after):  # a picture that was being drawn may still land there; its owner draws it again
        files.pop("learning_curve.png", None)
    assert before == after
    assert train(out="moved", **options | dict(resume=True)).returncode == 0 and steps_of(moved)[-1] >= 6


def test_constants_that_change_while_a_resume_waits_for_the_lock_are_not_mixed(train, tmp_path, monkeypatch):
    train(**SHORT)

    def lock(path, what):
        config = json.loads((tmp_path / "run" / "config.json").read_text())
        (tmp_path / "run" / "config.json").write_text(json.dumps(config | dict(max_lr=0.5)))
        return exclusive_lock(path, what)

    with monkeypatch.context() as context:
        context.setattr(directory, "exclusive_lock", lock)
        assert_user_error(train(**SHORT | dict(resume=True)), "changed while we waited", "the same command")
    assert train(**SHORT | dict(resume=True)).returncode == 0


@pytest.mark.parametrize("damaged", ["", "[]", '{"max_lr": 1', None])
def test_a_damaged_config_is_replaced_by_the_newest_checkpoint_s(train, tmp_path, capsys, monkeypatch, damaged):
    options = SHORT | dict(max_lr=1e-3, micro_batch_size=4)
    train(out="whole", **options | dict(max_steps=8))
    train(**options)
    config = tmp_path / "run" / "config.json"
    config.unlink() if damaged is None else config.write_text(damaged)
    words = arguments(resume=True, out_dir=tmp_path / "run", max_steps=8)
    result = run_inline(train_gpt2.main, words, capsys, monkeypatch)
    assert result.returncode == 0 and f"warning: {config}" in result.stderr
    assert set(log_of(tmp_path / "run", "run")[-1]["changed"]) == {"max_steps"}
    assert json.loads(config.read_text()) == json.loads((tmp_path / "whole" / "config.json").read_text()) | dict(
        out_dir=str(tmp_path / "run"), resume=True
    )
    for path in steps_of(tmp_path / "run"):
        (tmp_path / "run" / f"step_{path:06d}" / SUMS).unlink()
    config.write_text("{")
    assert_user_error(run_inline(train_gpt2.main, words, capsys, monkeypatch), str(config), "JSON")


def test_a_config_that_cannot_be_read_is_named(train, tmp_path):
    train(**SHORT)
    (tmp_path / "run" / "config.json").unlink()
    (tmp_path / "run" / "config.json").mkdir()
    assert_user_error(train(**SHORT | dict(resume=True)), "config.json: Is a directory")


def test_a_checkpoint_under_the_name_of_another_step_is_refused(train, tmp_path):
    train(**SHORT)
    (tmp_path / "run" / "step_000006").rename(tmp_path / "run" / "step_000007")
    before = files_of(tmp_path / "run")
    assert_user_error(train(**SHORT | dict(resume=True)), "step_000007", "step 6")
    assert files_of(tmp_path / "run") == before


@pytest.mark.parametrize("typo", ["out/tiyn", "./gpt2", "/nowhere", "out/tiny/step_000600", ""])
def test_a_path_that_does_not_exist_is_not_asked_of_the_hub(typo):
    with pytest.raises(UserError, match="is not a directory"):
        find_model(typo)
    assert [find_model(name) for name in ("gpt2", "openai/gpt2")] == ["gpt2", "openai/gpt2"]


# ---- the log


def test_damaged_lines_in_the_log_cost_those_lines_alone(train, tmp_path):
    train(**SHORT)
    log = tmp_path / "run" / "log.jsonl"
    lines = log.read_text().splitlines()
    lines[2] = lines[2][:20] + "\x00" + lines[2][25:]
    odd = (dict(kind="sample"), dict(kind="val"), dict(kind="train", loss="x"), dict(kind="val", loss=[]))
    null = dict(kind="val", loss=None, bpb=None)  # it was not finite
    others = (dict(kind="val", loss=-math.inf), dict(kind="val", loss=9.0))  # of other programs; 9.0 lacks its bpb
    lines += [json.dumps(dict(step=6) | record) for record in (*odd, null, *others)]
    log.write_text("\n".join(lines) + '\n{"step": 7, "ki')
    result = train(**SHORT | dict(max_steps=8, sample_interval=8, resume=True, target_loss=0.1, eval_interval=100))
    assert result.returncode == 0 and "line 3" in result.stderr and "Infinity" not in log.read_text()
    assert [r["step"] for r in log_of(tmp_path / "run", "train")] == [1, 3, 4, 5, 6, 7, 8]


def test_a_log_without_checkpoints_is_kept_and_the_restart_is_announced(train, tmp_path):
    train(**SHORT)
    before = (tmp_path / "run" / "log.jsonl").read_bytes()
    for _, path in checkpoint_steps(tmp_path / "run"):
        shutil.rmtree(path)
    result = train(**SHORT | dict(resume=True))
    assert result.returncode == 0 and "no checkpoint" in result.stdout
    assert (tmp_path / "run" / "log.jsonl.1").read_bytes() == before


def test_the_first_record_says_where_a_run_comes_from(train, tmp_path):
    train(**SHORT)
    result = train(**SHORT | dict(max_steps=8, resume=True, sample_prompt="it's two  words"))
    assert "the learning rate rises from 0 at step 6 to " in result.stdout
    first, second = log_of(tmp_path / "run", "run")
    assert first["step"] == 0 and second["step"] == 6 and second["resumed_from"].endswith("step_000006")
    assert first["versions"]["torch"] == torch.__version__ and first["config"]["n_embd"] == 32
    assert {"command", "machine", "commit", "parameters", "flops_per_token"} <= set(first)
    assert shlex.split(second["command"])[-2:] == ["--sample_prompt", "it's two  words"]
    tokens = [r["tokens"] for r in log_of(tmp_path / "run", "train")]
    assert tokens == [256 * step for step in range(1, 9)]


# ---- resuming with other constants


def test_a_resume_takes_from_the_run_what_is_not_given(train, tmp_path, capsys, monkeypatch):
    train(out="whole", **SHORT | {"dropout": 0.1, "no-shuffle": True})
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    remove_after(tmp_path / "run" / "step_000004")
    words = ["--resume", f"--out_dir={tmp_path / 'run'}", "--no_shuffle", "--keep_checkpoints", 5, "--init_from=gpt2"]
    result = run_inline(train_gpt2.main, words, capsys, monkeypatch)  # of another recipe, by its name
    assert result.returncode == 0 and "rises" not in result.stdout, result.stderr
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert log_of(tmp_path / "run", "run")[-1]["changed"] == dict(keep_checkpoints=[0, 5])
    assert log_of(tmp_path / "run", "run")[0]["written"] == dict(threads=0, attention="auto")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["threads"] == torch.get_num_threads()


OTHER = dict(  # another valid value for every constant
    n_layer=1, n_head=4, n_embd=64, sequence_length=16, vocab_size=512, total_batch_size=512, optimizer="adamw",
    seed=7, micro_batch_size=4, max_steps=9, target_loss=0.1, warmup_steps=3,
    max_lr=1e-3, min_lr=1e-4, lr_schedule="cosine", decay_fraction=0.3, muon_lr=0.01, weight_decay=0.2, beta1=0.8,
    beta2=0.9, eps=1e-7, grad_clip=0.5, max_bad_steps=3, spike_threshold=2.0, eval_interval=3, eval_steps=1,
    sample_interval=4, sample_prompt="A", sample_tokens=4, checkpoint_interval=3, keep_checkpoints=5, dropout=0.1,
    attention="naive", activation_checkpointing=True, hellaswag_data="rows.jsonl",
)  # fmt: skip


def test_what_the_table_calls_refused_is_refused_by_name_and_changes_nothing(train, tmp_path):
    train(**SHORT)
    before = files_of(tmp_path / "run")
    table = resume_table("resume.md")
    refused = [name for name, said in table.items() if said == "refused"]
    assert set(refused) == set(train_gpt2.FIXED) and set(table) == {field.name for field in fields(train_gpt2.Config)}
    for name in refused:
        change = {"no-shuffle": True} if name == "shuffle" else {name: OTHER[name]}
        assert_user_error(train(**SHORT | dict(resume=True, max_steps=9) | change), name)
        assert files_of(tmp_path / "run") == before


def test_what_the_table_says_takes_effect_does_and_is_noted(train, tmp_path):
    train(**SHORT)
    assert len(assert_changes_take_effect(train, tmp_path / "run", "resume.md", SHORT, OTHER)) > 25
    # the optimizer keeps its moments, and has the new constants
    adamw, muon = load_train_state(tmp_path / "run" / "step_000009")["optimizer"]["optimizers"]
    decayed, plain = adamw["param_groups"]
    assert decayed["betas"] == (0.8, 0.9) and decayed["eps"] == 1e-7
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.2, 0.0)
    assert (decayed["initial_lr"], muon["param_groups"][0]["initial_lr"]) == (1e-3, 0.01)
    assert [r["step"] for r in log_of(tmp_path / "run", "val")] == [6, 9]  # the first, due by now, is made up for


def test_other_data_or_another_tokenizer_is_refused_and_moved_data_is_not(train, tmp_path):
    train(**SHORT)
    shutil.copy(tmp_path / "text.txt", tmp_path / "moved.txt")
    assert train(**SHORT | dict(max_steps=7, data=tmp_path / "moved.txt", resume=True)).returncode == 0
    (tmp_path / "other.txt").write_text((tmp_path / "text.txt").read_text().replace("e", "a"))
    assert_user_error(train(**SHORT | dict(data=tmp_path / "other.txt", resume=True)), "another tokenizer")
    tokenizer = tmp_path / "run" / "step_000006" / "tokenizer.json"
    other = SHORT | dict(data=tmp_path / "other.txt", tokenizer=tokenizer, resume=True)
    assert_user_error(train(**other), "another data")


def test_a_run_that_began_with_another_model_s_sizes_is_resumed_by_the_same_line(train, tmp_path, capsys, monkeypatch):
    train(out="first", **SHORT)
    sizes = {key: value for key, value in SMALL.items() if key not in ("n_layer", "n_head", "n_embd", "vocab_size")}
    options = sizes | SHORT | dict(data=tmp_path / "text.txt", out_dir=tmp_path / "second")
    options |= dict(init_from=tmp_path / "first" / "step_000006", tokenizer=tmp_path / "first" / "step_000006")
    for resume in ({}, dict(resume=True, max_steps=8)):  # the recipe's own sizes are others
        words = arguments(**options | resume)
        assert run_inline(train_gpt2.main, ["tiny", *words], capsys, monkeypatch).returncode == 0
    assert json.loads((tmp_path / "second" / "config.json").read_text())["n_embd"] == 32


def test_shards_that_are_not_complete_are_announced(train, tmp_path):
    train(**SHORT)
    shards = next((tmp_path / "cache").glob("text-*"))
    manifest = json.loads((shards / "manifest.json").read_text())
    manifest |= dict(next=dict(file=0, unit=0, skip=0), files=[], shard_size=10**6)
    (shards / "manifest.json").write_text(json.dumps(manifest))
    result = train(out="other", **SHORT | dict(data=shards))
    assert result.returncode == 0 and str(shards) in result.stderr
    (shards / "manifest.json").unlink()  # they train without one, too
    assert train(out="third", **SHORT | dict(data=shards)).returncode == 0
