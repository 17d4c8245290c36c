"""Where a script runs and what it reports: command line, errors, device, precision, ranks, log. One place for each.

- `script(main)` runs a main function with the exit codes and one-line errors that every script here has
- `parse_args(Config, ...)` turns a dataclass of constants into a command line
- `Runtime.setup(...)` decides device, dtype, torch.compile and distributed, and says why
- `write_atomically(path, fill)` makes a directory that appears whole or not at all; `sha256`, `flush`
- `peak_flops(name)` knows the dense 16-bit peak of common GPUs, for MFU
- `StopSignals` and `SpikeDetector` notice what a training loop has to react to
- `RunLog` is what a run tells: log.jsonl, samples.txt, learning_curve.png, tensorboard or wandb

This file knows nothing of models, data or checkpoints.
"""

import atexit
import contextlib
import json
import math
import os
import re
import shutil
import signal
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from cli import Stopped, UserError, fail, flush, parse_args, script, sha256, write_atomically  # noqa: F401

# The dense peak of the tensor cores in FLOP/s for 16-bit inputs with fp32 accumulation, from NVIDIA's data sheets.
# The first name that is part of the device's name counts, so that longer names come first.
PEAK_FLOPS = (
    ("GB200", 2500e12), ("B200", 2250e12), ("GH200", 989e12), ("H200", 989e12), ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12), ("H100", 989e12), ("A100", 312e12), ("L40S", 362e12), ("L4", 121e12), ("A40", 150e12),
    ("A10G", 70e12), ("A10", 125e12), ("A6000", 155e12), ("RTX 5090", 209e12), ("RTX 4090", 165e12),
    ("RTX 3090", 71e12), ("V100", 125e12), ("T4", 65e12),
)  # fmt: skip


def peak_flops(device_name: str) -> float | None:
    """Dense 16-bit peak in FLOP/s of a GPU by its name, None where it is unknown (MFU is then n/a)."""
    words = re.sub(r"[-_]", " ", device_name).split()
    for name, flops in PEAK_FLOPS:
        parts = name.split()
        if any(words[i : i + len(parts)] == parts for i in range(len(words))):
            return flops
    return None


