"""Model cards: what huggingface_hub reads in them, when a run writes them, and which files an upload sends."""

import re
import shlex
import shutil

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.utils import filter_repo_objects

import lora_finetune
from parts import card
from parts.checkpoint import find_damage, load_model
from tests.conftest import Door
from tests.finetuning import ROWS
from tests.helpers import ROOT, log_of, write_json

SHORT = dict(max_steps=4, eval_interval=2, checkpoint_interval=2, sample_interval=0, keep_checkpoints=0, eval_steps=1)
MODEL, ADAPTER = {"model.safetensors", "config.json"}, {"adapter_model.safetensors", "adapter_config.json"}
RUN = dict(step=0, kind="run", command="train_gpt2.py --data 'a  |b'", parameters=124_439_808, commit="abc",
           config=dict(data="edu_fineweb10B"), data=dict(source="corpus", tokens=10**10),
           base="", hub=dict(dataset="HuggingFaceFW/fineweb-edu"))  # fmt: skip
LOG = [
    RUN,
    dict(step=250, kind="val", loss=5.0, bpb=1.6),
    dict(step=500, kind="train", loss=4.1, tokens=262_144_000),
    dict(step=500, kind="val", loss=4.02, bpb=1.301),
    dict(step=500, kind="hellaswag", acc=0.26, acc_norm=0.27, gold_bpb=1.2, n=10042),
]


def figures(text: str) -> list[str]:
    """Those of the table."""
    return re.findall(r"\| ([\d.,]+) at step", text)


# ---- what is in it


def test_a_card_says_no_more_than_the_log():
    assert card.what_it_is({}) == "GPT-2, trained from random weights on `unknown data`."


FOR_PEOPLE = """
# gpt2

A GPT-2 with 124,439,808 parameters, trained from random weights on `edu_fineweb10B`.

License: not chosen yet. Choose one in the first lines of this file; the licenses of the data and the base model may \
limit the choice.

| | |
|---|---|
| data | source `corpus`, tokens 10,000,000,000 |
| training tokens | 262,144,000 at step 500 |
| validation loss, nats per token | 4.0200 at step 500 |
| validation, bits per byte | 1.3010 at step 500 |
| HellaSwag accuracy, lengths normalized | 0.2700 at step 500 |
| HellaSwag accuracy | 0.2600 at step 500 |
| HellaSwag, bits per byte of the right ending | 1.2000 at step 500 |
| HellaSwag, examples | 10,042 at step 500 |
| commit | `abc` |

![Learning curve](learning_curve.png)

## How it was made

    python train_gpt2.py --data 'a  |b'
"""


def test_the_hub_reads_where_a_model_comes_from_and_people_what_it_reached():
    text = card.model_card("gpt2", LOG, MODEL | {"learning_curve.png"})
    assert ModelCard(text).data.to_dict() == dict(
        library_name="transformers", pipeline_tag="text-generation", license="unknown",
        datasets=["HuggingFaceFW/fineweb-edu"],
    )  # fmt: skip
    assert text.rpartition("---\n")[2] == FOR_PEOPLE


@pytest.mark.parametrize(
    "files, base, library",
    [(MODEL, "gpt2", "transformers"), (ADAPTER, "gpt2", "peft"), (MODEL, "tests", "transformers")],
)
def test_a_base_is_named_to_the_hub_if_it_is_on_the_hub(files, base, library):
    record = (
        RUN | card.provenance({}, "tatsu-lab/alpaca", base) | dict(config=dict(base=base, data="rows.json", lora_dim=8))
    )
    text = card.model_card("lora", [record], files)
    data = ModelCard(text).data.to_dict()
    assert data["datasets"] == ["tatsu-lab/alpaca"] and data["library_name"] == library
    assert f"further from `{base}` on `rows.json` with LoRA of rank 8." in text
    assert data.get("base_model") == (None if base == "tests" else base)
    assert ("An adapter for" in text) == (files == ADAPTER)


BREAKS_OUT = "a\n---\n|`b"  # of a line, of the metadata, of a cell, of backquotes


@pytest.mark.parametrize(
    "change",
    [
        dict(command=BREAKS_OUT, commit=BREAKS_OUT),
        dict(config=dict(data=BREAKS_OUT), data=dict(source=BREAKS_OUT), hub=dict(dataset=BREAKS_OUT)),
        dict(commit=None, parameters=None, config=None, data=None, base=None, hub=None),
    ],
)
def test_no_word_of_a_log_breaks_out_of_its_place_in_the_card(change):
    nulls = dict(step=600, kind="val", loss=None, bpb=None)
    text = card.model_card("gpt2", [RUN | change, *LOG[1:], nulls], MODEL)
    assert text.count("\n---\n") == 1 and "4.0200" in figures(text) and card.shown(BREAKS_OUT) == "`a --- \\|'b`"
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows and all(len(re.findall(r"(?<!\\)\|", row)) == 3 for row in rows), rows


