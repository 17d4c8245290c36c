"""Losses that jump: seen, undone, and left out of what is read; or reported where nothing can be done."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from bpe.tokenizer import Tokenizer
from parts import runtime
from parts.checkpoint import load_train_state, newest_intact, remove_after
from parts.run import Run, SpikeDetector
from tests.helpers import SMALL, column, log_of, losses, slow, steps_of, weights


@pytest.fixture(params=[0, 1])
def ahead(request, monkeypatch) -> int:
    """As on a processor and as on a GPU: the steps that are under way before the figures of the first are read."""
    monkeypatch.setattr(runtime.Runtime, "steps_ahead", request.param)
    return request.param


def test_a_spike_is_three_steps_in_a_row_above_the_median():
    detector = SpikeDetector(1.0)
    for i in range(50):
        assert not detector.add(3.0 + 0.5 * (i % 2))
    assert not any([detector.add(9.0), detector.add(9.0), detector.add(3.0)])  # an odd batch or two pass by themselves
    assert [detector.add(4.4) for _ in range(3)] == [False, False, True]
    assert detector.median() in (3.0, 3.25)  # high losses do not become normal


def test_nothing_is_a_spike_at_the_start_or_without_a_threshold():
    detector = SpikeDetector(1.0)
    assert not any(detector.add(loss) for loss in range(19))
    detector = SpikeDetector(0.0)
    assert not any(detector.add(loss) for loss in [3.0] * 50 + [math.inf] * 5)


def test_a_jump_that_was_accepted_is_the_new_normal():
    detector = SpikeDetector(1.0)
    for loss in [3.0] * 30 + [9.0] * 3:
        detector.add(loss)
    detector.accept()
    assert not any(detector.add(9.0) for _ in range(30))


def test_the_state_of_a_detector_continues_where_it_was():
    one, two = SpikeDetector(1.0), SpikeDetector(1.0)
    for loss in [3.0] * 30 + [9.0, 9.0]:
        one.add(loss)
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert two.add(9.0)


STEP_TOKENS = SMALL["total_batch_size"]  # the spike shows in step 27, and step 20 is the last good one


def spiky_shards(directory: Path, bad_steps: range, left_out: range = range(0)) -> Path:
    """Shards of 8 different tokens that a model learns at once, but for the steps whose tokens it has never seen."""
    directory.mkdir()
    rng = np.random.default_rng(0)
    tokens = rng.integers(8, size=60 * STEP_TOKENS + 1, dtype=np.uint16)
    for step in bad_steps:
        tokens[step * STEP_TOKENS : (step + 1) * STEP_TOKENS] = rng.integers(100, 250, STEP_TOKENS)
    tokens[::STEP_TOKENS] = 0  # the last target of a step is the first token of the next
    steps = [tokens[i * STEP_TOKENS : (i + 1) * STEP_TOKENS] for i in range(60) if i not in left_out]
    np.save(directory / "x_train_000001.npy", np.concatenate(steps))
    np.save(directory / "x_val_000000.npy", tokens[:1000])
    Tokenizer.train(["ab"], 257).save(directory / "tokenizer.json")
    return directory


def spiky_args(folder: Path, until=27, **changes) -> dict:
    """A run whose spike is in the data of steps 24 to `until`."""
    if not (directory := folder / "spiky").exists():
        spiky_shards(directory, range(24, until))
    constants = dict(optimizer="adamw", eval_interval=40, keep_checkpoints=0, max_lr=1e-2) | {"no-shuffle": True}
    return constants | dict(data=directory, tokenizer=directory / "tokenizer.json") | changes


@pytest.mark.parametrize("optimizer, eval_interval", [slow("adamw", 40), ("muon", 40), ("adamw", 27)])
def test_a_spike_goes_back_to_a_good_checkpoint_and_skips_its_data(train, tmp_path, ahead, optimizer, eval_interval):
    options = dict(optimizer=optimizer, eval_interval=eval_interval)
    result = train(out="spiky-run", **spiky_args(tmp_path, **options))
    # the spike is noticed at once, or a step later unless an evaluation is due: the weights it has spoilt get none
    read = 27 + ahead * (eval_interval != 27)
    clean = spiky_shards(tmp_path / "clean", range(0), left_out=range(20, read))
    train(out="clean-run", **spiky_args(tmp_path, **options) | dict(data=clean))
    assert losses(tmp_path / "spiky-run") == losses(tmp_path / "clean-run")
    assert weights(tmp_path / "spiky-run", 40) == weights(tmp_path / "clean-run", 40)
    (rollback,) = log_of(tmp_path / "spiky-run", "rollback")
    assert rollback["step"] == 20 and rollback["from_step"] == 27 and rollback["loss"] > rollback["median"] + 1
    assert "rollback" in result.stdout
    assert load_train_state(tmp_path / "spiky-run" / "step_000040")["data_step"] == 20 + read


def test_steps_that_are_not_finite_are_no_spike_and_stop_a_run_only_in_a_row(train, run_dir, monkeypatch):
    real = Run.log_step

    def log_step(run, loss, *others):
        bad = run.step in (22, 24, 25, 26, 28, 29, 30)
        real(run, loss + (math.inf if bad else 0), *others)

    monkeypatch.setattr(Run, "log_step", log_step)
    train(max_bad_steps=4)
    assert not log_of(run_dir, "rollback") and len(log_of(run_dir, "train")) == 40
    train.error("3 steps, up to step 26", out="again", max_bad_steps=3)


def test_a_rollback_is_resumed_exactly(train, tmp_path, run_dir):
    """Killed after the rollback, before and after the next checkpoint."""
    spiky = spiky_args(tmp_path)
    train(**spiky)
    before = losses(run_dir)
    for kept in (20, 30):
        remove_after(run_dir / f"step_{kept:06d}")
        train(resume=True, **spiky)
        assert losses(run_dir) == before, kept


def test_spikes_that_other_data_does_not_cure_stop_the_run(train, tmp_path, run_dir):
    spiky = spiky_args(tmp_path, until=60)
    newest = "step_000015"  # the jump comes again right after step 20, so that this one is suspect, too
    train.error("3 rollbacks", newest, "--max_lr", **spiky)
    assert newest_intact(run_dir) == run_dir / newest  # the spoilt ones are gone


def test_a_spike_without_a_checkpoint_is_reported_and_passed(train, tmp_path, run_dir):
    spiky = spiky_args(tmp_path, until=60, checkpoint_interval=0)
    assert "no earlier checkpoint" in train(**spiky).stdout
    assert steps_of(run_dir) == []
    assert column(run_dir, "train", "step") == list(range(1, 41))
