"""LoRA finetuning: the method against its formula and against peft, the data, and runs as a user meets them."""

import itertools
import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn import functional as F

import chat
import lora
import lora_finetune as lf
from bpe.tokenizer import Tokenizer
from checkpoint import checkpoint_steps, load_model, remove_after
from cli import UserError
from lora import TARGETS, AdapterFiles, LoRAConfig, load_adapter
from model import GPT, IGNORE_INDEX, GPTConfig
from runtime import Runtime
from tests.helpers import ROOT, arguments, assert_user_error, log_of, losses, run_inline, succeed

SUBSETS = [s for n in range(1, 5) for s in itertools.combinations(TARGETS, n)]


def small_gpt(seed=0, **changes) -> GPT:
    torch.manual_seed(seed)
    return GPT(GPTConfig(**{**dict(sequence_length=64, vocab_size=320, n_layer=2, n_head=2, n_embd=32), **changes}))


def adapted(model: GPT, targets=TARGETS, r=4, alpha=8.0, random=True, **options) -> GPT:
    """`model` with an adapter; a random one has an up-projection as after training, not zero."""
    lora.add_lora(model, LoRAConfig(r, alpha, targets=tuple(targets), **options))
    for module in lora.lora_modules(model).values():
        if random:
            torch.nn.init.normal_(module.lora_B, std=0.05)
    return model


def tokens(*shape) -> torch.Tensor:
    return torch.randint(0, 320, shape, generator=torch.Generator().manual_seed(1))


def save_adapter(model: GPT, path: Path, sha256="", **changes) -> Path:
    """The adapter that `adapted` makes, as files."""
    path.mkdir()
    AdapterFiles(model, LoRAConfig(**{**dict(r=4, alpha=8.0), **changes}), "base", sha256).copy()(path)
    return path


@torch.no_grad()
def logits(model, idx):
    out = model.eval()(idx)
    return out[0] if isinstance(out, tuple) else out.logits


# ---- the method


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_adapter_changes_no_output_at_all(dtype):
    base, model = small_gpt(), adapted(small_gpt(), random=False)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        assert torch.equal(logits(base, tokens(3, 20)), logits(model, tokens(3, 20)))


def test_the_bypass_is_the_formula_forward_and_backward():
    torch.manual_seed(0)
    x, W, A, B = torch.randn(5, 6), torch.randn(7, 6), torch.randn(3, 6), torch.randn(7, 3)
    b, g = torch.randn(7), torch.randn(5, 7)
    x, A, B = (t.double().requires_grad_() for t in (x, A, B))
    ours = lora.LowRankLinear.apply(x, W.double(), b.double(), A, B, 2.5)
    grads = torch.autograd.grad(ours, (x, A, B), g.double())
    formula = x @ W.double().T + b + 2.5 * (x @ A.T) @ B.T
    expected = torch.autograd.grad(formula, (x, A, B), g.double())
    assert torch.allclose(ours, formula, atol=1e-12)
    assert all(torch.allclose(a, e, atol=1e-12) for a, e in zip(grads, expected, strict=True))


def test_the_factors_start_as_in_the_paper():
    torch.manual_seed(0)
    module = lora.LoRALinear(torch.nn.Linear(400, 50), LoRAConfig(16, 32.0))
    bound = math.sqrt(6 / (1 + 5) / 400)  # Kaiming uniform, a = sqrt(5)
    A = module.lora_A.detach()
    assert A.abs().max() <= bound and A.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert not module.lora_B.any() and module.scale == 2.0
    assert lora.LoRALinear(torch.nn.Linear(400, 50), LoRAConfig(16, 32.0, rslora=True)).scale == 8.0


def test_dropout_is_on_the_bypass_only_and_off_in_evaluation():
    model = lora.add_lora(small_gpt(), LoRAConfig(4, 8.0, dropout=0.5, targets=("c_fc",)))
    module = model.transformer.h[0].mlp.c_fc
    x, plain = torch.randn(4, 9, 32), torch.nn.Linear(32, 128)
    plain.weight, plain.bias = module.weight, module.bias
    torch.manual_seed(3)
    assert torch.equal(module.train()(x), plain(x))  # zero up-projection: whatever is dropped
    torch.nn.init.ones_(module.lora_B)
    torch.manual_seed(3)
    dropped = module(x)
    torch.manual_seed(3)
    bypass = F.linear(F.dropout(x, 0.5), module.lora_A).sum(-1, keepdim=True) * module.scale
    assert torch.allclose(dropped, plain(x) + bypass, atol=1e-5)
    assert torch.allclose(module.eval()(x), plain(x) + F.linear(x, module.lora_A).sum(-1, keepdim=True) * 2, atol=1e-5)


