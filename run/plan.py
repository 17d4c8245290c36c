"""Lines of --dry_run about the machine: room on the disk, and the time that another run took on it.

This file knows nothing of models: it is told bytes, tokens and FLOPs. The rest of a plan is in learning/memory.py.
"""

import shutil
import statistics
from pathlib import Path

from cli import UserError, counted
from machine.runtime import peaks
from run.records import read_log

CARDS = {name: peaks(name) for name in ("B200", "H100", "A100", "L40S", "RTX 4090", "RTX 3090")}


def about_disk(config, n_bytes: int) -> str:
    """The checkpoints of a run, each of `n_bytes`, and the room for them where OUT_DIR is or will be."""
    n_saved = -(-config.max_steps // config.checkpoint_interval) if config.checkpoint_interval else 0
    n_kept = min(n_saved, config.keep_checkpoints + 2) if config.keep_checkpoints else n_saved  # best, one on its way
    out_dir = Path(config.out_dir).resolve()  # which may be a mount point
    free = shutil.disk_usage(next(path for path in (out_dir, *out_dir.parents) if path.exists())).free
    size = f"{n_bytes / 1e9:.2f} GB" if n_bytes > 1e8 else f"{n_bytes / 1e6:.2f} MB"
    too_small = "; NOT ENOUGH: keep fewer, or choose another --out_dir" * (n_kept * n_bytes > free)
    room = f"{n_kept * n_bytes / 1e9:.1f} of {free / 1e9:.1f} GB free"
    return f"{counted(n_saved, 'checkpoint')} of {size}, {n_kept} at once: {room}{too_small}"


def about_measured(like: str, flops_per_token: float, tokens: int, price: float) -> str:
    """The time for `tokens` on the machine of the run `like`, from its tokens/s and the FLOPs per token of both."""
    records = read_log(Path(like) / "log.jsonl")
    rates = [r["tokens_per_sec"] for r in records if r["kind"] == "train" and r.get("tokens_per_sec")]
    starts = [r for r in records if r["kind"] == "run" and r.get("flops_per_token")]
    if not (rates and starts):
        raise UserError(f"--like {like} has no tokens/s in its log; name a run that has taken steps")
    rate = statistics.median(rates) * starts[-1]["flops_per_token"] / flops_per_token
    hours = tokens / rate / 3600
    cost = f", {price * hours * starts[-1].get('ranks', 1):,.2f} dollars" if price else ""
    return f"at the speed of {like} on {starts[-1]['machine']}: {rate:,.0f} tokens/s, {hours:,.2f} hours{cost}"
