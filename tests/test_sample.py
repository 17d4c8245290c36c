"""sample.py as people call it: prompts from everywhere, several texts, conversations."""

import io
import re
import sys

import pytest
import torch

import sample
from bpe.tokenizer import Tokenizer
from model import GPT
from parts import chat, lora
from parts.checkpoint import save_model
from parts.huggingface import load_adapter
from tests.finetuning import adapted, save_adapter, small_gpt
from tests.helpers import arguments, assert_user_error


@pytest.fixture(scope="module")
def base(tmp_path_factory, small_tokenizer):
    """A model directory, an adapter for it, and the model padded with ids that are no token and likelier than any."""
    path = tmp_path_factory.mktemp("base")
    model = small_gpt(n_positions=128)
    embedding = model.transformer.wte.weight.data
    embedding *= 10  # as after training: some tokens are much likelier than others
    for p in model.transformer.h.parameters():
        if p.dim() == 2:
            p.data *= 3  # what was read counts for more than the last token
    model.transformer.ln_f.bias.data += 1.8 * embedding[small_tokenizer.eot_token]  # some texts end early
    save_model(path / "base", model, small_tokenizer)
    padded = small_gpt(n_positions=128, vocab_size=len(small_tokenizer) + 64)
    rows = torch.cat([embedding, 9 * embedding[:64]])
    padded.load_state_dict(model.state_dict() | {"transformer.wte.weight": rows, "lm_head.weight": rows})
    save_model(path / "padded", padded, small_tokenizer)
    save_adapter(adapted(model), path / "adapter")
    return path


@pytest.fixture
def run(base, inline, monkeypatch):
    """Call the script in this process: run("a prompt", temperature=0, ...)."""

    def call(*words, model: str = "base", stdin: bytes | None = None, **options):
        options = dict(max_new_tokens=8, dtype="float32", device="cpu") | options
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        return inline(sample.main, base / model, *arguments(**options), *words)

    return call


def greedy(model: GPT, small_tokenizer, ids: list[int], n: int) -> str:
    """The oracle: generation without a cache, cut at the end of the document."""
    ids = ids or [small_tokenizer.eot_token]
    new = model.generate(torch.tensor([ids]), n, temperature=0)[0, len(ids) :].tolist()
    return small_tokenizer.decode(new).split("<|endoftext|>")[0]


def test_a_greedy_text_is_that_of_the_model_up_to_the_end_of_the_document(run, base, small_tokenizer):
    model = GPT.from_pretrained(str(base / "base"))
    lengths = set()
    for prompt in ("The sea", "", "中文", "A boat ", "of"):
        ids = small_tokenizer.encode_ordinary(prompt)
        text = greedy(model, small_tokenizer, ids, 8)
        assert run(prompt, temperature=0).stdout == prompt + text + "\n"
        assert run(prompt, temperature=0, num_samples=2).stdout == "".join(
            f"--- sample {number}\n{prompt}{text}\n" for number in (1, 2)
        )
        lengths.add(len(small_tokenizer.encode_ordinary(text)))
    assert min(lengths) < 8 <= max(lengths)


def test_a_text_appears_as_it_is_written(run, monkeypatch):
    terminal = io.StringIO()
    seen = []
    terminal.flush = lambda: seen.append(terminal.getvalue())
    monkeypatch.setattr(sys, "stdout", terminal)
    run("The sea", temperature=0)
    assert seen[0] == "The sea"
    assert len(set(seen)) > 4


def test_a_prompt_that_looks_like_an_option_goes_last_after_two_dashes(run):
    assert run("--", "--chat", max_new_tokens=0).stdout == "--chat\n"


@pytest.mark.parametrize("stdin, prompt", [(b"a\nb\r\n", "a\nb"), ("中".encode(), "中")])
def test_a_dash_is_standard_input(run, stdin, prompt):
    assert run("-", stdin=stdin, max_new_tokens=0).stdout == prompt + "\n"


def test_bytes_that_are_not_utf8_are_one_line(run):
    assert_user_error(run("-", stdin=b"caf\xe9\n"))
    assert_user_error(run(chat=True, stdin=b"caf\xe9\n\n"))
    assert "caf" in run("caf\udce9").stdout


def test_a_chat_needs_a_token_that_ends_an_answer(inline, tmp_path):
    save_model(tmp_path, small_gpt(), Tokenizer((), special_tokens=("<|pad|>",)))
    assert_user_error(inline(sample.main, tmp_path, chat=True, device="cpu"), "<|endoftext|>")


