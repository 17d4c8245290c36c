"""Pretraining as a user meets it: what a run leaves behind, exact resumption, and clear errors."""

import json
import math
import random
import re
import signal
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt2
from cli import UserError
from learning import evaluation as evaluate
from model import GPT, MLP, GPTConfig, Loss
from run import log as runlog
from run import runtime
from run.checkpoint import FOR_PEOPLE, SUMS, checkpoint_steps, damage, load_train_state, newest_intact
from run.directory import Run
from tests.helpers import (
    SMALL,
    arguments,
    assert_user_error,
    command,
    environment,
    log_of,
    losses,
    run_inline,
    succeed,
    text_file,
)
from train_gpt2 import RECIPES


def small_args(tmp_path: Path, out="run", **changes) -> list[str]:
    data = tmp_path / "text.txt"
    if not data.exists():
        text_file(data)
    return ["tiny", *arguments(**{**SMALL, "data": data, "out_dir": tmp_path / out, **changes})]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run of 40 steps in a process of its own, shared by the tests that only look at what it left."""
    tmp_path = tmp_path_factory.mktemp("finished")
    result = succeed("train_gpt2.py", *small_args(tmp_path, keep_checkpoints=0))
    return tmp_path, result


# ---- what a run leaves behind


def test_a_run_learns_and_leaves_everything_that_it_should(finished):
    tmp_path, result = finished
    run = tmp_path / "run"
    train = log_of(run, "train")
    assert [r["step"] for r in train] == list(range(1, 41))
    assert {"step", "kind", "loss", "lr", "grad_norm", "dt_ms", "tokens_per_sec", "mfu"} <= set(train[0])
    val = log_of(run, "val")
    assert [r["step"] for r in val] == [10, 20, 30, 40] and val[-1]["loss"] < train[0]["loss"] - 1
    assert json.loads((run / "config.json").read_text())["n_embd"] == 32
    assert (run / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "samples.txt").read_text().count("--- step") == 2
    assert [step for step, _ in checkpoint_steps(run)] == list(range(5, 41, 5))
    assert [p.name for p in run.glob(".*")] == [".lock"]  # nothing half written
    assert "bits per byte" in result.stdout and "Now try:" in result.stdout


def test_the_first_loss_is_said_beside_ln_v(finished):
    run, result = finished[0] / "run", finished[1]
    first, uniform = map(float, re.search(r"first loss ([\d.]+);.* ([\d.]+)\n", result.stdout).groups())
    assert first == pytest.approx(log_of(run, "train")[0]["loss"], abs=1e-3)
    assert uniform == pytest.approx(math.log(SMALL["vocab_size"]), abs=1e-3)


def test_transformers_opens_a_checkpoint_with_the_same_logits_and_ids(finished):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from bpe.tokenizer import Tokenizer

    path = checkpoint_steps(finished[0] / "run")[-1][1]
    ours, theirs = GPT.from_pretrained(path).eval(), AutoModelForCausalLM.from_pretrained(path).eval()
    tokenizer, theirs_tokenizer = Tokenizer.load(path), AutoTokenizer.from_pretrained(path)
    text = "HESTER:\nThe tide comes twice, naïve 潮汐 🌊 friend.\n\n  Two  spaces"
    ids = tokenizer.encode_ordinary(text)
    assert theirs_tokenizer(text)["input_ids"] == ids
    assert theirs_tokenizer.decode(ids) == text
    idx = torch.tensor([ids[:32]])
    with torch.no_grad():
        assert (ours(idx) - theirs(idx).logits).abs().max() < 1e-4
    out = theirs.generate(torch.tensor([[tokenizer.eot_token]]), max_new_tokens=20, do_sample=True)
    assert out.max() < len(tokenizer)  # ids of the padded vocabulary are suppressed there, too


def test_train_state_is_plain_and_weights_only(finished):
    path = checkpoint_steps(finished[0] / "run")[-1][1]
    state = torch.load(path / "train_state.pt", weights_only=True)
    assert state["step"] == 40 and state["config"]["n_layer"] == 2
    assert {"optimizer", "spikes", "data_step", "tokens", "identity"} <= set(state)


def test_checksums_are_those_of_sha256sum(finished):
    path = checkpoint_steps(finished[0] / "run")[-1][1]
    assert subprocess.run(["sha256sum", "-c", "--quiet", SUMS], cwd=path).returncode == 0


def test_bits_per_byte_is_the_loss_of_the_whole_text_over_its_bytes(finished):
    from bpe.tokenizer import Tokenizer

    run = finished[0] / "run"
    path = checkpoint_steps(run)[-1][1]
    text = (finished[0] / "text.txt").read_text()
    held_out = text[int(len(text) * 0.9) :]
    model, tokenizer = GPT.from_pretrained(path).eval(), Tokenizer.load(path)
    pieces = [piece + "\n\n\n" for piece in held_out.split("\n\n\n")]  # documents, which the corpus separates so
    ids = [i for piece in pieces for i in [tokenizer.eot_token] + tokenizer.encode_ordinary(piece)]
    ids = torch.tensor(ids[: 2 * 256 + 1])  # eval_steps x total_batch_size
    nats = 0.0
    with torch.no_grad():
        for i in range(0, len(ids) - 1, 32):
            x, y = ids[i : i + 32][: len(ids) - 1 - i], ids[i + 1 : i + 33]
            nats += torch.nn.functional.cross_entropy(model(x[None])[0], y, reduction="sum").item()
    n_bytes = len(tokenizer.decode([i for i in ids[1:].tolist() if i != tokenizer.eot_token]).encode())
    last = log_of(run, "val")[-1]
    assert last["loss"] == pytest.approx(nats / (len(ids) - 1), rel=1e-5)
    assert last["bpb"] == pytest.approx(nats / math.log(2) / n_bytes, rel=1e-5)


def hellaswag_rows(path: Path, n: int = 7) -> Path:
    row = dict(ctx="He", ctx_a="He", ctx_b="", activity_label="To", endings=["is", "was here", "a", "go on"])
    path.write_text("".join(json.dumps(row | {"label": i % 4}) + "\n" for i in range(n)))
    return path


def test_targets_that_do_not_count_add_neither_loss_nor_bytes():
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_positions=16, vocab_size=64, n_layer=1, n_head=2, n_embd=16))
    idx, targets, token_bytes = torch.randint(64, (3, 16)), torch.randint(64, (3, 16)), torch.arange(1, 65)
    targets[:, ::3] = -1
    found = evaluate.validate(Loss(model), [(idx, targets)], token_bytes, runtime.Runtime.setup("cpu", "float32"))
    with torch.no_grad():
        logits = model(idx)
    scored = targets >= 0
    nats = torch.nn.functional.cross_entropy(logits[scored], targets[scored], reduction="sum").item()
    assert found["loss"] == pytest.approx(nats / scored.sum().item(), rel=1e-5)
    assert found["bpb"] == pytest.approx(nats / math.log(2) / token_bytes[targets[scored]].sum().item(), rel=1e-5)


def test_hellaswag_is_scored_on_the_way_and_changes_nothing(train, tmp_path):
    rows = hellaswag_rows(tmp_path / "rows.jsonl")
    train(out="with", max_steps=8, hellaswag_interval=3, hellaswag_data=rows)
    train(out="without", max_steps=8)
    scores = log_of(tmp_path / "with", "hellaswag")
    assert [(r["step"], r["n"]) for r in scores] == [(3, 7), (6, 7), (8, 7)]
    # all rows are the same, so that one guess is right for the rows whose label it is: two of seven, or one
    assert all(r[key] in (2 / 7, 1 / 7) for r in scores for key in ("acc", "acc_norm"))
    assert losses(tmp_path / "with") == losses(tmp_path / "without")


def test_training_goes_on_without_hellaswag_when_it_cannot_be_had(train, tmp_path, monkeypatch):
    import hellaswag

    def no_network(*args):
        raise UserError("no network")

    monkeypatch.setattr(hellaswag, "load_rows", no_network)
    result = train(max_steps=2, hellaswag_interval=1)
    assert result.returncode == 0 and "without HellaSwag" in result.stdout + result.stderr


def test_a_run_that_diverges_is_told_why_and_not_what_to_try_next(train, tmp_path):
    result = train(max_lr=50, muon_lr=50, max_steps=20, eval_interval=20)
    assert log_of(tmp_path / "run", "val")[-1]["loss"] > math.log(384) + 1
    assert "diverged" in result.stdout and "--max_lr 50" in result.stdout and "Now try" not in result.stdout


def test_without_a_terminal_progress_is_a_line_now_and_then(train, monkeypatch):
    result = train(max_steps=9)
    lines = [line for line in result.stdout.splitlines() if re.match(r"step \d+ of 9: loss", line)]
    assert [line.split()[1] for line in lines] == ["1", "9"] and "\r" not in result.stdout + result.stderr
    monkeypatch.setattr(runlog, "LINE_SECONDS", 0)
    assert train(out="more", max_steps=9).stdout.count(" of 9: loss") == 9


def test_tokens_are_counted_exactly(train, tmp_path, monkeypatch):
    real, many = Run.log_step, 2**24 + 1  # in fp32 that is 2**24
    monkeypatch.setattr(Run, "log_step", lambda run, *figures: real(run, *figures[:-1], torch.tensor(many)))
    train(max_steps=3)
    assert [r["tokens"] for r in log_of(tmp_path / "run", "train")] == [many, 2 * many, 3 * many]


def test_no_rank_waits_for_a_tokenizer_in_an_exchange(train, monkeypatch):
    """Which would end it after ten minutes: it waits for a lock."""
    real, inside, prepare = runtime.Runtime.on_main, [], train_gpt2.prepare_text

    def on_main(rt, work):
        inside.append(work)
        try:
            return real(rt, work)
        finally:
            inside.pop()

    monkeypatch.setattr(runtime.Runtime, "on_main", on_main)
    monkeypatch.setattr(train_gpt2, "prepare_text", lambda *args: prepare(*args) if not inside else 1 / 0)
    assert train(max_steps=1).returncode == 0


# ---- recipes


def test_recipes_have_the_sizes_of_gpt2():
    from model import SIZES

    for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "speedrun", "record"):
        size = SIZES.get(name, SIZES["gpt2"])
        assert {k: asdict(RECIPES[name])[k] for k in size} == size


def test_the_record_validates_on_the_tokens_of_its_rule():
    record = RECIPES["record"]
    assert (record.eval_steps * record.total_batch_size, record.target_loss) == (10_485_760, 3.28)


# ---- interruption


def kill_at_random(process: subprocess.Popen, run: Path, rng: random.Random, while_saving: bool) -> bool:
    """SIGKILL after a random number of further steps, or in the middle of a save; False if the run ended before."""
    log = run / "log.jsonl"
    seen = log.read_text().count('"train"') if log.exists() else 0
    target, deadline = seen + rng.randint(1, 7), time.time() + 120
    while time.time() < deadline:
        if process.poll() is not None:
            return False
        saving = any(run.glob(".step_*.tmp/*"))
        steps = log.read_text().count('"train"') if log.exists() else 0
        if saving if while_saving else (steps >= target or steps < seen):
            break
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return True


def interrupted_run(tmp_path: Path, kills: int) -> tuple[int, int]:
    """Train with kills and --resume until done; returns (kills in all, kills in the middle of a save)."""
    rng = random.Random(0)
    done = saving = 0
    for i in range(100):
        args = command("train_gpt2.py", *small_args(tmp_path, out="killed", keep_checkpoints=0, resume=True))
        process = subprocess.Popen(args, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if done >= kills:
            assert process.wait(240) == 0
            break
        if kill_at_random(process, tmp_path / "killed", rng, while_saving=i % 3 == 1):
            done += 1
            saving += any((tmp_path / "killed").glob(".step_*.tmp"))
        elif (tmp_path / "killed" / "step_000040").exists():
            break
    return done, saving


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_and_resumed_equals_undisturbed_bit_for_bit(finished, tmp_path, kills):
    (tmp_path / "text.txt").write_bytes((finished[0] / "text.txt").read_bytes())
    done, saving = interrupted_run(tmp_path, kills)
    assert done >= min(kills, 3) and saving >= 1
    assert losses(tmp_path / "killed") == losses(finished[0] / "run")
    weights = [
        (path / "step_000040" / "model.safetensors").read_bytes() for path in (tmp_path / "killed", finished[0] / "run")
    ]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    "signum, code",
    [(signal.SIGTERM, 143), (signal.SIGHUP, 129), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
)
def test_a_signal_ends_the_run_with_a_checkpoint(tmp_path, signum, code):
    args = small_args(tmp_path, max_steps=100_000, checkpoint_interval=0, eval_interval=0, sample_interval=0)
    process = subprocess.Popen(
        command("train_gpt2.py", *args), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    log = tmp_path / "run" / "log.jsonl"
    while not (log.exists() and log.read_text().count("\n") > 3):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signum)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code and "Traceback" not in err
    ((step, path),) = checkpoint_steps(tmp_path / "run")
    assert damage(path) is None and step == log_of(tmp_path / "run", "train")[-1]["step"]


def test_figures_that_are_read_a_step_later_change_nothing(train, tmp_path, monkeypatch):
    for ahead in (0, 1):
        monkeypatch.setattr(runtime.Runtime, "steps_ahead", ahead)
        train(out=f"run-{ahead}", keep_checkpoints=0)
    assert losses(tmp_path / "run-0") == losses(tmp_path / "run-1")
    records = [[(r["step"], r["kind"]) for r in map(json.loads, open(tmp_path / f"run-{ahead}" / "log.jsonl"))]
               for ahead in (0, 1)]  # fmt: skip
    assert records[0] == records[1]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_with_a_non_finite_gradient_changes_no_weight(train, tmp_path, monkeypatch, optimizer, ahead):
    monkeypatch.setattr(runtime.Runtime, "steps_ahead", ahead)
    real = torch.nn.utils.get_total_norm
    calls = []

    def poisoned(grads, *args):
        calls.append(0)
        if len(calls) == 3:
            grads[0][0] = math.inf
        return real(grads, *args)

    monkeypatch.setattr(torch.nn.utils, "get_total_norm", poisoned)
    train(max_steps=3, checkpoint_interval=1, optimizer=optimizer)
    paths = dict(checkpoint_steps(tmp_path / "run"))
    read = {step: (path / "model.safetensors").read_bytes() for step, path in paths.items()}
    assert read[1] != read[2] and read[2] == read[3]
    states = [load_train_state(path)["optimizer"] for path in paths.values()]
    assert_equal(states[1], states[2], but=("lr",))
    assert [r.get("skipped") for r in log_of(tmp_path / "run", "train")] == [None, None, True]


def assert_equal(a, b, but: tuple = ()) -> None:
    """Nested states are the same, tensors bit for bit, except for the keys `but`."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a.keys() - set(but):
            assert_equal(a[key], b[key], but)
    elif isinstance(a, list | tuple):
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y, but)
    else:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_too_many_bad_steps_stop_the_run_and_name_the_last_checkpoint(train, monkeypatch):
    real = torch.nn.utils.get_total_norm
    calls = []

    def poisoned(grads, *args):
        calls.append(0)
        if len(calls) > 6:
            grads[0][0] = math.nan
        return real(grads, *args)

    monkeypatch.setattr(torch.nn.utils, "get_total_norm", poisoned)
    assert_user_error(train(max_bad_steps=4), "4 steps", "step_000005", "--resume")
    assert_user_error(train(out="another", max_bad_steps=4), "4 steps", "no checkpoint yet", "--resume")


