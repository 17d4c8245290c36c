"""The changes of docs/change.md: each applies, trains, resumes to the same losses, and samples; transformers gives the
same logits, or refuses."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.forks import fork_script
from tests.helpers import (
    ROOT,
    SHORT,
    SMALL,
    column,
    log_of,
    read_json,
    slow,
    text_file,
    write_lines,
)

PAGE = (ROOT / "docs/change.md").read_text(encoding="utf-8")
DIFFS = dict(re.findall(r"### ([^\n]+)\n(?:(?!\n##).)*?```diff\n(.*?)```", PAGE, re.DOTALL))
OTHERS = {  # that are not on the page
    "BatchNorm": """\
+++ model.py
-                ln_f=nn.LayerNorm(config.n_embd, eps=1e-5),
+                ln_f=nn.BatchNorm1d(config.n_embd),
@@
-        return self.transformer.ln_f(x)
+        return self.transformer.ln_f(x.mT).mT
""",
}
CHANGED = {*OTHERS, "RMSNorm", "ReLU²", "SwiGLU", "Rotary positions", "Grouped-query attention", "Documents apart",
           "A constant of the model as a flag", "A soft cap on the logits", "A second head", "A sliding window"}  # fmt: skip
SMALLER = {"A sliding window": ("256", "16"), "Documents apart": ("50256", "383")}  # for models of SMALL
DIFFS |= {title: DIFFS[title].replace(*values) for title, values in SMALLER.items()}
FLAGS = {
    "A constant of the model as a flag": dict(mlp_ratio=2),
    "Inverse square root": dict(lr_schedule="rsqrt"),
    "Lion": dict(optimizer="lion", max_lr=1e-4),
}
FAST = ("A soft cap on the logits", "An average of weights")
FLEX = "Documents apart, with FlexAttention"
RUNS = [title for title in DIFFS if title not in ("A longer context", "A format of finetuning rows", FLEX)]


def apply(diff: str, folder: Path) -> None:
    for part in re.split(r"(?m)^\+\+\+ ", diff)[1:]:
        name, _, hunks = part.partition("\n")
        file = folder / name
        for hunk in re.split(r"(?m)^@@\n", hunks):
            lines = hunk.splitlines()
            before = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
            after = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "-")
            text = file.read_text(encoding="utf-8") if before else ""
            assert before == "" or text.count(before) == 1, f"{name} has this {text.count(before)} times:\n{before}"
            file.write_text(text.replace(before, after) if before else after, encoding="utf-8")


@pytest.fixture
def copy(tmp_path) -> Path:
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in [*ROOT.glob("*.py"), ROOT / "parts", ROOT / "bpe"]:
        (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / path.name)
    return folder


@pytest.fixture
def flags(tmp_path) -> dict:
    """Of a short run."""
    return SMALL | SHORT | dict(data=text_file(tmp_path / "text.txt"), threads=1)


def try_to_run(folder: Path, script: str, *words, **options) -> subprocess.CompletedProcess:
    return fork_script(folder / script, *words, cwd=folder, **options)


def run(*words, **options) -> str:
    done = try_to_run(*words, **options)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize("title", DIFFS)
def test_a_change_applies_to_the_files_of_today(copy, title):
    apply(DIFFS[title], copy)
    for path in copy.glob("**/*.py"):
        compile(path.read_text(encoding="utf-8"), path, "exec")


CASES = [(title, 1) if title in FAST else slow(title, 1) for title in [*RUNS, *OTHERS]]
CASES += [slow(title, 2) for title in [*RUNS, *OTHERS]]


@pytest.mark.parametrize("title, ranks", CASES)
def test_a_change_trains_resumes_to_the_same_losses_and_samples(copy, tmp_path, flags, title, ranks):
    from transformers import AutoModelForCausalLM

    diff = (DIFFS | OTHERS)[title]
    apply(diff, copy)
    flags |= dict(eval_interval=2, eval_steps=1) | FLAGS.get(title, {})
    flags["micro_batch_size"] = 8 // ranks
    if title in CHANGED and ranks == 2:
        flags["optimizer"] = "adamw"  # on one rank it is Muon, as in the recipe
    said = run(copy, "train_gpt2.py", "tiny", out_dir=tmp_path / "whole", ranks=ranks, **flags)
    assert said.count("note: ") == (title in CHANGED)
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    for step in ("step_000004", "step_000006"):
        shutil.rmtree(tmp_path / "parts" / step)
    run(copy, "train_gpt2.py", "tiny", "--resume", out_dir=tmp_path / "parts", ranks=ranks, **flags)
    losses = column(tmp_path / "whole", "train", "loss")
    assert column(tmp_path / "parts", "train", "loss")[-4:] == losses[-4:]
    assert len(set(losses)) == 6
    assert len(run(copy, "sample.py", tmp_path / "whole", "The", max_new_tokens=8, device="cpu")) > 3
    path = tmp_path / "whole/step_000006"
    assert (read_json(path / "config.json")["model_type"] == "changed-gpt2") == (title in CHANGED)
    if title in CHANGED:
        with pytest.raises(ValueError, match="changed-gpt2"):
            AutoModelForCausalLM.from_pretrained(path)
    else:
        AutoModelForCausalLM.from_pretrained(path)
    for kind in dict.fromkeys(re.findall(r'run\.record\("(\w+)"', diff)):
        assert [record["step"] for record in log_of(tmp_path / "whole", kind)] == [2, 4, 6]


def test_flexattention_and_the_plain_mask_keep_documents_apart_alike(copy, tmp_path):
    script = f"""\
