"""Compares functions.py with libraries and formulas; recognizes common mistakes and says what to look at."""

import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

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


def test_merge():
    a, b, aa, ab = b"a", b"b", b"aa", b"ab"
    repeated = {"a a a becomes aa a: go from left to right": [a, aa, b]}
    apart = {
        "after a pair, continue two tokens further: its second token is in it": [ab, b, ab, b, a],
        "the last token is lost": [ab, ab],
        "only the first pair is joined: continue to the end of the list": [ab, a, b, a],
    }
    cases = [([a, b, a, b, a], (a, b), [ab, ab, a], apart), ([a, a, a, b], (a, a), [aa, a, b], repeated)]
    for tokens, pair, right, mistakes in [*cases, ([], (a, b), [], {})]:
        given = list(tokens)
        got = functions.merge(given, pair)
        compare(got, right, mistakes, f"{tokens} with {pair} becomes {right}, this is {got}")
        if given != tokens:
            wrong("the list that was passed has changed: build a new one")


def test_encode():
    h, e, n, t = b"h", b"e", b"n", b"t"
    latest = {"the latest merge is done first: the one with the smallest index in `merges` comes first": [h, b"en"]}
    order = {
        "only one merge is done: repeat until no neighbours are in `merges`": [t, b"he", n],
        "the leftmost pair is joined first: join the one that is earliest in `merges`": [b"th", e, n],
        "the longest token is taken first: only the order of `merges` counts": [b"the", n],
    }
    cases = [
        ("hen", [(h, e), (e, n)], [b"he", n], latest),
        ("then", [(h, e), (t, h), (b"he", n), (t, b"he")], [t, b"hen"], order),
        ("é", [], [b"\xc3", b"\xa9"], {}),
    ]
    for word, merges, right, mistakes in cases:
        got = functions.encode(word, merges)
        compare(got, right, mistakes, f"{word!r} with {merges} becomes {right}, this is {got}")


def test_attention():
    q, k, v = (random(2, 3, 5, 16).roll(i) for i in range(3))  # T = 5, D = 16
    got = functions.attention(q, k, v)
    expect(got, q)
    if got[:, :, 0].isnan().any():
        wrong("row 0 is NaN, as all of its scores are masked: a token looks at itself, too")
    changed = torch.cat([v[:, :, :-1], v[:, :, -1:] + 1], dim=2)  # the last token, which only the last row may see
    ahead = "row t looks at tokens after t: set their scores to -inf before the softmax"
    compare(functions.attention(q, k, changed)[:, :, :-1], got[:, :, :-1], {}, ahead)
    sums = "the weights of a row do not add up to 1: mask before the softmax, and take it over the last dimension"
    compare(functions.attention(q, k, torch.ones_like(v)), torch.ones_like(v), {}, sums)
    sdpa = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    mistakes = {"the scores are not divided by sqrt(D)": sdpa(scale=1.0), "they are divided by D": sdpa(scale=1 / 16)}
    compare(got, sdpa(), mistakes, "row t is the mean of v[0] .. v[t], weighted by softmax(q[t] @ k.T / sqrt(D))")


class Largest(TorchFunctionMode):  # the size of the largest tensor that PyTorch makes meanwhile
    numbers = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.numbers = max(self.numbers, made.numel() if torch.is_tensor(made) else 0)
        return made