@dataclass(frozen=True)
class Runtime:
    """The machine as one process of a run sees it."""

    device: "torch.device"  # noqa: F821 - torch is imported late, so that --help and usage errors are quick
    dtype: "torch.dtype"  # noqa: F821 - of matrix products; weights are kept in fp32
    compile: bool
    rank: int
    world_size: int
    why: str  # how device, dtype and compile were chosen, for the first line of a run

    @classmethod
    def setup(cls, device: str = "auto", dtype: str = "auto", compile: str = "off") -> "Runtime":
        """Decide for this process, join the process group under torchrun, choose matmul precision.

        Raises UserError for a device, a dtype or a compiler that is not there.
        """
        import torch

        rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise UserError(f"--device {device}: this PyTorch ({torch.__version__}) sees no CUDA GPU; use --device cpu")
        if device == "mps" and not torch.backends.mps.is_available():
            raise UserError("--device mps: this PyTorch sees no Apple GPU; use --device cpu")
        if device == "cuda":
            device = f"cuda:{int(os.environ.get('LOCAL_RANK', 0))}"
        device = torch.device(device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if world_size > 1 and not torch.distributed.is_initialized():
            _join_ranks(device, rank, world_size)
        torch.set_float32_matmul_precision("high")  # TF32 for what is left in fp32
        if device.type == "cpu":
            _keep_freed_memory()
        dtype, why_dtype = _choose_dtype(dtype, device)
        compile_on, why_compile = _choose_compile(compile, device)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        threads = f" with {torch.get_num_threads()} threads" if device.type == "cpu" else ""
        why = f"{name}{threads}, {why_dtype}, {why_compile}" + (f", {world_size} ranks" if world_size > 1 else "")
        return cls(device, dtype, compile_on, rank, world_size, why)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def autocast(self):
        """The context of every forward pass."""
        import torch

        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    @property
    def steps_ahead(self) -> int:
        """Training steps that may be under way before the figures of the first one are read: a GPU that waits for the
        processor to read them is idle, a processor has nothing to wait for."""
        return int(self.device.type == "cuda")

    def fetch(self, tensor) -> Callable[[], list[float]]:
        """Start to copy a small tensor off the device; the function that this returns waits for it, and for all work
        before it, but not for what the device was given since."""
        import torch

        if self.device.type != "cuda":
            return tensor.tolist
        host = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def wait() -> list[float]:
            copied.synchronize()
            return host.tolist()

        return wait

    def synchronize(self) -> None:
        """Wait for the device, so that a clock read afterwards is true."""
        import torch

        if self.device.type in ("cuda", "mps"):
            getattr(torch, self.device.type).synchronize()

    def sum(self, tensor):
        """`tensor` summed over all ranks, in place. Gloo knows no AVG, so means are sums, divided."""
        import torch.distributed as dist

        if self.world_size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
        return tensor

    def barrier(self) -> None:
        import torch.distributed as dist

        if self.world_size > 1:
            dist.barrier()

    def peak_memory(self) -> int:
        """Peak bytes: of the GPU's allocator, else resident memory of the process."""
        import torch

        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        try:
            import resource
        except ImportError:  # Windows
            return 0
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def reset_peak_memory(self) -> None:
        """Count the peak from here on, where the system can forget the old one: CUDA and Linux."""
        import ctypes

        import torch

        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # what was freed is still resident
            Path("/proc/self/clear_refs").write_text("5")  # proc_pid_clear_refs(5)

    def peak_flops(self) -> float | None:
        import torch

        return peak_flops(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None

    def print(self, *args, **kwargs) -> None:
        """print, on the first rank only and without tearing a progress bar."""
        from tqdm import tqdm

        if self.is_main:
            tqdm.write(" ".join(map(str, args)), **kwargs)


def _join_ranks(device, rank: int, world_size: int) -> None:
    """Make the process group: NCCL between GPUs, Gloo between processors.

    torchrun keeps one store for all its restarts, where ranks could find the addresses of those that were killed. On
    one node each restart therefore gets its own part of it; several nodes do not count restarts alike, and need
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun.
    """
    import torch.distributed as dist

    store, _, _ = next(dist.rendezvous("env://", rank, world_size))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        store = dist.PrefixStore("restart " + os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        device_id=device if on_gpu else None,
    )


def _keep_freed_memory() -> None:
    """Let glibc reuse large blocks. By default each activation is mapped from the system anew, and up to a fifth of a
    training step goes into page faults. Without glibc this does nothing."""
    import ctypes

    M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # mallopt(3)
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, n_bytes in ((M_MMAP_THRESHOLD, 2**30), (M_TRIM_THRESHOLD, 2**30), (M_TOP_PAD, 2**26)):
            mallopt(option, n_bytes)


def _choose_dtype(dtype: str, device) -> tuple["torch.dtype", str]:  # noqa: F821
    import torch

    if dtype != "auto":
        return getattr(torch, dtype), dtype
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major >= 8:
            return torch.bfloat16, f"bfloat16 (compute capability {major}.{minor})"
        return torch.float16, f"float16 (compute capability {major}.{minor} is below 8.0, so no bfloat16)"
    if device.type == "cpu" and _cpu_has_bf16():
        return torch.bfloat16, "bfloat16 (the processor multiplies it natively)"
    return torch.float32, f"float32 ({device.type} has no fast 16-bit format here)"


def _cpu_has_bf16() -> bool:
    """AVX512-BF16 or AMX. The emulation that other processors would use is slower than fp32."""
    import torch

    return any(getattr(torch.cpu, f, bool)() for f in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))


def _choose_compile(compile: str, device) -> tuple[bool, str]:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compile == "on" and device.type == "cpu" and not compiler:
        raise UserError("--compile on needs a C++ compiler (g++ or clang++) on the PATH; install one, or --compile off")
    if compile == "auto":
        # on a CPU it costs half a minute and gains little over bf16; on MPS it has given NaN (pytorch 171764)
        return device.type == "cuda" and compiler is not None, "compile " + ("on" if device.type == "cuda" else "off")
    return compile == "on", f"compile {compile}"


def choose_attention(attention: str, rt: Runtime, sequence_length: int) -> str:
    """ "flash" or "naive" where `attention` is "auto": what is faster to train with, as measured.

    On processors PyTorch's fused kernel is slow in 16 bits, for lack of a fast backward pass: three times the time of
    the formula at 64 tokens, 1.6 times at 1024, where the formula begins to cost memory.
    """
    if attention != "auto":
        return attention
    return "naive" if rt.device.type == "cpu" and rt.dtype.itemsize == 2 and sequence_length <= 1024 else "flash"


def choose_attention_kernel(rt: Runtime, shape: tuple[int, int, int, int]) -> str:
    """Leave scaled_dot_product_attention its fastest fused kernel for `shape` (B, H, T, D), forward and backward, by
    measurement: it differs between GPUs and versions. Returns the kernel's name, "" where there is no choice."""
    import torch
    from torch.nn.attention import sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    B, H, T, D = shape
    q, k, v = (torch.randn(B, T, H, D, device=rt.device, dtype=rt.dtype).transpose(1, 2) for _ in range(3))
    q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    seconds, kernels = {}, attention_kernels(rt.device.type)
    for name, (backend, _) in kernels.items():
        with contextlib.suppress(RuntimeError), sdpa_kernel(backend):  # not every GPU has every kernel
            for run in range(6):
                if run == 1:  # the first one warms up
                    rt.synchronize()
                    began = time.perf_counter()
                scaled_dot_product_attention(q, k, v, is_causal=True).backward(v)
            rt.synchronize()
            seconds[name] = time.perf_counter() - began
    if not seconds:
        return ""
    fastest = min(seconds, key=seconds.get)
    for name, (_, enable) in kernels.items():
        enable(name == fastest)
    return fastest


def attention_kernels(device_type: str) -> dict[str, tuple]:
    """{name: (backend, function that turns it on or off)} of the fused kernels to choose from."""
    import torch
    from torch.nn.attention import SDPBackend

    if device_type != "cuda":
        return {}
    return {
        "flash": (SDPBackend.FLASH_ATTENTION, torch.backends.cuda.enable_flash_sdp),
        "cudnn": (SDPBackend.CUDNN_ATTENTION, torch.backends.cuda.enable_cudnn_sdp),
    }


class StopSignals:
    """Turns SIGINT and SIGTERM into a flag that is read once per step; a second SIGINT ends the process at once."""

    def __enter__(self):
        self.signum = 0
        self._before = {s: signal.signal(s, self._remember) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _remember(self, signum, frame) -> None:
        self.signum = signum
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *exc) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)