# ---- damaged and missing things


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(train, tmp_path):
    train(max_steps=10)
    newest = tmp_path / "run" / "step_000010"
    for file in sorted(f for f in newest.iterdir() if f.name not in FOR_PEOPLE):  # a model card is there to be edited
        original = file.read_bytes()
        file.write_bytes(original[: len(original) // 2] + b"\xff" + original[len(original) // 2 + 1 :])
        assert damage(newest) and newest_intact(tmp_path / "run") == tmp_path / "run" / "step_000005", file
        file.write_bytes(original)
    assert damage(newest) is None
    (newest / "model.safetensors").write_bytes((newest / "model.safetensors").read_bytes()[:-100])
    result = train(max_steps=12, resume=True)
    assert result.returncode == 0 and "step_000010" in result.stderr and "step_000005" in result.stdout


def test_a_truncated_checkpoint_given_by_name_offers_the_one_before(train, tmp_path, capsys, monkeypatch):
    import sample

    train(max_steps=10)
    newest = tmp_path / "run" / "step_000010"
    (newest / "model.safetensors").write_bytes((newest / "model.safetensors").read_bytes()[:-100])
    assert_user_error(run_inline(sample.main, [newest], capsys, monkeypatch), "model.safetensors", "step_000005")
    assert run_inline(sample.main, [tmp_path / "run", "--max_new_tokens", 3], capsys, monkeypatch).returncode == 0


def test_a_run_directory_that_cannot_be_made_gives_one_line(train):
    assert_user_error(train(out="text.txt/run"), "text.txt/run")


def test_a_run_is_never_overwritten_silently(train, tmp_path):
    train(max_steps=5)
    before = (tmp_path / "run" / "log.jsonl").read_bytes()
    assert_user_error(train(max_steps=5), "--resume", "--overwrite")
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == before
    assert train(max_steps=3, overwrite=True).returncode == 0
    assert [step for step, _ in checkpoint_steps(tmp_path / "run")] == [3]


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(data="nowhere.txt"), ["nowhere.txt"]),
        (dict(data="nowhere"), ["nowhere", "fineweb.py"]),
        (dict(total_batch_size=250), ["250", "256"]),
        (dict(n_head=3), ["n_embd 32", "n_head 3"]),
        (dict(max_steps=0), ["max_steps"]),
        (dict(tokenizer="nowhere.json"), ["nowhere.json"]),
        (dict(init_from="./nowhere"), ["./nowhere"]),
        (dict(max_stepz=3), ["max-steps"]),
        (dict(min_lr=1.0), ["min_lr", "max_lr"]),
        (dict(target_loss=3.0, eval_interval=0), ["--target_loss 3.0", "--eval_interval"]),
        (dict(dtype="int8"), ["int8"]),
        (dict(fp8=True, compile="auto"), ["--fp8", "bfloat16", "float32"]),
        (dict(fp8=True, dtype="bfloat16"), ["--fp8", "torch.compile"]),
        *((dict(fp8=True, dtype="bfloat16", compile="auto") | dict([change]), ["--fp8", f"--{change[0]}"])
          for change in (("shard", "full"), ("n_embd", 40), ("vocab_size", 390))),
    ],
)
def test_bad_arguments_give_one_line(train, tmp_path, changes, words):
    assert_user_error(train(**changes), *words)
    assert not (tmp_path / "run" / "log.jsonl").exists()


