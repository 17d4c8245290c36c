"""Does an idea help? Trains it and a baseline with the same seeds until their difference is clear.

    python bench.py lab "momentum 0.9" --size 5M           # an idea of benchmarks/ideas.py, with 5 million parameters
    python bench.py lab --null 40                          # change nothing but the seed: few of 40 may seem to gain
    python bench.py lab --table --ledger docs/lab.jsonl    # show earlier results; trains nothing

With the same seed, baseline and idea start from the same weights and read the same data in the same order. After every
seed, `evidence` is the Bayes factor of their differences: how much better an effect explains them than none. For an
idea that does nothing, and normal differences, the chance that it ever reaches ENOUGH is at most 1 in 10, half of that
for a gain, however many seeds are added (Hendriksen et al. 2021, "Optional stopping with Bayes factors"). So add seeds
to an idea that is not told apart. But twenty ideas are twenty chances: test a gain again at another size. It need not
hold at 124M.
Every run becomes a line of --ledger, and is repeated only if its code or the recipe changes.
"""

import ast
import hashlib
import inspect
import itertools
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

from benchmarks.ideas import IDEAS, Idea, unchanged
from benchmarks.measure import ROOT, Device, machine
from bpe.tokenizer import cpu_count
from cli import Count, Range, UserError
from corpus.order import to_inputs
from corpus.shards import prepare_text
from learning.evaluation import validate
from learning.optim import learning_rate, make_optimizer, muon_part
from machine.runtime import Runtime
from model import GPTWithLoss
from train_gpt2 import RECIPES, build_model, open_data, resolve_config, validation_inputs
from train_gpt2 import Config as Training

SMALL = dict(sequence_length=64, vocab_size=1024, total_batch_size=1024, eval_steps=100)
SIZES = {  # the quarter is for 200 steps of gpt2, in fp32 so that they depend little on the processor
    "": {},
    "0.25M": dict(n_layer=4, n_head=2, n_embd=64, sequence_length=32, vocab_size=1024, total_batch_size=512,
                  max_lr=3e-3, min_lr=3e-4, warmup_steps=8, eval_steps=0, dtype="float32"),
    "1M": dict(n_layer=4, n_head=2, n_embd=128, **SMALL),
    "5M": dict(n_layer=6, n_head=4, n_embd=256, **SMALL),
    # as in bench.py share; 6,628 steps are 40 tokens a parameter
    "0.34M": dict(n_layer=4, n_head=1, n_embd=64, sequence_length=128, vocab_size=2048, total_batch_size=2048,
                  eval_steps=200, dtype="float32"),
}  # fmt: skip
CODE = ("model.py", "learning/loss.py", "learning/optim.py", "corpus/order.py")  # that decides a run, besides `train`
FIRST_LOOK = 4  # seeds; with fewer there is no verdict: three that agree by accident have an evidence of 10
ENOUGH = 10.0  # evidence for a verdict
EFFECT = 2.0  # the expected |mean / standard deviation|: a small effect takes dozens of seeds in any case
PLAIN = Idea("the recipe as it is")


@dataclass(frozen=True)
class Config:
    ideas: Positional[tuple[str, ...]] = ()  # ideas to try; if none, all ideas for the recipe
    recipe: Literal["gpt2", "speedrun", "tiny"] = "speedrun"  # the baseline, a recipe of train_gpt2.py
    against: str = ""  # compare with this idea instead of the recipe; with --table, instead of each run's baseline
    size: Literal["", "0.25M", "0.34M", "1M", "5M"] = "1M"  # parameters; empty for the recipe's own
    steps: Count = 1000  # optimizer steps; 0 for the recipe's
    seeds: Annotated[int, Range(2, 100)] = 8  # seeds, at most; fewer if the verdict is clear
    null: Count = 0  # try this many changes of the seed alone
    data: str = str(ROOT / "input.txt")  # a .txt file, or a directory of shards
    ledger: str = "out/lab.jsonl"  # file with all runs, one per line
    table: bool = False  # show the results in the ledger, and train nothing
    device: Device = "auto"  # auto: cuda, else mps, else cpu
    json: str = ""  # write the figures to this file


