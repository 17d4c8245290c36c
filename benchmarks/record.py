"""Is it a record? Judges the runs of an entry by the rules of docs/record.md, and prints its row for that page.

    python bench.py record out/seed0 out/seed1 out/seed2 --data fineweb10B/fineweb_val_000000.bin    # tokens to 3.28
    python bench.py record out/seed* --kind cores --data tinyshakespeare.txt                         # two CPU cores

The judge opens the last checkpoint of each run with transformers, refuses anything but an unchanged GPT-2, and computes
the loss of the entry in a few lines that share no code with training.
It cannot check which text the weights were trained on, for how long, or on which machine: it takes these from the log.
"""

import math
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from tyro.conf import Positional

from benchmarks.measure import Device
from cli import UserError
from corpus.shards import TRAIN_FRACTION
from files import sha256
from machine.runtime import Runtime, fastest_threads
from run.checkpoint import checkpoint_steps, find_damage, load_train_state
from run.records import of_kind, read_log


class Kind(NamedTuple):
    sizes: dict  # that the model must have
    target: float  # what the mean must be below
    sigma: float  # standard deviation of a run
    seeds: int = 3  # at least
    text: str = ""  # sha256 of a text whose end is scored, in bits per byte; or FineWeb's shard, in nats per token
    minutes: float = math.inf  # of training, at most
    machine: str = ""  # pattern of its description in the log
    best: tuple[float, int] | None = None  # mean and seeds of the record


GPT2 = dict(n_layer=12, n_head=12, n_embd=768, n_positions=1024)
SHAKESPEARE = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
KINDS = {
    "tokens": Kind(GPT2, target=3.28, sigma=0.002),
    "h100": Kind(GPT2, target=3.28, sigma=0.002, machine=r"^(?!.*ranks).*H100"),
    "cores": Kind(
        {},
        target=math.inf,
        sigma=0.01,
        seeds=5,
        text=SHAKESPEARE,
        minutes=10.0,
        machine=r"^(?!.*ranks).*cpu with [12] (of|thread)",
        best=(2.0370, 5),
    ),
}
VAL_TOKENS = 10_485_760  # of FineWeb's shard
TOLERANCE = 0.005  # nats between the loss in a log, perhaps in 16 bits, and ours in 32
NOT_COMPUTED = {"architectures", "dtype", "transformers_version", "_name_or_path", "use_cache", "n_ctx", "n_inner",
                "attn_pdrop", "embd_pdrop", "resid_pdrop"}  # fmt: skip
MAY_DIFFER = ("seed", "out_dir", "resume", "overwrite", "device", "micro_batch_size", "threads")  # between seeds


@dataclass(frozen=True)
class Config:
    runs: Positional[tuple[str, ...]]  # run directories, one for each seed
    kind: Literal["tokens", "h100", "cores"] = "tokens"  # kind of record, see docs/record.md
    data: str = ""  # FineWeb's validation shard; for cores, the text
    device: Device = "auto"  # auto: cuda, else mps, else cpu
    json: str = ""  # write the figures to this file


def run(config: Config, rt: Runtime) -> Iterator[dict]:
    kind = KINDS[config.kind]
    runs = [facts_of(Path(name), kind) for name in config.runs]
    refuse_chosen(runs, kind)
    torch.set_num_threads(fastest_threads(torch.get_num_threads()))
    found = []  # what the kind is judged by
    for name, facts in zip(config.runs, runs, strict=True):
        model, tokenizer = opened(facts["checkpoint"], kind)
        ids, n_bytes = text_tokens(config.data, tokenizer, kind.text) if kind.text else shard_tokens(config.data)
        nats = nats_of(model.to(rt.device), ids.to(rt.device))
        loss = nats / (len(ids) - 1)
        if abs(loss - facts["loss"]) > TOLERANCE:
            what = f"{name}: the log says {facts['loss']:.4f} nats per token, the checkpoint has {loss:.4f}"
            raise UserError(f"{what} in windows that do not overlap; log what the rules ask for")
        found.append(nats / math.log(2) / n_bytes if kind.text else loss)
        yield dict(name=name, result=found[-1], loss=loss, tokens=facts["tokens"], minutes=facts["minutes"])
    mean = statistics.mean(found)
    yield dict(name="entry", result=mean, verdict=verdict(found, kind))
    first = runs[0]
    c = first["constants"]
    seeds = ", ".join(f"{value:.4f}" for value in found)
    minutes = max(facts["minutes"] for facts in runs)
    cells = (
        f"{c['n_layer']} x {c['n_embd']}, {c['vocab_size']} tokens, T = {c['sequence_length']}",
        c["optimizer"],
        f"{first['tokens']:,}",
        f"{mean:.4f} ({seeds})",
        f"{minutes:.1f} min, {first['machine']}",
        first["commit"],
    )
    print(f"| | {' | '.join(cells)} |")  # the first cell is for a name