# ---- when it is written


def test_every_checkpoint_has_a_card_with_the_figures_of_its_step(train, run_dir):
    train(**SHORT)
    cards = [(run_dir / f"step_00000{step}" / "README.md").read_text() for step in (2, 4)]
    # a checkpoint is written before the evaluation of its step, and its card has the figures all the same
    for val, text in zip(log_of(run_dir, "val"), cards, strict=True):
        assert figures(text)[1:] == [f"{val['loss']:.4f}", f"{val['bpb']:.4f}"]
    assert "512 at step 2 " in cards[0]
    assert all(words in cards[1] for words in ("1,024 at step 4 ", "text.txt", "learning_curve.png", "manifest"))
    curves = [path.read_bytes() for path in run_dir.rglob("learning_curve.png")]
    assert len(curves) >= 2 and curves[0] == curves[-1]


def test_a_card_can_be_edited(train, run_dir):
    train(**SHORT)
    path = run_dir / "step_000004"
    (path / "README.md").write_text("mine")
    (path / ".README.md.77.tmp").write_text("half of one, by a process that was killed")
    assert find_damage(path) is None
    train(**SHORT | dict(resume=True))  # nothing is left to do
    train(**SHORT | dict(resume=True, max_steps=6))
    assert (path / "README.md").read_text() == "mine" and not (path / ".README.md.77.tmp").exists()


def test_adapters_and_merged_models_have_cards_and_no_older_one_is_lost(train, tmp_path, inline):
    train(**SHORT)
    settings = dict(base=tmp_path / "run", data=write_json(tmp_path / "rows.json", ROWS), out_dir=tmp_path / "lora",
                    max_steps=2, checkpoint_interval=1, lora_dim=2, batch_size=8, dtype="float32",
                    device="cpu")  # fmt: skip
    finetune = Door(lambda **options: inline(lora_finetune.main, **settings | options))
    finetune(merge=tmp_path / "merged")
    adapter, merged = ((tmp_path / name / "README.md").read_text() for name in ("lora/adapter", "merged"))
    assert ModelCard(adapter).data.library_name == "peft" and ModelCard(merged).data.library_name == "transformers"
    loss = f"{log_of(tmp_path / 'lora', 'val')[-1]['loss']:.4f}"
    assert loss in figures(adapter) and loss in figures(merged)
    assert "LoRA of rank 2" in merged and "rows.json" in merged
    finetune(adapter=tmp_path / "lora" / "step_000001", merge=tmp_path / "earlier")
    assert {*re.findall(r"at step (\d)", (tmp_path / "earlier" / "README.md").read_text())} == {"1"}
    # of an adapter without its run there is nothing to say
    (tmp_path / "lora" / "adapter").rename(tmp_path / "alone")
    (tmp_path / "merged" / "README.md").write_text("mine")
    finetune(adapter=tmp_path / "alone", merge=tmp_path / "merged", overwrite=True)
    assert (tmp_path / "merged.1" / "README.md").read_text() == "mine"
    assert not (tmp_path / "merged" / "README.md").exists()


# ---- what an upload sends


def test_an_upload_sends_the_model_and_its_card_and_nothing_else(train, tmp_path):
    train(**SHORT)
    path = tmp_path / "run" / "step_000004"
    (command,) = re.findall(r"^hf upload .*$", (ROOT / "docs" / "serve.md").read_text(), re.MULTILINE)
    words = shlex.split(command)
    left_out = [pattern for option, pattern in zip(words, words[1:], strict=False) if option == "--exclude"]
    sent = set(filter_repo_objects([file.name for file in path.iterdir()], ignore_patterns=left_out))
    tokenizer = {"tokenizer.json", "tokenizer.tiktoken", "tokenizer_config.json"}
    assert sent == {"README.md", "learning_curve.png", "generation_config.json"} | MODEL | tokenizer
    (tmp_path / "download").mkdir()
    for name in sent:  # what comes back is a model: no sums that speak of files left out
        shutil.copy(path / name, tmp_path / "download")
    assert load_model(str(tmp_path / "download")).num_params() == load_model(str(path)).num_params()
