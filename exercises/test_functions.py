"""Compares functions.py with libraries and formulas; recognizes common mistakes and says what to look at."""

import math
import traceback
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from exercises import functions

wrong = partial(pytest.fail, pytrace=False)  # the sentence alone, without a traceback


def same(a, b) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5) if torch.is_tensor(b) else a == b


def expect(got, like):
    """Fail unless `got` has the type of `like` or, for a tensor, its shape and dtype."""
    if type(got) is not type(like):
        wrong(f"a {type(like).__name__} is expected, this is {got!r:.60}" + "; is a return missing?" * (got is None))
    if torch.is_tensor(like) and (got.shape, got.dtype) != (like.shape, like.dtype):
        wrong(f"{tuple(like.shape)} {like.dtype} is expected, this is {tuple(got.shape)} {got.dtype}")


def compare(got, right, mistakes: dict, otherwise: str):
    """Fail unless `got` is `right`: with the sentence of the mistake that gives `got`, or else with `otherwise`."""
    expect(got, right)
    if not same(got, right):
        wrong(next((sentence for sentence, value in mistakes.items() if same(got, value)), otherwise))


@contextmanager
def hint(sentence: str):
    """If the code within raises, fail with the sentence, and with what was raised in which line of functions.py."""
    try:
        yield
    except NotImplementedError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == functions.__file__]
        place = f"functions.py:{lines[-1]}: " if lines else ""
        wrong(f"{sentence} ({place}{type(error).__name__}: {error})")


def becomes(*shapes: tuple, named: str, into: str):
    """A hint for a call with tensors: the shapes that go in and the ones that come out."""
    given = ", ".join(str(tuple(shape)) for shape in shapes)
    return hint(f"{named} {given} becomes {into}")


def random(*shape) -> torch.Tensor:  # the same numbers in each run
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def check_first(test):
    """Fail if a function that this one may call is wrong; one that is not written is not called."""
    try:
        test()
    except NotImplementedError:
        pass
    except (Exception, pytest.fail.Exception):
        wrong(f"`{test.__name__.removeprefix('test_')}` is not right yet: write it first")


class Watch(TorchDispatchMode):
    """Collects the names of PyTorch's operations, and the most bytes of their results that were alive at once."""

    names, made, most = "", {}, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        results = operation(*args, **(kwargs or {}))
        self.names += operation.name()
        made = (result.untyped_storage() for result in tree_leaves(results) if torch.is_tensor(result))
        self.made = self.made | {StorageWeakRef(memory): memory.nbytes() for memory in made}
        self.most = max(self.most, sum(size for memory, size in self.made.items() if not memory.expired()))
        return results


def test_merge():
    a, b, aa, ab = b"a", b"b", b"aa", b"ab"
    repeated = {
        "a a a becomes aa a: go from left to right": [a, aa, b],
        "after a pair, continue two tokens further: its second token is in it": [aa, aa, b],
    }
    apart = {
        "after a pair, continue two tokens further: its second token is in it": [ab, b, ab, b, a],
        "the last token is lost": [ab, ab],
        "only the first pair is joined: continue to the end of the list": [ab, a, b, a],
    }
    odd = {
        "a token that does not begin the pair moves you on by one token, not by two": [b, a, b],
        "the first token is lost": [ab],
        "the pair at the end of the list is not joined": [b, a],
    }
    order = "b a is not the pair (a, b): the order counts"
    concatenated = "(ab, a) is not the pair (a, ba), although both make aba: compare the two tokens"
    cases = [
        ([a, b, a, b, a], (a, b), [ab, ab, a], apart),
        ([a, a, a, b], (a, a), [aa, a, b], repeated),
        ([b, a], (a, b), [b, a], {order: [b"ba"]}),
        ([b, a, b], (a, b), [b, ab], odd),
        ([ab, a], (a, b"ba"), [ab, a], {concatenated: [b"aba"]}),
        ([a] * 4, (a, a), [aa, aa], {"aa aa is not the pair (a, a): go through the list once": [b"aaaa"]}),
        ([a], (a, b), [a], {}),
        ([], (a, b), [], {}),
    ]
    for tokens, pair, right, mistakes in cases:
        given = list(tokens)
        with hint(f"{tokens} with {pair} becomes {right}; do you look beyond the end of the list?"):
            got = functions.merge(given, pair)
        compare(got, right, mistakes, f"{tokens} with {pair} becomes {right}, this is {got}")
        if given != tokens:
            wrong("the list that was passed has changed: build a new one")


def test_train():
    a, b, c, d, ab = b"a", b"b", b"c", b"d", b"ab"
    crossing = "a pair crosses two words: count the neighbours within each word"
    again = "the new token is not counted: merge it in every word before you count again"
    ties = "of equally frequent pairs take the smallest, min(pair): not the first that comes"
    cases = [
        ([[a, b], [a, b], [c, d]], 1, [(a, b)], {"the rarest pair is taken: take the most frequent": [(c, d)]}),
        ([[a], [b], [a], [b], [c, d]], 1, [(c, d)], {crossing: [(a, b)]}),
        ([[a, b, c]] * 2, 2, [(a, b), (ab, c)], {again: [(a, b), (b, c)], again + " ": [(a, b), (a, b)]}),
        ([[c, d], [a, b]], 1, [(a, b)], {ties: [(c, d)]}),
        ([[a, b], [a, b, c, d], [d, b, c], [b, c]], 2, [(b, c), (a, b)], {}),
        ([[a, b]], 5, [(a, b)], {}),
    ]
    for words, n_merges, right, mistakes in cases:
        given = [list(word) for word in words]
        with hint(f"{n_merges} merges of {words} are {right}; do you stop where no neighbours are left?"):
            got = functions.train(given, n_merges)
        compare(got, right, mistakes, f"{n_merges} merges of {words} are {right}, these are {got}")
        if given != words:
            wrong("the list of words has changed: build a new one")


