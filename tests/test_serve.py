"""docs/chat.html: what the page writes to a server, and what it shows of the answer."""

import json
import shutil
import subprocess

import pytest

from bpe.tokenizer import Tokenizer
from parts import chat
from tests.finetuning import said, written
from tests.helpers import ROOT

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
