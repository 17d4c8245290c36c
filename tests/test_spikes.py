"""A loss that jumps: noticed, nothing spoilt is saved, and one command continues."""

import json
import math
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import train_gpt2
from bpe.tokenizer import Tokenizer
from parts import runtime
from parts.checkpoint import newest_intact
from parts.run import LossWatch, Run
from tests.helpers import SMALL, column, log_of, losses, steps_of


@pytest.fixture(params=[0, 1])
def ahead(request, monkeypatch) -> int:
    """As on a processor and as on a GPU: the steps that are under way before the metrics of the first are read."""
    monkeypatch.setattr(runtime.Runtime, "steps_ahead", request.param)
    return request.param


def spikes(watch: LossWatch, *losses: float) -> list[bool]:
    found = []
    for loss in losses:
        watch.add(loss, 1.0)
        found.append(watch.is_spike)
    return found


def test_a_spike_is_three_steps_in_a_row_above_the_median():
    watch = LossWatch(1.0)
    assert not any(spikes(watch, *[3.0, 3.5] * 25))
    assert not any(spikes(watch, 9.0, 9.0, 3.0))  # an odd batch or two pass by themselves
    assert spikes(watch, 4.4, 4.4, 4.4) == [False, False, True]
    assert watch.median() in (3.0, 3.25)  # high losses do not become normal


def test_nothing_is_a_spike_at_the_start():
    assert not any(spikes(LossWatch(1.0), *range(19)))


def test_nothing_is_a_spike_without_a_threshold():
    assert not any(spikes(LossWatch(0.0), *[3.0] * 50, *[1e9] * 5))


def test_a_watch_continues_where_it_was():
    one = LossWatch(1.0)
    two = LossWatch(1.0)
    spikes(one, *[3.0] * 30, 9.0, 9.0)
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert spikes(two, 9.0) == [True]


@pytest.mark.parametrize(
    "state",
    [
        dict(losses=[3.0, math.nan], high=0),  # whose median would turn the watch off
        dict(losses=[math.inf], high=0),
        dict(losses=[3.0], high=-(10**9)),
        dict(losses=[3.0], high=3),
    ],
)
def test_a_state_that_no_watch_can_have_is_refused(state):
    with pytest.raises(ValueError, match="not those of a run"):
        LossWatch(1.0).load_state_dict(state)


STEP_TOKENS = SMALL["total_batch_size"]
FIRST_BAD = 25  # the first step with a high loss; the third one in a row is step 27


def poisoned_shards(directory: Path, until: int) -> Path:
    """Shards of 8 different tokens that a model learns at once, but for steps FIRST_BAD to `until`, whose tokens it has
    never seen."""
    directory.mkdir()
    rng = np.random.default_rng(0)
    tokens = rng.integers(8, size=60 * STEP_TOKENS + 1, dtype=np.uint16)
    for step in range(FIRST_BAD - 1, until):
        tokens[step * STEP_TOKENS : (step + 1) * STEP_TOKENS] = rng.integers(100, 250, STEP_TOKENS)
    np.save(directory / "x_train_000001.npy", tokens)
    np.save(directory / "x_val_000000.npy", tokens[:1000])
    Tokenizer.train(["ab"], 257).save(directory / "tokenizer.json")
    return directory


@pytest.fixture
def poisoned(tmp_path) -> dict:
    """Constants of a run with three poisoned batches."""
    shards = poisoned_shards(tmp_path / "poisoned", until=27)
    constants = dict(optimizer="adamw", max_lr=1e-2, eval_interval=0, sample_interval=0, keep_checkpoints=0)
    return constants | dict(data=shards, tokenizer=shards / "tokenizer.json") | {"no-shuffle": True}


def advice(err: str) -> list[list[str]]:
    """The words that each command of an error adds to the one that was given."""
    return [shlex.split(words) for words in re.findall(r"(--resume(?: --\w+ [\w.]+)+)", err)]