def run(config: Config, rt: Runtime) -> Iterator[dict]:
    ledger = LabLedger(Path(config.ledger))
    if config.table:
        return (yield from ledger.rows(config.against))
    ideas = chosen(config)
    version = {name: version_of(idea) for name, idea in ideas.items()}
    shards = config.data
    if shards.endswith(".txt"):
        vocab_size = settings(config, PLAIN, 0).vocab_size
        shards = str(prepare_text(config.data, "train", vocab_size, Path("out/cache")))
    setting = setting_of(config, shards, rt)
    baseline, *undecided = ideas
    first = min(FIRST_LOOK, config.seeds)
    one_by_one = [[seed] for seed in range(first, config.seeds)]
    for seeds in [range(first), *one_by_one]:
        names = (baseline, *undecided)
        jobs = []
        for seed, name in itertools.product(seeds, names):
            if seed not in ledger.losses(setting, name, version[name]):
                jobs.append((name, seed))
        for (name, seed), figures in side_by_side(ideas, jobs, config, shards, rt):
            ledger.add(
                setting=setting,
                seed=seed,
                idea=name,
                version=version[name],
                against=baseline,
                machine=machine(rt)["device"],
                **figures,
            )
        rows = {name: ledger.row(setting, name, baseline, version) for name in names}
        yield from rows.values()
        undecided = [name for name in undecided if rows[name]["verdict"] == "not told apart"]
        if not undecided:
            return


def chosen(config: Config) -> dict[str, Idea]:
    """The baseline and the ideas to compare with it, by name. Raises UserError."""
    known = {config.recipe: PLAIN} | IDEAS[config.recipe]
    baseline = config.against or config.recipe
    unknown = {*config.ideas, baseline} - {*known}
    if unknown:
        raise UserError(f"{sorted(unknown)[0]!r} is not an idea for {config.recipe}; choose from {', '.join(known)}")
    found = {baseline: known[baseline]}
    for k in range(1, config.null + 1):
        found[f"null {k}"] = replace(known[baseline], seeds_from=1000 * k)
    if config.null:
        return found
    return found | {name: known[name] for name in config.ideas or known}


# ---------------------------------------------------------------------------------------------------------- evidence


def evidence(over: list[float]) -> float:
    """The Bayes factor of an effect over none, for normal differences of unknown deviation. The prior of the effect,
    mean / deviation, is normal with mean 0 and standard deviation EFFECT (Gönen et al. 2005, equation 3)."""
    n = len(over)
    variance = statistics.variance(over) if n > 1 else 0.0
    if not variance:  # one seed, or a change that changes nothing
        return 1.0
    t2 = n * statistics.mean(over) ** 2 / variance  # Student's t, squared
    spread = 1 + n * EFFECT**2
    return ((1 + t2 / (n - 1)) / (1 + t2 / (n - 1) / spread)) ** (n / 2) / math.sqrt(spread)


def verdict(over: list[float]) -> str:
    if len(over) < FIRST_LOOK or evidence(over) < ENOUGH:
        return "not told apart"
    return "gain" if statistics.mean(over) < 0 else "harm"


class Ledger:
    """Runs, one per line of JSON. Every line has the keys NEEDED."""

    NEEDED: tuple[str, ...]

    def __init__(self, path: Path):
        self.path = path
        self.runs = []
        lines = path.read_bytes().splitlines() if path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                record = dict(json.loads(line))
            except (ValueError, TypeError):
                record = {}
            if not record.keys() >= {*self.NEEDED}:
                raise UserError(f"{path}: line {number} is not the whole record of a run; delete that line")
            self.runs.append(record)

    def add(self, **record) -> None:
        self.runs.append(record)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as f:
            f.write(json.dumps(record) + "\n")


class LabLedger(Ledger):
    """Runs of one `setting` can be compared."""

    NEEDED = ("setting", "idea", "version", "against", "seed", "loss")

    def losses(self, setting: str, idea: str, version: str) -> dict[int, float]:
        """{seed: loss} of a version of an idea."""
        wanted = dict(idea=idea, setting=setting, version=version)
        return {record["seed"]: record["loss"] for record in self.runs if wanted.items() <= record.items()}

    def row(self, setting: str, idea: str, baseline: str, version: dict[str, str]) -> dict:
        """Statistics of an idea. `version` maps both names to the version to count: changed code is a new idea."""
        losses = self.losses(setting, idea, version[idea])
        plain = self.losses(setting, baseline, version[baseline])
        seeds = sorted(losses.keys() & plain.keys())
        mean = statistics.mean(losses[seed] for seed in seeds or losses)
        row = dict(name=idea, mean=mean, seeds=len(seeds))
        if idea == baseline or not seeds:
            return row
        over = [losses[seed] - plain[seed] for seed in seeds]
        deviation = statistics.stdev(over) if len(over) > 1 else 0.0
        return row | dict(
            over=statistics.mean(over),
            standard_error=deviation / math.sqrt(len(over)),
            evidence=evidence(over),
            verdict=verdict(over),
            over_each=over,
        )

    def rows(self, against: str) -> Iterator[dict]:
        """A row for every idea of every setting, compared with `against`, or with the baseline of its runs."""
        newest = defaultdict(dict)  # by setting: the last version of each idea
        compared = {}  # no idea twice, in the order of the ledger
        for run in self.runs:
            newest[run["setting"]][run["idea"]] = run["version"]
            compared[run["setting"], run["idea"], against or run["against"]] = None
        for setting, idea, baseline in compared:
            version = newest[setting]
            if idea != baseline and baseline in version:
                row = self.row(setting, idea, baseline, version)
                yield row | dict(name=f"{setting}: {idea}, against {baseline}")


