"""HellaSwag: scores equal a loop over single sequences and lm-evaluation-harness; bad input is one clear line."""

import random
import re
from copy import deepcopy
from math import log2
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import hellaswag
from hellaswag import STYLES, encode_together, evaluate, harness, prepare
from model import GPT
from parts.checkpoint import save_model
from parts.runtime import Runtime
from tests.finetuning import adapted, save_adapter, small_gpt
from tests.forks import fork_script
from tests.helpers import ROOT, assert_user_error, prose, read_json, slow, write_lines

WINDOW = 48


def make_rows(n: int, seed: int = 0) -> list[dict]:
    """Rows in HellaSwag's format, out of the words of input.txt: long and short, with brackets and double spaces."""
    rng = random.Random(seed)
    words = prose(20_000).split()

    def text(low: int, high: int) -> str:
        return " ".join(rng.choices(words, k=rng.randint(low, high)))

    rows = []
    for number in range(n):
        ctx_a = text(3, 25) + "."
        ctx_b = rng.choice(["", text(1, 3)])
        endings = [text(1, 12) for _ in range(4)]
        if number % 3 == 0:
            ctx_a = f"[header] {text(2, 4)} [title] {ctx_a} [step] {text(2, 9)}"
            endings = [f"{e} [substeps] {text(1, 4)}  {text(1, 2)}." for e in endings]
        if number % 5 == 0:
            endings[1] = endings[0] + " " + text(1, 3)
        row = dict(ind=number, activity_label=text(1, 3), ctx_a=ctx_a, ctx_b=ctx_b, ctx=f"{ctx_a} {ctx_b}".strip())
        rows.append(row | dict(endings=endings, label=rng.randrange(4)))
    return rows


def make_model() -> GPT:
    model = small_gpt(n_positions=WINDOW)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)  # a fresh model finds all tokens nearly alike
    return model


model = pytest.fixture(make_model, scope="module", name="model")


