"""The share of tokens that speedrun needs: its rates, its runs, which are made once, and a known answer."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import bench
import train_gpt2
from benchmarks import share
from benchmarks.share import Job, Rung
from corpus.shards import prepare_text
from tests.helpers import assert_user_error, log_of, read_json, read_lines, text_file, write_lines

BEST = dict(gpt2=16.0, speedrun=0.5)


def loss_of(job: Job) -> float:
    """Speedrun needs half of the tokens, and each recipe has a best factor of its rates."""
    tokens = job.share * (2 if job.recipe == "speedrun" else 1)
    rates = abs(math.log2(job.factor / BEST[job.recipe]))
    return 3 + 0.1 * job.seed - 0.2 * math.log(tokens) + 0.01 * rates


def train(job: Job) -> dict:
    return job._asdict() | dict(loss=loss_of(job))


def test_rates_are_halved_or_doubled_until_neither_helps_and_the_share_is_where_losses_meet(tmp_path):
    runs = share.Runs(tmp_path / "runs.jsonl", train)
    for recipe, best in BEST.items():
        assert runs.best_factor(recipe, Rung(32)) == best
    assert {job.factor for job in runs.losses if job.recipe == "gpt2"} == {8.0, 16.0, 32.0}
    shares = runs.log_shares(Rung(32, seeds=2))
    assert np.exp(shares) == pytest.approx([0.5, 0.5])
    again = share.Runs(tmp_path / "runs.jsonl")  # which trains nothing
    assert again.losses == runs.losses and again.log_shares(Rung(32, seeds=3)).tolist() == shares.tolist()
    with pytest.raises(LookupError):
        again.loss(Job("gpt2", 32, 2048, 16.0, 1.0, 2))


def test_the_hidden_size_takes_the_rates_of_the_largest_other_one(tmp_path):
    runs = share.Runs(tmp_path / "runs.jsonl", train)
    assert runs.best_factor("gpt2", share.HIDDEN) == 16.0
    assert {job.width for job in runs.losses} == {64}


def test_constants_are_the_recipes_at_eighty_tokens_a_parameter():
    found = share.constants(Job("gpt2", 32, 2048, 8.0, 1.0, 1))
    assert found["max_steps"] == round(80 * 120_512 / 2048) and found["warmup_steps"] == 4708 * 715 // 19_073
    assert (found["max_lr"], found["min_lr"]) == pytest.approx((8 * 6e-4, 8 * 6e-5))
    half = share.constants(Job("speedrun", 96, 512, 0.5, 0.5, 1))
    wanted = dict(micro_batch_size=4, max_lr=1.5e-3, min_lr=0.0, muon_lr=0.01, lr_schedule="wsd", decay_fraction=1.0)
    assert half | wanted == half and half["max_steps"] == round(0.5 * round(80 * 656_448 / 512))


@pytest.fixture
def small(tmp_path, inline, monkeypatch):
    """`bench.py share`, whose runs only write a log; it returns their commands, too."""
    commands = []

    def run(command, **_):
        commands.append(command)
        flags = dict(word.removeprefix("--").split("=") for word in command if "=" in word)
        if not Path(flags["data"]).is_dir():
            return SimpleNamespace(stderr="warning: slow\nerror: no shards in nowhere\n")
        out_dir = Path(flags["out_dir"])
        (out_dir / "step_000016").mkdir(parents=True)
        start = dict(step=0, kind="run", machine="m", commit="c")
        loss = 3 + abs(float(flags["max_lr"]) - 0.005) - 0.1 * math.log(int(flags["max_steps"]))
        end = dict(step=int(flags["max_steps"]), kind="val", loss=loss, bpb=loss)
        write_lines(out_dir / "log.jsonl", [start, end])

    def door(*words):
        commands.clear()
        words = ["share", "--device", "cpu", "--json", "rows.json", *words]
        result = inline(bench.main, *words)
        return result, commands

    monkeypatch.setattr(share, "subprocess", SimpleNamespace(run=run, DEVNULL=None, PIPE=None))
    monkeypatch.setattr(share, "RUNGS", [Rung(32, seeds=1)])
    monkeypatch.setattr(share, "HIDDEN", Rung(64, seeds=1))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "books").mkdir()
    return door


def test_every_run_is_made_once_and_the_hidden_size_waits_for_its_forecast(small, tmp_path):
    result, commands = small("--workers", "2")
    assert result.returncode == 0, result.stderr
    made = read_lines(tmp_path / "docs/share.jsonl")
    assert len(commands) == len(made) == 10 and all("--resume" in command for command in commands)
    assert all(run["constants"]["n_embd"] == 32 and run["commit"] == "c" for run in made)
    assert not list((tmp_path / "out/share").glob("*/step_*")), "the log is enough"
    result, commands = small()
    assert result.returncode == 0 and not commands
    rows = read_json(tmp_path / "rows.json")["rows"]
    assert rows[-1]["name"].startswith("share of gpt2's tokens") and len(rows[-1]["seeds"]) == 1
    (tmp_path / "docs/forecasts.json").write_text('[{"hidden": {}}]')
    result, commands = small("--hidden")
    assert result.returncode == 0 and len(commands) == 5
    result, commands = small("--table", "--hidden")
    assert result.returncode == 0 and not commands


def test_a_run_is_one_of_the_training_script(small, tmp_path, inline, monkeypatch):
    share.subprocess.run = lambda command, **_: inline(train_gpt2.main, *command[2:])
    monkeypatch.setattr(share, "SHAPE", dict(n_layer=1, vocab_size=512))
    monkeypatch.setattr(share, "VAL_TOKENS", 2048)
    monkeypatch.setattr(share, "RATIO", 1)
    shards = prepare_text(str(text_file(tmp_path / "text.txt", 60_000)), "train", 512, tmp_path / "cache")
    job = Job("speedrun", 32, 2048, 2.0, 0.5, 3)
    found = share.train(job, share.Config(data=str(shards), device="cpu"))
    assert found["loss"] < 6.3 and found["seed"] == 3 and found["commit"]
    [log] = (tmp_path / "out/share").glob("*/log.jsonl")
    config = log_of(log.parent, "run")[0]["config"]
    assert {name: config[name] for name in found["constants"]} == found["constants"]
    assert log_of(log.parent, "val")[-1]["step"] == 8


def test_the_hidden_size_is_trained_only_after_a_forecast(small):
    result, commands = small("--hidden", "--data", "nowhere")
    assert_user_error(result, "docs/forecasts.json", "bench.py forecast")
    assert not commands


def test_a_run_that_fails_is_one_line_and_nothing_in_the_ledger(small, tmp_path):
    result, _ = small("--data", "nowhere")
    assert_user_error(result, "gpt2_32_2048_32.0_1.0_0 has not ended: error: no shards in nowhere")
    assert not (tmp_path / "docs/share.jsonl").exists()
