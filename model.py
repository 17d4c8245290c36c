"""GPT-2 (Radford et al. 2019) as one nn.Module, and nothing else.

- pre-norm blocks, learned positions, tanh GELU, biases everywhere, `wte` tied to `lm_head`
- fused QKV, `scaled_dot_product_attention`; `attention="naive"` spells the same thing out
- a loss that never holds the logits of the whole batch
- generation with a KV cache, for prompts of different lengths at once
- `from_pretrained` / `save_pretrained` in the Hugging Face layout
- parameter groups for AdamW or Muon, and a FLOP count for MFU

This file knows nothing of ranks, devices, precision policies, training loops or tokenizers.

    model = GPT.from_pretrained("gpt2")              # the hub's weights
    model = GPT(GPTConfig(n_layer=6, n_head=6, n_embd=384))
    logits, _ = model(idx)                           # idx (B, T) -> logits (B, T, vocab_size)
    _, loss = model(idx, targets)                    # mean cross-entropy in nats

Shapes in comments: B batch, T tokens, C n_embd, H n_head, D = C / H, V vocab_size, S cached tokens.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.nn import functional as F

import optim

IGNORE_INDEX = -100  # a target that is not scored, as in PyTorch and Hugging Face; every negative one is ignored
LOSS_CHUNK = {"cpu": 2**19, "cuda": 2**27}  # logits alive at once in the loss: what caches hold, what keeps a GPU busy


@dataclass
class GPTConfig:
    sequence_length: int = 1024  # the longest context; Hugging Face calls it n_positions
    vocab_size: int = 50257
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    attention: str = "flash"  # flash: scaled_dot_product_attention; naive: softmax(QK^T / sqrt(D)) V, spelled out


SIZES = {  # Radford et al. 2019, table 2
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768),  # 124M
    "gpt2-medium": dict(n_layer=24, n_head=16, n_embd=1024),  # 350M
    "gpt2-large": dict(n_layer=36, n_head=20, n_embd=1280),  # 774M
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600),  # 1558M
}


class KVCache:
    """Keys and values of every layer, for B rows that may be at different positions.

    `lengths` (B,) int64 counts the tokens of each row that are in the cache. Tensors have a fixed shape,
    (n_layer, B, H, capacity, D), and stay where they are, so that a compiled decoding step sees one shape only, and a
    CUDA graph can write to them.
    """

    def __init__(self, config: GPTConfig, batch_size: int, capacity: int, device, dtype):
        head_dim = config.n_embd // config.n_head
        shape = (config.n_layer, batch_size, config.n_head, capacity, head_dim)
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros(shape, device=device, dtype=dtype)
        self.lengths = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.capacity = capacity
        for tensor in (self.k, self.v, self.lengths):
            torch._dynamo.mark_static_address(tensor)

    def prefill(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k, v (B, H, T, D) of whole prompts, which start at position 0 and are padded on the right."""
        self.k[layer, :, :, : k.size(2)], self.v[layer, :, :, : v.size(2)] = k, v

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store k, v (B, H, 1, D) of one token a row, each at its row's own position; returns (B, H, capacity, D)."""
        rows = torch.arange(k.size(0), device=k.device)
        self.k[layer][rows, :, self.lengths] = k[:, :, 0]
        self.v[layer][rows, :, self.lengths] = v[:, :, 0]
        return self.k[layer], self.v[layer]

    def decode_mask(self) -> torch.Tensor:
        """(B, 1, 1, capacity) bool: the row's own past, and the token that is being decoded."""
        return (torch.arange(self.capacity, device=self.lengths.device) <= self.lengths[:, None])[:, None, None]


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        if config.n_embd % config.n_head:
            raise ValueError(f"n_embd {config.n_embd} is not divisible by n_head {config.n_head}")
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # Q, K and V of all heads in one matrix
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.n_head, self.layer = config.n_head, layer
        self.dropout, self.attention = config.dropout, config.attention
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x, mask=None, cache: KVCache | None = None):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, H, T, D)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, H, T, D)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, H, T, D)
        if cache is not None and mask is None:
            cache.prefill(self.layer, k, v)
        elif cache is not None:
            k, v = cache.append(self.layer, k, v)  # (B, H, S, D)
        dropout_p = self.dropout if self.training else 0.0
        if self.attention == "naive":
            y = naive_attention(q, k, v, mask, dropout_p)
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=mask is None)
        y = y.transpose(1, 2).reshape(B, T, C)  # heads side by side again
        return self.resid_dropout(self.c_proj(y))


