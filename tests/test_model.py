"""The model against transformers, closed forms and naive versions."""

import json
import math
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from bpe.tokenizer import Tokenizer
from model import GPT, SIZES, GPTConfig
from parts.checkpoint import open_model, save_model
from parts.cli import UserError
from parts.data import IGNORED
from parts.loss import LinearCrossEntropy, chunk_size, linear_cross_entropy, plain_cross_entropy
from tests.helpers import assert_invalid, assert_refused, read_json, seeded, slow, write_json

warnings.filterwarnings("ignore")

SMALL = dict(n_positions=32, vocab_size=211, n_layer=2, n_head=2, n_embd=32)


def small(**kwargs) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**SMALL, **kwargs})).eval()


def tokens(*shape, seed=0, vocab=211):
    return torch.randint(vocab, shape, generator=seeded(seed))


# ---- against transformers


@pytest.mark.parametrize("size", ["gpt2", slow("gpt2-xl")])
def test_logits_equal_those_of_transformers_in_both_directions(size, tmp_path):
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    shape = SIZES[size] | {"n_layer": 2}
    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config(vocab_size=500, n_positions=64, bos_token_id=1, eos_token_id=1, **shape)).eval()
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20MB")  # in several files, which an index lists
    assert (tmp_path / "theirs/model.safetensors.index.json").exists()
    idx = tokens(2, 64, vocab=500)
    with torch.no_grad():
        ours = GPT.from_pretrained(tmp_path / "theirs").eval()
        assert (ours(idx) - theirs(idx).logits).abs().max() < 1e-4
        made = GPT(GPTConfig(n_positions=64, vocab_size=500, **shape)).eval()
        made.save_pretrained(tmp_path / "ours")
        read = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
        assert (made(idx) - read(idx).logits).abs().max() < 1e-4
        read.transformer.h[0].mlp.c_fc.weight.mul_(1.5)  # as training there
        read.save_pretrained(tmp_path / "again")
        again = GPT.from_pretrained(tmp_path / "again").eval()
        assert (again(idx) - read(idx).logits).abs().max() < 1e-4


