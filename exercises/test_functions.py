"""Compares functions.py with libraries and formulas; recognizes common mistakes and says what to look at."""

import math
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


def random(*shape) -> torch.Tensor:  # the same numbers in each run
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


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
    repeated = {"a a a becomes aa a: go from left to right": [a, aa, b]}
    apart = {
        "after a pair, continue two tokens further: its second token is in it": [ab, b, ab, b, a],
        "the last token is lost": [ab, ab],
        "only the first pair is joined: continue to the end of the list": [ab, a, b, a],
    }
    order = "b a is not the pair (a, b): the order counts"
    concatenated = "(ab, a) is not the pair (a, ba), although both make aba: compare the two tokens"
    cases = [
        ([a, b, a, b, a], (a, b), [ab, ab, a], apart),
        ([a, a, a, b], (a, a), [aa, a, b], repeated),
        ([b, a], (a, b), [b, a], {order: [b"ba"]}),
        ([ab, a], (a, b"ba"), [ab, a], {concatenated: [b"aba"]}),
        ([], (a, b), [], {}),
    ]
    for tokens, pair, right, mistakes in cases:
        given = list(tokens)
        got = functions.merge(given, pair)
        compare(got, right, mistakes, f"{tokens} with {pair} becomes {right}, this is {got}")
        if given != tokens:
            wrong("the list that was passed has changed: build a new one")


def test_encode():
    h, e, n, t = b"h", b"e", b"n", b"t"
    twice = {
        "the latest merge is done first: the one with the smallest index in `merges` comes first": [h, b"en", h, b"en"],
        "encoding ends at a merge that the word does not have: go on to the next one": [h, e, n, h, e, n],
    }
    order = {
        "only one merge is done: repeat, with the new tokens, until no neighbours are in `merges`": [t, b"he", n],
        "the leftmost pair is joined first: join the one that is earliest in `merges`": [b"th", e, n],
        "the longest token is taken first: only the order of `merges` counts": [b"the", n],
    }
    cases = [
        ("henhen", [(t, h), (h, e), (e, n)], [b"he", n, b"he", n], twice),
        ("then", [(h, e), (t, h), (b"he", n), (t, b"he")], [t, b"hen"], order),
        ("é", [], [b"\xc3", b"\xa9"], {}),
    ]
    for word, merges, right, mistakes in cases:
        got = functions.encode(word, merges)
        compare(got, right, mistakes, f"{word!r} with {merges} becomes {right}, this is {got}")


def test_attention():
    q, k, v = (random(2, 3, 5, 16).roll(i) for i in range(3))  # T = 5, D = 16
    with Watch() as watch:
        got = functions.attention(q, k, v)
    expect(got, q)
    if "scaled_dot_product" in watch.names:
        wrong("scaled_dot_product_attention is called: write it with products, a mask and a softmax")
    if got[:, :, 0].isnan().any():
        wrong("row 0 is NaN, as all of its scores are masked: a token looks at itself, too")
    changed = torch.cat([v[:, :, :-1], v[:, :, -1:] + 1], dim=2)  # the last token, which only the last row may see
    ahead = "row t looks at tokens after t: set their scores, but not its own, to -inf before the softmax"
    compare(functions.attention(q, k, changed)[:, :, :-1], got[:, :, :-1], {}, ahead)
    sums = "the weights of a row do not add up to 1: mask before the softmax, and take it over the last dimension"
    ones = torch.ones_like(v)
    compare(functions.attention(q, k, ones), ones, {}, sums)
    sdpa = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    mistakes = {"the scores are not divided by sqrt(D)": sdpa(scale=1.0), "they are divided by D": sdpa(scale=1 / 16)}
    compare(got, sdpa(), mistakes, "row t is the mean of v[0] .. v[t], weighted by softmax(q[t] @ k.T / sqrt(D))")


