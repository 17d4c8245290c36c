"""Checks that run no script of the project: parts of it, alone with the fake GPU. Each returns the text of its row."""

import gc
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import numpy as np
import torch

# private or recent operators that the project calls, and that a new version of PyTorch might not have
OPERATORS = (
    "addmm.dtype_out", "_fused_adamw_", "_foreach_norm.Scalar", "_foreach_mul_.Tensor",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention",
)  # fmt: skip


def operators() -> str:
    for name in OPERATORS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"), name
    x = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16)
    total = torch.ones(256, 256, device="cuda")
    assert torch.addmm(total, x, x, out_dtype=torch.float32, out=total) is total
    return f"all {len(OPERATORS)} operators; code for {torch._C._cuda_getArchFlags()}"


def prefetch() -> str:
    """Pinned memory must not be filled again before its copy was made; with one buffer for all it is."""
    from parts.runtime import prefetch

    def batches() -> Iterator[list]:
        for i in range(20):
            yield [np.full((64, 1025), 8 * i + j) for j in range(8)]

    def reused() -> Iterator[list]:
        buffer = torch.empty(64, 1025, dtype=torch.int64, pin_memory=True)
        for arrays in batches():
            yield [buffer.copy_(torch.as_tensor(x)).to("cuda", non_blocking=True) for x in arrays]

    ours = n_wrong(prefetch(batches(), torch.device("cuda", 0)))
    control = n_wrong(reused())
    assert ours == 0 < control
    return f"{ours} of 160 tensors wrong; {control} if a pinned buffer is reused"


def n_wrong(found: Iterator[list]) -> int:
    kept = list(found)
    torch.cuda.synchronize()
    tensors = [x for batch in kept for x in batch]
    return sum(not (x.cpu() == i).all() for i, x in enumerate(tensors))


def flops() -> str:
    """PyTorch counts what `estimate_flops` estimates, and the product that flash attention's backward pass repeats."""
    from torch.utils.flop_counter import FlopCounterMode

    from model import GPT, GPTConfig

    with torch.device("cuda"):
        loss_fn = GPT(GPTConfig(vocab_size=50304))
        idx = torch.zeros(2, 1024, dtype=torch.long)

    def addmm(total, a, b, *dtype, **options) -> int:  # PyTorch's own formula takes no out_dtype
        return 2 * a[0] * a[1] * b[1]

    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm: addmm})
    with counter, torch.autocast("cuda", torch.bfloat16):
        loss_fn(idx, idx).backward()
    ratio = counter.get_total_flops() / idx.numel() / loss_fn.estimate_flops(1024)
    assert 1 < ratio < 1.05
    return f"counted / estimate_flops = {ratio:.4f}"


class Trainer:
    """The training of train_gpt2.py for the same command line, on random tokens and without files."""

    def __init__(self, *words: str):
        import train_gpt2 as script
        from parts.runtime import Runtime

        config, flags, _ = script.read_command_line([*words, "--device", "cuda"])
        self.rt = Runtime.setup("cuda", config.dtype, config.compile)
        self.config, self.shape = script.settle(config, flags, None, None, self.rt)
        with torch.device("cuda"):
            self.model = script.build_model(self.config, self.shape, None)
        _, self.loss_fn = script.distribute(self.config, self.model, self.rt)
        self.optimizer = script.make_optimizer(self.model, self.config, self.rt)
        n_tokens = (self.config.micro_batch_size, self.config.sequence_length)
        self.idx = torch.zeros(n_tokens, dtype=torch.long, device="cuda")

    def micro_batch(self, last: bool) -> None:
        self.rt.set_gradient_sync(self.loss_fn, last)
        with self.rt.autocast():
            loss = self.loss_fn(self.idx, self.idx)
        self.optimizer.scale(loss).backward()

    def step(self) -> None:
        self.optimizer.set_lr(1.0)
        norm = self.optimizer.clip_grad_norm(self.config.grad_clip)
        self.optimizer.step(finite=norm.isfinite())
        self.optimizer.zero_grad()


def memory(sizes: str, batches: str, *words: str) -> str:
    """The allocator's peak against the table of --dry_run. Sizes and batches are lists with commas between."""
    from parts.plan import memory_by_kind

    ratios = []
    for size in sizes.split(","):
        for rows in batches.split(","):
            gc.collect()  # the trainer of the size before
            torch.cuda.reset_peak_memory_stats()
            trainer = Trainer(size, "--micro_batch_size", rows, *words)
            for _ in range(2):
                trainer.micro_batch(last=False)
                trainer.micro_batch(last=True)
                trainer.step()
                time.sleep(0.5)  # NCCL's watchdog lets go of a step's buckets when it sees that the step is over
            config, rt = trainer.config, trainer.rt
            table = sum(memory_by_kind(config, trainer.model, int(rows)).values()) / 1e9
            peak = torch.cuda.max_memory_allocated() / 1e9
            print(f"{size} B={rows} {' '.join(words)}: peak {peak:.2f} GB, table {table:.2f}, {table / peak:.3f}")
            ratios.append(table / peak)
            del trainer
            torch._dynamo.reset()
    low, high = (0.9, 1.1) if rt.compile else (0.88, 1.25)  # the table is that of compiled runs
    assert low <= min(ratios), f"the table is {min(ratios):.3f} of a peak"
    assert max(ratios) <= high, f"the table is {max(ratios):.3f} of a peak"
    return f"{len(ratios)} peaks; the table is {min(ratios):.3f} to {max(ratios):.3f} of them"


def host(*words: str) -> str:
    """What one core spends on launching a micro-batch and the optimizer's step, since kernels take no time."""
    trainer = Trainer("gpt2", *words)
    micro_batches, steps = [], []
    for _ in range(20):
        for last in (False, False, False, True):
            micro_batches.append(seconds_of(partial(trainer.micro_batch, last)))
        steps.append(seconds_of(trainer.step))
    return f"{1e3 * median(micro_batches):.1f} ms of a core for a micro-batch, {1e3 * median(steps):.1f} ms for a step"


def seconds_of(work: Callable) -> float:
    """Of a core, in all threads of this process: the backward pass has its own. Waiting for a core does not count."""
    began = time.process_time()
    work()
    return time.process_time() - began