import torch
from model import GPT, GPTConfig
torch.manual_seed(0)
model = GPT(GPTConfig(n_positions=32, vocab_size=384, n_layer=2, n_head=2, n_embd=32)).eval()
idx = torch.randint(384, (2, 32))
idx[:, 7:30:9] = 383
with torch.no_grad():
    torch.save(model(idx), {str(tmp_path / "logits.pt")!r})
"""
    (copy / "logits.py").write_text(script)
    plain = (copy / "model.py").read_text(encoding="utf-8")
    found = {}
    for title in ("Documents apart", FLEX):
        (copy / "model.py").write_text(plain, encoding="utf-8")
        apply(DIFFS[title].replace("50256", "383"), copy)
        run(copy, "logits.py")
        found[title] = torch.load(tmp_path / "logits.pt")
    torch.testing.assert_close(found[FLEX], found["Documents apart"])


@pytest.mark.slow
def test_the_saved_model_is_the_average_and_the_optimizer_keeps_the_weights_that_train(copy, tmp_path, flags):
    flags |= dict(checkpoint_interval=1, max_steps=2)
    run(copy, "train_gpt2.py", "tiny", out_dir=tmp_path / "plain", **flags)
    apply(DIFFS["An average of weights"], copy)
    run(copy, "train_gpt2.py", "tiny", out_dir=tmp_path / "average", **flags)
    assert column(tmp_path / "plain", "train", "loss") == column(tmp_path / "average", "train", "loss")
    one, two = (load_file(tmp_path / f"plain/step_00000{step}/model.safetensors") for step in (1, 2))
    saved = load_file(tmp_path / "average/step_000002/model.safetensors")
    torch.testing.assert_close(saved, {name: 0.99 * one[name] + 0.01 * two[name] for name in one})


@pytest.mark.slow
def test_a_window_holds_for_the_cache_too(copy, tmp_path):
    script = """\
import torch
from model import GPT, GPTConfig
from parts.generation import generate
torch.manual_seed(0)
model = GPT(GPTConfig(n_positions=64, vocab_size=61, n_layer=2, n_head=2, n_embd=32)).eval()
with torch.no_grad():
    for p in model.parameters():
        p.add_(torch.randn_like(p), alpha=0.3)
idx = torch.randint(61, (1, 9))
plain = model.generate(idx, 40, temperature=0)[0, 9:].tolist()
assert [new for [new] in generate(model, [idx[0].tolist()], 40, temperature=0.0)] == plain
"""
    (copy / "cache.py").write_text(script)
    apply(DIFFS["A sliding window"], copy)
    run(copy, "cache.py")


@pytest.mark.slow
def test_a_model_with_a_longer_context_is_the_same_in_its_first_half(copy, tmp_path, flags):
    from transformers import AutoModelForCausalLM

    apply(DIFFS["A longer context"], copy)
    run(copy, "train_gpt2.py", "tiny", out_dir=tmp_path / "short", **flags)
    run(copy, "longer.py", tmp_path / "short/step_000006", tmp_path / "long")
    short, longer = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("short/step_000006", "long"))
    idx = torch.arange(32)[None]
    with torch.no_grad():
        torch.testing.assert_close(longer(idx).logits, short(idx).logits)
    flags |= dict(sequence_length=64, micro_batch_size=4, init_from=tmp_path / "long", tokenizer=tmp_path / "long")
    run(copy, "train_gpt2.py", "tiny", out_dir=tmp_path / "more", **flags)
    assert len(column(tmp_path / "more", "train", "loss")) == 6


@pytest.mark.slow
def test_a_format_of_rows_is_read(copy, tmp_path, flags):
    apply(DIFFS["A format of finetuning rows"], copy)
    rows = [dict(prompt=f"Say {i}.", completion=f"{i}") for i in range(40)]
    run(copy, "train_gpt2.py", "tiny", out_dir=tmp_path / "base", **flags)
    finetune = dict(base=tmp_path / "base", data=write_lines(tmp_path / "rows.jsonl", rows), max_steps=2, device="cpu")
    run(copy, "lora_finetune.py", out_dir=tmp_path / "tuned", threads=1, **finetune)
    assert len(column(tmp_path / "tuned", "train", "loss")) == 2


def after(line: str, *added: str) -> tuple[str, str]:
    """An edit that adds lines to a function."""
    return line, "\n        ".join([line, *added])


HARMLESS = {  # edits of model.py, as (old, new), that change nothing of what it computes
    "orthogonal weights, an assert, the MLP built first": [
        ("nn.init.normal_(module.weight, std=0.02)", "nn.init.orthogonal_(module.weight)"),
        after("T = idx.size(1)", "assert T <= self.config.n_positions"),
        ("self.attn = CausalSelfAttention(config, layer)", "self.mlp = MLP(config)"),
        ("self.ln_2 = nn.LayerNorm(config.n_embd, eps=1e-5)\n        self.mlp = MLP(config)",
         "self.ln_2 = nn.LayerNorm(config.n_embd, eps=1e-5)\n        self.attn = CausalSelfAttention(config, layer)"),
    ],
    "a mask as a buffer": [
        after("self.layer = layer", "n = config.n_positions", "mask = torch.ones(1, 1, n, n).tril().bool()",
              "self.register_buffer('bias', mask)"),
        ("attn_mask=mask, dropout_p=dropout_p, is_causal=mask is None", "attn_mask=self.bias[:, :, :T, :T]"),
    ],
    "an untied head": [("        self.lm_head.weight = self.transformer.wte.weight  # tied", "        # tied")],
}  # fmt: skip
HARMFUL = {  # and that change it
    "a window": [
        after("x = self.transformer.drop(x)", "mask = torch.ones(T, T, dtype=torch.bool).tril().triu(-50)"),
    ],
    "documents apart": [
        after("x = self.transformer.drop(x)", "document = (idx == 0).cumsum(-1)",
              "mask = (document[:, None, :, None] == document[:, None, None]).tril()"),
    ],
    "a scale that is learnt": [after("self.layer = layer", "self.scale = nn.Parameter(torch.ones(()))")],
    "tied layers": [after("self.lm_head.weight = self.transformer.wte.weight  # tied (Press and Wolf 2017)",
                          "self.transformer.h[1] = self.transformer.h[0]")],
}  # fmt: skip
SAVE_AND_LOAD = """\
import torch
from model import GPT, GPTConfig

