"""Clients and servers that people use, on what lora_finetune.py writes: the answers are those of `sample.py --chat`."""

import functools
import http.server
import io
import shutil
import socket
import sys
import threading
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
def models(tmp_path_factory) -> SimpleNamespace:
    """`base`, and `merged`: the same with an adapter. Weights are random, and such that the answers differ from each
    other, can be read, and end by themselves or are cut."""
    path = tmp_path_factory.mktemp("serve")
    tokenizer = Tokenizer.train([(ROOT / "input.txt").read_text()[:60_000]], 320)
    base = small_gpt(n_positions=256)
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


def test_a_model_without_a_template_refuses_messages_and_takes_text(server, models):
    from openai import OpenAI, OpenAIError

    client = OpenAI(base_url=server, api_key="none", max_retries=0)
    with pytest.raises(OpenAIError):
        client.chat.completions.create(model=models.base, messages=[dict(role="user", content="Hi")], max_tokens=4)
    client = OpenAI(base_url=server, api_key="none", max_retries=0)  # the server has closed the connection of the other
    prompt = chat.prompt_of("Hi", models.tokenizer)
    text = client.completions.create(model=models.base, prompt=prompt, temperature=0, max_tokens=4).choices[0].text
    model, tokenizer = sample.open_model(sample.Config(models.base))
    config = sample.Config(models.base, max_new_tokens=4, temperature=0)
    assert text == "".join(sample.stream(model, tokenizer, tokenizer.encode_ordinary(prompt), config, None))


# ---- the page


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Chromium without a window."""
    pytest.importorskip("selenium", reason="needs selenium")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("needs chromium and chromedriver (Debian: chromium, chromium-driver)")
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = chromium
    profile = tmp_path_factory.mktemp("profile")
    for word in ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync",
                 "disable-background-networking", "disable-component-update", "disable-dev-shm-usage"):  # fmt: skip
        options.add_argument(f"--{word}")
    options.add_argument(f"--user-data-dir={profile}")
    found = Chrome(options=options, service=ChromeService(driver))
    yield found
    found.quit()


@pytest.fixture(scope="module")
def pages():
    """`python -m http.server --directory docs`, in a thread."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = functools.partial(Quiet, directory=str(ROOT / "docs"))
    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{found.server_port}"
    found.shutdown()
    found.server_close()


PROMPTS = [
    [dict(role="user", content="  Hi ")],
    [dict(role="system", content="Be kind."), dict(role="user", content="Say <|endoftext|>!")],
    [dict(role="user", content="a"), dict(role="assistant", content=":) x"), dict(role="user", content="")],
    [dict(role="user", content="a"), dict(role="assistant", content=""), dict(role="user", content="b"),
     dict(role="user", content="中\n😀"), dict(role="assistant", content="7"), dict(role="system", content="{{x}}")],
    [],
]  # fmt: skip


@pytest.mark.slow
def test_the_page_writes_conversations_as_chat_py_does(browser, pages, models):
    browser.get(f"{pages}/chat.html")
    for messages in PROMPTS:
        text = "".join(t + "<|endoftext|>" * is_answer for t, is_answer in chat.pieces(messages, models.tokenizer))
        assert browser.execute_script("return prompt(arguments[0])", messages) == text


def wait_until(condition, seconds=60):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end
        time.sleep(0.05)


def answers(browser) -> list[list[str]]:
    """Of each column, without the line below an answer that says how it ended."""
    return browser.execute_script(
        "return [...document.querySelectorAll('section')].map(s => [...s.querySelectorAll('li.assistant')]"
        ".map(li => [...li.childNodes].filter(n => n.nodeName === '#text').map(n => n.data).join('')))"
    )


@pytest.mark.slow
def test_people_talk_to_two_models_in_the_browser(server, pages, browser, models, spoken):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    browser.get("about:blank")
    fields = f"server={server}&models={models.merged},{models.base}&temperature=0&max_tokens={LONGEST}"
    browser.get(f"{pages}/chat.html#{fields}")
    browser.find_elements(By.CSS_SELECTOR, "section select")[1].send_keys("as text")
    for text in SAID:
        browser.find_element(By.ID, "said").send_keys(text, Keys.ENTER)
        wait_until(lambda: browser.find_element(By.ID, "send").is_enabled())
    merged, base = answers(browser)
    assert "".join(answer + "\n> " for answer in merged) == spoken
    # the base is asked with the words that are shown, and answers something else
    model, tokenizer = sample.open_model(sample.Config(models.base))
    config = sample.Config(models.base, max_new_tokens=LONGEST, temperature=0)
    first = chat.prompt_of(SAID[0], tokenizer)
    expected = "".join(sample.stream(model, tokenizer, tokenizer.encode_ordinary(first), config, None)).lstrip()
    assert base[0] == expected != merged[0] and len(base) == 3
    shown = browser.find_elements(By.TAG_NAME, "pre")[1].get_property("textContent")
    assert shown.startswith(first) and shown.endswith("<|endoftext|>")
