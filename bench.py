"""How fast it is: every figure of the README comes from a command here.

    python bench.py ladder      # fp32 -> TF32 -> bf16 -> compile -> flash attention -> padded vocabulary -> ...
    python bench.py train       # this project's training step against the plain recipe
    python bench.py speedrun    # tokens that the recipe speedrun needs, against those of the recipe gpt2
    python bench.py bpe         # tokenizer training and encoding against tokenizers and tiktoken
    python bench.py data        # sharding and the loader
    python bench.py hellaswag   # batched scoring against one example at a time
    python bench.py lora        # finetuning against peft
    python bench.py save        # what a checkpoint in the background costs the training loop
    python bench.py sample      # generation with and without the cache, and transformers' generate

Everything that is compared runs in one process tree, in turn, several times; a table shows medians and their ratios.
`--json FILE` keeps all figures together with the machine's description.
"""

import contextlib
import functools
import io
import json
import multiprocessing
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from runtime import Runtime, UserError, choose_attention, choose_attention_kernel, parse_args, script


@dataclass
class Config:
    repeats: int = 5  # timed runs of everything that is compared; medians count
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto: cuda, else mps, else cpu
    data: str = ""  # files to measure on, where a command needs some; each command says which
    json: str = ""  # write the figures to this file
    batch_size: int = 16  # ladder and train: sequences per step
    size: str = ""  # ladder and train: gpt2, gpt2-medium, gpt2-large, gpt2-xl; gpt2 on a GPU, a small one on a CPU
    rung: int = -1  # ladder: measure this rung alone, in this process
    png: str = "ladder.png"  # ladder: the figure
    steps: int = 1000  # speedrun: optimizer steps of the recipe gpt2
    share: float = 0.65  # speedrun: its tokens, as a share of those


def interleave(contestants: dict[str, Callable[[], None]], repeats: int, rt: Runtime) -> dict[str, list[float]]:
    """Seconds of each contestant, measured in turn so that a drifting machine hits all alike; one warm-up round."""
    seconds = {name: [] for name in contestants}
    for round_ in range(repeats + 1):
        for name, run in contestants.items():
            rt.synchronize()
            began = time.perf_counter()
            run()
            rt.synchronize()
            if round_:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def table(seconds: dict[str, list[float]], work: float, unit: str) -> list[dict]:
    """Print median rate (work / seconds), spread, and the ratio to the first contestant; returns the rows."""
    rows = []
    base = statistics.median(next(iter(seconds.values())))
    for name, values in seconds.items():
        median = statistics.median(values)
        rows.append(
            dict(
                name=name,
                rate=work / median,
                unit=unit,
                low=work / max(values),
                high=work / min(values),
                ratio=base / median,
            )
        )
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        spread = f"({row['low']:,.1f} to {row['high']:,.1f})"
        print(f"{row['name']:<{width}}  {row['rate']:>12,.1f} {unit}  {spread}  x {row['ratio']:.2f}")
    return rows


def machine(rt: Runtime) -> dict:
    name = torch.cuda.get_device_name() if rt.device.type == "cuda" else platform.processor() or platform.machine()
    if rt.device.type == "cpu" and os.path.exists("/proc/cpuinfo"):
        found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
        name = found[1] if found else name
    return dict(device=name, threads=torch.get_num_threads(), torch=torch.__version__, python=platform.python_version())


def sample(config: Config, rt: Runtime) -> list[dict]:
    """Generation of 128 tokens from a 124M model: 4 sequences in fp32 on a CPU, 1 and 64 in bf16 on a GPU."""
    import warnings

    from transformers import GPT2Config, GPT2LMHeadModel

    from model import GPT, GPTConfig

    warnings.simplefilter("ignore")
    cuda, n, rows = rt.device.type == "cuda", 128, []
    dtype = torch.bfloat16 if cuda else torch.float32
    torch.manual_seed(0)
    model, compiled = (GPT(GPTConfig()).to(rt.device, dtype).eval() for _ in range(2))
    compiled.compile_generation()
    reference = GPT2LMHeadModel(GPT2Config()).to(rt.device, dtype).eval()
    for batch_size in (1, 64) if cuda else (4,):
        prompts = torch.randint(50257, (batch_size, 16)).tolist()
        idx = torch.tensor(prompts, device=rt.device)

        def recompute(idx=idx) -> None:
            x = idx
            with torch.no_grad():
                for _ in range(n):
                    x = torch.cat([x, model(x)[0][:, -1].argmax(-1, keepdim=True)], dim=1)

        def generate(idx=idx) -> None:
            mask = torch.ones_like(idx)
            reference.generate(idx, attention_mask=mask, max_new_tokens=n, min_new_tokens=n, do_sample=False,
                               pad_token_id=0)  # fmt: skip

        contestants = {
            "recomputing the context": recompute,
            "transformers generate": generate,
            "this project": lambda prompts=prompts: list(model.generate(prompts, n, temperature=0)),
            "this project, compiled": lambda prompts=prompts: list(compiled.generate(prompts, n, temperature=0)),
        }
        print(f"batch size {batch_size}, {dtype}")
        found = table(interleave(contestants, config.repeats, rt), batch_size * n, "tokens/s")
        rows += [row | dict(batch_size=batch_size) for row in found]
    return rows


