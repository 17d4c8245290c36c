"""Models that were taught another chat format elsewhere: they are spoken to in theirs, and end where theirs ends."""

import io
import shutil
import sys
from pathlib import Path

import pytest

import lora_finetune as lf
import sample
from bpe.tokenizer import Tokenizer
from model import GPT
from parts import chat
from parts.checkpoint import read_tokenizer, save_model
from tests.finetuning import adapted, said, save_adapter, small_gpt, written
from tests.helpers import arguments, assert_user_error, prose, read_json, write_json

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SAID = ["Say boat.", "Say tide now.", "Say it."]
LONGEST = 30  # tokens of an answer


@pytest.fixture(scope="module")
def chatml(tmp_path_factory) -> Path:
    """A GPT-2 as transformers saves it after such a finetuning: ChatML's tokens, its template, and an end among others.
    The weights are random, and such that answers differ, can be read, and end by themselves or are cut."""

    from transformers import AutoTokenizer, GPT2LMHeadModel

    path = tmp_path_factory.mktemp("chatml")
    tokenizer = Tokenizer.train([prose(60_000)], 320, special_tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    model = small_gpt(n_positions=256)
    for p in model.transformer.h.parameters():
        if p.dim() == 2:
            p.data *= 30  # what was read counts for more than the last token
    end = tokenizer.special_tokens["<|im_end|>"]
    embedding = model.transformer.wte.weight.data
    model.transformer.ln_f.bias.data += 10 * embedding[end]
    texts = {i: text.decode("latin-1") for i, text in tokenizer.vocab.items() if i != end}
    embedding[[i for i, text in texts.items() if not text.isprintable() or text > "~" or text[0] == "<"]] = 0
    save_model(path / "ours", model, tokenizer)
    theirs = GPT2LMHeadModel.from_pretrained(path / "ours")
    theirs.generation_config.eos_token_id = [tokenizer.eot_token, end]
    theirs.save_pretrained(path / "theirs")
    reader = AutoTokenizer.from_pretrained(path / "ours", eos_token="<|im_end|>")
    reader.chat_template = CHATML
    reader.save_pretrained(path / "theirs")
    return path / "theirs"


@pytest.fixture
def converse(inline, monkeypatch):
    def call(model: Path, **options):
        """What sample.py --chat prints."""
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join([*SAID[1:], "", ""]).encode())))
        options = dict(temperature=0, max_new_tokens=LONGEST, chat=True, dtype="float32", device="cpu") | options
        return inline(sample.main, model, *arguments(**options), SAID[0])

    return call


def expected(path: Path) -> tuple[str, list[int]]:
    """The same conversation held by transformers alone, and the number of tokens of each answer."""

    from transformers import AutoTokenizer, GPT2LMHeadModel

    reader = AutoTokenizer.from_pretrained(path)
    model = GPT2LMHeadModel.from_pretrained(path)
    messages = []
    lengths = []
    printed = ""
    for text in SAID:
        messages.append(dict(role="user", content=text))
        read = reader.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        out = model.generate(**read, max_new_tokens=LONGEST, do_sample=False, pad_token_id=0)
        out = out[0, read["input_ids"].shape[1] :]
        lengths.append(len(out))
        answer = reader.decode(out, skip_special_tokens=True)
        messages.append(dict(role="assistant", content=answer))
        printed += answer.lstrip() + "\n> "
    return printed, lengths


def copy_of(folder: Path, to: Path, **changes: dict) -> Path:
    """A model's directory with other settings in its JSON files."""
    shutil.copytree(folder, to)
    for name, change in changes.items():
        file = to / f"{name}.json"
        write_json(file, read_json(file) | change)
    return to


def test_a_model_is_spoken_to_in_its_own_template_and_stops_at_its_own_end(chatml, converse):
    result = converse(chatml)
    printed, lengths = expected(chatml)
    assert result.stdout == printed, result.stderr
    assert str(chatml) in result.stderr
    assert 1 < min(lengths) < LONGEST == max(lengths)  # some end by themselves, others are cut


def test_a_template_in_the_tokenizers_settings_counts_too(chatml, converse, tmp_path):
    """Alone, as older versions of transformers write it, and as one of several."""
    printed, _ = expected(chatml)
    several = [dict(name="rag", template="{{ nonsense"), dict(name="default", template=CHATML)]
    for name, found in ("one", CHATML), ("several", several):
        model = copy_of(chatml, tmp_path / name, tokenizer_config=dict(chat_template=found))
        (model / "chat_template.jinja").unlink()
        assert converse(model).stdout == printed


def test_an_answer_ends_at_any_special_token(chatml, converse, tmp_path):
    """Also where only the template says which one it is."""
    changes = dict(generation_config=dict(eos_token_id=317), tokenizer_config=dict(eos_token=None))
    model = copy_of(chatml, tmp_path / "model", **changes)
    assert converse(model).stdout == expected(chatml)[0]


def test_a_text_ends_there_too(chatml, inline):
    options = dict(temperature=0, max_new_tokens=40, dtype="float32", device="cpu")
    prompt = f"<|im_start|>user\n{SAID[0]}"
    result = inline(sample.main, chatml, *arguments(**options), prompt)
    assert "<|im_end|>" not in result.stdout.removeprefix(prompt)


def test_the_template_of_an_adapter_comes_before_that_of_its_base(chatml, converse, tmp_path):
    tokenizer = read_tokenizer(chatml)
    adapter = save_adapter(adapted(GPT.from_pretrained(str(chatml))), tmp_path / "adapter")
    assert f"{chatml}\n" in converse(chatml, adapter=adapter).stderr
    chat.save_chat_files(adapter, tokenizer)
    assert f"{adapter}\n" in converse(chatml, adapter=adapter).stderr
    messages = said("s: Be", "u: Hi")
    found = chat.chat_of([adapter, chatml], tokenizer, "")
    assert found.prompt(messages) == written(messages, tokenizer)


@pytest.mark.parametrize("of", ["base", "adapter"])
def test_a_merged_model_keeps_the_template_and_the_ends_of_its_adapter_or_its_base(chatml, converse, tmp_path, of):
    """As transformers then speaks to it; an adapter of TRL has the files of a tokenizer."""
    adapter = save_adapter(adapted(GPT.from_pretrained(str(chatml))), tmp_path / "adapter")
    if of == "adapter":
        chat.save_chat_files(adapter, read_tokenizer(chatml))
    config = lf.Config(base=str(chatml), adapter=str(adapter), merge=str(tmp_path / "merged"))
    lf.write_merged(config, chatml, adapter)
    of_both = converse(chatml, adapter=adapter).stdout
    printed, lengths = expected(tmp_path / "merged")
    assert converse(tmp_path / "merged").stdout == printed == of_both
    assert min(lengths) < LONGEST


def test_a_model_merged_from_files_without_a_template_gets_none(chatml, tmp_path):
    from transformers import AutoTokenizer

    adapter = save_adapter(adapted(GPT.from_pretrained(str(chatml))), tmp_path / "adapter")
    base = chatml.parent / "ours"
    lf.write_merged(lf.Config(base=str(base), merge=str(tmp_path / "merged")), base, adapter)
    assert not AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template


def test_messages_that_a_template_refuses_are_one_line(chatml, converse, tmp_path):
    model = copy_of(chatml, tmp_path / "model")
    for wrong in ("{{ raise_exception('no') }}", "{% for %}", "{{ 1 + messages }}"):
        (model / "chat_template.jinja").write_text(wrong)
        assert_user_error(converse(model), str(model))
