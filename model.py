"""GPT-2 (Radford et al. 2019): the model, its loss, plain generation, and its Hugging Face files.

- pre-norm blocks, learned positions, tanh GELU, biases everywhere but in the head, which is tied to `wte`
- fused QKV, `scaled_dot_product_attention`; `attention="naive"` spells the same thing out
- a loss that never holds the logits of a large batch at once (parts/loss.py)
- `from_pretrained` / `save_pretrained` in the Hugging Face layout, and a FLOP count for MFU

This file knows nothing of ranks, optimizers, training loops, data or tokenizers.

    model = GPT.from_pretrained("gpt2")              # the hub's weights
    model = GPT(GPTConfig(n_layer=6, n_head=6, n_embd=384))
    logits = model(idx)                              # idx (B, T) -> logits (B, T, vocab_size)
    loss = model.loss(idx, targets)                  # mean cross-entropy in nats
    idx = model.generate(idx, 100, top_k=50)         # parts/generation.py does the same with a KV cache

Shapes in comments: B batch, T tokens, C n_embd, H n_head, D = C / H, V vocab_size, S tokens that attention looks at.
"""

import contextlib
import functools
import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from parts.loss import linear_cross_entropy

LARGEST = 2**20  # upper bound for any size, so that a corrupt config cannot make us allocate terabytes


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a model. Raises ValueError, which begins with the name of the size, for one that no model can have:
    what this takes can be built, saved and loaded again. A field that you add, with a default, is saved, too."""

    n_positions: int = 1024  # the longest context; a training step may use a shorter one
    vocab_size: int = 50257
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    attention: str = "flash"  # flash: scaled_dot_product_attention; naive: softmax(QK^T / sqrt(D)) V, spelled out

    def __post_init__(self):
        for name in SIZE_NAMES:
            size = getattr(self, name)
            if type(size) is not int or not 1 <= size <= LARGEST:
                raise ValueError(f"{name} is {size!r}, not a number from 1 to {LARGEST:,}")
        if self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd {self.n_embd} is not a multiple of n_head {self.n_head}: all heads are equally wide"
            )


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
        self.layer = layer
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.attention = config.attention
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x, mask=None, cache=None):
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
    """softmax(QK^T / sqrt(D)) V of Vaswani et al. 2017 (section 3.2.1), causal unless a bool mask is given."""
    if mask is None:
        mask = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device)  # (T, T)
        mask = mask.tril()
    bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device)
    bias.masked_fill_(~mask, float("-inf"))
    # a sum of D products has variance D; dividing by sqrt(D) keeps the softmax from saturating
    q = q / math.sqrt(q.size(-1))
    scores = q @ k.transpose(-2, -1) + bias  # (B, H, T, S)
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


RESIDUAL_IN_BF16 = True  # False keeps the residual stream in fp32: 7 of 132 ms slower on an H100, and nearer to fp32


def residual_dtype(x) -> torch.dtype:
    """The dtype of the residual stream that starts with the embeddings x.

    Where a GPU multiplies in bf16 it is bf16, too, unless RESIDUAL_IN_BF16 is False: norms, additions and their
    gradients then move half the bytes. Norms compute in fp32 even so. The price is precision: with 48 layers the
    gradient is off by 1.7% instead of 0.6%. Elsewhere it is fp32: fp16 lacks the range, and on a CPU, where the
    products take the time, two runs with it in bf16 ended 0.002 and 0.005 nats higher.
    """
    device = x.device.type
    bf16 = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16
    return torch.bfloat16 if RESIDUAL_IN_BF16 and device == "cuda" and bf16 else x.dtype


class GPT(nn.Module):
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
        """The final hidden states, after `ln_f`.

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

    def forward(self, idx):
        """Logits (B, T, V) of idx (B, T) int64."""
        return self.lm_head(self.hidden(idx))

    def loss(self, idx, targets, logit_positions=None, n_targets=None):
        """The cross-entropy of idx (B, T) against targets (B, T) int64 in nats per token, a scalar in fp32.

        It is the sum over all targets >= 0, divided by `n_targets`, by default their number. With gradient accumulation
        pass the number in the whole batch, so that the losses of its micro-batches add up. Where few positions are
        scored, `logit_positions` (M,) names them among the B * T, and `targets` is (M,): the head computes no others.
        """
        return self.loss_of_hidden(self.hidden(idx), targets, logit_positions, n_targets)

    def loss_of_hidden(self, x, targets, logit_positions=None, n_targets=None):
        """The same of the final hidden states x (B, T, C)."""
        x = x.flatten(0, 1)  # (B * T, C)
        if logit_positions is not None:
            x = x.index_select(0, logit_positions.flatten())  # (M, C)
        total = linear_cross_entropy(x, self.lm_head.weight, targets.flatten())
        if n_targets is None:
            n_targets = (targets >= 0).sum().clamp(min=1)
        return total / n_targets

    @torch.no_grad()
    def generate(self, idx, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None, generator=None):
        """Sample `max_new_tokens` tokens after idx (B, T), computing the whole context for each of them.
        parts/generation.py writes the same tokens with a cache."""
        for _ in range(max_new_tokens):
            # crop: there is no embedding for a position beyond the context, so the oldest tokens drop out
            context = idx[:, -self.config.n_positions :]
            # every position predicts the token after it; only the last one's is not known yet
            logits = self(context)[:, -1]  # (B, V)
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
        """Floating-point operations per token, forward and backward: 6 N + 12 L C T (PaLM, appendix B).

        N counts the parameters that take part in a matrix product: all but embeddings that are only looked up (`wte` is
        the output projection, too). Biases and LayerNorm gains (0.1%) are counted as well. The attention term counts
        the whole T x T square, the convention of nanoGPT and PaLM.
        """
        tables = {module.weight for module in self.modules() if isinstance(module, nn.Embedding)}
        multiplied = {module.weight for module in self.modules() if isinstance(module, nn.Linear)}
        N = self.num_params() - sum(table.numel() for table in tables - multiplied)
        return 6 * N + 12 * self.config.n_layer * self.config.n_embd * sequence_length

    # ---- what it is

    @torch.no_grad()
    def answer(self, ids: list[int]) -> torch.Tensor:
        """The logits (T,) of `ids` (T) after the row `ids`, in fp32 and without dropout, on the CPU: what two models
        that compute the same agree about."""
        idx = torch.tensor(ids, device=self.lm_head.weight.device)
        with exactly(self):
            return self(idx[None])[0, -1, idx].float().cpu()

    @functools.cached_property
    def narrow(self) -> "GPT":
        """The same code with few channels and tokens, and with large random weights, in which nothing vanishes: what is
        asked of it is answered at once. The model itself, if its code has sizes of its own written into it."""
        n_embd = min(8 * self.config.n_head, self.config.n_embd)
        n_positions = min(self.config.n_positions, 1024)
        vocab_size = min(self.config.vocab_size, 64)
        config = replace(self.config, n_embd=n_embd, n_positions=n_positions, vocab_size=vocab_size)
        with torch.random.fork_rng([]), torch.no_grad():
            torch.manual_seed(0)
            try:
                narrow = type(self)(config)
                for p in narrow.parameters():
                    p.add_(torch.randn_like(p), alpha=3 / math.sqrt(p.size(-1)) if p.dim() > 1 else 0.5)
                narrow.answer(question(config))
                return narrow
            except Exception:  # whatever wrong sizes raise
                return self

    @functools.cached_property
    def is_gpt2(self) -> bool:
        """Whether this is the model of minimal.py: it has the same tensors, and computes the same, of a few tokens with
        its own weights, and of a whole context when it is narrow."""
        if self.narrow is self:
            return False
        context = question(self.narrow.config, 1024)
        return has_answer_of_minimal(self, question(self.config, 2)) and has_answer_of_minimal(self.narrow, context)

    # ---- files

    def save_pretrained(self, path, eos_token_id: int | None = None, suppress_tokens: list[int] | None = None) -> None:
        """Write `config.json`, `generation_config.json` and `model.safetensors` (fp32). transformers reads a GPT-2 as
        GPT2LMHeadModel, and refuses any other model by its model_type. `suppress_tokens` are the ids that nobody should
        generate, as they are no token."""
        from safetensors.torch import save_file

        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        tokens = dict(bos_token_id=eos_token_id, eos_token_id=eos_token_id)
        tensors = {}
        for name, tensor in self.hf_state_dict().items():
            dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
            tensors[name] = tensor.detach().to("cpu", dtype).contiguous()
        config = dict(CHANGED)
        if self.is_gpt2:
            config = dict(
                architectures=["GPT2LMHeadModel"],
                **HF_CONFIG,
                n_ctx=self.config.n_positions,  # what llama.cpp's converter reads
                **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), self.config.dropout),
            )
        config |= {name: getattr(self.config, name) for name in stored_fields()}
        config |= dict(**tokens, dtype="float32")
        ids = question(self.config)
        answer = self.answer(ids)
        if torch.equal(answer, self.answer(ids)):  # else it draws random numbers, and nobody could compare
            config["question"] = dict(ids=ids, logits=answer.tolist(), sum_of_weights=sum_of(tensors))
            if self.narrow is not self:
                config["question"]["of_narrow"] = answer_of_narrow(self).tolist()
        generation = dict(do_sample=True, top_k=50, **tokens)
        if suppress_tokens:
            generation["suppress_tokens"] = suppress_tokens
        (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (path / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        weights = path / "model.safetensors"
        save_file(tensors, weights, metadata={"format": "pt"})
        # safetensors writes mode 0600; use the mode of the files next to it
        with contextlib.suppress(OSError):  # a file system may have no modes, or let nobody change them
            weights.chmod((path / "config.json").stat().st_mode)

    def hf_state_dict(self) -> dict[str, torch.Tensor]:
        """The weights under Hugging Face's names and in its orientation, without a copy: `Conv1D` keeps a projection as
        (in, out), the transpose of nn.Linear's weight. A tensor with two names, as the tied head, is there once, as
        `wte`."""
        conv1d = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
        state = {}
        seen = set()
        for name, p in self.state_dict(keep_vars=True).items():
            if id(p) in seen:
                continue
            seen.add(id(p))
            p = p.detach()
            state[name] = p.t() if name.endswith(conv1d) and p.dim() == 2 else p
        return state

    @classmethod
    def from_pretrained(cls, model: str, dropout: float = 0.0, attention: str = "flash") -> "GPT":
        """Read a checkpoint directory of ours or of transformers, or a GPT-2 from the hub ("gpt2", "gpt2-xl", ...).

        Weights become fp32. Raises ValueError, which names the file, if something is missing or unreadable, is not a
        model of this file, does not hold exactly the tensors that its config calls for, all of them finite, or answers
        the question in its config.json in another way than when it was saved.
        """
        path = local_directory(model, ["*.json", "model*.safetensors"])
        config = read_config(path, dropout, attention)
        tensors = read_tensors(path)
        if config.n_layer > max(len(tensors), 1000):  # before we make that many layers
            raise ValueError(f"{path}/config.json has {config.n_layer} layers, the weights only {len(tensors)} tensors")
        with WithoutWeights():
            gpt = cls(config)
        expected = gpt.hf_state_dict()  # views of the parameters
        found = own_names(tensors, gpt, path)
        wrong = [name for name in expected | found if kind_of(expected.get(name)) != kind_of(found.get(name))]
        if wrong:
            raise ValueError(f"{path} does not match its config.json: {len(wrong)} tensors, {wrong[0]} among them")
        for name, p in expected.items():
            p.copy_(found[name])
        for name, p in gpt.named_parameters():
            if not p.isfinite().all():
                raise ValueError(f"{path}: {name} has numbers that are not finite; the file is damaged")
        check_answer(gpt, tensors, path)
        return gpt


def kind_of(tensor: torch.Tensor | None) -> tuple:
    """What a tensor of a file and one of a model have to share; fractions may have any precision."""
    if tensor is None:
        return ()
    return tensor.shape, "fractions" if tensor.is_floating_point() else tensor.dtype


class WithoutWeights(TorchFunctionMode):
    """While it is on, models are built and not initialized: that costs more than reading weights does, and memory to
    which nobody writes takes no room."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", None) != "torch.nn.init":
            return function(*args, **(kwargs or {}))


class GPTWithLoss(nn.Module):
    """A GPT whose forward pass is its loss: what DDP hooks. `hidden` may be a compiled `gpt.hidden`; the loss
    itself is not compiled (parts/loss.py says why)."""

    def __init__(self, gpt: GPT, hidden=None):
        super().__init__()
        self.gpt = gpt
        self.hidden = hidden or gpt.hidden

    def forward(self, idx, targets, logit_positions=None, n_targets=None):
        return self.gpt.loss_of_hidden(self.hidden(idx), targets, logit_positions, n_targets)


# ------------------------------------------------------------------------------------------- Hugging Face's files

# The part of a Hugging Face config.json that decides what is computed. Saving writes it, loading compares it; a missing
# key means this value, except for model_type.
HF_CONFIG = dict(
    model_type="gpt2",
    activation_function="gelu_new",
    layer_norm_epsilon=1e-5,
    tie_word_embeddings=True,
    scale_attn_weights=True,
    scale_attn_by_inverse_layer_idx=False,
    add_cross_attention=False,
)
# The same of a model that minimal.py does not compute. No program knows the name, so that none takes it for a GPT-2.
CHANGED = dict(architectures=["ChangedGPT2"], model_type="changed-gpt2")
OF_A_RUN = ("dropout", "attention")  # fields of GPTConfig that belong to whoever loads a model, not to its files
SIZE_NAMES = ("n_positions", "vocab_size", "n_layer", "n_head", "n_embd")


def local_directory(model, patterns: list[str]) -> Path:
    """`model` if it is a directory, else the directory of a hub model in the cache, downloaded if it is not there."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(model), allow_patterns=patterns))


def read_config(model, dropout: float = 0.0, attention: str = "flash") -> GPTConfig:
    """The sizes of a checkpoint directory or a hub model, without its weights.

    Raises ValueError for a config.json that cannot be read, or is not of a GPT-2 that this file computes.
    """
    file = local_directory(model, ["config.json"]) / "config.json"
    hf = read_json_object(file)
    if hf.get("model_type") != CHANGED["model_type"]:
        found = HF_CONFIG | dict(model_type=None) | hf
        for key, value in HF_CONFIG.items():
            if found[key] != value:
                raise ValueError(
                    f"{file} does not describe a GPT-2 as computed here: {key} is {found[key]!r}, not {value!r}"
                )
    stored = dict.fromkeys(SIZE_NAMES) | {name: hf[name] for name in stored_fields() if name in hf}
    try:
        return GPTConfig(**stored, dropout=dropout, attention=attention)
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from e


def stored_fields() -> list[str]:
    """The fields of GPTConfig that config.json holds."""
    return [field.name for field in fields(GPTConfig) if field.name not in OF_A_RUN]


def read_json_object(file: Path) -> dict:
    try:
        return dict(json.loads(file.read_bytes()))
    except (ValueError, TypeError, RecursionError, OSError) as e:
        raise ValueError(f"{file} cannot be read as a JSON object ({type(e).__name__}: {e})") from e


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory's safetensors: of one file, or of the parts of a large model, as its index lists them.
    Any other file there, such as model_old.safetensors, is somebody's own. Raises ValueError."""
    from safetensors.torch import load_file

    files = [path / "model.safetensors"]
    index = path / "model.safetensors.index.json"
    if index.exists() and not files[0].exists():
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index} has no weight_map")
        files = sorted({path / str(name) for name in weight_map.values()})
    state = {}
    for file in files:
        try:
            state |= load_file(file)
        except Exception as e:  # safetensors and the system each raise their own
            raise ValueError(
                f"{file} cannot be read ({e}): missing or damaged; if the weights are in pytorch_model.bin, save the "
                "model again with safe_serialization=True"
            ) from e
    return state


def own_names(tensors: dict, gpt: GPT, path: Path) -> dict[str, torch.Tensor]:
    """Tensors of a file under the names that `hf_state_dict` has for them; those it has no name for keep theirs.

    The hub's files leave the prefix out, and some hold the causal masks and a copy of the tied head. Raises ValueError
    for a copy that is none.
    """
    first_names = {}  # by tensor
    own = {}  # by any name
    for name, p in gpt.state_dict(keep_vars=True).items():
        first_names.setdefault(id(p), name)
        own[name] = own[name.removeprefix("transformer.")] = first_names[id(p)]
    state = {}
    for name, tensor in tensors.items():
        if name.endswith((".attn.bias", ".attn.masked_bias")) and name not in own:
            continue
        first = own.get(name, name)
        if first in state and not torch.equal(state[first].float(), tensor.float()):
            raise ValueError(f"{path}: {name} and another copy of {first} differ, but in this model.py they are tied")
        state[first] = tensor
    return state


# --------------------------------------------------------------------------------------- a question and its answer


def question(config: GPTConfig, n: int = 16) -> list[int]:
    """A row of at most n tokens."""
    return [7919 * i % config.vocab_size for i in range(1, 1 + min(n, config.n_positions))]


def has_answer_of_minimal(gpt: GPT, ids: list[int]) -> bool:
    """Whether minimal.py computes the same of the same weights."""
    import minimal

    sizes = {name: getattr(gpt.config, name) for name in ("vocab_size", "n_layer", "n_head", "n_embd")}
    with WithoutWeights():
        theirs = minimal.GPT(minimal.Config(sequence_length=gpt.config.n_positions, **sizes))
    if gpt.hf_state_dict().keys() != GPT.hf_state_dict(theirs).keys():  # as of tied layers, which a file has once
        return False
    try:
        theirs.load_state_dict(gpt.state_dict(), assign=True)
    except RuntimeError:  # other tensors
        return False
    return agree(gpt.answer(ids), GPT.answer(theirs, ids), 1e-4)


def answer_of_narrow(gpt: GPT) -> torch.Tensor:
    """What the code computes of a whole context and of large numbers, which a few tokens and young weights would not
    show."""
    return gpt.narrow.answer(question(gpt.narrow.config, 1024))[:16]


@contextlib.contextmanager
def exactly(model: nn.Module):
    """In fp32, without dropout and gradients, while the block runs."""
    training = model.training
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.no_grad(), torch.autocast(model.lm_head.weight.device.type, enabled=False):
            model.eval()
            yield
    finally:
        model.train(training)
        torch.set_float32_matmul_precision(precision)


def agree(logits, expected, tolerance: float) -> bool:
    """Whether logits differ by rounding alone, relative to the largest."""
    return bool((logits - expected).abs().max() <= tolerance * expected.abs().max() + 1e-6)


def sum_of(tensors: dict[str, torch.Tensor]) -> float:
    return sum(tensor.sum(dtype=torch.float64).item() for tensor in tensors.values() if tensor.is_floating_point())


def check_answer(gpt: GPT, tensors: dict, path: Path) -> None:
    """Compare a model with the answer in its config.json, if there is one. Raises ValueError."""
    file = path / "config.json"
    config = read_json_object(file)
    stored = config.get("question")
    # transformers keeps what it does not know, also when it saves a model that it has trained
    if stored is None or "transformers_version" in config:
        return
    try:
        ids = [int(i) for i in stored["ids"]]
        expected = torch.tensor(stored["logits"], dtype=torch.float32)
        total = float(stored["sum_of_weights"])
        if not 0 < len(ids) == len(expected) <= gpt.config.n_positions or min(ids) < 0:
            raise ValueError("ids and logits of one row are wanted")
        found = gpt.answer(ids)
        of_narrow = torch.tensor(stored.get("of_narrow", []), dtype=torch.float32)
    except (LookupError, TypeError, ValueError, OverflowError, RuntimeError) as e:
        raise ValueError(f"{file}: question is damaged ({e}); remove it") from e
    accept = f"to use it all the same, remove `question` from {file}"
    exact = all(tensor.dtype == torch.float32 for tensor in tensors.values() if tensor.is_floating_point())
    if exact and not math.isclose(sum_of(gpt.hf_state_dict()), total, rel_tol=1e-6, abs_tol=1e-6):
        raise ValueError(f"{path} does not hold the weights that were saved with its config.json: averaged? {accept}")
    if not agree(found, expected, 1e-4 if exact else 0.05):
        difference = (found - expected).abs().max()
        raise ValueError(
            f"this model.py computes something else than the one that wrote {path}: logits differ by {difference:.2g}; "
            f"take that model.py, or, {accept}"
        )
    if len(of_narrow) and not (gpt.narrow is not gpt and agree(answer_of_narrow(gpt), of_narrow, 1e-3)):
        raise ValueError(
            f"this model.py computes something else than the one that wrote {path}, of a whole context and large "
            f"weights; take that model.py, or, {accept}"
        )