def test_linear_cross_entropy():
    N, C, V, chunk = 10, 3, 30, 4  # the last chunk has 2 positions
    x, weight, targets = random(N, C), random(V, C), torch.arange(N) * 7 % V
    with Largest() as largest:
        answer = functions.linear_cross_entropy(x, weight, targets, chunk)
    expect(answer, (None, None, None))
    logits = (x @ weight.T).requires_grad_()
    losses = F.cross_entropy(logits, targets, reduction="none")  # (N,)
    losses.mean().backward()
    mean_of_means = sum(part.mean() for part in losses.split(chunk)) / 3
    mistakes = {
        "the loss is a sum over positions: divide it by N": losses.sum(),
        "the last, shorter chunk is left out": losses[:8].sum() / N,
        "the shorter chunk counts as much as the others: add up sums, then divide by N": mean_of_means,
    }
    compare(answer[0], losses.mean(), mistakes, f"the loss is {losses.mean():.4f}, this is {answer[0]}")
    mistakes = {"one_hot(target) is missing: subtract it from softmax(logits)": logits.softmax(-1) @ weight / N}
    compare(answer[1], logits.grad @ weight, mistakes, "grad_x is (softmax(logits) - one_hot(target)) @ weight / N")
    mistakes = {"grad_weight is that of the last chunk: add up all chunks": logits.grad[8:].T @ x[8:]}
    compare(answer[2], logits.grad.T @ x, mistakes, "grad_weight is (softmax(logits) - one_hot(target)).T @ x / N")
    if largest.numbers >= N * V:
        wrong(f"a tensor of {largest.numbers} numbers was made, as many as N x V: compute the logits chunk by chunk")
    if not functions.linear_cross_entropy(1000 * x, weight, targets, chunk)[0].isfinite():
        wrong("exp of large logits overflows: log_softmax and logsumexp subtract the largest logit first")


def test_learning_rate():
    S, W, high, low = 12, 4, 1.0, 0.1
    rates = [functions.learning_rate(step, S, W, high, low) for step in range(1, S + 1)]
    expect(rates[0], 0.25)
    rates, steps = torch.tensor(rates), torch.arange(1, S + 1)
    line = steps[:W] / W
    mistakes = {"step 1 has a rate of 0 and changes nothing: steps count from 1": (steps[:W] - 1) / W}
    compare(rates[:W], line, mistakes, f"the warmup is {line.tolist()}, this is {rates[:W].tolist()}")
    height, early = (0.5 * (1 + torch.cos(math.pi * p)) for p in ((steps[W:] - W) / (S - W), steps[W:] / S))
    right = low + (high - low) * height
    mistakes = {
        "the cosine ends at 0: let it go from max_lr to min_lr": high * height,
        "the cosine is cut at min_lr: let it go from max_lr to min_lr": (high * height).clamp(min=low),
        "the rate jumps after the warmup: the cosine begins at warmup_steps": low + (high - low) * early,
    }
    compare(rates[W:], right, mistakes, f"after the warmup the rates are {right.tolist()}, not {rates[W:].tolist()}")


def test_clip():
    before, got, param = 3 * random(7), 3 * random(7), torch.zeros(7)
    grads = [got[:3], got[3:].view(2, 2)]  # they share the memory of `got`
    norm = functions.clip(grads, 1.0)
    param.grad = before.clone()
    right_norm = torch.nn.utils.clip_grad_norm_([param], 1.0)
    one_by_one = torch.cat([before[:3] / before[:3].norm(), before[3:] / before[3:].norm()])
    mistakes = {
        "the gradients have not changed: shrink them in place, with mul_": before,
        "each tensor has its own factor, so the direction changes: take one norm of all": one_by_one,
        "each number is clamped, so the direction changes: multiply all by one factor": before.clamp(-1, 1),
    }
    compare(got, param.grad, mistakes, f"the norm is to be 1, in the same direction; this one is {got.norm():.4f}")
    mistakes = {"the norm after clipping is returned: return the one before": param.grad.norm()}
    compare(norm, right_norm, mistakes, f"the norm was {right_norm:.4f}, and {norm} is returned")
    functions.clip(grads, 1000.0)
    compare(got, param.grad, {}, "gradients with a norm below max_norm change: the factor is 1 at most")


def test_orthogonalize():
    for rows, columns in ((12, 8), (8, 12)):
        U, V = torch.linalg.qr(random(rows, 8)).Q, torch.linalg.qr(random(columns, 8)).Q
        matrix = U * torch.logspace(1, -1.5, 8) @ V.T  # singular values from 10 to 0.03
        got = functions.orthogonalize(matrix.clone())
        expect(got, matrix)
        if not got.isfinite().all():
            wrong("it explodes: divide by the norm first, so that no singular value is above 1")
        S = U.T @ got @ V  # (8, 8), diagonal if the answer has the same U and V
        if (S - S.diag().diag()).abs().max() > 0.1:
            wrong("the singular vectors have changed: X X^T is a matrix product; nothing goes by element or by row")
        if S.diag().min() < 0.6 or S.diag().max() > 1.25:
            wrong(f"singular values are {S.diag().tolist()}, not 0.6 to 1.25: look at a, b, c and the five steps")
    if functions.orthogonalize(torch.zeros(2, 2)).isnan().any():
        wrong("a matrix of 0 becomes NaN: its norm is 0, and it divides")


