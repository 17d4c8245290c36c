"""One process with the fake GPU: runs a script of this project, and watches each optimizer step.

    process.py train_gpt2.py gpt2 ...    # or a probe of probes.py, or pytest

From the third step on, an operator of the training loop that waits for the GPU is an error, and so is a graph that has
to be compiled. Each step prints a line that starts with [fake].
"""

import ctypes
import os
import pickle
import runpy
import sys
import traceback
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

sys.path.insert(0, os.getcwd())

import faults
import probes

from parts import checkpoint, evaluation, huggingface
from parts.run import Run
from parts.runtime import Runtime

KINDS = ("ATen", "cuBLAS", "Triton", "NCCL")  # of launches, in the order of gpu.h
library = ctypes.CDLL("libcuda.so.1")


def main(words: list[str]) -> int:
    imitate_cudnn()
    dist._verify_params_across_processes = lambda *args: None  # DDP reads what a kernel would have gathered
    if n_ranks := int(os.environ.get("WORLD_SIZE", 0)):
        meet_nobody(n_ranks)
    if fault := os.environ.get("FAKE_FAULT"):
        getattr(faults, fault)()
    Runtime.check_same = lambda *args: None  # nor are weights, whose sums no kernel has computed
    let_logits_be_finite()
    checkpoint.is_gpt2 = lambda *args: True  # no number means anything: transformers cannot be asked
    huggingface.compare_logits = lambda *args: None
    evaluation.loss_is_of_logits = lambda *args: True
    watch_steps()
    if words[0] == "pytest":
        import pytest

        return pytest.main(words[1:])
    if hasattr(probes, words[0]):
        print("[fake]", getattr(probes, words[0])(*words[1:]))
        return 0
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
    return 0


def let_logits_be_finite() -> None:
    """A truth that no kernel has computed reads as false; sampling asks whether all logits are finite."""
    real = torch.Tensor.all
    torch.Tensor.all = lambda x, *dims: torch.tensor(True, device="cuda") if x.is_cuda else real(x, *dims)


def imitate_cudnn() -> None:
    """cuDNN plans its attention on the card. Take shapes and strides from the operator's meta function instead."""
    implementations = torch.library.Library("aten", "IMPL")

    def on(device: str, x):
        if not isinstance(x, torch.Tensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)

    def register(name: str) -> None:
        operator = getattr(torch.ops.aten, name).default

        def empty(*args, **kwargs):
            outputs = operator(*(on("meta", x) for x in args), **kwargs)
            return tuple(on("cuda", x) for x in outputs)

        implementations.impl(name, empty, "CUDA")

    register("_scaled_dot_product_cudnn_attention")
    register("_scaled_dot_product_cudnn_attention_backward")
    imitate_cudnn.kept = implementations  # they last as long as this object


def meet_nobody(n_ranks: int) -> None:
    """Ranks run one after another. The store that they would share is a file, and so are the objects they broadcast."""
    folder = Path(os.environ["FAKE_NCCL"])
    store = dist.FileStore(str(folder / "store"), n_ranks)
    numbers = count()

    def broadcast_objects(objects: list, src: int = 0, **options) -> None:
        file = folder / f"objects_{next(numbers)}"
        if dist.get_rank() == src:
            file.write_bytes(pickle.dumps(objects))
        objects[:] = pickle.loads(file.read_bytes())
        library.fake_note(b"broadcast of objects")

    dist.rendezvous = lambda url, rank, world_size, **options: iter([(store, rank, world_size)])
    dist.broadcast_object_list = broadcast_objects


def launches() -> list[int]:
    return [library.fake_launches(kind) for kind in range(len(KINDS))]


def watch_steps() -> None:
    """Between the start of a step and its `log` lies the body of the training loop."""
    steps, log = Run.steps, Run.log

    def strict(on: bool) -> None:
        torch.cuda.set_sync_debug_mode("error" if on else "default")
        torch._dynamo.config.error_on_recompile = on

    before = {}

    def watched_steps(run: Run) -> Iterator[int]:
        for step in steps(run):
            before.update(launches=launches(), graphs=counters["stats"]["unique_graphs"])
            strict(step >= 3)
            yield step

    def watched_log(run: Run, *figures) -> None:
        log(run, *figures)
        strict(False)
        graphs = counters["stats"]["unique_graphs"]
        new = [f"{b - a} {kind}" for kind, a, b in zip(KINDS, before["launches"], launches(), strict=True)]
        peak = torch.cuda.max_memory_allocated() / 1e9
        pieces = counters["aot_autograd"]["total"]  # DDP cuts a graph where a bucket ends
        breaks = sum(counters["graph_break"].values())
        biases = counters["bias_gradients"]["by_sequence"]  # a cached graph does not count them
        compiled = f"{graphs} graphs in {pieces} pieces, {breaks} breaks, {biases} biases"
        print(f"[fake] step {run.step}: {', '.join(new)}; peak {peak:.2f} GB; {compiled}")
        if run.step >= 3 and graphs > before["graphs"]:
            raise AssertionError(f"step {run.step} compiled {graphs - before['graphs']} more graphs")

    Run.steps, Run.log = watched_steps, watched_log


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
    except SystemExit as e:
        status = e.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(status))  # the fake GPU does not shut down in order
