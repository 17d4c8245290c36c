"""Whether a run on a GPU keeps what it promises: it waits for nothing, compiles once, and goes on as if undisturbed.

- `loop`: the loop of train_gpt2.py with every operator an error that waits for the GPU; what is compiled, and when
- `restarts`: resumed from a checkpoint, and back from a loss spike, with AdamW and with Muon; the same steps alone and
  through a process group of one rank, by DDP and by fully_shard

All are runs of a small model on input.txt. Sums on a GPU are not repeatable to the last bit: losses have to agree to a
thousandth. This file knows nothing of what is fast.
"""

import contextlib
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

import train_gpt2
from benchmarks.checks import check, constants
from corpus.order import to_inputs
from learning.optim import make_optimizer
from model import GPT, Loss
from run import trials
from run.checkpoint import remove_after, snapshot
from run.directory import Run, SpikeDetector
from run.runtime import Runtime, distributed
from run.sharding import shard
from train_gpt2 import RECIPES

ROOT = Path(__file__).resolve().parent.parent
SMALL = dict(
    n_layer=2, n_head=2, n_embd=128, sequence_length=64, vocab_size=512, total_batch_size=1024, micro_batch_size=8,
    max_steps=12, warmup_steps=2, checkpoint_interval=6, eval_interval=6, eval_steps=1, hellaswag_interval=0,
    sample_interval=0, tokenizer="train",
)  # fmt: skip


def train(out_dir: Path, rt: Runtime, *switches: str, **changes) -> dict[int, float]:
    """A run of train_gpt2.py in this process; {step: loss} as its log has it."""
    data = out_dir.parent / "text.txt"
    data.write_text((ROOT / "input.txt").read_text()[:50_000])
    options = SMALL | dict(data=data, out_dir=out_dir, device=rt.device.type, compile="off") | changes
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    argv, sys.argv = sys.argv, ["train_gpt2.py", "gpt2", *words, *switches]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            train_gpt2.main()
    finally:
        sys.argv = argv
    return {r["step"]: r["loss"] for r in log_of(out_dir) if r["kind"] == "train"}


def log_of(out_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (out_dir / "log.jsonl").read_text().splitlines()]


@contextlib.contextmanager
def replaced(owner, name: str, make) -> Iterator[None]:
    """`owner.name` is make(what it was) while the block runs."""
    before = getattr(owner, name)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def far(a: dict, b: dict) -> float:
    """The largest relative difference of two runs' losses, inf where they have not the same steps."""
    return max(abs(a[step] / b[step] - 1) for step in b) if a.keys() == b.keys() else float("inf")


# ------------------------------------------------------------------------------------------------------------ the loop


def loop(config, rt: Runtime) -> list[dict]:
    """Compiled runs with a trial of the micro-batch and two validations; from step 3 on every wait is an error."""
    torch._logging.set_logs(recompiles=True, graph_breaks=True)  # says why, where there are some
    rows = []
    for optimizer in ("adamw", "muon"):
        torch._dynamo.reset()
        counters.clear()
        waited, graphs = watched_run(optimizer, rt)
        found = waited or ("no operator did" if rt.device.type == "cuda" else "no GPU to wait for")
        rows.append(check(f"nothing in the loop waits, {optimizer}", found, not waited))
        breaks = dict(counters["graph_break"])
        rows.append(check(f"no graph breaks, {optimizer}", str(breaks or "none"), not breaks))
        if optimizer == "adamw":  # which compiles nothing itself: after the trial only validation is left
            found = f"{graphs[0]} graphs before step 1, {graphs[1]} after it, {graphs[-1]} in the end"
            rows.append(check("what is compiled", found, graphs[1] == graphs[0] >= graphs[-1] - 1))
    return rows