def test_an_unknown_recipe_names_the_known_ones(capsys, monkeypatch):
    assert_user_error(run_inline(train_gpt2.main, ["gpt3"], capsys, monkeypatch), "gpt3", "tiny", "gpt2-xl")


def test_text_that_is_empty_too_short_or_not_text(train, tmp_path):
    for content, words in ((b"", ["empty"]), (b"\xff\xfe\x00", ["UTF-8"]), (b"Too short. " * 9, ["sequence_length"])):
        (tmp_path / "bad.txt").write_bytes(content)
        assert_user_error(train(data=tmp_path / "bad.txt"), *words)


def shards(directory: Path, train=4000, val=1000, vocab=256, seed=0) -> Path:
    directory.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for name, n in (("val_000000", val), ("train_000001", train)):
        np.save(directory / f"x_{name}.npy", rng.integers(vocab, size=n, dtype=np.uint16))
    return directory


@pytest.fixture
def byte_tokenizer(tmp_path):
    from bpe.tokenizer import Tokenizer

    Tokenizer.train(["ab"], 257).save(tmp_path / "bytes.json")
    return tmp_path / "bytes.json"


def test_shards_without_a_manifest_are_read(train, tmp_path, byte_tokenizer):
    assert train(data=shards(tmp_path / "shards"), tokenizer=byte_tokenizer, max_steps=3).returncode == 0


