"""LoRA: the method against its formula and against peft, merging, and adapter files, intact or damaged."""

import itertools
import json
import math
from copy import deepcopy
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from model import GPT, GPTConfig
from parts import lora
from parts.checkpoint import find_adapter
from parts.cli import UserError
from parts.huggingface import load_adapter, weights_sha256
from parts.lora import TARGETS, LoRAConfig
from tests.finetuning import adapted, distance, logits, save_adapter, small_gpt, tokens
from tests.helpers import assert_refused, read_json, write_json

SUBSETS = [s for n in range(1, 5) for s in itertools.combinations(TARGETS, n)]


# ---- the method


def test_a_new_adapter_changes_no_output_at_all():
    base = small_gpt()
    model = adapted(small_gpt(), random=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(logits(base, tokens(3, 20)), logits(model, tokens(3, 20)))


def test_the_bypass_is_the_formula_forward_and_backward():
    torch.manual_seed(0)
    double = partial(torch.randn, dtype=torch.float64)
    x = double(5, 6)
    W = double(7, 6)
    b = double(7)
    A = double(3, 6)
    B = double(7, 3)
    trained = [t.requires_grad_() for t in (x, A, B)]
    found = []
    for out in (lora.LowRankLinear.apply(x, W, b, A, B, 2.5), x @ W.T + b + 2.5 * (x @ A.T) @ B.T):
        found.append([out, *torch.autograd.grad(out.square().sum(), trained)])
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


def test_the_factors_start_as_in_the_paper():
    torch.manual_seed(0)
    module = lora.LoRALinear(torch.nn.Linear(400, 50), LoRAConfig(16, 32.0))
    bound = math.sqrt(6 / (1 + 5) / 400)  # Kaiming uniform, a = sqrt(5)
    A = module.lora_A.detach()
    assert A.abs().max() <= bound
    assert A.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert not module.lora_B.any()
    assert module.scale == 2.0
    assert lora.LoRALinear(torch.nn.Linear(400, 50), LoRAConfig(16, 32.0, rslora=True)).scale == 8.0


def test_dropout_is_on_the_bypass_only_and_off_in_evaluation():
    torch.manual_seed(0)
    module = lora.LoRALinear(torch.nn.Linear(32, 128), LoRAConfig(4, 8.0, dropout=0.5))
    torch.nn.init.ones_(module.lora_B)
    x = torch.randn(9, 32)
    plain = F.linear(x, module.weight, module.bias)
    torch.manual_seed(3)
    dropped = module.train()(x)
    torch.manual_seed(3)
    torch.testing.assert_close(dropped, plain + 2 * F.dropout(x, 0.5) @ module.lora_A.T @ module.lora_B.T)
    torch.testing.assert_close(module.eval()(x), plain + 2 * x @ module.lora_A.T @ module.lora_B.T)


@pytest.mark.parametrize("targets", SUBSETS, ids=",".join)
def test_merged_equals_unmerged_and_unmerging_restores_the_base_bit_for_bit(targets):
    model = adapted(small_gpt(), targets)
    before = deepcopy(model.state_dict())
    idx = tokens(2, 30)
    unmerged = logits(model, idx)
    assert (unmerged - logits(small_gpt(), idx)).abs().max() > 1e-3  # the adapter does something
    merged = logits(lora.merge(model), idx)
    assert (merged - unmerged).abs().max() < 1e-5
    once = deepcopy(model.state_dict())
    lora.merge(model)
    torch.testing.assert_close(model.state_dict(), once, rtol=0, atol=0)
    for _ in range(2):
        lora.unmerge(model)
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(logits(model, idx), unmerged)


def test_frozen_weights_in_bf16_give_the_numbers_of_autocast_bit_for_bit():
    idx = tokens(3, 20)
    targets = tokens(3, 20)
    found = []
    for cast in (False, True):
        model = adapted(small_gpt())
        if cast:
            lora.cast_frozen(model, torch.bfloat16)
            assert model.transformer.h[0].attn.c_attn.weight.dtype == torch.bfloat16
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(idx, targets)
        loss.backward()
        found.append([loss, *(p.grad for p in model.parameters() if p.requires_grad)])
    assert len(found[0]) == 1 + 2 * 8
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_only_the_factors_are_trained_and_layers_below_the_first_one_get_no_gradient():
    model = adapted(small_gpt(), ("mlp.c_proj",))
    seen = []
    model.transformer.h[0].attn.c_attn.register_full_backward_hook(lambda *_: seen.append("first"))
    model.transformer.h[1].attn.c_attn.register_full_backward_hook(lambda *_: seen.append("second"))
    model(tokens(2, 8), tokens(2, 8)).backward()
    assert {n.rpartition(".")[2] for n, p in model.named_parameters() if p.grad is not None} == {"lora_A", "lora_B"}
    assert seen == ["second"]


def test_trainable_parameters_on_gpt2():
    with torch.device("meta"):
        model = GPT(GPTConfig())
    lora.add_lora(model, LoRAConfig(8, 16.0))
    # r (in + out) of the four projections of 12 blocks
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 147_456 * 8


@pytest.mark.parametrize("targets", [("c_fc", "wte"), ()])
def test_what_cannot_be_adapted_is_refused_with_the_choices(targets):
    config = LoRAConfig(4, 8.0, targets=targets)
    assert_refused(f"--targets .*{' '.join(targets)}.*c_attn", lora.add_lora, small_gpt(), config)


# ---- adapter files


@pytest.fixture
def on_disk(tmp_path):
    """The small base as a directory that transformers opens."""
    small_gpt().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def transformers_model(path):
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel.from_pretrained(path)


@pytest.mark.parametrize("targets,rslora", [(TARGETS, False), (("c_attn", "mlp.c_proj"), True)])
def test_peft_loads_our_adapter(tmp_path, on_disk, targets, rslora, recwarn):
    from peft import PeftModel

    model = adapted(small_gpt(), targets, rslora=rslora)
    save_adapter(model, tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(transformers_model(on_disk), tmp_path / "adapter")
    assert distance(model, theirs) < 1e-4
    # neither missing nor unexpected keys, nor settings that it has to correct
    assert not [w for w in recwarn if "adapter" in str(w.message) or "fan_in" in str(w.message)]


@pytest.mark.parametrize(
    "targets, options",
    [
        (list(TARGETS), dict(lora_dropout=0.1)),
        (["c_proj", "c_attn"], dict(use_rslora=True, init_lora_weights="gaussian")),
    ],
)
def test_we_load_an_adapter_that_peft_trained_and_saved(tmp_path, on_disk, targets, options):
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=3, lora_alpha=12, target_modules=targets, fan_in_fan_out=True, **options)
    torch.manual_seed(0)
    theirs = get_peft_model(transformers_model(on_disk), settings)
    optimizer = torch.optim.SGD([p for p in theirs.parameters() if p.requires_grad], lr=1.0)
    for _ in range(3):
        theirs(tokens(4, 20), labels=tokens(4, 20)).loss.backward()
        optimizer.step()
    theirs.save_pretrained(tmp_path / "adapter")
    settings_with(tmp_path / "adapter", revision="main", auto_mapping={"a": 1}, peft_version="0.1")
    ours = load_adapter(small_gpt(), tmp_path / "adapter")
    assert distance(ours, small_gpt()) > 1e-3
    assert distance(ours, theirs) < 1e-4


CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"


def test_the_file_holds_the_adapter_bit_for_bit_and_nothing_else(tmp_path):
    model = adapted(small_gpt())
    path = save_adapter(model, tmp_path / "adapter", weights_sha256(small_gpt()))
    file = path / TENSORS
    assert sorted(p.name for p in path.iterdir()) == [CONFIG, TENSORS]
    assert file.stat().st_mode == (path / CONFIG).stat().st_mode
    header = int.from_bytes(file.read_bytes()[:8], "little")
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert file.stat().st_size == 8 + header + 4 * trainable  # safetensors: length, header, fp32 values
    names = {f"base_model.model.{name}.lora_{f}.weight" for name in lora.lora_modules(model) for f in "AB"}
    assert set(load_file(file)) == names
    loaded = load_adapter(small_gpt(), path)
    assert distance(loaded, model) == 0
    assert not any(p.requires_grad for n, p in loaded.named_parameters() if "lora" not in n)


def test_equal_adapters_are_equal_files(tmp_path):
    files = [save_adapter(adapted(small_gpt()), tmp_path / name, "f" * 64) / TENSORS for name in "abcdefgh"]
    assert len({file.read_bytes() for file in files}) == 1


def test_a_wrong_base_is_refused(tmp_path):
    path = save_adapter(adapted(small_gpt()), tmp_path / "adapter", weights_sha256(small_gpt()))
    other = small_gpt()
    other.transformer.h[1].ln_2.bias.data[7] += 1e-6
    assert_refused("base", load_adapter, other, path)


def test_the_fingerprint_is_of_the_weights_and_not_of_their_files(tmp_path):
    model = small_gpt()
    model.save_pretrained(tmp_path / "ours")
    transformers_model(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    assert weights_sha256(model) == weights_sha256(GPT.from_pretrained(tmp_path / "theirs"))
    assert weights_sha256(model) != weights_sha256(small_gpt(seed=1))
    for p in model.parameters():
        torch.nn.init.ones_(p)
    assert weights_sha256(model).startswith("10da1f01396e5051"), "older adapters would be refused"


@pytest.mark.parametrize("shape", [dict(n_embd=48), dict(n_layer=1)])
def test_an_adapter_of_another_shape_is_refused(saved, shape):
    assert_refused(r"c_attn\.lora_A", load_adapter, small_gpt(**shape), saved)
@pytest.fixture
def saved(tmp_path):
    return save_adapter(adapted(small_gpt()), tmp_path / "adapter")


def settings_with(path, **changes) -> None:
    file = path / "adapter_config.json"
    write_json(file, read_json(file) | changes)


@pytest.mark.parametrize(
    "harm, words",
    [("cut", TENSORS), ("missing", TENSORS), ("a block", r"\.h\.1\."), ("table", "wte")],
)
def test_tensors_that_cannot_be_used_are_refused_in_one_line(saved, harm, words):
    file = saved / TENSORS
    tensors = load_file(file)
    match harm:
        case "cut":
            file.write_bytes(file.read_bytes()[:500])
        case "missing":
            file.unlink()
        case "a block":
            save_file({name: tensor for name, tensor in tensors.items() if ".h.1." not in name}, file)
        case "table":
            save_file({"base_model.model.transformer.wte.lora_embedding_A": torch.ones(4, 320)}, file)
    assert_refused(words, load_adapter, small_gpt(), saved)


@pytest.mark.parametrize("content", ["[]", None])
def test_settings_that_cannot_be_read_are_refused_in_one_line(saved, content):
    (saved / CONFIG).unlink()
    if content:
        (saved / CONFIG).write_text(content)
    assert_refused(CONFIG, load_adapter, small_gpt(), saved, error=(UserError, OSError))


OTHER = dict(lora_alpha=0, use_dora=True, init_lora_weights="pissa")


@pytest.mark.parametrize("key", OTHER)
def test_a_setting_that_we_do_not_compute_is_refused_by_name(saved, key):
    settings_with(saved, **{key: OTHER[key]})
    assert_refused(key, load_adapter, small_gpt(), saved)


def test_every_option_of_peft_that_is_at_its_default_is_read(saved):
    """And each that its own writer adds."""
    from peft import LoraConfig

    default = {key: value for key, value in LoraConfig(r=4, lora_alpha=8).to_dict().items() if key != "task_type"}
    before = load_adapter(small_gpt(), saved)
    settings_with(saved, **json.loads(json.dumps(default, default=str)))
    assert distance(load_adapter(small_gpt(), saved), before) == 0


@pytest.mark.parametrize("r, alpha", [(0, 8.0), (4, math.inf)])
def test_what_makes_no_scale_is_refused(r, alpha):
    assert_refused(rf"\b{r}\b", LoRAConfig, r, alpha)


def test_a_merged_model_has_the_parameters_of_a_plain_one():
    """Also whether they take gradients: autocast casts a weight that takes none at each use."""

    def parameters(model: GPT) -> dict[str, bool]:
        return {name: p.requires_grad for name, p in model.named_parameters()}

    merged = lora.remove_lora(lora.merge(adapted(small_gpt(), ("c_fc",))))
    assert parameters(merged) == parameters(small_gpt())


def test_of_a_run_the_newest_checkpoint_counts_and_else_its_result(tmp_path):
    """`adapter/` may be of a run that was replaced since."""
    old = adapted(small_gpt())
    new = adapted(small_gpt(), r=2, alpha=4.0)
    save_adapter(old, tmp_path / "adapter")
    assert load_adapter(small_gpt(), find_adapter(tmp_path)).lora.r == 4
    save_adapter(new, tmp_path / "step_000004")
    assert load_adapter(small_gpt(), find_adapter(tmp_path)).lora.r == 2


def test_layers_without_biases_are_adapted_and_frozen_in_16_bits_too():
    model = small_gpt()
    for module in model.transformer.h.modules():
        if isinstance(module, torch.nn.Linear):
            module.bias = None
    model = adapted(model)
    idx = tokens(2, 8)
    before = logits(model, idx)
    torch.testing.assert_close(logits(lora.merge(deepcopy(model)), idx), before)
    lora.cast_frozen(model, torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(idx, idx).backward()
