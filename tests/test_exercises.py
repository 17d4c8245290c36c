"""exercises/: a right answer to each passes, no answer is not one, and a wrong one gets a sentence."""

import re
from functools import partial

import pytest

from exercises import functions, solutions, test_functions
from tests.helpers import ROOT

EXERCISES = [name for name, value in vars(functions).items() if getattr(value, "__module__", "") == functions.__name__]


def check(name: str, answer, monkeypatch) -> None:
    monkeypatch.setattr(functions, name, answer)
    getattr(test_functions, f"test_{name}")()


def rounded_scale(linear, r, alpha):
    return solutions.LoRALinear(linear, r, alpha // r * r)


def without_scale(q, k, v):
    return solutions.attention(q * q.size(3) ** 0.5, k, v)


def sum_of_means(model, optimizer, micro_batches, max_norm):
    for idx, targets in micro_batches:
        model(idx, targets).backward()
    optimizer.step()


def top_p_of_all_rows(logits, p):
    return solutions.top_p(logits.view(1, -1), p).view_as(logits)


def no_decay(*args):
    solutions.adamw(*args[:-1], 0.0)


def without_positions(idx, weights, n_layer, n_head):
    return solutions.gpt(idx, weights | {"wpe.weight": 0 * weights["wpe.weight"]}, n_layer, n_head)


WRONG = {  # one wrong answer to each
    "merge": lambda tokens, pair: solutions.merge(tokens, pair[::-1]),
    "train": lambda words, n_merges: solutions.train([sum(words, [])], n_merges),
    "encode": lambda word, merges: solutions.encode(word, merges[::-1]),
    "batch": lambda tokens, starts, T: 2 * solutions.batch(tokens, starts, T)[:1],
    "attention": without_scale,
    "block": partial(test_functions.right_block, pre_norm=False),
    "gpt": without_positions,
    "linear_cross_entropy": lambda x, *args: (solutions.linear_cross_entropy(x, *args)[0] * len(x), x, args[0]),
    "learning_rate": lambda step, *args: solutions.learning_rate(step - 1, *args),
    "adamw": no_decay,
    "training_step": sum_of_means,
    "clip": lambda grads, max_norm: [solutions.clip([grad], max_norm) for grad in grads][0],
    "orthogonalize": lambda matrix: matrix / matrix.norm(),
    "top_p": top_p_of_all_rows,
    "cached_attention": lambda q, k, v, cache: (solutions.attention(q, k, v), (k, v)),
    "generate": lambda model, idx, n, context, **options: solutions.generate(model, idx, n, context),
    "LoRALinear": rounded_scale,
}


def test_every_exercise_has_a_solution_and_a_row_in_the_table():
    table = (ROOT / "exercises/README.md").read_text("utf-8")
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == EXERCISES
    for name in EXERCISES:
        assert hasattr(solutions, name)


@pytest.mark.parametrize("name", EXERCISES)
def test_the_solution_passes(name, monkeypatch):
    check(name, getattr(solutions, name), monkeypatch)


@pytest.mark.parametrize("name", EXERCISES)
def test_an_exercise_that_is_not_written_does_not_pass(name):
    with pytest.raises(NotImplementedError):
        getattr(test_functions, f"test_{name}")()


@pytest.mark.parametrize("name", EXERCISES)
def test_a_wrong_answer_fails(name, monkeypatch):
    with pytest.raises(pytest.fail.Exception):
        check(name, WRONG[name], monkeypatch)