def test_damaged_shards_give_one_line(train, tmp_path, byte_tokenizer):
    directory = shards(tmp_path / "shards")
    path = directory / "x_train_000001.npy"
    sound = path.read_bytes()
    path.write_bytes(sound[:-100])
    assert_user_error(train(data=directory, tokenizer=byte_tokenizer), "x_train_000001.npy")
    tokens = np.load(directory / "x_val_000000.npy")
    tokens[500] = 60_000
    np.save(path, tokens)
    assert_user_error(
        train(data=directory, tokenizer=byte_tokenizer), "x_train_000001.npy", "60000", "384", "tokenizer"
    )
    np.save(path, tokens.astype(np.float32))
    assert_user_error(train(data=directory, tokenizer=byte_tokenizer), "float32")


def test_training_goes_on_from_another_checkpoint(train, tmp_path):
    train(out="first", max_steps=20)
    start = tmp_path / "first" / "step_000020"
    train(out="second", max_steps=1, init_from=start, max_lr=1e-9)
    first, second = log_of(tmp_path / "first", "train"), log_of(tmp_path / "second", "train")
    assert second[0]["loss"] < first[-1]["loss"] + 0.2 < first[0]["loss"] - 0.4


def test_compiled_training_evaluates_and_samples_without_recompiling(train, tmp_path):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    compiled = train(out="compiled", compile="on", n_layer=1, max_steps=8, eval_interval=2, sample_interval=2)
    assert compiled.returncode == 0
    # one graph to train, one to evaluate, and one of Muon's momentum, whatever happens in between
    assert counters["stats"]["unique_graphs"] == 3 and not counters["recompiles"]
    train(out="eager", n_layer=1, max_steps=8, eval_interval=2, sample_interval=2)
    pairs = zip(log_of(tmp_path / "compiled", "train"), log_of(tmp_path / "eager", "train"), strict=True)
    for a, b in pairs:
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


@pytest.mark.parametrize("changed", [False, True])
def test_whoever_changes_the_architecture_is_warned_at_the_first_checkpoint(train, monkeypatch, changed):
    """Its files would say GPT2LMHeadModel and compute something else."""
    if changed:
        monkeypatch.setattr(MLP, "forward", lambda self, x: self.c_proj(self.c_fc(x).relu().square()))
    result = train(max_steps=100, checkpoint_interval=50, eval_interval=0, sample_interval=0)
    assert result.returncode == 0 and ("transformers" in result.stderr) is changed
    assert result.stderr.count("other logits") == changed
