"""exercises/: our own functions are right there, and a typical mistake in them gets the sentence that helps."""

import inspect
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from functools import partial
from textwrap import dedent
from unittest.mock import Mock

import numpy
import pytest
import torch
from torch.func import functional_call

import minimal as gpt2
from bpe import minimal
from exercises import functions, test_functions
from model import GPT, naive_attention
from parts import loss, optim
from parts.lora import LoRAConfig, LoRALinear
from tests.helpers import ROOT, environment


def linear_cross_entropy(ours, x, weight, *args):
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight)]
    mean = ours.apply(*leaves, *args) / len(x)
    return mean.detach(), *torch.autograd.grad(mean, leaves)


def clip(ours, grads, max_norm):
    groups = [dict(params=[Mock(grad=grad) for grad in grads])]
    return ours(Mock(param_groups=lambda: groups, loss_scale=None), max_norm)


def generate(ours, logits_of, idx, n, context, **sampling):
    return ours(Mock(side_effect=logits_of, config=Mock(n_positions=context)), idx, n, **sampling)


def call_block(ours, x, weights, n_head):
    config = gpt2.Config(n_embd=x.size(-1), n_head=n_head)
    return functional_call(ours(config), weights, x)


def call_gpt(ours, idx, weights, n_layer, n_head):
    (V, C), N = weights["wte.weight"].shape, len(weights["wpe.weight"])
    config = gpt2.Config(n_layer=n_layer, n_head=n_head, n_embd=C, vocab_size=V, sequence_length=N)
    named = {f"transformer.{name}": tensor for name, tensor in weights.items()}
    return functional_call(ours(config), named, idx)


def call_adamw(ours, p, grad, m, v, step, lr, beta1, beta2, eps, weight_decay):
    p.grad = grad.clone()
    optimizer = ours([p], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)
    if step > 1:
        optimizer.state[p] = dict(step=torch.tensor(step - 1.0), exp_avg=m, exp_avg_sq=v)
    optimizer.step()
    m.copy_(optimizer.state[p]["exp_avg"])
    v.copy_(optimizer.state[p]["exp_avg_sq"])


def step_of_the_loop(model, optimizer, micro_batches, max_norm):
    """As in minimal.py and train_gpt2.py."""
    loss = torch.zeros(())
    for idx, targets in micro_batches:
        micro_loss = model(idx, targets) / len(micro_batches)
        micro_loss.backward()
        loss += micro_loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss


Schedule = namedtuple("Schedule", "max_steps warmup_steps max_lr min_lr lr_schedule", defaults=["cosine"])
OURS = {  # our function, and how to call it as the exercise is called
    "merge": (minimal.merge, lambda ours, *args: ours(*args)),
    "encode": (minimal.encode, lambda ours, *args: [minimal.vocabulary(args[1])[i] for i in ours(*args)]),
    "attention": (naive_attention, lambda ours, *args: ours(*args)),
    "block": (gpt2.Block, call_block),
    "gpt": (gpt2.GPT, call_gpt),
    "adamw": (torch.optim.AdamW, call_adamw),
    "training_step": (step_of_the_loop, lambda ours, *args: ours(*args)),
    "linear_cross_entropy": (loss.LinearCrossEntropy, linear_cross_entropy),
    "learning_rate": (optim.learning_rate, lambda ours, step, *args: ours(step, Schedule(*args))),
    "clip": (optim.Optimizer.clip_grad_norm, clip),
    "orthogonalize": (optim.orthogonalized, lambda ours, matrix: ours(matrix[None], torch.float32)[0]),
    "generate": (GPT.generate, generate),
    "LoRALinear": (LoRALinear, lambda ours, linear, *args: ours(linear.requires_grad_(False), LoRAConfig(*args))),
}
MISTAKES = [  # (function, words of ours, what a mistake has there, words of the sentence that it gets)
    ("block", "x = x + self.attn", "x = self.attn", "x . attention.*look at ln_1"),
    ("block", "self.ln_2(x)", "x", "x . MLP.*look at ln_2"),
    ("block", "x = x + self.attn(self.ln_1(x))", "x = x - self.attn(self.ln_1(x))", "x . attention.*look at ln_1"),
    ("gpt", "+ self.transformer.wpe(positions)", "", "positions are missing"),
    ("gpt", "return self.transformer.ln_f(x)", "return x", "the last norm is missing"),
    ("gpt", "in self.transformer.h:", "in reversed(self.transformer.h):", "reverse order"),
    ("gpt", "in self.transformer.h:", "in self.transformer.h[:1]:", "only the first block"),
    ("training_step", " / len(micro_batches)", "", "sum of four means"),
    ("training_step", "micro_loss.backward()", "optimizer.zero_grad(); micro_loss.backward()", "divided by four"),
    ("training_step", "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)", "", "not clipped"),
    ("training_step", "optimizer.step()", "", "nothing has moved"),
    ("training_step", "optimizer.zero_grad()", "", "gradients are left"),
    ("training_step", "loss += micro_loss.detach()", "loss = loss + micro_loss", "detach it"),
    ("merge", "merged[-1] += token", "merged[-1:] = [merged[-1] + token, token]", "two tokens further"),
    ("merge", "== pair", "== pair and len(merged) == 1", "only the first pair"),
    ("merge", "return merged", "return merged[:-1]", "last token is lost"),
    ("merge", "== pair", "in (pair, pair[::-1])", "order counts"),
    ("merge", "(merged[-1], token) == pair", 'merged[-1] + token == b"".join(pair)', "compare the two tokens"),
    ("encode", "while pairs", "if pairs", "only one merge"),
    ("encode", "found.keys() & pairwise(chunk)", "{*merges[:1]} & {*pairwise(chunk)}", "continue with the next"),
    ("encode", "min(pairs", "max(pairs", "latest merge"),
    ("encode", "min(pairs, key=found.get)", "next(p for p in pairwise(chunk) if p in pairs)", "leftmost"),
    ("attention", "/ math.sqrt(q.size(-1))", "", "not divided by sqrt"),
    ("attention", ".tril()", ".tril(1)", "tokens after t"),
    ("attention", "dim=-1", "dim=-2", "add up to 1"),
    ("attention", "bias =", "return F.scaled_dot_product_attention(q, k, v, is_causal=True); bias =", "with products"),
    ("linear_cross_entropy", "torch.mm(dlogits, w, out=grad_xc)", "torch.mm(-dlogits, w, out=grad_xc)", "wrong sign"),
    ("linear_cross_entropy", "accumulate_matmul(grad_w,", "accumulate_matmul(0 * grad_w,", "of the last chunk"),
    (
        "linear_cross_entropy",
        "zip(x.split(chunk), targets.split(chunk), grad_x.split(chunk), strict=True)",
        "[(x, targets, grad_x)]",
        "N x V",
    ),
    ("linear_cross_entropy", "del logits, dlogits", 'x.kept = [*getattr(x, "kept", []), logits.clone()]', "N x V"),
    ("learning_rate", "max_lr * step", "max_lr * (step - 1)", "warmup is a line"),
    ("learning_rate", "progress))", "step / config.max_steps))", "begins at step warmup_steps"),
    (
        "learning_rate",
        "config.min_lr + height * (config.max_lr - config.min_lr)",
        "height * config.max_lr",
        "to min_lr",
    ),
    ("clip", "_foreach_mul_", "_foreach_mul", "in place"),
    (
        "clip",
        "(max_norm / (norm + 1e-6)).clamp(max=1.0)",
        "[max_norm / g.norm() for g in grads]",
        "one norm of all",
    ),
    ("clip", ".clamp(max=1.0)", "", "1 at most"),
    ("clip", "max_norm / (norm + 1e-6)", "1 / (norm + 1e-6)", "norm becomes 1"),
    ("clip", "norm + 1e-6", "norm * norm / norm", "gradients of 0 become NaN"),
    ("orthogonalize", "x / norms", "x", "explodes"),
    ("orthogonalize", "range(steps)", "range(2)", "the five steps"),
    ("orthogonalize", "range(steps)", "range(6)", "0.6964"),
    ("orthogonalize", "range(steps)", "range(10)", "0.6964"),
    (
        "orthogonalize",
        "a, b, c = 3.4445, -4.7750, 2.0315",
        "U, _, V = matrices.svd(); return U @ V.mT",
        "an SVD leaves it 1",
    ),
    ("orthogonalize", "dim=(1, 2), keepdim=True).clamp(min=1e-7)", "dim=2, keepdim=True) * 4", "singular vectors"),
    ("generate", "[:, -1]  #", "[:, 0]  #", "first position"),
    ("generate", "logits / temperature", "logits * temperature", "multiplied"),
    ("generate", "logits < kth", "logits <= kth", "too few"),
    ("generate", 'logits < kth, float("-inf")', "logits < kth, 0", "exp.0. is 1"),
    ("generate", "logits < kth", "logits < logits.flatten().topk(top_k).values[-1]", "each row has its own"),
    (
        "generate",
        "(probs, 1, generator=generator)",
        "(probs[0], 1, generator=generator).expand(len(idx), 1)",
        "one draw serves",
    ),
    ("generate", "-self.config.n_positions :", "1 - self.config.n_positions :", "pass the last 4"),
    ("LoRALinear", "torch.zeros", "torch.ones", "starts at 0"),
    ("LoRALinear", "kaiming_uniform_(self.lora_A, a=math.sqrt(5))", "zeros_(self.lora_A)", "starts random"),
    ("LoRALinear", "kaiming_uniform_(self.lora_A, a=math.sqrt(5))", "ones_(self.lora_A)", "starts random"),
    ("LoRALinear", "config.scale", "config.alpha", "divide that by r"),
    ("LoRALinear", "config.scale", "config.alpha // config.r", "is rounded"),
]


