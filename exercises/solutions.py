"""One answer to each exercise. Open this last: it is the shortest answer, and not how the project does it."""

import math
from collections import Counter
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F


def merge(tokens, pair):
    merged = []
    i = 0
    while i < len(tokens):
        if tuple(tokens[i : i + 2]) == pair:
            merged.append(tokens[i] + tokens[i + 1])
            i += 2
        else:
            merged.append(tokens[i])
            i += 1
    return merged


def train(words, n_merges):
    merges = []
    for _ in range(n_merges):
        counts = Counter(pair for word in words for pair in pairwise(word))
        if not counts:
            break
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        words = [merge(word, best) for word in words]
        merges.append(best)
    return merges


def encode(word, merges):
    tokens = [bytes([byte]) for byte in word.encode()]
    while True:
        found = [pair for pair in merges if pair in pairwise(tokens)]
        if not found:
            return tokens
        tokens = merge(tokens, found[0])


def batch(tokens, starts, T):
    inputs = torch.stack([tokens[start : start + T] for start in starts])
    targets = torch.stack([tokens[start + 1 : start + T + 1] for start in starts])
    return inputs, targets


def attention(q, k, v):
    T = q.size(2)
    scores = q @ k.mT / math.sqrt(q.size(3))
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(dim=-1) @ v


def block(x, weights, n_head):
    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])

    def linear(x, name):
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    B, T, C = x.shape
    parts = linear(norm(x, "ln_1"), "attn.c_attn").split(C, dim=2)
    heads = [part.view(B, T, n_head, C // n_head).transpose(1, 2) for part in parts]
    mean = attention(*heads).transpose(1, 2).reshape(B, T, C)
    x = x + linear(mean, "attn.c_proj")
    return x + linear(F.gelu(linear(norm(x, "ln_2"), "mlp.c_fc"), approximate="tanh"), "mlp.c_proj")


def gpt(idx, weights, n_layer, n_head):
    x = weights["wte.weight"][idx] + weights["wpe.weight"][: idx.size(1)]
    for i in range(n_layer):
        start = f"h.{i}."
        own = {name.removeprefix(start): tensor for name, tensor in weights.items() if name.startswith(start)}
        x = block(x, own, n_head)
    x = F.layer_norm(x, x.shape[-1:], weights["ln_f.weight"], weights["ln_f.bias"])
    return x @ weights["wte.weight"].T


def linear_cross_entropy(x, weight, targets, chunk):
    N = len(x)
    loss = torch.zeros(())
    grad_x = torch.empty_like(x)
    grad_weight = torch.zeros_like(weight)
    for start in range(0, N, chunk):
        rows = slice(start, start + chunk)
        log_p = (x[rows] @ weight.T).log_softmax(dim=-1)
        own = torch.arange(len(log_p)), targets[rows]
        loss -= log_p[own].sum() / N
        dlogits = log_p.exp_()
        dlogits[own] -= 1
        grad_x[rows] = dlogits @ weight / N
        grad_weight += dlogits.T @ x[rows] / N
    return loss, grad_x, grad_weight


def learning_rate(step, max_steps, warmup_steps, max_lr, min_lr):
    if step < warmup_steps:
        return max_lr * step / warmup_steps
    progress = (step - warmup_steps) / (max_steps - warmup_steps)
    return min_lr + (max_lr - min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def adamw(p, grad, m, v, step, lr, beta1, beta2, eps, weight_decay):
    m.mul_(beta1).add_((1 - beta1) * grad)
    v.mul_(beta2).add_((1 - beta2) * grad**2)
    p.mul_(1 - lr * weight_decay)
    m_hat = m / (1 - beta1**step)
    v_hat = v / (1 - beta2**step)
    p.sub_(lr * m_hat / (v_hat.sqrt() + eps))


def training_step(model, optimizer, micro_batches, max_norm):
    total = torch.zeros(())
    for idx, targets in micro_batches:
        loss = model(idx, targets) / len(micro_batches)
        loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return total


def clip(grads, max_norm):
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    for grad in grads:
        grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def orthogonalize(matrix):
    X = matrix / matrix.norm().clamp(min=1e-7)
    for _ in range(5):
        A = X @ X.T
        X = 3.4445 * X - 4.7750 * A @ X + 2.0315 * A @ A @ X
    return X


def top_p(logits, p):
    ordered, ids = logits.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities  # of all likelier tokens
    ordered = ordered.masked_fill(before >= p, -math.inf)
    return torch.empty_like(logits).scatter(-1, ids, ordered)


def cached_attention(q, k, v, cache):
    if cache is not None:
        k = torch.cat([cache[0], k], dim=2)
        v = torch.cat([cache[1], v], dim=2)
    n_new, n_all = q.size(2), k.size(2)
    future = torch.ones(n_new, n_all, dtype=torch.bool).triu(n_all - n_new + 1)
    scores = q @ k.mT / math.sqrt(q.size(3))
    return scores.masked_fill(future, -math.inf).softmax(dim=-1) @ v, (k, v)


def generate(model, idx, max_new_tokens, context, temperature=1.0, top_k=None, generator=None):
    for _ in range(max_new_tokens):
        logits = model(idx[:, -context:])[:, -1]
        if temperature == 0:
            new = logits.argmax(dim=-1, keepdim=True)
        else:
            logits = logits / temperature
            if top_k is not None:
                kth = logits.topk(min(top_k, logits.size(1))).values[:, -1:]
                logits = logits.masked_fill(logits < kth, -math.inf)
            new = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
        idx = torch.cat([idx, new], dim=1)
    return idx


class LoRALinear(nn.Module):
    def __init__(self, linear, r, alpha):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.scale = alpha / r
        self.lora_A = nn.Parameter(torch.randn(r, linear.in_features) / math.sqrt(linear.in_features))
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, r))

    def forward(self, x):
        return self.linear(x) + self.scale * x @ self.lora_A.T @ self.lora_B.T
