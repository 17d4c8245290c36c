"""The judge of records: it accepts what the recipe leaves behind, and refuses each way to look better than one is."""

import hashlib
import json
import math
import re
import shutil
from types import SimpleNamespace

import pytest
import torch

import bench
import train_gpt2
from benchmarks import record
from files import sha256
from run.checkpoint import SUMS, checkpoint_steps
from tests.helpers import (
    arguments,
    assert_refused,
    assert_user_error,
    column,
    quietly,
    read_json,
    read_lines,
    small_args,
    table,
    write_json,
    write_lines,
)

TEXT = "".join(f"Line {i} of {i % 7} says {i * i} words, and {i % 11} more.\n" for i in range(1500))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of the recipe tiny, with seeds 0 and 1, in small."""
    folder = tmp_path_factory.mktemp("entry")
    (folder / "text.txt").write_text(TEXT)
    for seed in (0, 1):
        quietly(train_gpt2.main, *small_args(folder, f"run{seed}", max_steps=60, eval_steps=0, seed=seed))
    return folder


@pytest.fixture
def entry(runs, tmp_path, monkeypatch):
    """A copy of the runs; their text is that of the kind, and two seeds are enough."""
    shutil.copytree(runs, tmp_path, dirs_exist_ok=True)
    kind = record.KINDS["cores"]._replace(text=hashlib.sha256(TEXT.encode()).hexdigest(), seeds=2, machine="cpu")
    monkeypatch.setitem(record.KINDS, "cores", kind)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def judge(entry, inline):
    words = arguments(kind="cores", data="text.txt", device="cpu")
    return lambda: inline(bench.main, "record", "run0", "run1", *words)


def reseal(checkpoint) -> None:
    """New checksums, as a cheat would write them."""
    names = [line.partition("  ")[2] for line in (checkpoint / SUMS).read_text().splitlines()]
    (checkpoint / SUMS).write_text("".join(f"{sha256(checkpoint / name)}  {name}\n" for name in names))


def edit_config(checkpoint, **changes) -> None:
    config = read_json(checkpoint / "config.json")
    write_json(checkpoint / "config.json", config | changes)


def pad(checkpoint) -> None:
    """More rows of embeddings than tokens, beyond the next multiple of 128."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.resize_token_embeddings(model.config.vocab_size + 128)
    model.save_pretrained(checkpoint)


def edit_constants(checkpoint, **changes) -> None:
    state = torch.load(checkpoint / "train_state.pt", weights_only=True)
    state["config"] |= changes
    torch.save(state, checkpoint / "train_state.pt")


def edit_log(checkpoint, of: str, lower: float = 0, **changes) -> None:
    """Change the records of one kind, or lower their loss, as it is with a stride of less than T."""
    path = checkpoint.parent / "log.jsonl"
    records = read_lines(path)
    write_lines(path, [r | (changes or dict(loss=r["loss"] - lower)) if r["kind"] == of else r for r in records])


def test_runs_of_the_recipe_are_accepted_with_the_loss_that_they_logged(judge, entry):
    result = judge()
    assert result.returncode == 0 and "accepted" in result.stdout, result.stderr
    row = [line for line in result.stdout.splitlines() if line.startswith("| | 2 x 32, 384 tokens, T = 32 | muon")]
    wanted = column(entry / "run1", "val", "bpb")[-1]
    [_, second] = row[0].split("(")[1].split(")")[0].split(", ")
    assert float(second) == pytest.approx(wanted, rel=1e-3)


# what somebody edits, and what the judge says
CHEATS = """
pad | {} | vocab_size
edit_constants | {"seed": 7} | seeds are [0, 7]
edit_constants | {"max_lr": 0.5} | max_lr
edit_constants | {"init_from": "gpt2"} | from gpt2 on
edit_log | {"of": "val", "lower": 0.02} | do not overlap
edit_log | {"of": "val", "loss": null} | or a validation at step 60
edit_log | {"of": "run", "kind": "damaged"} | lacks its start
edit_log | {"of": "run", "machine": "a TPU"} | on a TPU
edit_config | {"activation_function": "relu"} | activation_function
edit_config | {"final_logit_softcapping": 15.0} | final_logit_softcapping
edit_config | {"n_head": 1} | the checkpoint has
"""


@pytest.mark.parametrize("edit, cells", table(CHEATS))
def test_what_is_not_the_recipes_is_refused(judge, entry, edit, cells):
    changes, words = cells
    [(_, checkpoint)] = checkpoint_steps(entry / "run1")[-1:]
    globals()[edit](checkpoint, **json.loads(changes))
    reseal(checkpoint)
    assert_user_error(judge(), words)


MACHINES = """\
x86_64, cpu with 1 thread, bfloat16
x86_64, cpu with 2 of 8 threads, bfloat16
x86_64, cpu with 1 thread, bfloat16, 8 ranks
x86_64, cpu with 12 threads, bfloat16
"""


def test_two_cores_are_one_or_two_threads_of_one_rank():
    assert re.findall(record.KINDS["cores"].machine, MACHINES, re.MULTILINE) == ["thread", "of"]


def test_an_edited_file_of_a_checkpoint_is_refused(judge, entry):
    [(_, checkpoint)] = checkpoint_steps(entry / "run0")[-1:]
    edit_config(checkpoint, n_head=1)
    assert_user_error(judge(), "config.json is not what was written")


def test_another_text_is_refused(judge, entry):
    (entry / "text.txt").write_text(TEXT[:-1])
    assert_user_error(judge(), "not the text")


def test_every_token_after_the_first_is_scored_once_and_windows_do_not_overlap():
    """A model that knows every token but the first of its window: ln V a window, however many tokens."""

    def model(idx):
        logits = torch.full((1, idx.size(1), 8), -100.0)
        logits.scatter_(2, (idx[..., None] + 1) % 8, 100.0)
        logits[:, 0] = 0
        return SimpleNamespace(logits=logits)

    model.config = SimpleNamespace(n_positions=4)
    ids = torch.arange(15) % 8  # 14 to score: 3 windows of 4, and one of 2
    assert record.nats_of(model, ids) == pytest.approx(4 * math.log(8))


def test_the_loss_at_124m_is_over_the_tokens_of_a_shard(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "VAL_TOKENS", 100)
    (tmp_path / "val.bin").write_bytes(bytes(1024) + torch.arange(200, dtype=torch.int16).numpy().tobytes())
    assert record.shard_tokens(str(tmp_path / "val.bin"))[0].tolist() == list(range(101))
    assert_refused("'' is not FineWeb's", record.shard_tokens, "")


@pytest.mark.parametrize(
    "found, best, wanted",
    [
        ([3.2776, 3.2776, 3.2776], None, "accepted"),  # 0.0024 sqrt(3) is 0.00416
        ([3.2778, 3.2778, 3.2778], None, "not shown to be below 3.28"),  # 0.00381
        ([3.2700] * 4, (3.2728, 4), "not shown to be below the record"),  # 0.0028 / sqrt(1/4 + 1/4) is 0.00396
        ([3.2700] * 4, (3.2729, 4), "accepted"),  # 0.0041
    ],
)
def test_a_record_is_two_standard_errors_below(found, best, wanted):
    assert wanted in record.verdict(found, record.KINDS["tokens"]._replace(best=best))


def test_the_judge_of_124m_wants_124m(runs):
    [(_, checkpoint)] = checkpoint_steps(runs / "run0")[-1:]
    assert_refused("n_layer", record.opened, checkpoint, record.KINDS["tokens"])