@pytest.mark.parametrize("targets", SUBSETS, ids=",".join)
def test_merged_equals_unmerged_and_unmerging_restores_the_base_bit_for_bit(targets):
    model = adapted(small_gpt(), targets)
    before, idx = {k: v.clone() for k, v in model.state_dict().items()}, tokens(2, 30)
    unmerged = logits(model, idx)
    assert (unmerged - logits(small_gpt(), idx)).abs().max() > 1e-3  # the adapter does something
    merged = logits(lora.merge(model), idx)
    assert (merged - unmerged).abs().max() < 1e-5
    once = {k: v.clone() for k, v in model.state_dict().items()}
    lora.merge(model)
    assert all(torch.equal(v, once[k]) for k, v in model.state_dict().items())
    for _ in range(2):
        lora.unmerge(model)
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(logits(model, idx), unmerged)


def test_a_merged_model_is_a_plain_one():
    model = adapted(small_gpt())
    expected = logits(model, tokens(2, 30))
    lora.remove_lora(lora.merge(model))
    assert model.state_dict().keys() == small_gpt().state_dict().keys()
    assert (logits(model, tokens(2, 30)) - expected).abs().max() < 1e-5


def test_frozen_weights_in_bf16_give_the_numbers_of_autocast_bit_for_bit():
    idx, targets = tokens(3, 20), tokens(3, 20)
    found = []
    for cast in (False, True):
        model = adapted(small_gpt())
        if cast:
            lora.cast_frozen(model, torch.bfloat16)
            assert model.transformer.h[0].attn.c_attn.weight.dtype == torch.bfloat16
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, loss = model(idx, targets)
        loss.backward()
        found.append([loss, *(p.grad for p in model.parameters() if p.requires_grad)])
    assert len(found[0]) == 1 + 2 * 8 and all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_only_the_factors_are_trained():
    model = adapted(small_gpt())
    _, loss = model(tokens(2, 8), tokens(2, 8))
    loss.backward()
    assert {n.rpartition(".")[2] for n, p in model.named_parameters() if p.grad is not None} == {"lora_A", "lora_B"}


def test_frozen_layers_below_the_first_adapted_one_get_no_gradient():
    model = adapted(small_gpt(), ("mlp.c_proj",))
    seen = []
    model.transformer.h[0].attn.c_attn.register_full_backward_hook(lambda *_: seen.append("first"))
    model.transformer.h[1].attn.c_attn.register_full_backward_hook(lambda *_: seen.append("second"))
    model(tokens(2, 8), tokens(2, 8))[1].backward()
    assert seen == ["second"]


@pytest.mark.parametrize(
    "r,count", [(1, 147_456), (2, 294_912), (4, 589_824), (8, 1_179_648), (16, 2_359_296), (32, 4_718_592)]
)
def test_trainable_parameters_on_gpt2(r, count):
    with torch.device("meta"):
        model = GPT(GPTConfig())
    assert lora.trainable_parameters(model, TARGETS, r) == (count, count / (124_439_808 + count))
    (line,) = [line for line in lf.parameter_table(model, TARGETS, r).splitlines() if line.split()[0] == str(r)]
    assert line.split() == [f"{r}", f"{count:,}", f"{count / (124_439_808 + count):.3%}"]
    lora.add_lora(model, LoRAConfig(r, 16.0))
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == count


@pytest.mark.parametrize("target", ["wte", "lm_head", "transformer.wte"])
def test_tied_embeddings_are_refused_with_the_reason(target):
    with pytest.raises(UserError, match="tied"):
        lora.target_names(small_gpt(), ["c_fc", target])


def test_an_unknown_target_is_refused():
    with pytest.raises(UserError, match="q_proj: there is no such projection; choose from c_attn"):
        lora.target_names(small_gpt(), ["q_proj"])


def test_lora_plus_gives_the_up_projections_a_rate_of_their_own():
    model = adapted(small_gpt())
    settings = lf.Config(lora_dim=4, lora_plus=16.0, max_lr=1e-3)
    (optimizer,) = lf.make_optimizers(model, settings)
    rates = {id(p): group["initial_lr"] for group in optimizer.param_groups for p in group["params"]}
    for module in lora.lora_modules(model).values():
        assert rates[id(module.lora_A)] == 1e-3 and rates[id(module.lora_B)] == 16e-3
    assert len(rates) == 16


# ---- adapter files


@pytest.fixture
def on_disk(tmp_path):
    """The small base as a directory that transformers opens."""
    small_gpt().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def transformers_model(path):
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel.from_pretrained(path)