@pytest.fixture(scope="module")
def checkpoint(model, small_tokenizer, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    save_model(path, model, small_tokenizer)
    return path


@torch.no_grad()
def log_likelihood(model: GPT, context: list[int], ending: list[int]) -> float:
    """Of an ending after a context: one unpadded sequence at a time, window after window."""
    total = 0.0
    window = model.config.n_positions
    for start in range(0, len(ending), window):
        piece = ending[start : start + window]
        ids = torch.tensor((context + ending[: start + len(piece)])[-(window + 1) :])
        logits = model(ids[None, :-1])[0, -len(piece) :]
        total += F.log_softmax(logits.double(), dim=-1)[range(len(piece)), piece].sum().item()
    return total


def one_by_one(model: GPT, small_tokenizer, rows: list[dict], style: str) -> tuple[np.ndarray, np.ndarray]:
    """(N, 4) summed log-likelihoods and numbers of tokens."""
    to_text, encode, _ = STYLES[style]
    encoded = [encode(small_tokenizer, *to_text(row)) for row in rows]
    start = [small_tokenizer.eot_token]  # of a document: what an empty context predicts from
    sums = [[log_likelihood(model, context or start, ending) for ending in endings] for context, endings in encoded]
    return np.array(sums), np.array([[len(ending) for ending in endings] for _, endings in encoded])


# --------------------------------------------------------------------------------------------------------- scoring


@pytest.mark.parametrize("style, batch_tokens", [("completion", 100), ("harness", 5000)])
def test_batched_scores_equal_one_sequence_at_a_time(model, small_tokenizer, rt, style, batch_tokens):
    short = ["a", "é", "a", "中文"]  # one token, or equal; and fewer characters than bytes
    long = ["a", "b", prose(3 * WINDOW), "c"]  # longer than the window
    rows = make_rows(25) + [row | dict(endings=short) for row in make_rows(3)]
    rows += [row | dict(endings=long) for row in make_rows(2)]
    rows += [row | dict(ctx="") for row in make_rows(2)]
    lengths = [len(small_tokenizer.encode_ordinary(row["ctx"])) for row in rows]
    assert min(lengths) < WINDOW < max(lengths)  # some contexts are cut, some are not
    sums, counts = one_by_one(model, small_tokenizer, rows, style)
    task = prepare(rows, small_tokenizer, model.config, style)
    fed = []
    with model.transformer.wte.register_forward_pre_hook(lambda _, args: fed.append(args[0].shape)):
        result = evaluate(model, task, rt, batch_tokens)
    assert all(n_rows == 1 or n_rows * T <= batch_tokens for n_rows, T in fed)
    assert sum(n_rows * T for n_rows, T in fed) < 1.5 * sum(map(len, task.packed))  # rows of similar lengths
    np.testing.assert_allclose(result["log_likelihoods"], sums, rtol=0, atol=1e-4)
    endings = [STYLES[style][0](row)[1] for row in rows]
    units = [[len(e) for e in four] for four in endings] if style == "harness" else counts
    assert task.lengths.tolist() == np.array(units).tolist()
    labels = np.array([row["label"] for row in rows])
    right = [four[label] for four, label in zip(endings, labels, strict=True)]
    bits = [-log2(s[k]) / len(f" {e}".encode()) for s, k, e in zip(np.exp(sums), labels, right, strict=True)]
    values = dict(acc=sums.argmax(1) == labels, acc_norm=(sums / units).argmax(1) == labels, gold_bpb=np.array(bits))
    for name, of_rows in values.items():
        assert result[name] == pytest.approx(of_rows.mean(), rel=1e-5)
        assert result[f"{name}_stderr"] == pytest.approx(of_rows.std(ddof=1) / np.sqrt(len(rows)), rel=1e-5)
    assert result["predictions_norm"] == (sums / units).argmax(1).tolist()


class Ids:
    """A tokenizer for texts that are written as ids."""

    eot_token = 0

    def __len__(self):
        return 0

    def encode_ordinary(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]


@pytest.mark.parametrize("n_context", [3, WINDOW - 3])
def test_the_context_is_fed_once_and_the_last_token_of_an_ending_never(model, rt, n_context):
    """Also where the longest ending just fits into the window."""
    row = dict(ctx="9 " * n_context, endings=["1 2 3", "4 5", "6", "1 2 7 8"], label=0)
    fed = []
    with model.transformer.wte.register_forward_pre_hook(lambda _, args: fed.append(args[0].numel())):
        evaluate(model, prepare([row], Ids(), model.config, "completion"), rt, batch_tokens=1)
    assert fed == [n_context + 2 + 1 + 3]


def test_a_merge_across_context_and_ending_leaves_a_token_to_score(model, rt):
    """A pattern that keeps everything in one piece may make fewer tokens of context and ending than of the context."""

    class Greedy(Ids):
        def encode_ordinary(self, text: str) -> list[int]:
            return [7] if "not" in text else [5, 6, 6]

    row = dict(activity_label="To", ctx_a="be or", ctx_b="", endings=["not to be \ud800"] * 4, label=0)
    result = evaluate(model, prepare([row], Greedy(), model.config, "harness"), rt)
    assert max(result["log_likelihoods"][0]) < 0


class Products(TorchDispatchMode):
    """Notes how the products that make logits, (..., n_columns), are computed: their dtype, and whether TF32 may be."""

    def __init__(self, n_columns: int):
        super().__init__()
        self.n_columns = n_columns
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "mm" in func.__name__ and out.size(-1) == self.n_columns:
            matmul = torch.backends.cuda.matmul
            self.found.add((out.dtype, matmul.allow_tf32, matmul.fp32_precision))
        return out


def test_logits_are_true_fp32_under_autocast(model, small_tokenizer):
    task = prepare(make_rows(2), small_tokenizer, model.config, "completion")
    rt = Runtime.setup("cpu", "bfloat16")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU, as training has it
    try:
        with Products(model.config.vocab_size) as products:
            evaluate(model, task, rt)
        assert products.found == {(torch.float32, False, "ieee")}
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before)