def facts_of(run_dir: Path, kind: Kind) -> dict:
    """Last checkpoint, constants, validation loss and cost of a run. Raises UserError for one that is not whole."""
    steps = checkpoint_steps(run_dir)
    if not steps:
        raise UserError(f"{run_dir} has no checkpoint; give the run directories of the entry")
    step, checkpoint = steps[-1]
    if problem := find_damage(checkpoint):
        raise UserError(f"{checkpoint} was changed after the run: {problem}; give it as it was written")
    log = read_log(run_dir / "log.jsonl")
    train = of_kind(log, "train")
    val = [record["loss"] for record in of_kind(log, "val") if record["step"] == step and record["loss"]]
    starts = of_kind(log, "run")  # one for each resume, too
    if len(train) != step or not val or not starts:
        raise UserError(f"{run_dir}/log.jsonl lacks its start, steps, or a validation at step {step}; give a whole run")
    minutes = sum(record["dt_ms"] for record in train) / 6e4
    machines = {start["machine"] for start in starts}
    constants = load_train_state(checkpoint)["config"]
    origin = constants.get("init_from") or "random weights"
    if minutes > kind.minutes or origin != "random weights" or not all(re.search(kind.machine, m) for m in machines):
        what = f"{run_dir} took {minutes:.1f} minutes from {origin} on {' and '.join(sorted(machines))}"
        raise UserError(f"{what}; docs/record.md says what this kind allows")
    return dict(
        checkpoint=checkpoint,
        constants=constants,
        loss=val[-1],
        step=step,
        tokens=train[-1]["tokens"],
        minutes=minutes,
        machine=starts[0]["machine"],
        commit=str(starts[0]["commit"]),
    )


def refuse_chosen(runs: list[dict], kind: Kind) -> None:
    """Raise UserError unless all seeds from 0 on are given, with the same constants, steps and code."""
    seeds = sorted(facts["constants"]["seed"] for facts in runs)
    if seeds != list(range(len(runs))) or len(runs) < kind.seeds:
        raise UserError(f"the seeds are {seeds}; give all of 0, 1, 2, ..., at least {kind.seeds}, and leave none out")
    same = [facts["constants"] | {key: facts[key] for key in ("step", "commit")} for facts in runs]
    fixed = [key for key in same[0] if key not in MAY_DIFFER]
    if changed := [key for key in fixed if any(other.get(key) != same[0][key] for other in same)]:
        raise UserError(f"the runs differ in {', '.join(changed)}; train all seeds of an entry with the same constants")


def opened(checkpoint: Path, kind: Kind) -> tuple:
    """The model and the tokenizer as transformers reads them. Raises UserError for what is not a plain GPT-2."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

    model, about = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    found = model.config.to_dict()
    sizes = {key: found.get(key) for key in (*GPT2, "vocab_size", "bos_token_id", "eos_token_id")}
    plain = GPT2Config(**sizes).to_dict()
    wrong = [key for key in sorted({*found, *plain} - NOT_COMPUTED) if found.get(key) != plain.get(key)]
    wrong += [key for key, size in kind.sizes.items() if sizes[key] != size]
    if found.get("n_inner") not in (None, 4 * found["n_embd"]):
        wrong.append("n_inner")
    if found["vocab_size"] > -(-len(tokenizer) // 128) * 128:  # padded to 128, no more
        wrong.append("vocab_size")
    if type(model).__name__ != "GPT2LMHeadModel" or wrong or any(about.values()):
        raise UserError(f"{checkpoint} is not a GPT-2 as the rules have it: {wrong or about}; see docs/record.md")
    return model.eval(), tokenizer


def text_tokens(data: str, tokenizer, digest: str) -> tuple[torch.Tensor, int]:
    """The last tenth of the text as one document, and its bytes. Raises UserError for another text."""
    if not Path(data).is_file() or sha256(Path(data)) != digest:
        raise UserError(f"--data {data!r} is not the text of this kind; docs/record.md says where to get it")
    text = Path(data).read_text(encoding="utf-8")
    text = text[int(len(text) * TRAIN_FRACTION) :]
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # longer than T is no mistake here
    if tokenizer.decode(ids, clean_up_tokenization_spaces=False) != text:
        raise UserError("the tokenizer does not give the text back, so that bits per byte mean nothing; fix it")
    return torch.tensor([tokenizer.eos_token_id, *ids]), len(text.encode())


def shard_tokens(data: str) -> tuple[torch.Tensor, int]:
    """The first tokens of a shard in llm.c's format: 256 int32 of header, then uint16. Raises UserError."""
    ids = np.fromfile(data, np.uint16, VAL_TOKENS + 1, offset=1024) if Path(data).is_file() else ()
    if len(ids) <= VAL_TOKENS:
        raise UserError(f"--data {data!r} is not FineWeb's validation shard, which docs/record.md names; give that")
    return torch.from_numpy(ids.astype(np.int64)), 0


@torch.no_grad()
def nats_of(model, ids: torch.Tensor) -> float:
    """The sum of -ln p of every token after the first. Windows do not overlap: with a smaller stride tokens would have
    more context, and the loss would be lower."""
    T = model.config.n_positions
    total = 0.0
    for start in range(0, len(ids) - 1, T):
        window = ids[start : start + T + 1]
        logits = model(window[None, :-1]).logits[0].float()  # (T, V)
        total -= logits.log_softmax(-1).gather(1, window[1:, None]).sum().item()
    return total


def verdict(found: list[float], kind: Kind) -> str:
    """Whether the mean is two standard errors below the target, and below the record; sigma is the same for both."""
    n = len(found)
    mean = statistics.mean(found)
    if (kind.target - mean) * math.sqrt(n) < 2 * kind.sigma:
        return f"refused: not shown to be below {kind.target}"
    if kind.best and (kind.best[0] - mean) / math.sqrt(1 / n + 1 / kind.best[1]) < 2 * kind.sigma:
        return f"accepted, not shown to be below the record, {kind.best[0]}"
    return "accepted"