@pytest.mark.parametrize("targets,rslora", [(TARGETS, False), (("c_attn", "c_fc"), True), (("c_proj",), False)])
def test_peft_loads_our_adapter(tmp_path, on_disk, targets, rslora, recwarn):
    from peft import PeftModel

    model = adapted(small_gpt(), targets, rslora=rslora)
    save_adapter(model, tmp_path / "adapter", targets=targets, rslora=rslora)
    theirs = PeftModel.from_pretrained(transformers_model(on_disk), tmp_path / "adapter")
    assert (logits(model, tokens(2, 30)) - logits(theirs, tokens(2, 30))).abs().max() < 1e-4
    # neither missing nor unexpected keys, nor settings that it has to correct
    assert not [w for w in recwarn if "adapter" in str(w.message) or "fan_in" in str(w.message)]


@pytest.mark.parametrize("targets,rslora", [(list(TARGETS), False), (["c_attn"], True), (["c_proj", "c_fc"], False)])
def test_we_load_an_adapter_that_peft_trained_and_saved(tmp_path, on_disk, targets, rslora):
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=3, lora_alpha=12, target_modules=targets, use_rslora=rslora, lora_dropout=0.1,
                          fan_in_fan_out=True, task_type="CAUSAL_LM")  # fmt: skip
    torch.manual_seed(0)
    theirs = get_peft_model(transformers_model(on_disk), settings)
    optimizer = torch.optim.SGD([p for p in theirs.parameters() if p.requires_grad], lr=1.0)
    for _ in range(3):
        theirs(tokens(4, 20), labels=tokens(4, 20)).loss.backward()
        optimizer.step()
    theirs.save_pretrained(tmp_path / "adapter")
    ours = load_adapter(small_gpt(), tmp_path / "adapter")
    assert (logits(ours, tokens(2, 30)) - logits(small_gpt(), tokens(2, 30))).abs().max() > 1e-3
    assert (logits(ours, tokens(2, 30)) - logits(theirs, tokens(2, 30))).abs().max() < 1e-4


def test_the_file_holds_the_adapter_and_nothing_else(tmp_path):
    model = adapted(small_gpt())
    path = save_adapter(model, tmp_path / "adapter", "0" * 64)
    file = path / "adapter_model.safetensors"
    assert sorted(p.name for p in path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    header = int.from_bytes(file.read_bytes()[:8], "little")
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert file.stat().st_size == 8 + header + 4 * trainable  # safetensors: length, header, fp32 values
    names = {f"base_model.model.{name}.lora_{f}.weight" for name in lora.lora_modules(model) for f in "AB"}
    assert set(load_file(file)) == names
    assert "/" not in json.loads((path / "adapter_config.json").read_text())["base_model_name_or_path"]


def test_saving_and_loading_changes_no_bit(tmp_path):
    model = adapted(small_gpt())
    sha256 = lora.fingerprint(small_gpt())
    loaded = load_adapter(small_gpt(), save_adapter(model, tmp_path / "adapter", sha256))
    assert torch.equal(logits(loaded, tokens(2, 30)), logits(model, tokens(2, 30)))
    assert not any(p.requires_grad for n, p in loaded.named_parameters() if "lora" not in n)


def test_a_wrong_base_is_refused(tmp_path):
    path = save_adapter(adapted(small_gpt()), tmp_path / "adapter", lora.fingerprint(small_gpt()))
    other = small_gpt()
    other.transformer.h[1].ln_2.bias.data[7] += 1e-6
    with pytest.raises(UserError, match="was trained on another base, base with sha256"):
        load_adapter(other, path)


def test_the_fingerprint_is_of_the_weights_and_not_of_their_files(tmp_path):
    model = small_gpt()
    model.save_pretrained(tmp_path / "ours")
    transformers_model(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    assert lora.fingerprint(model) == lora.fingerprint(GPT.from_pretrained(tmp_path / "theirs"))
    assert lora.fingerprint(model) != lora.fingerprint(small_gpt(seed=1))


@pytest.mark.parametrize("shape", [dict(n_embd=48), dict(n_layer=1)])
def test_an_adapter_of_another_shape_is_refused(tmp_path, shape):
    path = save_adapter(adapted(small_gpt()), tmp_path / "adapter")
    with pytest.raises(
        UserError, match=r"of another shape: base_model.model.transformer.h.\d.attn.c_attn.lora_A.weight is"
    ):
        load_adapter(small_gpt(**shape), path)


def truncate(path):
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:500])


def pickled(path):
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")


def settings_with(**changes):
    def change(path):
        file = path / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


