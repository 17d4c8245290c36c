"""Precisions, attention kernels and recomputed activations: other ways to the same numbers."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from benchmarks.steps import mfu
from model import GPT, GPTConfig, residual_dtype
from parts import runtime, trials
from parts.checkpoint import checkpoint_steps, load_train_state
from parts.cli import UserError
from parts.loss import plain_cross_entropy
from parts.optim import make_optimizer
from tests.helpers import assert_refused, column, losses, seeded, spoil_gradients, weights
from tests.test_model import small
from train_gpt2 import Config


def test_the_scale_of_fp16_halves_after_a_bad_step_and_is_resumed(train, run_dir, monkeypatch):
    spoil_gradients(monkeypatch, lambda step: step == 3, math.inf)
    train(dtype="float16", max_steps=4, checkpoint_interval=2)
    scales = [load_train_state(path)["optimizer"]["scaler"]["scale"] for _, path in checkpoint_steps(run_dir)]
    assert scales[1] == scales[0] / 2
    norms = column(run_dir, "train", "grad_norm")
    assert norms.pop(2) is None
    assert max(norms) < 100  # unscaled before they are clipped: the scale is 65536
    weights_before = weights(run_dir, 4)
    train(dtype="float16", max_steps=6, checkpoint_interval=2, resume=True)
    assert load_train_state(run_dir / "step_000006")["optimizer"]["scaler"]["scale"] == scales[1]
    assert weights(run_dir, 6) != weights_before


# ---- what follows from the machine


@pytest.fixture
def h100(monkeypatch):
    """A machine with one, as far as its owner can tell."""
    facts = dict(is_available=True, device_count=1, set_device=None, get_device_capability=(9, 0))
    facts |= dict(get_device_name="NVIDIA H100 80GB HBM3")
    for name, fact in facts.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, fact=fact: fact)
    yield runtime.Runtime.setup("cuda", "bfloat16")
    torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.mark.parametrize("capability, dtype", [((7, 5), "float16"), ((8, 0), "bfloat16")])
def test_the_precision_follows_from_the_gpu(h100, monkeypatch, capability, dtype):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert runtime.Runtime.setup("cuda", "auto").dtype == getattr(torch, dtype)


@pytest.mark.parametrize("native, dtype", [("avx512_bf16", "bfloat16"), ("amx_tile", "bfloat16"), ("", "float32")])
def test_16_bits_are_chosen_where_the_processor_multiplies_them(monkeypatch, native, dtype):
    for name in ("avx512_bf16", "amx_tile"):
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda it=name: it == native)
    assert runtime.Runtime.setup("cpu", "auto").dtype == getattr(torch, dtype)


# ---- losses


@pytest.mark.parametrize("chunked", [True, False])
def test_an_evaluation_does_not_round_logits_to_bf16(monkeypatch, chunked):
    """They are around -100, as GPT-2's are; a step, which rounds them, is far off."""
    monkeypatch.setattr(GPT, "CHUNKED_LOSS", chunked)
    generator = seeded()
    model = GPT(GPTConfig(vocab_size=500, n_layer=1, n_head=1, n_embd=64))
    model.lm_head.weight.data = torch.randn(500, 64, generator=generator) - 2
    x = 0.2 * torch.randn(1, 300, 64, generator=generator) + 0.8
    targets = torch.randint(500, (1, 300), generator=generator)
    exact = plain_cross_entropy(x[0], model.lm_head.weight, targets[0]).item() / 300
    with torch.autocast("cpu", torch.bfloat16):
        step = model.loss(x, targets).item()
        with torch.no_grad():
            evaluation = model.loss(x, targets).item()
    assert evaluation == pytest.approx(exact, rel=1e-6)
    assert abs(step / exact - 1) > 1e-4


RESIDUAL = [  # (device, autocast's dtype, the residual stream's)
    ("cuda", torch.bfloat16, torch.bfloat16),
    ("cuda", torch.float16, torch.float32),
    ("cuda", None, torch.float32),
    ("cpu", torch.bfloat16, torch.float32),
]


