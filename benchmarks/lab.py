"""Does an idea gain anything? It and a baseline are trained with the same seeds until their difference is no accident.

    python bench.py lab --recipe tiny --size ""            # every idea of benchmarks/ideas.py for that recipe
    python bench.py lab "momentum 0.9" --size 5M           # one of them, on a model of five million parameters
    python bench.py lab --null 40 --steps 300              # forty changes of nothing but the seed: few may seem to gain
    python bench.py lab --table --ledger docs/lab.jsonl    # the table of what was run; trains nothing

With the same seed a baseline and an idea start from the same weights and read the same data in the same order. Their
differences d, one a seed, are the evidence, by how much better a normal distribution with some mean explains them than
one with the mean 0, the standard deviation unknown to both (a Bayes factor: `evidence`). If the idea does nothing, the
chance that this ever reaches 10 is at most 1 in 10, and half of that for a gain, however often one looks and whenever
one stops (Hendriksen et al. 2021, "Optional stopping with Bayes factors"). So a verdict may come early, and more seeds
may be added to one that is open. Forty ideas are forty chances: expect two false gains, and repeat with other seeds.

Every run is a line of --ledger and is not made again while the code that it depends on is the same.
Not shown: that a gain holds at 124M, or in longer runs than these.
"""

import ast
import hashlib
import inspect
import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal

import torch
from tyro.conf import Positional

from benchmarks.ideas import IDEAS, Idea
from benchmarks.measure import ROOT, Device, machine
from bpe.tokenizer import cpu_count
from cli import Count, Range, UserError
from corpus.order import Batches, to_inputs, validation_batches
from corpus.shards import data_tokenizer, prepare_text
from corpus.stream import TokenStream, find_shards
from learning.evaluation import validate
from learning.optim import Muon, Optimizer, learning_rate, make_optimizer
from model import GPT, GPTConfig, Loss
from run.runtime import Runtime
from run.trials import choose_attention
from train_gpt2 import RECIPES
from train_gpt2 import Config as Training

SIZES = {
    "": {},  # the recipe's own
    # 200 steps of this are for the ablation of the recipe gpt2, in fp32 so that they depend little on the processor
    "0.25M": dict(n_layer=4, n_head=2, n_embd=64, sequence_length=32, vocab_size=1024, total_batch_size=512,
                  max_lr=3e-3, min_lr=3e-4, warmup_steps=8, eval_steps=0, dtype="float32"),
    "1M": dict(n_layer=4, n_head=2, n_embd=128, sequence_length=64, vocab_size=1024, total_batch_size=1024,
               eval_steps=100),
    "5M": dict(n_layer=6, n_head=4, n_embd=256, sequence_length=64, vocab_size=1024, total_batch_size=1024,
               eval_steps=100),
}  # fmt: skip
CODE = ("model.py", "learning/loss.py", "learning/optim.py", "learning/evaluation.py", "corpus/order.py")
FIRST_LOOK = 4  # seeds: the evidence of three reaches 10 only if they agree to a few percent
ENOUGH = 10.0  # evidence
EFFECT = 2.0  # what the alternative expects of |mean(d)| / sd(d): small effects take dozens of seeds to see anyway

PLAIN = Idea("the recipe as it is")


@dataclass(frozen=True)
class Config:
    ideas: Positional[tuple[str, ...]] = ()  # what to try; all ideas for the recipe if there is none
    recipe: Literal["gpt2", "speedrun", "tiny"] = "speedrun"  # of train_gpt2.py: the baseline
    against: str = ""  # the idea that is the baseline instead
    size: Literal["", "0.25M", "1M", "5M"] = "1M"  # parameters; empty for the recipe's own
    steps: Count = 1000  # optimizer steps of the baseline; 0 for the recipe's
    seeds: Annotated[int, Range(2, 100)] = 8  # at most; fewer where the verdict is clear
    null: Count = 0  # try this many changes of the seed alone
    data: str = str(ROOT / "input.txt")  # a .txt
    ledger: str = "out/lab.jsonl"  # the runs that were made
    table: bool = False  # show what the ledger has, and train nothing
    device: Device = "auto"  # auto: cuda, else mps, else cpu
    json: str = ""  # write the figures to this file


