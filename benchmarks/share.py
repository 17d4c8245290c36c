"""What speedrun saves: the share of gpt2's tokens that it needs for the same loss, at 80 tokens a parameter.

    python bench.py share --data books --workers 2    # train what the ledger lacks; the same command continues
    python bench.py share --table                     # show what the ledger has, and train nothing
    python bench.py share --data books --hidden       # also train the size that `bench.py forecast` has forecast

GPT-2 124M on 10B tokens reads 80 tokens for each parameter. So does `gpt2` here, and `speedrun` reads 40, 50, 67 and
100% of that. Both are as train_gpt2.py has them, their warmup scaled, and all rates of a recipe times one factor, which
is halved and doubled at full length until neither helps. With one seed both start from the same weights and read the
same data. The share of a seed is a parabola of ln(share) in the loss, fitted to speedrun's four runs, at gpt2's loss.
docs/forecast.md says how to make the shards. Every run becomes a line of --ledger, and is not repeated.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.lab import Ledger
from benchmarks.measure import ROOT, Device
from cli import Positive, UserError
from files import read_json
from model import GPTConfig
from pretraining.plan import n_parameters
from run.records import of_kind, read_log
from train_gpt2 import RECIPES

RATIO = 80  # tokens for each parameter
SHARES = (1.0, 0.67, 0.5, 0.4)  # of these tokens, for speedrun
# speedrun as it was for these runs: one schedule for Muon and AdamW
THEN = dict(gpt2={}, speedrun=dict(lr_schedule="wsd", decay_fraction=1.0))
START = dict(gpt2=32.0, speedrun=2.0)  # the first factor to try: those of the smallest rung
SHAPE = dict(n_layer=4, vocab_size=2048)
CONTEXT = 128
VAL_TOKENS = 409_600


class Rung(NamedTuple):
    width: int  # channels
    batch: int = 2048  # tokens
    seeds: int = 3


RUNGS = [Rung(32), Rung(32, batch=8192), Rung(64), Rung(32, batch=512)]
HIDDEN = Rung(96, seeds=2)  # at the rates of the largest other one


class Job(NamedTuple):
    """A run, as the ledger names it."""

    recipe: str
    width: int
    batch: int
    factor: float  # times the recipe's learning rates
    share: float
    seed: int


@dataclass(frozen=True)
class Config:
    data: str = "books"  # directory of shards with a vocabulary of 2,048
    ledger: str = "docs/share.jsonl"  # file with all runs, one per line
    out_dir: str = "out/share"  # directory of the runs under way
    workers: Positive = 1  # runs to train at the same time, each with one thread
    table: bool = False  # show what the ledger has, and train nothing
    hidden: bool = False  # train the hidden size, too, once there is a forecast of it
    forecasts: str = "docs/forecasts.json"  # file with the forecasts
    device: Device = "auto"  # auto: cuda, else mps, else cpu
    json: str = ""  # write the figures to this file


def run(config: Config, rt) -> Iterator[dict]:
    rungs = list(RUNGS)
    if config.hidden or config.table:
        rungs.append(HIDDEN)
    if config.hidden and not (Path(config.forecasts).exists() and "hidden" in read_json(Path(config.forecasts))[-1]):
        raise UserError(f"{config.forecasts} forecasts no hidden size; write that with bench.py forecast first")
    runs = Runs(Path(config.ledger), None if config.table else partial(train, config=config))
    if not config.table:
        train_all(rungs, runs, config.workers)
    yield from runs.rows()
    for rung in rungs:
        shares = np.exp(runs.log_shares(rung)).tolist()
        if shares:
            name = f"share of gpt2's tokens, {parameters(rung.width):,} parameters, batches of {rung.batch:,}"
            yield dict(name=name, seeds=shares)


# -------------------------------------------------------------------------------------------------------- the ledger


class Runs(Ledger):
    """The ledger; `train(job)` makes a run that it lacks. Without it such a run is a LookupError."""

    NEEDED = (*Job._fields, "loss")

    def __init__(self, path: Path, train=None):
        super().__init__(path)
        self.train = train
        self.losses = {}
        for record in self.runs:
            self.losses[Job(*(record[field] for field in Job._fields))] = record["loss"]

    def loss(self, job: Job) -> float:
        if self.train and job not in self.losses:
            record = self.train(job)
            self.add(**record)
            self.losses[job] = record["loss"]
        return self.losses[job]

    def best_factor(self, recipe: str, rung: Rung) -> float:
        """The factor of all rates with the lowest loss at full length, among one's neighbours at half and double."""
        if rung == HIDDEN:
            rung = max(RUNGS)

        def loss(factor: float) -> float:
            return self.loss(Job(recipe, rung.width, rung.batch, factor, share=1.0, seed=0))

        best = START[recipe]
        for step in (1 / 2, 2):
            while loss(best) > loss(best * step):
                best *= step
        return best

    def jobs(self, recipe: str, rung: Rung, seed: int) -> list[Job]:
        """The runs of a seed at the best rates: gpt2's alone, or those of speedrun at SHARES."""
        factor = self.best_factor(recipe, rung)
        shares = SHARES if recipe == "speedrun" else SHARES[:1]
        return [Job(recipe, rung.width, rung.batch, factor, share, seed) for share in shares]

    def ends(self, recipe: str, rung: Rung, seed: int) -> np.ndarray:
        """The losses of those runs."""
        return np.array([self.loss(job) for job in self.jobs(recipe, rung, seed)])

    def log_shares(self, rung: Rung) -> np.ndarray:
        """ln(share) of each seed that has all of its runs, (seeds,)."""
        found = []
        for seed in range(rung.seeds):
            try:
                over = self.ends("speedrun", rung, seed) - self.ends("gpt2", rung, seed)
            except LookupError:
                continue
            found.append(np.polyfit(over, np.log(SHARES), deg=2)[-1])  # the parabola where the losses are equal
        return np.array(found)

    def rows(self) -> Iterator[dict]:
        """All runs, those that differ in their seed in one row."""
        for key in sorted({job[:-1] for job in self.losses}):
            recipe, width, batch, factor, share = key
            name = f"{recipe}, {width} channels, batches of {batch:,}, rates x {factor:g}, {share:.0%} of the tokens"
            yield dict(name=name, loss=[self.losses[job] for job in sorted(self.losses) if job[:-1] == key])