@dataclass
class Rung:
    """One way to run a training step; each rung of the ladder changes one thing of the rung before."""

    name: str
    tf32: bool = False
    bf16: bool = False
    compile: bool = False
    attention: str = "naive"
    padded: bool = False  # vocabulary padded to a multiple of 128
    fused: bool = False  # fused AdamW
    chunked: bool = False  # the loss of model.py, instead of all logits in fp32
    kernel: bool = False  # the fastest of the attention kernels, instead of PyTorch's choice
    fp8: bool = False  # the blocks' products in FP8

    def step(self, shape: dict, batch_size: int, rt: Runtime) -> tuple[Callable[[], None], int]:
        """(a function that makes one optimizer step, the model's FLOPs per token) at this rung."""
        from model import GPT, GPTConfig, use_float8

        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
        vocab = -(-shape["vocab_size"] // 128) * 128 if self.padded else shape["vocab_size"]
        model = GPT(GPTConfig(**shape | dict(vocab_size=vocab, attention=self.attention))).to(rt.device)
        if self.fp8:
            use_float8(model)
        if self.kernel:
            head_size = shape["n_embd"] // shape["n_head"]
            attention_shape = (batch_size, shape["n_head"], shape["sequence_length"], head_size)
            choose_attention_kernel(replace(rt, dtype=torch.bfloat16), attention_shape)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=self.fused, foreach=not self.fused)
        tokens = torch.randint(shape["vocab_size"], (batch_size, shape["sequence_length"] + 1), device=rt.device)

        def whole_loss(idx, targets):
            logits, _ = model(idx)
            return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

        loss_of = (lambda idx, targets: model(idx, targets)[1]) if self.chunked else whole_loss
        loss_of = torch.compile(loss_of) if self.compile else loss_of

        def step(n_micro: int = 1) -> None:
            for rows in tokens.chunk(n_micro):
                with torch.autocast(rt.device.type, dtype=torch.bfloat16, enabled=self.bf16):
                    loss = loss_of(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
                (loss / n_micro).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step, model.estimate_flops()


def rungs(rt: Runtime) -> list[Rung]:
    """fp32 first, then one change a rung. A CPU has no TF32, its fused attention is slow in bf16, and torch.compile,
    slow to start there, is last."""
    last = [("vocabulary padded to 128", dict(padded=True)), ("fused AdamW", dict(fused=True)),
            ("chunked loss", dict(chunked=True))]  # fmt: skip
    if rt.device.type == "cuda":
        changes = [("fp32, all by hand", {}), ("TF32", dict(tf32=True)), ("bf16 autocast", dict(bf16=True)),
                   ("torch.compile", dict(compile=True)), ("flash attention", dict(attention="flash")), *last,
                   ("fastest attention kernel", dict(kernel=True))]  # fmt: skip
        if torch.cuda.get_device_capability() >= (8, 9):
            changes += [("FP8", dict(fp8=True))]
    else:
        changes = [("fp32, all by hand", {}), ("flash attention", dict(attention="flash")),
                   ("bf16 autocast", dict(bf16=True)), ("attention by hand again", dict(attention="naive")), *last,
                   ("torch.compile", dict(compile=True))]  # fmt: skip
    ladder, settings = [], {}
    for name, change in changes:
        settings |= change
        ladder.append(Rung(name, **settings))
    return ladder


def bench_shape(config: Config, rt: Runtime) -> dict:
    """GPT-2 124M on a GPU; on a CPU a model that a step of takes about a second."""
    from model import SIZES

    if rt.device.type == "cuda" or config.size:
        if (config.size or "gpt2") not in SIZES:
            raise UserError(f"there is no --size {config.size}; there are {', '.join(SIZES)}")
        return SIZES[config.size or "gpt2"] | dict(sequence_length=1024, vocab_size=50257)
    return dict(n_layer=6, n_head=6, n_embd=384, sequence_length=256, vocab_size=1000)


def ladder(config: Config, rt: Runtime) -> list[dict]:
    """One training step, rung by rung: ms, tokens/s, MFU, peak memory; each rung in a process of its own."""
    shape = bench_shape(config, rt)
    if config.rung >= 0:
        step, flops = rungs(rt)[config.rung].step(shape, config.batch_size, rt)
        seconds = interleave({"step": step}, config.repeats, rt)["step"]
        print(json.dumps(dict(seconds=seconds, flops=flops, memory=rt.peak_memory())))
        sys.exit(0)
    tokens = config.batch_size * shape["sequence_length"]
    print(f"{shape}, batch size {config.batch_size}\n")
    print(f"{'':<26}{'ms/step':>10}{'tokens/s':>12}{'MFU':>7}{'GiB':>7}{'x before':>10}{'x first':>9}")
    rows = []
    for number, rung in enumerate(rungs(rt)):
        words = [sys.executable, __file__, "ladder", "--rung", number, "--repeats", config.repeats]
        words += ["--batch_size", config.batch_size, "--device", rt.device.type]
        words += ["--size", config.size] if config.size else []
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
        if done.returncode:
            print(f"{rung.name:<26} failed: {done.stderr.strip().splitlines()[-1]}")
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        rate = tokens / statistics.median(found["seconds"])
        peak = rt.peak_flops()
        row = dict(name=rung.name, ms=1e3 * tokens / rate, tokens_per_sec=rate, gib=found["memory"] / 2**30)
        row |= dict(mfu=peak and rate * found["flops"] / peak, seconds=found["seconds"])
        row |= dict(over_before=rate / (rows[-1]["tokens_per_sec"] if rows else rate))
        row |= dict(over_first=rate / (rows[0]["tokens_per_sec"] if rows else rate))
        rows.append(row)
        mfu = f"{row['mfu']:.1%}" if peak else "n/a"
        print(
            f"{rung.name:<26}{row['ms']:>10.1f}{rate:>12,.0f}{mfu:>7}{row['gib']:>7.2f}"
            f"{row['over_before']:>10.2f}{row['over_first']:>9.2f}"
        )
    draw_ladder(rows, config.png, machine(rt)["device"])
    return rows


def draw_ladder(rows: list[dict], path: str, device: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 0.5 * len(rows) + 1.2))
    bars = axes.barh([row["name"] for row in rows], [row["tokens_per_sec"] for row in rows], color="tab:blue")
    axes.bar_label(bars, [f" {row['tokens_per_sec']:,.0f}  (x {row['over_first']:.1f})" for row in rows])
    axes.set(xlabel=f"training, tokens/s on {device}", xlim=(0, 1.25 * max(row["tokens_per_sec"] for row in rows)))
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"\ndrawn in {path}")


