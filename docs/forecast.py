"""The picture of forecast.md: python docs/forecast.py

Reads docs/forecast_runs.json and docs/forecast_2.json, and draws assets/forecast.png: the ladder with its fitted laws,
the hidden rung, the multiplier over compute, and the fan at 124M.
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.forecast import ANCHOR, RECIPES, TARGET, fit_ladder, ladder_of, law, multipliers_of, other_means, trend
from benchmarks.measure import ROOT
from files import read_json
from run.curves import COLORS, MARKS

runs, forecast = (read_json(ROOT / "docs" / f"{name}.json") for name in ("forecast_runs", "forecast_2"))
ladder, rng = ladder_of(runs["runs"]), np.random.default_rng(0)
multipliers = multipliers_of(other_means(ladder, rng))  # (sizes, draws, 2)
figure = Figure(figsize=(11, 8), dpi=100, layout="constrained")
curves, rung, over_compute, fan = figure.subplots(2, 2).flatten()

fine = np.geomspace(ladder.lengths[0], ladder.lengths[-1], 60)
for i, recipe in enumerate(RECIPES):
    laws, _ = fit_ladder(ladder, [losses.mean(0)[None, i] for losses in ladder.losses])
    for size, losses in zip(ladder.sizes, ladder.losses, strict=True):
        mark = dict(color=COLORS[i], marker=MARKS[i], linestyle="", markersize=5)
        curves.plot(ladder.lengths, losses[:, i].mean(0), **mark, label=recipe if size == ladder.sizes[0] else None)
        curves.plot(fine, law(laws[0], size / 1e6, fine / 1e6), color=COLORS[i], linewidth=0.8)
    row = forecast["hidden_rung"][i]
    middle = row["middle"]
    error = [[middle - row["from"]], [row["to"] - middle]]
    rung.errorbar(i, middle, error, capsize=6, color=COLORS[i], marker=MARKS[i], label=f"{recipe}: forecast, 90%")
    rung.plot(i + 0.12, row["measured"], "x", color="#D55E00", markersize=8, label="measured" if i else None)
curves.set(xscale="log", xlabel="tokens", ylabel="loss (nats per token)", title="The ladder, and a law of each recipe")
names = f"{ladder.sizes[-1]:,} parameters, left out of the fit"
rung.set(xlim=(-0.5, 1.5), xticks=[0, 1], xticklabels=RECIPES, ylabel="loss (nats per token)", title=names)

for size, values in zip(ladder.sizes, multipliers, strict=True):
    for length, found in zip(ladder.lengths[-2:], values.T, strict=True):
        low, middle, high = np.percentile(found, (5, 50, 95))
        over_compute.errorbar(6 * size * length, middle, [[middle - low], [high - middle]], color=COLORS[0], marker="o")
compute = np.geomspace(6 * ladder.sizes[0] * ladder.lengths[-2], 6 * ANCHOR["parameters"] * ANCHOR["tokens"], 40)
low, middle, high = np.percentile([trend(ladder, multipliers, at)[1] for at in compute], (5, 50, 95), axis=1)
over_compute.fill_between(compute, low, high, color="gray", alpha=0.25, label="the trend, 90%")
over_compute.plot(compute, middle, color="gray")
over_compute.axhline(1, color="black", linewidth=0.8)
over_compute.set(xscale="log", yscale="log", xlabel="compute (FLOPs)", ylabel="gpt2's tokens / speedrun's")
over_compute.set_title("The multiplier, extended to 124M")

tokens, low, middle, high = np.array(forecast["fan"]).T
fan.fill_between(tokens, low, high, color="gray", alpha=0.25, label="speedrun, 90%")
fan.plot(tokens, middle, color="gray")
fan.plot(ANCHOR["tokens"], ANCHOR["loss"], "o", color=COLORS[0], label="llm.c's gpt2: the anchor")
fan.axhline(TARGET, color="black", linewidth=0.8)
fan.set(xscale="log", xlabel="tokens at which the run ends", ylabel="loss (nats per token)", title="GPT-2 124M")
for axes in (curves, rung, over_compute, fan):
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8.5)
figure.savefig(ROOT / "assets" / "forecast.png", pil_kwargs=dict(optimize=True))
