"""The forecast: its fit and its intervals on surfaces with known answers, its branches, and the file that it writes."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

import bench
import train_gpt2
from benchmarks import forecast
from tests.helpers import assert_user_error, log_of, run_inline, steps_of, text_file

SIZES, LENGTHS = np.array([100_000, 340_000, 650_000, 1_070_000]), 4_000_000 * forecast.FRACTIONS
SURFACE = np.array([2.0, 0.54, 0.76, 0.35, 0.4])  # E, A, B, alpha, beta


def ladder(rng, noise: float = 1.0) -> forecast.Ladder:
    """A ladder on which speedrun needs half of the tokens at every size; a seed's luck is shared in part."""
    losses = []
    for n, seeds in zip(SIZES, (4, 4, 2, 2), strict=True):
        clean = np.array([forecast.law(SURFACE, n / 1e6, m * LENGTHS / 1e6) for m in (1, 2)])
        luck = [rng.normal(0, sd, (seeds, *shape)) for sd, shape in [(6e-3, (1, 1)), (6e-3, (2, 1)), (3e-3, (2, 4))]]
        losses.append(clean + noise * sum(luck))
    return forecast.Ladder(LENGTHS, SIZES, losses)


def test_non_negative_least_squares_meets_the_conditions_of_an_optimum():
    """Karush, Kuhn and Tucker: the slope is 0 where a number is above 0, and not negative where it is 0."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(500, 9, 3)), rng.normal(size=(500, 9, 1))
    gram, moment = np.swapaxes(x, 1, 2) @ x, (np.swapaxes(x, 1, 2) @ y)[..., 0]
    c = forecast.non_negative(gram, moment)
    slope = (gram @ c[..., None])[..., 0] - moment
    assert (c >= 0).all() and (slope > -1e-8).all() and np.abs(slope * c).max() < 1e-8


def test_the_fit_finds_the_law_and_the_multiplier_that_a_ladder_was_made_with():
    clean = ladder(np.random.default_rng(0), noise=1e-6)
    laws, _ = forecast.fit_ladder(clean, [losses.mean(0)[None, 0] for losses in clean.losses])
    assert laws[0] == pytest.approx(SURFACE, rel=0.1)
    assert forecast.law(laws[0], 5.0, 50.0) == pytest.approx(forecast.law(SURFACE, 5.0, 50.0), abs=2e-3)
    found = forecast.multipliers_of([losses.mean(0)[None] for losses in clean.losses])
    assert found == pytest.approx(np.full((4, 1, 2), 2.0), rel=0.02)


@pytest.mark.parametrize("trials, low, high", [(20, 0.8, 1), pytest.param(200, 0.85, 0.95, marks=pytest.mark.slow)])
def test_intervals_of_ninety_percent_hold_the_truth_as_often(trials, low, high):
    rng, hits = np.random.default_rng(1), []
    for _ in range(trials):
        found = ladder(rng)
        multipliers = forecast.multipliers_of(forecast.other_means(found, rng, 200))
        values = [*multipliers[..., -1], forecast.trend(found, multipliers, 7.7e18)[1]]
        rows = [forecast.interval(value, measured=2.0) for value in values]
        hits.append([row["inside"] == "yes" for row in (*forecast.hidden_rung(found, rng, 100), *rows)])
    x = np.mean(hits, 0)  # the hidden rung's two losses and multiplier, the multipliers of all sizes, the trend's end
    found = dict(loss=x[:2].mean(), hidden=x[2], multiplier=x[3:7].mean(), trend=x[7])
    assert all(low <= figure <= high for figure in found.values()), found


def test_rates_are_halved_or_doubled_until_that_does_not_help(monkeypatch):
    monkeypatch.setattr(forecast, "trained", lambda job, *_: dict(loss=(np.log2(job.factor) + 2.8) ** 2))
    found = forecast.tune(("gpt2", 32), forecast.Config())
    assert found["factor"] == 1 / 8 and list(found["losses"]) == [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2]


def test_a_branch_ends_as_a_run_of_its_length_and_nothing_is_trained_twice(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(forecast, "NIGHT", dict(vocab_size=512, sequence_length=32, total_batch_size=256))
    text, commands = str(text_file(tmp_path / "text.txt")), []
    config = forecast.Config(data=text, out_dir=str(tmp_path), night=True, device="cpu", tokens=256 * 40)

    def run(command, **_):
        commands.append(command)
        return run_inline(train_gpt2.main, [*command[2:], "--tokenizer", "train"], capsys, monkeypatch)

    monkeypatch.setattr(forecast, "subprocess", SimpleNamespace(run=run, DEVNULL=None, PIPE=None))
    job = forecast.Job("speedrun", 32, 0, 1.0)
    records, whole = forecast.train_trunk(job, config), forecast.trained(job, 10, "whole", config)
    assert [record["tokens"] for record in records] == [40 * 256, 5 * 256, 10 * 256, 20 * 256]
    assert records[2] == whole and log_of(tmp_path / "speedrun_w32_s0_10", "train")[0]["step"] == 9  # resumed
    assert not steps_of(tmp_path / "speedrun_w32_s0") and len(commands) == 5
    assert forecast.train_trunk(job, config) == records and len(commands) == 5


def test_a_forecast_is_written_once_with_its_date_and_what_it_was_made_of(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [
        dict(parameters=int(n), seed=seed, recipe=forecast.RECIPES[i], tokens=int(LENGTHS[j]), loss=loss)
        for n, losses in zip(SIZES, ladder(np.random.default_rng(2)).losses, strict=True)
        for (seed, i, j), loss in np.ndenumerate(losses)
    ]
    tuned = [dict(recipe=recipe, width=32, factor=2.0) for recipe in forecast.RECIPES]
    (tmp_path / "runs.json").write_text(json.dumps(dict(tuned=tuned, runs=runs)))
    words = ["forecast", "--kept", "runs.json", "--forecast", "forecast.json", "--device", "cpu", "--json", "rows.json"]
    assert run_inline(bench.main, words, capsys, monkeypatch).returncode == 0
    rows, found = (json.loads((tmp_path / name).read_text()) for name in ("rows.json", "forecast.json"))
    assert rows["rows"][0]["name"].startswith("hidden rung") and rows["rows"][0]["inside"] in ("yes", "no")
    assert found["date"] and found["anchor"]["loss"] == 3.2722 and found["parameters"] == SIZES.tolist()
    # at 124M 3.28 takes 4.5% fewer tokens than the anchor's 3.2722, and gpt2 takes `multiplier` times as many
    assert found["tokens"]["middle"] * found["multiplier"]["middle"] == pytest.approx(0.955 * 10.26e9, rel=0.01)
    assert_user_error(run_inline(bench.main, words, capsys, monkeypatch), "forecast.json", "--forecast another name")
