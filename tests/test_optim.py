"""Schedules, optimizers and skipped steps against torch's own, the singular value decomposition, and closed forms."""

import io
import math
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_leaves

from model import GPT, GPTConfig
from parts.optim import LossScale, Muon, decay_groups, learning_rate, make_optimizer, muon_height, orthogonalized
from parts.optim import Optimizer as LoopOptimizer
from tests.helpers import assert_refused, seeded
from train_gpt2 import Config

CONSTANTS = dict(max_lr=1e-3, min_lr=1e-4, max_steps=110, warmup_steps=10, decay_fraction=0.4)
Settings = partial(Config, optimizer="muon", **CONSTANTS)


@dataclass(frozen=True)
class Machine:
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    compile: bool = False
    rank: int = 0
    world_size: int = 1


def small() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(n_positions=16, vocab_size=61, n_layer=2, n_head=2, n_embd=32))


def batch(seed: int) -> torch.Tensor:
    return torch.randint(61, (4, 16), generator=seeded(seed))


def train(model: GPT, optimizer: LoopOptimizer, steps: range, finite: bool = True) -> None:
    for step in steps:
        idx = batch(step)
        optimizer.set_lr(1 / step)
        optimizer.scale(model(idx, idx)).backward()
        optimizer.clip_grad_norm(1.0)
        if not finite:
            for i, p in enumerate(model.parameters()):
                p.grad.fill_((math.nan, math.inf, -math.inf)[i % 3])
        optimizer.step(torch.tensor(finite))
        optimizer.zero_grad()


def through_a_file(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def tensors_of(state) -> list[torch.Tensor]:
    return [leaf.clone() for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]


def equal(a, b) -> bool:
    a = tensors_of(a)
    b = tensors_of(b)
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- which parameter goes where, and how fast


def test_parameter_groups_of_the_padded_124m():
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=50304))
    rt = Machine(device=torch.device("meta"))
    groups = make_optimizer(model, Settings(optimizer="adamw"), rt).param_groups()
    counts = [(len(g["params"]), sum(p.numel() for p in g["params"]), g["weight_decay"]) for g in groups]
    assert counts == [(50, 124_354_560, 0.1), (98, 121_344, 0.0)]


def test_muon_takes_the_linear_layers_of_blocks_and_adamw_the_rest_except_what_is_frozen():
    """By kind, not by name or dimension; a fused layer is a stack of queries, keys and values, also of fewer heads."""
    model = small()
    model.transformer.wpe.weight.requires_grad_(False)
    model.transformer.extra = torch.nn.Linear(32, 32)
    model.transformer.h[0].values = torch.nn.Embedding(61, 32)
    model.transformer.h[1].attn.c_attn = torch.nn.Linear(32, 64)  # 32 rows of queries, 16 of keys, 16 of values
    rest, muon = make_optimizer(model, Settings(), Machine()).optimizers
    names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    stacked = {names[p]: group["stacked"] for group in muon.param_groups for p in group["params"]}
    linear = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    expected = {f"transformer.h.{layer}.{name}.weight": () for layer in (0, 1) for name in linear}
    expected["transformer.h.0.attn.c_attn.weight"] = (32, 32, 32)
    expected["transformer.h.1.attn.c_attn.weight"] = (32, 16, 16)
    assert stacked == expected
    others = [names[p] for group in rest.param_groups for p in group["params"]]
    assert sorted([*stacked, *others]) == sorted(names.values())


def test_the_schedules_at_their_corners():
    cosine = Settings(max_lr=1.0, min_lr=0.1, warmup_steps=10, max_steps=110)
    assert [learning_rate(s, cosine) for s in (1, 10, 60, 110)] == pytest.approx([0.1, 1.0, 0.55, 0.1])
    wsd = replace(cosine, min_lr=0.0, warmup_steps=0, max_steps=100, lr_schedule="wsd")
    assert [learning_rate(s, wsd) for s in (1, 30, 60, 80, 100)] == pytest.approx([1.0, 1.0, 1.0, 0.5, 0.0])
    assert muon_height(80, wsd) == learning_rate(80, wsd) / wsd.max_lr


