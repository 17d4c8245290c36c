"""sample.py as people call it: prompts from everywhere, several texts, conversations."""

import io
import sys

import pytest
import torch

import sample
from bpe.tokenizer import Tokenizer
from cli import UserError
from finetuning import chat
from finetuning.lora import AdapterFiles, LoRAConfig, add_lora, lora_modules
from learning.generation import generate
from model import GPT, GPTConfig
from tests.helpers import ROOT, arguments, assert_user_error, run_inline


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([(ROOT / "input.txt").read_text()[:60_000]], 320)


@pytest.fixture(scope="module")
def base(tmp_path_factory, tokenizer):
    """A model directory, and an adapter for it."""
    path = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_positions=128, vocab_size=320, n_layer=2, n_head=2, n_embd=32))
    model.transformer.wte.weight.data *= 10  # as after training: some tokens are much likelier than others
    model.save_pretrained(path / "base", tokenizer.eot_token, len(tokenizer))
    tokenizer.save(path / "base")
    config = LoRAConfig(2, 4.0)
    for module in lora_modules(add_lora(model, config)).values():
        torch.nn.init.normal_(module.lora_B, std=0.2)
    (path / "adapter").mkdir()
    AdapterFiles(model, config, str(path / "base"), "").copy()(path / "adapter")
    return path


@pytest.fixture
def run(base, capsys, monkeypatch):
    """Call the script in this process: run("a prompt", temperature=0, ...)."""

    def call(*words, stdin: bytes | None = None, **options):
        options = dict(max_new_tokens=8, dtype="float32", device="cpu") | options
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        return run_inline(sample.main, [base / "base", *words, *arguments(**options)], capsys, monkeypatch)

    return call


def greedy(base, tokenizer, prompt: str, n: int) -> str:
    model = GPT.from_pretrained(str(base / "base"))
    ids = tokenizer.encode_ordinary(prompt) or [tokenizer.eot_token]
    tokens = [row[0] for row in generate(model, [ids], n, temperature=0, stop_token=tokenizer.eot_token)]
    return tokenizer.decode([t for t in tokens if t != tokenizer.eot_token])


@pytest.mark.parametrize(
    "prompt", ["The sea", "", "- milk", "-5 degrees", "-5", "-x", "-hello you", "--- a", "-- so", "--a b", "中文 -"]
)
def test_a_prompt_may_begin_with_a_dash(run, base, tokenizer, prompt):
    result = run(prompt, temperature=0)
    assert result.returncode == 0, result.stderr
    assert result.stdout == prompt + greedy(base, tokenizer, prompt, 8) + "\n"


def test_a_prompt_that_looks_like_an_option_goes_last_after_two_dashes(base, capsys, monkeypatch):
    words = [base / "base", "--max_new_tokens", "0", "--device", "cpu", "--", "--chat"]
    assert run_inline(sample.main, words, capsys, monkeypatch).stdout == "--chat\n"


def test_a_negative_value_of_an_option_is_no_prompt(run):
    result = run(max_new_tokens=0, seed=-1)
    assert result.returncode == 0 and result.stdout == "\n"
    assert_user_error(run("-h=1", "--temprature", "3"), "temprature")


@pytest.mark.parametrize(
    "stdin, prompt", [(b"The sea\n", "The sea"), (b"a\nb\r\n", "a\nb"), ("中".encode(), "中"), (b"", "")]
)
def test_a_dash_is_standard_input(run, stdin, prompt):
    assert run("-", stdin=stdin, max_new_tokens=0).stdout == prompt + "\n"


def test_bytes_that_are_not_utf8_are_one_line(run, monkeypatch):
    assert_user_error(run("-", stdin=b"caf\xe9\n"), "standard input is not UTF-8")
    assert_user_error(run("caf\udce9"), "the prompt is not UTF-8")
    assert_user_error(run(chat=True, stdin=b"caf\xe9\n\n"), "not UTF-8")


