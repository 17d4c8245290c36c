"""Model cards: what huggingface_hub reads in them, when a run writes them, and which files an upload sends."""

import re
import shlex
import shutil
import signal

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.utils import filter_repo_objects

import lora_finetune
import train_gpt2
from parts.card import model_card
from parts.checkpoint import find_damage, load_model
from tests.conftest import Door
from tests.finetuning import ROWS
from tests.helpers import ROOT, log_of, write_json

SHORT = dict(max_steps=4, eval_interval=2, checkpoint_interval=2, sample_interval=0, keep_checkpoints=0, eval_steps=1)
MODEL = {"model.safetensors", "config.json"}
LOG = [
    dict(
        step=0,
        kind="run",
        command="train_gpt2.py --data 'a  |b'",
        data=dict(source="corpus", tokens=10**10, dataset="HuggingFaceFW/fineweb-edu"),
        base="",
    ),
    dict(step=250, kind="val", loss=5.0, bpb=1.6),
    dict(step=500, kind="train", loss=4.1, tokens=262_144_000),
    dict(step=500, kind="val", loss=4.02, bpb=1.301),
    dict(step=500, kind="hellaswag", acc=0.26, acc_norm=0.27, gold_bpb=1.2, n=10042),
]


def with_start(**changes) -> list[dict]:
    """LOG with other words in its first record."""
    return [LOG[0] | changes, *LOG[1:]]


def figures(text: str) -> list[str]:
    """Those of the table."""
    return re.findall(r"\| ([\d.,]+) at step", text)


# ---- what is in it


def test_the_hub_reads_what_a_model_is_and_on_which_dataset_it_was_trained(tmp_path):
    found = ModelCard(model_card(tmp_path, "gpt2", LOG)).data.to_dict()
    assert found == dict(
        library_name="transformers",
        pipeline_tag="text-generation",
        license="unknown",
        datasets=["HuggingFaceFW/fineweb-edu"],
    )


def test_people_read_the_newest_figures_and_how_to_load_the_model(tmp_path):
    text = model_card(tmp_path, "gpt2", LOG)
    assert figures(text) == ["262,144,000", "4.0200", "1.3010", "0.2700", "10,042"]
    assert "source `corpus`, tokens 10,000,000,000" in text
    assert 'pipeline("text-generation", "gpt2")' in text
    assert "\n    python train_gpt2.py --data 'a |b'\n" in text


@pytest.mark.parametrize("base, named", [("gpt2", "gpt2"), ("tests", None)])
def test_a_base_is_named_to_the_hub_if_it_is_on_the_hub(tmp_path, base, named):
    text = model_card(tmp_path, "lora", with_start(base=base))
    assert ModelCard(text).data.to_dict().get("base_model") == named
    assert f"from `{base}`" in text


def test_an_adapter_is_loaded_by_peft(tmp_path):
    (tmp_path / "adapter_config.json").touch()
    text = model_card(tmp_path, "lora", LOG)
    assert ModelCard(text).data.library_name == "peft"
    assert "PeftModel.from_pretrained" in text


BREAKS_OUT = "a\n---\n|`b"  # of a line, of the metadata, of a cell, of backquotes


@pytest.mark.parametrize(
    "change",
    [
        dict(command=BREAKS_OUT),
        dict(data=dict(source=BREAKS_OUT, dataset=BREAKS_OUT)),
        dict(base=BREAKS_OUT),
        dict(data=None, base=None),
    ],
)
def test_no_word_of_a_log_breaks_out_of_its_place_in_the_card(tmp_path, change):
    text = model_card(tmp_path, "gpt2", with_start(**change))
    assert text.count("\n---\n") == 1
    assert "4.0200" in figures(text)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert [row for row in rows if len(re.findall(r"(?<!\\)\|", row)) != 3] == []


def test_a_figure_that_was_not_finite_is_left_out(tmp_path):
    text = model_card(tmp_path, "gpt2", [*LOG, dict(step=600, kind="val", loss=None, bpb=None)])
    assert "4.0200" not in figures(text)


# ---- when it is written


def test_the_last_checkpoint_of_a_run_has_a_card_and_no_other(train, run_dir):
    train(**SHORT)
    assert [path.parent.name for path in run_dir.glob("step_*/README.md")] == ["step_000004"]
    last = log_of(run_dir, "val")[-1]
    text = (run_dir / "step_000004" / "README.md").read_text()
    assert figures(text) == ["1,024", f"{last['loss']:.4f}", f"{last['bpb']:.4f}"]
    assert (run_dir / "step_000004/learning_curve.png").read_bytes() == (run_dir / "learning_curve.png").read_bytes()


def test_a_run_that_is_stopped_has_a_card(train, run_dir, monkeypatch):
    def validate(*args):
        signal.raise_signal(signal.SIGTERM)
        return dict(loss=5.0, bpb=1.5)

    monkeypatch.setattr(train_gpt2, "validate", validate)
    assert train.result(**SHORT).returncode == 143
    assert figures((run_dir / "step_000002" / "README.md").read_text()) == ["512", "5.0000", "1.5000"]


def test_a_card_can_be_edited(train, run_dir):
    train(**SHORT)
    path = run_dir / "step_000004"
    (path / "README.md").write_text("mine")
    (path / ".README.md.77.tmp").write_text("half of one, by a process that was killed")
    assert find_damage(path) is None
    train(**SHORT | dict(resume=True))  # nothing is left to do
    train(**SHORT | dict(resume=True, max_steps=6))
    assert (path / "README.md").read_text() == "mine"
    assert not (path / ".README.md.77.tmp").exists()


def test_adapters_and_merged_models_have_cards_and_no_older_one_is_lost(train, tmp_path, inline):
    train(**SHORT)
    settings = dict(
        base=tmp_path / "run",
        data=write_json(tmp_path / "rows.json", ROWS),
        out_dir=tmp_path / "lora",
        max_steps=2,
        checkpoint_interval=1,
        lora_dim=2,
        batch_size=8,
        dtype="float32",
        device="cpu",
    )
    finetune = Door(lambda **options: inline(lora_finetune.main, **settings | options))
    finetune(merge=tmp_path / "merged")
    adapter, merged = ((tmp_path / name / "README.md").read_text() for name in ("lora/adapter", "merged"))
    assert ModelCard(adapter).data.library_name == "peft"
    assert ModelCard(merged).data.library_name == "transformers"
    loss = f"{log_of(tmp_path / 'lora', 'val')[-1]['loss']:.4f}"
    assert loss in figures(adapter)
    assert loss in figures(merged)
    assert "rows.json" in merged
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


def test_a_curve_that_cannot_be_copied_ends_no_run(train, run_dir):
    run_dir.mkdir()
    train(**SHORT)
    (run_dir / "learning_curve.png").unlink()
    (run_dir / "learning_curve.png").mkdir()
    assert "learning_curve.png is not drawn" in train(**SHORT | dict(resume=True, max_steps=6)).stdout
    assert (run_dir / "step_000006" / "README.md").exists()