def test_four_phases_are_those_of_muon_while_adamw_has_a_plateau():
    config = Settings(max_lr=1e-3, min_lr=0.0, warmup_steps=10, max_steps=1010, lr_schedule="four_phases")
    parts = [muon_height(step, config) for step in (5, 10, 50, 310, 569, 571, 790, 1010)]
    assert parts == pytest.approx([0.5, 1.0, 1.0, 0.4722, 0.2, 0.2, 0.1, 0.0], abs=2e-3)
    optimizer = make_optimizer(small(), config, Machine())
    optimizer.set_lr(learning_rate(310, config) / config.max_lr, muon_height(310, config))
    assert [g["lr"] for g in optimizer.param_groups()] == pytest.approx([1e-3, 1e-3, 0.009444, 0.009444], rel=1e-4)


# ---- the step


def test_adamw_steps_as_torch_does():
    ours = small()
    theirs = small()
    optimizer = make_optimizer(ours, Settings(optimizer="adamw"), Machine())
    plain = torch.optim.AdamW(decay_groups(theirs.parameters(), 0.1), 1e-3, (0.9, 0.95), foreach=False, fused=False)
    for step in range(1, 6):
        idx = batch(step)
        for model in (ours, theirs):
            model(idx, idx).backward()
        optimizer.clip_grad_norm(0.5)
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step(torch.tensor(True))
        optimizer.zero_grad()
        plain.step()
        plain.zero_grad()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("name, dtype", [("adamw", torch.float32), ("muon", torch.bfloat16), ("sgd", torch.float16)])
def test_a_step_that_is_not_finite_leaves_no_trace_not_even_as_the_first(name, dtype, before):
    """Nor where any optimizer of torch takes the place of ours."""
    runs = []
    for bad_steps in (0, 1):
        model = small()
        if name == "sgd":
            optimizer = LoopOptimizer([torch.optim.SGD(model.parameters(), 0.1, 0.9)], Machine(dtype))
        else:
            optimizer = make_optimizer(model, Settings(optimizer=name), Machine(dtype))
        train(model, optimizer, range(1, 1 + before))
        trained = tensors_of([model.state_dict(), optimizer.state_dict()])
        train(model, optimizer, range(9, 9 + bad_steps), finite=False)
        assert before == 0 or equal(trained, [model.state_dict(), optimizer.state_dict()])
        train(model, optimizer, range(1 + before, 6))
        runs.append(model.state_dict())
    assert equal(*runs)


# ---- fp16


def test_the_loss_scale_moves_as_that_of_torch():
    ours = LossScale("cpu")
    theirs = torch.amp.GradScaler("cpu")
    p = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p], lr=0.0)
    theirs.scale(torch.ones(1))
    n = theirs.get_growth_interval()
    for finite in [True] * (2 * n + 1) + [False] + [True] * (n - 1) + [False] * 2:
        p.grad = torch.full((1,), 1.0 if finite else math.inf)
        theirs.step(optimizer)
        theirs.update()
        ours.update(torch.tensor(finite))
        assert ours.scale.item() == theirs.get_scale()


# ---- what a checkpoint brings back


class Averaging(torch.optim.Optimizer):
    """As schedule-free ones: its counter and the largest learning rate stand in the group."""

    def __init__(self, params, lr, shrink=0.0):
        super().__init__(params, dict(lr=lr, shrink=shrink, k=0, largest=-1.0))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"] += 1
            group["largest"] = max(group["largest"], group["lr"])
            group.setdefault("first", group["lr"])
            for p in group["params"]:
                p.sub_(group["first"] + group["largest"] / group["k"] * p.grad)


