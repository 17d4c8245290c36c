"""GPT-2 (Radford et al. 2019): the model, its loss and plain generation.

- pre-norm blocks, learned positions, tanh GELU, biases everywhere but in the head, which is tied to `wte`
- fused QKV, `scaled_dot_product_attention`; `attention="naive"` spells the same thing out
- a loss that never holds the logits of a large batch at once (parts/loss.py)

This file knows nothing of ranks, optimizers, training loops, data or tokenizers; parts/huggingface.py has its files.

    model = GPT(GPTConfig(n_layer=6, n_head=6, n_embd=384))
    model = GPT.from_pretrained("gpt2")              # the hub's weights (parts/huggingface.py)
    logits = model(idx)                              # idx (B, T) -> logits (B, T, vocab_size)
    loss = model(idx, targets)                       # mean cross-entropy in nats
    idx = model.generate(idx, 100, top_k=50)         # parts/generation.py does the same with a KV cache

Shapes in comments: B batch, T tokens, C n_embd, H n_head, D = C / H, V vocab_size, S tokens that attention looks at.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F

from parts.loss import linear_cross_entropy


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a model. Fields you add, with defaults, are also saved. Raises ValueError for impossible sizes."""

    n_positions: int = 1024  # the longest context; a training step may use a shorter one
    vocab_size: int = 50257
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    attention: str = "flash"  # flash: scaled_dot_product_attention; naive: softmax(QK^T / sqrt(D)) V, spelled out

    def __post_init__(self):
        sizes = (self.n_positions, self.vocab_size, self.n_layer, self.n_head, self.n_embd)
        if not all(type(size) is int and 1 <= size <= 2**20 for size in sizes):
            raise ValueError(f"all sizes must be whole numbers from 1 to {2**20:,}: {self}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} must be a multiple of n_head {self.n_head}")


SIZES = {  # Radford et al. 2019, table 2; heads as in the released configs
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768),  # 124M
    "gpt2-medium": dict(n_layer=24, n_head=16, n_embd=1024),  # 355M
    "gpt2-large": dict(n_layer=36, n_head=20, n_embd=1280),  # 774M
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600),  # 1558M
}


# ------------------------------------------------------------------------------------------------------- the blocks


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # Q, K and V for all heads in one matmul
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.layer = layer  # its place in the KV cache
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.attention = config.attention
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x, mask=None, cache=None):
        # training and prompts: no mask, each token sees itself and all earlier ones. One new token after cached ones,
        # or HellaSwag's packed rows: `mask` says what each token sees
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)  # (B, T, C) each
        H = self.n_head
        D = C // H
        q = q.view(B, T, H, D).transpose(1, 2)  # (B, H, T, D)
        k = k.view(B, T, H, D).transpose(1, 2)  # (B, H, T, D)
        v = v.view(B, T, H, D).transpose(1, 2)  # (B, H, T, D)
        if cache is not None:
            k, v = cache.update(self.layer, k, v)  # (B, H, S, D): every cached position, and this one
        dropout_p = self.dropout if self.training else 0.0
        if self.attention == "naive":
            y = naive_attention(q, k, v, mask, dropout_p)
        else:  # the T x T weights are never stored, only computed tile by tile (Dao et al. 2022, section 3.1)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=mask is None)
        y = y.transpose(1, 2).reshape(B, T, C)  # heads side by side again
        return self.resid_dropout(self.c_proj(y))


