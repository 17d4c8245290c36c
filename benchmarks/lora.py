"""Finetuning with LoRA, r = 8, on GPT-2 124M: peft on transformers, against this project, with random weights.

Each step takes the same 32 examples of Alpaca, with AdamW on the same factors and a loss on the same answer tokens,
which the rate counts; the table shows the first losses, which have to agree.
peft runs as in its documentation: 8 examples at a time, padded to the longest of them, with all logits. Ours are sorted
by length and cut into micro-batches as in lora_finetune.py. peft runs in fp32 on a CPU, and on a GPU with autocast in
the 16-bit format that is fast there; this project runs in fp32 and in that format.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.measure import Common, Size, built_late, fast_dtype, gpt2_tokenizer, model_sizes, rates
from finetuning.lora import TARGETS, LoRAConfig, add_lora, cast_frozen
from finetuning.rows import Example, encode_rows, load_rows, micro_batches, split_rows
from learning.optim import make_optimizer
from lora_finetune import MICRO_BATCH_COST
from lora_finetune import Config as Finetuning
from machine.runtime import Runtime
from machine.trials import choose_attention
from model import GPT, GPTConfig, GPTWithLoss

FINETUNING = Finetuning(lora_dim=8, lora_alpha=16.0, max_lr=1e-3)
EXAMPLES, MAX_LENGTH = 32, 1024


@dataclass(frozen=True)
class Config(Common):
    data: str = FINETUNING.data  # rows, as for lora_finetune.py
    size: Size = ""  # size of the model; tiny for a quick test


def run(config: Config, rt: Runtime) -> Iterator[dict]:
    chosen, _ = split_rows(load_rows(config.data)[:2000], 0, 0)
    examples, _ = encode_rows(chosen[: 2 * EXAMPLES], gpt2_tokenizer(), MAX_LENGTH)
    examples = examples[:EXAMPLES]
    torch.manual_seed(0)
    base = GPT(GPTConfig(**model_sizes(config.size)))
    half = fast_dtype(rt)
    like = half if rt.device.type == "cuda" else torch.float32
    n_targets = sum(int((example.targets >= 0).sum()) for example in examples)
    print(f"{sum(len(example.idx) for example in examples)} tokens, {n_targets} of them answers")
    steps = {f"peft, {like}": built_late(peft_step, base, examples, like, rt)}
    for dtype in dict.fromkeys((torch.float32, half)):
        steps[f"this project, {dtype}"] = built_late(own_step, base, examples, dtype, rt)
    losses = {name: [] for name in steps}
    runs = {name: lambda name=name: losses[name].append(steps[name]()) for name in steps}
    for row in rates(runs, config.repeats, rt, n_targets, "answer tokens/s"):
        yield row | (dict(first_loss=losses[row["name"]][0]) if "rate" in row else {})


def own_step(base: GPT, examples: list[Example], dtype: torch.dtype, rt: Runtime) -> Callable[[], float]:
    """A step of lora_finetune.py: micro-batches of about one length, logits at answers alone."""
    micros = micro_batches(examples, 2**14, MICRO_BATCH_COST[rt.device.type])
    rt = replace(rt, dtype=dtype)
    model = GPT(replace(base.config, attention=choose_attention("auto", rt, MAX_LENGTH)))
    model.load_state_dict(base.state_dict())
    add_lora(model, LoRAConfig(FINETUNING.lora_dim, FINETUNING.lora_alpha))
    cast_frozen(model, dtype)
    forward = GPTWithLoss(model.to(rt.device))
    optimizer = make_optimizer(model, FINETUNING, rt)

    def step() -> float:
        batch = [[torch.as_tensor(part, device=rt.device) for part in micro] for micro in micros]
        n_targets = sum(targets.numel() for _, targets, _ in batch)
        loss = torch.zeros((), device=rt.device)
        for idx, targets, places in batch:
            with rt.autocast():
                micro_loss = forward(idx, targets, places, n_targets=n_targets)
            optimizer.scale(micro_loss).backward()
            loss += micro_loss.detach()
        optimizer.step(finite=optimizer.clip_grad_norm(FINETUNING.grad_clip).isfinite())
        optimizer.zero_grad()
        return loss.item()

    return step


def peft_step(base: GPT, examples: list[Example], dtype: torch.dtype, rt: Runtime) -> Callable[[], float]:
    """The plain loop: peft on GPT2LMHeadModel, 8 examples at a time, padded to the longest."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2LMHeadModel

    with tempfile.TemporaryDirectory() as directory:
        base.save_pretrained(directory)
        model = GPT2LMHeadModel.from_pretrained(directory)
    settings = LoraConfig(
        r=FINETUNING.lora_dim, lora_alpha=FINETUNING.lora_alpha, target_modules=list(TARGETS), fan_in_fan_out=True,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    model = get_peft_model(model, settings).to(rt.device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)
    n_targets = sum(int((example.targets >= 0).sum()) for example in examples)
    micros = [padded(examples[i : i + 8]) for i in range(0, len(examples), 8)]

    def step() -> float:
        loss = torch.zeros((), device=rt.device)
        for micro in micros:
            idx, mask, labels = (part.to(rt.device) for part in micro)
            with torch.autocast(rt.device.type, dtype=dtype, enabled=dtype != torch.float32):
                mean = model(input_ids=idx, attention_mask=mask, labels=labels).loss
            micro_loss = mean * ((labels >= 0).sum() / n_targets)
            micro_loss.backward()
            loss += micro_loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def padded(examples: list[Example]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids, mask, labels), each (B, T), as transformers takes them: it shifts the labels by itself."""
    ids = [torch.tensor([*e.idx, max(e.targets[-1], 0)]) for e in examples]
    labels = [torch.tensor([-100, *e.targets]) for e in examples]
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    return pad(ids), pad([torch.ones_like(row) for row in ids]), pad(labels, padding_value=-100)