@pytest.mark.parametrize(
    "harm,words",
    [
        (truncate, "is damaged"),
        (pickled, "pickled .bin adapters are not read"),
        (lambda path: (path / "adapter_config.json").write_text("{"), "is damaged"),
        (lambda path: (path / "adapter_config.json").unlink(), "holds no adapter"),
        (settings_with(r=0), "is damaged"),
        (settings_with(r=2), "of another shape"),
        (settings_with(use_dora=True), "use_dora is True"),
        (settings_with(peft_type="LOHA"), "peft_type is 'LOHA'"),
        (settings_with(modules_to_save=["wte"]), "modules_to_save"),
        (settings_with(rank_pattern={"c_fc": 2}), "rank_pattern"),
    ],
)
def test_an_adapter_that_cannot_be_used_is_refused_in_one_line(tmp_path, harm, words):
    path = save_adapter(adapted(small_gpt()), tmp_path / "adapter")
    harm(path)
    with pytest.raises(UserError, match=words):
        load_adapter(small_gpt(), path)


# ---- data


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer.train([(ROOT / "input.txt").read_text()[:60_000]], 320)


def row(instruction, output, input="") -> dict:
    return dict(instruction=instruction, input=input, output=output)


WORDS = "sea tide boat gull sand wind rope sail reef moon star fish".split()
ROWS = [row(f"Say {WORDS[n % 12]}.", f"{WORDS[n % 12]} " * (1 + n % 7), "now" * (n % 2)) for n in range(60)]


def write_json(path: Path, content) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def encode(rows: list[dict], tokenizer, sequence_length=1000):
    return lf.encode_rows([lf.messages_of(r, "") for r in rows], tokenizer, sequence_length)


def test_answers_and_their_end_are_targets_and_nothing_else_is(tokenizer):
    (example,), _ = encode([row("Add.", "3", "1 and 2")], tokenizer)
    prompt = tokenizer.encode_ordinary("BEGINNING OF CONVERSATION: USER: Add. 1 and 2 ASSISTANT:")
    answer = [*tokenizer.encode_ordinary("3"), tokenizer.eot_token]
    assert example.idx.tolist() == (prompt + answer)[:-1]
    assert example.targets.tolist() == [IGNORE_INDEX] * (len(prompt) - 1) + answer


def test_a_conversation_scores_every_answer(tokenizer):
    said = (("system", "Be kind."), ("user", "Hi"), ("assistant", "Ho"), ("user", "Bye"), ("assistant", "Ciao"))
    messages = [dict(role=role, content=content) for role, content in said]
    (example,), _ = encode([dict(messages=messages)], tokenizer)
    text = "BEGINNING OF CONVERSATION: USER: Be kind. Hi ASSISTANT:Ho<|endoftext|>USER: Bye ASSISTANT:Ciao<|endoftext|>"
    ids = tokenizer.encode(text, allowed_special="all")
    assert [*example.idx, example.targets[-1]] == ids == chat.chat_ids(tokenizer, messages)
    scored = example.targets[example.targets >= 0].tolist()
    assert tokenizer.decode(scored) == "Ho<|endoftext|>Ciao<|endoftext|>"


def test_special_tokens_in_a_row_are_text(tokenizer):
    (example,), _ = encode([row("Say <|endoftext|>", "<|endoftext|>")], tokenizer)
    assert tokenizer.eot_token not in example.idx
    assert (example.targets == tokenizer.eot_token).sum() == 1


def test_empty_rows_are_counted_and_left_out(tokenizer):
    rows = [
        row("Hi", "Ho"),
        row("Hi", " "),
        row("", "Ho"),
        dict(messages=[]),
        dict(messages=[dict(role="user", content="x")]),
    ]
    examples, counts = encode(rows, tokenizer)
    assert len(examples) == 1 and counts["rows"] == 5 and counts["empty"] == 4


@given(st.integers(1, 90), st.integers(2, 40), st.integers(0, 89))
@settings(max_examples=200, deadline=None)
def test_a_long_row_is_read_in_windows_that_score_every_answer_token_once(n, T, prompt):
    idx = np.arange(n, dtype=np.int32)
    targets = np.where(idx < prompt, IGNORE_INDEX, idx + 1).astype(np.int32)
    parts = lf.windows(idx, targets, T)
    scored = np.concatenate([np.zeros(0, np.int32), *(part.targets[part.targets >= 0] for part in parts)])
    assert scored.tolist() == targets[targets >= 0].tolist()
    for part in parts:
        assert len(part.idx) == len(part.targets) <= T
        places = part.targets >= 0
        assert (part.targets[places] == part.idx[places] + 1).all()
        assert part.idx[0] == 0 or part.idx[places].min() - part.idx[0] >= T // 2  # half a window of context


def test_the_split_is_by_seed_and_complete():
    rows = list(range(300))
    train, val = lf.split_rows(rows, 1000, seed=5)
    assert len(val) == 30 and sorted(train + val) == rows
    assert (train, val) == lf.split_rows(rows, 1000, seed=5) != lf.split_rows(rows, 1000, seed=6)
    assert len(lf.split_rows(rows, 7, seed=5)[1]) == 7


