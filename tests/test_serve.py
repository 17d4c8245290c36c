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
from parts import chat
from parts.checkpoint import save_model
from tests.finetuning import adapted, said, save_adapter, small_gpt, written
from tests.helpers import ROOT

SAID = ["Say boat now.", "Say <|endoftext|> tide (twice).", "Say it."]
LONGEST = 12  # tokens of an answer


def test_a_pipeline_of_transformers_gives_the_answers_of_sample_chat(tmp_path, small_tokenizer, inline, monkeypatch):
    """Weights are random, and such that the answers differ from each other, can be read, and end by themselves or are
    cut."""
    from transformers import pipeline

    base = small_gpt(n_positions=256)
    merged = str(tmp_path / "merged")
    for p in base.transformer.h.parameters():
        if p.dim() == 2:
            p.data *= 30  # what was read counts for more than the last token
    embedding = base.transformer.wte.weight.data
    eot = small_tokenizer.eot_token
    base.transformer.ln_f.bias.data += 10 * embedding[eot]  # makes the end of an answer likelier
    texts = {i: text.decode("latin-1") for i, text in small_tokenizer.vocab.items() if i != eot}
    embedding[[i for i, text in texts.items() if not text.isprintable() or text > "~"]] = 0
    save_model(tmp_path / "base", base, small_tokenizer)
    adapter = save_adapter(adapted(base), tmp_path / "adapter")
    chat.save_chat_files(adapter, small_tokenizer)
    lf.write_merged(lf.Config(base=str(tmp_path / "base"), merge=merged), tmp_path / "base", adapter)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join([*SAID[1:], "", ""]).encode())))
    options = dict(temperature=0, max_new_tokens=LONGEST, chat=True, dtype="float32", device="cpu")
    result = inline(sample.main, merged, SAID[0], **options)
    ask = pipeline("text-generation", merged, device="cpu")
    messages = []
    printed = ""
    for text in SAID:
        messages.append(dict(role="user", content=text))
        messages = ask(messages, max_new_tokens=LONGEST, do_sample=False)[0]["generated_text"]
        printed += messages[-1]["content"].lstrip() + "\n> "
    assert result.stdout == printed, result.stderr
    lengths = [len(small_tokenizer.encode_ordinary(message["content"])) for message in messages[1::2]]
    assert 1 < min(lengths) < LONGEST == max(lengths)  # some end by themselves, others are cut


# ---- the page

PAGE = (ROOT / "docs/chat.html").read_text(encoding="utf-8")
PROMPTS = [
    said("u:   Hi "),
    said("s: Be kind.", "u: Say <|endoftext|>!"),
    said("u: a", "a: :) x", "u: "),
    said("u: a", "a: ", "u: b", "u: 中\n😀", "a: 7", "s: {{x}}"),
    [],
]


needs_node = pytest.mark.skipif(not shutil.which("node"), reason="runs the page's functions in node")


@needs_node
@pytest.mark.parametrize("pattern", ["gpt2", "cl100k"])
def test_the_page_writes_conversations_as_chat_py_does(pattern):
    tokenizer = Tokenizer((), pattern)
    functions = PAGE[PAGE.index("const END") : PAGE.index("function make")]
    call = f"{json.dumps(PROMPTS)}.map(m => prompt(m, directly({json.dumps(chat.template(tokenizer))})))"
    out = subprocess.check_output(["node", "-e", f"{functions} console.log(JSON.stringify({call}))"], text=True)
    assert json.loads(out) == [written(messages, tokenizer) for messages in PROMPTS]


# as much of a browser as a conversation needs; each answer is [status, bodies of the chunks]
BROWSER = """
const $ = id => ({ value: "" }), columns = new Map(), address = path => path, headers = () => ({});
const requestAnimationFrame = setTimeout;
const document = {
  createTextNode: data => ({
    data, get length() { return this.data.length; }, appendData(more) { this.data += more; },
  }),
  createElement: () => ({
    children: [], classList: { remove() {} }, scrollIntoView() {},
    append(...more) { this.children.push(...more); }, appendChild(child) { this.append(child); return child; },
  }),
};
async function answer(status, chunks) {
  const bytes = new TextEncoder().encode(chunks.join(""));
  const body = new ReadableStream({ start(stream) {
    for (let i = 0; i < bytes.length; i += 7) stream.enqueue(bytes.slice(i, i + 7));  // cuts characters, too
    stream.close();
  } });
  globalThis.fetch = async () => new Response(body, { status });
  const list = document.createElement(), mode = { value: "chat" };
  const column = { messages: [], direct: GPT2, mode, list, read: {} };
  const text = await ask(column, "Hi", null);
  return [text, column.messages.length, list.children[1].children[1].children[0]];
}
"""
HO = 'data: {"choices": [{"delta": {"content": " 中Ho"}, "finish_reason": null}]}\n\n'
REASON = 'data: {"choices": [{"delta": {}, "finish_reason": "REASON"}]}\n'
ANSWERS = [  # status, chunks; the text, the number of messages, and what the server said
    (200, [HO, HO, REASON.replace("REASON", "stop"), "data: [DONE]\n"], ["中Ho 中Ho", 2, ""]),
    (200, ['data: {"choices": null}\n', HO, 'data: {"choices": []}\n'], ["中Ho", 2, ""]),
    (200, [HO, 'data: {"error": {"message": "no memory"}}'], ["中Ho", 2, "no memory"]),
    (200, ['data: {"error": "no model"}\n'], ["", 0, "no model"]),
    (500, ["<b>broken</b>"], ["", 0, "500 <b>broken</b>"]),
]


@needs_node
@pytest.mark.parametrize("status, chunks, wanted", ANSWERS)
def test_the_page_shows_an_answer_or_why_there_is_none(status, chunks, wanted):
    functions = PAGE[PAGE.index("const END") : PAGE.index("async function send")]
    call = f"answer({status}, {json.dumps(chunks)}).then(found => console.log(JSON.stringify(found)))"
    out = subprocess.check_output(["node", "-e", BROWSER + functions + call], text=True)
    text, n_messages, words = json.loads(out)
    assert [text, n_messages] == wanted[:2]
    assert words.startswith(wanted[2])