def test_encode():
    h, e, n, t, th, he = b"h", b"e", b"n", b"t", b"th", b"he"
    once = "each merge joins one pair of neighbours: join all of them, or look again"
    twice = {
        "the latest merge is done first: the one with the smallest index in `merges` comes first": [h, b"en", h, b"en"],
        "encoding ends at a merge that the word does not have: continue with the next one": [h, e, n, h, e, n],
        once: [he, n, h, b"en"],
    }
    order = {
        "only one merge is done: repeat, with the new tokens, until no neighbours are in `merges`": [t, he, n],
        "the leftmost pair is joined first: join the one that is earliest in `merges`": [th, e, n],
        "the longest token is taken first: only the order of `merges` counts": [b"the", n],
    }
    joined = "(th, e) is not the pair (t, he), although both make the: look up the two tokens, not what they make"
    characters = "begin with the single bytes of the word's UTF-8, each a `bytes` of length 1; é has two"
    cases = [
        ("hehe", [(h, e)], [he, he], {once: [he, h, e]}),
        ("henhen", [(t, h), (h, e), (e, n)], [he, n, he, n], twice),
        ("then", [(h, e), (t, h), (he, n), (t, he)], [t, b"hen"], order),
        ("the", [(t, h), (h, e), (t, he)], [th, e], {joined: [b"the"]}),
        (
            "é",
            [],
            [b"\xc3", b"\xa9"],
            {characters: ["é"], characters + " ": [b"\xc3\xa9"], characters + "  ": [b"\xe9"]},
        ),
        ("h", [(h, e)], [h], {}),
    ]
    for word, merges, right, mistakes in cases:
        given = list(merges)
        with hint(f"{word!r} with {merges} becomes {right}; do you stop where no neighbours are in `merges`?"):
            got = functions.encode(word, given)
        if isinstance(got, list) and any(type(token) is not bytes for token in got):
            wrong(f"{characters}: tokens are `bytes`, this is {got}")
        compare(got, right, mistakes, f"{word!r} with {merges} becomes {right}, this is {got}")
        if given != merges:
            wrong("the list of merges has changed: it is needed for the next word")


def test_batch():
    tokens = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 8])
    starts, T = [5, 0], 4
    with hint("tokens (10,), two starts and T = 4 become inputs (2, 4) and targets (2, 4)"):
        got = functions.batch(tokens, starts, T)
    expect(got, (None, None))
    if len(got) != 2:
        wrong(f"inputs and targets are expected, these are {len(got)}")
    inputs = torch.tensor([[9, 2, 6, 5], [3, 1, 4, 1]])
    targets = torch.tensor([[2, 6, 5, 8], [1, 4, 1, 5]])
    swapped = "the rows are in another order than `starts`"
    compare(got[0], inputs, {swapped: inputs.flip(0)}, f"the inputs are {inputs.tolist()}, not {got[0].tolist()}")
    mistakes = {
        "a target is the input itself: it is the token after it": inputs,
        "a target is the token before its input: it is the one after it": torch.tensor([[5, 9, 2, 6], [8, 3, 1, 4]]),
        "the last target of a row is its first input: read T + 1 tokens": inputs.roll(-1, dims=1),
    }
    compare(got[1], targets, mistakes, f"the targets are {targets.tolist()}, not {got[1].tolist()}")


def test_attention():
    q, k, v = (random(2, 3, 5, 16).roll(i) for i in range(3))  # T = 5, D = 16
    given = [tensor.clone() for tensor in (q, k, v)]
    with Watch() as watch, becomes(*3 * [q.shape], named="q, k, v", into=f"a tensor {tuple(q.shape)}"):
        got = functions.attention(*given)
    expect(got, q)
    if "scaled_dot_product" in watch.names:
        wrong("scaled_dot_product_attention is called: write it with products, a mask and a softmax")
    if got.isnan().all():
        wrong("all is NaN: 0 times -inf is NaN, so set hidden scores with masked_fill or torch.where")
    if got[:, :, 0].isnan().any():
        wrong("row 0 is NaN, as all of its scores are masked: a token looks at itself, too")
    if not all(same(a, b) for a, b in zip(given, (q, k, v), strict=True)):
        wrong("q, k or v has changed: the model still needs them, so do not write into them")
    changed = torch.cat([v[:, :, :-1], v[:, :, -1:] + 1], dim=2)  # the last token, which only the last row may see
    ahead = "row t looks at tokens after t: set their scores, but not its own, to -inf before the softmax"
    compare(functions.attention(q, k, changed)[:, :, :-1], got[:, :, :-1], {}, ahead)
    sums = "the weights of a row do not add up to 1: mask before the softmax, and take it over the last dimension"
    ones = torch.ones_like(v)
    compare(functions.attention(q, k, ones), ones, {}, sums)
    sdpa = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    mistakes = {
        "the scores are not divided by sqrt(D)": sdpa(scale=1.0),
        "they are divided by D: divide them by its square root": sdpa(scale=1 / 16),
        "they are divided by sqrt(T): D is the size of the last dimension": sdpa(scale=5**-0.5),
        "they are multiplied by sqrt(D): divide them": sdpa(scale=4.0),
        "the softmax is divided by sqrt(D): divide the scores": sdpa(scale=1.0) / 4,
        "q and k are exchanged: row t is the query of token t": F.scaled_dot_product_attention(k, q, v, is_causal=True),
    }
    compare(got, sdpa(), mistakes, "row t is the mean of v[0] .. v[t], weighted by softmax(q[t] @ k.T / sqrt(D))")
    if not functions.attention(q.clone().requires_grad_(), k, v).requires_grad:
        wrong("no gradient reaches q, k and v: they are to be trained, so leave out no_grad, detach and .data")


