"""HellaSwag (Zellers et al. 2019): which of four endings does a model find likeliest? The accuracy of any checkpoint.

    python hellaswag.py gpt2                            # MODEL: a checkpoint, a run directory (its newest), a hub id
    python hellaswag.py out/gpt2/step_019073 --limit 500 --show 3
    python hellaswag.py out/tiny --data hellaswag_val.jsonl --style harness --json scores.json
    torchrun --standalone --nproc_per_node=8 hellaswag.py gpt2-xl

A row of the data, one of 10,042 in the validation split:

    {"ind": 27957, "activity_label": "Knitting", "ctx_a": "A woman is seated at a table.", "ctx_b": "she",
     "ctx": "A woman is seated at a table. she",
     "endings": ["is shown holding onto a pair of legs.", "is holding a long stick.",
                 "is knitting with pink yarn and needles.", "is playing a flute."], "label": 2}

ctx is ctx_a, whole sentences, and ctx_b, the beginning of the one that an ending completes. A person wrote
endings[label]; a language model wrote the others, which were kept because they fooled a classifier. People are right in
more than 95% of the rows, a guess in 25%. A language model is not shown the four side by side: it says how likely each
one is after the context, the sum of log p(token | all before it) over the ending's tokens. acc takes the ending with
the largest sum; acc_norm divides the sums by lengths first, because each further token costs probability.

Two ways to make text of a row and to measure lengths are in use, and give different numbers:

- completion: context + " " + ending, lengths in tokens; what nanoGPT-style scripts report
- harness: EleutherAI's lm-evaluation-harness: activity label, no brackets, lengths in characters

GPT-2 124M has 0.2859 and 0.2955 as completion, 0.2892 and 0.3114 in the harness.

A context is computed once, which halves the work: it and its four endings lie side by side in one row of the model's
input. Positions go on from the context in each ending, and the mask lets a token see the context (part 0) and its own
part. Five tokens of context x and endings a, b, c and d of 3, 2, 2 and 1 tokens. The last token of an ending is scored
but predicts nothing, so it is no input, and d has none at all:

    token      x0 x1 x2 x3 x4 | a0 a1 | b0 | c0 |
    position    0  1  2  3  4 |  5  6 |  5 |  5 |
    part        0  0  0  0  0 |  1  1 |  2 |  3 |

train_gpt2.py imports this file, which knows nothing of training but what to say where it goes on without the rows.
"""

import json
import math
import re
import reprlib
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import tyro
from torch.nn import functional as F
from tqdm import tqdm

from cli import Count, Range, UserError, parse_args, replace_file, script
from corpus.sources import hub_rows
from model import GPT
from run.checkpoint import find_model, load_model, model_tokenizer
from run.runtime import Runtime

HUB = "Rowan/hellaswag"
HUB_SPLITS = {"train": "train", "val": "validation", "test": "test"}  # the hub's names for ours
BATCH_TOKENS = {"cpu": 2**9, "cuda": 2**15}  # padded tokens in a batch: what caches hold, what keeps a GPU busy
MULTIPLE = {"cuda": 8}  # rows are padded to a multiple, for which CUDA's attention needs no copy of the mask
CHUNK_LOGITS = 2**25  # logits that are alive at once: 128 MB in fp32


@dataclass(frozen=True)
class Config:
    model: Annotated[str, tyro.conf.Positional]  # checkpoint directory, run directory, or hub id such as gpt2
    data: str = ""  # a local .jsonl in HellaSwag's format; empty: Rowan/hellaswag from the hub, downloaded once
    split: Literal["train", "val", "test"] = "val"  # of the hub's rows; the labels of test are not public
    limit: Count = 0  # only the first rows; 0 for all
    style: Literal["both", "completion", "harness"] = "both"  # how a row becomes text, see above
    show: Count = 0  # print this many examples with the losses of their endings
    json: str = ""  # write scores and log-likelihoods to this file
    batch_tokens: Annotated[int, Range(0, 2**20)] = 0  # tokens in a batch; 0 for what suits the device
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto: cuda, else mps, else cpu
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # auto: 16 bits where the device has them