def test_scoring_leaves_mode_gradients_and_random_numbers_alone(model, small_tokenizer, rt):
    task = prepare(make_rows(3), small_tokenizer, model.config, "completion")
    rng = torch.get_rng_state()
    for training in (True, False):
        model.train(training)
        evaluate(model, task, rt)
        assert all(module.training == training for module in model.modules())
    assert torch.equal(rng, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


# ------------------------------------------------------------------------------------------------------ the harness


def test_harness_text_is_label_context_and_no_brackets():
    row = dict(activity_label="Baking", ctx_a="Mix [header] it. [title] Stir it.", ctx_b="the Cook",
               endings=["adds  an egg.", " [substeps] Wait. [step] Eat."])  # fmt: skip
    assert harness(row) == ("Baking: Mix it.. Stir it. The cook", ["adds an egg.", " Wait. Eat."])


def test_scores_equal_those_of_lm_eval(checkpoint, model, small_tokenizer, rt, tmp_path, monkeypatch):
    """--model hf on the same directory and the same rows, some of which are too long for the window, though no ending
    is: the harness refuses those."""
    lm_eval = pytest.importorskip("lm_eval", reason="needs lm_eval: pip install lm_eval[hf]")
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tokens = {row["ind"]: encode_together(small_tokenizer, *harness(row)) for row in make_rows(80)}
    rows = [row for row in make_rows(80) if max(map(len, tokens[row["ind"]][1])) <= WINDOW]
    assert len(rows) > 30
    assert max(len(tokens[row["ind"]][0]) for row in rows) > WINDOW
    (task,) = re.findall("```yaml\n(.+?)```", (ROOT / "docs/hellaswag.md").read_text(), re.DOTALL)
    data = write_lines(tmp_path / "rows.jsonl", rows)
    (tmp_path / "local.yaml").write_text(task.replace("/path/to/hellaswag_val.jsonl", str(data)))
    (tmp_path / "local.py").write_text("from lm_eval.tasks.hellaswag.utils import process_docs  # noqa: F401\n")
    theirs = lm_eval.simple_evaluate(
        model="hf", model_args=f"pretrained={checkpoint},dtype=float32", tasks=["hellaswag_local"], device="cpu",
        batch_size=8, task_manager=TaskManager(include_path=str(tmp_path)), bootstrap_iters=0,
    )  # fmt: skip
    ours = evaluate(model, prepare(rows, small_tokenizer, model.config, "harness"), rt)
    for name in ("acc", "acc_norm"):
        assert ours[name] == pytest.approx(theirs["results"]["hellaswag_local"][f"{name},none"], abs=1e-12)
    samples = sorted(theirs["samples"]["hellaswag_local"], key=lambda sample: sample["doc_id"])
    sums = [[response[0][0] for response in sample["resps"]] for sample in samples]
    np.testing.assert_allclose(ours["log_likelihoods"], sums, atol=1e-3)


# ------------------------------------------------------------------------------------------------- the command line


@pytest.fixture
def run(checkpoint, inline):
    """hellaswag.py on the small checkpoint, in this process."""
    return lambda *words, model=checkpoint, **options: inline(
        hellaswag.main, model, *words, device="cpu", dtype="float32", **options
    )


def test_both_styles_are_reported_by_name_written_as_json_and_shown(run, tmp_path, model, small_tokenizer, rt):
    rows = make_rows(9)
    data = write_lines(tmp_path / "rows.jsonl", rows)
    (tmp_path / "scores.json").write_text("of an earlier model")
    result = run(data=data, limit=7, show=2, json=tmp_path / "scores.json")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "scores.json.1").read_text() == "of an earlier model"
    scores = read_json(tmp_path / "scores.json")["styles"]
    assert list(scores) == ["completion", "harness"]
    for style, unit in (("completion", "token"), ("harness", "character")):
        assert re.search(rf"acc_norm {scores[style]['acc_norm']:.4f}.*{unit}", result.stdout)
        assert scores[style] == evaluate(model, prepare(rows[:7], small_tokenizer, model.config, style), rt)
        for name in ("acc", "acc_norm", "gold_bpb"):
            assert f"{name} {scores[style][name]:.4f}" in result.stdout
    for row, sums in zip(rows[:2], scores["completion"]["log_likelihoods"], strict=False):
        for k, ending in enumerate(row["endings"]):
            mark = r"\*" if k == row["label"] else " "
            assert re.search(rf"\n[> ]{mark} {-sums[k]:.2f} .*{re.escape(ending)}\n", result.stdout)
    assert rows[2]["ctx"] not in result.stdout


def test_the_control_scores_the_endings_of_an_adapted_model_after_contexts_of_other_rows(
    run, tmp_path, model, small_tokenizer, rt
):
    save_adapter(adapter_of := adapted(deepcopy(model)), tmp_path / "adapter")
    rows = make_rows(5)
    options = dict(style="completion", json=tmp_path / "scores.json", control=True, show=9)
    result = run(data=write_lines(tmp_path / "rows.jsonl", rows), adapter=tmp_path / "adapter", **options)
    assert result.returncode == 0, result.stderr
    others = [rows[i] | dict(ctx=rows[k]["ctx"]) for i, k in enumerate([2, 3, 4, 0, 1])]  # no row has its own
    found = read_json(tmp_path / "scores.json")
    assert found["adapter"] == str(tmp_path / "adapter")
    found = found["styles"]
    sets = {"completion": rows, "completion control": others}
    assert list(found) == list(sets)
    for name, expected in sets.items():
        expected = evaluate(adapter_of, prepare(expected, small_tokenizer, model.config, "completion"), rt)
        np.testing.assert_allclose(found[name]["log_likelihoods"], expected["log_likelihoods"], atol=1e-4)
        assert found[name]["gold_bpb"] == pytest.approx(expected["gold_bpb"], abs=1e-4)


