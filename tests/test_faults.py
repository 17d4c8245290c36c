"""What goes wrong in long runs: non-finite numbers, loss spikes, full disks, damage, kills; and what is logged."""

import dataclasses
import json
import math
import random
import re
import signal
import subprocess
import sys
import time
import types
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import card
import checkpoint
import runtime
import trials
from checkpoint import CheckpointWriter, checkpoint_steps, damage, load_train_state, newest_sound
from cli import UserError
from model import GPT, GPTConfig
from run import SpikeDetector
from tests.helpers import SMALL, assert_user_error, command, environment, log_of, losses, succeed


@pytest.fixture(params=[0, 1])
def ahead(request, monkeypatch) -> int:
    """As on a processor and as on a GPU: the steps that are under way before the figures of the first are read."""
    monkeypatch.setattr(runtime.Runtime, "steps_ahead", request.param)
    return request.param


def weights(run: Path, step: int) -> bytes:
    return (run / f"step_{step:06d}" / "model.safetensors").read_bytes()


# ---- loss spikes


def test_a_spike_is_three_steps_in_a_row_above_the_median():
    detector = SpikeDetector(1.0)
    for i in range(50):
        assert not detector.add(3.0 + 0.5 * (i % 2))
    assert not any([detector.add(9.0), detector.add(9.0), detector.add(3.0)])  # an odd batch or two pass by themselves
    assert [detector.add(4.4) for _ in range(3)] == [False, False, True]
    assert detector.median() == 3.0 or detector.median() == 3.25  # high losses do not become normal


def test_nothing_is_a_spike_at_the_start_or_without_a_threshold():
    detector = SpikeDetector(1.0)
    assert not any(detector.add(loss) for loss in range(19))
    detector = SpikeDetector(0.0)
    assert not any(detector.add(loss) for loss in [3.0] * 50 + [math.inf] * 5)


def test_the_state_of_a_detector_goes_on_where_it_was():
    one, two = SpikeDetector(1.0), SpikeDetector(1.0)
    for loss in [3.0] * 30 + [9.0, 9.0]:
        one.add(loss)
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert two.add(9.0)


STEP_TOKENS, SHIFT = SMALL["total_batch_size"], 20 + 7  # the spike shows in step 27, and step 20 is the last good one


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
    from bpe.tokenizer import Tokenizer

    Tokenizer.train(["ab"], 257).save(directory / "tokenizer.json")
    return directory


SPIKY = dict(shuffle=True, optimizer="adamw", eval_interval=40, keep_checkpoints=0, max_lr=1e-2)


def spiky_args(directory: Path, **changes) -> dict:
    options = {**SPIKY, "data": directory, "tokenizer": directory / "tokenizer.json", **changes}
    return {k: v for k, v in options.items() if k != "shuffle"} | {"no-shuffle": True}


def test_a_spike_goes_back_to_a_good_checkpoint_and_leaves_its_data_out(train, tmp_path, ahead):
    spiky = spiky_args(spiky_shards(tmp_path / "spiky", range(24, 27)))
    result = train(out="spiky-run", **spiky)
    assert result.returncode == 0
    reference = spiky_args(spiky_shards(tmp_path / "clean", range(0), left_out=range(20, 27 + ahead)))
    train(out="clean-run", **reference)
    assert losses(tmp_path / "spiky-run") == losses(tmp_path / "clean-run")
    assert weights(tmp_path / "spiky-run", 40) == weights(tmp_path / "clean-run", 40)
    (rollback,) = log_of(tmp_path / "spiky-run", "rollback")
    assert rollback["step"] == 20 and rollback["from_step"] == 27 and rollback["loss"] > rollback["median"] + 1
    assert "rollback" in result.stdout
    assert load_train_state(tmp_path / "spiky-run" / "step_000040")["data_step"] == 47 + ahead


@pytest.mark.parametrize("kept", [20, 30])
def test_a_rollback_is_resumed_exactly(train, tmp_path, kept):
    """Killed after the rollback, before and after the next checkpoint."""
    import shutil

    spiky = spiky_args(spiky_shards(tmp_path / "spiky", range(24, 27)))
    train(**spiky)
    before = losses(tmp_path / "run")
    for step, path in checkpoint_steps(tmp_path / "run"):
        if step > kept:
            shutil.rmtree(path)
    assert train(resume=True, **spiky).returncode == 0
    assert losses(tmp_path / "run") == before