def test_hub_files_without_prefix_and_with_masks_and_a_head_copy_are_read(tmp_path):
    model = small()
    model.save_pretrained(tmp_path)
    state = {k.removeprefix("transformer."): v for k, v in load_file(tmp_path / "model.safetensors").items()}
    assert "lm_head.weight" not in state  # the tied head is stored once
    state |= {"h.0.attn.bias": torch.ones(1, 1, 32, 32), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    state["lm_head.weight"] = state["wte.weight"].clone()
    save_file(state, tmp_path / "model.safetensors")
    idx = tokens(1, 8)
    assert torch.equal(GPT.from_pretrained(tmp_path)(idx), model(idx))
    state["lm_head.weight"][7, 7] += 1
    save_file(state, tmp_path / "model.safetensors")
    assert_refused("wte.weight", GPT.from_pretrained, tmp_path)


@pytest.fixture
def saved(tmp_path):
    small().save_pretrained(tmp_path)
    return tmp_path


CONFIG = dict(model_type="gpt2", vocab_size=211, n_positions=32, n_embd=32, n_layer=2, n_head=2)
MALFORMED = [b"[1, 2]", json.dumps(CONFIG).encode()[:40]]
WRONG = [
    dict(n_layer=10**12),
    dict(n_layer="2"),
    dict(n_embd=33),
    dict(model_type="llama"),
    dict(layer_norm_epsilon=1e-6),
]
MALFORMED += [json.dumps(CONFIG | change).encode() for change in WRONG]


@pytest.mark.parametrize("content", MALFORMED, ids=lambda content: content[-40:])
def test_a_malformed_config_is_refused_by_name(saved, content):
    (saved / "config.json").write_bytes(content)
    assert_refused("config.json", GPT.from_pretrained, saved)


def test_a_config_without_what_only_we_write_is_enough(saved):
    write_json(saved / "config.json", CONFIG)
    assert torch.equal(GPT.from_pretrained(saved)(tokens(1, 8)), small()(tokens(1, 8)))


def test_no_model_is_made_that_could_not_be_loaded_again():
    assert GPTConfig(**SMALL | dict(n_positions=2**20))
    for value in (2**20 + 2, 0):
        assert_invalid(f"n_positions.*{value}", GPTConfig, **SMALL | dict(n_positions=value))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_missing_file_is_refused_by_name(saved, name):
    (saved / name).unlink()
    assert_refused(name, GPT.from_pretrained, saved, error=(UserError, OSError))


def test_broken_weights_are_refused_by_name(saved):
    file = saved / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    assert_refused("model.safetensors", GPT.from_pretrained, saved)


BIAS = "transformer.ln_f.bias"


@pytest.mark.parametrize("name, wrong", [(BIAS, torch.ones(31)), (BIAS, None), ("_orig_mod.bias", torch.ones(1))])
def test_tensors_that_do_not_fit_are_refused_by_name(saved, name, wrong):
    state = load_file(saved / "model.safetensors") | {name: wrong}
    save_file({key: tensor for key, tensor in state.items() if tensor is not None}, saved / "model.safetensors")
    assert_refused(name, GPT.from_pretrained, saved)


def test_weights_in_16_bits_are_read(saved):
    state = {k: v.bfloat16() for k, v in load_file(saved / "model.safetensors").items()}
    save_file(state, saved / "model.safetensors")
    read = GPT.from_pretrained(saved, dropout=0.1, attention="naive")
    assert read.config == GPTConfig(**SMALL, dropout=0.1, attention="naive")
    for p, q in zip(read.parameters(), small().parameters(), strict=True):
        assert p.dtype == torch.float32
        assert torch.equal(p, q.bfloat16().float())
    assert read.lm_head.weight is read.transformer.wte.weight


def test_a_model_of_the_hub_is_downloaded_once(saved, monkeypatch):
    asked = []

    def download(name, allow_patterns):
        asked.append(name)
        return saved

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    Tokenizer(()).save(saved)
    assert_refused("257.*211", open_model, "gpt2")
    assert asked == ["gpt2"]
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    assert_refused("gpt2", open_model, "gpt2")


def test_pickled_weights_are_not_read_and_the_remedy_is_named(saved):
    torch.save(load_file(saved / "model.safetensors"), saved / "pytorch_model.bin")
    (saved / "model.safetensors").unlink()
    for read in (open_model, GPT.from_pretrained):
        assert_refused("model.safetensors", read, saved)


@pytest.mark.parametrize("n", [3, math.nan])
def test_edited_weights_and_those_of_a_run_that_diverged_are_read(saved, capsys, n):
    """With a note where they compute other logits; of nan nothing can be said."""
    state = load_file(saved / "model.safetensors")
    state["transformer.ln_f.weight"] *= n
    save_file(state, saved / "model.safetensors")
    model = GPT.from_pretrained(saved)
    torch.testing.assert_close(model.transformer.ln_f.weight, state["transformer.ln_f.weight"], equal_nan=True)
    assert capsys.readouterr().err.count("note:") == (n == 3)
    model.save_pretrained(saved)
    assert read_json(saved / "config.json")["model_type"] == "gpt2"
    GPT.from_pretrained(saved)
    assert capsys.readouterr().err == ""


def test_a_change_that_only_large_logits_show_is_found_at_a_later_save(tmp_path, capsys):
    model = small()
    plain = model.logits
    model.logits = lambda x: plain(x).clamp(-6, 6)
    for scale, kind in ((1, "gpt2"), (100, "changed-gpt2"), (1, "changed-gpt2")):
        with torch.no_grad():
            model.transformer.ln_f.weight.fill_(scale)
        model.save_pretrained(tmp_path)
        assert read_json(tmp_path / "config.json")["model_type"] == kind
    assert capsys.readouterr().err.count("note:") == 1


def test_a_model_that_refuses_a_short_row_is_saved(tmp_path):
    model = small()
    plain = model.hidden

    def hidden(idx, *args, **kwargs):
        assert idx.size(1) % 32 == 0
        return plain(idx, *args, **kwargs)

    model.hidden = hidden
    model.save_pretrained(tmp_path)
    assert torch.equal(GPT.from_pretrained(tmp_path)(tokens(1, 32)), small()(tokens(1, 32)))


def test_a_parameter_made_of_what_an_initialization_returns_is_loaded(saved, monkeypatch):
    plain = GPT.__init__

    def with_shift(self, config):
        plain(self, config)
        self.shift = torch.nn.Parameter(torch.nn.init.normal_(torch.empty(config.n_embd), std=0.02))

    monkeypatch.setattr(GPT, "__init__", with_shift)
    model = small()
    model.save_pretrained(saved)
    assert torch.equal(GPT.from_pretrained(saved).shift, model.shift)


# ---- numbers that are known


def test_residual_projections_start_smaller():
    torch.manual_seed(0)
    block = GPT(GPTConfig(n_layer=8, n_embd=384, vocab_size=64, n_positions=8)).transformer.h[3]
    assert block.mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert block.attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.02)
    for proj in (block.attn.c_proj, block.mlp.c_proj):
        assert proj.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.02)
        assert not proj.bias.any()


