"""A run directory: nothing in it is lost, replaced in silence, or written by two."""

import errno
import hashlib
import itertools
import os
import shutil
from pathlib import Path

import pytest
import torch

import train_gpt2
from bpe.tokenizer import Tokenizer
from parts import checkpoint, directory
from parts.checkpoint import (
    SUMS,
    CheckpointWriter,
    find_damage,
    find_model,
    load_train_state,
)
from parts.cli import UserError
from parts.files import exclusive_lock, sha256
from parts.report import Report
from parts.run import LossWatch, Run
from parts.runtime import Runtime
from tests.helpers import (
    SHORT,
    SMALL,
    NoWeights,
    arguments,
    assert_changes_take_effect,
    assert_refused,
    assert_user_error,
    column,
    files_of,
    log_of,
    losses,
    read_json,
    read_lines,
    remove_after,
    slow,
    steps_of,
    weights,
    write_json,
    write_lines,
)
from tests.token_shards import write_shards


def damage_weights(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


# ---- checkpoints that stay


def save_without_weights(writer: CheckpointWriter, step: int, val_losses: dict[int, float]) -> None:
    writer.save(writer.run_dir / f"step_{step:06d}", NoWeights(), {}, val_losses)
    writer.wait()


LOSSES = {1: 3.0, 2: 2.0, 4: 2.5}  # the checkpoint of step 3 inherits the loss of step 2 without being better


@pytest.mark.parametrize(
    "keep, val_losses, damaged, left",
    [
        (0, {}, None, [1, 2, 3, 4, 5]),
        (2, {}, None, [4, 5]),
        (1, LOSSES, None, [2, 5]),
        (1, {1: 2.0}, None, [1, 5]),
        # a damaged one does not count, is left for a person to look at, and is not the best
        (2, {}, 4, [3, 4, 5]),
        (1, LOSSES, 2, [2, 3, 5]),
    ],
)
def test_the_newest_intact_checkpoints_stay_and_the_one_of_the_lowest_loss(tmp_path, keep, val_losses, damaged, left):
    for step in (1, 2, 3, 4):
        save_without_weights(CheckpointWriter(tmp_path, 0), step, {})
    if damaged:
        damage_weights(tmp_path / f"step_{damaged:06d}")
    save_without_weights(CheckpointWriter(tmp_path, keep), 5, val_losses)
    assert steps_of(tmp_path) == left


def test_damaged_checkpoints_that_a_resume_skips_are_set_aside(short, run_dir):
    short(checkpoint_interval=4, max_steps=12)
    for step in (8, 12):
        damage_weights(run_dir / f"step_{step:06d}")
    (run_dir / "damaged_step_000008").mkdir()  # of an earlier resume
    assert "step_000012" in short(max_steps=7, checkpoint_interval=50, keep_checkpoints=2, resume=True).stderr
    assert steps_of(run_dir) == [4, 7]
    assert find_damage(run_dir / "step_000007") is None
    damaged = {path.name.removeprefix("damaged_step_0000") for path in run_dir.glob("damaged_*")}
    assert damaged == {"08", "08.1", "12"}
    assert find_damage(run_dir / "damaged_step_000008")


def test_a_list_of_checksums_that_was_cut_between_two_lines_is_damaged(short, run_dir):
    short(max_steps=1)
    path = run_dir / "step_000001"
    lines = (path / SUMS).read_text().splitlines(keepends=True)
    for n in range(len(lines) + 1):
        (path / SUMS).write_text("".join(lines[:n]))
        listed = {line.split()[1] for line in lines[:n]}
        assert (find_damage(path) is None) == ({"train_state.pt", "model.safetensors", "config.json"} <= listed), n


@pytest.mark.parametrize("name", ["ESTALE", "EIO", "ENOMEM", "ENFILE", "EBUSY", "EAGAIN", "ENOTCONN", "ENODEV"])
def test_a_checkpoint_that_cannot_be_read_for_a_moment_is_not_called_damaged(short, run_dir, monkeypatch, name):
    short()
    number = getattr(errno, name)

    def fail(file, algorithm):
        raise OSError(number, os.strerror(number))  # as read(2): without the name of the file

    with monkeypatch.context() as context:
        context.setattr(hashlib, "file_digest", fail)
        short.error(os.strerror(number), "step_000006", resume=True)
    assert steps_of(run_dir) == [2, 4, 6]


def test_the_checkpoint_is_on_the_disk_before_an_evaluation_of_its_step_begins(short, run_dir, monkeypatch):
    def crash(*args):
        assert find_damage(run_dir / "step_000004") is None
        raise UserError("the evaluation failed")

    monkeypatch.setattr(train_gpt2, "validate", crash)
    short.error("the evaluation failed", eval_interval=4)
    assert steps_of(run_dir) == [2, 4]


def test_all_files_of_a_checkpoint_have_the_mode_that_umask_says(short, run_dir):
    before = os.umask(0o027)
    try:
        short(max_steps=1)
    finally:
        os.umask(before)
    assert {f.stat().st_mode & 0o777 for f in (run_dir / "step_000001").iterdir()} == {0o640}


# ---- overwriting


def test_overwrite_with_a_mistake_in_it_leaves_the_old_run_as_it_was(short, tmp_path, run_dir):
    short()
    before = files_of(run_dir)
    for mistake in (dict(data="nowhere"), dict(tokenizer="nowhere.json"), dict(init_from="./nowhere"), dict(n_head=3)):
        short.error(overwrite=True, **mistake)
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


def test_an_old_run_that_cannot_be_renamed_is_unchanged(short, run_dir, monkeypatch):
    short()
    before = files_of(run_dir)
    real = Path.rename

    def rename(path, target):
        if path == run_dir:
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))  # as a mount point
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    short.error("Device or resource busy", str(run_dir), overwrite=True)
    assert files_of(run_dir) == before