def test_linear_cross_entropy():
    N, C, V, chunk = 66, 3, 100, 4  # the last chunk has 2 positions
    x, weight, targets = random(N, C), random(V, C), torch.arange(N) * 7 % V
    with Watch() as watch:
        answer = functions.linear_cross_entropy(x, weight, targets, chunk)
    expect(answer, (None, None, None))
    logits = (x @ weight.T).requires_grad_()
    losses = F.cross_entropy(logits, targets, reduction="none")  # (N,)
    losses.mean().backward()
    mean_of_means = sum(part.mean() for part in losses.split(chunk)) / 17
    mistakes = {
        "the loss is a sum over positions: divide it by N": losses.sum(),
        "the last, shorter chunk is left out": losses[:64].sum() / N,
        "the shorter chunk counts as much as the others: add up sums, then divide by N": mean_of_means,
    }
    compare(answer[0], losses.mean(), mistakes, f"the loss is {losses.mean():.4f}, this is {answer[0]}")
    mistakes = {"one_hot(target) is missing: subtract it from softmax(logits)": logits.softmax(-1) @ weight / N}
    compare(answer[1], logits.grad @ weight, mistakes, "grad_x is (softmax(logits) - one_hot(target)) @ weight / N")
    mistakes = {"grad_weight is that of the last chunk: add up all chunks": logits.grad[64:].T @ x[64:]}
    compare(answer[2], logits.grad.T @ x, mistakes, "grad_weight is (softmax(logits) - one_hot(target)).T @ x / N")
    if watch.most >= 4 * N * V:
        wrong(f"N x V numbers are kept, {watch.most} bytes: let go of a chunk's logits and of autograd's graph of them")
    if not functions.linear_cross_entropy(1000 * x, weight, targets, chunk)[0].isfinite():
        wrong("exp of large logits overflows: log_softmax and logsumexp subtract the largest logit first")


def test_learning_rate():
    S, W, high, low = 12, 4, 1.0, 0.1
    rates = [functions.learning_rate(step, S, W, high, low) for step in range(1, S + 1)]
    rates, steps = torch.tensor([float(rate) for rate in rates]), torch.arange(1, S + 1)
    height = 0.5 * (1 + torch.cos(math.pi * (steps - W).clamp(min=0) / (S - W)))
    right = (low + (high - low) * height) * (steps / W).clamp(max=1)
    line = "the warmup is a line, 0 at step 0 and max_lr at step warmup_steps"
    compare(rates[:W], right[:W], {}, f"{line}: {right[:W]}, not {rates[:W]}")
    cosine = "the rate jumps, or is not half a cosine from max_lr at step warmup_steps to min_lr at step max_steps"
    compare(rates[W:], right[W:], {}, f"{cosine}: {right[W:]}, not {rates[W:]}")


def test_clip():
    before, got = 3 * random(7), 3 * random(7)
    grads = [got[:3], got[3:].view(2, 2)]  # they share the memory of `got`
    norm = functions.clip(grads, 2.0)
    one_by_one = 2 * torch.cat([F.normalize(part, dim=0) for part in before.split([3, 4])])
    mistakes = {
        "the gradients have not changed: shrink them in place, with mul_": before,
        "each tensor has its own factor, so the direction changes: take one norm of all": one_by_one,
        "each number is clamped, so the direction changes: multiply all by one factor": before.clamp(-2, 2),
    }
    shrunk = f"the norm is to be 2, in the same direction; this one is {got.norm():.4f}"
    right = F.normalize(before, dim=0) * 2
    compare(got, right, mistakes, f"{shrunk}: multiply by max_norm, divide by the root of the sum of all squares")
    mistakes = {"the norm after clipping is returned: return the one before": right.norm()}
    compare(norm, before.norm(), mistakes, f"the norm was {before.norm():.4f}, and {norm} is returned")
    functions.clip(grads, 1000.0)
    compare(got, right, {}, "gradients with a norm below max_norm change: the factor is 1 at most")
    got.zero_()
    functions.clip(grads, 1.0)
    if got.isnan().any():
        wrong("gradients of 0 become NaN: their norm is 0, and it divides")


def test_orthogonalize():
    for rows, columns in ((12, 8), (8, 12)):
        U, V = torch.linalg.qr(random(rows, 8)).Q, torch.linalg.qr(random(columns, 8)).Q
        matrix = U * torch.logspace(1, -1.5, 8) @ V.T  # singular values from 10 to 0.03
        got = functions.orthogonalize(matrix.clone())
        expect(got, matrix)
        if not got.isfinite().all():
            wrong("it explodes: divide by a norm first, so that no singular value is above 1; b is negative")
        S = U.T @ got @ V  # (8, 8), diagonal if the answer has the same U and V
        if (S - S.diag().diag()).abs().max() > 0.1:
            wrong("the singular vectors have changed: X X^T is a matrix product; nothing goes by element or by row")
        if S.diag().min() < 0.6 or S.diag().max() > 1.25:
            wrong(f"singular values are {S.diag()}, not 0.6 to 1.25: look at a, b, c and the five steps")
    if functions.orthogonalize(torch.zeros(2, 2)).isnan().any():
        wrong("a matrix of 0 becomes NaN: its norm is 0, and it divides")
    got = functions.orthogonalize(3 * torch.eye(1, 2))[0, 0]  # whose norm is 3, whichever it is
    five = "five steps, with a, b, c and float32, turn a singular value of 1 into 0.6964, and an SVD leaves it 1"
    compare(got, torch.tensor(0.69644), {}, f"{five}; this is {got:.4f}")