def test_spikes_that_other_data_does_not_cure_stop_the_run(train, tmp_path):
    spiky = spiky_args(spiky_shards(tmp_path / "spiky", range(24, 60)))
    newest = "step_000015"  # the jump comes again right after step 20, so that this one is suspect, too
    assert_user_error(train(**spiky), "3 returns", newest, "--max_lr")
    assert newest_sound(tmp_path / "run") == tmp_path / "run" / newest  # the spoilt ones are gone


def test_a_spike_without_a_checkpoint_is_reported_and_passed(train, tmp_path):
    spiky = spiky_args(spiky_shards(tmp_path / "spiky", range(24, 60)), checkpoint_interval=0)
    result = train(**spiky)
    assert result.returncode == 0 and "no earlier checkpoint" in result.stdout
    assert [step for step, _ in checkpoint_steps(tmp_path / "run")] == []
    assert [r["step"] for r in log_of(tmp_path / "run", "train")] == list(range(1, 41))


# ---- disks


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_full_disk_gives_one_line_and_loses_no_checkpoint(train, tmp_path, small_disk):
    result = train(out="disk/run", sample_interval=0, keep_checkpoints=0, checkpoint_interval=1, eval_interval=0)
    assert_user_error(result, "o space left", "--resume", str(newest_sound(small_disk / "run")))
    steps = [step for step, _ in checkpoint_steps(small_disk / "run")]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 1
    assert all(damage(path) is None for _, path in checkpoint_steps(small_disk / "run"))
    assert [p.name for p in (small_disk / "run").glob(".*")] == [".lock"]  # what did not fit is gone
    assert len(log_of(small_disk / "run", "train")) < 40  # it does not go on without being able to save
    subprocess.run(["mount", "-o", "remount,size=50m", small_disk], check=True)
    assert train(out="disk/run", keep_checkpoints=0, eval_interval=0, resume=True).returncode == 0


def test_a_disk_that_the_log_has_filled_gives_one_line(train, small_disk):
    (small_disk / "run").mkdir()
    train(out="disk/run", max_steps=1, keep_checkpoints=0)
    try:
        (small_disk / "ballast").write_bytes(bytes(8 * 2**20))
    except OSError:
        pass
    assert_user_error(train(out="disk/run", resume=True, max_steps=10), "o space left")
    assert damage(small_disk / "run" / "step_000001") is None


def test_any_flipped_byte_of_any_file_is_noticed(train, tmp_path):
    train(max_steps=1)
    path = tmp_path / "run" / "step_000001"
    rng = random.Random(0)
    for file in sorted(file for file in path.iterdir() if file.name not in card.FILES):
        original = file.read_bytes()
        for position in {0, len(original) - 1, *(rng.randrange(len(original)) for _ in range(10))}:
            flipped = bytearray(original)
            flipped[position] ^= 1 << rng.randrange(8)
            file.write_bytes(flipped)
            assert damage(path), (file.name, position)
        file.write_bytes(original)
    assert damage(path) is None


# ---- saving in the background


def test_training_goes_on_while_a_checkpoint_is_written_and_changes_nothing_in_it(train, tmp_path, monkeypatch):
    """A write that waits for training to log another step would never end if training waited for it."""
    train(out="quick", max_steps=4, checkpoint_interval=2, eval_interval=0)
    real, waited = checkpoint.save_model, []

    def save_model(path, model, tokenizer):
        step = int(path.name.split(".")[1].removeprefix("step_"))
        deadline = time.time() + 60
        while step < 4 and len(log_of(tmp_path / "run", "train")) <= step and time.time() < deadline:
            time.sleep(0.001)
        waited.append(time.time() < deadline)
        real(path, model, tokenizer)

    monkeypatch.setattr(checkpoint, "save_model", save_model)
    assert train(max_steps=4, checkpoint_interval=2, eval_interval=0).returncode == 0
    assert waited == [True, True]
    for step in (2, 4):
        assert weights(tmp_path / "quick", step) == weights(tmp_path / "run", step)
        states = [load_train_state(tmp_path / out / f"step_{step:06d}") for out in ("quick", "run")]
        for a, b in zip(*(state["optimizer"]["optimizers"] for state in states), strict=True):
            for i in a["state"]:
                assert all(torch.equal(a["state"][i][key], b["state"][i][key]) for key in a["state"][i])


