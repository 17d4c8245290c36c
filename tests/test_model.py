"""The model against transformers, closed forms and naive versions."""

import json
import math
import os
import warnings

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import fp8
import loss as loss_module
from cli import UserError
from data import IGNORED
from fp8 import Float8Linear, Float8Product, by_dlogits, by_weights, use_float8
from loss import LinearCrossEntropy, chunk_size, linear_cross_entropy
from model import GPT, SIZES, GPTConfig, read_config, sample_tokens
from trials import checkpoint_activations

warnings.filterwarnings("ignore")

SMALL = dict(sequence_length=32, vocab_size=211, n_layer=2, n_head=2, n_embd=32)


def small(**kwargs) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**SMALL, **kwargs})).eval()


def tokens(*shape, seed=0, vocab=211):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


# ---- against transformers


@pytest.mark.parametrize("size", SIZES)
def test_logits_equal_those_of_transformers_in_both_directions(size, tmp_path):
    shape = SIZES[size] | {"n_layer": 2}
    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config(vocab_size=500, n_positions=64, bos_token_id=1, eos_token_id=1, **shape)).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    idx = tokens(2, 64, vocab=500)
    with torch.no_grad():
        ours = GPT.from_pretrained(tmp_path / "theirs").eval()
        assert (ours(idx)[0] - theirs(idx).logits).abs().max() < 1e-4
        made = GPT(GPTConfig(sequence_length=64, vocab_size=500, **shape)).eval()
        made.save_pretrained(tmp_path / "ours", eos_token_id=1)
        read = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
        assert (made(idx)[0] - read(idx).logits).abs().max() < 1e-4


def test_hub_files_without_prefix_and_with_masks_and_a_head_copy_are_read(tmp_path):
    from safetensors.torch import load_file, save_file

    model = small()
    model.save_pretrained(tmp_path)
    state = {k.removeprefix("transformer."): v for k, v in load_file(tmp_path / "model.safetensors").items()}
    state |= {"h.0.attn.bias": torch.ones(1, 1, 32, 32), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    state["lm_head.weight"] = state["wte.weight"].clone()
    save_file(state, tmp_path / "model.safetensors")
    idx = tokens(1, 8)
    assert torch.equal(GPT.from_pretrained(tmp_path)(idx)[0], model(idx)[0])


def test_the_tied_head_is_stored_once(tmp_path):
    from safetensors.torch import load_file

    small().save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "lm_head.weight" not in names and "transformer.wte.weight" in names


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path):
    theirs = GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_positions=8, n_layer=1, n_head=1, n_embd=8, activation_function="relu")
    )
    theirs.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="activation_function is 'relu'"):
        GPT.from_pretrained(tmp_path)