def naive_attention(q, k, v, mask=None, dropout_p=0.0):
    """softmax(QK^T / sqrt(D)) V of Vaswani et al. 2017 (section 3.2.1), causal unless a bool mask is given."""
    if mask is None:
        mask = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).tril()  # (T, T)
    bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, float("-inf"))
    scores = (q / math.sqrt(q.size(-1))) @ k.transpose(-2, -1) + bias  # (B, H, T, S)
    weights = F.softmax(scores, dim=-1)
    return F.dropout(weights, dropout_p) @ v.to(weights.dtype)  # (B, H, T, D)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")))


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=1e-5)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=1e-5)
        self.mlp = MLP(config)

    def forward(self, x, mask=None, cache=None):
        x = x + self.attn(self.ln_1(x), mask, cache)
        return x + self.mlp(self.ln_2(x))


class LinearCrossEntropy(torch.autograd.Function):
    """Sum of the cross-entropies of `x @ weight.T` against `targets`, a chunk of positions at a time.

    The logits of a chunk are reduced to its loss and, while they are still there, to the gradients of `x` and
    `weight`; backward only scales those. Memory is one chunk of logits instead of (N, V) in fp32, and nothing is
    computed twice. The gradients stay unscaled until backward, so that small ones survive fp16.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, chunk: int, need_grad: bool):
        # x (N, C) and weight (V, C) in the dtype of the matrix product, targets (N,) int64
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        grad_x, grad_w = [], None
        for xc, tc in zip(x.split(chunk), targets.split(chunk), strict=True):
            log_probs = F.log_softmax(xc @ weight.T, dim=-1, dtype=torch.float32)  # (chunk, V)
            valid = (tc >= 0)[:, None]  # (chunk, 1)
            safe = tc.clamp(min=0)[:, None]
            loss = loss - torch.where(valid, log_probs.gather(1, safe), 0.0).sum()
            if not need_grad:
                continue
            # d loss / d logits = softmax(logits) - one_hot(target), in place: passes over (chunk, V) are what costs
            dlogits = log_probs.exp_().scatter_add_(1, safe, -torch.ones_like(safe, dtype=torch.float32))
            dlogits = dlogits.to(weight.dtype)
            grad_x.append((dlogits @ weight) * valid)
            if ctx.needs_input_grad[1]:
                gw = dlogits.T @ (xc * valid)
                grad_w = gw.float() if grad_w is None else grad_w.add_(gw)
        if need_grad:
            ctx.save_for_backward(torch.cat(grad_x), grad_w)
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        grad_x, grad_w = ctx.saved_tensors
        grad_x = (grad_x * grad_loss).to(grad_x.dtype)
        return grad_x, None if grad_w is None else grad_w * grad_loss, None, None, None


class Float8Product(torch.autograd.Function):
    """x (N, K) @ weight (M, K).T with FP8 operands, in bf16: E4M3 for x and weight, E5M2, of the wider range, for the
    gradient (Micikevicius et al. 2022, section 3). Every tensor is scaled by its own largest value."""

    @staticmethod
    def forward(ctx, x, weight):
        x, x_scale = to_float8(x, torch.float8_e4m3fn)
        weight, weight_scale = to_float8(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(x, x_scale, weight, weight_scale)
        return scaled_mm(x, weight.T, x_scale, weight_scale, fast=True)

    @staticmethod
    def backward(ctx, grad):  # grad (N, M)
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        grad, grad_scale = to_float8(grad, torch.float8_e5m2)
        grad_x = scaled_mm(grad, weight, grad_scale, weight_scale)  # (N, K)
        grad_weight = scaled_mm(grad.T, x, grad_scale, x_scale)  # (M, K)
        return grad_x, grad_weight.float()


def to_float8(x, dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x in FP8, and the fp32 scalar that brings it back."""
    largest = torch.finfo(dtype).max
    scale = x.abs().max().float().clamp(min=1e-12) / largest
    return (x.float() / scale).clamp(-largest, largest).to(dtype), scale


def scaled_mm(a, b, a_scale, b_scale, fast: bool = False) -> torch.Tensor:
    """a (N, K) @ b (K, M) of FP8 tensors in bf16; the hardware wants a in rows and b in columns. `fast` adds up with
    fewer bits, which is good enough for activations."""
    a, b = a.contiguous(), b.T.contiguous().T
    return torch._scaled_mm(a, b, scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16, use_fast_accum=fast)


class Float8Linear(nn.Linear):
    """nn.Linear whose products are in FP8 while it trains; parameters, evaluation and generation stay as they are."""

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        return Float8Product.apply(x.flatten(0, -2), self.weight).view(*x.shape[:-1], -1) + self.bias.bfloat16()