def test_a_spike_stops_the_run_and_names_the_checkpoint_before_it(train, run_dir, poisoned, ahead):
    train.error("step 27: the loss has jumped from a median of", "step_000020", "--max_lr 0.005", **poisoned)
    assert newest_intact(run_dir) == run_dir / "step_000020"
    assert column(run_dir, "train", "step")[-1] == 27


def test_both_commands_that_a_spike_names_continue_the_run(train, run_dir, poisoned, inline):
    error = train.result(**poisoned).stderr
    lower, accept = advice(error)
    assert lower == ["--resume", "--max_lr", "0.005"]
    options = poisoned | dict(resume=True, spike_threshold=float(accept[2]))
    assert accept[1] == "--spike_threshold"
    train(**options)
    assert steps_of(run_dir)[-1] == 40
    assert column(run_dir, "train", "step") == list(range(1, 41))


def test_a_rate_that_is_too_high_is_cured_by_the_lower_one_that_is_named(train, run_dir, monkeypatch):
    """Steps 25 on have 50 times the rate, as long as nobody lowers it."""
    real = train_gpt2.learning_rate
    options = dict(optimizer="adamw", eval_interval=0, sample_interval=0, keep_checkpoints=0, grad_clip=0.0)

    def learning_rate(step, config):
        return real(step, config) * (50 if step >= 25 and config.max_lr == 1e-2 else 1)

    monkeypatch.setattr(train_gpt2, "learning_rate", learning_rate)
    error = train.result(max_lr=1e-2, spike_threshold=0.5, **options).stderr
    assert "the loss has jumped" in error
    [lower, _] = advice(error)
    train(resume=True, max_lr=float(lower[2]), spike_threshold=0.5, **options)
    assert steps_of(run_dir)[-1] == 40


def test_checkpoints_from_since_the_jump_are_renamed_and_none_is_written_while_the_loss_is_high(
    train, run_dir, poisoned, ahead
):
    train.error("the loss has jumped", **poisoned | dict(checkpoint_interval=1))
    # the weights of the step before the first high loss are suspect, too
    assert steps_of(run_dir) == list(range(1, FIRST_BAD - 1))
    assert [path.name for path in run_dir.glob("spoilt_*")] == ["spoilt_step_000024"]


def test_an_odd_batch_only_delays_a_checkpoint(train, run_dir, poisoned, monkeypatch):
    options = poisoned | dict(data=poisoned["data"].parent / "two")
    poisoned_shards(options["data"], until=26)
    result = train(**options)
    assert "step 25: no checkpoint while the loss is high" in result.stdout
    assert steps_of(run_dir) == [5, 10, 15, 20, 30, 35, 40]


def test_the_last_step_is_saved_even_if_its_loss_is_high(train, run_dir, poisoned):
    train(**poisoned | dict(max_steps=26))
    assert steps_of(run_dir)[-1] == 26


def test_a_spike_without_a_checkpoint_says_how_to_start_again(train, run_dir, poisoned):
    train.error("no checkpoint from before it", "--overwrite --max_lr 0.005", **poisoned | dict(checkpoint_interval=0))
    assert steps_of(run_dir) == []


def test_steps_that_are_not_finite_are_no_spike_and_stop_a_run_only_in_a_row(train, run_dir, monkeypatch):
    real = Run.log

    def log(run, loss, *others):
        bad = run.step in (22, 24, 25, 26, 28, 29, 30)
        real(run, loss + (math.inf if bad else 0), *others)

    monkeypatch.setattr(Run, "log", log)
    train(max_bad_steps=4)
    assert len(log_of(run_dir, "train")) == 40
    train.error("3 steps, up to step 26", out="again", max_bad_steps=3)


def test_a_run_that_was_spoilt_continues_with_the_losses_of_one_that_never_was(train, tmp_path, run_dir, poisoned):
    """With the jump accepted from the start: up to it all losses are the same."""
    train.error("the loss has jumped", **poisoned)
    train(**poisoned | dict(resume=True, spike_threshold=0.0))
    train(out="accepted", **poisoned | dict(spike_threshold=0.0))
    assert losses(run_dir) == losses(tmp_path / "accepted")