def test_generate():
    V, context = 6, 4

    def count(idx):  # (B, T) -> (B, T, V): after each token, the next number is almost certain
        if idx.size(1) > context:
            wrong("the model is given more tokens than its context: pass the last ones")
        return 50.0 * F.one_hot((idx + 1) % V, V)

    right = [0, 1, 2, 3, 4, 5, 0]
    mistakes = {
        "the logits of the first position are used: those of the last one tell the next token": [0, 1, 1, 1, 1, 2, 2],
        "the model always reads the prompt: append each token before the next": [0, 1, 2, 2, 2, 2, 2],
        "the model reads the first tokens of a long text: pass the last ones": [0, 1, 2, 3, 4, 4, 4],
    }
    for temperature in (1.0, 0):
        got = functions.generate(count, torch.tensor([[0, 1]]), 5, context, temperature=temperature)
        expect(got, torch.tensor([right]))
        compare(got[0].tolist(), right, mistakes, f"the model is almost certain of {right}, this is {got[0].tolist()}")

    logits = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 1.0])  # (V,): the last token is the likeliest
    prompts, generator, unused = torch.zeros(40000, 1).long(), torch.Generator(), torch.Generator().get_state()
    options = dict(context=context, temperature=0.5, top_k=3, generator=generator)
    got = functions.generate(lambda idx: logits.expand(*idx.shape, V), prompts, 1, **options)
    cases = {
        "": (0.5, 3),
        "the likeliest token is always taken: draw one with torch.multinomial": (0.5, 1),
        "the logits are not divided by the temperature": (1.0, 3),
        "the logits are multiplied by the temperature: divide them by it": (2.0, 3),
        "top_k is not used: logits below the k-th largest become -inf": (0.5, V),
        "one token too few is kept: the k-th largest stays": (0.5, 2),
    }
    share = (got[:, 1] == V - 1).float().mean()
    if not share:
        wrong("other tokens than the likeliest are drawn: places among the top k are not ids")
    shares = {sentence: (logits[-k:] / t).softmax(-1)[-1] for sentence, (t, k) in cases.items()}
    if nearest := min(cases, key=lambda sentence: abs(shares[sentence] - share)):
        wrong(nearest)
    if generator.get_state().equal(unused):
        wrong("`generator` is not used: pass it to torch.multinomial")


def test_LoRALinear():
    r, alpha, x, A, B = 2, 6.0, random(2, 3, 6), random(2, 6), random(4, 2)
    linear = torch.nn.Linear(6, 4)
    base = linear(x).detach()
    layer = functions.LoRALinear(linear, r, alpha)
    mistakes = {"the bias is missing": base - linear.bias.detach()}
    compare(layer(x).detach(), base, mistakes, "the layer does not begin as `linear`: lora_B starts at 0")
    trained = sorted(name for name, p in layer.named_parameters() if p.requires_grad)
    compare(trained, ["lora_A", "lora_B"], {}, f"{trained} are trained, not lora_A and lora_B alone: freeze `linear`")
    layer(x).square().sum().backward()
    if not layer.lora_B.grad.any():
        wrong("both gradients are 0, and stay so, because lora_A and lora_B are 0: lora_A starts random")
    layer.load_state_dict({"lora_A": A, "lora_B": B}, strict=False)
    bypass = x @ A.T @ B.T
    mistakes = {
        "the bypass is multiplied by alpha: divide that by r": base + alpha * bypass,
        "the bypass is not scaled: multiply it by alpha / r": base + bypass,
    }
    compare(layer(x).detach(), base + alpha / r * bypass, mistakes, "the bypass is alpha / r * x A^T B^T")