class SpikeDetector:
    """Notices a loss that has jumped: PATIENCE steps in a row that lie `threshold` above the median of the good ones.

    One such step alone is an odd batch, and passes by itself. Nothing is a spike while the median rests on fewer than
    MIN_LOSSES losses, or with a threshold of 0.
    """

    WINDOW, MIN_LOSSES, PATIENCE, MAX_RETURNS = 100, 20, 3, 3

    def __init__(self, threshold: float):
        self.threshold = threshold
        self.losses: deque[float] = deque(maxlen=self.WINDOW)
        self.high = 0  # steps in a row
        self.returns: Counter[Path] = Counter()

    def median(self) -> float:
        return statistics.median(self.losses)

    def add(self, loss: float) -> bool:
        """Take note of a step's loss; True for a spike."""
        if 0 < self.threshold and self.MIN_LOSSES <= len(self.losses) and loss > self.median() + self.threshold:
            self.high += 1
        else:
            self.high = 0
            self.losses.append(loss)
        return self.high >= self.PATIENCE

    def suspect(self, step: int) -> int:
        """The first step that may have spoilt the weights, if the spike was noticed at `step`: the one before it."""
        return step - self.PATIENCE

    def accept(self) -> None:
        """Let the high losses be the normal ones from here on."""
        self.losses.clear()
        self.high = 0

    def count(self, checkpoint: Path) -> None:
        """Raises UserError for one return too many to the same checkpoint: other data then does not help."""
        self.returns[checkpoint] += 1
        if self.returns[checkpoint] > self.MAX_RETURNS:
            raise UserError(
                f"the loss jumps again after {self.MAX_RETURNS} returns to {checkpoint}, each with other data; lower "
                "--max_lr and --resume, or accept the jump with --spike_threshold 0"
            )

    def state_dict(self) -> dict:
        return dict(losses=list(self.losses), high=self.high)

    def load_state_dict(self, state: dict) -> None:
        self.losses = deque(state["losses"], maxlen=self.WINDOW)
        self.high = state["high"]