def main() -> None:
    config = parse_args(Config, description=__doc__)
    rt = Runtime.setup(config.device, config.dtype)
    if config.json:
        rt.on_main(lambda: check_output(Path(config.json)))  # now, not after an hour of scoring
    rows = load_rows(config.data, config.split, rt)[: config.limit or None]
    # all ranks score one checkpoint, though a run that goes on may have a newer one any moment
    config = replace(config, model=rt.on_main(lambda: find_model(config.model)))
    model, tokenizer = load_model(config.model).to(rt.device), model_tokenizer(config.model)
    rt.print(f"{config.model}: {model.num_params():,} parameters on {rt.why}; {len(rows):,} rows")
    results = {}
    for style in STYLES if config.style == "both" else [config.style]:
        task = prepare(rows, tokenizer, model.config, style)
        results[style] = evaluate(model, task, rt, config.batch_tokens, progress=True)
        if not np.isfinite(results[style]["log_likelihoods"]).all():
            raise UserError(
                f"{config.model} computes numbers that are not finite; its weights are damaged, or too large for "
                f"{rt.dtype}: try an earlier checkpoint, or --dtype float32"
            )
        for number in range(min(config.show, len(rows))):
            rt.print(show(task, results[style], number))
    for style, result in results.items():
        rt.print(summary(style, result))
    if config.json and rt.is_main:
        write_json(config, rt, results)


# ------------------------------------------------------------------------------------------------------------ data


def load_rows(data: str, split: str, rt: Runtime, option: str = "--data") -> list[dict]:
    """The rows of a local file, else of the hub's split, read by the first rank. Raises UserError, on all ranks alike;
    `option` is what takes the file."""

    def read() -> list[dict]:
        if data:
            return read_rows(Path(data), option)
        rows = hub_rows(HUB, HUB_SPLITS[split], option)
        return [check_row(row, f"{HUB} row {number}") for number, row in enumerate(rows, start=1)]

    return rt.on_main(read)


def read_rows(path: Path, option: str = "--data") -> list[dict]:
    """A HellaSwag .jsonl, every row checked. Raises UserError that names the file and the line."""
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")  # not splitlines: a JSON string may hold U+2028
    except FileNotFoundError:
        raise UserError(f"there is no {path}; {option} takes a .jsonl file in HellaSwag's format") from None
    except (OSError, ValueError) as e:  # ValueError: not UTF-8
        raise UserError(f"{path} cannot be read: {e}; {option} takes a .jsonl file in HellaSwag's format") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as e:
                raise UserError(f"{path} line {number} is not JSON: {e}; repair or remove it") from None
            rows.append(check_row(row, f"{path} line {number}"))
    if not rows:
        raise UserError(f"{path} has no rows; {option} takes a .jsonl file in HellaSwag's format")
    return rows


def check_row(row, where: str) -> dict:
    """The row with its label as an int, None where there is none. Raises UserError that says `where`.

    Labels are ints in the original files and strings on the hub, where those of the test split are empty.
    """
    endings, label = (row.get(name) for name in ("endings", "label")) if isinstance(row, dict) else (None, None)
    if not isinstance(row, dict):
        what = "it is not a JSON object"
    elif absent := [name for name in ("ctx", "ctx_a", "ctx_b", "activity_label") if not is_text(row.get(name))]:
        what = f"{absent[0]} is not a text"
    elif not (isinstance(endings, list) and len(endings) == 4 and all(is_text(e) and e for e in endings)):
        what = "endings is not a list of four texts"
    elif isinstance(label, bool) or label not in (None, "", 0, 1, 2, 3, "0", "1", "2", "3"):
        what = f"label is {reprlib.repr(label)}, not 0, 1, 2 or 3"
    else:
        return row | {"label": None if label in (None, "") else int(label)}
    raise UserError(f"{where} is no row of HellaSwag: {what}; repair or remove it")