def test_missing_or_extra_tensors_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    small().save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file({k: v for k, v in state.items() if "ln_f" not in k}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="ln_f"):
        GPT.from_pretrained(tmp_path)
    save_file(state | {"_orig_mod.extra": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="_orig_mod"):
        GPT.from_pretrained(tmp_path)


@pytest.fixture
def saved(tmp_path):
    small().save_pretrained(tmp_path)
    return tmp_path


CONFIG = dict(model_type="gpt2", vocab_size=211, n_positions=32, n_embd=32, n_layer=2, n_head=2)
MALFORMED = {
    "empty": b"", "one byte": b"{", "half": json.dumps(CONFIG).encode()[:40], "no JSON": b"\x89PNG\r\n\x1a\n",
    "not UTF-8": b'{"model_type": "\xff\xfe"}', "a list": b"[1, 2]", "a word": b'"gpt2"', "null": b"null",
    "deep": b"[" * 100_000, "deep inside": b'{"a":' * 100_000, "long number": b'{"n_layer": ' + b"9" * 5000 + b"}",
} | {
    f"{key} {value!r}": json.dumps(CONFIG | {key: value}).encode()
    for key, values in dict(
        n_layer=(0, -1, 2**70, 10**12, 2.0, "2", None, [2], {}, True, math.nan, math.inf), n_embd=(0, 33, None, 10**12),
        n_head=(0, 3, "x"), vocab_size=(-5, 1e30), n_positions=(None, 0), n_inner=(7, "x", [1]),
        model_type=("llama", None, 3), activation_function=("relu", None, []), layer_norm_epsilon=(1e-6, math.nan),
        tie_word_embeddings=(False, None), scale_attn_weights=(False,), scale_attn_by_inverse_layer_idx=(True,),
        add_cross_attention=(True,),
    ).items() for value in values
} | {f"no {key}": json.dumps({k: v for k, v in CONFIG.items() if k != key}).encode() for key in CONFIG}  # fmt: skip


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_config_is_refused_by_name(saved, kind):
    (saved / "config.json").write_bytes(MALFORMED[kind])
    for read in (read_config, GPT.from_pretrained):
        with pytest.raises(ValueError, match="config.json"):
            read(saved)


@pytest.mark.parametrize("n_layer", [3, 1000, 2**20])
def test_more_layers_than_the_weights_have_are_refused_at_once(saved, n_layer):
    (saved / "config.json").write_text(json.dumps(CONFIG | dict(n_layer=n_layer)))
    with pytest.raises(ValueError, match="config.json"):
        GPT.from_pretrained(saved)


def test_a_missing_or_unreadable_file_is_refused_by_name(saved):
    (saved / "model.safetensors").unlink()
    assert read_config(saved).n_layer == 2  # no weights are needed for that
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        GPT.from_pretrained(saved)
    (saved / "model.safetensors").mkdir()
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        GPT.from_pretrained(saved)
    (saved / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json"):
        read_config(saved)
    (saved / "config.json").mkdir()
    with pytest.raises(ValueError, match=r"config\.json"):
        read_config(saved)


def test_the_sizes_are_read_without_the_weights(saved):
    config = read_config(saved, dropout=0.1, attention="naive")
    assert config == GPTConfig(**SMALL, dropout=0.1, attention="naive")


BROKEN = {
    "empty": lambda data: b"", "one byte": lambda data: data[:1], "header cut": lambda data: data[:300],
    "cut in half": lambda data: data[: len(data) // 2], "last byte missing": lambda data: data[:-1],
    "a byte too many": lambda data: data + b"x", "other format": lambda data: b"PK\x03\x04" + data,
    "text": lambda data: b"hello " * 99, "header flipped": lambda data: data[:40] + b"\xff" + data[41:],
    "header of nonsense": lambda data: b"\xff" * 8 + data[8:], "deep header": lambda data: deep_header(),
}  # fmt: skip


def deep_header() -> bytes:
    header = b'{"a":' * 50_000
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_weights_are_refused_by_name(saved, kind):
    file = saved / "model.safetensors"
    file.write_bytes(BROKEN[kind](file.read_bytes()))
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        GPT.from_pretrained(saved)


@pytest.mark.parametrize("wrong", [torch.full((32,), math.nan), torch.full((32,), math.inf), torch.ones(32).int()])
def test_weights_that_are_no_finite_fractions_are_refused(saved, wrong):
    from safetensors.torch import load_file, save_file

    state = load_file(saved / "model.safetensors") | {"transformer.ln_f.bias": wrong}
    save_file(state, saved / "model.safetensors")
    with pytest.raises(ValueError, match=r"ln_f\.bias"):
        GPT.from_pretrained(saved)


def test_weights_in_several_files_and_in_16_bits_are_read(saved):
    from safetensors.torch import load_file, save_file

    state = {k: v.bfloat16() for k, v in load_file(saved / "model.safetensors").items()}
    (saved / "model.safetensors").unlink()
    names = sorted(state)
    for i, part in enumerate((names[::2], names[1::2])):
        save_file({name: state[name] for name in part}, saved / f"model-0000{i + 1}-of-00002.safetensors")
    read = GPT.from_pretrained(saved)
    for p, q in zip(read.parameters(), small().parameters(), strict=True):
        assert p.dtype == torch.float32 and torch.equal(p, q.bfloat16().float())
    assert read.lm_head.weight is read.transformer.wte.weight


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_all_files_of_a_checkpoint_follow_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        small().save_pretrained(tmp_path / "model")
    finally:
        os.umask(before)
    assert {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "model").iterdir()} == dict.fromkeys(
        ("config.json", "generation_config.json", "model.safetensors"), mode
    )


# ---- numbers that are known


def test_gpt2_has_124439808_parameters():
    with torch.device("meta"):
        assert GPT(GPTConfig()).num_params() == 124_439_808


def test_loss_at_initialization_is_near_that_of_a_uniform_guess():
    torch.manual_seed(0)
    model = GPT(GPTConfig(sequence_length=128, vocab_size=50304, n_layer=2, n_head=4, n_embd=256))
    _, loss = model(tokens(4, 128, vocab=50304), tokens(4, 128, seed=1, vocab=50304))
    assert abs(loss.item() - math.log(50304)) < 0.3


def test_residual_projections_start_smaller():
    torch.manual_seed(0)
    block = GPT(GPTConfig(n_layer=8, vocab_size=64, sequence_length=8)).transformer.h[3]
    assert block.mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert block.attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.02)
    for proj in (block.attn.c_proj, block.mlp.c_proj):
        assert proj.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.02)
        assert not proj.bias.any()


