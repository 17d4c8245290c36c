"""GPT-2 (Radford et al. 2019): the model, its generation, and its Hugging Face files.

- pre-norm blocks, learned positions, tanh GELU, biases everywhere, `wte` tied to `lm_head`
- fused QKV, `scaled_dot_product_attention`; `attention="naive"` spells the same thing out
- a loss that never holds the logits of the whole batch (learning/loss.py)
- generation with a KV cache, for prompts of different lengths at once
- `from_pretrained` / `save_pretrained` in the Hugging Face layout, and a FLOP count for MFU

This file knows nothing of ranks, optimizers, training loops or data. Of precision it knows autocast's dtype, and one
flag (see learning/fp8.py); of a tokenizer, how many tokens it has.

    model = GPT.from_pretrained("gpt2")              # the hub's weights
    model = GPT(GPTConfig(n_layer=6, n_head=6, n_embd=384))
    logits, _ = model(idx)                           # idx (B, T) -> logits (B, T, vocab_size)
    _, loss = model(idx, targets)                    # mean cross-entropy in nats

Shapes in comments: B batch, T tokens, C n_embd, H n_head, D = C / H, V vocab_size, S tokens in the cache.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
from torch.nn import functional as F

from learning.loss import linear_cross_entropy


@dataclass(frozen=True)
class GPTConfig:
    sequence_length: int = 1024  # the longest context; Hugging Face calls it n_positions
    vocab_size: int = 50257
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    attention: str = "flash"  # flash: scaled_dot_product_attention; naive: softmax(QK^T / sqrt(D)) V, spelled out


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
        if config.n_embd % config.n_head:
            raise ValueError(f"n_embd {config.n_embd} is not divisible by n_head {config.n_head}")
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # Q, K and V of all heads: one product, not three H
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.n_head, self.layer = config.n_head, layer
        self.dropout, self.attention = config.dropout, config.attention
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x, mask=None, cache: "KVCache | None" = None):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)  # (B, T, C) each
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, H, T, D)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, H, T, D)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, H, T, D)
        if cache is not None and mask is None:
            cache.prefill(self.layer, k, v)
        elif cache is not None:
            k, v = cache.append(self.layer, k, v)  # (B, H, S, D): with all that came before
        dropout_p = self.dropout if self.training else 0.0
        if self.attention == "naive":
            y = naive_attention(q, k, v, mask, dropout_p)
        else:  # the T x T weights exist in tiles only (FlashAttention, Dao et al. 2022, section 3.1)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=mask is None)
        y = y.transpose(1, 2).reshape(B, T, C)  # heads side by side again
        return self.resid_dropout(self.c_proj(y))


def naive_attention(q, k, v, mask=None, dropout_p=0.0):
    """softmax(QK^T / sqrt(D)) V of Vaswani et al. 2017 (section 3.2.1), causal unless a bool mask is given."""
    if mask is None:
        mask = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).tril()  # (T, T)
    bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, float("-inf"))
    # a sum of D products has variance D; dividing by sqrt(D) keeps the softmax from saturating
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
        # GPT-2 was trained with the tanh approximation of GELU (Hendrycks and Gimpel 2016, section 2)
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")))


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=1e-5)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=1e-5)
        self.mlp = MLP(config)

    def forward(self, x, mask=None, cache=None):
        # LayerNorm stands at the input of each branch (Radford et al. 2019, section 2.3), so that gradients reach every
        # layer through additions alone
        x = x + self.attn(self.ln_1(x), mask, cache)
        return x + self.mlp(self.ln_2(x))


# -------------------------------------------------------------------------------------------------------- the model


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.float8_head = False  # see use_float8 in learning/fp8.py
        self._compiled, self._kept_cache = False, None  # see compile_generation
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
        # 2 n_layer residual branches add up: keep their sum at the scale of one (Radford et al. 2019, section 2.3).
        # `apply` visits a block after what is inside of it, so that this replaces the 0.02 from above
        if isinstance(module, Block):
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
        """Summed cross-entropy of hidden states x (N, C) against targets (N,)."""
        return linear_cross_entropy(x, self.lm_head.weight, targets, fp8=self.float8_head and self.training)

    def num_params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def estimate_flops(self, sequence_length: int | None = None) -> int:
        """Floating-point operations per token, forward and backward: 6 N + 12 L C T (PaLM, appendix B).

        N counts the parameters that take part in a matrix product: all but the position embedding (`wte` is the
        output projection); biases and gains, 0.1%, are let in. The attention term counts the whole T x T square, the
        convention of nanoGPT and PaLM.
        """
        T = sequence_length or self.config.sequence_length
        N = self.num_params() - self.transformer.wpe.weight.numel()
        return 6 * N + 12 * self.config.n_layer * self.config.n_embd * T

    # ---- generation

    @torch.no_grad()
    def generate(
        self, prompts: list[list[int]], max_new_tokens: int, *, temperature: float = 1.0, top_k: int | None = None,
        top_p: float | None = None, stop_token: int | None = None, n_tokens: int | None = None,
        generator: torch.Generator | None = None, use_cache: bool = True,
    ) -> Iterator[list[int]]:  # fmt: skip
        """Continue several prompts, of any lengths, at once; yields the next token id of every row, step by step.

        temperature 0 is greedy; `top_k` and `top_p` as in `sample_tokens`. A row that has produced `stop_token` goes on
        yielding it; the generator ends when all have. Ids from `n_tokens` on, the padding of the vocabulary, are never
        chosen. Past `sequence_length` tokens the window slides. Raises ValueError for an empty prompt.
        """
        if not prompts or not all(len(p) for p in prompts):
            raise ValueError("a prompt needs at least one token")
        rows, ended = [list(p) for p in prompts], [False] * len(prompts)
        cache = self._take_cache(len(rows), max(map(len, rows)) + max_new_tokens) if use_cache else None
        training = self.training
        self.eval()
        try:
            for _ in range(max_new_tokens):
                logits = self._next_logits(rows, cache)  # (B, V)
                if n_tokens is not None:
                    logits[:, n_tokens:] = float("-inf")
                chosen = sample_tokens(logits, temperature, top_k, top_p, generator).tolist()
                for i, row in enumerate(rows):
                    row.append(stop_token if ended[i] else chosen[i])
                    ended[i] = ended[i] or row[-1] == stop_token
                yield [row[-1] for row in rows]
                if all(ended):
                    break
        finally:
            self.train(training)
            self._kept_cache = cache if self._compiled else None

    def _next_logits(self, rows: list[list[int]], cache: "KVCache | None") -> torch.Tensor:
        """Logits (B, V) fp32 of the token after each row, by the cheapest of three ways."""
        if cache is None or max(map(len, rows)) > cache.capacity:
            # Recompute: once the window slides, every token has another position and, positions being learned, every
            # key another value, so that nothing in a cache is right any more
            return self._prefill([row[-self.config.sequence_length :] for row in rows], None)
        if cache.is_empty:  # Prefill: all tokens of the prompts in one pass, and their keys and values are kept
            return self._prefill(rows, cache)
        newest = torch.tensor([row[-1:] for row in rows], device=cache.lengths.device)  # (B, 1)
        return self._decode(newest, cache)  # Decode: one token a row, which attends to what is kept

    def _prefill(self, contexts: list[list[int]], cache: "KVCache | None") -> torch.Tensor:
        """Next-token logits (B, V), computed in the dtype of the weights or of autocast, returned in fp32.

        Padding on the right is harmless: under the causal mask no real token sees it.
        """
        device = self.lm_head.weight.device
        lengths = torch.tensor([len(c) for c in contexts], device=device)
        idx = nn.utils.rnn.pad_sequence([torch.tensor(c) for c in contexts], batch_first=True).to(device)  # (B, T)
        x = self.hidden(idx, cache=cache)  # (B, T, C)
        if cache is not None:
            cache.lengths.copy_(lengths)
            cache.is_empty = False
        last = x[torch.arange(len(contexts), device=device), lengths - 1]  # (B, C)
        return self.lm_head(last).float()

    def _decode(self, idx: torch.Tensor, cache: "KVCache") -> torch.Tensor:
        """Next-token logits (B, V), as `_prefill` has them, after one more token a row, idx (B, 1)."""
        x = self.hidden(idx, cache.lengths[:, None], cache.decode_mask(), cache)  # (B, 1, C)
        cache.lengths += 1
        return self.lm_head(x[:, 0]).float()

    def compile_generation(self) -> None:
        """Compile the step that each new token takes: a single graph, which a GPU replays without the host's help.

        It is made for one number of prompts, and takes half a minute the first time.
        """
        self._decode = torch.compile(self._decode, mode="reduce-overhead", fullgraph=True, dynamic=False)
        self._compiled = True

    def _take_cache(self, batch_size: int, longest: int) -> "KVCache":
        """An empty cache. The one of the last call where that was compiled, as a CUDA graph writes to fixed addresses;
        whoever takes it owns it until the end, so that two generators never share one."""
        weight = self.lm_head.weight
        autocast = torch.is_autocast_enabled(weight.device.type)
        dtype = torch.get_autocast_dtype(weight.device.type) if autocast else weight.dtype
        window = self.config.sequence_length
        capacity = window if self._compiled else min(window, longest)
        kept, self._kept_cache = self._kept_cache, None
        if kept is not None and (len(kept.lengths), kept.dtype, kept.device) == (batch_size, dtype, weight.device):
            kept.is_empty = True
            return kept
        return KVCache(self.config, batch_size, capacity, weight.device, dtype)

    # ---- files

    def save_pretrained(self, path, eos_token_id: int | None = None, n_tokens: int | None = None) -> None:
        """Write `config.json`, `generation_config.json` and `model.safetensors` (fp32) that transformers reads as
        GPT2LMHeadModel. `n_tokens` is the size of the tokenizer: ids from there on are declared as never generated."""
        from safetensors.torch import save_file

        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        tokens = dict(bos_token_id=eos_token_id, eos_token_id=eos_token_id)
        sizes = {theirs: getattr(self.config, ours) for ours, theirs in HF_SIZES.items()}
        sizes["n_ctx"] = sizes["n_positions"]  # what llama.cpp's converter reads
        dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), self.config.dropout)
        config = dict(architectures=["GPT2LMHeadModel"], **HF_CONFIG, **sizes, **dropout, **tokens, dtype="float32")
        generation = dict(do_sample=True, top_k=50, **tokens)
        if n_tokens is not None and n_tokens < self.config.vocab_size:
            generation["suppress_tokens"] = list(range(n_tokens, self.config.vocab_size))
        (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (path / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        tensors = {name: tensor.detach().float().contiguous() for name, tensor in self.hf_state_dict().items()}
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        # safetensors lets its owner alone read it; the files beside it follow the umask
        (path / "model.safetensors").chmod((path / "config.json").stat().st_mode)

    def hf_state_dict(self) -> dict[str, torch.Tensor]:
        """The weights under Hugging Face's names and in its orientation, without a copy: `Conv1D` keeps a projection as
        (in, out), the transpose of nn.Linear's weight. The tied head stands once, as `wte`."""
        conv1d = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
        state = {name: p for name, p in self.state_dict().items() if name != "lm_head.weight"}
        return {name: p.t() if name.endswith(conv1d) else p for name, p in state.items()}

    @classmethod
    def from_pretrained(cls, model: str, dropout: float = 0.0, attention: str = "flash") -> "GPT":
        """Read a checkpoint directory of ours or of transformers, or a GPT-2 from the hub ("gpt2", "gpt2-xl", ...).

        Weights come out in fp32. Raises ValueError, with the file's name, for what is missing in a directory, cannot be
        read, is not a GPT-2, or does not hold exactly the tensors that its config calls for, all of them finite.
        """
        path = local_directory(model, ["*.json", "model*.safetensors", "merges.txt"])
        config = read_config(path, dropout, attention)
        state = read_tensors(path)
        if 12 * config.n_layer > len(state):  # before so many layers are made
            raise ValueError(f"{path}/config.json has {config.n_layer} layers, the weights only {len(state)} tensors")
        with torch.device("meta"):  # names and shapes without memory, nor numbers that would be overwritten
            gpt = cls(config)
        expected = {name: p.shape for name, p in gpt.hf_state_dict().items()}
        found = {name: t.shape if t.is_floating_point() else t.dtype for name, t in state.items()}
        if wrong := [name for name in expected | found if expected.get(name) != found.get(name)]:
            raise ValueError(f"{path} does not match its config.json: {len(wrong)} tensors, {wrong[0]} among them")
        gpt.to_empty(device="cpu")
        gpt.lm_head.weight = gpt.transformer.wte.weight  # which to_empty has made two
        with torch.no_grad():
            for name, p in gpt.hf_state_dict().items():  # views of the parameters, so that this fills the model
                if not p.copy_(state[name]).isfinite().all():
                    raise ValueError(f"{path}: {name} has numbers that are not finite; the file is damaged")
        return gpt