def train(config: Config, rt: Runtime) -> list[dict]:
    """This project's training step against the plain one: eager, all logits at once, fp32 on a CPU, bf16 on a GPU.

    What does not fit into the memory makes its step in two micro-batches, or four.
    """
    shape, cuda = bench_shape(config, rt), rt.device.type == "cuda"
    plain = Rung("plain eager " + ("bf16" if cuda else "fp32"), tf32=cuda, bf16=cuda, attention="flash", fused=cuda)
    auto = Runtime.setup(rt.device.type)
    attention = choose_attention("auto", auto, shape["sequence_length"])
    ours = Rung("this project", True, auto.dtype == torch.bfloat16, auto.compile, attention, True, True, True, cuda)
    if cuda:
        lineup = [plain, replace(plain, name="plain with torch.compile", compile=True), ours]
        if torch.cuda.get_device_capability() >= (8, 9):
            lineup.append(replace(ours, name="this project, FP8", fp8=True))
    else:
        lineup = [plain, replace(plain, name="plain with bf16 autocast", bf16=True), ours]
    steps = {}
    for rung in lineup:
        step, flops = rung.step(shape, config.batch_size, rt)
        n_micro = next(n for n in (1, 2, 4, 8, config.batch_size) if fits(lambda n=n, step=step: step(n)))
        steps[rung.name + (f", {n_micro} micro-batches" if n_micro > 1 else "")] = functools.partial(step, n_micro)
    print(f"{shape}, batch size {config.batch_size}")
    rows = table(interleave(steps, config.repeats, rt), config.batch_size * shape["sequence_length"], "tokens/s")
    if peak := rt.peak_flops():
        for row in rows:
            row["mfu"] = row["rate"] * flops / peak
            print(f"{row['name']}: MFU {row['mfu']:.1%}")
    return rows


def fits(step: Callable[[], None]) -> bool:
    try:
        step()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return False
    return True


def save(config: Config, rt: Runtime) -> list[dict]:
    """How long the training loop of a 124M model is held up by a checkpoint that is written in the background: copying
    starts, and the optimizer waits for its end; against writing it at once. The disk is that of the current directory.
    """
    from checkpoint import CheckpointWriter
    from model import GPT, GPTConfig
    from runtime import SpikeDetector
    from train_gpt2 import RECIPES, model_copy, training_state

    model = GPT(GPTConfig(vocab_size=50304)).to(rt.device)
    optimizers = model.configure_optimizers(0.1, 6e-4)
    scaler, spikes = torch.amp.GradScaler(rt.device.type, enabled=False), SpikeDetector(1.0)
    idx = torch.randint(50257, (1, 512), device=rt.device)
    auto = Runtime.setup(rt.device.type)

    def step(writer: CheckpointWriter | None) -> tuple[float, float]:
        """Seconds of a step, and of its waiting for the copy."""
        rt.synchronize()
        began, waited = time.perf_counter(), 0.0
        with auto.autocast():
            _, loss = model(idx, idx)
        loss.backward()
        if writer is not None:
            rt.synchronize()
            waiting = time.perf_counter()
            writer.wait_for_copy()
            waited = time.perf_counter() - waiting
        optimizers[0].step()
        optimizers[0].zero_grad(set_to_none=True)
        rt.synchronize()
        return time.perf_counter() - began, waited

    def copy() -> Callable[[Path], None]:
        return model_copy(model).save_pretrained

    step(None)
    found = {"written at once": [], "held up": [], "step": [], "step during a write": []}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        writer = CheckpointWriter(Path(folder), keep=1)
        for number in range(1, 2 * config.repeats + 1):
            state = training_state(number, number, optimizers, scaler, spikes, RECIPES["gpt2"], rt)
            found["step"].append(step(None)[0])
            began = time.perf_counter()
            writer.save(number, copy, state, {}, announce=lambda line: None)
            started = time.perf_counter() - began
            if number % 2:
                writer.wait()
                found["written at once"].append(time.perf_counter() - began)
            else:
                seconds, waited = step(writer)
                found["held up"].append(started + waited)
                found["step during a write"].append(seconds)
                writer.wait()
    whole = statistics.median(found["written at once"])
    for name, values in found.items():
        median = statistics.median(values)
        print(f"{name:<20} {median:8.4f} s  ({min(values):.4f} to {max(values):.4f})  {median / whole:.2%} of writing")
    return [dict(name=name, seconds=values) for name, values in found.items()]


