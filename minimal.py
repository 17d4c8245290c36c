"""GPT-2 and its training on one page, in PyTorch alone.

    python minimal.py                                      # a small GPT on input.txt, byte by byte, on a CPU
    torchrun --standalone --nproc_per_node=8 minimal.py    # one process per GPU
    python -m pytest tests/test_minimal.py                 # train_gpt2.py --no_shuffle has these losses

It imports nothing else of this project: read it first, or fork it. There are no flags: edit the constants. For GPT-2
124M run `python fineweb.py` (shards: *_train_*.npy and *_val_*.npy, uint16) and take the values in brackets.
`train_gpt2.py` adds shuffled data, checkpoints for transformers, HellaSwag, flags, and a loss that takes less memory.

Shapes: B sequences, T tokens, C n_embd, H n_head, D = C / H channels per head, V vocab_size.
"""

import math
import os
import sys
import time
from bisect import bisect_right
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


@dataclass
class Config:
    data: str = "input.txt"  # a .txt, read byte by byte, or a folder of token shards [edu_fineweb10B]
    checkpoint: str = "out/minimal.pt"
    resume: bool = False  # continue from the checkpoint; set it on a finished run to sample again
    # model
    vocab_size: int = 256  # [50304: 50257 tokens, padded to a multiple of 128 for the tensor cores]
    n_layer: int = 4  # [12]
    n_head: int = 4  # [12]
    n_embd: int = 128  # [768]
    sequence_length: int = 128  # tokens of context [1024]
    # batch, schedule, optimizer
    total_batch_size: int = 2048  # tokens a step, over all ranks and micro-batches [524_288]
    micro_batch_size: int = 16  # sequences at once; what fits into memory [32, 64]
    max_steps: int = 500  # [19_073, one epoch of 10B tokens]
    warmup_steps: int = 20  # [715]
    max_lr: float = 3e-3  # [6e-4]
    min_lr: float = 3e-4  # [6e-5]
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    grad_clip: float = 1.0
    seed: int = 1337
    # validation and checkpoints
    eval_interval: int = 100  # steps between validations and checkpoints [250]
    eval_steps: int = 20  # micro-batches of a validation
    # machine
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    bf16: bool = device == "cuda"  # matrix products in bf16; needs Ampere or newer. Of the device above: set it too
    compile: bool = device == "cuda"


# -------------------------------------------------------------------------------------------------------- the model


class CausalSelfAttention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # queries, keys and values of all heads
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)  # (B, T, C) each
        q = q.view(B, T, self.n_head, -1).transpose(1, 2)  # (B, H, T, D)
        k = k.view(B, T, self.n_head, -1).transpose(1, 2)  # (B, H, T, D)
        v = v.view(B, T, self.n_head, -1).transpose(1, 2)  # (B, H, T, D)
        # softmax(QK^T / sqrt(D)) V; each token sees itself and earlier ones
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).reshape(B, T, C)  # heads side by side again
        return self.c_proj(y)


class MLP(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))  # tokens talk to each other
        return x + self.mlp(self.ln_2(x))  # each one thinks on its own


class GPT(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        modules = dict(  # under the names of OpenAI's weights
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            wpe=nn.Embedding(config.sequence_length, config.n_embd),
            h=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            ln_f=nn.LayerNorm(config.n_embd),
        )
        self.transformer = nn.ModuleDict(modules)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight  # tied
        self.apply(self.init_weights)

    def init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Block):  # apply() visits children first: this overrides 0.02; 2 n_layer branches add up
            std = 0.02 / math.sqrt(2 * len(self.transformer.h))
            nn.init.normal_(module.attn.c_proj.weight, std=std)
            nn.init.normal_(module.mlp.c_proj.weight, std=std)

    def forward(self, idx, targets=None):
        """Return logits (B, T, V) of idx (B, T), or their mean cross-entropy in nats against targets (B, T)."""
        positions = torch.arange(idx.size(1), device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(positions)  # (B, T, C)
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))  # (B, T, V)
        return logits if targets is None else F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


# ------------------------------------------------------------------------------------------ optimizer, schedule, data


def make_optimizer(model: GPT, config: Config) -> torch.optim.AdamW:
    """Make AdamW; only matrices and embeddings decay towards 0, biases and LayerNorm gains do not."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [dict(params=matrices, weight_decay=config.weight_decay), dict(params=others, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=config.max_lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def learning_rate(step: int, config: Config) -> float:
    """Warm up linearly, then follow half a cosine down to min_lr in the last step; steps count from 1."""
    if step <= config.warmup_steps:
        return config.max_lr * step / config.warmup_steps
    progress = (step - config.warmup_steps) / (config.max_steps - config.warmup_steps)
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (config.max_lr - config.min_lr)


class Tokens:
    """One long sequence of tokens, in one or more arrays."""

    def __init__(self, shards: list[np.ndarray]):
        self.shards = shards
        self.ends = list(accumulate(map(len, shards)))  # tokens up to the end of each shard

    def read(self, start: int, n: int) -> np.ndarray:
        """Return the n tokens from `start` on, (n,) int64."""
        i = bisect_right(self.ends, start)  # the first token's shard
        begin = start - self.ends[i] + len(self.shards[i])  # within this shard
        tokens = self.shards[i][begin : begin + n]
        if len(tokens) < n:  # the rest is in the next shard
            tokens = np.concatenate([tokens, self.shards[i + 1][: n - len(tokens)]])
        return tokens.astype(np.int64)

    def windows(self, numbers: range, T: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets, (B, T) each, of B windows. Window i starts at token i * T; past the end, wrap."""
        n_windows = (self.ends[-1] - 1) // T  # the last input also needs a target
        starts = [(number % n_windows) * T for number in numbers]
        tokens = torch.from_numpy(np.stack([self.read(start, T + 1) for start in starts]))  # (B, T + 1)
        return tokens[:, :-1], tokens[:, 1:]  # each target is the token after its input


