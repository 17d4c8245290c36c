"""Clients and servers that people use, on what lora_finetune.py writes: the answers are those of `sample.py --chat`."""

import io
import json
import shutil
import subprocess
import sys

import pytest

import lora_finetune as lf
import sample
from bpe.tokenizer import Tokenizer
from finetuning import chat
from run.checkpoint import save_model
from tests.finetuning import adapted, save_adapter, small_gpt
from tests.helpers import ROOT

SAID = ["Say boat now.", "Say <|endoftext|> tide (twice).", "Say it."]
LONGEST = 12  # tokens of an answer


def test_a_pipeline_of_transformers_gives_the_answers_of_sample_chat(tmp_path, small_tokenizer, inline, monkeypatch):
    """Weights are random, and such that the answers differ from each other, can be read, and end by themselves or are
    cut."""
    from transformers import pipeline

    base, merged = small_gpt(n_positions=256), str(tmp_path / "merged")
    for p in base.transformer.h.parameters():
        p.data *= 30 if p.dim() == 2 else 1  # what was read counts for more than the last token
    embedding, eot = base.transformer.wte.weight.data, small_tokenizer.eot_token
    base.transformer.ln_f.bias.data += 10 * embedding[eot]  # makes the end of an answer likelier
    texts = {i: text.decode("latin-1") for i, text in small_tokenizer.vocab.items() if i != eot}
    embedding[[i for i, text in texts.items() if not text.isprintable() or text > "~"]] = 0
    save_model(tmp_path / "base", base, small_tokenizer)
    adapter = save_adapter(adapted(base), tmp_path / "adapter")
    lf.write_merged(lf.Config(base=str(tmp_path / "base"), merge=merged), str(adapter))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join([*SAID[1:], "", ""]).encode())))
    options = dict(temperature=0, max_new_tokens=LONGEST, chat=True, dtype="float32", device="cpu")
    result = inline(sample.main, merged, SAID[0], **options)
    ask, messages, printed = pipeline("text-generation", merged, device="cpu"), [], ""
    for text in SAID:
        messages.append(dict(role="user", content=text))
        messages = ask(messages, max_new_tokens=LONGEST, do_sample=False)[0]["generated_text"]
        printed += messages[-1]["content"].lstrip() + "\n> "
    assert result.stdout == printed, result.stderr
    lengths = [len(small_tokenizer.encode_ordinary(message["content"])) for message in messages[1::2]]
    assert 1 < min(lengths) < LONGEST == max(lengths)  # some end by themselves, others are cut


# ---- the page

PROMPTS = [
    [dict(role="user", content="  Hi ")],
    [dict(role="system", content="Be kind."), dict(role="user", content="Say <|endoftext|>!")],
    [dict(role="user", content="a"), dict(role="assistant", content=":) x"), dict(role="user", content="")],
    [dict(role="user", content="a"), dict(role="assistant", content=""), dict(role="user", content="b"),
     dict(role="user", content="中\n😀"), dict(role="assistant", content="7"), dict(role="system", content="{{x}}")],
    [],
]  # fmt: skip


@pytest.mark.skipif(not shutil.which("node"), reason="runs the page's functions in node")
@pytest.mark.parametrize("pattern", ["gpt2", "cl100k"])
def test_the_page_writes_conversations_as_chat_py_does(pattern):
    tokenizer, page = Tokenizer((), pattern), (ROOT / "docs/chat.html").read_text(encoding="utf-8")
    functions = page[page.index("const END") : page.index("function make")]
    call = f"{json.dumps(PROMPTS)}.map(m => prompt(m, directly({json.dumps(chat.template(tokenizer))})))"
    out = subprocess.check_output(["node", "-e", f"{functions} console.log(JSON.stringify({call}))"], text=True)
    pieces = [chat.pieces(messages, tokenizer) for messages in PROMPTS]
    assert json.loads(out) == ["".join(t + "<|endoftext|>" * answer for t, answer in said) for said in pieces]