# ---------------------------------------------------------------------------------------------------------- the runs


def train_all(rungs: list[Rung], runs: Runs, workers: int) -> None:
    """One rung after the other, its rates before its seeds, and all runs of its seeds side by side."""
    pool = ThreadPoolExecutor(workers)  # threads are enough: each waits for a process
    try:
        for rung in rungs:
            list(pool.map(partial(runs.best_factor, rung=rung), START))
            jobs = [job for seed in range(rung.seeds) for recipe in START for job in runs.jobs(recipe, rung, seed)]
            list(pool.map(runs.loss, jobs))
    finally:
        pool.shutdown(cancel_futures=True)  # after an error no other run starts


def train(job: Job, config: Config) -> dict:
    """The ledger's record of a run of train_gpt2.py, which continues where it was interrupted. Raises UserError."""
    out_dir = Path(config.out_dir) / "_".join(map(str, job))
    decisive = constants(job)
    flags = decisive | dict(data=config.data, out_dir=out_dir, device=config.device, threads=1, keep_checkpoints=1)
    words = [f"--{name}={value}" for name, value in flags.items()]
    command = [sys.executable, str(ROOT / "train_gpt2.py"), job.recipe, "--resume", *words]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    log = out_dir / "log.jsonl"
    ends = of_kind(read_log(log), "val") if log.exists() else []  # there is one, after the last step
    if not ends:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UserError(f"{out_dir} has not ended: {said}; fix that, and give the same command again")
    print(f"  {out_dir.name}: {ends[-1]['loss']:.4f}", flush=True)
    for checkpoint in out_dir.glob("step_*"):
        shutil.rmtree(checkpoint)  # the log is enough
    start = read_log(log)[0]
    figures = dict(loss=ends[-1]["loss"], bpb=ends[-1]["bpb"], machine=start["machine"], commit=start["commit"])
    return job._asdict() | figures | dict(constants=decisive)


def constants(job: Job) -> dict:
    """What decides a run besides its recipe."""
    recipe = RECIPES[job.recipe]
    steps = round(job.share * round(RATIO * parameters(job.width) / job.batch))
    warmup = steps * recipe.warmup_steps // recipe.max_steps
    rates = {name: job.factor * getattr(recipe, name) for name in ("max_lr", "min_lr", "muon_lr")}
    sizes = dict(sequence_length=CONTEXT, total_batch_size=job.batch, micro_batch_size=job.batch // CONTEXT)
    end = dict(max_steps=steps, warmup_steps=warmup, eval_interval=steps, eval_steps=VAL_TOKENS // job.batch)
    never = dict(hellaswag_interval=0, sample_interval=0, spike_threshold=0, compile="off")
    fixed = dict(dtype="float32", attention="flash", seed=job.seed)
    return shape(job.width) | sizes | end | never | rates | THEN[job.recipe] | fixed


def shape(width: int) -> dict:
    return SHAPE | dict(n_head=-(-width // 64), n_embd=width)


def parameters(width: int) -> int:
    return n_parameters(GPTConfig(**shape(width), n_positions=CONTEXT))