def open_tokens(data: str, split: str) -> Tokens:
    """Open the split `train` or `val`: a .txt's first nine tenths or its last tenth; or a folder's shards."""
    if data.endswith(".txt"):
        text = np.fromfile(data, np.uint8)
        n_train = len(text) * 9 // 10
        return Tokens([text[:n_train] if split == "train" else text[n_train:]])
    files = sorted(Path(data).glob(f"*_{split}_*.npy"))
    return Tokens([np.load(file, mmap_mode="r") for file in files])  # stays on the disk


# --------------------------------------------------------------------------------------------------------- training


def train(config: Config) -> GPT:
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    checkpoint = Path(config.checkpoint)
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    if checkpoint.exists() and not config.resume:
        print(f"error: {checkpoint} exists; remove it, set resume = True, or choose another", file=sys.stderr)
        sys.exit(2)
    if world_size > 1:  # torchrun has started us
        dist.init_process_group("nccl" if config.device == "cuda" else "gloo")
        if config.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # "cuda" is this rank's GPU from here on
    torch.manual_seed(config.seed)  # the same weights on all ranks
    torch.set_float32_matmul_precision("high" if config.bf16 else "highest")  # TF32 for what is not in bf16

    tokens = open_tokens(config.data, "train")
    model = GPT(config).to(config.device)
    optimizer = make_optimizer(model, config)
    first_step = 1
    if config.resume and checkpoint.exists():
        state = torch.load(checkpoint, map_location=config.device, weights_only=True)
        model.load_state_dict(state["model"])
        groups = optimizer.state_dict()["param_groups"]  # weight decay and betas are those above, not the file's
        optimizer.load_state_dict(state["optimizer"] | dict(param_groups=groups))
        first_step = state["step"] + 1
    loss_fn = torch.compile(model) if config.compile else model
    if world_size > 1:
        loss_fn = DistributedDataParallel(loss_fn)

    B = config.micro_batch_size
    T = config.sequence_length
    n_windows = config.total_batch_size // T  # of a step
    n_micro = n_windows // (B * world_size)  # micro-batches of a step on this rank
    assert n_micro * B * T * world_size == config.total_batch_size, "total_batch_size is not whole micro-batches"

    for step in range(first_step, config.max_steps + 1):
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        mean_loss = torch.zeros((), device=config.device)
        # windows come in file order, unshuffled; ranks share those of a step
        first = (step - 1) * n_windows + rank * n_micro * B
        for i in range(n_micro):
            idx, targets = tokens.windows(range(first + i * B, first + (i + 1) * B), T)  # (B, T) each
            loss_fn.require_backward_grad_sync = i == n_micro - 1  # DDP: ranks average their gradients once
            with torch.autocast(config.device, torch.bfloat16, enabled=config.bf16):
                loss = loss_fn(idx.to(config.device), targets.to(config.device)) / n_micro
            loss.backward()  # adds to the gradients
            mean_loss += loss.detach()
        if world_size > 1:
            dist.all_reduce(mean_loss)
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        if rank > 0:
            continue
        step_loss = mean_loss.item() / world_size  # waits for the GPU
        ms = 1000 * (time.perf_counter() - began)
        print(f"step {step:5d}  loss {step_loss:.6f}  norm {norm:.3f}  {ms:.1f} ms", flush=True)
        if step % config.eval_interval == 0 or step == config.max_steps:
            print(f"step {step:5d}  validation loss {validate(model, config):.4f}", flush=True)
            state = dict(step=step, config=asdict(config), model=model.state_dict(), optimizer=optimizer.state_dict())
            torch.save(state, f"{checkpoint}.tmp")
            os.replace(f"{checkpoint}.tmp", checkpoint)  # a kill leaves the old one or the new one
    if world_size > 1:
        dist.destroy_process_group()
    return model


@torch.no_grad()
def validate(model: GPT, config: Config) -> float:
    """Return the mean loss of the validation split's first windows, in nats per token."""
    model.eval()  # turns off the dropout that you may add
    tokens = open_tokens(config.data, "val")
    B = config.micro_batch_size
    total = 0.0
    for i in range(config.eval_steps):
        idx, targets = tokens.windows(range(i * B, (i + 1) * B), config.sequence_length)
        with torch.autocast(config.device, torch.bfloat16, enabled=config.bf16):
            total += model(idx.to(config.device), targets.to(config.device)).item()
    model.train()
    return total / config.eval_steps


@torch.no_grad()
def sample(model: GPT, idx: list[int], n: int, n_positions: int) -> list[int]:
    """Append n tokens to idx, each drawn from the model's distribution of the next token."""
    model.eval()
    for _ in range(n):
        context = torch.tensor([idx[-n_positions:]], device=model.lm_head.weight.device)  # (1, T)
        probs = F.softmax(model(context)[0, -1], dim=-1)  # (V,)
        idx = [*idx, torch.multinomial(probs, 1).item()]
    return idx


if __name__ == "__main__":
    config = Config()
    model = train(config)
    if int(os.environ.get("RANK", 0)) == 0:
        start = open_tokens(config.data, "val").read(0, 16).tolist()
        text = sample(model, start, 300, config.sequence_length)  # GPT-2: tiktoken.get_encoding("gpt2").decode(text)
        print(bytes(text).decode(errors="replace") if config.data.endswith(".txt") else text)