def edited(function, old: str, new: str):
    """The function with a mistake: other words in its source."""
    source = dedent(inspect.getsource(function))
    assert old in source, f"{function.__name__} has changed: make this mistake in another way"
    names = dict(inspect.getmodule(function).__dict__)
    exec(source.replace(old, new), names)
    return names[function.__name__]


def merge_two_further(tokens, pair):
    merged = []
    for i in range(0, len(tokens), 2):
        both = tokens[i : i + 2]
        merged += [b"".join(both)] if tuple(both) == pair else both
    return merged


def encode_one_of_each(word, merges):
    tokens = [bytes([byte]) for byte in word.encode()]
    for pair in merges:
        found = [i for i in range(len(tokens) - 1) if (tokens[i], tokens[i + 1]) == pair]
        if found:
            tokens[found[0] : found[0] + 2] = [b"".join(pair)]
    return tokens


def encode_by_joined_bytes(word, merges):
    tokens = [bytes([byte]) for byte in word.encode()]
    order = {first + second: i for i, (first, second) in reversed([*enumerate(merges)])}
    while found := [i for i in range(len(tokens) - 1) if tokens[i] + tokens[i + 1] in order]:
        i = min(found, key=lambda i: order[tokens[i] + tokens[i + 1]])
        tokens[i : i + 2] = [tokens[i] + tokens[i + 1]]
    return tokens


def in_place(matrix):
    matrix /= matrix.norm().clamp(min=1e-7)
    return orthogonalized(matrix)


def orthogonalized(x, last=lambda gram, x: gram @ gram @ x):
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * last(gram, x)
    return x


def generate_with(new_token):
    """`generate` that draws with new_token(probs, top_k, generator)."""

    def generate(model, idx, max_new_tokens, context, temperature=1.0, top_k=None, generator=None):
        for _ in range(max_new_tokens):
            logits = model(idx[:, -context:])[:, -1]
            new = new_token(logits / (temperature or 0.01), top_k or 6, generator)
            idx = torch.cat([idx, new], dim=1)
        return idx

    return generate


def from_top(logits, k, generator):
    kth = logits.topk(k).values[:, -1:]
    return torch.multinomial(logits.where(logits >= kth, -numpy.inf).softmax(-1), 1, generator=generator)


def reseeded(logits, k, generator):
    return from_top(logits, min(k, 6), torch.Generator().manual_seed(0))


def one_more(logits, k, generator):
    return from_top(logits, min(k + 1, 6), generator)