def is_text(value) -> bool:
    """A string that UTF-8 can hold: JSON may have half of a surrogate pair."""
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


def validation_task(data: str, tokenizer, model_config, rt: Runtime) -> "Task | None":
    """What the training loop scores; None, after one warning, where there is no file and no network to have it from."""
    try:
        rows = load_rows(data, "val", rt, "--hellaswag_data")
    except UserError as e:
        if data:
            raise
        rt.print(f"warning: training goes on without HellaSwag: {e}", file=sys.stderr)
        return None
    return prepare(rows, tokenizer, model_config, "completion")


# ------------------------------------------------------------------------------------------- from rows to tokens


def completion(row: dict) -> tuple[str, list[str]]:
    return row["ctx"], row["endings"]


def harness(row: dict) -> tuple[str, list[str]]:
    """The text of lm-evaluation-harness, task hellaswag, version 1."""
    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return clean(context), [clean(ending) for ending in row["endings"]]


def clean(text: str) -> str:
    """Without the brackets that WikiHow's articles left behind."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def encode_apart(tokenizer, context: str, endings: list[str]) -> tuple[list[int], list[list[int]]]:
    return tokenizer.encode_ordinary(context), [tokenizer.encode_ordinary(" " + ending) for ending in endings]


def encode_together(tokenizer, context: str, endings: list[str]) -> tuple[list[int], list[list[int]]]:
    """Tokens of the context, and what the context and an ending have beyond those; spaces go to the ending."""
    ids = tokenizer.encode_ordinary(context.rstrip())
    whole = [tokenizer.encode_ordinary(f"{context} {ending}") for ending in endings]
    return ids, [tokens[len(ids) :] or tokens[-1:] for tokens in whole]  # a merge may reach across: one token at least


STYLES = {"completion": (completion, encode_apart, "token"), "harness": (harness, encode_together, "character")}


@dataclass
class Packed:
    """One row of the model's input: a context, some endings of it, and the tokens to score. See the top."""

    inputs: np.ndarray  # (3, T) tokens, positions, parts
    scored: np.ndarray  # (3, S) where a token is predicted, that token, and the number of its ending

    def __len__(self) -> int:
        return self.inputs.shape[1]


@dataclass
class Task:
    """All rows in one style, ready to score; ending k of row i has number 4 i + k."""

    style: str
    texts: list[tuple[str, list[str]]]  # context and endings
    labels: np.ndarray  # (N,), -1 where unknown
    lengths: np.ndarray  # (N, 4), what acc_norm divides by
    packed: list[Packed]  # longest first


def prepare(rows: list[dict], tokenizer, model_config, style: str) -> Task:
    """Rows as text and tokens. Raises UserError if the tokenizer has tokens that the model does not know."""
    if len(tokenizer) > model_config.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens and the model {model_config.vocab_size}; "
            "put the tokenizer.json beside it that it was trained with"
        )
    to_text, encode, unit = STYLES[style]
    texts, lengths, packed = [to_text(row) for row in rows], [], []
    for number, (context, endings) in enumerate(texts):
        context_ids, ending_ids = encode(tokenizer, context, endings)
        context_ids = context_ids or [tokenizer.eot_token or 0]  # something has to predict the first token
        lengths.append([len(e) for e in (ending_ids if unit == "token" else endings)])
        packed.extend(fit(context_ids, ending_ids, 4 * number, model_config.n_positions))
    labels = [-1 if row["label"] is None else row["label"] for row in rows]
    return Task(style, texts, np.array(labels), np.array(lengths), sorted(packed, key=len, reverse=True))


def fit(context: list[int], endings: list[list[int]], first: int, window: int) -> list[Packed]:
    """All four endings together if each fits into the window with the context. Else each alone, with as much of the
    context as fits before it, cut from the left; an ending longer than the window is scored in pieces. `first` is the
    number of the first ending."""
    if len(context) + max(map(len, endings)) - 1 <= window:
        return [pack(context, endings, first)]
    packed = []
    for k, ending in enumerate(endings):
        for start in range(0, len(ending), window):
            piece = ending[start : start + window]
            before = (context + ending[:start])[-(window + 1 - len(piece)) :]
            packed.append(pack(before, [piece], first + k))
    return packed