SPEEDRUNS = {  # what each line changes in which recipe
    "gpt2, AdamW at 1e-3": ("gpt2", dict(max_lr=1e-3, min_lr=1e-4)),
    "gpt2, AdamW at 2e-3": ("gpt2", dict(max_lr=2e-3, min_lr=2e-4)),
    "gpt2, AdamW at 3e-3": ("gpt2", dict(max_lr=3e-3, min_lr=3e-4)),
    "gpt2, AdamW at 5e-3": ("gpt2", dict(max_lr=5e-3, min_lr=5e-4)),
    "speedrun": ("speedrun", {}),
    "AdamW instead of Muon": ("speedrun", dict(optimizer="adamw")),
    "Muon at 0.01, not 0.02": ("speedrun", dict(muon_lr=0.01)),
    "Muon at 0.04, not 0.02": ("speedrun", dict(muon_lr=0.04)),
    "the rest at 1e-3, not 3e-3": ("speedrun", dict(max_lr=1e-3)),
    "cosine": ("speedrun", dict(lr_schedule="cosine")),
    "decay in the last quarter": ("speedrun", dict(decay_fraction=0.25)),
    "decay in the last three quarters": ("speedrun", dict(decay_fraction=0.75)),
    "no batch ramp": ("speedrun", dict(ramp=False)),
}