def small_gpt() -> tuple[dict, int, int, int]:
    """(weights of random numbers, layers, heads, channels)"""
    C, V, N = 8, 11, 6
    shapes = {"wte.weight": (V, C), "wpe.weight": (N, C), "ln_f.weight": (C,), "ln_f.bias": (C,)}
    for i in range(2):
        for name, rows in ("attn.c_attn", 3 * C), ("attn.c_proj", C), ("mlp.c_fc", 4 * C):
            shapes |= {f"h.{i}.{name}.weight": (rows, C), f"h.{i}.{name}.bias": (rows,)}
        shapes |= {f"h.{i}.mlp.c_proj.weight": (C, 4 * C), f"h.{i}.mlp.c_proj.bias": (C,)}
        for name in ("ln_1", "ln_2"):
            shapes |= {f"h.{i}.{name}.{kind}": (C,) for kind in ("weight", "bias")}
    generator = torch.Generator().manual_seed(5)
    return {name: 0.7 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}, 2, 2, C


def right_block(x, w, n_head, pre_norm=True, residual=1, approximate="tanh", mask=True, sum_first=True, **heads):
    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])

    def linear(x, name):
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def attend(y, order="qkv", split=True, join=True):
        B, T, C = y.shape
        parts = linear(y, "attn.c_attn").split(C, dim=2)
        if split:
            parts = [part.view(B, T, n_head, -1).transpose(1, 2) for part in parts]  # (B, H, T, D) each
        else:
            parts = [part.reshape(B, n_head, T, -1) for part in parts]
        q, k, v = (parts[order.index(name)] for name in "qkv")
        z = F.scaled_dot_product_attention(q, k, v, is_causal=mask)
        return linear((z.transpose(1, 2) if join else z).reshape(B, T, C), "attn.c_proj")

    def mlp(y):
        return linear(F.gelu(linear(y, "mlp.c_fc"), approximate=approximate), "mlp.c_proj")

    if not pre_norm:
        x = norm(x + attend(x, **heads), "ln_1")
        return norm(x + mlp(x), "ln_2")
    y = residual * x + attend(norm(x, "ln_1"), **heads)
    return residual * y + mlp(norm(y if sum_first else x, "ln_2"))


def test_block():
    weights, _, n_head, C = small_gpt()
    w = {name.removeprefix("h.0."): tensor for name, tensor in weights.items() if name.startswith("h.0.")}
    x = random(2, 5, C)
    right = right_block(x, w, n_head)
    answer = partial(right_block, x, w, n_head)
    split = "split heads by view(B, T, H, D).transpose(1, 2); the other order mixes tokens with channels"
    mistakes = {
        "the branches do not add to the stream: x = x + branch(norm(x))": answer(residual=0),
        "the norm is after the sum; GPT-2's is before the branch": answer(pre_norm=False),
        "that is the exact GELU; GPT-2 has the tanh form": answer(approximate="none"),
        "a position reads later ones: attention is causal": answer(mask=False),
        "there is one head: split the channels into n_head": right_block(x, w, 1),
        "the MLP reads what the block read: it reads the stream after attention": answer(sum_first=False),
        "heads are (B, H, T, D): transpose(1, 2) before the reshape to (B, T, C)": answer(join=False),
        split: answer(split=False),
        f"{split}, and transpose back": answer(split=False, join=False),
    }
    for wrong_order in "qvk", "kqv", "kvq", "vqk", "vkq":
        order = ", ".join(wrong_order)
        mistakes[f"c_attn makes queries, keys, values, in this order, not {order}"] = answer(order=wrong_order)
    with hint(f"x {tuple(x.shape)} becomes a tensor of the same shape"):
        got = functions.block(x.clone(), w, n_head)
    expect(got, right)
    if not any(same(got, known) for known in (right, *mistakes.values())):
        branches = {  # the branch that becomes 0: what is left of a block
            "mlp": "x + attention(ln_1(x)), and yours is not: look at ln_1, c_attn, the heads and attn.c_proj",
            "attn": "x + MLP(ln_2(x)), and yours is not: look at ln_2, c_fc, GELU and mlp.c_proj",
        }
        for other, formula in branches.items():
            alone = {name: 0 * t if name.startswith(f"{other}.c_proj") else t for name, t in w.items()}
            if not same(functions.block(x.clone(), alone, n_head), right_block(x, alone, n_head)):
                if other == "mlp":
                    check_first(test_attention)
                wrong(f"with {other}.c_proj at 0 a block is {formula}")
    compare(got, right, mistakes, "each branch alone is right, with the other at 0: look at how they are added up")


def test_gpt():
    weights, n_layer, n_head, _ = small_gpt()
    idx = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])

    def logits(positions=True, last_norm=True, layers=range(n_layer)):
        x = weights["wte.weight"][idx] + positions * weights["wpe.weight"][: idx.size(1)]
        for i in layers:
            own = {k.removeprefix(f"h.{i}."): tensor for k, tensor in weights.items() if k.startswith(f"h.{i}.")}
            x = right_block(x, own, n_head)
        if last_norm:
            x = F.layer_norm(x, x.shape[-1:], weights["ln_f.weight"], weights["ln_f.bias"])
        return x @ weights["wte.weight"].T

    mistakes = {
        "positions are missing: add the rows 0 to T - 1 of wpe": logits(positions=False),
        "the last norm is missing: ln_f comes before the head": logits(last_norm=False),
        "every layer has the weights of h.0": logits(layers=[0] * n_layer),
        "the blocks run in reverse order": logits(layers=reversed(range(n_layer))),
        "only the first block runs": logits(layers=[0]),
    }
    with hint("idx (2, 5) becomes logits (2, 5, V)"):
        got = functions.gpt(idx, weights, n_layer, n_head)
    expect(got, logits())
    if not same(got, logits()):
        check_first(test_block)
    compare(got, logits(), mistakes, "other logits: look at what is around the blocks")