class RunLog:
    """log.jsonl, samples.txt and learning_curve.png of a run, and the lines in the terminal; the first rank only."""

    def __init__(self, out_dir: Path, rt: Runtime, config):
        self.out_dir, self.rt = out_dir, rt
        self.path = out_dir / "log.jsonl"
        self.records: list[dict] = []
        self.skipped_steps = 0
        self.peak_flops = rt.peak_flops() and rt.peak_flops() * rt.world_size
        self.tracker = open_tracker(config, rt)

    def open(self, step: int) -> None:
        """Keep what was logged up to `step`; what a killed run logged after its last checkpoint comes again."""
        if not self.rt.is_main:
            return
        if self.path.exists():
            self.records = [record for record in read_log(self.path) if record["step"] <= step]
        self.skipped_steps = sum("skipped" in record for record in self.records)
        text = "".join(json.dumps(record) + "\n" for record in self.records)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(text)
        temporary.replace(self.path)
        samples = [sample_entry(record) for record in self.records if record["kind"] == "sample"]
        (self.out_dir / "samples.txt").write_text("".join(samples))

    def _append(self, record: dict) -> None:
        self.records.append(record)
        if not self.rt.is_main:
            return
        with open(self.path, "a") as f:
            f.write(json.dumps(record) + "\n")
        if self.tracker:
            self.tracker(record)

    def step(self, step, loss, lr, grad_norm, dt, tokens_per_sec, mfu, skipped) -> None:
        """Log a training step; `skipped` if it changed no weight. Numbers that are not finite become null, as JSON has
        none of them."""
        self.skipped_steps += skipped
        loss, grad_norm = (x if math.isfinite(x) else None for x in (loss, grad_norm))
        record = dict(step=step, kind="train", loss=loss, lr=lr, grad_norm=grad_norm, dt_ms=round(dt * 1e3, 2),
                      tokens_per_sec=round(tokens_per_sec, 1), mfu=mfu and round(mfu, 4),
                      memory_gib=round(self.rt.peak_memory() / 2**30, 3), skipped_steps=self.skipped_steps)  # fmt: skip
        self._append(record | ({"skipped": True} if skipped else {}))

    def record(self, step: int, record: dict) -> None:
        """Log an evaluation, show it, and draw the curve anew."""
        self._append({"step": step, **record})
        if not self.rt.is_main:
            return
        if record["kind"] == "sample":
            with open(self.out_dir / "samples.txt", "a") as f:
                f.write(sample_entry(self.records[-1]))
            self.rt.print(f"step {step}: sample: " + record["text"].strip()[:300].replace("\n", "\n    "))
        else:
            numbers = ", ".join(
                f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in record.items() if k != "kind"
            )
            self.rt.print(f"step {step}: {record['kind']} {numbers}")
            draw_curve(self.records, self.out_dir / "learning_curve.png")

    def close(self) -> None:
        if self.rt.is_main:
            draw_curve(self.records, self.out_dir / "learning_curve.png")

    def median_tokens_per_sec(self) -> float:
        return statistics.median(r["tokens_per_sec"] for r in self.records if r["kind"] == "train")


def sample_entry(record: dict) -> str:
    return f"--- step {record['step']}\n{record['text']}\n\n"