def test_while_a_run_replaces_another_one_its_directory_is_locked_and_the_old_one_is_not(short, tmp_path, monkeypatch):
    short()
    real = train_gpt2.validate
    free = []

    def validate(*args):
        for name in ("run", "run.1"):
            try:
                with exclusive_lock(tmp_path / name / ".lock", name, seconds=0.1):
                    free.append(name)
            except UserError:
                pass
        return real(*args)

    monkeypatch.setattr(train_gpt2, "validate", validate)
    short(max_steps=2, eval_interval=2, overwrite=True)
    assert free == ["run.1"]


def test_runs_stay_on_the_disk_that_out_dir_links_to(short, tmp_path, run_dir):
    (tmp_path / "disk" / "place").mkdir(parents=True)
    run_dir.symlink_to(tmp_path / "disk" / "place")
    for _ in range(2):
        short(max_steps=2, overwrite=True)
    assert run_dir.is_symlink()
    assert steps_of(tmp_path / "disk" / "place") == steps_of(tmp_path / "disk" / "place.1") == [2]


def test_a_checkpoint_that_is_a_link_is_pruned_and_what_it_links_to_stays(short, tmp_path, run_dir):
    short()
    moved = (run_dir / "step_000004").rename(tmp_path / "elsewhere")
    (run_dir / "step_000004").symlink_to(moved)
    short(max_steps=7, keep_checkpoints=1, resume=True)
    assert steps_of(run_dir) == [7]
    assert find_damage(moved) is None


def test_a_place_that_holds_other_things_or_does_not_exist_is_refused(train, short, tmp_path):
    train.error("--resume", "--overwrite", resume=True, overwrite=True)
    short()
    model = tmp_path / "run" / "step_000006"
    before = files_of(model)
    for flags in (dict(resume=True), dict(overwrite=True), dict()):
        short.error(str(model), out_dir=model, **flags)
    assert files_of(model) == before
    (tmp_path / "project" / "src").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    train.error("/ contains", out_dir="/")
    train.error("src", out="project")
    train.error(str(tmp_path / "nowhere"), out="link")
    assert [path.name for path in (tmp_path / "project").iterdir()] == ["src"]