def pack(context: list[int], endings: list[list[int]], first: int) -> Packed:
    """A context and its endings side by side, as the picture at the top has them."""
    n = len(context)
    tokens, positions, parts = list(context), list(range(n)), [0] * n
    places, targets, numbers = [], [], []
    for k, ending in enumerate(endings):
        # the context's last token predicts the ending's first one, and each of its tokens the next
        places += [n - 1, *range(len(tokens), len(tokens) + len(ending) - 1)]
        targets += ending
        numbers += [first + k] * len(ending)
        tokens += ending[:-1]
        positions += range(n, n + len(ending) - 1)
        parts += [k + 1] * (len(ending) - 1)
    return Packed(np.array([tokens, positions, parts]), np.array([places, targets, numbers]))


# --------------------------------------------------------------------------------------------------------- scoring


@torch.no_grad()
def evaluate(model: GPT, task: Task, rt: Runtime, batch_tokens: int = 0, progress: bool = False) -> dict:
    """What `score` makes of the log-likelihoods; the same on every rank. Works in the middle of training: `model` is
    the plain module, whose mode is left as it was, so that its compiled and distributed wrappers notice nothing."""
    packed, sums = task.packed[rt.rank :: rt.world_size], np.zeros(task.lengths.size)
    multiple = MULTIPLE.get(rt.device.type, 1)
    batch_tokens = batch_tokens or BATCH_TOKENS.get(rt.device.type, 2**13)
    total, quiet = sum(map(len, packed)), None if progress and rt.is_main else True  # None: unless in a terminal
    training = model.training
    model.eval()
    with rt.autocast(), tqdm(total=total, unit="tok", unit_scale=True, desc=task.style, disable=quiet) as bar:
        for batch in batches(packed, batch_tokens, multiple):
            inputs, (places, targets, numbers) = collate(batch, multiple)
            arrays = (torch.from_numpy(a).to(rt.device) for a in (inputs, places, targets))
            sums += np.bincount(numbers, weights=log_likelihoods(model, *arrays).cpu().numpy(), minlength=len(sums))
            bar.update(sum(map(len, batch)))
    model.train(training)
    sums = rt.sum(torch.from_numpy(sums).to("cpu" if rt.device.type == "mps" else rt.device))  # MPS has no float64
    return score(task, sums.cpu().numpy())


