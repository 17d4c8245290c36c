"""lora_finetune.py: its loss and gradients, and runs as a user meets them."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

import lora_finetune as lf
from bpe.tokenizer import Tokenizer
from model import GPT
from parts import chat
from parts.checkpoint import find_adapter, save_model
from parts.conversations import Example, encode_rows, messages_of, micro_batches
from parts.huggingface import load_adapter
from tests.conftest import Door
from tests.finetuning import ROWS, adapted, distance, said, small_gpt
from tests.helpers import (
    arguments,
    assert_changes_take_effect,
    assert_refused,
    assert_refused_by_name,
    column,
    files_of,
    log_of,
    losses,
    prose,
    read_json,
    remove_after,
    steps_of,
    succeed,
    write_json,
)

# ---- the loss


def test_a_batch_gives_the_loss_and_gradients_of_its_examples_one_by_one(small_tokenizer):
    """Micro-batches of several lengths, padded, with the loss at answers only, against the plain forward pass."""
    examples = encode_rows([messages_of(r, "") for r in ROWS[:13]], chat.our_chat(small_tokenizer), 1000)
    model = adapted(small_gpt(n_positions=256))
    n_targets = sum(int((e.targets >= 0).sum()) for e in examples)
    micros = [tuple(map(torch.from_numpy, micro)) for micro in micro_batches(examples, 300, 20)]
    assert 2 <= len(micros) <= 6

    def alone(example: Example) -> torch.Tensor:
        logits = model(torch.from_numpy(example.idx).long()[None])[0]  # (T, V)
        return F.cross_entropy(logits, torch.from_numpy(example.targets).long(), reduction="sum") / n_targets

    factors = [p for p in model.parameters() if p.requires_grad]
    found = []
    for parts in ([model(*micro, n_targets=n_targets) for micro in micros], list(map(alone, examples))):
        found.append([sum(parts), *torch.autograd.grad(sum(parts), factors)])
    assert all((a - b).abs().max() < 1e-5 for a, b in zip(*found, strict=True))
    assert found[0][1].abs().max() > 1e-4  # gradients that could differ


# ---- runs


@pytest.fixture(scope="session")
def base(tmp_path_factory, small_tokenizer):
    """A base with a tokenizer, and rows to finetune it on."""
    path = tmp_path_factory.mktemp("base")
    model = small_gpt(n_positions=128)
    model.transformer.wte.weight.data *= 10  # as after training: logits that a frozen head can move
    save_model(path / "base", model, small_tokenizer)
    write_json(path / "rows.json", ROWS)
    return path


QUICK = dict(batch_size=16, max_steps=6, max_lr=0.01, eval_interval=3, checkpoint_interval=2, keep_checkpoints=0,
             lora_dim=4, sample_tokens=8, dtype="float32", device="cpu")  # fmt: skip


def quick_args(folder: Path, out, **changes) -> list[str]:
    settings = {**QUICK, "base": folder / "base", "data": folder / "rows.json", "out_dir": out, **changes}
    return arguments(**{name: value for name, value in settings.items() if value is not None})


@pytest.fixture
def finetune(base, tmp_path, inline):
    """Finetune in this process: finetune(out="run", lora_dim=2, ...)."""

    def run(out="run", **changes):
        return inline(lf.main, *quick_args(base, tmp_path / out, **changes))

    return Door(run)


@pytest.mark.parametrize(
    "constants, expected",
    [
        (dict(epochs=6, batch_size=16), (20, 1, 16, 1e-3)),  # of 54 examples; 3%, 2 r
        (dict(lora_dim=0, epochs=1e-6, warmup_steps=9), (1, 9, 0, 1e-4)),
        (given := dict(max_steps=2, warmup_steps=1, lora_alpha=5.0, max_lr=0.01), (*given.values(),)),
    ],
)
def test_constants_follow_from_the_rows_and_the_rank_unless_they_are_given(finetune, run_dir, constants, expected):
    left_out = dict.fromkeys(("max_steps", "max_lr", "lora_dim", "batch_size"))
    finetune(**left_out | constants)
    config = read_json(run_dir / "config.json")
    assert tuple(config[name] for name in given) == expected
    assert config["sequence_length"] == 128


@pytest.mark.parametrize("r", [4, 0])
def test_finetuning_lowers_the_validation_loss_and_leaves_what_it_should(finetune, base, run_dir, r):
    result = finetune(lora_dim=r, sample_interval=3)
    val = column(run_dir, "val", "loss")
    model = f"{base / 'base'} --adapter {run_dir / 'adapter'}" if r else run_dir
    for printed in (f"{val[0]:.4f}", f"{val[-1]:.4f}", f"sample.py {model} --chat"):
        assert printed in result.stdout
    assert {"step", "kind", "loss", "bpb"} <= log_of(run_dir, "val")[0].keys()
    assert column(run_dir, "val", "step") == [0, 3, 6]
    assert val[-1] < val[0] - 0.2
    assert column(run_dir, "train", "step") == list(range(1, 7))
    assert (run_dir / "learning_curve.png").exists()
    assert "--- step 6" in (run_dir / "samples.txt").read_text()
    assert steps_of(run_dir) == [2, 4, 6]
    assert (run_dir / "adapter").exists() == (r > 0)
    written = [path.name for path in (run_dir / "step_000006").glob("*.safetensors")]
    assert written == ["adapter_model.safetensors" if r else "model.safetensors"]
    if r:
        paths = (find_adapter(run_dir), run_dir / "adapter")
        loaded = [load_adapter(GPT.from_pretrained(base / "base"), path) for path in paths]
        assert distance(*loaded) == 0


def test_an_adapter_knows_its_base_and_refuses_another_of_the_same_shapes(finetune, base, run_dir):
    """Also of a base that was frozen in 16 bits."""
    finetune(max_steps=1, eval_interval=0, dtype="bfloat16")
    for adapter in (run_dir / "step_000001", run_dir / "adapter"):
        load_adapter(GPT.from_pretrained(base / "base"), adapter)
        assert_refused(str(adapter), load_adapter, small_gpt(seed=1, n_positions=128), adapter)


@pytest.mark.parametrize("options", [dict(lora_dim=0), dict(lora_dropout=0.2)])
def test_an_interrupted_run_continues_bit_for_bit(finetune, tmp_path, run_dir, options):
    finetune(**options)
    shutil.copytree(run_dir, tmp_path / "other")
    remove_after(tmp_path / "other", 2)
    finetune(out="other", resume=True, **options)
    assert losses(tmp_path / "other") == losses(run_dir)
    (weights,) = (run_dir / "step_000006").glob("*.safetensors")
    resumed = load_file(tmp_path / "other" / "step_000006" / weights.name)
    torch.testing.assert_close(resumed, load_file(weights), rtol=0, atol=0)


def test_training_goes_on_from_an_adapter(finetune, tmp_path, run_dir):
    finetune()
    after = log_of(run_dir, "val")[-1]["loss"]
    finetune.error("--lora_dim", out="more", adapter=run_dir / "adapter", lora_dim=16)
    finetune(out="more", adapter=run_dir, lora_dim=None, lora_dropout=0.5, max_steps=2, eval_interval=1)
    assert log_of(tmp_path / "more", "val")[0]["loss"] == after
    assert log_of(tmp_path / "more", "run")[0]["config"]["lora_dim"] == 4
    found = read_json(tmp_path / "more" / "adapter" / "adapter_config.json")
    assert (found["r"], found["lora_dropout"]) == (4, 0.5)


def test_a_merged_directory_is_a_plain_model_for_transformers(finetune, base, tmp_path, run_dir):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    finetune(merge=tmp_path / "merged")
    ours = load_adapter(GPT.from_pretrained(base / "base"), find_adapter(run_dir))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert distance(ours, theirs) < 1e-4
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert len(tokenizer("Hello " * 500, truncation=True)["input_ids"]) == theirs.config.n_positions
    assert tokenizer.unk_token == "<|endoftext|>"  # some converters want one
    result = finetune(adapter=run_dir, merge=tmp_path / "again", lora_dim=None)
    assert float(re.search(r"\d\.\de[-+]\d+", result.stdout)[0]) < 1e-5  # the largest difference of logits
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "merged/model.safetensors").read_bytes()


def test_what_is_written_is_spoken_to_in_the_form_that_was_trained(finetune, tmp_path, small_tokenizer):
    from transformers import AutoTokenizer, GenerationConfig

    messages = said("s: Be kind.", "u: Say <|endoftext|> (twice)", "a: :) ok", "u: Bye")
    finetune(max_steps=1, merge=tmp_path / "merged")
    finetune(max_steps=1, out="full", lora_dim=0, val_rows=0)
    assert not log_of(tmp_path / "full", "val")
    for path in ("run/adapter", "run/step_000001", "merged", "full/step_000001"):
        theirs = AutoTokenizer.from_pretrained(tmp_path / path)
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ids == chat.our_chat(small_tokenizer).prompt_ids(messages)
        assert GenerationConfig.from_pretrained(tmp_path / path).eos_token_id == [small_tokenizer.eot_token]


def test_a_base_with_a_template_of_its_own_is_told_that_it_gets_ours(finetune, base, tmp_path, small_tokenizer):
    short = dict(max_steps=1, eval_interval=0, checkpoint_interval=0)
    shutil.copytree(base / "base", tmp_path / "base")
    (tmp_path / "base/chat_template.jinja").write_text("{{ messages }}")
    assert f"note: {tmp_path / 'base'}" in finetune(base=tmp_path / "base", **short).stdout
    chat.save_chat_files(tmp_path / "base", small_tokenizer)
    assert "note:" not in finetune(base=tmp_path / "base", overwrite=True, **short).stdout


def test_a_directory_of_runs_never_becomes_a_merged_model(finetune, tmp_path):
    (tmp_path / "runs" / "first").mkdir(parents=True)
    finetune.error(str(tmp_path / "runs"), merge=tmp_path / "runs", overwrite=True)
    assert (tmp_path / "runs" / "first").is_dir()


def test_what_is_overwritten_is_renamed_and_never_lost(finetune, tmp_path, run_dir):
    merged = tmp_path / "merged"
    merged.mkdir()
    (merged / "notes.txt").write_text("mine")
    finetune(max_steps=1, merge=merged)
    assert (tmp_path / "merged.1" / "notes.txt").read_text() == "mine"
    (run_dir / "adapter" / "notes.txt").write_text("mine")  # and the run continues
    finetune(max_steps=3, resume=True, merge=merged)
    assert (run_dir / "adapter.1" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "merged.2" / "model.safetensors").exists()
    assert (run_dir / "step_000003").exists()


def test_a_finished_run_that_is_resumed_leaves_its_results_alone(finetune, tmp_path, run_dir):
    options = dict(max_steps=2, eval_interval=0, merge=tmp_path / "merged")
    finetune(**options)
    before = files_of(run_dir / "adapter") | files_of(tmp_path / "merged")
    finetune(resume=True, **options)
    assert files_of(run_dir / "adapter") | files_of(tmp_path / "merged") == before
    assert not list(tmp_path.glob("*/adapter.*")) + list(tmp_path.glob("merged.*"))


def test_a_run_ends_with_a_sample_and_an_adapter(finetune, run_dir):
    finetune(max_steps=3, eval_interval=0, checkpoint_interval=0)
    assert steps_of(run_dir) == []
    assert (run_dir / "adapter" / "adapter_model.safetensors").exists()
    assert column(run_dir, "sample", "step") == [3]


def test_a_run_ends_with_held_out_questions_and_both_answers(finetune, base, tmp_path, run_dir):
    """A model that has learned one answer by heart gives it to them."""
    rows = [dict(instruction=f"Say {n}.", output="moon") for n in range(40)] + [
        dict(instruction=f"Ask {n}?", output=f"star {n}", held_out=True) for n in range(4)
    ]
    result = finetune(data=write_json(tmp_path / "rows.json", rows), max_steps=30, lora_dim=0, max_lr=0.02)
    questions = re.findall(r"Ask (\d)\?", result.stdout)
    assert len(set(questions)) == 3
    assert re.findall(r"star (\d)$", result.stdout, re.MULTILINE) == questions
    assert len(re.findall(r" moon$", result.stdout, re.MULTILINE)) == 3


# ---- what a resume does with a changed constant: docs/lora.md


# another value for every constant
OTHER = dict(
    adapter="elsewhere", lora_dim=2, lora_alpha=5.0, targets="c_fc", rslora=True, sequence_length=64, val_rows=3,
    batch_size=8, seed=7, lora_dropout=0.1, micro_batch_size=2, epochs=2.0, max_steps=4, warmup_steps=2, max_lr=0.002,
    min_lr=0.0001, lr_schedule="wsd", decay_fraction=0.3, weight_decay=0.2, beta1=0.8, beta2=0.99, eps=1e-7,
    grad_clip=0.5, max_bad_steps=3, val_examples=4, dropout=0.1, eval_interval=2, sample_interval=3,
    sample_prompt="A", sample_tokens=4, checkpoint_interval=3, keep_checkpoints=5,
)  # fmt: skip
SHORT = dict(max_steps=2, eval_interval=0, checkpoint_interval=2)


def test_what_the_table_calls_refused_is_refused_by_name_and_changes_nothing(finetune, run_dir):
    finetune(**SHORT)
    assert_refused_by_name(finetune, run_dir, "lora.md", SHORT | dict(max_steps=4), OTHER)


def test_what_the_table_says_takes_effect_does_and_is_noted(finetune, run_dir):
    finetune(**SHORT)
    changes = assert_changes_take_effect(finetune, run_dir, "lora.md", SHORT, OTHER)
    assert len(changes) > 20
    assert log_of(run_dir, "train")[-1]["lr"] == pytest.approx(1e-4)  # of the new schedule


def test_a_resume_with_other_epochs_takes_their_steps(finetune, run_dir):
    plain = dict(batch_size=18, eval_interval=0, checkpoint_interval=1, max_steps=None)
    finetune(**plain | dict(max_steps=1))
    finetune(**plain, epochs=1, resume=True)
    assert len(log_of(run_dir, "train")) == 3  # of 54 examples
    finetune(**plain, epochs=2, resume=True)
    assert len(log_of(run_dir, "train")) == 6
    finetune.error("6", **plain, epochs=1, resume=True)


def test_another_base_and_other_rows_are_refused(finetune, base, tmp_path, run_dir):
    finetune(**SHORT)
    finetune.error("--adapter", out="further", base=run_dir)
    small_gpt(seed=1, n_positions=128).save_pretrained(tmp_path / "base")
    shutil.copy(base / "base" / "tokenizer.json", tmp_path / "base")
    finetune.error(" base", **SHORT, resume=True, base=tmp_path / "base")
    finetune.error(" data", **SHORT, resume=True, data=write_json(tmp_path / "rows.json", ROWS[:-1]))
    finetune(**SHORT, resume=True, data=write_json(tmp_path / "moved.json", ROWS))


def test_recomputed_activations_change_no_figure(finetune, tmp_path):
    losses_of = []
    for out, changes in ("run", {}), ("again", dict(activation_checkpointing=True)):
        finetune(out=out, max_steps=2, eval_interval=0, checkpoint_interval=0, **changes)
        losses_of.append(column(tmp_path / out, "train", "loss"))
    assert losses_of[1] == pytest.approx(losses_of[0], rel=1e-6)


BAD = [
    (dict(data="absent.json"), ["absent.json"]),
    (dict(base="absent/"), ["absent"]),
    (dict(sequence_length=1000), ["128", "--sequence_length 1000"]),
    (dict(sequence_length=1), ["rows.json"]),
    (dict(lora_dim=-1), ["--lora_dim", "-1"]),
    (dict(targets="wte"), ["--targets", "wte"]),
    (dict(lora_dim=0, merge="x"), ["--merge"]),
    (dict(lora_dim=0, checkpoint_interval=0), ["--checkpoint_interval"]),
]  # fmt: skip


@pytest.mark.parametrize("changes, words", BAD, ids=str)
def test_wrong_usage_is_one_clear_line(finetune, run_dir, changes, words):
    finetune.error(*words, **changes)
    assert not (run_dir / "log.jsonl").exists()


def test_a_base_without_a_token_that_ends_an_answer_is_refused(finetune, tmp_path):
    tokenizer = Tokenizer.train([prose(20_000)], 320, special_tokens=("<|pad|>",))
    save_model(tmp_path / "base", small_gpt(), tokenizer)
    finetune.error("<|endoftext|>", base=tmp_path / "base")


def test_what_is_not_read_or_stands_on_both_sides_is_told(finetune, tmp_path):
    rows = [r | dict(label=n % 2 == 0) for n, r in enumerate(ROWS[:10] * 20)]
    options = dict(data=write_json(tmp_path / "rows.json", rows), max_steps=1, eval_interval=0, checkpoint_interval=0)
    notes = [line for line in finetune(**options).stdout.splitlines() if line.startswith("note:")]
    assert [re.findall(r"label|\d+", note) for note in notes] == [["label", "200", "100", "100"], ["20"]]


def test_a_run_that_diverges_is_told_so(finetune):
    result = finetune(max_steps=6, max_lr=50, lora_dim=0)
    assert re.findall("--max_lr 50|sample.py", result.stdout) == ["--max_lr 50"]


@pytest.mark.slow
def test_two_ranks_finetune_as_one_process_does(base, tmp_path, finetune):
    """They count the targets of both of them, although these have different numbers."""
    constants = dict(max_steps=2, eval_interval=2, checkpoint_interval=0)
    succeed("lora_finetune.py", *quick_args(base, tmp_path / "two", **constants), ranks=2)
    finetune(out="one", **constants)
    assert column(tmp_path / "two", "train", "tokens") == column(tmp_path / "one", "train", "tokens")
    for a, b in zip(losses(tmp_path / "one"), losses(tmp_path / "two"), strict=True):
        assert a == pytest.approx(b, abs=1e-4)