# ------------------------------------------------------------------------------------------------------------ the runs


def setting_of(config: Config, shards: str, rt: Runtime) -> str:
    """What all runs of a comparison share, in words."""
    plain = settings(config, PLAIN, 0)
    precision = str(Runtime.setup(rt.device.type, plain.dtype).dtype).removeprefix("torch.")
    code = [(ROOT / file).read_text(encoding="utf-8") for file in CODE]
    code += [inspect.getsource(train), str(plain)]
    parsed = ast.dump(ast.parse("".join(code)))  # the same if a comment changes
    digest = hashlib.sha256(parsed.encode()).hexdigest()[:8]
    size = config.size or "own size"
    return f"{config.recipe}, {size}, {plain.max_steps} steps, {Path(shards).name}, {precision}, code {digest}"


def version_of(idea: Idea) -> str:
    code = inspect.getsource(idea.model) + inspect.getsource(idea.patch)
    about = repr([idea.constants, idea.options, idea.seeds_from, code])
    return hashlib.sha256(about.encode()).hexdigest()[:8]


def settings(config: Config, idea: Idea, seed: int, shards: str = "") -> Training:
    """The constants of a run: the recipe with another size and length, and the same fraction of warmup."""
    recipe = RECIPES[config.recipe]
    steps = config.steps or recipe.max_steps
    length = dict(max_steps=steps, warmup_steps=steps * recipe.warmup_steps // recipe.max_steps)
    constants = length | SIZES[config.size] | idea.constants
    training = replace(recipe, **constants, seed=seed + idea.seeds_from)
    batch_size = training.total_batch_size // training.sequence_length
    return replace(training, data=shards, tokenizer="train", micro_batch_size=batch_size, hellaswag_interval=0)


def side_by_side(ideas: dict[str, Idea], jobs: list[tuple], config: Config, shards: str, rt: Runtime) -> Iterator:
    """((name, seed), figures) of each job as it ends: one run a core on a CPU, one at a time on a GPU."""
    workers = cpu_count() if rt.device.type == "cpu" else 1
    started = {}
    with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for name, seed in jobs:
            constants = settings(config, ideas[name], seed, shards)
            started[pool.submit(train, ideas[name], constants, rt.device.type)] = (name, seed)
        for done in as_completed(started):
            yield started[done], done.result()


def train(idea: Idea, requested: Training, device: str) -> dict:
    """The figures of a run of train_gpt2.py, reduced to what an idea may touch."""
    rt = Runtime.setup(device, requested.dtype)
    config, shape = resolve_config(requested, set(), None, rt)
    data = open_data(config, shape, None, rt)
    model = build_model(config, shape, None)
    idea.model(model)
    optimizer = make_optimizer(model.to(rt.device), config, rt)
    parts = SimpleNamespace(model=model, config=config, adamw=optimizer.optimizers[0], muon=optimizer.optimizers[-1])
    hooks = dict.fromkeys(("before_step", "after_step", "at_end"), unchanged) | idea.patch(parts, **idea.options)
    batch_size = config.micro_batch_size  # the whole batch at once
    began = time.perf_counter()
    for step in range(1, config.max_steps + 1):
        [tokens] = data.train.micro_batches((step - 1) * batch_size, batch_size, batch_size)
        with rt.autocast():
            loss = model.loss(*to_inputs(torch.from_numpy(tokens).to(rt.device)))
        optimizer.scale(loss).backward()
        norm = optimizer.clip_grad_norm(config.grad_clip)
        optimizer.set_lr(learning_rate(step, config), muon_part(step, config))
        hooks["before_step"](step)
        optimizer.step(finite=norm.isfinite())
        optimizer.zero_grad()
        hooks["after_step"](step)
    hooks["at_end"](step)
    seconds = round(time.perf_counter() - began, 1)
    figures = validate(GPTWithLoss(model), validation_inputs(config, data, rt), data.token_bytes, rt)
    return figures | dict(seconds=seconds)