def test_linear_cross_entropy():
    N, C, V, chunk = 66, 3, 100, 4  # the last chunk has 2 positions
    x, weight, targets = random(N, C), random(V, C), torch.arange(N) * 7 % V
    given = [x.clone(), weight.clone(), targets.clone()]
    into = f"a scalar, grad_x ({N}, {C}) and grad_weight ({V}, {C})"
    shapes = becomes(x.shape, weight.shape, targets.shape, named="x, weight, targets", into=into)
    with Watch() as watch, shapes:
        answer = functions.linear_cross_entropy(*given, chunk)
    expect(answer, (None, None, None))
    answer = tuple(part.detach() if torch.is_tensor(part) else part for part in answer)
    logits = (x @ weight.T).requires_grad_()
    losses = F.cross_entropy(logits, targets, reduction="none")  # (N,)
    losses.mean().backward()
    mean_of_means = sum(part.mean() for part in losses.split(chunk)) / 17
    mistakes = {
        "the loss is a sum over positions: divide it by N": losses.sum(),
        "the loss is the log of the probability: -log is wanted": -losses.mean(),
        "the last, shorter chunk is left out": losses[:64].sum() / N,
        "the loss is that of the last chunk: add up all chunks": losses[64:].sum() / N,
        "the shorter chunk counts as much as the others: add up sums, then divide by N": mean_of_means,
        "the means of the chunks are added up: add up sums, then divide by N": mean_of_means * 17,
    }
    compare(answer[0], losses.mean(), mistakes, f"the loss is {losses.mean():.4f}, this is {answer[0]}")
    grad_x, grad_weight = logits.grad @ weight, logits.grad.T @ x
    sizes = torch.tensor([[chunk] * 64 + [2] * 2]).T  # (N, 1): positions in the chunk of each position
    by_N = "is that of the sum of losses: divide it by N"
    by_chunk = "is divided by the size of a chunk: divide by N"
    sign = "has the wrong sign: it is softmax(logits) - one_hot(target)"
    mistakes = {
        "one_hot(target) is missing: subtract it from softmax(logits)": logits.softmax(-1) @ weight / N,
        f"grad_x {sign}": -grad_x,
        f"grad_x {by_N}": N * grad_x,
        f"grad_x {by_chunk}": N * grad_x / sizes,
        f"grad_x {by_chunk} ": N * grad_x / chunk,
    }
    compare(answer[1], grad_x, mistakes, "grad_x is (softmax(logits) - one_hot(target)) @ weight / N")
    mistakes = {
        "grad_weight is that of the last chunk: add up all chunks": logits.grad[64:].T @ x[64:],
        f"grad_weight {sign}": -grad_weight,
        f"grad_weight {by_N}": N * grad_weight,
        f"grad_weight {by_chunk}": N * (logits.grad / sizes).T @ x,
        f"grad_weight {by_chunk} ": N * grad_weight / chunk,
    }
    compare(answer[2], grad_weight, mistakes, "grad_weight is (softmax(logits) - one_hot(target)).T @ x / N")
    if not all(same(a, b) for a, b in zip(given, (x, weight, targets), strict=True)):
        wrong("x, weight or targets has changed: do not write into what was passed")
    if watch.most >= 4 * N * V:
        wrong(f"N x V numbers are kept, {watch.most} bytes: let go of a chunk's logits and of autograd's graph of them")
    large = functions.linear_cross_entropy(1000 * x, weight.clone(), targets.clone(), chunk)
    if not all(part.isfinite().all() for part in large):
        wrong("exp of large logits overflows, and log of a probability of 0 is -inf: log_softmax takes care of both")


def test_learning_rate():
    S, W, high, low = 12, 4, 1.0, 0.1

    def rates_of(warmup):
        rates = [functions.learning_rate(step, S, warmup, high, low) for step in range(1, S + 1)]
        if None in rates:
            wrong("a rate is expected in every step, this is None; is a return missing?")
        return torch.tensor([float(rate) for rate in rates])

    with hint("a step, of 1 to max_steps, becomes a rate"):
        rates = rates_of(W)
    steps = torch.arange(1, S + 1)

    def cosine(progress):
        return low + (high - low) * 0.5 * (1 + torch.cos(math.pi * progress))

    right = torch.where(steps <= W, high * steps / W, cosine((steps - W) / (S - W)))
    line = "the warmup is a line, 0 at step 0 and max_lr at step warmup_steps"
    mistakes = {
        f"{line}: it is one step late": ((steps - 1) / W)[: W - 1],
        f"{line}: it is one step early": ((steps + 1) / W)[: W - 1],
        f"{line}: it ends at step warmup_steps + 1": (steps / (W + 1))[: W - 1],
        f"{line}: it starts from min_lr": (low + (high - low) * steps / W)[: W - 1],
        f"{line}: it multiplies the cosine, which only begins after it": (cosine(steps / S) * steps / W)[: W - 1],
        f"{line}: it is missing": cosine(steps / S)[: W - 1],
    }
    compare(rates[: W - 1], right[: W - 1], mistakes, f"{line}: {right[:W]}, not {rates[:W]}")
    part = (steps - W) / (S - W)
    begins = (
        "the cosine begins at step warmup_steps: its progress is (step - warmup_steps) / (max_steps - warmup_steps)"
    )
    mistakes = {
        begins: cosine(steps / S),
        f"{begins}; the divisor is wrong": cosine((steps - W) / S),
        f"{begins}; the divisor is wrong ": cosine((steps - W) / (S - W - 1)),
        f"{begins}; it is one step late": cosine((steps - W - 1) / (S - W - 1)),
        f"{begins}; it is one step late ": cosine((steps - W - 1) / (S - W)),
        "the cosine falls to 0: it goes from max_lr to min_lr": high * cosine(part).sub(low) / (high - low),
        "min_lr cuts the cosine off: let it go from max_lr to min_lr": (cosine(part).sub(low) / 0.9).clamp(min=low),
        "min_lr is added to a cosine of max_lr: its height is max_lr - min_lr": cosine(part).sub(low) / 0.9 + low,
        "it is a whole cosine, which rises again: half of one goes from 0 to pi": cosine(2 * part),
        "it is a quarter of a cosine: half of one is 0.5 (1 + cos), from 0 to pi": low
        + 0.9 * torch.cos(math.pi / 2 * part),
        "the cosine rises from min_lr: 0.5 (1 + cos) falls": cosine(1 - part),
        "it is a line: the rate falls along half a cosine": high - (high - low) * part,
    }
    mistakes = {sentence: value[W:] for sentence, value in mistakes.items()}
    otherwise = "the rate is not half a cosine, from max_lr at step warmup_steps to min_lr at step max_steps"
    compare(rates[W:], right[W:], mistakes, f"{otherwise}: {right[W:]}, not {rates[W:]}")
    compare(rates[W - 1], right[W - 1], {}, f"at step warmup_steps the rate is max_lr, this is {rates[W - 1]:.4f}")
    without = "with warmup_steps 0 the cosine begins at once, at step 0"
    with hint(without):
        rates = rates_of(0)
    compare(rates, cosine(steps / S), {}, f"{without}: {cosine(steps / S)}, not {rates}")