@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(20, 200), st.integers(0, 100))
@settings(max_examples=100, deadline=None)
def test_micro_batches_waste_least(lengths, limit, cost):
    lengths.sort()
    parts = lf.cut_by_length(lengths, limit, cost)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))

    def price(parts):
        sizes = [len(part) * max(lengths[i] for i in part) for part in parts]
        fits = all(size <= limit or len(part) == 1 for size, part in zip(sizes, parts, strict=True))
        return sum(sizes) + cost * len(parts) if fits else math.inf

    ways = []  # every way to cut
    for cuts in itertools.product([False, True], repeat=len(lengths) - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(lengths)]
        ways.append([range(a, b) for a, b in itertools.pairwise(edges)])
    assert price(parts) == min(map(price, ways))


@pytest.mark.parametrize("dropped", [None, "attn.c_proj"])
def test_a_batch_gives_the_loss_and_gradients_of_its_examples_one_by_one(tokenizer, dropped):
    """Micro-batches of several lengths, padded, with the loss at answers only, against the plain forward pass."""
    examples, _ = encode(ROWS[:13], tokenizer)
    model = adapted(small_gpt(sequence_length=256), [t for t in TARGETS if t != dropped])
    n_targets = sum(int((e.targets >= 0).sum()) for e in examples)
    found = []
    for together in (True, False):
        model.zero_grad()
        total = torch.zeros(())
        if together:
            micros = lf.micro_batches(examples, 300, 20)
            assert 2 <= len(micros) <= 6
            for micro in micros:
                _, loss = lf.AnswerLoss(model)(*micro, n_targets=n_targets)
                loss.backward()
                total += loss.detach()
        else:
            for e in examples:
                one = model(torch.from_numpy(e.idx).long()[None])[0][0]  # (T, V)
                loss = F.cross_entropy(one, torch.from_numpy(e.targets).long(), reduction="sum") / n_targets
                loss.backward()
                total += loss.detach()
        found.append([total, *(p.grad.clone() for p in model.parameters() if p.requires_grad)])
    assert all((a - b).abs().max() < 1e-5 for a, b in zip(*found, strict=True))
    assert found[0][1].abs().max() > 1e-4  # gradients that could differ


def test_neighbours_in_a_batch_do_not_see_each_other(tokenizer):
    examples, _ = encode(ROWS[:4], tokenizer)
    model = adapted(small_gpt(sequence_length=256)).eval()

    def losses_of(examples):
        idx, targets, places = lf.collate(examples)
        per_token = F.cross_entropy(model(idx)[0].flatten(0, 1)[places[0]], targets[0], reduction="none")
        return torch.split(per_token, [int((e.targets >= 0).sum()) for e in examples])

    before = losses_of(examples)
    changed = [examples[0], lf.Example((examples[1].idx + 7) % 300, examples[1].targets), *examples[2:]]
    after = losses_of(changed)
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, False, True, True]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_ranks_share_every_global_batch_whatever_their_number(tokenizer, world_size):
    examples, _ = encode(ROWS[:21], tokenizer)

    def step_texts(step, ranks):
        found = []
        for rank in range(ranks):
            cut = lambda batch, rank=rank: lf.micro_batches(batch, 400, 20, rank, ranks)  # noqa: E731
            for _, targets, _ in next(lf.training_batches(examples, step, 8, 3, cut)):
                found += targets[0].tolist()
        return sorted(found)

    for step in (0, 1, 2, 5):
        assert step_texts(step, world_size) == step_texts(step, 1)


def test_every_epoch_has_each_example_once_in_another_order():
    examples = list(range(12))
    batches = lf.training_batches(examples, 0, 4, seed=3, cut=lambda batch: batch)
    first, second = ([next(batches) for _ in range(3)] for _ in range(2))
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == examples and first != second
    assert next(lf.training_batches(examples, 4, 4, seed=3, cut=lambda batch: batch)) == second[1]  # resumable


def test_constants_follow_from_the_number_of_examples_and_the_rank_unless_they_are_given():
    derived = ("max_steps", "warmup_steps", "eval_interval", "lora_alpha", "max_lr")
    for constants, expected in (
        (dict(lora_dim=4), (49, 2, 4, 8, 1e-3)),  # 3 epochs of 520 examples, 32 a step; 3%, a tenth, 2 r
        (dict(lora_dim=0), (49, 2, 4, 0, 1e-4)),
        (found := dict(zip(derived, (7, 3, 0, 5.0, 0.01), strict=True)), tuple(found.values())),
    ):
        config = lf.Config(**constants)
        lf.settle(config, 520)
        assert tuple(getattr(config, name) for name in derived) == expected