def speedrun(config: Config, rt: Runtime) -> list[dict]:
    """Validation loss of a small GPT: the optimizer of the recipe gpt2, at four learning rates, against the recipe
    speedrun, and each of its choices undone, with --share of the tokens. --data is a .txt; --repeats counts seeds.
    """
    from concurrent.futures import ThreadPoolExecutor

    from train_gpt2 import RECIPES, batch_plan

    shape = dict(n_layer=4, n_head=2, n_embd=128, sequence_length=64, vocab_size=1024, total_batch_size=2048)
    runs = [(name, seed) for seed in range(config.repeats) for name in SPEEDRUNS]
    folder = Path(tempfile.mkdtemp())

    def final_loss(run: tuple[str, int]) -> float:
        (name, seed), (recipe, changes) = run, SPEEDRUNS[run[0]]
        steps = config.steps if recipe == "gpt2" else round(config.share * config.steps)
        tokens, first = steps * shape["total_batch_size"], shape["total_batch_size"] // 4
        options = shape | dict(seed=seed, data=config.data or "input.txt", tokenizer="train")
        options |= dict(warmup_steps=steps * RECIPES[recipe].warmup_steps // RECIPES[recipe].max_steps)
        options |= dict(eval_steps=50, device=rt.device.type, hellaswag_interval=0)
        options |= dict(sample_interval=0, checkpoint_interval=0) | changes
        if options.pop("ramp", recipe == "speedrun"):  # the same tokens in more steps, from a quarter of the batch on
            options |= dict(batch_ramp=tokens // 5, batch_ramp_from=first)
        else:
            options |= dict(batch_ramp=0)
        plan = batch_plan(replace(RECIPES[recipe], **{k: v for k, v in options.items() if "batch" in k or "seq" in k}))
        steps = next(n for n in range(steps, 2 * steps) if plan(n)[0] * shape["sequence_length"] >= tokens)
        options |= dict(max_steps=steps, eval_interval=steps)
        out_dir = folder / f"{seed}-{list(SPEEDRUNS).index(name)}"
        words = [sys.executable, "train_gpt2.py", recipe, "--out_dir", str(out_dir)]
        words += [word for key, value in options.items() for word in (f"--{key}", str(value))]
        threads = {"OMP_NUM_THREADS": "1"} if rt.device.type == "cpu" else {}
        done = subprocess.run(
            words, cwd=Path(__file__).parent, env=os.environ | threads, capture_output=True, text=True
        )
        if done.returncode:
            raise UserError(f"{name}: {done.stderr.strip().splitlines()[-1]}")
        records = map(json.loads, (out_dir / "log.jsonl").read_text().splitlines())
        shutil.rmtree(out_dir)
        return [record["loss"] for record in records if record["kind"] == "val"][-1]

    losses = {name: [] for name in SPEEDRUNS}
    with ThreadPoolExecutor(os.cpu_count() if rt.device.type == "cpu" else 1) as pool:
        first = final_loss(runs[0])  # alone, because it trains the tokenizer for all
        for (name, _), loss in zip(runs, [first, *pool.map(final_loss, runs[1:])], strict=True):
            losses[name].append(loss)
    shutil.rmtree(folder)
    best = min(statistics.mean(losses[name]) for name, (recipe, _) in SPEEDRUNS.items() if recipe == "gpt2")
    print(f"{shape}, {config.steps} steps\n{'':<34}{'tokens':>9}  validation loss, nats per token: mean (all seeds)")
    rows = []
    for name, values in losses.items():
        tokens = config.steps * 2048 * (1 if SPEEDRUNS[name][0] == "gpt2" else config.share)
        mean = statistics.mean(values)
        rows.append(dict(name=name, tokens=tokens, losses=values, mean=mean, over_best=mean - best))
        print(f"{name:<34}{tokens:>9,.0f}  {mean:.4f} {mean - best:+.4f} ({', '.join(f'{v:.4f}' for v in values)})")
    return rows


def lora(config: Config, rt: Runtime) -> list[dict]:
    """LoRA steps of 32 Alpaca examples on 124M, r = 8, AdamW, against peft on transformers in micro-batches of 8 padded
    to their longest. --data is alpaca_data.json. The rate counts answer tokens."""
    import lora_finetune as lf
    from bpe.tokenizer import Tokenizer
    from model import GPT, GPTConfig

    rows = lf.read_rows(config.data or lf.Config.data)[:2000]
    examples, _ = lf.encode_rows(lf.split_rows(rows, 0, 0)[0][:64], Tokenizer.from_tiktoken("gpt2"), 1024)
    examples = examples[:32]
    torch.manual_seed(0)
    base = GPT(GPTConfig())
    micros = lf.micro_batches(examples, 2**14, lf.MICRO_BATCH_COST[rt.device.type])
    padded, real = sum(micro[0].numel() for micro in micros), sum(len(example.idx) for example in examples)
    n_targets = sum(micro[1].numel() for micro in micros)
    print(f"{real} tokens, {n_targets} of them answers; padded tokens for each real one: {padded / real:.2f} here")

    def ours(dtype: torch.dtype) -> Callable[[], float]:
        naive = rt.device.type == "cpu" and dtype == torch.bfloat16  # as runtime.choose_attention decides
        model = GPT(GPTConfig(attention="naive" if naive else "flash"))
        model.load_state_dict(base.state_dict())
        lf.add_lora(model, lf.LoRAConfig(8, 16.0))
        if dtype != torch.float32:
            lf.cast_frozen(model, dtype)
        forward = lf.AnswerLoss(model.to(rt.device))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)

        def step() -> float:
            loss = 0.0
            for micro in micros:
                with torch.autocast(rt.device.type, dtype=dtype, enabled=dtype != torch.float32):
                    _, micro_loss = forward(*(t.to(rt.device) for t in micro), n_targets=n_targets)
                micro_loss.backward()
                loss += micro_loss.item()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    half = Runtime.setup(config.device).dtype  # the 16-bit format that is fast here, or fp32
    like = half if rt.device.type == "cuda" else torch.float32
    steps = {f"peft, {like}": peft_step(base, examples, like, rt)}
    steps |= {f"this project, {dtype}": ours(dtype) for dtype in dict.fromkeys((torch.float32, half))}
    losses = {name: [] for name in steps}
    runs = {name: lambda name=name: losses[name].append(steps[name]()) for name in steps}
    rows = table(interleave(runs, config.repeats, rt), n_targets, "answer tokens/s")
    print("first losses:", ", ".join(f"{name} {values[0]:.4f}" for name, values in losses.items()))
    return rows


def peft_step(base, examples: list, dtype: torch.dtype, rt: Runtime) -> Callable[[], float]:
    """The plain loop: peft on GPT2LMHeadModel, 8 examples at a time, padded to the longest of them."""
    import tempfile

    from peft import LoraConfig, get_peft_model
    from transformers import GPT2LMHeadModel

    from lora import TARGETS

    with tempfile.TemporaryDirectory() as directory:
        base.save_pretrained(directory)
        reference = GPT2LMHeadModel.from_pretrained(directory)
    settings = LoraConfig(r=8, lora_alpha=16, target_modules=list(TARGETS), fan_in_fan_out=True, task_type="CAUSAL_LM")
    reference = get_peft_model(reference, settings).to(rt.device)
    optimizer = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], lr=1e-3, fused=True)
    n_targets = sum(int((example.targets >= 0).sum()) for example in examples)
    pad = lambda rows, value: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)  # noqa: E731
    micros = []
    for eight in (examples[i : i + 8] for i in range(0, len(examples), 8)):
        ids = [torch.tensor([*e.idx, max(e.targets[-1], 0)]) for e in eight]  # transformers shifts the labels itself
        labels = [torch.tensor([-100, *e.targets]) for e in eight]
        micros.append((pad(ids, 0), pad([torch.ones_like(row) for row in ids], 0), pad(labels, -100)))
    masks = [mask for _, mask, _ in micros]
    print(f"{sum(mask.numel() for mask in masks) / sum(int(mask.sum()) for mask in masks):.2f} with peft")

    def step() -> float:
        loss = 0.0
        for micro in micros:
            idx, mask, labels = (t.to(rt.device) for t in micro)
            with torch.autocast(rt.device.type, dtype=dtype, enabled=dtype != torch.float32):
                mean = reference(input_ids=idx, attention_mask=mask, labels=labels).loss
            micro_loss = mean * ((labels >= 0).sum() / n_targets)
            micro_loss.backward()
            loss += micro_loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


# ---------------------------------------------------------------------------------------------------------------- data


