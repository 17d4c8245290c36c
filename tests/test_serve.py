"""Clients and servers that people use, on what lora_finetune.py writes: the answers are those of `sample.py --chat`."""

import io
import json
import shutil
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

import lora_finetune as lf
import sample
from bpe.tokenizer import Tokenizer
from finetuning import chat
from run.checkpoint import save_model
from tests.finetuning import adapted, save_adapter, small_gpt
from tests.helpers import ROOT, arguments, run_inline

SAID = ["Say boat now.", "Say <|endoftext|> tide (twice).", "Say it."]
LONGEST = 12  # tokens of an answer


@pytest.fixture(scope="module")
def models(tmp_path_factory, small_tokenizer) -> SimpleNamespace:
    """`base`, and `merged`: the same with an adapter. Weights are random, and such that the answers differ from each
    other, can be read, and end by themselves or are cut."""
    path = tmp_path_factory.mktemp("serve")
    base, tokenizer = small_gpt(n_positions=256), small_tokenizer
    for p in base.transformer.h.parameters():
        p.data *= 30 if p.dim() == 2 else 1  # what was read counts for more than the last token
    embedding, eot = base.transformer.wte.weight.data, tokenizer.eot_token
    base.transformer.ln_f.bias.data += 10 * embedding[eot]  # makes the end of an answer likelier
    unreadable = [i for i, text in tokenizer.vocab.items() if not text.decode("latin-1").isprintable() or text > b"~"]
    embedding[[i for i in unreadable if i != eot]] = 0
    (path / "base").mkdir()
    save_model(path / "base", base, tokenizer)
    adapter = save_adapter(adapted(base), path / "adapter")
    lf.write_merged(lf.Config(base=str(path / "base"), merge=str(path / "merged")), str(adapter))
    return SimpleNamespace(base=str(path / "base"), merged=str(path / "merged"), tokenizer=tokenizer)


@pytest.fixture(scope="module")
def server():
    """The address of `transformers serve --enable-cors`, in a thread."""
    for package in ("fastapi", "uvicorn", "openai", "accelerate"):
        pytest.importorskip(package, reason=f"needs transformers[serving]: {package} is missing")
    from transformers.cli.serve import Serve

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    serve = Serve(host="127.0.0.1", port=port, device="cpu", enable_cors=True, non_blocking=True, log_level="error")
    while not serve.server.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}/v1"
    serve.kill_server()


@pytest.fixture
def spoken(models, capsys, monkeypatch) -> str:
    """What `sample.py --chat` prints when SAID is said to it, greedily."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join([*SAID[1:], "", ""]).encode())))
    words = arguments(temperature=0, max_new_tokens=LONGEST, chat=True, dtype="float32", device="cpu")
    result = run_inline(sample.main, [models.merged, SAID[0], *words], capsys, monkeypatch)
    assert result.returncode == 0, result.stderr
    return result.stdout


def converse(answer) -> tuple[str, list[dict]]:
    """SAID, with what `answer(messages)` says to each, as sample.py prints it, and as messages."""
    messages, printed = [], ""
    for text in SAID:
        messages.append(dict(role="user", content=text))
        messages.append(dict(role="assistant", content=answer(messages)))
        printed += messages[-1]["content"].lstrip() + "\n> "
    return printed, messages


@pytest.mark.parametrize("stream", [False, True])
def test_openai_gets_the_tokens_of_sample_chat(server, models, spoken, stream):
    from openai import OpenAI

    client = OpenAI(base_url=server, api_key="none", max_retries=0)

    def answer(messages):
        options = dict(model=models.merged, messages=messages, temperature=0, max_tokens=LONGEST, stream=stream)
        found = client.chat.completions.create(**options)
        if not stream:
            return found.choices[0].message.content
        return "".join(chunk.choices[0].delta.content or "" for chunk in found)

    printed, messages = converse(answer)
    assert printed == spoken
    lengths = [len(models.tokenizer.encode_ordinary(message["content"])) for message in messages[1::2]]
    assert 1 < min(lengths) < LONGEST == max(lengths)  # some end by themselves, others are cut


def test_a_pipeline_of_transformers_gives_the_same_answers(models, spoken):
    from transformers import pipeline

    ask = pipeline("text-generation", models.merged, device="cpu")
    options = dict(max_new_tokens=LONGEST, do_sample=False)
    assert converse(lambda messages: ask(messages, **options)[0]["generated_text"][-1]["content"])[0] == spoken


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