@pytest.mark.parametrize(
    "content,words",
    [
        ('[{"instruction": "a", "output": "b"}', ("not JSON in line 1",)),
        ('{"instruction": "a", "output": "b"}\n{"instruction": "a" "output"}\n', ("not JSON in line 2",)),
        ('[\n{"instruction": "a",\n "output": b}]', ("not JSON in line 3",)),
        ([row("a", "b"), dict(instruction="a")], ("row 2 of", "output is missing")),
        ([dict(output="b")], ("row 1 of", "instruction is missing")),
        ([row("a", 3)], ("row 1 of", "output is no text")),
        ([row("a", "b", input=3)], ("row 1 of", "input is no text")),
        (["a"], ("row 1 of", "is a str")),
        ([dict(messages="x")], ("row 1 of", "messages need a role")),
        ([dict(messages=[dict(role="user")])], ("row 1 of", "messages need a role")),
        ([dict(messages=[dict(role="robot", content="x")])], ("row 1 of", "messages need a role")),
        ([dict(messages=[dict(role="assistant", content="x")])], ("row 1 of", "the assistant speaks after nobody")),
    ],
)
def test_a_malformed_file_is_one_clear_line(tmp_path, content, words):
    path = write_json(tmp_path / "rows.json", content)
    with pytest.raises(UserError) as error:
        lf.read_rows(str(path))
    assert all(word in str(error.value) for word in (*words, "rows.json")), error.value


def test_json_jsonl_and_messages_are_read_alike(tmp_path):
    rows = [row("Hi", "Ho", "there"), row("Say", "line\u2028separator")]
    messages = [dict(messages=lf.messages_of(r, "")) for r in rows]
    lines = "\n".join(json.dumps(r, ensure_ascii=False) for r in rows) + "\n\n"
    files = {"a.json": rows, "b.jsonl": lines, "c.json": messages, "d.json": "\ufeff" + json.dumps(rows)}
    found = [lf.read_rows(str(write_json(tmp_path / name, content))) for name, content in files.items()]
    assert found[0] == found[1] == found[2] == found[3]
    assert found[0][0] == [dict(role="user", content="Hi there"), dict(role="assistant", content="Ho")]


def test_alpaca_comes_from_the_hub_through_datasets(monkeypatch, tmp_path):
    import datasets

    asked = []

    def stand_in(repo, split):
        asked.append((repo, split))
        return datasets.Dataset.from_list([row("Hi", "Ho", "there") | dict(text="...")])

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", stand_in)
    rows = lf.load_rows(lf.Config().data, Runtime.setup("cpu"))
    assert asked == [("tatsu-lab/alpaca", "train")]
    assert rows == [[dict(role="user", content="Hi there"), dict(role="assistant", content="Ho")]]