def data(config: Config, rt: Runtime) -> list[dict]:
    """Sharding with GPT-2's tokenizer in 2 processes, eight times over the .parquet files below --data (by default one
    made of input.txt), and reading 64 x 1024 tokens at a time from 100 shards."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return shard_figures(config, rt, Path(folder)) + loader_figures(config, rt, Path(folder))


def shard_figures(config: Config, rt: Runtime, folder: Path) -> list[dict]:
    import datasets

    import fineweb

    files = parquet_files(config.data, folder)
    rows = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(folder / "cache"))
    texts, buffer = list(rows["text"]), np.empty(10**8, np.uint16)
    n = sum(map(len, gpt2().encode_ordinary_batch(texts))) + len(texts)
    halves = [texts[::2], texts[1::2]]

    def plain() -> None:
        used = 0
        with multiprocessing.Pool(2) as pool:
            for tokens in pool.imap(plain_tokens, rows, chunksize=16):
                buffer[used : used + len(tokens)] = tokens
                used += len(tokens)
        assert used == n

    def encode_alone() -> None:
        processes = [multiprocessing.Process(target=encode_texts, args=(half,)) for half in halves]
        for process in processes:
            process.start()
        for process in processes:
            process.join()

    def ours() -> None:
        shutil.rmtree(folder / "shards", ignore_errors=True)
        options = dict(source=tuple(files), workers=2, start_method=multiprocessing.get_start_method())
        with contextlib.redirect_stdout(io.StringIO()):
            fineweb.make_shards(fineweb.Config(out_dir="shards", **options), folder / "shards")

    contestants = {
        "the plain loop: Pool(2).imap over load_dataset": plain,
        "2 processes that only call encode_ordinary_batch": encode_alone,
        "fineweb.py, from start to end": ours,
    }
    measured = table(interleave(contestants, config.repeats, rt), n, "tokens/s")
    words = ["--source", *files, "--out_dir", str(folder / "memory"), "--workers", "2"]
    peak = peak_memory([sys.executable, fineweb.__file__, *words])
    print(f"all its processes together need {peak / 2**20:,.0f} MiB at the peak, shards having 100M tokens\n")
    return measured + [dict(name="peak memory", rate=peak / 2**20, unit="MiB")]


def parquet_files(source: str, folder: Path) -> list[str]:
    """Every file eight times, under names of its own."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = sorted(Path(source).rglob("*.parquet")) if source else [folder / "input.parquet"]
    if not files:
        raise UserError(f"--data {source}: there is no .parquet file below it")
    if not source:
        text = Path(__file__).with_name("input.txt").read_text()
        pieces = [text[i : i + 2000] for i in range(0, len(text), 2000)] * 20
        pq.write_table(pa.table({"text": pieces}), files[0], row_group_size=1000)
    copies = [(folder / f"copy_{i}_{file.name}", file) for i in range(8) for file in files]
    for copy, file in copies:
        copy.symlink_to(file.resolve())
    return [str(copy) for copy, _ in copies]


@functools.cache
def gpt2():
    import tiktoken

    return tiktoken.get_encoding("gpt2")


def plain_tokens(row: dict) -> np.ndarray:
    tokens = np.array([gpt2().eot_token, *gpt2().encode_ordinary(row["text"])])
    assert (0 <= tokens).all() and (tokens < 2**16).all()
    return tokens.astype(np.uint16)


def encode_texts(texts: list[str]) -> None:
    for i in range(0, len(texts), 1000):
        gpt2().encode_ordinary_batch(texts[i : i + 1000], num_threads=1)


def peak_memory(command: list[str]) -> int:
    """Bytes of a command and its children at the worst moment, shared ones counted once; 0 elsewhere than on Linux."""
    peak, process = 0, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        total, pids = 0, [process.pid]
        for pid in pids:
            with contextlib.suppress(OSError):
                pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
                sizes = Path(f"/proc/{pid}/smaps_rollup").read_text()
                total += int(re.search(r"^Pss:\s+(\d+)", sizes, re.MULTILINE)[1]) * 1024
        peak = max(peak, total)
        time.sleep(0.05)
    return peak