# ---- a directory that is renamed, removed or changed under a living run


MOMENTS = {  # what a renaming precedes, with another run in the old place or none
    "a line of the log": (train_gpt2, "validate", True),
    "a checkpoint": (Run, "save", True),
    "a spike": (Run, "_raise_spike", True),
    "the end": (Report, "close", True),
    "its files": (checkpoint, "save_model", False),
    "the removal of old ones": (CheckpointWriter, "_prune", True),
}


QUICK = ("a line of the log", "a checkpoint", "its files")
SLOW = [slow(moment) for moment in MOMENTS if moment not in QUICK]


@pytest.mark.parametrize("moment", [*QUICK, *SLOW])
def test_a_run_whose_directory_was_renamed_ends_and_touches_no_other(train, tmp_path, monkeypatch, moment):
    owner, name, another = MOMENTS[moment]
    real = getattr(owner, name)
    place = tmp_path / "run"
    moved = tmp_path / "moved"
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
        if moment == "a spike":
            context.setattr(LossWatch, "is_spike", property(lambda _: next(n_losses) == 6))
        train.error(f"{place} was renamed or removed", **options | dict(max_steps=100))
    before = files_of(tmp_path / "other") if another else {}
    after = files_of(place)
    for files in (before, after):  # a picture that was being drawn may still land there; its owner draws it again
        files.pop("learning_curve.png", None)
    assert before == after
    train(out="moved", **options | dict(resume=True))
    assert steps_of(moved)[-1] >= 6


def test_constants_that_change_while_a_resume_waits_for_the_lock_are_not_mixed(short, run_dir, monkeypatch):
    short()

    def lock(path, what):
        config = read_json(run_dir / "config.json")
        write_json(run_dir / "config.json", config | dict(max_lr=0.5))
        return exclusive_lock(path, what)

    with monkeypatch.context() as context:
        context.setattr(directory, "exclusive_lock", lock)
        short.error("changed while we waited", "the same command", resume=True)
    short(resume=True)


def test_a_rank_whose_requested_constants_are_not_those_of_the_first_ends(train, monkeypatch):
    monkeypatch.setattr(Runtime, "broadcast_from_main", lambda *_: (None, {}))
    train.error("the constants here are not those of rank 0", "the same command")


@pytest.mark.parametrize(
    "name, of_rank_0",
    [("dtype", "torch.float16"), ("compile", True), ("micro_batch_size", 4), ("attention", "naive")],
)
def test_a_rank_that_has_settled_something_else_than_the_first_ends_before_step_1(
    train, run_dir, monkeypatch, name, of_rank_0
):
    def broadcast(rt, work):
        found = work()
        return found | {name: of_rank_0} if isinstance(found, dict) and name in found and "dtype" in found else found

    real = Run._compare_with_rank_0

    def compare(run):
        with monkeypatch.context() as patch:
            patch.setattr(Runtime, "broadcast_from_main", broadcast)
            real(run)

    monkeypatch.setattr(Run, "_compare_with_rank_0", compare)
    train.error("not those of rank 0", name, str(of_rank_0))
    assert not (run_dir / "log.jsonl").exists()


@pytest.mark.parametrize("name", ["data", "validation", "tokenizer"])
def test_a_rank_with_other_data_than_the_first_ends_before_step_1(train, run_dir, monkeypatch, name):
    def broadcast(rt, work):
        found = work()
        return found | {name: "another"} if isinstance(found, dict) and "validation" in found else found

    monkeypatch.setattr(Runtime, "broadcast_from_main", broadcast)
    train.error("the data here are not those of rank 0", name)
    assert not (run_dir / "log.jsonl").exists()