def run(config: Config, rt: Runtime) -> Iterator[dict]:
    ledger = Ledger(Path(config.ledger))
    if config.table:
        yield from ledger.rows()
        return
    ideas = chosen(config)
    baseline, *undecided = ideas
    vocab_size = settings(config, PLAIN, 0).vocab_size
    shards = str(prepare_text(config.data, "train", vocab_size, Path("out/cache")))  # before runs that need it start
    for seeds in [range(min(FIRST_LOOK, config.seeds)), *([seed] for seed in range(FIRST_LOOK, config.seeds))]:
        jobs = [(name, seed) for seed in seeds for name in (baseline, *undecided)]
        runs = {job: identity(job[0], ideas[job[0]], job[1], config, shards, rt) for job in jobs}
        missing = [job for job in jobs if not ledger.has(runs[job])]
        for job, figures in side_by_side(ideas, missing, config, shards, rt):
            ledger.add(runs[job] | figures | dict(against=baseline, machine=machine(rt)["device"]))
        rows = {name: ledger.row(runs[jobs[0]], name, baseline) for name in (baseline, *undecided)}
        yield from rows.values()
        undecided = [name for name in undecided if rows[name]["verdict"] == "not told apart"]
        if not undecided:
            break
    if config.null:
        print(f"null: {config.null} changes; see how many rows say gain")


def chosen(config: Config) -> dict[str, Idea]:
    """The baseline and the ideas to compare with it, by name. Raises UserError."""
    known = {config.recipe: PLAIN} | IDEAS[config.recipe]
    baseline = config.against or config.recipe
    if unknown := {*config.ideas, baseline} - {*known}:
        raise UserError(f"{sorted(unknown)[0]!r} is not an idea for {config.recipe}; they are {', '.join(known)}")
    if config.null:
        like = replace(known[baseline], source="other seeds, and nothing else")
        return {baseline: like} | {f"null {k}": replace(like, seeds_from=1000 * k) for k in range(1, config.null + 1)}
    return {name: known[name] for name in dict.fromkeys((baseline, *(config.ideas or known)))}


# ---------------------------------------------------------------------------------------------------------- evidence


def evidence(over: list[float]) -> float:
    """How many times likelier the differences `over` are with an effect than without one.

    The effect mean / sd is normal with the standard deviation EFFECT before any is seen; no scale is likelier than
    another. Then the ratio depends on Student's t of the differences alone (Gönen et al. 2005, equation 3).
    """
    n, mean = len(over), statistics.mean(over)
    variance = statistics.variance(over) if n > 1 else 0.0
    if not variance:  # one seed, or changes that change nothing
        return 1.0
    t2, spread = n * mean**2 / variance, 1 + n * EFFECT**2
    return ((1 + t2 / (n - 1)) / (1 + t2 / (n - 1) / spread)) ** (n / 2) / math.sqrt(spread)


def verdict(over: list[float]) -> str:
    if evidence(over) < ENOUGH:
        return "not told apart"
    return "gain" if statistics.mean(over) < 0 else "harm"


# ---------------------------------------------------------------------------------------------------------- the ledger


class Ledger:
    """The runs that were made: lines of JSON, each with what decides a run, and what came of it."""

    GROUP = ("recipe", "size", "steps", "text", "precision", "code")  # runs that can be compared

    def __init__(self, path: Path):
        self.path, self.runs = path, []
        if path.exists():
            self.runs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def add(self, record: dict) -> None:
        self.runs.append(record)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as f:
            f.write(json.dumps(record) + "\n")

    def has(self, run: dict) -> bool:
        return any(run.items() <= record.items() for record in self.runs)

    def losses(self, group: dict, name: str) -> dict[int, float]:
        """{seed: loss} of an idea; of two versions of it the newer."""
        wanted = dict(idea=name) | {key: group[key] for key in self.GROUP}
        return {record["seed"]: record["loss"] for record in self.runs if wanted.items() <= record.items()}

    def row(self, group: dict, name: str, baseline: str) -> dict:
        """An idea against the baseline, over the seeds that both have."""
        losses, plain = self.losses(group, name), self.losses(group, baseline)
        seeds = sorted(losses.keys() & plain.keys())
        over = [losses[seed] - plain[seed] for seed in seeds]
        error = statistics.stdev(over) / len(over) ** 0.5 if len(over) > 1 else 0.0
        row = dict(name=name, mean=statistics.mean(losses[seed] for seed in seeds), seeds=len(seeds))
        if name != baseline:
            row |= dict(over=statistics.mean(over), standard_error=error, evidence=evidence(over))
            row |= dict(verdict=verdict(over), over_recipe=over)
        return row

    def rows(self) -> Iterator[dict]:
        """Everything in the ledger, each idea against what it was run against."""
        pairs = {(tuple(record[key] for key in self.GROUP), record["against"], record["idea"]) for record in self.runs}
        for values, baseline, name in sorted(pairs, key=str):
            group = dict(zip(self.GROUP, values, strict=True))
            if name != baseline and self.losses(group, baseline):
                title = f"{group['recipe']} {group['size']}, {group['steps']} steps: {name}, against {baseline}"
                yield self.row(group, name, baseline) | dict(name=title)