def test_adamw():
    lr, beta1, beta2, eps, decay = 0.1, 0.9, 0.95, 1e-3, 0.5

    def steps(corrected=True, decoupled=True, eps_outside=True, decayed=True):
        p, m, v = random(3, 4), torch.zeros(3, 4), torch.zeros(3, 4)
        for step in (1, 2, 3):
            grad = random(3, 4, step)[..., 0]
            if decoupled:
                p = p - decayed * lr * decay * p
            else:
                grad = grad + decay * p
            m = beta1 * m + (1 - beta1) * grad
            v = beta2 * v + (1 - beta2) * grad**2
            m_hat, v_hat = (m / (1 - beta1**step), v / (1 - beta2**step)) if corrected else (m, v)
            p = p - lr * m_hat / (v_hat.sqrt() + eps if eps_outside else (v_hat + eps).sqrt())
        return p

    mistakes = {
        "the moments begin at 0, so the first ones are too small: divide by 1 - beta^step": steps(corrected=False),
        "that is Adam with L2: the decay must not go through the moments": steps(decoupled=False),
        "nothing decays": steps(decayed=False),
        "eps is added to the root, not under it": steps(eps_outside=False),
    }
    p, m, v = random(3, 4), torch.zeros(3, 4), torch.zeros(3, 4)
    given = p
    for step in (1, 2, 3):
        grad = random(3, 4, step)[..., 0]
        with hint("p, grad, m and v have one shape, and three steps are taken"):
            functions.adamw(p, grad, m, v, step, lr, beta1, beta2, eps, decay)
        if not same(grad, random(3, 4, step)[..., 0]):
            wrong("the gradient that was passed has changed")
    if same(given, random(3, 4)):
        wrong("p is as before: change it in place, for example with p.sub_")
    if same(m, torch.zeros(3, 4)) or same(v, torch.zeros(3, 4)):
        wrong("m or v is 0 after three steps: change both in place")
    compare(p, steps(), mistakes, "another update: compare with the docstring, term by term")


