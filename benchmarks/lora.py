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

from benchmarks.measure import Common, Size, built_late, fast_dtype, model_sizes, rates
from lora_finetune import MICRO_BATCH_COST
from lora_finetune import Config as Finetuning
from model import GPT, GPTConfig, GPTWithLoss
from parts.conversations import Example, encode_rows, load_rows, micro_batches, split_rows
from parts.lora import TARGETS, LoRAConfig, add_lora, cast_frozen
from parts.optim import make_optimizer
from parts.runtime import Runtime
from parts.shards import load_tokenizer
from parts.trials import choose_attention

FINETUNING = Finetuning(lora_dim=8, lora_alpha=16.0, max_lr=1e-3)
N_EXAMPLES = 32
MAX_LENGTH = 1024
Step = Callable[[], float]  # makes one optimizer step, and returns its loss


@dataclass(frozen=True)
class Config(Common):
    data: str = FINETUNING.data  # rows, as for lora_finetune.py
    size: Size = ""  # size of the model; tiny for a quick test


def run(config: Config, rt: Runtime) -> Iterator[dict]:
    chosen, _ = split_rows(load_rows(config.data)[:2000], 0, 0)
    examples, _ = encode_rows(chosen[: 2 * N_EXAMPLES], load_tokenizer("gpt2"), MAX_LENGTH)
    examples = examples[:N_EXAMPLES]
    torch.manual_seed(0)
    base = GPT(GPTConfig(**model_sizes(config.size)))
    half = fast_dtype(rt)
    like = half if rt.device.type == "cuda" else torch.float32
    n_tokens = sum(len(example.idx) for example in examples)
    n_targets = count_targets(examples)
    print(f"{n_tokens} tokens, {n_targets} of them answers")
    steps = {f"peft, {like}": built_late(peft_step, base, examples, like, rt)}
    for dtype in dict.fromkeys((torch.float32, half)):
        steps[f"this project, {dtype}"] = built_late(own_step, base, examples, dtype, rt)
    first_losses = {}

    def take(name: str) -> None:
        first_losses.setdefault(name, steps[name]())

    contestants = {name: partial(take, name) for name in steps}
    for row in rates(contestants, config.repeats, rt, n_targets, "answer tokens/s"):
        if "rate" in row:
            row["first_loss"] = first_losses[row["name"]]
        yield row


def count_targets(examples: list[Example]) -> int:
    return sum(int((example.targets >= 0).sum()) for example in examples)


def own_step(base: GPT, examples: list[Example], dtype: torch.dtype, rt: Runtime) -> Step:
    """A step of lora_finetune.py: micro-batches of about one length, logits at answers alone."""
    micros = micro_batches(examples, 2**14, MICRO_BATCH_COST[rt.device.type])
    rt = replace(rt, dtype=dtype)
    model = GPT(replace(base.config, attention=choose_attention("auto", rt, MAX_LENGTH)))
    model.load_state_dict(base.state_dict())
    add_lora(model, LoRAConfig(FINETUNING.lora_dim, FINETUNING.lora_alpha))
    cast_frozen(model, dtype)
    loss_fn = GPTWithLoss(model.to(rt.device))
    optimizer = make_optimizer(model, FINETUNING, rt)

    def step() -> float:
        batch = [[torch.as_tensor(part, device=rt.device) for part in micro] for micro in micros]
        n_targets = sum(targets.numel() for _, targets, _ in batch)
        loss = torch.zeros((), device=rt.device)
        for idx, targets, logit_positions in batch:
            with rt.autocast():
                micro_loss = loss_fn(idx, targets, logit_positions, n_targets=n_targets)
            optimizer.scale(micro_loss).backward()
            loss += micro_loss.detach()
        grad_norm = optimizer.clip_grad_norm(FINETUNING.grad_clip)
        optimizer.step(finite=grad_norm.isfinite())
        optimizer.zero_grad()
        return loss.item()

    return step


def peft_step(base: GPT, examples: list[Example], dtype: torch.dtype, rt: Runtime) -> Step:
    """The plain loop: peft on GPT2LMHeadModel, 8 examples at a time, padded to the longest."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2LMHeadModel

    with tempfile.TemporaryDirectory() as directory:
        base.save_pretrained(directory)
        model = GPT2LMHeadModel.from_pretrained(directory)
    settings = LoraConfig(
        r=FINETUNING.lora_dim,
        lora_alpha=FINETUNING.lora_alpha,
        target_modules=list(TARGETS),
        fan_in_fan_out=True,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, settings).to(rt.device)
    factors = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(factors, lr=1e-3, fused=True)
    n_targets = count_targets(examples)
    micros = [padded(examples[i : i + 8]) for i in range(0, len(examples), 8)]

    def step() -> float:
        loss = torch.zeros((), device=rt.device)
        for micro in micros:
            inputs = {name: tensor.to(rt.device) for name, tensor in micro.items()}
            with torch.autocast(rt.device.type, dtype=dtype, enabled=dtype != torch.float32):
                mean = model(**inputs).loss
            micro_loss = mean * ((inputs["labels"] >= 0).sum() / n_targets)
            micro_loss.backward()
            loss += micro_loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def padded(examples: list[Example]) -> dict[str, torch.Tensor]:
    """(B, T) each, as transformers takes them: it shifts the labels by itself."""
    ids = [torch.tensor([*example.idx, max(example.targets[-1], 0)]) for example in examples]
    labels = [torch.tensor([-100, *example.targets]) for example in examples]
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    return dict(
        input_ids=pad(ids),
        attention_mask=pad([torch.ones_like(row) for row in ids]),
        labels=pad(labels, padding_value=-100),
    )