@pytest.mark.parametrize("device, products, expected", RESIDUAL)
def test_the_residual_stream_is_in_bf16_where_a_gpu_multiplies_in_bf16(monkeypatch, device, products, expected):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda asked: bool(products))
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda asked: products)
    embeddings = SimpleNamespace(device=torch.device(device), dtype=torch.float32)
    assert residual_dtype(embeddings) == expected


def test_whoever_asks_for_fp32_does_not_get_tf32():
    found = {}
    for dtype in ("float32", "bfloat16"):
        runtime.Runtime.setup("cpu", dtype)
        found[dtype] = torch.get_float32_matmul_precision()
    assert found == dict(float32="highest", bfloat16="high")


def test_cudnn_attends_only_in_steps_of_one_shape(h100, monkeypatch):
    from torch._inductor import compile_fx

    found = []
    monkeypatch.setattr(compile_fx, "compile_fx", lambda *_, **__: found.extend(_cur_sdpa_kernel_backends()))
    with FakeTensorMode():
        runtime.static_shapes(None, [torch.empty(1, device="cuda")])
    assert SDPBackend.CUDNN_ATTENTION in found
    assert SDPBackend.CUDNN_ATTENTION not in _cur_sdpa_kernel_backends()


def test_mfu_is_the_fraction_of_the_peak_of_all_ranks(h100):
    rt = replace(h100, world_size=8)
    assert rt.peak_flops() == 8 * 989e12
    assert mfu(1e6, 0.8e9, rt) == pytest.approx(0.8e15 / (8 * 989e12))


@pytest.mark.parametrize(
    "dtype, length, expected", [("bfloat16", 1024, "naive"), ("bfloat16", 1025, "flash"), ("float32", 64, "flash")]
)
def test_attention_follows_from_the_precision_on_a_processor(dtype, length, expected):
    rt = runtime.Runtime.setup("cpu", dtype)
    assert trials.choose_attention("auto", rt, length) == expected
    assert [trials.choose_attention(given, rt, length) for given in ("flash", "naive")] == ["flash", "naive"]


def test_a_name_that_nobody_has_added_names_the_function_to_extend(rt):
    assert_refused("window_2.* choose_attention ", trials.choose_attention, "window_2", rt, 64)
    assert_refused("float8_2.* _choose_dtype ", runtime.Runtime.setup, "cpu", "float8_2")


def test_a_micro_batch_on_a_processor_has_at_most_4096_tokens(rt):
    assert [trials.find_micro_batch_size(None, 64, T, rt, None) for T in (64, 65, 5000)] == [64, 32, 1]


# ---- what fits


def test_a_micro_batch_on_a_gpu_is_the_largest_divisor_of_at_most_256_that_fits(rt):
    """On a card that is full above ten sequences. The steps of the trials leave no trace."""
    model = small()
    model.register_buffer("n_seen", torch.zeros(()))  # as a BatchNorm keeps
    params = list(model.parameters())
    before = [p.clone() for p in params]
    optimizer = make_optimizer(model, Config(), rt)
    tried = []
    kept = set()  # gradients and moments, during the forward pass

    def allocate(module, args):
        tried.append(len(args[0]))
        module.n_seen += 1
        kept.add((all(p.grad is not None for p in params), len(optimizer.optimizers[0].state)))
        if len(args[0]) > 10:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.register_forward_pre_hook(allocate)
    sizes = [256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6]
    assert trials.largest_that_fits(model, sizes, 16, rt, lambda: optimizer) == 8
    assert tried == sizes[:-1]
    assert kept == {(True, len(params))}
    assert all(map(torch.equal, params, before))
    assert model.n_seen == 0
    assert all(p.grad is None for p in params)
    with pytest.raises(UserError):
        trials.largest_that_fits(model, [128], 16, rt, lambda: optimizer)


def test_activation_checkpointing_changes_no_number(train, tmp_path):
    for out, switch in (("plain", {}), ("checkpointed", dict(activation_checkpointing=True))):
        train(out=out, max_steps=2, dropout=0.1, **switch)
    assert losses(tmp_path / "plain") == losses(tmp_path / "checkpointed")