def naive_attention(q, k, v, mask=None, dropout_p=0.0):
    """Compute softmax(QK^T / sqrt(D)) V of Vaswani et al. 2017 (section 3.2.1), causal unless a bool mask is given."""
    if mask is None:
        mask = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device)  # (T, T)
        mask = mask.tril()
    # a sum of D products has variance D; dividing by sqrt(D) keeps the softmax from saturating
    q = q / math.sqrt(q.size(-1))
    scores = (q @ k.transpose(-2, -1)).masked_fill(~mask, float("-inf"))  # (B, H, T, S)
    weights = F.softmax(scores, dim=-1)
    return F.dropout(weights, dropout_p) @ v.to(weights.dtype)  # (B, H, T, D)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        x = self.c_fc(x)  # (B, T, 4 C)
        # GPT-2 was trained with the tanh approximation of GELU (Hendrycks and Gimpel 2016, section 2)
        x = F.gelu(x, approximate="tanh")
        return self.dropout(self.c_proj(x))


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=1e-5)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=1e-5)
        self.mlp = MLP(config)

    def forward(self, x, mask=None, cache=None):
        # LayerNorm comes first in each branch (pre-norm; Radford et al. 2019, section 2.3), so that gradients reach
        # every layer through additions alone
        x = x + self.attn(self.ln_1(x), mask, cache)
        return x + self.mlp(self.ln_2(x))


# -------------------------------------------------------------------------------------------------------- the model