def read_log(path: Path) -> Iterator[dict]:
    """The records of a log.jsonl; a last line that was cut off by a kill is left out."""
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def smoothed(values: list[float], reach: int) -> list[float]:
    """Running median over `reach` neighbours on either side: unlike an average, it does not lag or follow a spike."""
    return [statistics.median(values[max(i - reach, 0) : i + reach + 1]) for i in range(len(values))]


def draw_curve(records: list[dict], path: Path) -> None:
    """Training loss, raw and smoothed, validation loss and learning rate; HellaSwag below when there is some."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = {kind: [r for r in records if r["kind"] == kind] for kind in ("train", "val", "hellaswag")}
    kinds["train"] = [r for r in kinds["train"] if "skipped" not in r]
    if not kinds["train"]:
        return
    figure, axes = plt.subplots(
        1 + bool(kinds["hellaswag"]), 1, figsize=(9, 5 + 3 * bool(kinds["hellaswag"])), squeeze=False
    )
    top = axes[0, 0]
    steps = [r["step"] for r in kinds["train"]]
    losses = [r["loss"] for r in kinds["train"]]
    smooth = smoothed(losses, min(max(len(losses) // 50, 1), 50))
    top.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8, label="train")
    top.plot(steps, smooth, color="tab:blue", label="train, smoothed")
    if kinds["val"]:
        val_steps, val_losses = zip(*((r["step"], r["loss"]) for r in kinds["val"]), strict=True)
        top.plot(
            val_steps,
            val_losses,
            "o-",
            color="tab:red",
            markersize=4,
            label=f"validation, {val_losses[-1]:.3f} at last",
        )
    top.set(xlabel="step", ylabel="loss (nats per token)")
    top.set_ylim(top=min(top.get_ylim()[1], max(losses[0], 1) * 1.05))
    top.grid(alpha=0.3)
    right = top.twinx()
    right.plot(
        steps, [r["lr"] for r in kinds["train"]], color="tab:gray", linestyle="--", linewidth=0.8, label="learning rate"
    )
    right.set_ylabel("learning rate")
    right.set_ylim(bottom=0)
    lines = top.get_lines() + right.get_lines()
    top.legend(lines, [line.get_label() for line in lines], loc="upper right")
    if kinds["hellaswag"]:
        bottom = axes[1, 0]
        for key in ("acc_norm", "acc"):
            bottom.plot(
                [r["step"] for r in kinds["hellaswag"]],
                [r[key] for r in kinds["hellaswag"]],
                "o-",
                markersize=4,
                label=key,
            )
        bottom.axhline(0.2955, color="tab:red", linestyle="--", linewidth=0.8, label="GPT-2 124M")
        bottom.axhline(0.337, color="tab:green", linestyle="--", linewidth=0.8, label="GPT-3 124M")
        bottom.set(xlabel="step", ylabel="HellaSwag accuracy")
        bottom.grid(alpha=0.3)
        bottom.legend()
    figure.tight_layout()
    figure.savefig(path.with_suffix(".tmp.png"), dpi=120)
    path.with_suffix(".tmp.png").replace(path)
    plt.close(figure)


def open_tracker(config, rt: Runtime) -> Callable[[dict], None] | None:
    """A function that passes a log record on to tensorboard or wandb, which are imported only when asked for."""
    if config.report_to == "none" or not rt.is_main:
        return None
    try:
        if config.report_to == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(config.out_dir)
            atexit.register(writer.close)
            put = lambda name, value, step: writer.add_scalar(name, value, step)  # noqa: E731
        else:
            import wandb

            wandb.init(project="gpt2", dir=config.out_dir, name=Path(config.out_dir).name, config=asdict(config))
            put = lambda name, value, step: wandb.log({name: value}, step=step)  # noqa: E731
    except ImportError as e:
        raise UserError(f"--report_to {config.report_to}: {e}; pip install {config.report_to}") from e

    def report(record: dict) -> None:
        for key, value in record.items():
            if isinstance(value, int | float) and key != "step":
                put(f"{record['kind']}/{key}", value, record["step"])

    return report