def test_training_step():
    idx, targets = torch.arange(48).view(8, 6) % 7, torch.arange(48).view(8, 6) % 5
    micro_batches = list(zip(idx.split(2), targets.split(2), strict=True))

    class Bigrams(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(random(7, 5))

        def forward(self, idx, targets):
            return F.cross_entropy(self.table[idx].flatten(0, 1), targets.flatten())

    def after(batches, max_norm, scale=1.0, n_steps=1):
        model = Bigrams()
        for _ in range(n_steps):
            loss = sum(model(*batch) for batch in batches) * scale
            (grad,) = torch.autograd.grad(loss, [model.table])
            grad = grad * (max_norm / grad.norm()).clamp(max=1)
            model.table = torch.nn.Parameter((model.table - grad).detach())
        return model.table.detach()

    every, last, n = micro_batches, micro_batches[-1:], len(micro_batches)
    for max_norm in (100.0, 0.01):
        model = Bigrams()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with hint("four micro-batches of (2, 6) tokens, one step"):
            loss = functions.training_step(model, optimizer, every, max_norm)
        mistakes = {
            "nothing has moved: call optimizer.step()": Bigrams().table.detach(),
            "the gradient is the sum of four means: divide each loss by their number": after(every, max_norm),
            "only the last micro-batch counts: clear gradients after the step, not between": after(last, max_norm),
            "and it was divided by four: clear gradients after the step, not between": after(last, max_norm, 1 / n),
            "the gradient is not clipped": after(every, 1e9, 1 / n),
        }
        right = after(every, max_norm, 1 / n)
        compare(model.table.detach(), right, mistakes, "another step: look at the order of lines")
        whole = Bigrams()(idx, targets).detach()
        of_last = Bigrams()(*every[-1]).detach()
        lost = {
            "the loss is the sum of four means": n * whole,
            "it is the loss of the last one": of_last,
            "it is the loss of the last one, divided by four": of_last / n,
        }
        compare(loss, whole, lost, "the mean of the losses before the step is expected")
        if loss.requires_grad:
            wrong("the loss keeps the graph of the step alive: detach it")
        if model.table.grad is not None and model.table.grad.any():
            wrong("gradients are left, and the next step would add to them: optimizer.zero_grad()")


def test_clip():
    before, got = 3 * random(7), 3 * random(7)
    grads = [got[:3], got[3:].view(2, 2)]  # they share the memory of `got`
    with becomes((3,), (2, 2), named="two gradients,", into="their norm, a scalar ()"):
        norm = functions.clip(grads, 2.0)
    parts = before.split([3, 4])
    norms = torch.stack([part.norm() for part in parts])
    one_by_one = 2 * torch.cat([F.normalize(part, dim=0) for part in parts])
    together = "all tensors are one vector: its norm is the root of the sum of all squares"
    mistakes = {
        "the gradients have not changed: shrink them in place, with mul_": before,
        "each tensor has its own factor, so the direction changes: take one norm of all": one_by_one,
        "each number is clamped, so the direction changes: multiply all by one factor": before.clamp(-2, 2),
        "the norm becomes 1: multiply by max_norm, too": before / before.norm(),
        f"{together}; the norms of the tensors are added up": 2 * before / norms.sum(),
        f"{together}; this is the norm of the first": 2 * before / norms[0],
        f"{together}; this is the norm of the last": 2 * before / norms[-1],
        f"{together}; this is the largest of their norms": 2 * before / norms.max(),
        f"{together}; the root is missing": 2 * before / before.norm() ** 2,
        f"{together}; these are absolute values": 2 * before / before.abs().sum(),
        f"{together}; this is the largest number": 2 * before / before.abs().max(),
        f"{together}; this is their mean": 2 * before / before.square().mean().sqrt(),
    }
    shrunk = f"the norm is to be 2, in the same direction; this one is {got.norm():.4f}"
    right = F.normalize(before, dim=0) * 2
    compare(got, right, mistakes, f"{shrunk}: multiply by max_norm, divide by the root of the sum of all squares")
    mistakes = {"the norm after clipping is returned: return the one before": right.norm()}
    compare(norm, before.norm(), mistakes, f"the norm was {before.norm():.4f}, and {norm} is returned")
    functions.clip(grads, 1000.0)
    compare(got, right, {}, "gradients with a norm below max_norm change: the factor is 1 at most")
    got.zero_()
    with hint("gradients of 0 have a norm of 0, and it divides"):
        functions.clip(grads, 1.0)
    if got.isnan().any():
        wrong("gradients of 0 become NaN: their norm is 0, and it divides")


def test_orthogonalize():
    a, b, c = 3.4445, -4.7750, 2.0315
    wanted = "X <- a X + b A X + c A A X is wanted"
    mistakes = {  # what becomes of a singular value in a step
        f"{wanted}; A X is taken for A A X": lambda s: a * s + (b + c) * s**3,
        f"{wanted}; the first term is missing": lambda s: b * s**3 + c * s**5,
        f"{wanted}; the last term is missing": lambda s: a * s + b * s**3,
    }
    with becomes((1, 2), named="matrix", into="a matrix (1, 2)"):
        one = functions.orthogonalize(3 * torch.eye(1, 2))  # whose norm is 3, whichever it is
    expect(one, torch.eye(1, 2))
    for sentence, step in mistakes.items():
        value = 1.0
        for _ in range(5):
            value = step(value)
        if math.isclose(one[0, 0], value, rel_tol=0.01):
            wrong(sentence)
    for rows, columns in ((12, 8), (8, 12)):
        U, V = torch.linalg.qr(random(rows, 8)).Q, torch.linalg.qr(random(columns, 8)).Q
        matrix = U * torch.logspace(1, -1.5, 8) @ V.T  # singular values from 10 to 0.03
        given = matrix.clone()
        with becomes(matrix.shape, named="matrix", into=f"a matrix {tuple(matrix.shape)}"):
            got = functions.orthogonalize(given)
        expect(got, matrix)
        if not given.equal(matrix):
            wrong("the matrix that was passed has changed: X = X / norm makes a new one, X /= norm does not")
        if not got.isfinite().all() or got.abs().max() > 100:
            wrong("it explodes: divide by a norm first, so that no singular value is above 1; b, of A X, is negative")
        S = U.T @ got @ V  # (8, 8), diagonal if the answer has the same U and V
        if (S - S.diag().diag()).abs().max() > 0.1:
            wrong("the singular vectors have changed: X X^T is a matrix product; nothing goes by element or by row")
        if S.diag().min() < 0.6 or S.diag().max() > 1.25:
            wrong(f"singular values are {S.diag()}, not 0.6 to 1.25: look at a, b, c, A and the five steps")
    zeros = "a matrix of 0 becomes NaN: its norm is 0, and it divides"
    with hint(zeros):
        got = functions.orthogonalize(torch.zeros(2, 2))
    if got.isnan().any():
        wrong(zeros)
    five = "five steps, with a, b, c and float32, turn a singular value of 1 into 0.6964, and an SVD leaves it 1"
    compare(one[0, 0], torch.tensor(0.69644), {}, f"{five}; this is {one[0, 0]:.4f}")


def test_top_p():
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1], [0.1, 0.15, 0.05, 0.7]]).log()
    given = logits.clone()
    with becomes(logits.shape, named="logits", into="logits (2, 4)"):
        got = functions.top_p(given, 0.7)
    expect(got, logits)

    def only(*rows):
        return logits.where(torch.tensor(rows, dtype=torch.bool), -math.inf)

    right = only([1, 1, 0, 0], [0, 0, 0, 1])
    mistakes = {
        "one token too few is kept: the one that reaches p stays": only([1, 0, 0, 0], [0, 0, 0, 0]),
        "the sum of all rows is taken: each row has its own": only([1, 0, 0, 0], [0, 0, 0, 1]),
        "the least likely tokens are kept: begin with the likeliest": only([0, 1, 1, 1], [1, 1, 1, 1]),
        "the logits stay in sorted order: put each back at its id": only([1, 1, 0, 0], [1, 0, 0, 0]),
        "others become 0, and exp(0) is 1: set them to -inf": right.where(right.isfinite(), 0.0),
    }
    kept = [row.isfinite().nonzero().flatten().tolist() for row in got]
    compare(got, right, mistakes, f"of the two rows the tokens [[0, 1], [3]] are kept, not {kept}")
    if not given.equal(logits):
        wrong("the logits that were passed have changed: make new ones")
    first = only([1, 0, 0, 0], [0, 0, 0, 1])
    compare(functions.top_p(given, 0.01), first, {}, "with a small p the likeliest token alone is kept")
    compare(functions.top_p(given, 1.0), logits, {}, "with p = 1 all tokens are kept")
    if not same(functions.top_p(logits + 3, 0.7), right + 3):
        wrong("logits are no probabilities: take the softmax before you add them up")