def test_without_a_network_the_remedy_is_named(monkeypatch):
    def stand_in(*args, **kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setattr("datasets.load_dataset", stand_in)
    with pytest.raises(UserError, match="tatsu-lab/alpaca.*no route to host.*--data"):
        lf.load_rows("tatsu-lab/alpaca", Runtime.setup("cpu"))


# ---- runs


@pytest.fixture(scope="session")
def base(tmp_path_factory, tokenizer):
    """A base with a tokenizer, and rows to finetune it on."""
    path = tmp_path_factory.mktemp("base")
    model = small_gpt(sequence_length=128)
    model.transformer.wte.weight.data *= 10  # as after training: logits that a frozen head can move
    model.save_pretrained(path / "base", tokenizer.eot_token, len(tokenizer))
    tokenizer.save(path / "base")
    write_json(path / "rows.json", ROWS)
    return path


QUICK = dict(batch_size=16, max_steps=12, max_lr=0.01, eval_interval=6, checkpoint_interval=4, keep_checkpoints=0,
             lora_dim=4, sample_tokens=8, dtype="float32", device="cpu")  # fmt: skip


def quick_args(folder: Path, out, **changes) -> list[str]:
    settings = {**QUICK, "base": folder / "base", "data": folder / "rows.json", "out_dir": out, **changes}
    return arguments(**{name: value for name, value in settings.items() if value is not None})


@pytest.fixture
def finetune(base, tmp_path, capsys, monkeypatch):
    """Finetune in this process: finetune(out="run", lora_dim=2, ...)."""

    def run(out="run", **changes):
        return run_inline(lf.main, quick_args(base, tmp_path / out, **changes), capsys, monkeypatch)

    return run


@pytest.mark.parametrize("r,options", [(4, {}), (0, {}), (4, dict(dtype="bfloat16", lora_dropout=0.1, lora_plus=4.0))])
def test_finetuning_lowers_the_validation_loss_and_leaves_what_it_should(finetune, base, tmp_path, r, options):
    result = finetune(lora_dim=r, sample_interval=6, **options)
    assert result.returncode == 0, result.stderr[-2000:]
    run = tmp_path / "run"
    val = log_of(run, "val")
    assert [v["step"] for v in val] == [0, 6, 12] and val[-1]["loss"] < val[0]["loss"] - 0.5
    train = log_of(run, "train")
    assert [t["step"] for t in train] == list(range(1, 13))
    assert {"loss", "lr", "grad_norm", "dt_ms", "tokens_per_sec", "mfu"} <= set(train[0])
    assert (run / "learning_curve.png").exists() and "--- step 12" in (run / "samples.txt").read_text()
    assert [step for step, _ in checkpoint_steps(run)] == [4, 8, 12]
    newest = {p.name for p in checkpoint_steps(run)[-1][1].iterdir()}
    assert "train_state.pt" in newest and ("adapter_model.safetensors" in newest) == (r > 0)
    assert ("model.safetensors" in newest) == (r == 0)
    assert (run / "adapter").exists() == (r > 0)
    assert "60 rows: 54 examples to train on, 6 to validate" in result.stdout
    if r:
        loaded = load_adapter(load_model(str(base / "base")), run / "adapter")
        newest = load_adapter(load_model(str(base / "base")), run)
        assert torch.equal(logits(loaded, tokens(1, 30)), logits(newest, tokens(1, 30)))


@pytest.mark.parametrize("options", [dict(), dict(lora_dim=0), dict(lora_dropout=0.2, lora_plus=4.0)])
def test_an_interrupted_run_goes_on_bit_for_bit(finetune, tmp_path, options):
    finetune(**options)
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    remove_after(tmp_path / "other" / "step_000004")
    assert finetune(out="other", resume=True, **options).returncode == 0
    assert losses(tmp_path / "other") == losses(tmp_path / "run")
    name = "model.safetensors" if options.get("lora_dim") == 0 else "adapter_model.safetensors"
    files = [load_file(tmp_path / run / "step_000012" / name) for run in ("run", "other")]
    assert all(torch.equal(files[0][k], files[1][k]) for k in files[0])


def test_a_spike_goes_back_to_an_earlier_adapter_and_leaves_its_data_out(finetune, tmp_path, monkeypatch):
    def rows_of_batches(spoilt, left_out):
        def batches(examples, step, batch_size, seed, cut):
            while True:
                batch = cut([examples[(step * batch_size + i) % len(examples)] for i in range(batch_size)])
                if step in spoilt:  # answers that no row has
                    batch = [(idx, 256 + targets % 8, places) for idx, targets, places in batch]
                step += 1
                if step - 1 not in left_out:
                    yield batch

        return batches

    options = dict(max_steps=36, lora_dim=16, max_lr=0.03, spike_threshold=0.3, checkpoint_interval=5, eval_interval=0)
    found = []
    for out, spoilt, left_out in (("spiky", range(25, 28), range(0)), ("clean", range(0), range(20, 28))):
        monkeypatch.setattr(lf, "training_batches", rows_of_batches(spoilt, left_out))
        assert finetune(out=out, **options).returncode == 0
        found.append(losses(tmp_path / out))
        newest = load_file(tmp_path / out / "adapter" / "adapter_model.safetensors")
        found.append({name: tensor.tolist() for name, tensor in newest.items()})
    (rollback,) = log_of(tmp_path / "spiky", "rollback")
    assert (rollback["step"], rollback["from_step"]) == (20, 28)
    assert found[:2] == found[2:]


def test_a_run_is_not_overwritten_and_keeps_its_rank_when_resumed(finetune):
    assert finetune(max_steps=2).returncode == 0
    assert_user_error(finetune(max_steps=2), "already holds a run")
    assert_user_error(finetune(max_steps=4, resume=True, lora_dim=8), "has --lora_dim 4, not 8")
    assert finetune(max_steps=2, overwrite=True, lora_dim=8).returncode == 0


def test_training_goes_on_from_an_adapter(finetune, tmp_path):
    finetune()
    after = log_of(tmp_path / "run", "val")[-1]["loss"]
    result = finetune(out="more", adapter=tmp_path / "run", lora_dim=None, max_steps=2, eval_interval=1)
    assert result.returncode == 0, result.stderr[-2000:]
    assert log_of(tmp_path / "more", "val")[0]["loss"] == after
    assert json.loads((tmp_path / "more" / "config.json").read_text())["lora_dim"] == 4
    assert json.loads((tmp_path / "more" / "adapter" / "adapter_config.json").read_text())["r"] == 4


def test_a_merged_directory_is_a_plain_model_for_transformers(finetune, base, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    finetune(merge=tmp_path / "merged")
    ours = load_adapter(load_model(str(base / "base")), tmp_path / "run")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (logits(ours, tokens(2, 30)) - logits(theirs, tokens(2, 30))).abs().max() < 1e-4
    assert AutoTokenizer.from_pretrained(tmp_path / "merged")("Hello")["input_ids"]
    assert_user_error(finetune(merge=tmp_path / "merged", overwrite=None), "already exists")
    result = finetune(adapter=tmp_path / "run", merge=tmp_path / "again", lora_dim=None)
    assert "logits differ by at most" in result.stdout
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "merged/model.safetensors").read_bytes()


def test_long_rows_are_reported(finetune):
    result = finetune(max_steps=1, sequence_length=40)
    assert "longer than 40 tokens (up to" in result.stdout and "read in overlapping windows" in result.stdout


@pytest.mark.parametrize(
    "changes,words",
    [
        (dict(data="absent.json"), "there is no absent.json"),
        (dict(base="absent/"), "absent"),
        (dict(adapter="absent"), "absent holds no adapter"),
        (dict(sequence_length=1000), "was made for 128 tokens"),
        (dict(sequence_length=1), "--sequence_length 1 has no room"),
        (dict(lora_dim=-1), "--lora_dim must not be negative"),
        (dict(lora_alpha=-1), "--lora_alpha must not be negative"),
        (dict(lora_dropout=1.0), "--lora_dropout must be in [0, 1)"),
        (dict(targets="wte"), "tied"),
        (dict(lora_dim=0, adapter="x"), "merge it first"),
        (dict(lora_rank=3), "lora_rank"),
        pytest.param(
            dict(out="/sys/kernel/run"),
            "/sys/kernel/run cannot be made",
            marks=pytest.mark.skipif(
                sys.platform != "linux", reason="needs a directory that not even root can write to"
            ),
        ),
    ],
)
def test_wrong_usage_is_one_clear_line(finetune, tmp_path, changes, words):
    assert_user_error(finetune(**changes), words)
    assert not (tmp_path / "run" / "log.jsonl").exists()


def test_rows_without_answers_are_an_error(finetune, tmp_path):
    data = write_json(tmp_path / "rows.json", [row("Hi", "")])
    assert_user_error(finetune(data=data), "1 rows, none of them with an instruction and an answer")


def test_a_command_line_repeats_the_constants(monkeypatch):
    config = replace(lf.Config(), lora_dim=2, targets=("c_fc", "c_attn"), rslora=True, max_lr=0.02, ranks=(1, 0))
    words = lf.command_line(config, lora_dim=16, out_dir="out/r16")[2:]
    parsed = lf.parse_args(lf.Config, words)
    assert parsed == replace(config, lora_dim=16, out_dir="out/r16", ranks=lf.RANKS)


def test_the_sweep_compares_ranks_and_full_finetuning(base, tmp_path):
    out = tmp_path / "sweep"
    words = quick_args(base, out, max_steps=2, eval_interval=1, lora_dim=None)
    result = succeed("lora_finetune.py", "sweep", *words, "--ranks", "2", "0")
    header, _, low, full = (out / "sweep.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (header, low, full)]
    low, full = (dict(zip(cells[0], line, strict=True)) for line in cells[1:])
    model = load_model(str(base / "base"))
    n, _ = lora.trainable_parameters(model, TARGETS, 2)
    assert (low["variant"], full["variant"]) == ("r = 2", "full")
    assert low["trainable"] == f"{n:,}" and full["trainable"] == f"{model.num_params():,}"
    assert int(low["file (bytes)"].replace(",", "")) == (out / "r2/adapter/adapter_model.safetensors").stat().st_size
    assert low["loss before"] == full["loss before"] and float(full["final loss"]) < float(full["loss before"])
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG") and (out / "sweep.md").read_text() in result.stdout
    samples = (out / "samples.md").read_text()
    assert len(lf.PROMPTS) == 14 and all(f"## {prompt}\n" in samples for prompt in lf.PROMPTS)
    assert samples.count("\n| base |") == samples.count("\n| r = 2 |") == samples.count("\n| full |") == 14


@pytest.mark.slow
def test_two_ranks_finetune_as_one_process_does(base, tmp_path):
    import subprocess

    from tests.helpers import environment

    words = quick_args(base, tmp_path / "two")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*torchrun, str(ROOT / "lora_finetune.py"), *words]
    subprocess.run(command, env=environment(), check=True, timeout=240, capture_output=True)
    succeed("lora_finetune.py", *quick_args(base, tmp_path / "one"))
    for a, b in zip(losses(tmp_path / "one"), losses(tmp_path / "two"), strict=True):
        assert a == pytest.approx(b, abs=1e-4)