def test_flops_follow_the_stated_formula():
    with torch.device("meta"):
        model = GPT(GPTConfig())
    matmul_params = 124_439_808 - 1024 * 768
    assert model.estimate_flops() == 6 * matmul_params + 12 * 12 * 768 * 1024


# ---- attention and loss against naive versions


def test_naive_attention_equals_scaled_dot_product_attention():
    flash, naive = small(), small(attention="naive")
    idx, targets = tokens(3, 32), tokens(3, 32, seed=1)
    losses = [model(idx, targets)[1] for model in (flash, naive)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    for p, q in zip(flash.parameters(), naive.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)


def loss_case(n=64, channels=16, vocab=50, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, channels, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, channels, generator=generator, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocab, (n,), generator=generator)
    targets[::5] = IGNORED
    return x, weight, targets


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_chunked_loss_and_gradients_equal_cross_entropy(chunk):
    x, weight, targets = loss_case()
    loss = LinearCrossEntropy.apply(x, weight, targets, chunk, True)
    grads = torch.autograd.grad(3 * loss, (x, weight))
    expected = F.cross_entropy(x @ weight.T, targets, reduction="sum")
    expected_grads = torch.autograd.grad(3 * expected, (x, weight))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for grad, want in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-12, atol=1e-12)


def test_the_compiled_loss_has_the_same_gradients_and_no_scatter(monkeypatch):
    """A scatter cannot be fused: it makes passes over all logits of what a comparison does on the way."""
    monkeypatch.setitem(loss_module.LOSS_CHUNK, "cpu", 0)  # 256 positions a chunk
    operators = []

    def record(module, inputs):
        operators.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=record, bw_compiler=record, decompositions=select_decomp_table())
    x, weight, targets = loss_case(n=600)
    loss = torch.compile(linear_cross_entropy, backend=backend, fullgraph=True)(x, weight, targets)
    grads = torch.autograd.grad(loss, (x, weight))
    expected = F.cross_entropy(x @ weight.T, targets, reduction="sum")
    for grad, want in zip(grads, torch.autograd.grad(expected, (x, weight)), strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-12, atol=1e-12)
    assert sum("mm" in name for name in operators) == 9  # three products for each of three chunks
    assert not [name for name in operators if "scatter" in name or "index_put" in name]