def watched_run(optimizer: str, rt: Runtime) -> tuple[str, list[int]]:
    """(the error of an operator that waited, or ""; the number of graphs before each step, and in the end)."""
    cuda, graphs = rt.device.type == "cuda", []

    def learning_rate(real):  # the first thing that the loop's body calls
        def call(step, constants):
            graphs.append(counters["stats"]["unique_graphs"])
            if cuda and step >= 3:
                torch.cuda.set_sync_debug_mode("error")
            return real(step, constants)

        return call

    def log_step(real):  # the last thing
        def call(*args):
            real(*args)
            if cuda:
                torch.cuda.set_sync_debug_mode("default")

        return call

    def has_memory_for(real):  # as where memory is short: only compiled code can have the larger micro-batch
        def call(size, shape, forward, *others):
            return real(size, shape, forward, *others) if hasattr(forward, "_orig_mod") else size <= 8

        return call

    waited = ""
    with (
        tempfile.TemporaryDirectory(dir=".") as folder,
        replaced(train_gpt2, "learning_rate", learning_rate),
        replaced(Run, "log_step", log_step),
        replaced(trials, "has_memory_for", has_memory_for),
    ):
        try:
            train(Path(folder) / "run", rt, optimizer=optimizer, compile="auto", micro_batch_size=0)
        except RuntimeError as e:
            waited = str(e).splitlines()[0]
        finally:
            if cuda:
                torch.cuda.set_sync_debug_mode("default")
    return waited, [*graphs, counters["stats"]["unique_graphs"]]


# -------------------------------------------------------------------------------------------------------- going on


def restarts(config, rt: Runtime) -> list[dict]:
    rows = []
    for optimizer in ("adamw", "muon"):
        with tempfile.TemporaryDirectory(dir=".") as folder:
            whole, parts, spiky = (Path(folder) / name for name in ("whole", "parts", "spiky"))
            expected = train(whole, rt, optimizer=optimizer)
            shutil.copytree(whole, parts)
            remove_after(parts / "step_000006")  # as if it had been killed later
            error = far(train(parts, rt, "--resume", optimizer=optimizer), expected)
            rows.append(check(f"resumed, {optimizer}", f"losses within {error:.1e}", error < 1e-3))
            with replaced(SpikeDetector, "add", spike_at(10)):
                losses = train(spiky, rt, optimizer=optimizer)
            back = [r for r in log_of(spiky) if r["kind"] == "rollback"]
            good = len(back) == 1 and back[0]["step"] == 6 and losses.keys() == expected.keys()
            rows.append(check(f"rolled back, {optimizer}", f"to step {[r['step'] for r in back]}", good))
    return rows + one_rank(rt)


def spike_at(number: int):
    """Let the loss of a number be a spike, once."""
    seen = []

    def make(real):
        def add(self, loss: float) -> bool:
            seen.append(loss)
            return real(self, loss) or len(seen) == number

        return add

    return make


def one_rank(rt: Runtime) -> list[dict]:
    """Three steps, a checkpoint of the optimizer, three more: alone, and with what runs between ranks."""
    cuda, rows = rt.device.type == "cuda", []
    options = dict(device_id=rt.device) if cuda else {}
    dist.init_process_group("nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1, **options)
    try:
        mesh = init_device_mesh(rt.device.type, (1,), mesh_dim_names=("shard",))
        for name in ("adamw", "muon"):
            alone = six_steps(name, rt, "alone")
            for way, runtime in {"DDP": rt, "fully_shard": replace(rt, shard="optimizer", mesh=mesh)}.items():
                error = max(abs(a / b - 1) for a, b in zip(six_steps(name, runtime, way), alone, strict=True))
                rows.append(check(f"a group of one rank, {way}, {name}", f"losses within {error:.1e}", error < 1e-3))
    finally:
        dist.destroy_process_group()
    return rows


def six_steps(name: str, rt: Runtime, way: str) -> list[float]:
    config = replace(constants("tiny"), optimizer=name, max_lr=RECIPES["tiny"].max_lr)
    torch.manual_seed(0)
    model = GPT(train_gpt2.model_shape(config, "gpt2", None, rt)).to(rt.device)
    forward = Loss(model)
    if way == "DDP":
        forward = distributed(forward, rt.device)
    elif way == "fully_shard":
        shard(forward, model.transformer.h, rt)
    windows = torch.randint(50, (8, config.sequence_length + 1), generator=torch.Generator().manual_seed(0))
    idx, targets = to_inputs(windows.to(rt.device))
    losses, state = [], None
    for _ in range(2):
        optimizer = make_optimizer(model, config, rt)
        if state is not None:
            optimizer.load_state_dict(state)
        for _ in range(3):
            optimizer.set_lr(config.max_lr)
            loss = forward(idx, targets)
            optimizer.scale(loss).backward()
            optimizer.step(finite=optimizer.clip_grad_norm(1.0).isfinite())
            losses.append(loss.item())
        state = snapshot(optimizer.state_dict())  # as a checkpoint has it
    return losses