@pytest.mark.parametrize("change", [dict(endings=["a", "b", "c"]), dict(endings=["a", "b", "c", ""]), dict(label=4)])
def test_a_malformed_row_is_named_with_its_number(run, tmp_path, change):
    [good] = make_rows(1)
    data = write_lines(tmp_path / "rows.jsonl", [good, good | change])
    assert_user_error(run(data=data), "2", "rows.jsonl")


def test_missing_file_gives_one_line(run, tmp_path):
    absent = tmp_path / "absent.jsonl"
    assert_user_error(run(data=absent), "absent.jsonl")
    assert_user_error(run(data=absent, model=tmp_path / "nowhere"), "nowhere")  # before rows are downloaded


@pytest.mark.parametrize("out", ["no/folder.json", "model.safetensors"])
def test_json_that_cannot_be_written_ends_before_anything_is_loaded(run, tmp_path, out):
    result = run(json=tmp_path / out, data=tmp_path / "absent.jsonl", model=tmp_path / "nowhere")
    assert_user_error(result, "--json")
    assert not list(tmp_path.iterdir())


def test_a_model_whose_numbers_are_not_finite_is_one_line_and_writes_nothing(run, small_tokenizer, tmp_path):
    model = make_model()
    with torch.no_grad():
        model.transformer.wte.weight[7] = 3e38  # finite, but its logits are not
    save_model(tmp_path / "bad", model, small_tokenizer)
    data = write_lines(tmp_path / "rows.jsonl", make_rows(2))
    assert_user_error(run(data=data, json=tmp_path / "scores.json", model=tmp_path / "bad"), str(tmp_path / "bad"))
    assert not (tmp_path / "scores.json").exists()


# ---------------------------------------------------------------------------------------------------------- the hub


def test_a_datasets_validation_split_is_scored(run, tmp_path):
    rows = make_rows(5)
    (tmp_path / "data").mkdir()
    for split, found in dict(train=rows[:1], validation=rows).items():
        write_lines(tmp_path / f"data/{split}.jsonl", [row | dict(label=str(row["label"])) for row in found])
    result = run(data=tmp_path / "data", style="completion", json=tmp_path / "scores.json")
    assert result.returncode == 0, result.stderr
    assert read_json(tmp_path / "scores.json")["styles"]["completion"]["n"] == 5


def test_without_the_hub_one_line_says_what_to_do_and_training_continues(run, train, monkeypatch):
    def no_network(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'Rowan/hellaswag' on the Hub")

    monkeypatch.setattr("datasets.load_dataset", no_network)
    assert_user_error(run(), "Rowan/hellaswag", "HF_ENDPOINT", "--data")
    options = dict(max_steps=2, hellaswag_interval=1)
    assert "--hellaswag_data" in train(**options).stderr
    # not without a file that was named
    train.error("absent.jsonl", "--hellaswag_data", out="other", hellaswag_data="absent.jsonl", **options)


@pytest.mark.parametrize("n", [slow(1), 7])
def test_two_ranks_score_as_one(run, checkpoint, tmp_path, n):
    data = write_lines(tmp_path / "rows.jsonl", make_rows(n))
    assert run(data=data, json=tmp_path / "one.json").returncode == 0
    options = dict(data=data, device="cpu", dtype="float32", json=tmp_path / "two.json")
    done = fork_script("hellaswag.py", checkpoint, ranks=2, **options)
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = (read_json(tmp_path / f"{name}.json")["styles"] for name in ("one", "two"))
    for style in STYLES:
        for name in ("log_likelihoods", "gold_bpb", "gold_bpb_stderr"):
            np.testing.assert_allclose(one[style].pop(name), two[style].pop(name), atol=1e-5)
    assert one == two


OTHER_WEIGHTS = f"""\
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from safetensors import torch as files
real = files.load_file
files.load_file = lambda *args: {{name: tensor + int(os.environ["RANK"]) for name, tensor in real(*args).items()}}
import hellaswag
from parts.cli import script
script(hellaswag.main)
"""


def test_ranks_with_other_weights_score_nothing(checkpoint, tmp_path):
    """As where nodes have different files under one name."""
    (tmp_path / "score.py").write_text(OTHER_WEIGHTS)
    data = write_lines(tmp_path / "rows.jsonl", make_rows(3))
    options = dict(data=data, device="cpu", dtype="float32", json=tmp_path / "scores.json")
    done = fork_script(tmp_path / "score.py", checkpoint, ranks=2, **options)
    assert done.returncode == 2
    assert str(checkpoint) in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "scores.json").exists()