def test_cached_attention():
    q, k, v = (random(2, 3, 6, 4).roll(i) for i in range(3))
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    cache = None
    begin = 0
    for n in (3, 2, 1):  # a prompt of three tokens, then two at once, then one
        end = begin + n
        new = [x[:, :, begin:end].clone() for x in (q, k, v)]
        with becomes(*3 * [new[0].shape], named="q, k, v", into=f"outputs (2, 3, {n}, 4) and a cache"):
            answer = functions.cached_attention(*new, cache)
        expect(answer, (None, None))
        got, cache = answer
        expect(cache, (None, None))
        for name, kept, right in (("keys", cache[0], k), ("values", cache[1], v)):
            if kept.shape[2:3] != (end,):
                wrong(f"the cache has {name} {tuple(kept.shape)} after {end} tokens, not (2, 3, {end}, 4)")
            compare(kept, right[:, :, :end], {}, f"the {name} of the cache are not those of all tokens, in their order")
        alone = F.scaled_dot_product_attention(*new, is_causal=True)
        seen = F.scaled_dot_product_attention(new[0], k[:, :, :end], v[:, :, :end])
        early = F.scaled_dot_product_attention(new[0], k[:, :, :end], v[:, :, :end], is_causal=True)
        mistakes = {
            "new tokens do not read the cache: their keys and values are the cached ones and their own": alone,
            "a new token reads later ones: token i of n new ones sees all but the last n - 1 - i keys": seen,
            "row 0 of the mask is token 0: with a cache the first row is the first new token": early,
        }
        compare(got, whole[:, :, begin:end], mistakes, "the outputs are not those of `attention` for all tokens")
        begin = end


def test_generate():
    V, context = 6, 4

    def count(idx):  # (B, T) -> (B, T, V): after each token, the next number is almost certain
        lengths.append(idx.size(1))
        return 50.0 * F.one_hot((idx + 1) % V, V)

    right = [0, 1, 2, 3, 4, 5, 0]
    mistakes = {
        "the logits of the first position are used: those of the last one tell the next token": [0, 1, 1, 1, 1, 2, 2],
        "the model reads the first tokens of a long text: pass the last ones": [0, 1, 2, 3, 4, 4, 4],
        "a place among the sorted logits is no id: topk and sort return the ids, too": [0, 1, 0, 0, 0, 0, 0],
    }
    for temperature in (1.0, 0):
        lengths = []
        sentence = "idx (1, 2) becomes (1, 7), from logits (1, T, 6) of a model that reads up to 4 tokens"
        if temperature == 0:
            sentence = "at temperature 0 take the likeliest token, and do not divide by it"
        with hint(sentence):
            got = functions.generate(count, torch.tensor([[0, 1]]), 5, context, temperature=temperature)
        if torch.is_tensor(got) and got.shape == (1, 5):
            wrong("only the new tokens are returned: return idx with them after it")
        expect(got, torch.tensor([right]))
        if lengths != [2, 3, 4, 4, 4]:
            wrong(f"the model is given {lengths} tokens: append every new one, and pass the last {context}")
        certain = f"the model is almost certain of {right}, this is {got[0].tolist()}"
        compare(got[0].tolist(), right, mistakes, certain + "; is the softmax over the vocabulary, dim=-1?")

    generator = torch.Generator()

    def draw(logits, n, **options):  # logits (B, V), the same after each token -> (B, n)
        idx = torch.zeros(len(logits), 1).long()
        model = lambda idx: logits[:, None].expand(-1, idx.size(1), -1).clone()  # noqa: E731
        return functions.generate(model, idx, n, context, generator=generator, **options)[:, 1:]

    even = draw(torch.zeros(16, V), 50)
    if even.eq(even[:1]).all() and not even.eq(even[:, :1]).all():
        wrong("one draw serves all rows of the batch: draw one for each row")
    if even.eq(even[0, 0]).all():
        wrong("the likeliest token is always taken: draw one with torch.multinomial")
    if even.eq(even[:, :1]).all():
        wrong("every step draws the same: do not make or seed a generator in it, but pass `generator` on")
    if generator.get_state().equal(torch.Generator().get_state()):
        wrong("`generator` is not used: pass it to torch.multinomial")
    if draw(torch.zeros(16, V), 50).equal(even):
        wrong("two calls draw the same: do not seed the generator, whoever passes it does")

    z = torch.tensor([0.2, 0.4, 0.6, 0.8, 1.0, 2.0])
    z = torch.stack([z, z.flip(0) + 0.7])  # (B, V), logits divided by a temperature of 0.5

    def drawn(logits, keep):
        return logits.where(keep, -math.inf).softmax(dim=-1)

    kth = z.topk(3).values[:, 2:]  # (B, 1)
    other = "top_k takes the k-th largest of the batch or of another row: each row has its own, topk(k).values[:, -1:]"
    unequal = "the softmax is over the rows of the batch: dim=-1 is that of the vocabulary"
    kept = z.where(z >= kth, -math.inf)
    cases = {
        "": drawn(z, z >= kth),
        "the likeliest token is always taken: draw one with torch.multinomial": drawn(z, z > kth + 0.9),
        "the logits are not divided by the temperature, before the softmax": drawn(z / 2, z >= kth),
        "the logits are multiplied by the temperature: divide them by it": drawn(z / 4, z >= kth),
        "top_k is not used in each row: logits below its k-th largest become -inf": drawn(z, z > 0),
        "one token too few is kept: the k-th largest stays": drawn(z, z > kth),
        "one token too many is kept: only the k largest stay": drawn(z, z >= z.topk(4).values[:, 3:]),
        "logits below the k-th largest become 0, and exp(0) is 1: set them to -inf": (z * (z >= kth)).softmax(dim=-1),
        "the k smallest logits are kept, and the largest are the likeliest": drawn(z, z < kth),
        "places among the top k are no ids: topk tells the ids, too": F.pad(z.topk(3).values.softmax(dim=-1), (0, 3)),
        other: drawn(z, z >= z.flatten().topk(3).values[-1]),
        unequal: F.normalize(kept.softmax(dim=0).nan_to_num(), p=1, dim=-1),
        "the softmax is missing: torch.multinomial takes probabilities": F.normalize(z * (z >= kth), p=1, dim=-1),
        "the k likeliest are equally likely: keep their probabilities": drawn(0 * z, z >= kth),
    }
    got = draw(z / 2, 1000, temperature=0.5, top_k=3)
    shares = F.one_hot(got, V).float().mean(dim=1)  # (B, V)
    if nearest := min(cases, key=lambda sentence: (cases[sentence] - shares).abs().sum()):
        wrong(nearest)
    with hint("a top_k above V keeps all V tokens: topk takes V at most"):
        got = draw(z, 1000, top_k=100)
    if (F.one_hot(got, V).float().mean(dim=1) - z.softmax(dim=-1)).abs().max() > 0.1:
        wrong("a top_k above V keeps all V tokens, with their probabilities")


