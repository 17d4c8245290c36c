"""Pretraining as a user meets it: what a run leaves behind, exact resumption, and clear errors."""

import itertools
import math
import random
import signal
import statistics
import subprocess
import time

import numpy as np
import pytest
import torch

import hellaswag
import train_gpt2
from bpe.formats import ENDOFTEXT
from bpe.tokenizer import Tokenizer
from model import GPT, GPTConfig
from parts.evaluation import complete, validate
from parts.runtime import Runtime
from tests.forks import fork_script, start_fork
from tests.helpers import (
    assert_user_error,
    column,
    hellaswag_rows,
    log_of,
    losses,
    n_logged,
    prose,
    read_json,
    read_lines,
    run_script,
    slow,
    small_args,
    spoil_gradients,
    steps_of,
    text_file,
    weights,
    write_lines,
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run of 40 steps in a process of its own, shared by the tests that only look at what it left."""
    tmp_path = tmp_path_factory.mktemp("finished")
    result = fork_script("train_gpt2.py", *small_args(tmp_path, checkpoint_interval=20, keep_checkpoints=0))
    assert result.returncode == 0, result.stderr[-3000:]
    return tmp_path, result


# ---- what a run leaves behind


def test_a_run_learns_and_leaves_everything_that_it_should(finished):
    tmp_path, result = finished
    run = tmp_path / "run"
    train = log_of(run, "train")
    val = log_of(run, "val")
    assert column(run, "train", "step") == list(range(1, 41))
    assert column(run, "val", "step") == [10, 20, 30, 40]
    assert val[-1]["loss"] < train[0]["loss"] - 1
    assert (run / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "samples.txt").read_text().count("--- step") == 2
    assert steps_of(run) == [20, 40]
    assert [p.name for p in run.glob(".*")] == [".lock"]  # nothing half written
    assert (val[-1]["tokens"], val[-1]["sequence_length"]) == (512, 32)
    rate = statistics.median(column(run, "train", "tokens_per_sec"))
    gap = val[-1]["loss"] - statistics.fmean(column(run, "train", "loss")[-2:])
    for figure in (f"{val[-1]['loss']:.4f}", f"{abs(gap):.2f}", "10,240", f"{rate:,.0f}", f"sample.py {run} "):
        assert figure in result.stdout
    assert subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=run / "step_000040").returncode == 0


def test_a_checkpoint_of_a_run_opens_in_transformers_with_the_same_ids_and_logits(finished):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = finished[0] / "run/step_000040"
    text = f"{ENDOFTEXT}x  = 1\n中文 👍🏽 {prose(40)}"
    ids = Tokenizer.load(checkpoint).encode(text, allowed_special="all")
    assert AutoTokenizer.from_pretrained(checkpoint)(text)["input_ids"] == ids
    idx = torch.tensor([ids[:32], ids[-32:]])
    with torch.no_grad():
        ours = GPT.from_pretrained(checkpoint).eval()(idx)
        theirs = AutoModelForCausalLM.from_pretrained(checkpoint).eval()(idx).logits
    assert (ours - theirs).abs().max() < 1e-4


def test_bits_per_byte_is_the_loss_of_the_whole_text_over_its_bytes(finished):
    run = finished[0] / "run"
    model = GPT.from_pretrained(run / "step_000040").eval()
    tokenizer = Tokenizer.load(run / "step_000040")
    [shard] = (finished[0] / "cache").glob("*/*_val_000000.npy")
    ids = torch.from_numpy(np.load(shard)[: 2 * 256 + 1].astype(np.int64))  # eval_steps x total_batch_size
    with torch.no_grad():
        logits = model(ids[:-1].view(-1, 32))
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[1:]).item()
    n_bytes = len(tokenizer.decode(ids[1:].tolist()).replace("<|endoftext|>", "").encode())
    last = log_of(run, "val")[-1]
    assert last["loss"] == pytest.approx(nats, rel=1e-5)
    assert last["bpb"] == pytest.approx(nats * 512 / math.log(2) / n_bytes, rel=1e-5)


def test_targets_that_do_not_count_add_neither_loss_nor_bytes(rt):
    class SevenNats(torch.nn.Module):
        def forward(self, idx, targets, n_targets):
            return torch.tensor(7.0 / n_targets)

    targets = torch.tensor([[0, -1], [3, -1]])
    found = validate(SevenNats(), [(None, targets)] * 2, torch.tensor([2, 8, 8, 4]), rt)
    assert found == dict(loss=3.5, bpb=14 / math.log(2) / 12, tokens=4)


def test_a_sample_is_drawn_with_a_seed_of_its_step(train, run_dir, rt):
    train(max_steps=1, sample_tokens=20)
    saved = run_dir / "step_000001"
    expected = complete(GPT.from_pretrained(saved), Tokenizer.load(saved), "", 20, rt, 1337 + 1)
    assert column(run_dir, "sample", "text") == [expected]


def test_hellaswag_is_scored_on_the_way_and_changes_nothing(train, inline, tmp_path):
    rows = hellaswag_rows(tmp_path / "rows.jsonl")
    train(out="with", max_steps=5, hellaswag_interval=2, hellaswag_data=rows)
    train(out="without", max_steps=5)
    scores = log_of(tmp_path / "with", "hellaswag")
    assert [r["step"] for r in scores] == [2, 4, 5]
    options = dict(data=rows, style="completion", dtype="float32", device="cpu", json=tmp_path / "scores.json")
    assert inline(hellaswag.main, tmp_path / "with", **options).returncode == 0
    found = read_json(options["json"])["styles"]["completion"]
    for name in ("acc", "acc_norm", "acc_norm_stderr", "gold_bpb", "gold_bpb_stderr", "n"):
        assert scores[-1][name] == found[name]
    assert losses(tmp_path / "with") == losses(tmp_path / "without")


@pytest.mark.parametrize("max_lr, diverged", [(50, True), (1e-6, False)])
def test_a_run_that_diverges_is_told_why_and_one_that_has_learned_nothing_is_not(train, max_lr, diverged):
    result = train(max_steps=6, max_lr=max_lr, muon_lr=max_lr, eval_interval=3)
    assert ("--max_lr 50" in result.stdout) == diverged
    assert ("sample.py" in result.stdout) != diverged


def test_a_run_that_memorizes_its_text_is_not_said_to_diverge(train, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 600 + "0123456789" * 160)  # validation on characters of its own
    result = train(data=text, max_steps=40, max_lr=3e-2)
    assert "--max_lr" not in result.stdout
    assert "sample.py" in result.stdout


def test_a_loss_with_another_one_added_is_not_said_to_diverge(train, monkeypatch):
    """As that of a second head: training has a loss far above a guess, and validation has not."""
    real = GPT.loss

    def with_another(self, *args, **options):
        return real(self, *args, **options) + (12.0 if self.training else 0.0)

    monkeypatch.setattr(GPT, "loss", with_another)
    assert "--max_lr" not in train(max_steps=6, eval_interval=0).stdout


def test_a_rise_of_validation_names_the_best_checkpoint(train, run_dir):
    """Among those measured on as many tokens: the first, on fewer, was lower still."""
    options = dict(eval_interval=2, checkpoint_interval=2, sample_interval=0, lr_schedule="cosine")
    train(max_steps=6, keep_checkpoints=0, **options)
    log = read_lines(run_dir / "log.jsonl")
    first, second, _ = [record for record in log if record["kind"] == "val"]
    first |= dict(loss=0.1, tokens=first["tokens"] - 1)
    second["loss"] = 0.2
    write_lines(run_dir / "log.jsonl", log)
    result = train(max_steps=8, keep_checkpoints=1, resume=True, **options)
    assert f"{run_dir}/step_000004" in result.stdout
    gap = column(run_dir, "val", "loss")[-1] - column(run_dir, "train", "loss")[-1]
    assert f" {abs(gap):.2f} " in result.stdout
    assert steps_of(run_dir) == [4, 8]


def test_without_a_terminal_a_line_is_printed_as_soon_as_one_is_due(train, run_dir, monkeypatch):
    hour = itertools.count(3600, 3600)
    monkeypatch.setattr(time, "monotonic", lambda: next(hour))
    said = train(max_steps=9).stdout
    for loss in column(run_dir, "train", "loss"):
        assert f" {loss:.3f}, " in said


def test_a_vocabulary_much_larger_than_the_tokenizer_is_warned_of(train, tokenizer):
    assert not train(out="fits", max_steps=1, tokenizer=tokenizer, vocab_size=1280).stderr
    with pytest.warns(UserWarning, match="--vocab_size 640"):
        train(out="wide", max_steps=1, tokenizer=tokenizer, vocab_size=2048)


# ---- interruption


@pytest.mark.parametrize("kills, steps, keep", [(2, 15, 0), slow(20, 40, 2)])
def test_killed_and_resumed_equals_undisturbed_bit_for_bit(train, tmp_path, run_dir, kills, steps, keep):
    """After some steps, and every third time in the middle of a save; the slow test prunes, too."""
    options = dict(max_steps=steps, keep_checkpoints=keep, dropout=0.1)
    train(out="undisturbed", **options)
    rng = random.Random(0)
    in_a_save = 0
    args = small_args(tmp_path, **options, resume=True)
    for i in range(kills):
        goal = n_logged(run_dir) + rng.randint(1, 7)
        process = start_fork("train_gpt2.py", *args, out=f"{tmp_path}/{i}")
        while process.exitcode is None:
            in_time = any(run_dir.glob(".step_*.tmp/*")) if i % 3 == 1 else n_logged(run_dir) >= goal
            if in_time:
                break
            time.sleep(0.0005)
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        in_a_save += any(run_dir.glob(".step_*.tmp"))
    assert in_a_save >= 1
    train(**options, resume=True)
    assert losses(run_dir) == losses(tmp_path / "undisturbed")
    assert weights(run_dir, steps) == weights(tmp_path / "undisturbed", steps)


def test_figures_that_are_read_a_step_later_change_nothing(short, tmp_path, monkeypatch):
    records = []
    for ahead in (0, 1):
        monkeypatch.setattr(Runtime, "steps_ahead", ahead)
        short(out=f"run-{ahead}", eval_interval=3, sample_interval=3)
        log = read_lines(tmp_path / f"run-{ahead}" / "log.jsonl")
        records.append([(r["step"], r["kind"]) for r in log])
    assert records[0] == records[1]
    assert losses(tmp_path / "run-0") == losses(tmp_path / "run-1")


@pytest.mark.parametrize("optimizer, ahead", [("adamw", 0), ("muon", 1)])
def test_a_step_with_a_non_finite_gradient_changes_no_weight(train, run_dir, monkeypatch, optimizer, ahead):
    monkeypatch.setattr(Runtime, "steps_ahead", ahead)
    spoil_gradients(monkeypatch, lambda step: step == 3, math.inf)
    train(max_steps=4, checkpoint_interval=1, keep_checkpoints=0, eval_interval=1, optimizer=optimizer)
    one, two, three, four = column(run_dir, "val", "loss")
    assert len({one, two, four}) == 3
    assert two == three
    assert column(run_dir, "train", "skipped_steps") == [0, 0, 1, 1]
    assert steps_of(run_dir) == [1, 2, 3, 4]  # a skipped step leaves finite weights


def test_bad_steps_in_a_row_end_the_run_and_weights_that_are_not_finite_are_not_saved(train, run_dir, monkeypatch):
    spoil_gradients(monkeypatch, lambda step: step in (1, 3), math.inf)
    steps = itertools.count(1)
    real = torch.optim.AdamW.step

    def step(optimizer):
        real(optimizer)
        if next(steps) == 5:
            optimizer.param_groups[0]["params"][0].data.fill_(math.nan)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    train.error("2", "7", "--resume", max_bad_steps=2, checkpoint_interval=6)
    assert column(run_dir, "train", "skipped_steps") == [1, 1, 2, 2, 2, 3, 4]
    assert steps_of(run_dir) == []


def test_a_batch_has_the_same_loss_and_gradient_in_micro_batches_of_any_size(train, tmp_path, monkeypatch):
    options = dict(max_steps=3, eval_interval=0, sample_interval=0, checkpoint_interval=0)
    gradients = []
    measure = torch.nn.utils.get_total_norm

    def noted(grads):
        gradients.append(torch.cat([grad.flatten() for grad in grads]))
        return measure(grads)

    monkeypatch.setattr(torch.nn.utils, "get_total_norm", noted)
    for size in (1, 8):
        train(out=f"micro-{size}", micro_batch_size=size, **options)
    for one, eight in zip(gradients[:3], gradients[3:], strict=True):  # of the three steps
        assert (one - eight).norm() < 1e-5 * eight.norm()
    for name, of_steps in (("micro-1", gradients[:3]), ("micro-8", gradients[3:])):
        norms = [gradient.norm().item() for gradient in of_steps]  # before clipping
        assert column(tmp_path / name, "train", "grad_norm") == pytest.approx(norms, rel=1e-5)
    one = column(tmp_path / "micro-1", "train", "loss")
    assert one == pytest.approx(column(tmp_path / "micro-8", "train", "loss"), rel=1e-5)


# ---- damaged and missing things


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(short, run_dir, inline):
    import sample

    short()
    newest = run_dir / "step_000006"
    expected = losses(run_dir)
    for name in ("SHA256SUMS", "model.safetensors", "train_state.pt"):
        file = newest / name
        original = file.read_bytes()
        file.write_bytes(original[: len(original) // 2] + b"\xff" + original[len(original) // 2 + 1 :])
        assert str(newest) in short(resume=True).stderr
        assert losses(run_dir) == expected
        assert file.read_bytes()[:-9999] == original[:-9999]
    assert short(resume=True).stderr == ""
    (newest / "model.safetensors").write_bytes((newest / "model.safetensors").read_bytes()[:-100])
    assert_user_error(inline(sample.main, run_dir), "model.safetensors")


BAD = [
    (dict(data="nowhere.txt"), ["nowhere.txt"]),
    (dict(data="nowhere"), ["nowhere", "fineweb.py"]),
    (dict(total_batch_size=250), ["250", "micro_batch_size", "8", "sequence_length", "32"]),
    (dict(max_steps=0), ["--max_steps", "0"]),
    (dict(out="text.txt/run"), ["text.txt/run"]),
    (dict(min_lr=1.0), ["--min_lr", "1.0", "--max_lr", "0.003"]),
    (dict(target_loss=3.0, eval_interval=0), ["--target_loss 3.0", "--eval_interval"]),
]


@pytest.mark.parametrize("changes, words", BAD)
def test_bad_arguments_give_one_line(train, run_dir, changes, words):
    train.error(*words, **changes)
    assert not (run_dir / "log.jsonl").exists()


def test_an_unknown_recipe_names_the_known_ones(inline):
    assert_user_error(inline(train_gpt2.main, "gpt3"), "gpt3", "gpt2-medium")


def test_training_goes_on_from_another_checkpoint(train, tmp_path):
    train(out="first", max_steps=20)
    start = tmp_path / "first" / "step_000020"
    train(out="second", max_steps=1, init_from=start, max_lr=1e-9)
    first, second = (column(tmp_path / out, "train", "loss") for out in ("first", "second"))
    assert second[0] < first[-1] + 0.2 < first[0] - 0.4
    assert log_of(tmp_path / "second", "val")[0]["step"] == 0  # what was there before training
    train(out="shuffled", max_steps=1, init_from=start, max_lr=1e-9, seed=7)
    assert column(tmp_path / "shuffled", "train", "loss") != second  # of other windows
    train.error("n_layer", "2", "4", out="third", init_from=start, n_layer=4)  # tiny has 4
    train.error("32", "--sequence_length", out="third", init_from=start, sequence_length=64)
    train.error(f"--tokenizer {start}", out="third", init_from=start, data=text_file(tmp_path / "b.txt", 9999))


@pytest.mark.slow
def test_compiled_training_evaluates_scores_and_samples_without_recompiling(train, tmp_path):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    options = dict(n_layer=1, max_steps=8, eval_interval=2, sample_interval=2, hellaswag_interval=2)
    options |= dict(hellaswag_data=hellaswag_rows(tmp_path / "rows.jsonl"))
    train(out="compiled", compile="on", **options)
    # one graph of the trial whether anything compiles, one to train, one to evaluate, and one of Muon's momentum,
    # whatever happens in between
    assert counters["stats"]["unique_graphs"] == 4
    assert not counters["recompiles"]
    train(out="eager", **options)
    eager = column(tmp_path / "eager", "train", "loss")
    assert column(tmp_path / "compiled", "train", "loss") == pytest.approx(eager, rel=1e-5)


@pytest.mark.slow
def test_a_number_of_ranks_that_the_batch_does_not_allow_is_refused(tmp_path):
    result = run_script("train_gpt2.py", *small_args(tmp_path), ranks=3)
    assert result.returncode != 0
    assert "256" in result.stderr
    assert " 3 " in result.stderr


def test_without_a_gpu_a_recipe_has_to_be_named(inline):
    assert_user_error(inline(train_gpt2.main, max_steps=10, device="cpu"), "gpt2")


def test_a_recipe_for_a_text_of_one_s_own_asks_for_it(inline, tmp_path):
    assert_user_error(inline(train_gpt2.main, "small", out_dir=tmp_path / "run"), "--data")


def test_a_run_on_a_cpu_says_before_its_first_step_how_long_it_takes(train, run_dir):
    said = train(max_steps=3).stdout
    first_loss = log_of(run_dir, "train")[0]["loss"]
    assert " 00:0" in said[: said.index(f"{first_loss:.3f}")]


def test_an_assert_on_sizes_is_one_line(train, monkeypatch):
    def check(config):
        assert config.n_embd != 32, "32 CHANNELS"

    monkeypatch.setattr(GPTConfig, "__post_init__", check)
    train.error("32 CHANNELS")