def test_generate():
    V, context = 6, 4

    def count(idx):  # (B, T) -> (B, T, V): after each token, the next number is almost certain
        lengths.append(idx.size(1))
        return 50.0 * F.one_hot((idx + 1) % V, V)

    right = [0, 1, 2, 3, 4, 5, 0]
    mistakes = {
        "the logits of the first position are used: those of the last one tell the next token": [0, 1, 1, 1, 1, 2, 2],
        "the model reads the first tokens of a long text: pass the last ones": [0, 1, 2, 3, 4, 4, 4],
    }
    for temperature in (1.0, 0):
        lengths = []
        got = functions.generate(count, torch.tensor([[0, 1]]), 5, context, temperature=temperature)
        expect(got, torch.tensor([right]))
        if lengths != [2, 3, 4, 4, 4]:
            wrong(f"the model is given {lengths} tokens: append every new one, and pass the last {context}")
        compare(got[0].tolist(), right, mistakes, f"the model is almost certain of {right}, this is {got[0].tolist()}")

    z = torch.tensor([0.2, 0.4, 0.6, 0.8, 1.0, 2.0])
    z = torch.stack([z, z.flip(0) + 0.7])  # (B, V), logits divided by a temperature of 0.5
    generator = torch.Generator()
    options = dict(context=context, temperature=0.5, top_k=3, generator=generator)
    idx = torch.zeros(2, 1).long()
    got = functions.generate(lambda idx: (z / 2)[:, None].expand(-1, idx.size(1), -1), idx, 1000, **options)
    if got[0].equal(got[1]):
        wrong("one draw serves all rows of the batch: draw one for each row")
    shares = F.one_hot(got[:, 1:], V).float().mean(dim=1)  # (B, V)

    def drawn(logits, keep):
        return logits.where(keep, -math.inf).softmax(dim=-1)

    kth = z.topk(3).values[:, 2:]  # (B, 1)
    other = "top_k takes the k-th largest of the batch or of another row: each row has its own, topk(k).values[:, -1:]"
    cases = {
        "": drawn(z, z >= kth),
        "the likeliest token is always taken: draw one with torch.multinomial": drawn(z, z > kth + 0.9),
        "the logits are not divided by the temperature, before the softmax": drawn(z / 2, z >= kth),
        "the logits are multiplied by the temperature: divide them by it": drawn(z / 4, z >= kth),
        "top_k is not used in each row: logits below its k-th largest become -inf": drawn(z, z > 0),
        "one token too few is kept: the k-th largest stays": drawn(z, z > kth),
        "logits below the k-th largest become 0, and exp(0) is 1: set them to -inf": (z * (z >= kth)).softmax(dim=-1),
        "the k smallest logits are kept, and the largest are the likeliest": drawn(z, z < kth),
        "places among the top k are no ids: topk tells the ids, too": F.pad(z.topk(3).values.softmax(dim=-1), (0, 3)),
        other: drawn(z, z >= z.flatten().topk(3).values[-1]),
    }
    if nearest := min(cases, key=lambda sentence: (cases[sentence] - shares).abs().sum()):
        wrong(nearest)
    if generator.get_state().equal(torch.Generator().get_state()):
        wrong("`generator` is not used: pass it to torch.multinomial")


def test_LoRALinear():
    r, alpha, x, A, B = 2, 5.0, random(2, 3, 6), random(2, 6), random(4, 2)
    linear = torch.nn.Linear(6, 4)
    base = linear(x).detach()
    layer = functions.LoRALinear(linear, r, alpha)
    trained = sorted(name for name, p in layer.named_parameters() if p.requires_grad)
    compare(trained, ["lora_A", "lora_B"], {}, f"{trained} are trained, not lora_A and lora_B alone: freeze `linear`")
    if layer.lora_B.any():
        wrong("lora_B starts at 0, so that the layer begins as `linear`; lora_A starts random")
    compare(layer(x).detach(), base, {}, "the layer does not begin as `linear` with its bias: scale the bypass alone")
    if layer.lora_A[0].equal(layer.lora_A[1]):
        wrong("the rows of lora_A are equal, learn the same and stay equal, or 0: lora_A starts random")
    expect(layer.lora_A.data, A)
    expect(layer.lora_B.data, B)
    layer.lora_A.data, layer.lora_B.data = A, B
    bypass = x @ A.T @ B.T
    mistakes = {
        "the bypass is multiplied by alpha: divide that by r": base + alpha * bypass,
        "the bypass is not scaled: multiply it by alpha / r": base + bypass,
        "alpha / r is rounded: divide with / and keep the fraction": base + 2 * bypass,
        "lora_A and lora_B do nothing: use them in `forward`, not in `__init__`": base,
    }
    compare(layer(x).detach(), base + alpha / r * bypass, mistakes, "the bypass is alpha / r * x A^T B^T")
