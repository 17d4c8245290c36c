"""The forecast: its intervals hold the truth as often as they say, and it is written down before the hidden size."""

import numpy as np
import pytest

import bench
from benchmarks import forecast, share
from benchmarks.share import HIDDEN, RUNGS, SHARES, Job, parameters
from tests.helpers import assert_user_error, read_json


def points(rng, slope: float = -0.2, noise: float = 0.05) -> dict:
    """ln(share) of seeds whose truth is a line in ln(parameters): 0.6 at 0.1M."""
    sizes = {120_512: 3, 339_328: 3, 656_448: 2}
    truth = {n: np.log(0.6) + slope * np.log(n / 1e5) for n in sizes}
    return {n: truth[n] + noise * rng.standard_normal(seeds) for n, seeds in sizes.items()}


def test_the_line_and_what_it_costs_at_124m_without_noise():
    found = points(np.random.default_rng(0), noise=1e-9)
    wanted = 0.6 * 1244.75904**-0.2
    answer = forecast.at_124m(found, price=3.0)
    assert answer["share"]["middle"] == pytest.approx(wanted, rel=1e-3)
    # 3.28 takes gpt2 4.4% fewer tokens than the anchor's 3.2722
    assert answer["tokens"]["middle"] == pytest.approx(0.9565 * 10.26e9 * wanted, rel=2e-3)
    assert answer["dollars"]["to"] == pytest.approx(3 * answer["hours"]["to"])
    assert answer["hours"]["middle"] == pytest.approx(answer["tokens"]["middle"] * 8 * 0.140 / 524_288 / 3600)


def test_intervals_of_ninety_percent_hold_the_truth_as_often():
    rng = np.random.default_rng(1)
    hits = []
    for _ in range(1000):
        found = points(rng)
        hidden = found.pop(656_448)
        rows = {
            "a size": (forecast.interval_of(found[120_512], found), 0.6 * 1.20512**-0.2),
            "124M": (forecast.line_at(124_475_904, found), 0.6 * 1244.75904**-0.2),
            "the hidden size": (forecast.line_at(656_448, found, HIDDEN.seeds), np.exp(hidden.mean())),
        }
        hits.append([row["from"] <= truth <= row["to"] for row, truth in rows.values()])
    assert np.mean(hits, axis=0) == pytest.approx([0.9, 0.9, 0.9], abs=0.03)


def test_student_t_is_that_of_the_tables():
    assert [forecast.student_t(df) for df in (2, 4, 10)] == pytest.approx([2.920, 2.132, 1.812], rel=0.01)


@pytest.fixture
def ledger(tmp_path, monkeypatch):
    """A ledger in which speedrun needs 50% at the smallest size, 40% at the next, less at the hidden one; `add` it."""
    monkeypatch.chdir(tmp_path)
    truth = {32: 0.5, 64: 0.4, 96: 0.35}

    def train(job: Job) -> dict:
        tokens = job.share / (truth[job.width] if job.recipe == "speedrun" else 1.0)
        worse = job.factor != share.START[job.recipe]
        return job._asdict() | dict(loss=3 + worse - 0.2 * np.log(tokens) * (1 + 0.01 * job.seed) + 0.01 * job.seed)

    runs = share.Runs(tmp_path / "runs.jsonl", train)
    return lambda rungs: [runs.log_shares(rung) for rung in rungs]


@pytest.fixture
def door(inline, tmp_path):
    def run(*words):
        words = ["forecast", "--ledger", "runs.jsonl", "--forecasts", "said.json", "--json", "rows.json", *words]
        result = inline(bench.main, *words, "--device", "cpu")
        if result.returncode:
            return result
        return {row["name"]: row for row in read_json(tmp_path / "rows.json")["rows"]}

    return run


def test_a_forecast_is_written_with_its_date_and_then_compared_with_the_hidden_size(ledger, door, tmp_path):
    assert_user_error(door(), "runs.jsonl", "bench.py share")
    (tmp_path / "said.json").write_text('[{"date": "2026-11-22"}]')
    ledger(RUNGS)
    rows = door("--write", "--png", "share.png")
    assert (tmp_path / "share.png").stat().st_size > 5000
    assert rows["share at 120,512 parameters"]["middle"] == pytest.approx(0.5, rel=0.02)
    assert rows["share at 339,328 parameters"]["seeds"] == pytest.approx([0.4] * 3, rel=0.03)
    [_, made] = read_json(tmp_path / "said.json")
    assert made["date"] and made["anchor"]["loss"] == 3.2722 and made["share"]["from"] < made["share"]["to"]
    assert made["hidden"]["middle"] == rows[f"hidden size, {parameters(HIDDEN.width):,} parameters"]["middle"]
    ledger([HIDDEN])
    row = door()["hidden size, as forecast"]
    assert row["middle"] == made["hidden"]["middle"]
    measured = door()["share at 656,448 parameters"]["middle"]
    assert row["inside"] == ("yes" if row["from"] <= measured <= row["to"] else "no")


def test_a_share_outside_of_what_was_run_is_still_a_number(ledger):
    assert len(SHARES) == 4 and np.isfinite(np.concatenate(ledger([HIDDEN]))).all()