def without_gradient(forward):
    """A LoRALinear whose forward pass is forward(layer, x)."""

    class Layer(torch.nn.Module):
        def __init__(self, linear, r, alpha):
            super().__init__()
            self.linear = linear.requires_grad_(False)
            self.scale = alpha / r
            self.lora_A = torch.nn.Parameter(torch.randn(r, linear.in_features))
            self.lora_B = torch.nn.Parameter(torch.zeros(linear.out_features, r))

    Layer.forward = forward
    return Layer


@torch.no_grad()
def all_of_it(layer, x):
    return layer.linear(x) + layer.scale * x @ layer.lora_A.T @ layer.lora_B.T


def only_A(layer, x):
    return layer.linear(x) + layer.scale * x @ layer.lora_A.data.T @ layer.lora_B.T


def only_linear(layer, x):
    return layer.linear(x).detach() + layer.scale * x @ layer.lora_A.T @ layer.lora_B.T


def divided_by_warmup(step, max_steps, warmup_steps, max_lr, min_lr):
    warmup = min(1.0, step / warmup_steps)
    progress = max(0, step - warmup_steps) / (max_steps - warmup_steps)
    return warmup * (min_lr + (max_lr - min_lr) * 0.5 * (1 + numpy.cos(numpy.pi * progress)))


def wrong_adamw(p, grad, m, v, step, lr, beta1, beta2, eps, weight_decay, mistake=""):
    if mistake == "L2":
        grad = grad + weight_decay * p
    else:
        p.mul_(1 - lr * weight_decay)
    m.lerp_(grad, 1 - beta1)
    v.lerp_(grad**2, 1 - beta2)
    m_hat, v_hat = (m, v) if mistake == "uncorrected" else (m / (1 - beta1**step), v / (1 - beta2**step))
    p.sub_(lr * m_hat / ((v_hat + eps).sqrt() if mistake == "eps" else v_hat.sqrt() + eps))


WRONG = [  # (function, a wrong answer, words of the sentence that it gets)
    ("block", partial(test_functions.right_block, residual=0), "do not add to the stream"),
    ("block", partial(test_functions.right_block, pre_norm=False), "the norm is after the sum"),
    ("block", partial(test_functions.right_block, approximate="none"), "the exact GELU"),
    ("block", partial(test_functions.right_block, mask=False), "attention is causal"),
    ("block", lambda x, w, n_head: test_functions.right_block(x, w, 1), "there is one head"),
    ("block", partial(test_functions.right_block, sum_first=False), "after attention"),
    ("block", partial(test_functions.right_block, join=False), "before the reshape"),
    ("block", partial(test_functions.right_block, split=False), "split heads by"),
    ("block", partial(test_functions.right_block, split=False, join=False), "and transpose back"),
    ("block", partial(test_functions.right_block, order="qvk"), "not q, v, k"),
    ("block", partial(test_functions.right_block, order="kqv"), "not k, q, v"),
    ("adamw", partial(wrong_adamw, mistake="L2"), "Adam with L2"),
    ("adamw", partial(wrong_adamw, mistake="uncorrected"), "divide by 1 - beta"),
    ("adamw", partial(wrong_adamw, mistake="eps"), "not under it"),
    ("adamw", lambda p, *args: wrong_adamw(p.clone(), *args), "p is as before"),
    ("merge", merge_two_further, "by one token, not by two"),
    ("encode", encode_one_of_each, "each merge joins one pair"),
    ("encode", encode_by_joined_bytes, "look up the two tokens"),
    ("learning_rate", divided_by_warmup, "with warmup_steps 0.*ZeroDivisionError"),
    ("orthogonalize", in_place, "that was passed has changed"),
    ("orthogonalize", partial(orthogonalized, last=lambda gram, x: gram @ x), "A X is taken for A A X"),
    ("generate", generate_with(from_top), "top_k above V"),
    ("generate", generate_with(reseeded), "every step draws the same"),
    ("generate", generate_with(one_more), "too many"),
    ("LoRALinear", without_gradient(all_of_it), "no gradient reaches lora_A, lora_B and x"),
    ("LoRALinear", without_gradient(only_A), "no gradient reaches lora_A, so"),
    ("LoRALinear", without_gradient(only_linear), "lacks the part through `linear`"),
]