def test_a_damaged_config_is_replaced_by_the_newest_checkpoint_s(train, tmp_path, run_dir, inline):
    options = SHORT | dict(max_lr=1e-3, micro_batch_size=4)
    train(out="whole", **options | dict(max_steps=8))
    train(**options)
    config = run_dir / "config.json"
    words = arguments(resume=True, out_dir=run_dir, max_steps=8)
    wanted = read_json(tmp_path / "whole" / "config.json") | dict(out_dir=str(run_dir), resume=True)
    for damaged in ("", "[]", "{}", '{"max_lr": 1', None):
        config.unlink() if damaged is None else config.write_text(damaged)
        result = inline(train_gpt2.main, *words)
        assert result.returncode == 0
        assert f"warning: {config}" in result.stderr
        assert column(run_dir, "run", "changed")[-1].keys() == {"max_steps"}
        assert read_json(config) == wanted
        remove_after(run_dir, 6)
    for path in steps_of(run_dir):
        (run_dir / f"step_{path:06d}" / SUMS).unlink()
    config.write_text("{")
    assert_user_error(inline(train_gpt2.main, *words), str(config), "JSON")


def test_a_directory_without_a_model_or_with_another_file_as_its_state_is_named(tmp_path):
    assert_refused(f"{tmp_path} holds no model", find_model, str(tmp_path))
    (tmp_path / "train_state.pt").write_bytes(b"no pickle")
    assert_refused("train_state.pt cannot be read: .*; resume from an earlier", load_train_state, tmp_path)


def test_what_goes_wrong_with_a_local_model_is_not_put_down_to_the_hub(tmp_path):
    with pytest.raises(OSError, match="^no memory$"), checkpoint.user_errors_of(tmp_path):
        raise OSError("no memory")


@pytest.mark.parametrize("name", (*directory.FILES, "model.safetensors", "adapter_model.safetensors"))
def test_a_file_of_others_that_a_run_would_replace_is_found(tmp_path, name):
    (tmp_path / name).write_text("{}")
    assert directory.unrelated_file(tmp_path) == name


def test_a_config_that_cannot_be_read_is_named(short, run_dir):
    short()
    (run_dir / "config.json").unlink()
    (run_dir / "config.json").mkdir()
    short.error("config.json: Is a directory", resume=True)


def test_a_checkpoint_under_the_name_of_another_step_is_refused(short, run_dir):
    short()
    (run_dir / "step_000006").rename(run_dir / "step_000007")
    before = files_of(run_dir)
    short.error("step_000007", "step 6", resume=True)
    assert files_of(run_dir) == before


@pytest.mark.parametrize("typo", ["out/tiyn", "./gpt2", "/nowhere", "out/tiyn/step_000600", ""])
def test_a_path_that_does_not_exist_is_not_asked_of_the_hub(typo):
    assert_refused("is not a directory", find_model, typo)
    assert [find_model(name) for name in ("gpt2", "openai/gpt2")] == ["gpt2", "openai/gpt2"]


# ---- resuming with other constants


def test_a_resume_takes_from_the_run_what_is_not_given(short, tmp_path, run_dir, inline):
    short(out="whole", **{"dropout": 0.1, "no-shuffle": True})
    shutil.copytree(tmp_path / "whole", run_dir)
    remove_after(run_dir, 4)
    words = ["--resume", f"--out_dir={run_dir}", "--no_shuffle", "--keep_checkpoints", 5, "--init_from=gpt2"]
    result = inline(train_gpt2.main, *words)  # of another recipe, by its name
    assert result.returncode == 0, result.stderr
    assert "rises" not in result.stdout, result.stderr
    assert losses(run_dir) == losses(tmp_path / "whole")
    assert log_of(run_dir, "run")[-1]["changed"] == dict(keep_checkpoints=[0, 5])


