"""Small models with seeds: without an idea a run is one of train_gpt2.py; an idea does what its docstring says."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import train_gpt2
from benchmarks import seeds, tried
from benchmarks.seeds import Change, settings
from corpus.shards import prepare_text
from learning.optim import make_optimizer
from model import GPT, GPTConfig
from run.runtime import Runtime
from tests.helpers import arguments, run_inline, text_file
from train_gpt2 import RECIPES

SHAPE = dict(n_layer=2, n_head=2, n_embd=32, sequence_length=32, vocab_size=512, total_batch_size=256)


@pytest.fixture
def run():
    """A run of the recipe, of 100 steps, that has not begun."""
    config = replace(RECIPES["speedrun"], **SHAPE, max_steps=100, warmup_steps=0)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, n_positions=32, vocab_size=512))
    return seeds.parts_of(model, make_optimizer(model, config, Runtime.setup("cpu", "float32")), config)


def one_matrix(numbers: list[float], lr: float, initial_lr: float) -> SimpleNamespace:
    """A run whose Muon has one matrix of a row, at a point of the schedule; weight decay 0.5."""
    p = torch.nn.Parameter(torch.tensor([numbers]))
    group = dict(params=[p], lr=lr, initial_lr=initial_lr, weight_decay=0.5, momentum=0.95, parts=1)
    muon, config = SimpleNamespace(param_groups=[group]), SimpleNamespace(weight_decay=0.5, max_steps=100)
    return SimpleNamespace(muon=muon, config=config, model=torch.nn.ParameterList([p]), p=p, group=group)


def test_without_an_idea_it_is_a_run_of_train_gpt2(tmp_path, monkeypatch, capsys):
    config = settings("speedrun", 8, SHAPE, seed=3, eval_steps=4, tokenizer="train")
    text, out = text_file(tmp_path / "text.txt", 60_000), tmp_path / "out/run"
    words = SHAPE | dict(data=text, out_dir=out, tokenizer="train", max_steps=8, warmup_steps=config.warmup_steps)
    words |= dict(seed=3, eval_steps=4, eval_interval=4, sample_interval=0, hellaswag_interval=0, checkpoint_interval=0)
    words |= dict(dtype="float32", device="cpu")
    result = run_inline(train_gpt2.main, ["speedrun", *arguments(**words)], capsys, monkeypatch)
    assert result.returncode == 0, result.stderr
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    wanted = [(256 * record["step"], record["loss"]) for record in log if record["kind"] == "val"]
    shards = str(prepare_text(str(text), "train", 512, tmp_path / "out/cache"))
    rt = Runtime.setup("cpu", "float32")
    plain, fused = (list(seeds.train(c, config, shards, rt, checks=2)) for c in (Change(), Change(tried.fused_qkv)))
    assert len(wanted) == 2 and plain == [(tokens, pytest.approx(loss, abs=1e-5)) for tokens, loss in wanted]
    assert abs(fused[1][1] - plain[1][1]) > 1e-5


def test_cautious_decay_takes_only_what_the_step_takes_too():
    run = one_matrix([1.0, -1.0, 2.0], lr=0.05, initial_lr=0.1)  # half of the way down the schedule
    hooks = tried.cautious_decay(run)
    hooks["before_step"](1)
    assert run.group["weight_decay"] == 0, "Muon itself decays nothing"
    with torch.no_grad():
        run.p += torch.tensor([[-0.25, -0.25, 0.25]])  # towards zero, away from it, away from it
    hooks["after_step"](1)
    assert run.p.tolist() == [pytest.approx([0.75 - 0.05 * 0.5 * 0.5 * 1.0, -1.25, 2.25])]


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


def test_normuon_evens_out_rows_and_keeps_the_norm_of_the_step():
    run = one_matrix([0.0, 0.0], lr=0.1, initial_lr=0.1)
    run.p.data = torch.zeros(2, 2)
    hooks = tried.normuon(run)
    hooks["before_step"](1)
    step = torch.tensor([[3.0, 4.0], [0.3, 0.4]])  # rows of length 5 and 0.5
    with torch.no_grad():
        run.p -= step
    hooks["after_step"](1)
    assert run.p.norm().item() == pytest.approx(step.norm().item(), rel=1e-5)
    assert run.p[0].tolist() == pytest.approx(run.p[1].tolist(), rel=1e-3) and run.p.max() < 0


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


def test_the_standard_error_is_of_the_differences_seed_by_seed():
    row = seeds.row("x", [2.0, 3.0, 4.0, 5.0], [1.0, 3.0, 3.0, 5.0])
    assert row["over_recipe"] == [1.0, 0.0, 1.0, 0.0] and row["over"] == 0.5
    assert row["standard_error"] == pytest.approx(((4 * 0.25 / 3) ** 0.5) / 2)
