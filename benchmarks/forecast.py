"""A ladder of small models, and a forecast of GPT-2 124M: the tokens that speedrun needs for the loss of gpt2.

    python bench.py forecast --night --data shards                              # run it again to continue
    python bench.py forecast --kept docs/forecast_runs.json --forecast f.json   # from stored runs

Every size and seed trains a trunk at a constant learning rate, whose last fifth is a cooldown. Shorter runs branch off
the trunk's checkpoints and cool down to end at 1/8, 1/4 and 1/2 of its length. Both recipes start a seed from the same
weights and data, so most of its noise cancels. Learning rates are tuned at the two smallest sizes.

The hidden rung: L(N, D) = E + A / N^alpha + B / D^beta, fitted without the largest size, forecasts its loss.
The multiplier: gpt2's tokens over those that speedrun needs for the same loss, at each size. Its trend with compute is
extended to 124M and anchored on a published run; --forecast records that before anybody trains such a run.

Intervals are 90%, from a bootstrap over seeds. They cover the noise of seeds, not a law or a trend that breaks on the
way to a hundred times the size; the hidden rung is the only hint of that. docs/forecast.md has figures and limits.
"""

import datetime
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated, NamedTuple

import numpy as np

from benchmarks.measure import ROOT, Common
from cli import NonNegative, Positive, Range, UserError
from files import read_json, replace_file, write_atomically
from run.log import about_machine
from run.records import read_log

RECIPES = ("gpt2", "speedrun")
FRACTIONS = np.array([1 / 8, 1 / 4, 1 / 2, 1])  # of the full length, at which runs end
COOLDOWN = 0.2  # of every length
DAY = dict(vocab_size=50304, sequence_length=256, total_batch_size=8192)
NIGHT = dict(vocab_size=2048, sequence_length=128, total_batch_size=2048)
# llm.c, October 2024 (docs/record.md): GPT-2 124M on FineWeb, AdamW, one seed, 139 ms a step on 8 H100
ANCHOR = dict(parameters=124_475_904, tokens=10.26e9, loss=3.2722, seconds_per_token=8 * 0.139 / 524_288)
TARGET = 3.28
SEED_NOISE = 0.002  # standard deviation of the loss at 124M, as 80 runs of modded-nanogpt had (docs/record.md)
# B and beta of B / D^beta: Hoffmann et al. 2022, approach 3; Besiroglu et al. 2024, who fitted the same runs again
PUBLISHED = np.array([[410.7, 0.28], [2085.43, 0.3658]])
DRAWS = 1000  # of the bootstrap
EXPONENTS = (0.05, 1.5)  # where alpha and beta are searched


@dataclass(frozen=True)
class Config(Common):
    repeats: Positive = 4  # seeds of the smaller half of the sizes; the larger half gets half as many, at least 2
    data: str = "edu_fineweb10B"  # directory of shards
    out_dir: str = "out/forecast"  # directory of the runs; OUT_DIR/runs.json has what the fit needs
    night: bool = False  # small models for a CPU: shards with a vocabulary of 2,048, a context of 128 tokens
    widths: tuple[int, ...] = (64, 128, 192, 256)  # channels of the sizes, four or more; the largest is hidden
    tokens: Annotated[int, Range(655_360, 1e12)] = 40_000_000  # of the longest runs
    workers: Positive = 1  # runs to train at the same time
    kept: str = ""  # fit the runs in this runs.json, and train none
    forecast: str = ""  # write the forecast to this file, which must not exist yet
    price: NonNegative = 2.5  # dollars per hour of one H100


def run(config: Config, rt) -> Iterator[dict]:
    if config.forecast and Path(config.forecast).exists():
        raise UserError(f"{config.forecast} exists, and a forecast must not change; give --forecast another name")
    kept, rng = read_json(Path(config.kept)) if config.kept else train_ladder(config), np.random.default_rng(0)
    if not isinstance(kept, dict) or {"tuned", "runs"} - set(kept):
        raise UserError(f"{config.kept} is not a runs.json of this benchmark; give one that it wrote")
    ladder = ladder_of(kept["runs"])
    hidden = hidden_rung(ladder, rng)
    yield from hidden  # first: how far to believe the rest
    for trial in kept["tuned"]:  # how well one factor fits two sizes
        name = f"best rates of {trial['recipe']} at {trial['width']} channels, over the rule's"
        yield dict(name=name, middle=trial["factor"])
    multipliers = multipliers_of(other_means(ladder, rng))
    for size, values in zip(ladder.sizes.tolist(), multipliers, strict=True):
        yield dict(name=f"multiplier at {size:,} parameters", **interval(values[:, -1]))
    slope, extended = trend(ladder, multipliers, 6 * ANCHOR["parameters"] * ANCHOR["tokens"])
    yield dict(name="what 10 x compute does to the multiplier", **interval(10**slope))
    answer = anchored(extended, config.price, rng)
    for name in ("multiplier", "tokens", "hours", "dollars"):
        yield dict(name=f"124M to {TARGET} with speedrun, {name}", **answer[name])
    if config.forecast:
        made = dict(date=str(datetime.date.today()), commit=about_machine(rt)["commit"], anchor=ANCHOR, target=TARGET)
        made |= dict(parameters=ladder.sizes.tolist(), lengths=ladder.lengths.tolist(), hidden_rung=hidden)
        replace_file(Path(config.forecast), json.dumps(made | answer, indent=1) + "\n")