torch.manual_seed(0)
model = GPT(GPTConfig(n_positions=64, vocab_size=61, n_layer=2, n_head=2, n_embd=32)).eval()
idx = torch.randint(61, (2, 64))
with torch.no_grad():
    for p in model.parameters():  # as large as after training
        p.add_(torch.randn_like(p), alpha=0.3)
    model.save_pretrained("saved")
    loaded = GPT.from_pretrained("saved").eval()
    assert torch.equal(loaded(idx), model(idx))
    torch.testing.assert_close(model(idx, idx), torch.nn.functional.cross_entropy(model(idx).mT, idx))
    torch.save((idx, model(idx)), "logits.pt")
"""


def save_and_load(copy: Path, edits: list[tuple[str, str]]) -> subprocess.CompletedProcess:
    """Save and load a model of an edited model.py."""
    text = (copy / "model.py").read_text(encoding="utf-8")
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (copy / "model.py").write_text(text, encoding="utf-8")
    (copy / "save_and_load.py").write_text(SAVE_AND_LOAD)
    done = try_to_run(copy, "save_and_load.py")
    assert done.returncode == 0, done.stderr[-2000:]
    return done


@pytest.mark.parametrize("edits", HARMLESS.values(), ids=HARMLESS)
def test_a_harmless_edit_is_a_gpt2_for_transformers_and_nothing_is_said(copy, edits):
    from transformers import AutoModelForCausalLM

    done = save_and_load(copy, edits)
    assert "note:" not in done.stderr
    theirs = AutoModelForCausalLM.from_pretrained(copy / "saved").eval()
    idx, logits = torch.load(copy / "logits.pt")
    with torch.no_grad():
        torch.testing.assert_close(theirs(idx).logits, logits, rtol=0, atol=1e-4 * logits.abs().max().item())


@pytest.mark.parametrize("edits", HARMFUL.values(), ids=HARMFUL)
def test_another_model_is_said_to_be_one_and_transformers_refuses_it(copy, edits):
    from transformers import AutoModelForCausalLM, GPT2LMHeadModel

    done = save_and_load(copy, edits)
    assert done.stderr.count("note:") == 1
    with pytest.raises(ValueError, match="changed-gpt2"):
        AutoModelForCausalLM.from_pretrained(copy / "saved")
    with pytest.raises(KeyError):  # its activation, where the type is not asked for
        GPT2LMHeadModel.from_pretrained(copy / "saved")


def test_logits_of_which_the_loss_knows_nothing_are_noted_before_the_first_save(copy, tmp_path, flags):
    text = (copy / "model.py").read_text(encoding="utf-8")
    (copy / "model.py").write_text(text.replace("return self.lm_head(x)", "return 3 * self.lm_head(x)"))
    said = run(copy, "train_gpt2.py", "tiny", out_dir=tmp_path / "run", **flags)
    assert said.count("note: ") == 2  # the other one is of transformers, at the first save