# ------------------------------------------------------------------------------------------------- for generation


class KVCache:
    """Keys and values of every layer, for B rows that may be at different positions.

    `lengths` (B,) int64 counts the tokens of each row that are in the cache; what lies behind them is left over from an
    earlier use, and masked. The tensors of a layer, (B, H, capacity, D), keep shape and address, so that a compiled
    decoding step sees one shape only and a CUDA graph can write to them. There is one for each layer because a write
    into a part of a common one is compiled to a copy of the whole.
    """

    def __init__(self, config: GPTConfig, batch_size: int, capacity: int, device, dtype):
        shape = (batch_size, config.n_head, capacity, config.n_embd // config.n_head)
        self.k = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.n_layer)]
        self.v = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.n_layer)]
        self.lengths = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.capacity, self.device, self.dtype, self.is_empty = capacity, device, dtype, True
        for tensor in (*self.k, *self.v, self.lengths):
            torch._dynamo.mark_static_address(tensor)

    def prefill(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k, v (B, H, T, D) of whole prompts, which start at position 0 and are padded on the right."""
        self.k[layer][:, :, : k.size(2)], self.v[layer][:, :, : v.size(2)] = k, v

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store k, v (B, H, 1, D) of one token a row, each at its row's own position; returns (B, H, capacity, D)."""
        rows = torch.arange(k.size(0), device=k.device)  # (B,)
        self.k[layer][rows, :, self.lengths] = k[:, :, 0]
        self.v[layer][rows, :, self.lengths] = v[:, :, 0]
        return self.k[layer], self.v[layer]

    def decode_mask(self) -> torch.Tensor:
        """(B, 1, 1, capacity) bool: the row's own past, and the token that is being decoded."""
        return (torch.arange(self.capacity, device=self.lengths.device) <= self.lengths[:, None])[:, None, None]


def sample_tokens(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """Draw one id a row from logits (B, V): greedy for temperature 0, else from the `top_k` likeliest and the smallest
    set of ids with probability `top_p` or more (Holtzman et al. 2020, section 3.1). Returns (B,) int64."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits / temperature
    if top_k:
        kth = logits.topk(min(top_k, logits.size(-1)), dim=-1).values[:, -1:]  # (B, 1)
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p is not None and top_p < 1:
        probs, order = F.softmax(logits, dim=-1).sort(dim=-1, descending=True)  # (B, V)
        outside = probs.cumsum(dim=-1) - probs >= top_p  # what is left once the set before it has enough
        outside[:, 0] = False  # the likeliest stays, whatever top_p
        logits = logits.masked_fill(outside.scatter(-1, order, outside), float("-inf"))
    return torch.multinomial(F.softmax(logits, dim=-1), 1, generator=generator)[:, 0]


# ------------------------------------------------------------------------------------------- Hugging Face's files

# What of a Hugging Face config.json this file computes. Saving writes it, loading compares it; a key that is absent has
# this very value, but for the first one.
HF_CONFIG = dict(
    model_type="gpt2", activation_function="gelu_new", n_inner=None, layer_norm_epsilon=1e-5, tie_word_embeddings=True,
    scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False,
)  # fmt: skip
HF_SIZES = {"sequence_length": "n_positions"} | {name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd")}
LARGEST = 2**20  # of any size; what a damaged file asks for should not be tried


def local_directory(model, patterns: list[str]) -> Path:
    """A directory as it is, or the files of a model of the hub, from the cache when they are there."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(model), allow_patterns=patterns))


def read_config(model, dropout: float = 0.0, attention: str = "flash") -> GPTConfig:
    """The sizes of a directory or a model of the hub, without its weights.

    Raises ValueError for a config.json that cannot be read, or is not of a GPT-2 that this file computes.
    """
    file = local_directory(model, ["config.json"]) / "config.json"
    try:
        hf = dict(json.loads(file.read_bytes()))
    except (ValueError, TypeError, RecursionError, OSError) as e:
        raise ValueError(f"{file} cannot be read as the config of a model ({type(e).__name__}: {e})") from e
    for key, value in HF_CONFIG.items():
        found = hf.get(key, None if key == "model_type" else value)
        if found != value and key != "n_inner":
            raise ValueError(f"{file} is not of a GPT-2 that this code computes: {key} is {found!r}, not {value!r}")
    sizes = {ours: hf.get(theirs) for ours, theirs in HF_SIZES.items()}
    for name, size in sizes.items():
        if type(size) is not int or not 1 <= size <= LARGEST:
            raise ValueError(f"{file}: {HF_SIZES[name]} is {size!r}, not a number from 1 to {LARGEST:,}")
    if sizes["n_embd"] % sizes["n_head"]:
        raise ValueError(f"{file}: n_embd {sizes['n_embd']} is not divisible by n_head {sizes['n_head']}")
    if hf.get("n_inner") not in (None, 4 * sizes["n_embd"]):
        raise ValueError(f"{file}: n_inner is {hf['n_inner']!r}, and this code computes 4 n_embd only")
    return GPTConfig(**sizes, dropout=dropout, attention=attention)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory's safetensors, under the names that `hf_state_dict` has. Raises ValueError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    state = {}
    # one file, or the parts of a large model; what else lies there (model_old.safetensors) is somebody's own
    whole = path / "model.safetensors"
    for file in [whole] if whole.exists() else sorted(path.glob("model-*-of-*.safetensors")):
        try:
            state |= load_file(file)
        except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as e:
            raise ValueError(f"{file} cannot be read ({e}); it is damaged, or no safetensors file") from e
    if not state:
        raise ValueError(f"{path} has no weights in model.safetensors")
    # the hub's files leave the prefix out, and some hold the causal masks and a copy of the tied head
    state = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
    not_ours = (".attn.bias", ".attn.masked_bias", "lm_head.weight")
    return {f"transformer.{name}": tensor for name, tensor in state.items() if not name.endswith(not_ours)}