def test_constants_are_kept_once_as_requested_and_once_as_settled(short, run_dir):
    short(warmup_steps=100)
    requested = read_json(run_dir / "config.json")
    settled = log_of(run_dir, "run")[0]["config"]
    differing = {name: (requested[name], settled[name]) for name in requested if requested[name] != settled[name]}
    threads = torch.get_num_threads()
    assert differing == dict(threads=(0, threads), attention=("auto", "flash"), warmup_steps=(100, 6))
    state = load_train_state(run_dir / "step_000006")
    assert (state["requested"], state["config"]) == (requested, settled)


def as_of_ec548d9(run: Path) -> None:
    """Turn a run into what earlier versions wrote: settled constants in config.json, the requested ones elsewhere."""
    records = read_lines(run / "log.jsonl")
    requested = read_json(run / "config.json")
    settled = records[0]["config"]
    records[0]["written"] = {name: value for name, value in requested.items() if value != settled[name]}
    write_json(run / "config.json", settled)
    write_lines(run / "log.jsonl", records)
    for path in run.glob("step_*"):
        state = load_train_state(path)
        state["written"] = state.pop("requested")
        state["data_step"] = state["step"]
        del state["identity"]["validation"]
        torch.save(state, path / "train_state.pt")
        seal(path)


def seal(path: Path) -> None:
    """Write the checksums of a checkpoint again."""
    files = [file for file in sorted(path.iterdir()) if file.name not in (SUMS, "README.md", "learning_curve.png")]
    (path / SUMS).write_text("".join(f"{sha256(file)}  {file.name}\n" for file in files))


@pytest.mark.parametrize("config_is_there", [True, False])
def test_a_run_of_an_earlier_version_is_resumed(short, tmp_path, run_dir, config_is_there):
    options = dict(warmup_steps=100, max_steps=8)
    short(out="whole", **options)
    short(**options)
    remove_after(run_dir, 6)
    as_of_ec548d9(run_dir)
    if not config_is_there:
        (run_dir / "config.json").unlink()
    short(resume=True, **options)
    assert weights_of_all(run_dir)[8] == weights_of_all(tmp_path / "whole")[8]
    assert read_json(run_dir / "config.json")["attention"] == "auto"


def weights_of_all(run: Path) -> dict[int, bytes]:
    return {step: weights(run, step) for step in steps_of(run)}


def test_a_constant_that_is_gone_is_named_when_a_run_that_used_it_is_resumed(short, run_dir):
    short()
    config = read_json(run_dir / "config.json")
    write_json(run_dir / "config.json", config | dict(batch_ramp=8, other_ramp=0))
    result = short(resume=True, max_steps=7)
    assert "--batch_ramp 8" in result.stderr
    assert "other_ramp" not in result.stderr


def test_another_validation_split_is_refused(short, run_dir, tmp_path):
    write_shards(tmp_path / "shards", [4000], "train", vocab_size=257)
    write_shards(tmp_path / "shards", [900], "val", vocab_size=257)
    Tokenizer.train(["ab"], 257).save(tmp_path / "shards" / "tokenizer.json")
    options = dict(data=tmp_path / "shards", eval_interval=3)
    short(**options)
    write_shards(tmp_path / "shards", [800], "val", vocab_size=257)
    short.error("trained with another validation", resume=True, max_steps=7, **options)


OTHER = dict(  # another valid value for every constant
    n_layer=1,
    n_head=4,
    n_embd=64,
    sequence_length=16,
    vocab_size=512,
    total_batch_size=512,
    optimizer="adamw",
    seed=7,
    micro_batch_size=4,
    max_steps=9,
    target_loss=0.1,
    warmup_steps=3,
    max_lr=0.001,
    min_lr=0.0001,
    lr_schedule="cosine",
    decay_fraction=0.3,
    muon_lr=0.01,
    weight_decay=0.2,
    beta1=0.8,
    beta2=0.9,
    eps=1e-07,
    grad_clip=0.5,
    max_bad_steps=3,
    spike_threshold=2.0,
    eval_interval=3,
    eval_steps=1,
    sample_interval=4,
    sample_prompt="A",
    sample_tokens=4,
    checkpoint_interval=3,
    keep_checkpoints=5,
    dropout=0.1,
    attention="naive",
    activation_checkpointing=True,
    hellaswag_data="rows.jsonl",
)