def identity(name: str, idea: Idea, seed: int, config: Config, shards: str, rt: Runtime) -> dict:
    """What decides a run, as its line in the ledger has it."""
    precision = Runtime.setup(rt.device.type, settings(config, idea, seed).dtype).dtype
    functions = [function for function in (idea.model, idea.patch) if function]
    constants = [idea.constants, idea.options, idea.recipe, idea.tokens, idea.seeds_from]
    return dict(
        idea=name, recipe=config.recipe, size=config.size, steps=settings(config, PLAIN, 0).max_steps, seed=seed,
        text=Path(shards).name, precision=str(precision),
        code=digest([(ROOT / file).read_text(encoding="utf-8") for file in CODE] + [inspect.getsource(train)]),
        change=digest([repr(constants), *map(inspect.getsource, functions)]),
    )  # fmt: skip


def digest(sources: list[str]) -> str:
    """Of what Python code does: neither comments nor docstrings change it."""
    found = hashlib.sha256()
    for text in sources:
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
                node.body = node.body[1:]
        found.update(ast.dump(tree).encode())
    return found.hexdigest()[:12]


# ------------------------------------------------------------------------------------------------------------ the runs


def settings(config: Config, idea: Idea, seed: int) -> Training:
    """The constants of a run: the recipe with another size and length, and the same fraction of warmup."""
    recipe = RECIPES[idea.recipe or config.recipe]
    steps = round(idea.tokens * (config.steps or RECIPES[config.recipe].max_steps))
    length = dict(max_steps=steps, warmup_steps=steps * recipe.warmup_steps // recipe.max_steps)
    seeded = dict(seed=seed + idea.seeds_from, device=config.device)
    return replace(recipe, **length | SIZES[config.size] | idea.constants | seeded)


def side_by_side(ideas: dict[str, Idea], jobs: list[tuple], config: Config, shards: str, rt: Runtime) -> Iterator:
    """((name, seed), figures) of each job as it ends: one run a core on a CPU, one at a time on a GPU."""
    workers = cpu_count() if rt.device.type == "cpu" else 1
    with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        started = {
            pool.submit(train, ideas[name], settings(config, ideas[name], seed), shards): (name, seed)
            for name, seed in jobs
        }
        for done in as_completed(started):
            yield started[done], done.result()


def train(idea: Idea, config: Training, shards: str) -> dict:
    """A run of train_gpt2.py, reduced to what an idea may touch."""
    rt = Runtime.setup(config.device, config.dtype)
    stream, val = (TokenStream(find_shards(shards, split), config.vocab_size) for split in ("train", "val"))
    T, rows = config.sequence_length, config.total_batch_size // config.sequence_length
    order = Batches(stream, T, config.seed, config.shuffle)
    sizes = {name: getattr(config, name) for name in ("n_layer", "n_head", "n_embd", "vocab_size", "dropout")}
    torch.manual_seed(config.seed)
    model = GPT(GPTConfig(**sizes, n_positions=T, attention=choose_attention(config.attention, rt, T)))
    if idea.model:
        idea.model(model)
    optimizer = make_optimizer(model.to(rt.device), config, rt)
    run = parts_of(model, optimizer, config)
    hooks = defaultdict(lambda: lambda step: None, idea.patch(run, **idea.options) if idea.patch else {})
    began = time.perf_counter()
    for step in range(1, config.max_steps + 1):
        hooks["before_forward"](step)
        windows = torch.from_numpy(next(order.micro_batches((step - 1) * rows, rows, rows))).to(rt.device)
        with rt.autocast():
            loss = model.loss(*to_inputs(windows))
        loss.backward()
        norm = optimizer.clip_grad_norm(config.grad_clip)
        optimizer.set_lr(learning_rate(step, config))
        hooks["before_step"](step)
        optimizer.step(finite=norm.isfinite())
        hooks["after_step"](step)
    hooks["at_end"](step)
    seconds = time.perf_counter() - began
    windows = validation_batches(val, T, 64, config.eval_steps * config.total_batch_size)
    inputs = (to_inputs(torch.from_numpy(rows).to(rt.device)) for rows in windows)
    token_bytes = torch.from_numpy(data_tokenizer(Path(shards), "train").token_bytes()).to(rt.device)
    return validate(Loss(model), inputs, token_bytes, rt) | dict(seconds=round(seconds, 1))


def parts_of(model: GPT, optimizer: Optimizer, config: Training) -> SimpleNamespace:
    """What a patch gets: the parts of a run."""
    muon = next((part for part in optimizer.optimizers if isinstance(part, Muon)), None)
    adamw = next(part for part in optimizer.optimizers if not isinstance(part, Muon))
    return SimpleNamespace(model=model, config=config, muon=muon, adamw=adamw)
