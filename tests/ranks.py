"""Train several times in the process group of torchrun, for the tests; no test in itself.

    torchrun --nproc_per_node=2 tests/ranks.py '[{"args": ["tiny", "--out_dir", "x"], "fault": "inf before exchange"}]'

After each run it writes `ranks.json` into the run directory: what was seen on every rank. `fault` is something that
goes wrong on the last rank, in step FAULT_STEP. A job with a `kind` is no run, but a search for the micro-batch: see
`probe`.
"""

import hashlib
import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt2
from model import GPT, Block, GPTConfig
from parts import report
from parts.cli import UserError, script
from parts.loss import LinearCrossEntropy
from parts.optim import Optimizer
from parts.runtime import Runtime
from parts.trials import largest_that_fits
from tests.helpers import draw_nothing, seeded, spoil_gradients, write_json

FAULT_STEP = 3
OTHER_WEIGHTS = "other weights"  # on the last rank, from FAULT_STEP on, as faulty memory gives it
OTHER_MOMENTS = "other moments"  # which the last rank reads from its checkpoint
RANDOM_DEPTH = "random depth"  # each rank leaves out blocks of its own, which then have no gradient


def inf_before_exchange(patch, steps: list) -> None:
    """The first micro-batch has an infinite gradient, which the exchange of gradients hands to all ranks."""
    real = LinearCrossEntropy.backward

    def backward(ctx, grad):
        grad_x, *others = real(ctx, grad)
        if steps[-1:] == [FAULT_STEP]:
            steps.append(None)
            grad_x = grad_x * math.inf
        return grad_x, *others

    patch.setattr(LinearCrossEntropy, "backward", staticmethod(backward))


def inf_after_exchange(patch, steps: list) -> None:
    """Memory has gone wrong: this rank's own copy of a gradient is infinite, the others' are finite."""
    spoil_gradients(patch, lambda _: steps[-1:] == [FAULT_STEP], math.inf)


OUT_OF_MEMORY = {
    "allocator": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "cuBLAS": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
}


def probe(kind: str, file: str) -> None:
    """The micro-batch that fits where the last rank runs out of memory above 4 sequences, in the middle of the backward
    pass; then a training step with it. Rank 0 writes what each rank found, and its gradient."""
    rt = Runtime.setup("cpu", "float32")
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_positions=16, vocab_size=64, n_layer=2, n_head=2, n_embd=16))
    forward = rt.wrap(model)

    def raise_above_4(grad):
        if len(grad) > 4 and rt.rank == rt.world_size - 1:
            raise OUT_OF_MEMORY[kind]

    def watch(module, inputs, output):
        if output.requires_grad:
            output.register_hook(raise_above_4)

    model.transformer.h[0].register_forward_hook(watch)
    adamw = torch.optim.AdamW(model.parameters(), 0.1)
    size = largest_that_fits(model, [16, 8, 4, 2], 16, rt, lambda: Optimizer([adamw], rt))
    idx = torch.randint(64, (size, 16), generator=seeded(rt.rank))
    rt.set_gradient_sync(forward, now=True)
    forward(idx, idx).backward()
    found = [None] * rt.world_size
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    dist.all_gather_object(found, dict(size=size, norm=norm.item()))
    if rt.is_main:
        write_json(Path(file), found)


def leave_out_blocks(patch) -> None:
    real = Block.forward

    def forward(self, x, *args, **options):
        return x if self.training and torch.rand(()) < 0.5 else real(self, x, *args, **options)

    patch.setattr(Block, "forward", forward)


def change_moments(patch) -> None:
    real = torch.load

    def load(*args, **options):
        state = real(*args, **options)
        moments = state["optimizer"]["optimizers"][0]["state"][0]
        moments["exp_avg"] = moments["exp_avg"] + 1e-3
        return state

    patch.setattr(torch, "load", load)


FAULTS = {"inf before exchange": inf_before_exchange, "inf after exchange": inf_after_exchange}


def checksum(model) -> str:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def run(args: list[str], fault: str | None = None) -> None:
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    out_dir = Path(args[args.index("--out_dir") + 1])
    steps = []
    seeds = []
    trained = []
    real_train = train_gpt2.train
    real_rate = train_gpt2.learning_rate

    def train(config, run, model, *others):
        trained.append(model)
        return real_train(config, run, model, *others)

    def learning_rate(step, config):
        steps.append(step)
        seeds.append(torch.initial_seed())  # of the step's dropout
        if fault == OTHER_WEIGHTS and step == FAULT_STEP and rank == world_size - 1:
            next(trained[0].parameters()).data += 1e-3
        return real_rate(step, config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "draw", draw_nothing)
        patch.setattr(train_gpt2, "train", train)
        patch.setattr(train_gpt2, "learning_rate", learning_rate)
        patch.setattr(sys, "argv", ["train_gpt2.py", *args])
        if fault == RANDOM_DEPTH:
            leave_out_blocks(patch)
        if fault == OTHER_MOMENTS and rank == world_size - 1:
            change_moments(patch)
        if fault in FAULTS and rank == world_size - 1:
            FAULTS[fault](patch, steps)
        error = ""
        try:
            train_gpt2.main()
        except UserError as e:
            error = str(e)
    ranks = [None] * world_size
    dist.all_gather_object(ranks, dict(checksum=trained and checksum(trained[0]), seeds=seeds, error=error))
    if rank == 0:
        write_json(out_dir / "ranks.json", ranks)


def main() -> None:
    Runtime.setup("cpu", "float32")  # joins the ranks
    for job in json.loads(sys.argv[1]):
        probe(**job) if "kind" in job else run(**job)


if __name__ == "__main__":
    script(main)