@pytest.mark.parametrize("name, answer, sentence", WRONG)
def test_a_wrong_answer_gets_its_sentence(name, answer, sentence, monkeypatch):
    monkeypatch.setattr(functions, name, answer)
    with pytest.raises(pytest.fail.Exception, match=sentence):
        getattr(test_functions, f"test_{name}")()


@pytest.mark.parametrize(
    "name, called, right, sentence",
    [
        ("block", "attention", False, "`attention` is not right yet: write it first"),
        ("block", "attention", True, "look at ln_1"),
        ("gpt", "block", False, "`block` is not right yet: write it first"),
        ("gpt", "block", True, "around the blocks"),
    ],
)
def test_a_wrong_answer_that_calls_another_function_is_sent_to_that_one_first(
    name, called, right, sentence, monkeypatch
):
    ours, call = OURS[called]
    monkeypatch.setattr(functions, called, partial(call, ours) if right else lambda x, *args: x + 1)
    ours, call = OURS[name]
    monkeypatch.setattr(functions, name, lambda *args: call(ours, *args) + 1)
    with pytest.raises(pytest.fail.Exception, match=sentence):
        getattr(test_functions, f"test_{name}")()


def test_an_answer_may_use_autograd_on_what_it_is_given(monkeypatch):
    def answer(x, weight, targets, chunk):
        x.requires_grad_()
        weight.requires_grad_()
        total = 0.0
        for xc, tc in zip(x.split(chunk), targets.split(chunk), strict=True):
            loss = torch.nn.functional.cross_entropy(xc @ weight.T, tc, reduction="sum") / len(x)
            loss.backward()
            total += loss.detach()
        return total, x.grad, weight.grad

    monkeypatch.setattr(functions, "linear_cross_entropy", answer)
    test_functions.test_linear_cross_entropy()


@pytest.mark.parametrize("name", OURS)
def test_our_functions_are_right(name, monkeypatch):
    ours, call = OURS[name]
    monkeypatch.setattr(functions, name, partial(call, ours))
    getattr(test_functions, f"test_{name}")()


@pytest.mark.parametrize("name, old, new, sentence", MISTAKES)
def test_a_mistake_gets_its_sentence(name, old, new, sentence, monkeypatch):
    ours, call = OURS[name]
    monkeypatch.setattr(functions, name, partial(call, edited(ours, old, new)))
    with pytest.raises(pytest.fail.Exception, match=sentence):
        getattr(test_functions, f"test_{name}")()


@pytest.mark.parametrize("number", [numpy.float32, torch.tensor])
def test_a_rate_may_be_any_number(number, monkeypatch):
    ours, call = OURS["learning_rate"]
    monkeypatch.setattr(functions, "learning_rate", lambda *args: number(call(ours, *args)))
    test_functions.test_learning_rate()


@pytest.mark.slow
def test_a_first_run_lists_what_is_to_write_and_what_was_raised(tmp_path):
    shutil.copytree(ROOT / "exercises", tmp_path / "exercises")
    path = tmp_path / "exercises/functions.py"
    unwritten = "    raise NotImplementedError\n"
    head, *parts = path.read_text("utf-8").split(unwritten)
    parts[0] = f"    return [][1]\n{parts[0]}"  # merge
    parts[1] = f"    return word\n{parts[1]}"  # encode
    parts[3] = f"    return attention(x, x, x)\n{parts[3]}"  # block
    written = [0, 1, 3]
    text = head + "".join(part if i in written else unwritten + part for i, part in enumerate(parts))
    path.write_text(text, "utf-8")
    line = text[: text.index("return [][1]")].count("\n") + 1
    command = [sys.executable, "-m", "pytest", "exercises"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    listed = done.stdout.partition("= exercises =")[2]
    lines = dict(re.findall(r"^(\w+) +(.+)$", listed, re.M))
    assert f"functions.py:{line}: IndexError: list index out of range" in lines["merge"], done.stdout
    assert lines["encode"].startswith("a list is expected, this is 'hehe'"), done.stdout
    assert lines["attention"] == "not written yet"
    assert lines["block"].startswith("`attention` is not written yet")
    assert list(lines.values()).count("not written yet") == len(OURS) - len(written), done.stdout
    assert done.returncode == 1, done.stdout