# ---------------------------------------------------------------------------------------------------------- the runs


class Job(NamedTuple):
    recipe: str
    width: int
    seed: int
    factor: float  # times the learning rates of `constants`


def train_ladder(config: Config) -> dict:
    """Tune the rates, train the ladder, and write OUT_DIR/runs.json. Runs that have ended are not trained again."""
    widths, out_dir = config.widths, Path(config.out_dir)
    if len(widths) < 4 or list(widths) != sorted(set(widths)):
        raise UserError(f"--widths {' '.join(map(str, widths))}: give four sizes or more, in rising order")
    out_dir.mkdir(parents=True, exist_ok=True)
    tuned = [(recipe, width) for recipe in RECIPES for width in widths[:2]]
    seeds = {w: max(config.repeats // (1 + (2 * i >= len(widths))), 2) for i, w in enumerate(widths)}
    trunks = [(width, seed) for seed in range(max(seeds.values())) for width in widths if seed < seeds[width]]
    pool = ThreadPoolExecutor(config.workers)  # threads are enough: each waits for a process
    try:
        kept = dict(tuned=list(pool.map(partial(tune, config=config), tuned)), runs=[])
        factors = {r: geometric_mean(t["factor"] for t in kept["tuned"] if t["recipe"] == r) for r in RECIPES}
        jobs = [Job(recipe, *trunk, factors[recipe]) for trunk in trunks for recipe in RECIPES]
        for found in pool.map(partial(train_trunk, config=config), jobs):
            kept["runs"] += found
            replace_file(out_dir / "runs.json", json.dumps(kept, indent=1) + "\n")
    finally:
        pool.shutdown(cancel_futures=True)  # after an error no other run starts
    return kept


def tune(what: tuple[str, int], config: Config) -> dict:
    """Runs of a quarter of the full length, at rates that are halved or doubled until that does not help."""
    (recipe, width), losses = what, {}

    def loss(x: int) -> float:
        job, name = Job(recipe, width, 0, 2.0**x), f"tune_{recipe}_w{width}_x{2.0**x:g}"
        losses[x] = trained(job, full_length(config)[0] // 4, name, config)["loss"]
        return losses[x]

    best, before = 0, None
    while best != before:
        best, before = min((best - 1, best, best + 1), key=loss), best
    return dict(recipe=recipe, width=width, factor=2.0**best, losses={2.0**x: losses[x] for x in sorted(losses)})


def train_trunk(job: Job, config: Config) -> list[dict]:
    """Train a trunk, which is the longest run, and the shorter ones, which branch off where their cooldowns begin."""
    (steps, _), name = full_length(config), f"{job.recipe}_w{job.width}_s{job.seed}"
    trunk, branches = Path(config.out_dir) / name, []
    records = [trained(job, steps, name, config, checkpoint_interval=steps // 10, keep_checkpoints=0)]
    for length in (FRACTIONS[:-1] * steps).astype(int).tolist():
        branches.append(trunk.with_name(f"{name}_{length}"))
        start = trunk / f"step_{round((1 - COOLDOWN) * length):06d}"
        if start.is_dir() and not list(branches[-1].glob("step_*")):  # to resume from
            write_atomically(branches[-1] / start.name, partial(shutil.copytree, start, dirs_exist_ok=True))
        records.append(trained(job, length, branches[-1].name, config))
    for checkpoint in [path for place in (trunk, *branches) for path in place.glob("step_*")]:
        shutil.rmtree(checkpoint)  # the logs are enough, and ten checkpoints of each trunk would fill a disk
    return records


def trained(job: Job, steps: int, name: str, config: Config, **changes) -> dict:
    """The results of a run, which is trained unless it has ended. Raises UserError if it fails."""
    out_dir = Path(config.out_dir) / name
    if not (reached := at_end(out_dir, steps)):
        command = [sys.executable, str(ROOT / "train_gpt2.py"), job.recipe, "--resume"]
        for flag, value in (constants(job, steps, config) | dict(out_dir=out_dir) | changes).items():
            command += [f"--{flag}", str(value)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if not (reached := at_end(out_dir, steps)):
            said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise UserError(f"{out_dir} has not ended: {said}; fix that, and give the same command again")
        print(f"  {name}: {reached['loss']:.4f}", flush=True)
    tokens = steps * full_length(config)[1]["total_batch_size"]
    return dict(recipe=job.recipe, seed=job.seed, factor=job.factor, tokens=tokens, **reached)


def at_end(out_dir: Path, steps: int) -> dict:
    """The log's figures of the last step; {} before it."""
    records = read_log(out_dir / "log.jsonl") if (out_dir / "log.jsonl").exists() else []
    last = {record["kind"]: record for record in records if record["kind"] == "run" or record["step"] == steps}
    return {key: (last["run"] | last["val"])[key] for key in ("parameters", "loss", "bpb")} if "val" in last else {}


def constants(job: Job, steps: int, config: Config) -> dict:
    """The constants of train_gpt2.py that a run changes. Both recipes have the trunk's schedule and the same warmup;
    AdamW's rate falls with the width (Yang et al. 2022, Tensor Programs V), Muon's steps do not depend on it."""
    (full, shape), width = full_length(config), job.width
    sizes = dict(n_layer=4 if width < 256 else 6, n_head=-(-width // 64), n_embd=width)
    sizes |= shape | dict(micro_batch_size=shape["total_batch_size"] // shape["sequence_length"])
    cooldown = COOLDOWN * steps / (steps - full // 100)  # of the steps after warmup
    schedule = dict(max_steps=steps, warmup_steps=full // 100, lr_schedule="wsd", decay_fraction=cooldown, min_lr=0)
    rates = dict(max_lr=3e-3 * job.factor * (128 / width if job.recipe == "gpt2" else 1), muon_lr=0.02 * job.factor)
    along = dict(eval_interval=steps, eval_steps=50, checkpoint_interval=0, sample_interval=0)
    along |= dict(hellaswag_interval=0, data=config.data, seed=job.seed, device=config.device)
    return sizes | schedule | rates | along


def full_length(config: Config) -> tuple[int, dict]:
    """(steps, shape) of the longest runs. A multiple of 40 steps, so that branches begin and end at whole steps."""
    shape = NIGHT if config.night else DAY
    return config.tokens // shape["total_batch_size"] // 40 * 40, shape


class Ladder(NamedTuple):
    lengths: np.ndarray  # (lengths,) tokens
    sizes: np.ndarray  # (sizes,) parameters, all of them (Pearce and Song 2024, arXiv 2406.12907), in rising order
    losses: list[np.ndarray]  # of each size (seeds, recipes, lengths)


def ladder_of(runs: list[dict]) -> Ladder:
    """The seeds that have all runs. Raises UserError for a size without two of them."""
    found = {(run["parameters"], run["seed"], run["recipe"], run["tokens"]): run["loss"] for run in runs}
    lengths, sizes, seeds = (sorted({run[key] for run in runs}) for key in ("tokens", "parameters", "seed"))
    losses = []
    for size in sizes:
        all_runs = [[[found.get((size, seed, recipe, d)) for d in lengths] for recipe in RECIPES] for seed in seeds]
        losses.append(np.array([runs for runs in all_runs if None not in sum(runs, [])]))
        if len(losses[-1]) < 2:
            raise UserError(f"{size:,} parameters have fewer than two seeds with all runs; train the others")
    return Ladder(np.array(lengths), np.array(sizes), losses)


def law(laws: np.ndarray, n, d) -> np.ndarray:
    """E + A / n^alpha + B / d^beta, for n and d in millions; `laws` is (..., 5): E, A, B, alpha, beta."""
    E, A, B, alpha, beta = np.moveaxis(laws, -1, 0)
    return E + A * n**-alpha + B * d**-beta


def fit(n: np.ndarray, d: np.ndarray, losses: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The law (draws, 5) with the least weighted squares, for each draw of `losses` (draws, cells).

    Variable projection: given the exponents, the best E, A, B >= 0 have a closed form. So only the exponents are
    searched: on a coarse grid, then on finer ones around the best of each draw.
    """
    draws, ratio, steps = np.arange(len(losses)), (EXPONENTS[1] / EXPONENTS[0]) ** (1 / 15), np.arange(16)
    alpha = beta = EXPONENTS[0]
    for _ in range(5):
        i, j = (side.reshape(-1, 1) for side in np.meshgrid(steps, steps))
        alpha, beta = np.clip(alpha * ratio**i, *EXPONENTS), np.clip(beta * ratio**j, *EXPONENTS)
        x = np.stack(np.broadcast_arrays(1.0, n ** -alpha[..., None], d ** -beta[..., None]), -1)
        weighted = np.swapaxes(x * weights[:, None], -1, -2)  # x is (exponents, draws or 1, cells, 3)
        factors = non_negative(weighted @ x, (weighted @ losses[..., None])[..., 0])  # (exponents, draws, 3)
        errors = ((losses - (x @ factors[..., None])[..., 0]) ** 2 * weights).sum(-1)  # (exponents, draws)
        best = errors.argmin(0)
        alpha, beta = (np.broadcast_to(side, errors.shape)[best, draws] for side in (alpha, beta))
        ratio, steps = ratio**0.5, np.arange(-2, 3)
    return np.column_stack([factors[best, draws], alpha, beta])


def non_negative(gram: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """The c >= 0 with the least c.gram.c - 2 c.moment; gram is (..., 3, 3), moment (..., 3).

    The best c is 0 outside of some set of its numbers, and solves the normal equations in that set: one of seven sets.
    """
    gram = gram + 1e-12 * np.trace(gram, axis1=-1, axis2=-2)[..., None, None] * np.eye(3)  # columns may be alike
    best, lowest = np.zeros(moment.shape), np.zeros(moment.shape[:-1])
    for active in ([0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]):
        c = np.zeros(moment.shape)
        c[..., active] = (np.linalg.inv(gram[..., active, :][..., active]) @ moment[..., active, None])[..., 0]
        value = -(c * moment).sum(-1)
        better = (c >= 0).all(-1) & (value < lowest)
        lowest, best = np.where(better, value, lowest), np.where(better[..., None], c, best)
    return best


def fit_ladder(ladder: Ladder, means: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(laws, weighted squared errors) of each draw of one recipe; `means` is (draws, lengths) for each size."""
    weights = [len(losses) / spread**2 for losses, spread in zip(ladder.losses, spreads(ladder), strict=True)]
    n, weights = (np.repeat(values, len(ladder.lengths)) for values in (ladder.sizes / 1e6, weights))
    d, losses = np.tile(ladder.lengths / 1e6, len(ladder.sizes)), np.concatenate(means, axis=1)
    laws = fit(n, d, losses, weights)
    return laws, ((losses - law(laws[:, None], n, d)) ** 2 * weights).sum(-1)


def spreads(ladder: Ladder) -> list[float]:
    """The standard deviation between seeds at each size; two seeds say little, so all sizes count as four more."""
    df = np.array([len(losses) - 1 for losses in ladder.losses])
    variances = np.array([losses.var(0, ddof=1).mean() for losses in ladder.losses])
    return np.sqrt((df * variances + 4 * np.average(variances, weights=df)) / (df + 4)).tolist()


def other_means(ladder: Ladder, rng, draws: int = DRAWS) -> list[np.ndarray]:
    """For each size (draws, recipes, lengths): the means that other seeds might have given.

    A draw takes a seed's deviations together, all lengths and both recipes, from the seeds of all sizes, scaled to the
    size's spread. That spread is uncertain, too: a factor for each draw widens intervals as Student's t does, with a
    quarter fewer degrees of freedom, since a few deviations have thin tails.
    """
    sizes = list(zip(ladder.losses, spreads(ladder), strict=True))
    pool = [(losses - losses.mean(0)) / spread * (len(losses) / (len(losses) - 1)) ** 0.5 for losses, spread in sizes]
    pool, df = np.concatenate(pool), 0.75 * (sum(map(len, pool)) - len(pool))  # (seeds, recipes, lengths)
    wider = np.sqrt(df / rng.chisquare(df, (draws, 1, 1)))
    picks = [rng.integers(len(pool), size=(draws, len(losses))) for losses in ladder.losses]
    return [x.mean(0) + spread * wider * pool[i].mean(1) for (x, spread), i in zip(sizes, picks, strict=True)]


def interval(values: np.ndarray, **more) -> dict:
    """Percentiles; with `measured=x` also whether x is inside."""
    low, middle, high = np.percentile(values, (5, 50, 95)).tolist()
    inside = dict(inside="yes" if low <= more["measured"] <= high else "no") if "measured" in more else {}
    return {"from": low, "middle": middle, "to": high} | more | inside


def hidden_rung(ladder: Ladder, rng, draws: int = DRAWS) -> list[dict]:
    """The forecast of the other sizes for the largest one at full length, and its measured loss. If a law misses the
    means that it was fitted to by more than seeds explain, its interval widens by that factor (Birge 1932)."""
    known = Ladder(ladder.lengths, ladder.sizes[:-1], ladder.losses[:-1])
    measured = [losses.mean(0)[None] for losses in ladder.losses]
    means, at, rows = other_means(known, rng, draws), (ladder.sizes[-1] / 1e6, ladder.lengths[-1] / 1e6), []
    noise = spreads(known)[-1] / len(ladder.losses[-1]) ** 0.5 * rng.standard_t(len(known.sizes), draws)
    for i, recipe in enumerate(RECIPES):
        best, errors = fit_ladder(known, [mean[:, i] for mean in measured[:-1]])
        misfit = max(1.0, float(errors[0] / (len(known.sizes) * len(known.lengths) - best.size)) ** 0.5)
        off = law(fit_ladder(known, [mean[:, i] for mean in means])[0], *at) - law(best[0], *at) + noise
        found = interval(law(best[0], *at) + misfit * off, measured=float(measured[-1][0, i, -1]))
        rows.append(dict(name=f"hidden rung, loss of {recipe}", **found, misfit=misfit))
    drawn, reached = multipliers_of(other_means(ladder, rng, draws)), float(multipliers_of(measured)[-1, 0, -1])
    expected = trend(known, drawn[:-1], 6 * ladder.sizes[-1] * ladder.lengths[-1])[1] * drawn[-1, :, -1] / reached
    return [*rows, dict(name="hidden rung, multiplier", **interval(expected, measured=reached))]


def multipliers_of(means: list[np.ndarray]) -> np.ndarray:
    """(sizes, draws, 2): gpt2's tokens at half and at full length, over those that speedrun needs for the same loss.

    Between its lengths the loss of speedrun is a parabola in ln(tokens): no law, and nothing of other sizes.
    """
    gpt2, speedrun = np.moveaxis(np.array(means), 2, 0)  # (sizes, draws, lengths) each
    parabola = np.linalg.pinv(np.vander(np.log(FRACTIONS), 3)).T  # loss = a x^2 + b x + c
    a, b, c = np.moveaxis(speedrun @ parabola, -1, 0)[..., None]
    k = c - gpt2[..., -2:]
    x = 2 * k / (np.sqrt(np.maximum(b**2 - 4 * a * k, 0)) - b)  # of the two roots the one that stays when a is 0
    return FRACTIONS[-2:] / np.exp(np.clip(x, -9, 9))  # limits wild draws to e^9


def trend(ladder: Ladder, multipliers: np.ndarray, compute: float) -> tuple[np.ndarray, np.ndarray]:
    """(slope, multiplier at `compute`) of each draw: log10(multiplier) is a line in log10(compute)."""
    x = np.vander(np.log10(6 * ladder.sizes[:, None] * ladder.lengths[-2:]).flatten(), 2)  # (points, 2)
    y = np.log10(np.moveaxis(multipliers, 1, -1).reshape(len(x), -1))  # (points, draws)
    slope, offset = np.linalg.lstsq(x, y, rcond=None)[0]
    return slope, 10 ** (offset + slope * math.log10(compute))


def anchored(multipliers: np.ndarray, price: float, rng) -> dict:
    """The forecast at 124M: speedrun reaches on D tokens what gpt2 reaches on m D, for the multiplier m of each draw.
    Small vocabularies cannot tell the slope of the loss around the anchor: half of the draws use each published law."""
    b, beta = PUBLISHED[rng.integers(2, size=len(multipliers))].T
    noise = SEED_NOISE * 2**0.5 * rng.standard_normal(len(multipliers))  # of the anchor, which is one run, and of ours
    tokens = ((TARGET - ANCHOR["loss"] - noise) / b + ANCHOR["tokens"] ** -beta) ** (-1 / beta) / multipliers
    hours = tokens * ANCHOR["seconds_per_token"] / 3600
    d = np.geomspace(0.5e9, 20e9, 33)[:, None]
    losses = ANCHOR["loss"] + noise + b * ((multipliers * d) ** -beta - ANCHOR["tokens"] ** -beta)  # (33, draws)
    fan = [[*at, *interval(loss).values()] for at, loss in zip(d.tolist(), losses, strict=True)]
    found = dict(multiplier=multipliers, tokens=tokens, hours=hours, dollars=hours * price)
    return {name: interval(values) for name, values in found.items()} | dict(fan=fan)
