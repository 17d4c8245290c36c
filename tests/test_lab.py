"""The laboratory: evidence that noise rarely reaches, runs that are made once, and ideas that do what they say."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import bench
import train_gpt2
from benchmarks import ideas, lab
from benchmarks.ideas import IDEAS
from corpus.shards import prepare_text
from learning import optim
from tests.helpers import arguments, assert_user_error, log_of, read_json, succeed, text_file

SMALL = dict(n_layer=2, n_head=2, n_embd=32, sequence_length=32, vocab_size=512, total_batch_size=256)


@pytest.fixture
def small(monkeypatch):
    """A size of a few thousand parameters, in fp32."""
    monkeypatch.setitem(lab.SIZES, "1M", SMALL | dict(eval_steps=4, dtype="float32"))
    return lab.Config(steps=8, seeds=2, device="cpu")


@pytest.fixture
def door(small, tmp_path, monkeypatch, inline):
    """`bench.py lab` on a small text, with its runs in this process: {name: row}, or the result with an error."""

    def side_by_side(plan, jobs, config, shards, rt):
        made.extend(jobs)
        for name, seed in jobs:
            yield (name, seed), lab.train(plan[name], lab.settings(config, plan[name], seed, shards), "cpu")

    def run(*words):
        made.clear()
        options = arguments(steps=4, seeds=2, device="cpu", data="text.txt", json="rows.json")
        result = inline(bench.main, "lab", *options, *words)
        if result.returncode:
            return result
        return {row["name"]: row for row in read_json(tmp_path / "rows.json")["rows"]}

    made = run.made = []
    monkeypatch.setattr(lab, "side_by_side", side_by_side)
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path / "text.txt", 60_000)
    return run


def test_the_evidence_is_the_ratio_of_two_integrals_over_what_is_not_known():
    over = [-0.03, 0.01, -0.05, -0.02, -0.04]
    log_sigma = torch.linspace(-8, 1, 3000, dtype=torch.float64)[:, None]
    effect = torch.linspace(-16, 16, 3001, dtype=torch.float64)[None]
    density = lambda effect: sum(  # noqa: E731
        -(((d / log_sigma.exp() - effect) ** 2) / 2) - log_sigma for d in over
    ).exp()
    prior = (-((effect / lab.EFFECT) ** 2) / 2).exp()
    wanted = (density(effect) * prior).sum() / prior.sum() / density(torch.zeros(1)).sum()
    assert lab.evidence(over) == pytest.approx(wanted.item(), rel=1e-6)
    assert lab.evidence([0.0, 0.0]) == lab.evidence([0.3]) == 1.0


def test_three_seeds_that_agree_are_no_verdict():
    over = [-0.0100, -0.0096, -0.0088]
    assert lab.evidence(over) > lab.ENOUGH and lab.verdict(over) == "not told apart"
    assert lab.verdict([*over, -0.0092]) == "gain"


@pytest.mark.parametrize("effect, gains, harms", [(0.0, (0, 0.05), (0, 0.05)), (-3.0, (0.99, 1), (0, 0))])
def test_noise_is_rarely_called_a_gain_although_every_seed_is_looked_at(effect, gains, harms):
    rng, found = random.Random(1), []
    for _ in range(400):
        over = [rng.gauss(effect, 1.0) for _ in range(20)]
        looks = (lab.verdict(over[:n]) for n in range(2, 21))
        found.append(next((said for said in looks if said != "not told apart"), "not told apart"))
    assert gains[0] <= found.count("gain") / 400 <= gains[1]
    assert harms[0] <= found.count("harm") / 400 <= harms[1]


def test_without_an_idea_it_is_a_run_of_train_gpt2(small, tmp_path, inline):
    config = lab.settings(small, lab.PLAIN, seed=3)
    text, out = text_file(tmp_path / "text.txt", 60_000), tmp_path / "out/run"
    words = SMALL | dict(data=text, out_dir=out, tokenizer="train", max_steps=8, warmup_steps=config.warmup_steps)
    words |= dict(seed=3, eval_steps=4, eval_interval=8, sample_interval=0, hellaswag_interval=0, checkpoint_interval=0)
    result = inline(train_gpt2.main, "speedrun", **words, dtype="float32", device="cpu")
    assert result.returncode == 0, result.stderr
    [wanted] = log_of(out, "val")
    config = replace(config, data=str(prepare_text(str(text), "train", 512, tmp_path / "out/cache")))
    found = lab.train(lab.PLAIN, config, "cpu")
    assert (found["loss"], found["bpb"]) == pytest.approx((wanted["loss"], wanted["bpb"]), abs=1e-5)
    other = lab.train(IDEAS["speedrun"]["Q, K and V as one matrix"], config, "cpu")
    assert abs(other["loss"] - wanted["loss"]) > 1e-5


def test_no_run_is_made_twice_and_another_version_of_an_idea_is_another_run(door, monkeypatch):
    rows = door("momentum 0.9", "--seeds", "3")
    assert set(rows) == {"speedrun", "momentum 0.9"} and len(door.made) == 6
    assert rows["momentum 0.9"]["over_each"] and rows["momentum 0.9"]["verdict"] == "not told apart"
    assert door("momentum 0.9", "--seeds", "3") == rows and door.made == []
    known = IDEAS["speedrun"]["momentum 0.9"]
    monkeypatch.setitem(IDEAS["speedrun"], "momentum 0.9", replace(known, options=known.options | dict(momentum=0.8)))
    assert door("momentum 0.9")["momentum 0.9"]["seeds"] == 2  # those of another version do not count
    assert door.made == [("momentum 0.9", 0), ("momentum 0.9", 1)]
    [row], [turned] = (door("--table", "--against", baseline).values() for baseline in ("", "momentum 0.9"))
    assert turned["over_each"] == [-over for over in row["over_each"]] and row["seeds"] == 2 and door.made == []
    monkeypatch.setitem(lab.RECIPES, "speedrun", replace(lab.RECIPES["speedrun"], weight_decay=0.2))
    assert door("momentum 0.9")["momentum 0.9"]["seeds"] == 2 and len(door.made) == 4  # as if never made


def test_seeds_that_only_one_of_two_ideas_has_are_not_compared(tmp_path):
    ledger, run = lab.LabLedger(tmp_path / "a.jsonl"), dict(setting="s", version="1", against="b")
    ledger.runs = [run | dict(idea=idea, seed=seed, loss=3.0 + seed) for seed, idea in enumerate("ab")]
    assert list(ledger.rows("")) == [dict(name="s: a, against b", mean=3.0, seeds=0)] and not list(ledger.rows("c"))


def test_a_null_change_is_the_baseline_with_other_seeds(small):
    plan = lab.chosen(replace(small, null=3, against="momentum 0.9"))
    assert list(plan) == ["momentum 0.9", "null 1", "null 2", "null 3"]
    wanted = lab.settings(small, IDEAS["speedrun"]["momentum 0.9"], 5)
    assert lab.settings(small, plan["null 2"], 5) == replace(wanted, seed=2005)
    assert plan["null 2"].patch == plan["momentum 0.9"].patch


def test_an_unknown_idea_or_a_ledger_cut_in_a_line_is_one_line(door, tmp_path):
    assert_user_error(door("nonsense"), "nonsense", "momentum 0.9")
    for cut in (b'{"idea', b"{}", b"3", b"\xff"):
        (tmp_path / "a.jsonl").write_bytes(b'{"setting":0,"idea":0,"version":0,"against":0,"seed":0,"loss":0}\n' + cut)
        assert_user_error(door("--table", "--ledger", "a.jsonl"), "a.jsonl", "line 2")


def test_muon_steps_along_the_mixture_of_two_momenta():
    p = torch.nn.Parameter(torch.zeros(3, 3))
    muon = optim.Muon([p], 0.02, 0.1)  # momentum 0.95
    run = SimpleNamespace(muon=muon, config=SimpleNamespace(max_steps=4))
    before_step = ideas.two_momenta(run, first=1.0, last=0.0)["before_step"]
    fast = slow = torch.zeros(3, 3)
    for step in (1, 2, 3):
        p.grad = torch.randn(3, 3)
        fast = 0.85 * fast + 0.15 * p.grad
        slow = 0.98 * slow + 0.02 * p.grad
        before_step(step)
        momentum = muon.state[p]["momentum_buffer"].lerp(p.grad, 1 - 0.95)  # what Muon makes of it
        torch.testing.assert_close(momentum, (1 - step / 4) * slow + step / 4 * fast)


@pytest.mark.slow
def test_every_idea_trains_another_model(tmp_path):
    text = text_file(tmp_path / "text.txt")
    for recipe, known in IDEAS.items():
        options = dict(recipe=recipe, size="0.25M", steps=20, seeds=2, device="cpu", data=text, json="rows.json")
        succeed("bench.py", "lab", cwd=tmp_path, timeout=600, **options)
        rows = read_json(tmp_path / "rows.json")["rows"]
        losses = [row["mean"] for row in rows]
        assert [row["name"] for row in rows] == [recipe, *known]
        assert all(0 < loss < 9 for loss in losses) and losses.count(losses[0]) == 1
