"""The machine: device, precision, torch.compile, batches on their way to the device; and the ranks. One place for each
decision. This file knows nothing of GPT-2, shards, checkpoints or run directories.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from bpe.training import cpu_count
from parts.cards import peak_of
from parts.cli import UserError, counted, printable

STOP_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)]

# How long a rank waits for the others, which may be compiling, or for the first one, which writes a checkpoint: the
# 19 GB of GPT-2 XL take over six minutes on a disk of 50 MB/s, and are read again for their sums. torchrun notices at
# once when a process dies; one that hangs, or whose machine loses its network, ends the others only after this time.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)

ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

# options of mallopt, as malloc.h numbers them: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD
MALLOC = {-3: 2**30, -1: 2**30, -2: 2**26}


@dataclass(frozen=True)
class Runtime:
    """The machine as one process of a run sees it."""

    device: torch.device
    dtype: torch.dtype  # of matrix products; weights are kept in fp32
    compile: bool
    rank: int
    world_size: int
    name: str  # of the device

    @classmethod
    def setup(cls, device="auto", dtype="auto", compile="off", threads: int = 0) -> "Runtime":
        """Decide for this process, join the process group under torchrun, choose matmul precision.

        `threads` of a CPU: 0 for PyTorch's number, which heeds OMP_NUM_THREADS; never more than this process has cores.
        Raises UserError for a missing device, dtype or compiler.
        """
        rank, world_size, local_rank = ranks_of_environment()
        if rank:
            warnings.simplefilter("ignore")  # the first rank says the same
        device = _choose_device(device, local_rank)
        name = device.type
        if device.type == "cuda":
            torch.cuda.set_device(device)
            name = torch.cuda.get_device_name(device)
            # cuDNN builds a plan for each new shape, which is slow for batches of changing shapes; see static_shapes
            torch.backends.cuda.enable_cudnn_sdp(False)
        elif device.type == "cpu":
            _keep_freed_memory()
            torch.set_num_threads(min(threads or torch.get_num_threads(), cpu_count()))
        if world_size > 1 and not dist.is_initialized():
            _join_ranks(device, rank, world_size)
        torch.set_float32_matmul_precision("high")  # TF32 for what is left in fp32
        dtype = _choose_dtype(dtype, device)
        return cls(device, dtype, _choose_compile(compile, device), rank, world_size, name)

    @property
    def description(self) -> str:
        """Describe this machine on the first line of a run."""
        threads = f" with {counted(torch.get_num_threads(), 'thread')}" if self.device.type == "cpu" else ""
        ranks = f", {self.world_size} ranks" if self.world_size > 1 else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name}{threads}, {dtype}, compile {'on' if self.compile else 'off'}{ranks}"

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    # ---- the forward pass

    def autocast(self, cache: bool = False):
        """Return the context of every forward pass: matrix products in `dtype`. LayerNorm stays in fp32, on a GPU also
        softmax, which on a CPU is in `dtype`. For the residual stream see `residual_dtype` in model.py.

        `cache` keeps the weights in `dtype` until the context ends, for evaluations, which take many forward passes in
        one. A training step casts each weight once: the copies would only take memory (3 GB for GPT-2 XL).
        """
        on = self.dtype != torch.float32
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=on, cache_enabled=cache)

    def wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return the module as a loop calls it: on several ranks in DDP, which averages gradients over them.

        A gradient is a view of the bucket that it is exchanged in, and exists once (see Optimizer.zero_grad). Dynamo
        cuts a compiled graph where a bucket ends: the 498 MB of GPT-2 124M are 13 graphs with DDP's buckets of 25 MB,
        and 5 with those of 100. The kernels stay the same (tools/fake_gpu), so that larger buckets save launches,
        compilation and exchanges; one bucket would leave no backward pass to hide its exchange behind. Which size is
        fastest, only eight cards can tell.

        A parameter without a use, or a block that one rank leaves out, would make the others wait for its gradient.
        find_unused_parameters looks for them, for 0.5 ms of the host a step and a warning of PyTorch that all are used.
        """
        if self.world_size == 1:
            return module
        return DistributedDataParallel(
            module, gradient_as_bucket_view=True, bucket_cap_mb=100, find_unused_parameters=True
        )

    def compiled(self, model: torch.nn.Module, dynamic: bool = False) -> torch.nn.Module:
        """Return the model, compiled if this run compiles, but for its loss (parts/loss.py says why); its shapes may
        change only if `dynamic`."""
        if not self.compile:
            return model
        model.loss = torch.compiler.disable(model.loss)
        return torch.compile(model, dynamic=dynamic, backend="inductor" if dynamic else static_shapes)

    def set_gradient_sync(self, loss_fn: torch.nn.Module, now: bool) -> None:
        """Set whether the next backward pass averages the gradients over the ranks; call it before the forward pass.

        With gradient accumulation only the last micro-batch has to: the others add up on each rank.
        """
        if self.world_size > 1:
            loss_fn.require_backward_grad_sync = now

    # ---- what ranks say to each other

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor`, on the device or the host, over all ranks."""
        if self.world_size > 1:
            tensor = tensor.to(self.device)
            dist.all_reduce(tensor)  # its default is the sum
        return tensor

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """Average over all ranks; Gloo has no AVG."""
        return self.sum(tensor) / self.world_size

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def broadcast_from_main(self, work: Callable[[], object]) -> object:
        """Run `work()` on the first rank, and return its result on all. All ranks raise its UserError: none waits."""
        found = [None, None]
        if self.is_main:
            try:
                found[0] = work()
            except UserError as e:
                found[1] = e
        if self.world_size > 1:
            dist.broadcast_object_list(found, src=0)
        if found[1] is not None:
            raise found[1]
        return found[0]

    def check_same(self, tensors: list[torch.Tensor], what: str) -> None:
        """Raise UserError, on all ranks alike, if the sum of `tensors` differs between them."""
        if self.world_size == 1:
            return
        totals = [0.0] * self.world_size
        dist.all_gather_object(totals, sum(tensor.detach().double().sum().item() for tensor in tensors))
        if n_others := sum(total != totals[0] for total in totals):
            raise UserError(
                f"{counted(n_others, 'rank')} with other {what} than rank 0; check that no rank changes its own alone, "
                "and that all nodes have the same files and intact memory"
            )

    # ---- the device's clock and memory

    @property
    def steps_ahead(self) -> int:
        """Training steps that may be in flight before the figures of the first one are read: a GPU that waits for the
        host to read them is idle. On a CPU there is nothing to wait for."""
        return int(self.device.type == "cuda")

    def synchronize(self) -> None:
        """Wait for the device, so that a clock that is read afterwards counts all of its work."""
        getattr(torch, self.device.type).synchronize()

    def mark_time(self) -> "torch.cuda.Event | float":
        """Mark the moment at which the device finishes all work launched so far. The host's clock would not tell: the
        host is up to a step ahead, or waits until it may launch more."""
        if self.device.type == "cuda":
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
            return mark
        self.synchronize()
        return time.perf_counter()

    def seconds_between(self, a, b) -> float:
        """Return the time from mark `a` to mark `b` of `mark_time`; wait for both."""
        if self.device.type != "cuda":
            return b - a
        b.synchronize()
        return a.elapsed_time(b) / 1e3

    def peak_memory(self) -> int:
        """Return peak bytes: of the GPU's allocator, else resident memory of the process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        try:
            import resource
        except ImportError:  # Windows
            return 0
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def reset_peak_memory(self) -> None:
        """Measure the peak from here on; only that of a GPU can be reset."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_flops(self) -> float | None:
        """Return the peak of all ranks together; None where it is unknown, so that MFU is n/a."""
        peak = peak_of(self.name)
        return peak and peak * self.world_size

    def print(self, text: str, **options) -> None:
        """Print on the first rank only, beside a progress bar. A run outlives the reader of its output, such as
        `| head`."""
        if self.is_main:
            with contextlib.suppress(OSError, ValueError):
                tqdm.write(printable(text), **options)
                sys.stdout.flush()


# ----------------------------------------------------------------------------------------------------------- the device


def _choose_device(device: str, local_rank: int) -> torch.device:
    if device == "cpu":
        return torch.device("cpu")  # without asking for GPUs, which would open a context on one
    found = dict(cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available(), cpu=True)
    if device == "auto":
        device = next(name for name in found if found[name])
    if not found.get(device):
        raise UserError(f"--device {device}: PyTorch {torch.__version__} sees no such GPU here; pass --device cpu")
    if device == "cuda" and local_rank >= torch.cuda.device_count():
        n = torch.cuda.device_count()
        raise UserError(f"only {counted(n, 'GPU')} here; pass torchrun --nproc_per_node={n}")
    return torch.device(f"cuda:{local_rank}" if device == "cuda" else device)


def _choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype != "auto":
        if dtype == "float32":
            torch.set_float32_matmul_precision("highest")  # someone who asks for fp32 does not want TF32
        if dtype not in ("bfloat16", "float16", "float32"):
            raise UserError(f"dtype {dtype}: add it to _choose_dtype in parts/runtime.py")
        return getattr(torch, dtype)
    if device.type == "cuda":  # Volta and Turing, of compute capability 7, would emulate bfloat16
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    # AVX512-BF16 or AMX: the emulation that other processors would use is slower than fp32
    native = any(getattr(torch.cpu, f, bool)() for f in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return torch.bfloat16 if device.type == "cpu" and native else torch.float32


def _choose_compile(compile: str, device: torch.device) -> bool:
    """Compile on a GPU, unless a trial shows that something is missing; on a CPU only when asked for, because it costs
    half a minute there and gains little over bf16."""
    if compile == "off" or (compile == "auto" and device.type != "cuda"):
        return False
    if device.type == "mps":
        raise UserError("--compile on: it has given wrong numbers on mps (pytorch 171764); pass --compile off")
    _start_compile_workers()
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(8, device=device))
        return True
    except Exception as e:  # of Triton, of a C compiler, of its linker
        problem = f"torch.compile fails here ({' '.join(str(e).split())[:300]})"
        if compile == "on":
            raise UserError(f"--compile on: {problem}; pass --compile off") from e
        print(f"note: {problem}; the run is slower without, and as correct (docs/run.md)", file=sys.stderr)
        return False


def _start_compile_workers() -> None:
    """Start the processes that compile for us, with signals blocked. `timeout`, SLURM and a shell signal a group of
    processes; we end between two steps, and would wait forever for workers that have died at once. A signal to us
    meanwhile comes when the workers have started."""
    from torch._inductor.async_compile import AsyncCompile

    if not hasattr(signal, "pthread_sigmask"):  # Windows has no signals to a group
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # workers inherit it
    try:
        AsyncCompile.warm_pool()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def static_shapes(graph: torch.fx.GraphModule, inputs: list) -> Callable:
    """Compile code whose shapes never change, as a backend of torch.compile: Inductor, with the best attention kernels
    first, and a cache on the disk, which makes the second start fast (with DDP it holds a part of the graphs).

    PyTorch prefers cuDNN's attention on Hopper and B200, where it is the fastest. It builds a plan for each new shape,
    which takes longer than a batch of finetuning, HellaSwag or sampling, so that it is allowed here alone.
    """
    from torch._inductor.compile_fx import compile_fx  # a slow import, only for runs that compile

    from parts.graphs import BiasGradients

    device = next((x.device for x in inputs if isinstance(x, torch.Tensor)), torch.device("cpu"))
    key = torch.compiler.config.patch(cache_key_tag="cuDNN's attention")  # which the cache's key lacks
    with sdpa_kernel(ATTENTION), key:
        # on a CPU nobody has measured it
        changes = {"post_grad_custom_pre_pass": BiasGradients()} if device.type == "cuda" else None
        return compile_fx(graph, inputs, config_patches=changes)


def _keep_freed_memory() -> None:
    """Let glibc reuse large blocks. By default it maps each activation from the system again, and page faults take up
    to a fifth of a training step. Without glibc this does nothing."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, size in MALLOC.items():
            mallopt(option, size)


def checkpoint_activations(blocks: Iterable[torch.nn.Module]) -> None:
    """Keep only the input of each block; the backward pass recomputes the rest (Chen et al. 2016)."""
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def make_deterministic() -> None:
    """Let PyTorch choose kernels that give the same bits in every run on one machine. Call it before anything else."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True, warn_only=True)


def profiled(steps: Iterator[int], n_steps: int, file: Path, rt: Runtime) -> Iterator[int]:
    """Yield `steps`, and watch `n_steps` of them, or those that there are, with torch.profiler after the first two, which
    compile. Prints a table by kernel and writes a trace for ui.perfetto.dev."""
    device = "cpu" if rt.device.type == "cpu" else "device"
    yield from islice(steps, 2)
    with torch.profiler.profile() as profiler:
        yield from islice(steps, n_steps)
        rt.synchronize()
    rt.print(profiler.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=20))
    profiler.export_chrome_trace(str(file))
    rt.print(f"wrote {file}")
    yield from steps


def prefetch(batches: Iterator, device: torch.device) -> Iterator:
    """Read an iterator one batch ahead in a thread, and move what it yields to the device.

    A batch is an array, a tensor, or any nesting of tuples, lists and dicts of them; the result has tensors in their
    places. On CUDA the thread puts them into pinned memory, so that the host does not wait for the copy.
    An error of the iterator is raised when its batch is due. Close the generator if you leave it early.
    """
    on_gpu = device.type == "cuda"

    def load():
        if on_gpu:  # a new thread starts on GPU 0, and would open a context there
            torch.cuda.set_device(device)
        batch = next(batches, None)
        if batch is None:
            return None
        tensors = tree_map(torch.as_tensor, batch)
        return tree_map(torch.Tensor.pin_memory, tensors) if on_gpu else tensors

    with ThreadPoolExecutor(1, "prefetch") as thread:
        coming = thread.submit(load)
        while (batch := coming.result()) is not None:
            coming = thread.submit(load)  # the next one, while this one is used
            yield tree_map(lambda tensor: tensor.to(device, non_blocking=on_gpu), batch)


# ------------------------------------------------------------------------------------------------------------ the ranks


def ranks_of_environment() -> tuple[int, int, int]:
    """Return (rank, world size, rank on this node) as torchrun sets them, else (0, 1, 0). Raises UserError for a rank
    that, as the only process, would train to its end and write nothing."""
    defaults = dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    words = {name: os.environ.get(name) or word for name, word in defaults.items()}  # some job scripts set them to ""
    numbers = [int(word) for word in words.values() if word.isdecimal()]
    if len(numbers) < 3 or numbers[0] >= numbers[1]:
        stated = " ".join(f"{name}={word}" for name, word in words.items())
        raise UserError(f"{stated} in the environment: unset them, or start with torchrun")
    return tuple(numbers)


def _join_ranks(device: torch.device, rank: int, world_size: int) -> None:
    """Make the process group: NCCL between GPUs, Gloo between CPUs.

    torchrun keeps one store for all its restarts, where ranks could find the addresses of those that were killed. On
    one node each restart therefore gets its own part of it; several nodes do not count restarts alike, and need
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun.
    """
    try:
        store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=COLLECTIVE_TIMEOUT))
    except (ValueError, RuntimeError) as e:  # the environment may have a WORLD_SIZE, but no launcher
        raise UserError(f"the {world_size} ranks of WORLD_SIZE cannot connect ({e}); start them with torchrun") from e
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        store = dist.PrefixStore("restart " + os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        with contextlib.suppress(OSError, AttributeError, TypeError):  # Linux: if torchrun is killed, so is its rank
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if on_gpu else None,
    )