def batches(packed: list[Packed], batch_tokens: int, multiple: int) -> Iterator[list[Packed]]:
    """Neighbours, which are of like length, with at most `batch_tokens` tokens, padding included."""
    start = 0
    while start < len(packed):
        length = -(-len(packed[start]) // multiple) * multiple  # the longest comes first
        stop = start + max(batch_tokens // length, 1)
        yield packed[start:stop]
        start = stop


def collate(batch: list[Packed], multiple: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, positions and parts of all rows, (3, B, T), and what is scored, (3, S), whose places count through the
    flattened batch. Padding is a part of its own, which no other part sees."""
    T = -(-max(map(len, batch)) // multiple) * multiple
    inputs = np.zeros((3, len(batch), T), dtype=np.int64)
    inputs[2] = -1
    for b, row in enumerate(batch):
        inputs[:, b, : len(row)] = row.inputs
    return inputs, np.concatenate([row.scored + [[b * T], [0], [0]] for b, row in enumerate(batch)], axis=1)


def log_likelihoods(model: GPT, inputs: torch.Tensor, places: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Log-likelihoods (S,) fp32 of the tokens to score of a batch as `collate` makes it."""
    idx, positions, parts = inputs  # (B, T) each
    query, key = parts[:, :, None], parts[:, None, :]
    causal = torch.ones(idx.size(1), idx.size(1), dtype=torch.bool, device=idx.device).tril()  # (T, T)
    mask = causal & ((key == query) | (key == 0))  # (B, T, T)
    x = model.hidden(idx, positions, mask[:, None]).flatten(0, 1)[places].float()  # (S, C)
    # Logits exist where a token is scored, a chunk at a time, and are fp32 in every precision: GPT-2's lie around -100,
    # where bf16 has steps of 0.5.
    chunk = max(CHUNK_LOGITS // model.config.vocab_size, 1)
    losses = []
    with torch.autocast(x.device.type, enabled=False), full_float32():
        for xc, tc in zip(x.split(chunk), targets.split(chunk), strict=True):
            logits = F.linear(xc, model.lm_head.weight)  # (chunk, V)
            losses.append(F.cross_entropy(logits, tc, reduction="none"))
    return -torch.cat(losses)


@contextmanager
def full_float32() -> Iterator[None]:
    """Multiply fp32 as it is. Elsewhere a GPU may round the factors to TF32, which keeps 11 of 24 bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def score(task: Task, sums: np.ndarray) -> dict:
    """acc and acc_norm with their standard errors, the number of rows n, and for each row the log-likelihoods of its
    endings and both predictions. Accuracies are None without labels, and where a log-likelihood is not finite."""
    sums = sums.reshape(-1, 4)  # (N, 4)
    with np.errstate(divide="ignore", invalid="ignore"):  # without its brackets an ending may have no characters
        guesses = dict(acc=sums.argmax(axis=1), acc_norm=(sums / task.lengths).argmax(axis=1))
    known = task.labels >= 0
    result = dict(acc=None, acc_stderr=None, acc_norm=None, acc_norm_stderr=None, n=int(known.sum()))
    if known.any() and np.isfinite(sums).all():
        for name, guess in guesses.items():
            p = float((guess == task.labels)[known].mean())
            result[name] = p
            result[f"{name}_stderr"] = math.sqrt(p * (1 - p) / max(result["n"] - 1, 1))  # of a mean of zeros and ones
    return result | dict(
        normalized_by=STYLES[task.style][2],
        log_likelihoods=sums.tolist(),
        predictions=guesses["acc"].tolist(),
        predictions_norm=guesses["acc_norm"].tolist(),
    )


# ------------------------------------------------------------------------------------------------------------- output


def summary(style: str, result: dict) -> str:
    if not result["n"]:
        return f"{style:<11} no labels, so no accuracy; --json writes the predictions"
    acc, norm = (f"{result[k]:.4f} ± {result[f'{k}_stderr']:.4f}" for k in ("acc", "acc_norm"))
    return f"{style:<11} acc {acc}   acc_norm {norm} (per {result['normalized_by']})   N {result['n']:,}"


def show(task: Task, result: dict, number: int) -> str:
    """A row with the loss of each ending, in all and per unit of length; > marks the prediction, * the truth."""
    context, endings = task.texts[number]
    lines = [f"\n{task.style}, row {number + 1}: {context}", f"    sum     per {result['normalized_by']}"]
    for k, ending in enumerate(endings):
        loss = -result["log_likelihoods"][number][k]
        marks = ">" if k == result["predictions_norm"][number] else " ", "*" if k == task.labels[number] else " "
        lines.append(f"{marks[0]}{marks[1]} {loss:<7.2f} {loss / max(task.lengths[number, k], 1):<10.4f} {ending}")
    return "\n".join(lines)


def check_output(path: Path) -> None:
    """Raises UserError where no file can be written in the end; touches nothing that is there."""
    if path.exists() and not path.is_file():
        raise UserError(f"--json {path} is not a file; give the name of one")
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"):
            pass
    except OSError as e:
        raise UserError(f"--json {path} cannot be written: {e.strerror}; give another file") from None


def write_json(config: Config, rt: Runtime, results: dict) -> None:
    head = dict(model=config.model, data=config.data or f"{HUB} {config.split}", dtype=str(rt.dtype).split(".")[-1])
    replace_file(Path(config.json), json.dumps(head | dict(styles=results), allow_nan=False) + "\n")


if __name__ == "__main__":
    script(main)