def test_LoRALinear():
    r, alpha, x, A, B = 2, 5.0, random(2, 3, 6), random(2, 6), random(4, 2)
    linear = torch.nn.Linear(6, 4)
    base = linear(x).detach()
    with hint("LoRALinear(linear, r, alpha) makes a layer"):
        layer = functions.LoRALinear(linear, r, alpha)
    trained = sorted(name for name, p in layer.named_parameters() if p.requires_grad)
    both = "lora_A and lora_B alone, each an nn.Parameter of the layer: freeze `linear`"
    compare(trained, ["lora_A", "lora_B"], {}, f"{trained} are trained, not {both}")
    if layer.lora_B.any():
        wrong("lora_B starts at 0, so that the layer begins as `linear`; lora_A starts random")
    expect(layer.lora_A.data, A)
    expect(layer.lora_B.data, B)
    with becomes(x.shape, named="x", into="(2, 3, 4), with lora_A (2, 6) and lora_B (4, 2)"):
        begin = layer(x).detach()
    compare(begin, base, {}, "the layer does not begin as `linear` with its bias: scale the bypass alone")
    if layer.lora_A[0].equal(layer.lora_A[1]):
        wrong("the rows of lora_A are equal, learn the same and stay equal, or 0: lora_A starts random")
    layer.lora_A.data, layer.lora_B.data = A, B
    bypass = x @ A.T @ B.T
    mistakes = {
        "the bypass is multiplied by alpha: divide that by r": base + alpha * bypass,
        "the bypass is not scaled: multiply it by alpha / r": base + bypass,
        "the bypass is divided by r: multiply it by alpha, too": base + bypass / r,
        "the bypass is multiplied by r / alpha: it is alpha / r": base + r / alpha * bypass,
        "alpha is divided by the root of r: divide it by r": base + alpha / r**0.5 * bypass,
        "alpha / r is rounded: divide with / and keep the fraction": base + 2 * bypass,
        "the bypass is subtracted: add it": base - alpha / r * bypass,
        "the bypass is alone: add the layer `linear` to it": alpha / r * bypass,
        "lora_A and lora_B do nothing: use them in `forward`, not in `__init__`": base,
        "the bypass has the bias, too: it is added once": base + alpha / r * bypass + linear.bias.detach(),
    }
    compare(layer(x).detach(), base + alpha / r * bypass, mistakes, "the bypass is alpha / r * x A^T B^T")

    leaf = x.clone().requires_grad_()
    out = layer(leaf)
    cut = "leave out no_grad, detach and .data in `forward`"
    if not out.requires_grad:
        wrong(f"no gradient reaches lora_A, lora_B and x: {cut}")
    out.sum().backward()
    ones = torch.ones(6, 4)  # the gradient of the sum, a row for each position
    rights = {"lora_A": alpha / r * (ones @ B).T @ x.view(6, 6), "lora_B": alpha / r * ones.T @ x.view(6, 6) @ A.T}
    for name, right in rights.items():
        grad = getattr(layer, name).grad
        if grad is None:
            wrong(f"no gradient reaches {name}, so it is never trained: {cut}")
        compare(grad, right, {}, f"the gradient of {name} is wrong: {cut}")
    if leaf.grad is None:
        wrong(f"no gradient reaches x, and the layers before this one need it: {cut}")
    through_linear = (ones @ linear.weight.detach()).view(x.shape)
    through_bypass = (alpha / r * ones @ B @ A).view(x.shape)
    lacks = "the gradient of x lacks the part through"
    mistakes = {
        f"{lacks} `linear`, and the layers before this one need it: {cut}": through_bypass,
        f"{lacks} the bypass, and the layers before this one need it: {cut}": through_linear,
    }
    compare(leaf.grad, through_linear + through_bypass, mistakes, f"the gradient of x is wrong: {cut}")