def all_of_torch() -> dict:
    """{name: function that makes it}"""
    needs_more = ("Optimizer", "LBFGS", "SparseAdam", "Muon")  # a closure; sparse gradients; matrices alone
    classes = {name: kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    made = {name: partial(kind, lr=0.01) for name, kind in classes.items() if name not in needs_more}
    fused = partial(torch.optim.AdamW, lr=0.01, amsgrad=True, fused=True)
    return made | {"fused amsgrad": fused, "averaging": partial(Averaging, lr=0.01)}


def optimizer_for(model: GPT, make) -> LoopOptimizer:
    if make == "adamw":
        return make_optimizer(model, Settings(optimizer="adamw"), Machine(torch.float16))
    if make == "muon":
        return make_optimizer(model, Settings(), Machine())
    return LoopOptimizer([make(model.parameters())], Machine())


@pytest.mark.parametrize("make", [*all_of_torch().values(), "adamw", "muon"], ids=[*all_of_torch(), "adamw", "muon"])
def test_any_optimizer_is_resumed_bit_for_bit(make):
    runs = []
    for interrupted in (False, True):
        model = small()
        optimizer = optimizer_for(model, make)
        train(model, optimizer, range(1, 4))
        if interrupted:
            state = through_a_file(optimizer.state_dict())
            optimizer = optimizer_for(model, make)
            optimizer.load_state_dict(state)
        train(model, optimizer, range(4, 7))
        runs.append([model.state_dict(), optimizer.state_dict()])
    assert equal(*runs)


def test_a_resume_takes_constants_from_the_script_and_state_from_the_checkpoint():
    """Of any name; also in fp16 after a run in fp32, whose state has no loss scale."""
    model = small()
    optimizer = LoopOptimizer([Averaging(model.parameters(), lr=0.01, shrink=0.1)], Machine())
    train(model, optimizer, range(1, 4))
    state = through_a_file(optimizer.state_dict())
    other = LoopOptimizer([Averaging(model.parameters(), lr=0.02, shrink=0.3)], Machine(torch.float16))
    other.load_state_dict(state)
    [group] = other.param_groups()
    assert (group["shrink"], group["lr"]) == (0.3, 0.02)
    assert (group["k"], group["largest"], group["first"]) == (3, 0.01, 0.01)


def test_a_name_that_nobody_has_added_names_the_function_to_extend():
    config = Settings(lr_schedule="rsqrt_2", optimizer="lion_2", warmup_steps=10)
    assert_refused("rsqrt_2.* learning_rate ", learning_rate, 1, config)  # not after the warmup
    assert_refused("lion_2.* make_optimizer ", make_optimizer, small(), config, Machine())


def cut(state: dict) -> None:
    moments = state["optimizers"][0]["state"][0]
    moments["exp_avg"] = moments["exp_avg"][:10].clone()


def lose_an_optimizer(state: dict) -> None:
    state["optimizers"].pop()


@pytest.mark.parametrize("harm", [cut, lose_an_optimizer])
def test_a_state_of_another_model_is_refused(harm):
    """The fused kernels trust what they are given: they would write past the end of a smaller moment."""
    model = small()
    optimizer = make_optimizer(model, Settings(), Machine())
    train(model, optimizer, range(1, 4))
    state = through_a_file(optimizer.state_dict())
    harm(state)
    other = make_optimizer(small(), Settings(), Machine())
    with pytest.raises(ValueError):
        other.load_state_dict(through_a_file(state))


# ---- Muon


@pytest.mark.parametrize("rows", [(16, 16, 16), (16, 8, 8)])  # fewer keys and values than queries
def test_muon_steps_as_torch_does_and_a_stack_as_separate_matrices(monkeypatch, rows):
    torch.manual_seed(0)
    shapes = [*((n, 16) for n in rows), (16, 16), (16, 16), (16, 64), (64, 16)]
    theirs = [torch.nn.Parameter(torch.full(shape, 0.1)) for shape in shapes]
    stack = torch.nn.Parameter(torch.full((sum(rows), 16), 0.1))
    single = [torch.nn.Parameter(p.detach().clone()) for p in theirs[3:]]
    ours = Muon([dict(params=[stack], stacked=rows), dict(params=single)], 0.02, 0.1, dtype=torch.float32)
    plain = torch.optim.Muon(theirs, 0.02, 0.1)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # keep torch's from rounding
    for _ in range(5):
        for p in theirs:
            p.grad = torch.randn(p.shape)
        stack.grad = torch.cat([p.grad for p in theirs[:3]])
        for p, q in zip(single, theirs[3:], strict=True):
            p.grad = q.grad.clone()
        ours.step()
        plain.step()
    for p, q in zip([*stack.split(rows), *single], theirs, strict=True):
        assert (p - 0.1).abs().max() > 0.02  # it did move
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "shape, dtype", [((24, 40), torch.float32), ((40, 24), torch.bfloat16), ((32, 32), torch.float16)]
)
def test_muon_makes_singular_values_one_and_leaves_the_directions(shape, dtype):
    torch.manual_seed(0)
    matrices = torch.randn(3, *shape) * torch.tensor([1e-6, 1.0, 1e6])[:, None, None]  # whatever their size
    with torch.autocast("cpu", torch.bfloat16):  # which a caller may have on
        results = orthogonalized(matrices, dtype).float()
    for matrix, result in zip(matrices, results, strict=True):
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        inside = u.T @ result @ v.T  # diagonal, were it exact
        values = inside.diagonal()[s > 0.01 * s[0]]
        assert values.min() > 0.6  # what five iterations of this polynomial are made for
        assert values.max() < 1.3
        assert (inside - inside.diagonal().diag()).abs().max() < (1e-3 if dtype == torch.float32 else 0.1)