def use_float8(model: "GPT") -> None:
    """Let the matrices of all blocks multiply in FP8, but not the output projection, on which the loss depends most.

    Raises ValueError where a size is not a multiple of 16, as the tensor cores want.
    """
    for module in model.transformer.h.modules():
        if isinstance(module, nn.Linear):
            if module.in_features % 16 or module.out_features % 16:
                raise ValueError(f"FP8 needs sizes that are multiples of 16, not {tuple(module.weight.shape)}")
            module.__class__ = Float8Linear


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self._compiled = False  # see compile_generation
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(config.vocab_size, config.n_embd),
                wpe=nn.Embedding(config.sequence_length, config.n_embd),
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
        if isinstance(module, Block):  # 2 n_layer residual branches add up: keep their sum at the scale of one
            for proj in (module.attn.c_proj, module.mlp.c_proj):
                nn.init.normal_(proj.weight, std=0.02 / math.sqrt(2 * self.config.n_layer))

    def hidden(self, idx, positions=None, mask=None, cache=None):
        """The final hidden states, after `ln_f`.

        idx (B, T) int64; positions (T,) or (B, T) int64, by default 0 .. T-1, which must fit; mask broadcastable to
        (B, H, T, S) bool, True where a query may look, by default causal. Returns (B, T, C).
        """
        T = idx.size(1)
        if positions is None:
            if T > self.config.sequence_length:
                raise ValueError(f"{T} tokens do not fit into the sequence length {self.config.sequence_length}")
            positions = torch.arange(T, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(positions))  # (B, T, C)
        for block in self.transformer.h:
            x = block(x, mask, cache)
        return self.transformer.ln_f(x)

    def forward(self, idx, targets=None, positions=None, mask=None, n_targets=None):
        """idx (B, T) int64 -> (logits, None), or with targets (B, T) int64 -> (None, loss).

        logits (B, T, V); loss is a scalar in fp32, the sum over all targets >= 0 divided by `n_targets`, by default
        their number (nats per token). With gradient accumulation `n_targets` is the number in the whole batch, so
        that the losses of its micro-batches add up. `positions` and `mask` as in `hidden`.
        """
        x = self.hidden(idx, positions, mask)
        if targets is None:
            return self.lm_head(x), None
        total = self.sum_loss(x.flatten(0, 1), targets.flatten())
        return None, total / ((targets >= 0).sum().clamp(min=1) if n_targets is None else n_targets)

    def sum_loss(self, x, targets):
        """Summed cross-entropy of hidden states x (N, C) against targets (N,); the logits exist in chunks only."""
        weight = self.lm_head.weight
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            chunk = LOSS_CHUNK.get(x.device.type, 2**25) // weight.size(0)
            chunk = max(chunk // 256 * 256, 256)  # whole tiles of the tensor cores
            return LinearCrossEntropy.apply(x, weight, targets, chunk, torch.is_grad_enabled())

    def num_params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def estimate_flops(self, sequence_length: int | None = None) -> int:
        """Floating-point operations per token, forward and backward: 6 N + 12 L C T (PaLM, appendix B).

        N counts the parameters that take part in a matrix product: all but the position embedding (`wte` is the
        output projection). The attention term counts the whole T x T square, the convention of nanoGPT and PaLM.
        """
        T = sequence_length or self.config.sequence_length
        N = self.num_params() - self.transformer.wpe.weight.numel()
        return 6 * N + 12 * self.config.n_layer * self.config.n_embd * T

    def configure_optimizers(self, weight_decay, lr, betas=(0.9, 0.95), eps=1e-8, optimizer="adamw", muon_lr=0.02):
        """The torch optimizers of `optim.make_optimizer`, for callers that do not use it yet."""
        config = SimpleNamespace(optimizer=optimizer, max_lr=lr, muon_lr=muon_lr, weight_decay=weight_decay,
                                 beta1=betas[0], beta2=betas[1], eps=eps, shard="none")  # fmt: skip
        rt = SimpleNamespace(device=self.lm_head.weight.device, dtype=torch.float32, world_size=1)
        return optim.make_optimizer(self, config, rt).optimizers

    # ---- generation

    @torch.no_grad()
    def generate(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop_token: int | None = None,
        n_tokens: int | None = None,
        generator: torch.Generator | None = None,
        use_cache: bool = True,
    ) -> Iterator[list[int]]:
        """Continue several prompts, of any lengths, at once; yields the next token id of every row, step by step.

        temperature 0 is greedy. A row that has produced `stop_token` goes on yielding it; the generator ends when all
        have. Ids from `n_tokens` on, the padding of the vocabulary, are never chosen. Past `sequence_length` tokens
        the window slides: with learned positions every key then changes, so each token recomputes its window.
        Raises ValueError for an empty prompt.
        """
        if not prompts or not all(len(p) for p in prompts):
            raise ValueError("a prompt needs at least one token")
        training = self.training
        self.eval()
        try:
            rows = [list(p) for p in prompts]
            ended = [False] * len(rows)
            window = self.config.sequence_length
            capacity = window if self._compiled else min(window, max(map(len, rows)) + max_new_tokens)
            cache = self._new_cache(len(rows), capacity) if use_cache else None
            for step in range(max_new_tokens):
                if cache is not None and 0 < step and max(map(len, rows)) <= capacity:
                    logits = self._decode([r[-1] for r in rows], cache)  # (B, V)
                else:
                    fits = max(map(len, rows)) <= capacity
                    logits = self._prefill([r[-window:] for r in rows], cache if fits else None)  # (B, V)
                if n_tokens is not None:
                    logits[:, n_tokens:] = float("-inf")
                tokens = sample_tokens(logits, temperature, top_k, top_p, generator).tolist()
                for i, row in enumerate(rows):
                    row.append(stop_token if ended[i] else tokens[i])
                    ended[i] = ended[i] or row[-1] == stop_token
                yield [row[-1] for row in rows]
                if all(ended):
                    break
        finally:
            self.train(training)

    def compile_generation(self) -> None:
        """Compile the step that each new token takes: a single graph, which a GPU replays without the processor's help.

        It is made for one number of prompts, and takes half a minute the first time.
        """
        self._decode_step = torch.compile(self._decode_step, mode="reduce-overhead", fullgraph=True, dynamic=False)
        self._compiled = True

    def _new_cache(self, batch_size: int, capacity: int) -> KVCache:
        weight = self.lm_head.weight
        autocast = torch.is_autocast_enabled(weight.device.type)
        dtype = torch.get_autocast_dtype(weight.device.type) if autocast else weight.dtype
        return KVCache(self.config, batch_size, capacity, weight.device, dtype)

    def _prefill(self, contexts: list[list[int]], cache: KVCache | None) -> torch.Tensor:
        """Next-token logits (B, V) in fp32. Padding on the right is harmless: under the causal mask nobody sees it."""
        device = self.lm_head.weight.device
        lengths = torch.tensor([len(c) for c in contexts], device=device)
        idx = nn.utils.rnn.pad_sequence([torch.tensor(c) for c in contexts], batch_first=True).to(device)  # (B, T)
        x = self.hidden(idx, cache=cache)  # (B, T, C)
        if cache is not None:
            cache.lengths.copy_(lengths)
        return self.lm_head(x[torch.arange(len(contexts), device=device), lengths - 1]).float()

    def _decode(self, tokens: list[int], cache: KVCache) -> torch.Tensor:
        """Next-token logits (B, V) in fp32 after one more token a row."""
        return self._decode_step(torch.tensor(tokens, device=cache.lengths.device)[:, None], cache)

    def _decode_step(self, idx: torch.Tensor, cache: KVCache) -> torch.Tensor:  # idx (B, 1)
        x = self.hidden(idx, cache.lengths[:, None], cache.decode_mask(), cache)  # (B, 1, C)
        cache.lengths += 1
        return self.lm_head(x[:, 0]).float()

    # ---- files

    def save_pretrained(self, path, eos_token_id: int | None = None, n_tokens: int | None = None) -> None:
        """Write `config.json`, `generation_config.json` and `model.safetensors` (fp32) that transformers reads as
        GPT2LMHeadModel. `n_tokens` is the size of the tokenizer: ids from there on are declared as never generated."""
        from safetensors.torch import save_file

        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        c = self.config
        config = dict(
            architectures=["GPT2LMHeadModel"], model_type="gpt2", activation_function="gelu_new",
            vocab_size=c.vocab_size, n_positions=c.sequence_length, n_embd=c.n_embd, n_layer=c.n_layer,
            n_head=c.n_head, n_inner=None, attn_pdrop=c.dropout, embd_pdrop=c.dropout, resid_pdrop=c.dropout,
            layer_norm_epsilon=1e-5, initializer_range=0.02, scale_attn_weights=True, tie_word_embeddings=True,
            bos_token_id=eos_token_id, eos_token_id=eos_token_id, dtype="float32",
        )  # fmt: skip
        generation = dict(do_sample=True, top_k=50, bos_token_id=eos_token_id, eos_token_id=eos_token_id)
        if n_tokens is not None and n_tokens < c.vocab_size:
            generation["suppress_tokens"] = list(range(n_tokens, c.vocab_size))
        (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (path / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        tensors = {name: tensor.detach().float().contiguous() for name, tensor in self.hf_state_dict().items()}
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    def hf_state_dict(self) -> dict[str, torch.Tensor]:
        """The weights under Hugging Face's names and in its orientation; the tied head stands once, as `wte`."""
        state = {name: p for name, p in self.state_dict().items() if name != "lm_head.weight"}
        return {name: p.t() if is_conv1d(name) else p for name, p in state.items()}

    @classmethod
    def from_pretrained(cls, model: str, dropout: float = 0.0, attention: str = "flash") -> "GPT":
        """Read a checkpoint directory of ours or of transformers, or a GPT-2 from the hub ("gpt2", "gpt2-xl", ...).

        Weights come out in fp32. Raises FileNotFoundError if there is nothing to read, and ValueError if it is not a
        GPT-2 or does not hold exactly the tensors that its config calls for.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = Path(model) if Path(model).is_dir() else Path(_download(model))
        try:
            hf = json.loads((path / "config.json").read_text())
            state = {k: v for file in sorted(path.glob("model*.safetensors")) for k, v in load_file(file).items()}
        except (json.JSONDecodeError, UnicodeDecodeError, SafetensorError) as e:
            raise ValueError(f"{path} is damaged: {e}") from e
        gpt = cls(config_from_hf(hf, path, dropout, attention))
        # the hub's files leave the prefix out, and some hold the causal masks and a copy of the tied head
        state = {k.removeprefix("transformer."): v for k, v in state.items()}
        drop = (".attn.bias", ".attn.masked_bias", "lm_head.weight")
        state = {f"transformer.{k}": v for k, v in state.items() if not k.endswith(drop)}
        expected = gpt.hf_state_dict()
        wrong = [k for k in expected if k not in state or state[k].shape != expected[k].shape]
        wrong += [k for k in state if k not in expected]
        if wrong:
            raise ValueError(f"{path} does not match its config.json: {len(wrong)} tensors, {wrong[0]} among them")
        with torch.no_grad():
            for name, p in expected.items():  # views of the parameters, so that this fills the model
                p.copy_(state[name])
        return gpt


def is_conv1d(name: str) -> bool:
    """Hugging Face keeps GPT-2's projections as Conv1D, (in, out): the transpose of nn.Linear's weight."""
    return name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))


def config_from_hf(hf: dict, path, dropout: float, attention: str) -> GPTConfig:
    """GPTConfig of a Hugging Face config.json; ValueError for what this model does not compute."""
    # value that we compute, and Hugging Face's default for an absent key
    required = dict(model_type=("gpt2", None), activation_function=("gelu_new", "gelu_new"), n_inner=(None, None),
                    layer_norm_epsilon=(1e-5, 1e-5), tie_word_embeddings=(True, True), scale_attn_weights=(True, True),
                    scale_attn_by_inverse_layer_idx=(False, False), add_cross_attention=(False, False))  # fmt: skip
    for key, (value, default) in required.items():
        found = hf.get(key, default)
        if found != value and not (key == "n_inner" and found == 4 * hf["n_embd"]):
            raise ValueError(f"{path} is not a GPT-2 that this code computes: {key} is {found!r}, not {value!r}")
    try:
        sizes = {key: int(hf[key]) for key in ("vocab_size", "n_layer", "n_head", "n_embd")}
        return GPTConfig(sequence_length=int(hf["n_positions"]), dropout=dropout, attention=attention, **sizes)
    except KeyError as e:
        raise ValueError(f"{path}/config.json has no {e}") from e


def _download(repo_id: str) -> str:
    """A model of the hub, from the cache when it is there; returns the local directory."""
    from huggingface_hub import snapshot_download

    return snapshot_download(repo_id, allow_patterns=["*.json", "model*.safetensors", "merges.txt"])


def sample_tokens(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """Draw one id a row from logits (B, V): greedy for temperature 0, else from the `top_k` likeliest and the smallest
    set of ids with probability `top_p` or more (Holtzman et al. 2020). Returns (B,) int64."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits / temperature
    if top_k:
        kth = logits.topk(min(top_k, logits.size(-1)), dim=-1).values[:, -1:]  # (B, 1)
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p is not None and top_p < 1:
        probs, order = F.softmax(logits, dim=-1).sort(dim=-1, descending=True)
        outside = probs.cumsum(dim=-1) - probs >= top_p  # what is left once the set before it has enough
        logits = logits.masked_fill(outside.scatter(-1, order, outside), float("-inf"))
    return torch.multinomial(F.softmax(logits, dim=-1), 1, generator=generator)[:, 0]