def test_the_gradient_of_fp32_weights_is_summed_in_fp32(monkeypatch):
    monkeypatch.setitem(loss_module.LOSS_CHUNK, "cpu", 0)
    x, weight, targets = loss_case(n=2048, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (grad,) = torch.autograd.grad(linear_cross_entropy(x, weight, targets), weight)
    assert grad.dtype == torch.float32 and not torch.equal(grad, grad.bfloat16().float())


def test_a_frozen_head_gets_no_gradient():
    x, weight, targets = loss_case(dtype=torch.float32)
    linear_cross_entropy(x, weight.detach(), targets).backward()
    assert x.grad is not None and weight.grad is None


@pytest.mark.parametrize("n_positions", [1, 1024, 8 * 1024, 64 * 1024])
def test_logits_of_a_gpu_are_a_quarter_of_a_large_batch_and_all_of_a_small_one(n_positions):
    chunk = chunk_size(n_positions, 50304, "cuda")
    assert chunk % 256 == 0
    assert chunk * 50304 <= 2**29
    assert chunk >= n_positions / 4 - 256 or chunk * 50304 > 2**29 - 256 * 50304
    assert chunk * 50304 <= 2**27 or chunk <= n_positions / 4


def test_ignored_targets_do_not_count():
    model, idx, targets = small(), tokens(1, 8), tokens(1, 8, seed=1)
    targets[:, 3:] = IGNORED
    expected = F.cross_entropy(model(idx)[0][0, :3], targets[0, :3])
    assert model(idx, targets)[1].item() == pytest.approx(expected.item(), rel=1e-6)


def test_gradients_do_not_depend_on_the_micro_batch_size():
    model, idx, targets = small(), tokens(8, 32), tokens(8, 32, seed=1)
    grads = {}
    for size in (1, 2, 4, 8):
        model.zero_grad()
        for x, y in zip(idx.split(size), targets.split(size), strict=True):
            model(x, y, n_targets=idx.numel())[1].backward()
        grads[size] = torch.cat([p.grad.flatten() for p in model.parameters()])
    for size in (1, 2, 4):
        assert (grads[size] - grads[8]).norm() < 1e-5 * grads[8].norm()


def test_the_future_does_not_leak():
    model, idx = small(), tokens(1, 32)
    changed = idx.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 211
    before, after = model(idx)[0], model(changed)[0]
    assert torch.equal(before[:, :20], after[:, :20]) and not torch.equal(before[:, 20:], after[:, 20:])


# ---- generation


def greedy_by_hand(model, prompt, n):
    row = list(prompt)
    for _ in range(n):
        window = torch.tensor([row[-model.config.sequence_length :]])
        row.append(model(window)[0][0, -1].argmax().item())
    return row[len(prompt) :]


@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_tokens_of_unequal_prompts_equal_the_naive_loop_past_the_window_too(use_cache):
    model = small()
    with torch.no_grad():
        model.transformer.wpe.weight.mul_(10)
        model.transformer.ln_f.weight.normal_()  # or the tied embedding makes a random model repeat its last token
        prompts = [tokens(n, seed=n).tolist() for n in (1, 5, 30, 50)]
        steps = list(model.generate(prompts, 40, temperature=0, use_cache=use_cache))
        assert len({token for step in steps for token in step}) > 20  # else this proves little
        for i, prompt in enumerate(prompts):
            expected = greedy_by_hand(model, prompt, 40)
            assert [step[i] for step in steps] == expected


def test_a_row_stops_at_the_stop_token_and_the_others_go_on():
    model = small()
    prompts = [[1, 2, 3], [4, 5]]
    free = list(model.generate(prompts, 20, temperature=0))
    stop = free[4][0]
    steps = list(model.generate(prompts, 20, temperature=0, stop_token=stop))
    first = [step[0] for step in free].index(stop)
    assert all(step[0] == stop for step in steps[first:])
    seen = [step[1] for step in free]
    until = seen.index(stop) if stop in seen else len(seen)
    assert [step[1] for step in steps][:until] == seen[:until]


def test_padded_ids_are_never_generated():
    model = small()
    with torch.no_grad():
        model.transformer.wte.weight[200:] *= 50
    ids = {
        i
        for step in model.generate([[1]] * 8, 24, n_tokens=200, generator=torch.Generator().manual_seed(0))
        for i in step
    }
    assert max(ids) < 200


def test_generation_leaves_the_training_mode_as_it_was():
    model = small().train()
    list(model.generate([[1]], 2))
    assert model.training


def test_sampling_follows_the_distribution():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(20_000, 1)
    generator = torch.Generator().manual_seed(0)

    def frequencies(**kwargs):
        return torch.bincount(sample_tokens(logits, generator=generator, **kwargs), minlength=4) / len(logits)

    torch.testing.assert_close(frequencies(), torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=0.02, rtol=0)
    torch.testing.assert_close(frequencies(top_k=2), torch.tensor([0.625, 0.375, 0, 0]), atol=0.02, rtol=0)
    torch.testing.assert_close(frequencies(top_p=0.8), torch.tensor([0.625, 0.375, 0, 0]), atol=0.02, rtol=0)
    torch.testing.assert_close(frequencies(top_p=0.81), torch.tensor([10 / 19, 6 / 19, 3 / 19, 0]), atol=0.02, rtol=0)
    squared = torch.tensor([0.25, 0.09, 0.0225, 0.0025])
    torch.testing.assert_close(frequencies(temperature=0.5), squared / squared.sum(), atol=0.02, rtol=0)
    assert frequencies(temperature=0)[0] == 1
    assert frequencies(top_p=0.0)[0] == 1


# ---- 8-bit products


@pytest.fixture(params=["public", "private"])
def scaled_mm(request, monkeypatch):
    """PyTorch 2.11 has the product in 8 bits under another name only."""
    if request.param == "private":
        monkeypatch.delattr(F, "scaled_mm", raising=False)
    elif not hasattr(F, "scaled_mm"):
        pytest.skip("this PyTorch has no public scaled_mm")


def test_8_bit_products_are_exact_for_what_8_bits_hold(scaled_mm):
    torch.manual_seed(0)
    x = torch.randint(-1, 2, (32, 48)).float().requires_grad_()
    weight = torch.randint(-1, 2, (64, 48)).float().requires_grad_()
    grad = torch.randint(-1, 2, (32, 64)).float()
    Float8Product.apply(x, weight).backward(grad.bfloat16())
    y = Float8Product.apply(x, weight)
    torch.testing.assert_close(y.float(), x @ weight.T, rtol=1e-2, atol=1e-3)  # of bf16, which the result is in
    torch.testing.assert_close(x.grad, grad @ weight, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(weight.grad, grad.T @ x, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(by_weights(x, weight.T).float(), x @ weight.T, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(by_dlogits(grad, weight).float(), grad @ weight, rtol=1e-2, atol=1e-3)


def test_8_bit_products_are_laid_out_as_cuda_wants_them(scaled_mm):
    """On tensors without memory PyTorch checks what it checks on CUDA: rows, columns, multiples of 16."""
    with torch.device("meta"):
        x, weight = torch.empty(1536, 768, dtype=torch.bfloat16, requires_grad=True), torch.empty(50304, 768)
        targets = torch.zeros(1536, dtype=torch.long)
        loss = LinearCrossEntropy.apply(x, weight.requires_grad_(), targets, 1024, True, True)
        assert [grad.dtype for grad in torch.autograd.grad(loss, (x, weight))] == [torch.bfloat16, torch.float32]
        y = Float8Product.apply(x, torch.empty(3072, 768, requires_grad=True))
        assert torch.autograd.grad(y, x, torch.empty_like(y))[0].shape == x.shape
        with pytest.raises(RuntimeError, match="16"):  # it does check
            Float8Product.apply(torch.empty(32, 40), torch.empty(64, 40))


def test_the_scale_that_is_known_for_the_gradient_of_logits_keeps_small_probabilities_and_a_one():
    dlogits = torch.zeros(16, 32)
    dlogits[0, 0], dlogits[1, 1], dlogits[2, 2] = 1.0, 2.0**-30, -1.0
    found = by_dlogits(dlogits.bfloat16(), torch.eye(32).bfloat16())
    assert torch.equal(found.float(), dlogits)


def test_the_loss_in_8_bits_is_close_and_so_are_its_gradients():
    x, weight, targets = loss_case(n=256, channels=64, vocab=128, dtype=torch.float32)
    found = []
    for in_8_bits in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = linear_cross_entropy(x, weight, targets, in_8_bits)
        found.append([loss.detach(), *torch.autograd.grad(loss, (x, weight))])
    for exact, ours in zip(*found, strict=True):
        assert 1e-5 < (ours - exact).norm() / exact.norm() < 0.08  # it is another product, and a close one
    assert found[1][2].dtype == torch.float32


def test_8_bit_products_are_close_and_serve_training_only():
    torch.manual_seed(0)
    model = small(vocab_size=208)
    idx = tokens(32)[None] % 208
    expected, _ = model.eval()(idx)
    expected_loss = model(idx, idx)[1]
    names = list(model.state_dict())
    assert use_float8(model, blocks=True) == ["head", "blocks"]
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model.eval()(idx)[0], expected, rtol=0, atol=0)
    assert model(idx, idx)[1] == expected_loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        close, loss = model.train()(idx)[0], model(idx, idx)[1]
    error = (close.float() - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.05 and loss.item() == pytest.approx(expected_loss.item(), rel=0.05)


@pytest.mark.parametrize("wide, found", [(33, ["head"]), (32, ["head", "blocks"])])
def test_8_bit_products_are_of_the_head_and_of_wide_blocks(monkeypatch, wide, found):
    monkeypatch.setattr(fp8, "WIDE", wide)
    model = small(vocab_size=208)
    assert use_float8(model) == found and model.float8_head
    assert any(isinstance(module, Float8Linear) for module in model.modules()) is ("blocks" in found)


@pytest.mark.parametrize("sizes", [dict(n_embd=24), dict(vocab_size=65)], ids=str)
def test_8_bit_products_refuse_sizes_that_the_hardware_refuses(sizes):
    model = GPT(GPTConfig(**dict(sequence_length=8, vocab_size=64, n_layer=1, n_head=2, n_embd=32) | sizes))
    with pytest.raises(UserError, match="multiples of 16"):
        use_float8(model)


def lively(**kwargs) -> GPT:
    """A random model whose greedy tokens differ from each other."""
    model = small(**kwargs)
    with torch.no_grad():
        model.transformer.wpe.weight.mul_(10)
        model.transformer.ln_f.weight.normal_()
    return model


def test_compiled_generation_makes_the_same_tokens_with_one_graph_that_writes_in_place(monkeypatch):
    from torch._dynamo.utils import counters
    from torch._functorch import config as aot_config
    from torch._inductor import compile_fx

    model = lively()
    prompts = [tokens(n, seed=n).tolist() for n in (1, 5, 20)]
    eager = list(model.generate(prompts, 40, temperature=0))  # past the window
    model.compile_generation()
    torch._dynamo.reset()
    counters.clear()
    operators, real = [], compile_fx.post_grad_passes

    def post_grad_passes(module, *args, **kwargs):
        real(module, *args, **kwargs)
        operators.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")

    monkeypatch.setattr(compile_fx, "post_grad_passes", post_grad_passes)
    # without caches on the disk, or a second run of this test has no graph to see; pytest's own patch would delete
    # these settings afterwards
    with compile_fx.config.patch(fx_graph_cache=False), aot_config.patch(enable_autograd_cache=False):
        assert list(model.generate(prompts, 40, temperature=0)) == eager
        assert list(model.generate([p + [7] for p in prompts], 9, temperature=0)) != eager
    assert counters["stats"]["unique_graphs"] == 1
    # keys and values of two layers, and nothing that copies a cache
    assert [name for name in operators if "index_put" in name] == ["aten.index_put_.default"] * 4
    assert not [name for name in operators if "scatter" in name]


@pytest.fixture
def kept_cache(monkeypatch):
    """A model that keeps its cache from call to call as a compiled one does, but runs eagerly."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    model = lively()
    model.compile_generation()
    return model


def test_a_cache_that_is_used_again_remembers_nothing(kept_cache):
    for lengths in ((20, 30), (3, 1), (7, 9, 2), (4, 6, 25)):
        prompts = [tokens(n, seed=n).tolist() for n in lengths]
        expected = list(lively().generate(prompts, 10, temperature=0))
        assert list(kept_cache.generate(prompts, 10, temperature=0)) == expected


def test_a_cache_that_is_used_again_stays_where_it_is(kept_cache):
    addresses = []
    for prompt in ([1, 2, 3], [4], [5, 6]):
        list(kept_cache.generate([prompt], 4))
        addresses.append([t.data_ptr() for t in kept_cache._kept_cache.k])
    assert addresses[0] == addresses[1] == addresses[2]


def test_two_generators_at_once_do_not_share_a_cache(kept_cache):
    prompts = [[tokens(5, seed=n).tolist()] for n in (1, 2)]
    alone = [list(lively().generate(p, 10, temperature=0)) for p in prompts]
    list(kept_cache.generate([[1]], 2))  # leaves one behind, which only one of them may take
    together = zip(*(kept_cache.generate(p, 10, temperature=0) for p in prompts), strict=True)
    assert [list(steps) for steps in zip(*together, strict=True)] == alone


def test_8_bit_products_and_activation_checkpointing_compile_together_without_a_break():
    """Down to the operators of the backward pass; what fuses them needs a GPU to be of interest."""
    model = small(vocab_size=208, n_layer=1).train()
    use_float8(model, blocks=True)
    checkpoint_activations(model.transformer.h)
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    idx, found = tokens(2, 32) % 208, []
    for forward in (whole, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = forward(idx, idx)[1]
        grads = torch.autograd.grad(loss, tuple(model.parameters()))
        found.append(torch.cat([loss[None], *(grad.flatten() for grad in grads)]))
    assert (found[0] - found[1]).norm() < 0.02 * found[1].norm()
