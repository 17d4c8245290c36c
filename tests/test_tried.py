"""benchmarks/tried.py: each idea does what its docstring says, in cases small enough to do by hand."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import train_gpt2
from benchmarks import tried
from benchmarks.speedrun import settings
from cli import UserError
from corpus.order import TokenStream, find_shards
from corpus.shards import prepare_text
from learning.optim import make_optimizer
from model import GPT, GPTConfig
from run.runtime import Runtime
from tests.helpers import ROOT, run_inline
from train_gpt2 import RECIPES

SHAPE = dict(n_layer=2, n_head=2, n_embd=32, sequence_length=32, vocab_size=512, total_batch_size=256)


@pytest.fixture
def rt() -> Runtime:
    return Runtime.setup("cpu", "float32")


@pytest.fixture
def run(rt):
    """A run of the recipe, of 100 steps, that has not begun."""
    config = replace(RECIPES["speedrun"], **SHAPE, max_steps=100, warmup_steps=0)
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, n_positions=32, vocab_size=512))
    return tried.made(model, make_optimizer(model, config, rt), config)


def one_matrix(numbers: list[float], lr: float, initial_lr: float) -> SimpleNamespace:
    """A run whose Muon has one matrix of a row, at a point of the schedule; weight decay 0.5."""
    p = torch.nn.Parameter(torch.tensor([numbers]))
    group = dict(params=[p], lr=lr, initial_lr=initial_lr, weight_decay=0.5, momentum=0.95)
    muon, config = SimpleNamespace(param_groups=[group]), SimpleNamespace(weight_decay=0.5, max_steps=100)
    return SimpleNamespace(muon=muon, config=config, model=torch.nn.ParameterList([p]), p=p, group=group)


def test_without_an_idea_it_is_a_run_of_train_gpt2(tmp_path, monkeypatch, capsys, rt):
    constants = settings("speedrun", {}, 4, SHAPE) | dict(seed=3, dtype="float32", device="cpu", eval_steps=4)
    text = tmp_path / "text.txt"
    text.write_text((ROOT / "input.txt").read_text(encoding="utf-8")[:60_000], encoding="utf-8")
    words = [word for key, value in constants.items() for word in (f"--{key}", value)]
    out = tmp_path / "out/run"
    result = run_inline(train_gpt2.main, ["speedrun", "--data", text, "--out_dir", out, *words], capsys, monkeypatch)
    assert result.returncode == 0, result.stderr
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    [val] = [record["loss"] for record in log if record["kind"] == "val"]
    shards = str(prepare_text(str(text), "train", 512, tmp_path / "out/cache"))
    monkeypatch.setattr(tried, "VALIDATED", 4 * 256)
    found = tried.train(tried.nothing, replace(RECIPES["speedrun"], **constants), shards, rt)
    assert len(TokenStream(find_shards(shards, "val"), 512)) > 4 * 256
    assert found == pytest.approx(val, abs=1e-5)
    other = tried.train(tried.fused_qkv, replace(RECIPES["speedrun"], **constants), shards, rt)
    assert abs(other - val) > 1e-5


def test_cautious_decay_takes_only_what_the_step_takes_too():
    run = one_matrix([1.0, -1.0, 2.0], lr=0.05, initial_lr=0.1)  # half of the way down the schedule
    hooks = tried.cautious_decay(run)
    hooks["before_step"](1)
    assert run.group["weight_decay"] == 0, "Muon itself decays nothing"
    with torch.no_grad():
        run.p += torch.tensor([[-0.25, -0.25, 0.25]])  # towards zero, away from it, away from it
    hooks["after_step"](1)
    assert run.p.tolist() == [pytest.approx([0.75 - 0.05 * 0.5 * 0.5 * 1.0, -1.25, 2.25])]


def test_scheduled_decay_falls_with_the_learning_rate():
    run = one_matrix([1.0], lr=0.025, initial_lr=0.1)
    tried.scheduled_decay(run)["before_step"](1)
    assert run.group["weight_decay"] == pytest.approx(0.125)


def test_momentum_rises_over_the_first_steps():
    run = one_matrix([1.0], 0.1, 0.1)
    before_step, found = tried.momentum_warmup(15)(run)["before_step"], []
    for step in (3, 15, 60):
        before_step(step)
        found.append(run.group["momentum"])
    assert found == pytest.approx([0.87, 0.95, 0.95])


def test_a_group_of_its_own_has_its_constants_and_no_tensor_twice(run):
    tried.own_groups(tried.token_table, lr=6e-3)(run)
    tried.own_groups(tried.embeddings, weight_decay=0.0)(run)
    held = [p for group in run.adamw.param_groups for p in group["params"]]
    matrices = [p for group in run.muon.param_groups for p in group["params"]]
    assert sorted(map(id, held + matrices)) == sorted(map(id, run.model.parameters()))
    found = {id(p): group for group in run.adamw.param_groups for p in group["params"]}
    tables = run.model.transformer
    assert found[id(tables.wte.weight)]["initial_lr"] == 6e-3 and found[id(tables.wte.weight)]["weight_decay"] == 0.1
    assert found[id(tables.wpe.weight)]["lr"] == 3e-3 and found[id(tables.wpe.weight)]["weight_decay"] == 0


def test_the_two_optimizers_cool_down_apart(run):
    tried.split_cooldown(run)["before_step"](
        50
    )  # AdamW at (100 - 50) / 70 of its rate; the recipe's is still at its peak
    for group in run.adamw.param_groups:
        assert group["lr"] == pytest.approx(3e-3 * 50 / 70)
    assert {group["lr"] for group in run.muon.param_groups} == {0.02}


def test_normuon_evens_out_rows_and_keeps_the_norm_of_the_step():
    step = torch.tensor([[[3.0, 4.0], [0.3, 0.4]]])  # rows of length 5 and 0.5
    run = one_matrix([1.0], 0.1, 0.1)
    run.muon._orthogonalized_by_owners = lambda update, rows, group: step
    tried.normuon(run)
    found = run.muon._orthogonalized_by_owners(step, 2, {})
    assert found.norm().item() == pytest.approx(step.norm().item(), rel=1e-5)
    assert found[0, 0].tolist() == pytest.approx(found[0, 1].tolist(), rel=1e-3)


def test_ema_nesterov_looks_ahead_along_the_mean_movement(monkeypatch):
    run = one_matrix([1.0], 0.1, 0.1)
    run.config.max_lr = 1.0
    monkeypatch.setattr(tried, "learning_rate", lambda step, config: 0.5)
    hooks = tried.ema_nesterov(run)
    for step in (1, 20):  # before 15% of the steps, and after
        hooks["before_forward"](step)
        ahead = run.p.item()
        with torch.no_grad():
            run.p += 0.2
        hooks["after_step"](step)
        # in the first step a movement of 0.2, a tenth of which is the mean: from 1.2 on, 0.6 x 0.5 x 0.02 ahead
        assert ahead == pytest.approx({1: 1.0, 20: 1.2 + 0.3 * 0.02}[step])


def test_the_average_is_that_of_the_last_steps():
    run = one_matrix([0.0], 0.1, 0.1)
    hooks = tried.tail_average(0.03)(run)
    for step in range(1, 101):
        with torch.no_grad():
            run.p.fill_(float(step))
        hooks["after_step"](step)
    hooks["at_end"](100)
    assert run.p.item() == pytest.approx((98 + 99 + 100) / 3)


def test_momentum_zero_projections_and_fused_matrices_are_what_they_say(run):
    for idea in (tried.momentum_of(0.9), tried.fused_qkv, tried.no_muon_decay, tried.zero_projections):
        assert idea(run) == {}
    assert {(g["momentum"], g["parts"], g["weight_decay"]) for g in run.muon.param_groups} == {(0.9, 1, 0.0)}
    assert all(block.mlp.c_proj.weight.abs().sum() == 0 for block in run.model.transformer.h)


def test_the_standard_error_is_of_the_differences_seed_by_seed(capsys):
    row = tried.row("x", [2.0, 3.0, 4.0, 5.0], [1.0, 3.0, 3.0, 5.0])
    assert row["over_speedrun"] == [1.0, 0.0, 1.0, 0.0]
    assert row["standard_error"] == pytest.approx(((4 * 0.25 / 3) ** 0.5) / 2)


def test_unknown_lines_are_refused(rt):
    with pytest.raises(UserError, match="'no such'.*'NorMuon'"):
        tried.run(SimpleNamespace(only=("no such",)), rt)
