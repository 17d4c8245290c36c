"""GPT-2 and its training on one page: the model, the loss, AdamW, the schedule and the loop, in PyTorch alone.

    python minimal.py                                      # a small GPT that reads input.txt by bytes, on a CPU
    torchrun --standalone --nproc_per_node=8 minimal.py    # one process for each GPU

Nothing else of this project is imported: read it first, or copy it and begin something of your own. There are no flags:
edit the constants. For GPT-2 124M write shards (`python fineweb.py`) and take the values in brackets. It saves nothing.

`train_gpt2.py --no_shuffle --optimizer adamw` has the same losses, and adds what a long run needs: checkpoints, exact
resumes, shuffled data, evaluations, a loss that takes less memory. Wherever this project says that a model is a GPT-2,
it computes what the class GPT below computes.

Shapes in comments: B sequences, T tokens, C n_embd, H n_head, D = C / H channels of a head, V vocab_size.
"""

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


@dataclass
class Config:
    data: str = "input.txt"  # a .txt, read by bytes, or a folder of token shards [edu_fineweb10B]
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
    # machine
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    bf16: bool = device == "cuda"  # matrix products in bf16; a GPU older than Ampere has to do without
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
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # softmax(q k^T / sqrt(D)) v, of earlier tokens
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
        blocks = dict(  # under the names that OpenAI's weights have
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            wpe=nn.Embedding(config.sequence_length, config.n_embd),
            h=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            ln_f=nn.LayerNorm(config.n_embd),
        )
        self.transformer = nn.ModuleDict(blocks)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight  # tied
        self.apply(self.init_weights)

    def init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Block):  # after its layers: 2 n_layer branches add up to the scale of one
            std = 0.02 / math.sqrt(2 * len(self.transformer.h))
            nn.init.normal_(module.attn.c_proj.weight, std=std)
            nn.init.normal_(module.mlp.c_proj.weight, std=std)

    def hidden(self, idx):
        """What the head turns into logits: (B, T, C) of the tokens idx (B, T)."""
        positions = torch.arange(idx.size(1), device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(positions)  # (B, T, C)
        for block in self.transformer.h:
            x = block(x)
        return self.transformer.ln_f(x)

    def forward(self, idx, targets=None):
        """Logits (B, T, V), or their mean cross-entropy in nats against targets (B, T)."""
        logits = self.lm_head(self.hidden(idx))
        return logits if targets is None else F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


# ------------------------------------------------------------------------------------------ optimizer, schedule, data


def make_optimizer(model: GPT, config: Config) -> torch.optim.AdamW:
    """AdamW; only matrices and embeddings decay towards 0, biases and LayerNorm gains do not."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [dict(params=matrices, weight_decay=config.weight_decay), dict(params=others, weight_decay=0.0)]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.max_lr, betas=betas, eps=config.eps, fused=True)


def learning_rate(step: int, config: Config) -> float:
    """Linear warmup, then half a cosine down to min_lr in the last step; steps count from 1."""
    if step <= config.warmup_steps:
        return config.max_lr * step / config.warmup_steps
    progress = (step - config.warmup_steps) / (config.max_steps - config.warmup_steps)
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (config.max_lr - config.min_lr)


def open_tokens(data: str) -> list[np.ndarray]:
    """The bytes of a .txt, or the training shards of a folder, which stay on the disk."""
    if data.endswith(".txt"):
        return [np.fromfile(data, np.uint8)]
    return [np.asarray(np.load(file, mmap_mode="r")) for file in sorted(Path(data).glob("*_train_*.npy"))]


def read(tokens: list[np.ndarray], start: int, n: int) -> np.ndarray:
    """n tokens from `start` on, of all shards in a row."""
    parts = []
    for shard in tokens:
        parts.append(shard[max(start, 0) : max(start + n, 0)])  # empty, unless the n tokens reach into this shard
        start -= len(shard)
    return np.concatenate(parts).astype(np.int64)


# --------------------------------------------------------------------------------------------------------- training


def train(config: Config) -> GPT:
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    device = config.device
    if world_size > 1:  # torchrun has started us
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        if device == "cuda":
            device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(device)
    torch.manual_seed(config.seed)  # the same weights on all ranks
    if config.bf16:
        torch.set_float32_matmul_precision("high")  # TF32 for what is not in bf16

    tokens = open_tokens(config.data)
    T = config.sequence_length
    B = config.micro_batch_size
    n_windows = (sum(map(len, tokens)) - 1) // T  # of an epoch; the last one needs a target after its T tokens
    per_rank = config.total_batch_size // (T * world_size)  # windows of a step
    n_micro = per_rank // B
    assert n_micro * B * T * world_size == config.total_batch_size, "total_batch_size is not whole micro-batches"
    model = GPT(config).to(device)
    optimizer = make_optimizer(model, config)
    loss_fn = torch.compile(model) if config.compile else model
    if world_size > 1:
        loss_fn = DistributedDataParallel(loss_fn)

    for step in range(1, config.max_steps + 1):
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        mean_loss = torch.zeros((), device=device)
        first = ((step - 1) * world_size + rank) * per_rank  # windows in the order of the files, a part for each rank
        for i in range(n_micro):
            numbers = range(first + i * B, first + (i + 1) * B)
            windows = [read(tokens, number % n_windows * T, T + 1) for number in numbers]
            windows = torch.from_numpy(np.stack(windows)).to(device)  # (B, T + 1)
            idx, targets = windows[:, :-1], windows[:, 1:]  # (B, T) each; the next token is the target
            if world_size > 1:
                loss_fn.require_backward_grad_sync = i == n_micro - 1  # ranks average their gradients once
            with torch.autocast(config.device, torch.bfloat16, enabled=config.bf16):
                loss = loss_fn(idx, targets) / n_micro
            loss.backward()  # adds to the gradients
            mean_loss += loss.detach()
        if world_size > 1:
            dist.all_reduce(mean_loss)
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            step_loss = mean_loss.item() / world_size  # waits for the GPU
            seconds = time.perf_counter() - began
            print(f"step {step:5d}  loss {step_loss:.6f}  norm {norm:.3f}  {1000 * seconds:.1f} ms", flush=True)
    if world_size > 1:
        dist.destroy_process_group()
    return model


@torch.no_grad()
def sample(model: GPT, idx: list[int], n: int, n_positions: int) -> list[int]:
    """n tokens after idx, each drawn from what the model expects next."""
    for _ in range(n):
        context = torch.tensor([idx[-n_positions:]], device=model.lm_head.weight.device)  # (1, T)
        probs = F.softmax(model(context)[0, -1], dim=-1)  # (V,)
        idx = [*idx, torch.multinomial(probs, 1).item()]
    return idx


if __name__ == "__main__":
    config = Config()
    model = train(config)
    if int(os.environ.get("RANK", 0)) == 0:
        start = read(open_tokens(config.data), 0, 16).tolist()
        text = sample(model, start, 300, config.sequence_length)
        print(bytes(text).decode(errors="replace") if config.data.endswith(".txt") else text)
