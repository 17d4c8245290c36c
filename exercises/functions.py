"""Sixteen functions and a class of this project for you to write, as README.md says.

Tensors are float32, ids and targets int64. Shapes: B batch, H heads, T tokens, D channels of a head, C channels, V
tokens of the vocabulary, N positions.
"""

from torch import Tensor, nn


def merge(tokens: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    """A new list, in which the first token of `pair` and the second after it become one, from left to right.

    With the pair (t, h), the tokens t h e become th e. Training and encoding repeat this step (Sennrich et al. 2016,
    "Neural machine translation of rare words with subword units", section 3.2).
    """
    raise NotImplementedError


def train(words: list[list[bytes]], n_merges: int) -> list[tuple[bytes, bytes]]:
    """Learn merges from words, each a list of single bytes: the most frequent pair of neighbours becomes a token.

    Repeat with the new tokens until there are `n_merges`, or no neighbours are left. No pair crosses two words. Of
    equally frequent pairs take the smallest, by Python's order of pairs (Sennrich et al. 2016, algorithm 1).
    """
    raise NotImplementedError


def encode(word: str, merges: list[tuple[bytes, bytes]]) -> list[bytes]:
    """The tokens of one word: begin with the single bytes of its UTF-8, and join until no neighbours are in `merges`.

    `merges` is in the order in which training found them; each time, join the earliest of those that are left. (h, e)
    and (t, he) turn `then` into the, n (Radford et al. 2019, "Language models are unsupervised multitask learners").
    """
    raise NotImplementedError


def batch(tokens: Tensor, starts: list[int], T: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each (B, T), from one long row of tokens (N,): a row of the batch for each start.

    A row's inputs are T tokens from its start; the target of a token is the one that comes after it.
    """
    raise NotImplementedError


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention, softmax(Q K^T / sqrt(D)) V, from q, k, v (B, H, T, D); returns (B, H, T, D).

    Row t is a mean of rows 0 to t of v, weighted by the softmax of its scores (Vaswani et al. 2017, "Attention is all
    you need", section 3.2.1). Write it with products and a mask; scaled_dot_product_attention is what checks it.
    """
    raise NotImplementedError


def block(x: Tensor, weights: dict[str, Tensor], n_head: int) -> Tensor:
    """A block of GPT-2, from x (B, T, C) to (B, T, C): attention, then an MLP, each added to what it reads by a norm.

    `weights` has ln_1, attn.c_attn, attn.c_proj, ln_2, mlp.c_fc and mlp.c_proj, each with .weight and .bias; the weight
    of a matrix is (out, in), and c_attn's rows are those of all queries, all keys, all values. LayerNorm has an epsilon
    of 1e-5, GELU is the tanh form (Radford et al. 2019, section 2.3). Use F.layer_norm, F.linear, F.gelu, `attention`.
    """
    raise NotImplementedError


def gpt(idx: Tensor, weights: dict[str, Tensor], n_layer: int, n_head: int) -> Tensor:
    """GPT-2: logits (B, T, V) of the tokens idx (B, T).

    `weights` has wte.weight (V, C), which is the head, too, wpe.weight (N, C), ln_f.weight and .bias, and the names of
    `block` after h.0., h.1., ...
    """
    raise NotImplementedError


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """The mean over N positions of -log softmax(x @ weight.T)[target], and its gradients: (loss, grad_x, grad_weight).

    From x (N, C), weight (V, C) and targets (N,), with the logits of only `chunk` positions at a time: N x V
    numbers are never in memory at once, not even in autograd's graph (Hsu et al. 2024, "Liger Kernel"). N need not be a
    multiple of `chunk`. The gradient of the sum of losses by the logits is softmax(logits) - one_hot(target).
    """
    raise NotImplementedError


def learning_rate(step: int, max_steps: int, warmup_steps: int, max_lr: float, min_lr: float) -> float:
    """The learning rate of step 1, 2, ... max_steps: a line that starts from 0 at step 0, then half a cosine.

    It is max_lr at step `warmup_steps`, which may be 0, and min_lr at step `max_steps` (Loshchilov and Hutter 2017,
    "SGDR").
    """
    raise NotImplementedError


def adamw(p: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: int, lr, beta1, beta2, eps, weight_decay) -> None:
    """Step 1, 2, ... of AdamW: changes the weights p and the moments m and v in place (Loshchilov and Hutter 2019,
    "Decoupled weight decay regularization", algorithm 2, with a schedule of lr).

    m and v are the running means of the gradient and of its square, and begin at 0; divide them by 1 - beta^step. p
    decays by lr * weight_decay of itself, then moves by lr * m / (sqrt(v) + eps).
    """
    raise NotImplementedError


def training_step(model, optimizer, micro_batches: list[tuple[Tensor, Tensor]], max_norm: float) -> Tensor:
    """One optimizer step on all micro-batches together; returns the mean loss, a scalar without a graph.

    model(idx, targets) is the mean loss of one, and all have one size. Clip the norm of the whole gradient to max_norm
    (by PyTorch, or by `clip` once you have written it), and leave no gradients to the next step. It is the step that
    one large batch would take.
    """
    raise NotImplementedError


def clip(grads: list[Tensor], max_norm: float) -> Tensor:
    """Shrink the gradients, in place, to a norm of max_norm at most; return the norm that they had, a scalar.

    It is the norm of all numbers of all tensors as one vector, and all shrink by one factor (Pascanu et al. 2013, "On
    the difficulty of training recurrent neural networks", algorithm 1).
    """
    raise NotImplementedError


def orthogonalize(matrix: Tensor) -> Tensor:
    """Nearly U V^T, for a matrix (rows, columns) = U S V^T, by products of matrices alone: the step that Muon takes.

    Divide by a norm, so that all singular values are at most 1, but leave `matrix` as it is; then do five times
    X <- a X + b A X + c A A X with A = X X^T and (a, b, c) = (3.4445, -4.7750, 2.0315) (Jordan 2024, "Muon: an
    optimizer for hidden layers").
    """
    raise NotImplementedError


def top_p(logits: Tensor, p: float) -> Tensor:
    """Logits (B, V) in which only the likeliest tokens of each row are left, and all others are -inf.

    Keep the fewest whose probabilities add up to p or more, so always the likeliest (Holtzman et al. 2020, "The curious
    case of neural text degeneration", section 3.1).
    """
    raise NotImplementedError


def cached_attention(q: Tensor, k: Tensor, v: Tensor, cache: tuple[Tensor, Tensor] | None):
    """Causal attention of new tokens, q, k, v (B, H, n, D), to themselves and to earlier ones.

    `cache` has the keys and values (B, H, t, D) of the t earlier tokens, or is None. Returns the outputs (B, H, n, D)
    and the cache for the next call, with the new keys and values at its end. Fed token by token, it computes what
    `attention` computes of all tokens at once.
    """
    raise NotImplementedError


def generate(model, idx: Tensor, max_new_tokens: int, context: int, temperature=1.0, top_k=None, generator=None):
    """Sample tokens after idx (B, T), with torch.multinomial and `generator`; returns (B, T + max_new_tokens).

    model(idx) turns up to `context` tokens (B, T) into logits (B, T, V), which the temperature divides; at 0, take the
    likeliest token. With `top_k`, sample from that many, or from all V if it is larger (Fan et al. 2018, "Hierarchical
    neural story generation").
    """
    raise NotImplementedError


class LoRALinear(nn.Module):
    """x W^T + b + alpha / r * x A^T B^T: the frozen W and b of `linear`, and a bypass of rank r that is trained.

    `lora_A` (r, in) starts random and `lora_B` (out, r) at zero, both nn.Parameter, so that the layer begins as
    `linear` (Hu et al. 2021, "LoRA: low-rank adaptation of large language models", section 4.1).
    """

    def __init__(self, linear: nn.Linear, r: int, alpha: float):
        super().__init__()
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        raise NotImplementedError