def loader_figures(config: Config, rt: Runtime, folder: Path) -> list[dict]:
    from data import Batches, TokenStream, find_shards, prefetch, training_batches

    rng, rows, steps = np.random.default_rng(0), 64, 400
    for i in range(100):
        np.save(folder / f"x_train_{i:06d}.npy", rng.integers(0, 50257, 2_000_000, dtype=np.uint16))
    paths = find_shards(str(folder), "train")
    stream = TokenStream(paths, 50304)

    def read(shuffle: bool, wrap=lambda batches: batches) -> None:
        batches = Batches(stream, 1024, 0, shuffle)
        for _ in wrap(training_batches(batches, lambda step: (step * rows, rows), 0, steps, rows)):
            pass

    def plain() -> None:
        """A shard is read as a whole, and converted; batches are slices of it, in file order."""
        shard, position = -1, 0
        tokens = torch.empty(0)
        for _ in range(steps):
            if position + rows * 1024 + 1 > len(tokens):
                shard, position = (shard + 1) % len(paths), 0
                tokens = torch.tensor(np.load(paths[shard]).astype(np.int32), dtype=torch.long)
            piece = tokens[position : position + rows * 1024 + 1]
            piece[:-1].view(rows, 1024), piece[1:].view(rows, 1024)
            position += rows * 1024

    source = np.load(paths[0])[: rows * 1025].reshape(rows, 1025)

    def copy() -> None:
        for _ in range(steps):
            source.astype(np.int64)

    contestants = {
        "the plain loader: whole shards, file order": plain,
        "this project, shuffled": lambda: read(True),
        "this project, file order": lambda: read(False),
        "this project, shuffled, in the thread": lambda: read(True, lambda b: prefetch(b, torch.device("cpu"))),
        "copying to int64 and nothing else": copy,
    }
    measured = table(interleave(contestants, config.repeats, rt), steps * rows * 1024, "tokens/s")
    began = time.perf_counter()
    stream = TokenStream(empty_shards(folder / "empty"), 50304)
    next(Batches(stream, 1024, 0, True).local(0, rows, rows))
    start_up = time.perf_counter() - began
    print(f"start-up, from 100 shards of 100M tokens to the first batch: {start_up:.3f} s")
    return measured + [dict(name="start-up", rate=start_up, unit="s")]


def empty_shards(folder: Path) -> list[Path]:
    """100 shards of 100M tokens, all zero, for which a file system that knows holes needs no room."""
    from data import npy_header

    folder.mkdir()
    paths, header = [folder / f"x_train_{i:06d}.npy" for i in range(100)], npy_header(10**8, np.dtype(np.uint16))
    for path in paths:
        path.write_bytes(header)
        os.truncate(path, len(header) + 2 * 10**8)
    return paths


def hellaswag(config: Config, rt: Runtime) -> list[dict]:
    """Scoring rows of HellaSwag (--data FILE.jsonl, by default downloaded) with a random 124M model: 40 rows on a CPU;
    on a GPU all of them, of which the loop over single rows takes 500. Tokenizing counts on both sides."""
    from bpe.tokenizer import Tokenizer
    from hellaswag import evaluate, load_rows, prepare
    from model import GPT, GPTConfig

    torch.manual_seed(0)
    model = GPT(GPTConfig()).to(rt.device).eval()
    tokenizer = Tokenizer.from_tiktoken("gpt2")
    rows = load_rows(config.data, "val", rt)
    rows, few = (rows, rows[:500]) if rt.device.type == "cuda" else (rows[:40], rows[:40])
    runtimes = {"fp32": rt}
    if (dtype := Runtime.setup(config.device).dtype) != torch.float32:
        runtimes[str(dtype).removeprefix("torch.")] = replace(rt, dtype=dtype)
    contestants = {}
    for name, runtime in runtimes.items():
        contestants[f"one row at a time, {name}"] = functools.partial(score_one_by_one, model, tokenizer, few, runtime)
        contestants[f"this project, {name}"] = lambda runtime=runtime: evaluate(
            model, prepare(rows, tokenizer, model.config, "completion"), runtime
        )
    seconds = interleave(contestants, config.repeats, rt)
    for name in seconds:
        if name.startswith("one row"):  # as if it had done all rows
            seconds[name] = [s * len(rows) / len(few) for s in seconds[name]]
    return table(seconds, len(rows), "rows/s")


@torch.no_grad()
def score_one_by_one(model, tokenizer, rows: list[dict], rt: Runtime) -> list[list[float]]:
    """HellaSwag as a plain loop has it: the context with each ending, four padded rows, all logits; summed losses."""
    losses = []
    for row in rows:
        context = tokenizer.encode_ordinary(row["ctx"])
        endings = [tokenizer.encode_ordinary(" " + ending) for ending in row["endings"]]
        idx = torch.zeros(4, len(context) + max(map(len, endings)), dtype=torch.long)
        scored = torch.zeros(idx.shape)
        for k, ending in enumerate(endings):
            idx[k, : len(context) + len(ending)] = torch.tensor(context + ending)
            scored[k, len(context) : len(context) + len(ending)] = 1
        idx, scored = idx.to(rt.device), scored.to(rt.device)
        with rt.autocast():
            logits, _ = model(idx)  # (4, T, V)
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), idx[:, 1:].flatten(), reduction="none"
        )
        losses.append((loss.view(4, -1) * scored[:, 1:]).sum(dim=1).tolist())
    return losses