def test_flops_follow_the_stated_formula():
    with torch.device("meta"):
        model = GPT(GPTConfig())
    assert model.num_params() == 124_439_808
    matmul_params = 124_439_808 - 1024 * 768
    assert model.estimate_flops(1024) == 6 * matmul_params + 12 * 12 * 768 * 1024


# ---- dropout, and the loss against a naive version


@pytest.mark.parametrize("attention", ["flash", "naive"])
def test_dropout_is_on_embeddings_attention_and_both_branches_in_training_alone(attention):
    model = small(n_layer=1, dropout=0.5, attention=attention)
    idx = tokens(2, 32)
    block = model.transformer.h[0]
    seen = {}
    assert torch.equal(model(idx), small(n_layer=1, attention=attention)(idx))  # eval()
    for name, module in dict(embeddings=model.transformer.drop, attn=block.attn, mlp=block.mlp).items():
        module.register_forward_hook(lambda module, inputs, output, name=name: seen.update({name: output}))
    model.train()(idx)
    assert len(seen) == 3
    assert all(0.4 < (output == 0).float().mean() < 0.6 for output in seen.values())
    for module in model.modules():
        module.p = 0.0  # of all nn.Dropout, so that only the weights of attention are dropped
    assert not torch.equal(model(idx), model(idx))


def loss_case(n=64, channels=16, vocab=50, dtype=torch.float64):
    generator = seeded()
    x = torch.randn(n, channels, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, channels, generator=generator, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocab, (n,), generator=generator)
    targets[::5] = IGNORED
    return x, weight, targets


@pytest.mark.parametrize("chunk", [7, 1000])
def test_chunked_loss_and_gradients_equal_cross_entropy(chunk):
    x, weight, targets = loss_case()
    loss = LinearCrossEntropy.apply(x, weight, targets, chunk)
    grads = torch.autograd.grad(3 * loss, (x, weight))
    expected = plain_cross_entropy(x, weight, targets)
    expected_grads = torch.autograd.grad(3 * expected, (x, weight))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for grad, want in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-12, atol=1e-12)


def test_a_gradient_of_the_gradients_raises_rather_than_be_wrong():
    """Of a Hessian-vector product, say: the loss keeps its gradients as numbers."""
    x, weight, targets = loss_case()
    [grad] = torch.autograd.grad(linear_cross_entropy(x, weight, targets) ** 2, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_the_gradient_of_fp32_weights_is_summed_in_fp32():
    x, weight, targets = loss_case(n=2048, dtype=torch.float32)
    [grad] = torch.autograd.grad(LinearCrossEntropy.apply(x.bfloat16(), weight, targets, 256), weight)
    assert grad.dtype == torch.float32
    assert not torch.equal(grad, grad.bfloat16().float())


def test_a_sum_over_many_positions_does_not_overflow_in_fp16():
    x = torch.full((2560, 16), 26.0)
    weight = torch.zeros(300, 16, requires_grad=True)
    loss = LinearCrossEntropy.apply(x.half(), weight, torch.zeros(2560, dtype=torch.long), 2560)
    [grad] = torch.autograd.grad(loss, weight)  # 2560 times (softmax - one_hot) x: 66,338 is above fp16's 65,504
    torch.testing.assert_close(grad[0], torch.full((16,), 2560 * 26.0 * (1 / 300 - 1)), rtol=1e-3, atol=0)


@pytest.mark.parametrize("n_positions", [1, 1024, 64 * 1024 - 1])
def test_the_loss_takes_as_few_chunks_as_memory_allows_and_all_about_as_large(n_positions):
    most = 524_288
    chunk = chunk_size(n_positions, 1024, "cpu")
    assert chunk % 256 == 0
    assert chunk * 1024 <= most
    n_chunks = math.ceil(n_positions / chunk)
    assert n_chunks == math.ceil(n_positions * 1024 / most)
    assert n_chunks == 1 or n_chunks * chunk - n_positions < 256 * n_chunks


def test_more_tokens_than_the_context_holds_are_refused():
    assert_invalid("33.*32", small(), tokens(1, 33))


def test_the_files_for_transformers_hold_sizes_dropout_tokens_and_the_padding_of_the_vocabulary(tmp_path):
    tokenizer = Tokenizer(())
    save_model(tmp_path, small(dropout=0.1, vocab_size=259), tokenizer)
    config = read_json(tmp_path / "config.json")
    generation = read_json(tmp_path / "generation_config.json")
    ends = dict(bos_token_id=tokenizer.eot_token, eos_token_id=tokenizer.eot_token)
    dropout = dict(attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1)
    assert config.items() >= (SMALL | ends | dropout | dict(vocab_size=259, n_ctx=SMALL["n_positions"])).items()
    assert generation == ends | dict(do_sample=True, top_k=50, suppress_tokens=[257, 258])