def test_a_failed_write_is_known_before_the_next_save(tmp_path):
    def export(directory):
        raise OSError(28, "No space left on device", str(directory))

    writer = CheckpointWriter(tmp_path, 0)
    writer.save(1, export, {}, {})
    writer._thread.join()
    assert writer.failed
    with pytest.raises(UserError, match="no space left"):
        writer.wait()


# ---- precision


DTYPES = ["bfloat16", "float16"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_half_precision_trains_as_single_precision_does(train, tmp_path, dtype):
    for name in ("float32", dtype):
        assert train(out=name, dtype=name, max_steps=50, checkpoint_interval=0).returncode == 0
    for ours, single in zip(log_of(tmp_path / dtype, "train"), log_of(tmp_path / "float32", "train"), strict=True):
        assert ours["loss"] == pytest.approx(single["loss"], rel=0.01), ours["step"]
    ours, single = log_of(tmp_path / dtype, "val")[-1], log_of(tmp_path / "float32", "val")[-1]
    assert ours["loss"] == pytest.approx(single["loss"], rel=3e-3)


def test_the_scale_of_fp16_halves_after_a_bad_step_and_is_resumed(train, tmp_path, monkeypatch):
    real, calls = torch.nn.utils.get_total_norm, []

    def poisoned(grads, *args):
        calls.append([grad.abs().max().item() for grad in grads])
        if len(calls) == 3:
            grads[0][0] = math.inf
        return real(grads, *args)

    monkeypatch.setattr(torch.nn.utils, "get_total_norm", poisoned)
    train(dtype="float16", max_steps=4, checkpoint_interval=2)
    scales = [load_train_state(path)["optimizer"]["scaler"]["scale"] for _, path in checkpoint_steps(tmp_path / "run")]
    assert scales[1] == scales[0] / 2
    assert max(map(max, calls)) < 100  # unscaled before they are clipped: the scale is 65536
    weights_before = weights(tmp_path / "run", 4)
    train(dtype="float16", max_steps=6, checkpoint_interval=2, resume=True)
    assert load_train_state(tmp_path / "run" / "step_000006")["optimizer"]["scaler"]["scale"] == scales[1]
    assert weights(tmp_path / "run", 6) != weights_before


@pytest.mark.parametrize("capability, dtype", [((7, 0), "float16"), ((7, 5), "float16"), ((8, 0), "bfloat16")])
def test_the_precision_follows_from_the_gpu_and_says_why(monkeypatch, capability, dtype):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    chosen, why = runtime._choose_dtype("auto", torch.device("cuda"))
    assert chosen == getattr(torch, dtype) and f"{capability[0]}.{capability[1]}" in why


@pytest.fixture
def kernels(monkeypatch):
    """Three attention kernels, of which the last is absent: {name: (seconds, what it makes of the right output)}.

    The clock is a stand-in that the kernels themselves move on, so that a busy machine changes nothing.
    """
    found, now, in_use, turns, real = {}, [0.0], [""], [], trials.scaled_dot_product_attention

    def attention(*args, **kwargs):
        y = real(*args, **kwargs)
        if torch.backends.cuda.flash_sdp_enabled():  # else it is the formula that is asked for
            turns.append(in_use[0])
            if in_use[0] == "absent":
                raise RuntimeError("No available kernel")
            seconds, spoil = found[in_use[0]]
            now[0] += seconds
            y = spoil(y)
        return y

    monkeypatch.setattr(trials, "attention_kernels", lambda *_: [*found, "absent"])
    monkeypatch.setattr(trials, "use_kernel", lambda name: in_use.__setitem__(0, name))
    monkeypatch.setattr(trials, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(trials.time, "perf_counter", lambda: now[0])
    return types.SimpleNamespace(found=found, in_use=in_use, turns=turns)


def right(y):
    return y


@pytest.mark.parametrize("seconds, fastest", [((2, 1), "two"), ((1, 2), "one")])
def test_the_fastest_attention_kernel_is_left_on(kernels, seconds, fastest):
    kernels.found.update(one=(seconds[0], right), two=(seconds[1], right))
    rt = runtime.Runtime.setup("cpu", "float32")
    assert trials.choose_attention_kernel(rt, (2, 2, 16, 8)) == fastest
    assert kernels.in_use == [fastest]
    assert kernels.turns[:6] == ["one", "two", "absent"] * 2  # in turns, or the first would be timed by a slow clock


WRONG = {
    "output": lambda y: y * 1.05,
    "gradient": lambda y: y + 0.05 * (y - y.detach()),
    "the last sequence alone": lambda y: torch.cat([y[:-1], 1.05 * y[-1:]]),
    "not finite": lambda y: y / torch.zeros(()) * 0.0,
}


@pytest.mark.parametrize("kind", WRONG)
def test_an_attention_kernel_that_is_fast_and_wrong_is_not_used(kernels, kind, capsys):
    kernels.found.update(one=(2, right), two=(1, WRONG[kind]))
    rt = runtime.Runtime.setup("cpu", "float32")
    assert trials.choose_attention_kernel(rt, (2, 2, 16, 8)) == "one" and kernels.in_use == ["one"]
    assert "two" in capsys.readouterr().out
    kernels.found.update(one=(2, WRONG[kind]))
    assert trials.choose_attention_kernel(rt, (2, 2, 16, 8)) == "" and kernels.in_use == [""]


def test_ranks_choose_the_attention_kernel_that_is_fastest_for_all_and_right_on_all(kernels, monkeypatch):
    kernels.found.update(one=(3, right), two=(2, right), three=(1, right))
    others = iter([torch.tensor([1.0, 3.0, 1.0, math.inf]), torch.tensor(0), torch.tensor(1)])  # of a second rank
    monkeypatch.setattr(runtime.Runtime, "sum", lambda self, tensor: tensor + next(others))
    rt = dataclasses.replace(runtime.Runtime.setup("cpu", "float32"), world_size=2)
    # three is the fastest and wrong on the other rank, then one, though two is faster here
    assert trials.choose_attention_kernel(rt, (2, 2, 16, 8)) == "one"


def test_a_flash_attention_package_takes_the_place_of_pytorch_s_own_and_gives_it_back(monkeypatch):
    active, switches = [None], {}
    attention = torch.nn.attention
    monkeypatch.setattr(attention, "list_flash_attention_impls", lambda: ["FA3"], raising=False)
    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: active[0], raising=False)
    monkeypatch.setattr(attention, "restore_flash_attention_impl", lambda: active.__setitem__(0, None), raising=False)
    activate = partial(active.__setitem__, 0)
    monkeypatch.setattr(attention, "activate_flash_attention_impl", activate, raising=False)
    for name in ("flash", "cudnn"):
        switch = partial(switches.__setitem__, name)
        monkeypatch.setattr(torch.backends.cuda, f"enable_{name}_sdp", switch)
    assert trials.attention_kernels("cuda", dropout=0.0) == ["flash", "cudnn", "FA3"]
    assert trials.attention_kernels("cuda", dropout=0.1) == ["flash", "cudnn"]  # which has no dropout
    seen = []
    for name in ("FA3", "FA3", "flash", "FA3", "cudnn", ""):
        trials.use_kernel(name)
        seen.append((active[0], switches["flash"], switches["cudnn"]))
    fa3, flash, cudnn, none = ("FA3", True, False), (None, True, False), (None, False, True), (None, False, False)
    assert seen == [fa3, fa3, flash, fa3, cudnn, none]


def test_a_pytorch_without_flash_attention_packages_has_its_own_two_kernels(monkeypatch):
    for name in ("list", "current", "restore", "activate"):
        for end in ("s", ""):
            monkeypatch.delattr(torch.nn.attention, f"{name}_flash_attention_impl{end}", raising=False)
    assert trials.attention_kernels("cuda", dropout=0.0) == ["flash", "cudnn"]
    before = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled()
    try:
        trials.use_kernel("cudnn")
        assert not torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_flash_sdp(before[0])
        torch.backends.cuda.enable_cudnn_sdp(before[1])


def test_where_there_is_one_attention_kernel_there_is_no_choice():
    assert trials.choose_attention_kernel(runtime.Runtime.setup("cpu", "float32"), (2, 2, 16, 8)) == ""


@pytest.mark.parametrize(
    "dtype, length, expected", [("bfloat16", 64, "naive"), ("bfloat16", 4096, "flash"), ("float32", 64, "flash")]
)
def test_attention_follows_from_the_precision_on_a_processor(dtype, length, expected):
    rt = runtime.Runtime.setup("cpu", dtype)
    assert trials.choose_attention("auto", rt, length) == expected
    assert [trials.choose_attention(given, rt, length) for given in ("flash", "naive")] == ["flash", "naive"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
def test_precisions_agree_on_a_gpu(train, tmp_path, dtype):
    size = dict(device="cuda", n_layer=6, n_head=6, n_embd=384, sequence_length=256, total_batch_size=8192)
    size |= dict(micro_batch_size=0, max_steps=50, checkpoint_interval=0, warmup_steps=10, max_lr=1e-3)
    for name in ("float32", dtype):
        result = train(out=name, dtype=name, **size)
        assert "micro_batch_size 32 fits" in result.stdout and "GiB at its peak" in result.stdout
    for ours, single in zip(log_of(tmp_path / dtype, "train"), log_of(tmp_path / "float32", "train"), strict=True):
        assert ours["loss"] == pytest.approx(single["loss"], rel=0.02), ours["step"]


# ---- memory


def test_activation_checkpointing_changes_memory_and_no_number(train, tmp_path):
    for out, switch in (("plain", {}), ("checkpointed", dict(activation_checkpointing=True))):
        assert train(out=out, max_steps=6, dropout=0.1, **switch).returncode == 0
    assert losses(tmp_path / "plain") == losses(tmp_path / "checkpointed")
    saved = {}
    for switch in (False, True):
        model = GPT(GPTConfig(sequence_length=64, vocab_size=64, n_layer=4, n_head=2, n_embd=32))
        if switch:
            trials.checkpoint_activations(model.transformer.h)
        idx, sizes = torch.zeros(2, 64, dtype=torch.long), {}

        def pack(tensor, sizes=sizes):
            sizes[tensor.data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(idx, idx)
        saved[switch] = sum(sizes.values()) - sum(p.numel() for p in model.parameters() if p.data_ptr() in sizes)
    assert saved[True] < saved[False] / 4


# ---- what is logged


def test_a_bad_step_is_counted_and_the_log_stays_json(train, tmp_path, monkeypatch):
    real, calls = torch.nn.utils.get_total_norm, []

    def poisoned(grads, *args):
        calls.append(0)
        if len(calls) in (2, 4):
            grads[0][0] = math.nan
        return real(grads, *args)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    monkeypatch.setattr(torch.nn.utils, "get_total_norm", poisoned)
    train(max_steps=5)
    lines = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [r["skipped_steps"] for r in records if r["kind"] == "train"] == [0, 1, 1, 2, 2]
    assert all(0 < r["memory_gib"] < 100 for r in records if r["kind"] == "train")
    train(max_steps=7, resume=True)
    assert log_of(tmp_path / "run", "train")[-1]["skipped_steps"] == 2


def test_tensorboard_gets_every_number(train, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert train(max_steps=4, report_to="tensorboard", eval_interval=2).returncode == 0
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    logged = log_of(tmp_path / "run", "train")
    for key in ("loss", "lr", "grad_norm", "tokens_per_sec", "memory_gib", "skipped_steps"):
        assert [e.value for e in events.Scalars(f"train/{key}")] == pytest.approx([r[key] for r in logged], rel=1e-5)
    assert [e.step for e in events.Scalars("val/loss")] == [2, 4]


def test_wandb_gets_every_number(train, tmp_path, monkeypatch):
    seen, ended = [], []
    fake = types.ModuleType("wandb")
    fake.init = lambda **options: seen.append(options)
    fake.log = lambda numbers, step: seen.append((step, numbers))
    fake.finish = lambda: ended.append(len(seen))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    assert train(max_steps=2, report_to="wandb").returncode == 0
    assert ended == [len(seen)]  # after the last number
    assert seen[0]["config"]["n_embd"] == 32 and seen[0]["dir"] == str(tmp_path / "run")
    logged = {(step, *item) for step, numbers in seen[1:] for item in numbers.items()}
    for r in log_of(tmp_path / "run", "train"):
        assert (r["step"], "train/loss", r["loss"]) in logged and (r["step"], "train/skipped_steps", 0) in logged


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_tracker_says_what_to_install(train, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert_user_error(train(report_to=name), f"pip install {name}")


# ---- kills


@pytest.mark.slow
def test_two_hundred_kills_in_one_chain_lose_nothing(tmp_path):
    """SIGKILL while the tokenizer is trained, in saves, in pruning, in evaluations, while the log is rewritten, and at
    random moments: at the end are the weights, the figures and the log of a run that nobody disturbed."""
    succeed("train_gpt2.py", "tiny", out_dir=tmp_path / "undisturbed" / "run", timeout=1800, **CHAIN)
    run, rng, kills, announced = tmp_path / "killed" / "run", random.Random(1), Counter(), set()
    words = command("train_gpt2.py", "tiny", out_dir=run, resume=True, **CHAIN)
    for number in range(1000):
        kind = "training the tokenizer" if number < 20 else MOMENTS[number % len(MOMENTS)]
        has_come = moment(run, kind, rng) if kills.total() < 200 else lambda: False
        with open(tmp_path / "stdout", "w+") as out, open(tmp_path / "stderr", "w+") as errors:
            process = subprocess.Popen(words, env=environment(), stdout=out, stderr=errors)
            while process.poll() is None and not has_come():
                time.sleep(0.0003)
        if process.poll() is None:
            process.kill()
            kills[kind] += 1
        assert process.wait() in (0, -signal.SIGKILL), (tmp_path / "stderr").read_text()[-2000:]
        announced |= set(re.findall(r"saved (\S+)", (tmp_path / "stdout").read_text()))
        newest = max(announced, default=None)  # steps have six digits
        assert newest is None or damage(Path(newest)) is None, newest
        if process.returncode == 0:
            break
    print(dict(kills), len(announced), "announced checkpoints")
    assert kills.total() == 200 and all(kills[kind] >= 10 for kind in MOMENTS), kills
    assert_same_run(run, tmp_path / "undisturbed" / "run")


CHAIN = dict(max_steps=1200, checkpoint_interval=5, keep_checkpoints=2, eval_interval=10, eval_steps=2,
             sample_interval=50, sample_tokens=8, micro_batch_size=16, device="cpu", compile="off")  # fmt: skip
MOMENTS = ("in a save", "in pruning", "in an evaluation", "rewriting the log", "at random")


def moment(run: Path, kind: str, rng: random.Random) -> Callable[[], bool]:
    """A function that, asked again and again, says whether the moment to kill a run has come."""
    begun, delay, first = time.time(), rng.random(), []
    before = set(run.glob("step_*"))

    def after(happened: bool, seconds: float) -> bool:
        """`seconds` after something has happened for the first time"""
        if happened and not first:
            first.append(time.time())
        return bool(first) and time.time() >= first[0] + seconds

    def has_come() -> bool:
        if time.time() > begun + 60:  # a moment of milliseconds can be missed: another one will do
            return True
        if kind == "training the tokenizer":
            return after(any((run.parent / "cache").glob(".*.lock")), 0.7 * delay)
        if kind == "rewriting the log":
            return any(run.glob(".*.jsonl.*.tmp")) or any(run.glob(".samples.txt.*.tmp"))
        if kind == "at random":
            return time.time() > begun + 10 * delay
        if set(run.glob("step_*")) <= before:  # first a checkpoint, or the chain would never come to its end
            return False
        if kind == "in a save":
            return any(run.glob(".step_*.tmp/*"))
        if kind == "in pruning":
            return after(len(list(run.glob("step_*"))) > 3, 0.004 * delay)
        return after(is_evaluated(run / "log.jsonl"), 0.03 * delay)

    return has_come


def is_evaluated(log: Path) -> bool:
    """Whether the newest record is that of a step after which an evaluation is due."""
    with suppress(OSError, ValueError, IndexError):
        last = json.loads(log.read_bytes().splitlines()[-1])
        return last["kind"] == "train" and last["step"] % CHAIN["eval_interval"] == 0
    return False


def assert_same_run(one: Path, other: Path) -> None:
    """The same weights, bit for bit, and logs with the same figures, complete, every line of them JSON."""
    assert weights(one, 1200) == weights(other, 1200)
    assert [r["step"] for r in log_of(one, "train")] == list(range(1, 1201))
    figures_of = {"train": "step loss lr grad_norm tokens", "val": "step loss bpb", "sample": "step text"}
    for kind, names in figures_of.items():
        figures = [[[record[name] for name in names.split()] for record in log_of(run, kind)] for run in (one, other)]
        assert figures[0] == figures[1] and figures[0], kind
    for names in ("step_*", "samples.txt", ".step_*", ".log*", ".samples*"):
        assert [p.name for p in sorted(one.glob(names))] == [p.name for p in sorted(other.glob(names))]
    assert (one / "samples.txt").read_bytes() == (other / "samples.txt").read_bytes()