def bpe(config: Config, rt: Runtime) -> list[dict]:
    """Tokenizer training and encoding against other libraries, on the texts of --data (input.txt when empty)."""
    from bpe import train
    from bpe.tokenizer import Tokenizer

    texts = list(train.read_texts(train.Config(input=(config.data or "input.txt",))))
    n_bytes = sum(len(text.encode()) for text in texts)
    vocab_size = 32_768 if n_bytes > 10e6 else 1024
    mb = n_bytes / 1e6
    print(f"{len(texts):,} texts, {mb:.1f} MB, vocabulary of {vocab_size:,}\n\ntraining")
    trainers = bpe_trainers(texts, vocab_size)
    rows = table(interleave(trainers, config.repeats, rt), mb, "MB/s")
    tok, theirs = Tokenizer.train(texts, vocab_size), trainers["tokenizers"]()
    print(f"the same merges as tokenizers: {'yes' if same_merges(tok, theirs) else 'NO'}")

    print("\nencoding, on one core unless it says threads")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tiktoken, transformers = tok.to_tiktoken(), tok.to_transformers()
    encoders = {
        "tiktoken": lambda: [tiktoken.encode_ordinary(text) for text in texts],
        "transformers, fast": lambda: [transformers(text)["input_ids"] for text in texts],
        "this project, nothing cached": lambda: encode_all(cold(tok), texts),
        "this project": lambda: encode_all(tok, texts),
        "this project, encode_batch in threads": lambda: tok.encode_batch(texts, disallowed_special=()),
    }
    rows += table(interleave(encoders, config.repeats, rt), mb, "MB/s")

    print("\npeak memory of all processes while training, MB")
    for name, code in BPE_MEMORY.items():
        rows.append(dict(name=f"memory of {name}", unit="MB", rate=training_memory(code, config.data, vocab_size)))
        print(f"{name:<14}{rows[-1]['rate']:>7,.0f}")
    return rows


def bpe_trainers(texts: list[str], vocab_size: int) -> dict[str, Callable]:
    """Trainers by name; those of packages that are not installed are left out."""
    from tokenizers import Tokenizer as HFTokenizer
    from tokenizers import models, pre_tokenizers, trainers

    from bpe.tokenizer import PATTERNS, Tokenizer

    def hugging_face() -> HFTokenizer:
        tok = HFTokenizer(models.BPE())
        tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
        tok.train_from_iterator(texts, trainer)
        return tok

    found = {"tokenizers": hugging_face}
    try:
        import rustbpe

        pattern = PATTERNS["gpt2"][0]
        found["rustbpe"] = lambda: rustbpe.Tokenizer().train_from_iterator(iter(texts), vocab_size - 1, pattern=pattern)
    except ImportError:
        pass
    try:
        import bpeasy

        found["bpeasy"] = lambda: bpeasy.train_bpe(iter(texts), PATTERNS["gpt2"][0], 10_000, vocab_size - 1)
    except ImportError:
        pass
    found["this project, one process"] = lambda: Tokenizer.train(texts, vocab_size, workers=1)
    found["this project"] = lambda: Tokenizer.train(texts, vocab_size)
    return found


def same_merges(tok, theirs) -> bool:
    from bpe.tokenizer import CHAR_TO_BYTE

    merges = json.loads(theirs.to_str())["model"]["merges"]
    return tok.merges == [tuple(bytes(map(CHAR_TO_BYTE.get, part)) for part in pair) for pair in merges]


def cold(tok):
    tok._cache.clear()
    return tok


def encode_all(tok, texts: list[str]) -> None:
    for text in texts:
        tok.encode_ordinary(text)


BPE_MEMORY = {  # each in a process of its own, reading as it goes
    "tokenizers": (
        "from tokenizers import Tokenizer, models, pre_tokenizers, trainers\n"
        "tok = Tokenizer(models.BPE()); tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)\n"
        "tok.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False))\n"
    ),
    "this project": "from bpe.tokenizer import Tokenizer\nTokenizer.train(texts, vocab_size)\n",
}


def training_memory(code: str, data: str, vocab_size: int) -> float:
    """MB of a training in a new process and of the workers that it starts (the largest, times their number)."""
    code = (
        f"import resource, sys\nsys.path.insert(0, {str(os.path.dirname(os.path.abspath(__file__)))!r})\n"
        f"from bpe import train\ntexts = train.read_texts(train.Config(input=({data or 'input.txt'!r},)))\n"
        f"vocab_size = {vocab_size}\n"
        f"{code}"
        "from bpe.tokenizer import cpu_count\n"
        "own, child = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))\n"
        "print(own + child * (cpu_count() - 1))\n"
    )
    # by way of a small process, since on Linux the peak of a process begins with what its parent had
    between = "import subprocess, sys; subprocess.run(sys.argv[1:], check=True)"
    words = [sys.executable, "-c", between, sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1]) * (1 if sys.platform == "darwin" else 1024) / 1e6


COMMANDS = {
    "ladder": ladder,
    "train": train,
    "bpe": bpe,
    "lora": lora,
    "data": data,
    "hellaswag": hellaswag,
    "sample": sample,
    "save": save,
    "speedrun": speedrun,
}


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-") and sys.argv[1] not in ("-h", "--help"):
        raise UserError(f"say what to measure: python bench.py {' | '.join(COMMANDS)}")
    if sys.argv[1] in ("-h", "--help"):
        parse_args(Config, ["--help"], description=__doc__)
    if sys.argv[1] not in COMMANDS:
        raise UserError(f"there is no benchmark {sys.argv[1]}; there are {', '.join(COMMANDS)}")
    command = COMMANDS[sys.argv[1]]
    config = parse_args(Config, sys.argv[2:], prog=f"bench.py {sys.argv[1]}", description=command.__doc__)
    rt = Runtime.setup(config.device, "float32")
    print(f"{sys.argv[1]}: {command.__doc__}\n{machine(rt)}")
    rows = command(config, rt)
    if config.json:
        with open(config.json, "w") as f:
            json.dump(dict(benchmark=sys.argv[1], machine=machine(rt), config=asdict(config), rows=rows), f, indent=2)


if __name__ == "__main__":
    script(main)