def test_the_seed_decides_the_texts_and_each_of_them_is_another(run):
    first = run("The sea", max_new_tokens=20, seed=1).stdout
    assert run("The sea", max_new_tokens=20, seed=1).stdout == first
    assert run("The sea", max_new_tokens=20, seed=2).stdout != first
    several = run("The sea", max_new_tokens=20, num_samples=70).stdout
    assert run("The sea", max_new_tokens=20, num_samples=70).stdout == several
    texts = [text.split("\n", 1) for text in several.split("--- sample ")[1:]]
    assert [int(number) for number, _ in texts] == list(range(1, 71))
    assert len({text for _, text in texts}) > 60
    assert [text for _, text in texts[64:]] != [text for _, text in texts[:6]]  # the second batch draws other numbers


# n: how long the first message is; given: at most a third of the context of 128
@pytest.mark.parametrize("n, asked, given", [(5, 10, 10), (8, 200, 42)])
def test_a_chat_continues_the_form_that_was_trained_and_forgets_the_oldest_turns(
    run, base, small_tokenizer, n, asked, given
):
    said = ["Say sea. " * n, "Say tide.", "Say boat."]
    stdin = "\n".join(said[1:]).encode()
    result = run(said[0], adapter=base / "adapter", chat=True, temperature=0, max_new_tokens=asked, stdin=stdin)
    model = load_adapter(GPT.from_pretrained(str(base / "base")), base / "adapter").eval()
    ours = chat.our_chat(small_tokenizer)
    messages = []
    printed = ""
    dropped = 0
    for text in said:
        messages.append(dict(role="user", content=text))
        while len(ids := ours.prompt_ids(messages)) > 128 - given and len(messages) > 1:
            messages = messages[2:]
            dropped += 1
        answer = greedy(model, small_tokenizer, ids, given).lstrip()
        printed += f"{answer}\n> "
        messages.append(dict(role="assistant", content=answer))
    assert result.stdout == printed
    assert result.stderr.count("note:") == dropped
    assert f" {given} " in result.stderr


def test_a_chat_says_how_much_it_reads_of_a_message_that_is_longer_than_its_context(run, small_tokenizer):
    said = "Say sea. " * 60
    n = len(chat.our_chat(small_tokenizer).prompt_ids([dict(role="user", content=said)]))
    result = run(said, chat=True, stdin=b"")
    [note] = [line for line in result.stderr.splitlines() if line.startswith("note:")]
    assert re.findall(r"\d+", note) == [str(n), "128"]


@pytest.mark.parametrize("options", [dict(temperature="nan"), dict(num_samples=0), dict(adapter="absent")], ids=str)
def test_wrong_constants_are_one_line(run, options):
    (name,) = options
    assert_user_error(run("Hi", **options), name)


def test_a_terminal_shows_control_characters_and_does_not_obey_them(run, monkeypatch):
    prompt = "a\x1b[2Jb\n\tc"
    assert run(prompt, max_new_tokens=0).stdout == prompt + "\n"  # a file or a pipe
    for number in (1, 2):
        terminal = io.StringIO()
        terminal.isatty = lambda: True
        monkeypatch.setattr(sys, "stdout", terminal)
        run(prompt, max_new_tokens=0, num_samples=number)
        assert "a\\x1b[2Jb\n\tc\n" in terminal.getvalue()
        assert "\x1b" not in terminal.getvalue()


@pytest.mark.parametrize("way", [dict(num_samples=2), dict(chat=True, stdin=b"\n")], ids=str)
def test_an_id_without_a_token_is_never_printed_however_likely(run, base, small_tokenizer, way):
    ids = torch.tensor([small_tokenizer.encode("The sea")])
    assert GPT.from_pretrained(str(base / "padded"))(ids)[0, -1].argmax() >= len(small_tokenizer)
    expected = run("The sea", temperature=0, **way).stdout
    assert run("The sea", model="padded", temperature=0, **way).stdout == expected
    assert run("The sea", model="padded", top_k=0, **way).returncode == 0




def test_an_adapter_is_merged_before_weights_are_rounded(run, base, small_tokenizer):
    model = lora.merge(load_adapter(GPT.from_pretrained(str(base / "base")), base / "adapter"))
    save_model(base / "merged", lora.remove_lora(model), small_tokenizer)
    options = dict(dtype="bfloat16", num_samples=64, max_new_tokens=20)
    adapted = run("The sea", adapter=base / "adapter", **options)
    assert adapted.stdout == run("The sea", model="merged", **options).stdout