def test_several_texts_are_generated_in_one_batch(run, base, tokenizer, monkeypatch):
    batches = []

    def record(model, rows, *args, **kwargs):
        batches.append(len(rows))
        return generate(model, rows, *args, **kwargs)

    monkeypatch.setattr("learning.generation.generate", record)
    result = run("The sea", num_samples=3, temperature=0)
    text = "The sea" + greedy(base, tokenizer, "The sea", 8)
    assert batches[0] == 3 and result.stdout == "".join(f"--- sample {n}\n{text}\n" for n in (1, 2, 3))
    different = run("The sea", num_samples=3, max_new_tokens=20).stdout.split("--- sample ")[1:]
    assert len({text[1:] for text in different}) == 3
    batches.clear()
    assert run("a", num_samples=70, max_new_tokens=1).stdout.count("--- sample ") == 70 and batches == [64, 6]


def test_texts_are_known_by_the_seed(run):
    first, again, other = (run("The sea", max_new_tokens=20, seed=seed).stdout for seed in (1, 1, 2))
    assert first == again != other
    several = [run("The sea", max_new_tokens=20, num_samples=3).stdout for _ in range(2)]
    assert several[0] == several[1]


def test_a_text_ends_at_the_end_of_the_document(run, base, tokenizer, monkeypatch):
    ids = iter([tokenizer.encode_ordinary("ab")[0], tokenizer.eot_token])
    drawn = lambda logits, **_: torch.full((len(logits),), next(ids))  # noqa: E731
    monkeypatch.setattr("learning.generation.sample_tokens", drawn)
    assert run("x").stdout == "x" + tokenizer.decode(tokenizer.encode_ordinary("ab")[:1]) + "\n"


def test_a_chat_continues_the_form_that_was_trained_and_forgets_the_oldest_turns(run, base, tokenizer, monkeypatch):
    prompts = []

    def record(model, rows, *args, **kwargs):
        prompts.append(rows[0])
        return generate(model, rows, *args, **kwargs)

    monkeypatch.setattr("learning.generation.generate", record)
    stdin = b"Say tide.\n" + b"Say boat. " * 9 + b"\n\n"
    result = run("Say sea.", adapter=base / "adapter", chat=True, temperature=0, max_new_tokens=10, stdin=stdin)
    assert result.returncode == 0, result.stderr
    model = sample.open_model(sample.Config(str(base / "base"), adapter=str(base / "adapter")))[0]
    messages, answers = [], []
    for text in ("Say sea.", "Say tide."):
        messages.append(dict(role="user", content=text))
        ids = chat.chat_ids(tokenizer, messages)
        assert prompts[len(answers)] == ids
        answer = [row[0] for row in generate(model, [ids], 10, temperature=0, stop_token=tokenizer.eot_token)]
        answers.append(tokenizer.decode([t for t in answer if t != tokenizer.eot_token]).lstrip())
        messages.append(dict(role="assistant", content=answers[-1]))
    said = result.stdout.replace("> ", "")
    assert said.startswith("".join(answer + "\n" for answer in answers))
    assert len(prompts[2]) <= 118 and tokenizer.decode(prompts[2]).startswith("BEGINNING OF CONVERSATION: USER:")
    assert "Say sea." not in tokenizer.decode(prompts[2]) and "Say boat." in tokenizer.decode(prompts[2])


def test_an_adapter_given_as_the_model_names_the_command(base, capsys, monkeypatch):
    result = run_inline(sample.main, [base / "adapter", "Hi", "--device", "cpu"], capsys, monkeypatch)
    assert_user_error(result, "is an adapter", f"sample.py {base / 'base'} --adapter {base / 'adapter'}")


@pytest.mark.parametrize(
    "options",
    [
        dict(temperature=-1), dict(temperature=1e-9), dict(temperature="nan"), dict(top_p=0), dict(top_p=1.5),
        dict(top_k=-1), dict(max_new_tokens=-1), dict(num_samples=0), dict(seed=-2), dict(chat=True, num_samples=2),
        dict(adapter="absent"),
    ],
)  # fmt: skip
def test_wrong_constants_are_one_line(run, options):
    assert_user_error(run("Hi", **options), next(iter(options)))


def test_a_tokenizer_that_is_too_large_for_the_model_is_refused(base, tmp_path, tokenizer):
    GPT(GPTConfig(n_positions=16, vocab_size=100, n_layer=1, n_head=1, n_embd=8)).save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    with pytest.raises(UserError, match="320 tokens and its model 100"):
        sample.open_model(sample.Config(str(tmp_path)))