class GPT(nn.Module):
    CHUNKED_LOSS = True  # the loss reads lm_head.weight itself, a chunk at a time; set False if you edit logits()

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(config.vocab_size, config.n_embd),
                wpe=nn.Embedding(config.n_positions, config.n_embd),
                drop=nn.Dropout(config.dropout),
                h=nn.ModuleList(Block(config, layer) for layer in range(config.n_layer)),
                ln_f=nn.LayerNorm(config.n_embd, eps=1e-5),
            )
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight  # tied (Press and Wolf 2017)
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        # 2 n_layer residual branches add up: keep their sum at the scale of one (Radford et al. 2019, section 2.3).
        # `apply` visits children first, so this overrides the 0.02 above
        if isinstance(module, Block):
            std = 0.02 / math.sqrt(2 * self.config.n_layer)
            nn.init.normal_(module.attn.c_proj.weight, std=std)
            nn.init.normal_(module.mlp.c_proj.weight, std=std)

    def hidden(self, idx, positions=None, mask=None, cache=None):
        """Compute the final hidden states, after `ln_f`.

        idx (B, T) int64; positions (T,) or (B, T) int64, by default 0 .. T-1, which must fit; mask broadcastable to
        (B, H, T, S) bool, True where a query may look, by default causal. Returns (B, T, C).
        """
        T = idx.size(1)
        if positions is None:
            if T > self.config.n_positions:
                raise ValueError(f"{T} tokens do not fit into the context of {self.config.n_positions}")
            positions = torch.arange(T, device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(positions)  # (B, T, C)
        x = self.transformer.drop(x)
        x = x.to(residual_dtype(x))  # bf16 on a GPU that multiplies in it, else fp32; all blocks add to it
        for block in self.transformer.h:
            x = block(x, mask, cache)
        return self.transformer.ln_f(x)

    def logits(self, x):
        """Compute logits (..., V) of final hidden states x (..., C), for the loss, generation and HellaSwag."""
        return self.lm_head(x)

    def forward(self, idx, targets=None, logit_positions=None, n_targets=None):
        """Return logits (B, T, V) of idx (B, T) int64, or with targets the loss (nanoGPT returns both)."""
        x = self.hidden(idx)
        if targets is None:
            return self.logits(x)
        return self.loss(x, targets, logit_positions, n_targets)

    def loss(self, x, targets, logit_positions=None, n_targets=None):
        """Compute the cross-entropy of hidden states x (B, T, C) against targets (B, T) int64 in nats per token, an
        fp32 scalar: the sum over all targets >= 0, divided by `n_targets`, by default their number.

        With gradient accumulation pass the number in the whole batch, so that the losses of its micro-batches add up.
        To score few positions pass their indices among the B * T as `logit_positions` (M,), and `targets` (M,).
        """
        x = x.flatten(0, 1)  # (B * T, C)
        if logit_positions is not None:
            x = x.index_select(0, logit_positions.flatten())  # (M, C)
        targets = targets.flatten()
        if n_targets is None:
            n_targets = (targets >= 0).sum().clamp(min=1)
        if self.CHUNKED_LOSS:  # the formula below in a fraction of the memory
            return linear_cross_entropy(x, self.lm_head.weight, targets) / n_targets
        # under autocast training rounds its logits to 16 bits; evaluations keep them in fp32
        rounds = torch.is_grad_enabled() and torch.is_autocast_enabled(x.device.type)
        with torch.autocast(x.device.type, enabled=rounds):
            logits = self.logits(x if rounds else x.to(self.lm_head.weight.dtype))
        targets = targets.where(targets >= 0, -100)
        return F.cross_entropy(logits.float(), targets, ignore_index=-100, reduction="sum") / n_targets

    @torch.no_grad()
    def generate(self, idx, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None, generator=None):
        """Sample `max_new_tokens` tokens after idx (B, T), recomputing the whole context for each.
        parts/generation.py writes the same tokens with a cache."""
        for _ in range(max_new_tokens):
            # crop: there is no embedding for a position beyond the context, so the oldest tokens drop out
            context = idx[:, -self.config.n_positions :]
            # every position predicts the token after it; only the last one's is not known yet
            logits = self.logits(self.hidden(context)[:, -1])  # (B, V)
            if temperature == 0:
                new = logits.argmax(dim=-1, keepdim=True)  # (B, 1)
            else:
                # scale: a temperature below 1 widens the gaps between logits, so likely tokens become likelier still
                logits = logits / temperature
                if top_k:
                    # keep k: one unlikely token is a small risk, thousands together are a large one. Remove them
                    # before the softmax, which turns -inf into 0 and lets the others add up to 1
                    k = min(top_k, logits.size(-1))
                    kth = logits.topk(k).values[:, -1:]  # (B, 1)
                    logits = logits.masked_fill(logits < kth, float("-inf"))
                # sample: text that always takes the likeliest token repeats itself (Holtzman et al. 2020)
                probs = F.softmax(logits, dim=-1)
                new = torch.multinomial(probs, 1, generator=generator)  # (B, 1)
            # append: the model reads its own choice when it predicts the next token
            idx = torch.cat([idx, new], dim=1)
        return idx

    def num_params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def estimate_flops(self, sequence_length: int) -> int:
        """Count floating-point operations per token, forward and backward: 6 N + 12 L C T (PaLM, appendix B).

        N counts the parameters that take part in a matrix product: all except embeddings that are only looked up
        (`wte` is also the output projection). Biases and LayerNorm gains (0.1%) are counted as well. The attention term
        counts the whole T x T square, the convention of nanoGPT and PaLM.
        """
        tables = {module.weight for module in self.modules() if isinstance(module, nn.Embedding)}
        multiplied = {module.weight for module in self.modules() if isinstance(module, nn.Linear)}
        N = self.num_params() - sum(table.numel() for table in tables - multiplied)
        return 6 * N + 12 * self.config.n_layer * self.config.n_embd * sequence_length

    # ---- files (parts/huggingface.py)

    @classmethod
    def from_pretrained(cls, model: str, dropout: float = 0.0, attention: str = "flash") -> "GPT":
        """Read a checkpoint directory, ours or transformers', or a GPT-2 of the hub, in fp32 on the CPU."""
        from parts.huggingface import read_model, snapshot

        return read_model(snapshot(model), dropout, attention)

    def save_pretrained(self, path) -> None:
        """Write `config.json` and `model.safetensors` for transformers."""
        from parts.huggingface import is_gpt2, write_model

        write_model(path, self, is_gpt2(self))


# ---------------------------------------------------------------------------------------------- the residual stream

# On a GPU that multiplies in bf16 the residual stream is also bf16: norms, additions and their gradients then move half
# the bytes, saving about 7 ms a pass on an H100. The price: with 48 layers the gradient is off by 1.7%, not 0.6%.
RESIDUAL_IN_BF16 = True  # False keeps fp32


def residual_dtype(x) -> torch.dtype:
    """Choose the dtype of the residual stream that begins with the embeddings x."""
    device = x.device.type  # bf16 on a CPU ended 0.002 and 0.005 nats higher in two runs; fp16 lacks the range
    bf16 = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16
    return torch.bfloat16 if RESIDUAL_IN_BF16 and device == "cuda" and bf16 else x.dtype