def test_what_the_table_calls_refused_is_refused_by_name_and_changes_nothing(short, run_dir):
    short()
    before = files_of(run_dir)
    for name in train_gpt2.FIXED:
        change = {"no-shuffle": True} if name == "shuffle" else {name: OTHER[name]}
        short.error(name, resume=True, max_steps=9, **change)
        assert files_of(run_dir) == before


def test_what_the_table_says_takes_effect_does_and_is_noted(train, short, run_dir):
    short()
    assert len(assert_changes_take_effect(train, run_dir, "run.md", SHORT, OTHER)) > 25
    # the optimizer keeps its moments, and has the new constants
    adamw, muon = load_train_state(run_dir / "step_000009")["optimizer"]["optimizers"]
    decayed, plain = adamw["param_groups"]
    assert decayed["betas"] == (0.8, 0.9)
    assert decayed["eps"] == 1e-7
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.2, 0.0)
    assert (decayed["initial_lr"], muon["param_groups"][0]["initial_lr"]) == (1e-3, 0.01)
    assert column(run_dir, "val", "step") == [6, 9]  # the first, due by now, is made up for


def test_other_data_or_another_tokenizer_is_refused_and_moved_data_is_not(short, tmp_path):
    short()
    shutil.copy(tmp_path / "text.txt", tmp_path / "moved.txt")
    short(max_steps=7, data=tmp_path / "moved.txt", resume=True)
    (tmp_path / "other.txt").write_text((tmp_path / "text.txt").read_text().replace("e", "a"))
    short.error("another tokenizer", data=tmp_path / "other.txt", resume=True)
    tokenizer = tmp_path / "run/step_000006/tokenizer.json"
    short.error("another data", data=tmp_path / "other.txt", tokenizer=tokenizer, resume=True)
    short.error("fewer than sequence_length", overwrite=True, sequence_length=40_000, total_batch_size=320_000)


def test_a_run_that_began_with_another_model_s_sizes_is_resumed_by_the_same_line(short, tmp_path, inline):
    short(out="first")
    sizes = {key: value for key, value in SMALL.items() if key not in ("n_layer", "n_head", "n_embd", "vocab_size")}
    options = sizes | SHORT | dict(data=tmp_path / "text.txt", out_dir=tmp_path / "second")
    options |= dict(init_from=tmp_path / "first" / "step_000006", tokenizer=tmp_path / "first" / "step_000006")
    for resume in ({}, dict(resume=True, max_steps=8)):  # the recipe's own sizes are others
        words = arguments(**options | resume)
        assert inline(train_gpt2.main, "tiny", *words).returncode == 0
    assert [start["config"]["n_embd"] for start in log_of(tmp_path / "second", "run")] == [32, 32]


def test_what_is_no_regular_file_is_not_read(short, run_dir):
    """A pipe or a device would never end."""
    short()
    newest = run_dir / "step_000006"
    (newest / "train_state.pt").unlink()
    os.mkfifo(newest / "train_state.pt")
    assert find_damage(newest) == "train_state.pt is missing"
    short(resume=True, max_steps=5)
    (run_dir / "config.json").unlink()
    os.mkfifo(run_dir / "config.json")
    assert "config.json is missing or damaged" in short(resume=True, max_steps=7).stderr


def test_checksums_name_no_file_outside_of_their_checkpoint(short, run_dir):
    """Neither one that never ends, nor one that is what they say."""
    short()
    sums = run_dir / "step_000006" / SUMS
    written = sums.read_text()
    for name, digest in {"/dev/zero": "0" * 64, "../config.json": sha256(run_dir / "config.json")}.items():
        sums.write_text(f"{written}{digest}  {name}\n")
        assert find_damage(run_dir / "step_000006") == f"{name} is missing"
