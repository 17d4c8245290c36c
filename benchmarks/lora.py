"""Finetuning with LoRA, r = 8, on GPT-2 124M: peft on transformers, against lora_finetune.py, with random weights.

Each step takes the same 32 examples of Alpaca, with AdamW on the same factors and a loss on the same answer tokens,
which the rate counts; the table shows the first losses, which have to agree.
peft runs as in its documentation: 8 examples at a time, padded to the longest of them, with all logits; in fp32 on a
CPU, and on a GPU with autocast in the 16-bit format that is fast there. "this project" is lora_finetune.py itself, in
fp32 and in that format. Each contestant runs in a new process, --turns times.
"""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.measure import Common, Size, fast_dtype, model_sizes
from benchmarks.steps import Step, in_own_process, measure_door, measure_step, step_rates
from bpe.tokenizer import Tokenizer
from lora_finetune import Config as Finetuning
from model import GPT, GPTConfig
from parts.chat import our_chat
from parts.checkpoint import save_model
from parts.cli import Positive
from parts.conversations import Example, encode_rows, load_rows, split_rows
from parts.lora import TARGETS
from parts.runtime import Runtime
from parts.shards import load_tokenizer

N_EXAMPLES = 32
LORA_DIM = 8
LORA_ALPHA = 16
MAX_LR = 1e-3
PEFT_BATCH = 8  # examples at a time


@dataclass(frozen=True)
class Config(Common):
    data: str = Finetuning.data  # rows, as for lora_finetune.py
    size: Size = ""  # size of the model; tiny for a quick test
    turns: Positive = 2  # processes of each contestant, taken in turn, so that drift of the machine affects all alike


def run(config: Config, rt: Runtime) -> Iterator[dict]:
    tokenizer = load_tokenizer("gpt2")
    shape = GPTConfig(**model_sizes(config.size))
    rows, examples = choose_rows(config.data, tokenizer, shape.n_positions)
    n_targets = sum(int((example.targets >= 0).sum()) for example in examples)
    print(f"{sum(len(example.idx) for example in examples)} tokens, {n_targets} of them answers", flush=True)
    repeats = -(-config.repeats // config.turns)  # in each turn
    half = fast_dtype(rt)
    like = half if rt.device.type == "cuda" else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        base.mkdir()
        torch.manual_seed(0)
        save_model(base, GPT(shape), tokenizer)
        data = Path(folder) / "rows.json"
        data.write_text(json.dumps(rows))
        make = partial(peft_step, base, examples, like)
        measure = partial(in_own_process, measure_step, make, PEFT_BATCH, repeats, rt.device.type)
        contestants = {f"peft, {name_of(like)}": measure}
        constants = dict(base=base, data=data, val_rows=0, batch_size=len(rows), device=rt.device.type)
        constants |= dict(lora_dim=LORA_DIM, lora_alpha=LORA_ALPHA, max_lr=MAX_LR)
        for dtype in dict.fromkeys((torch.float32, half)):
            name = f"this project, {name_of(dtype)}"
            contestants[name] = partial(measure_door, "lora_finetune.py", repeats, **constants, dtype=name_of(dtype))
        for row in step_rates(contestants, n_targets, "answer tokens/s", config.turns, rt):
            if "rate" in row:
                row["first_loss"] = row.pop("losses")[0]
            yield row


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def choose_rows(data: str, tokenizer: Tokenizer, max_length: int) -> tuple[list[dict], list[Example]]:
    """The first rows, in a random order, that become one example each, and these examples."""
    rows = []
    examples = []
    chat = our_chat(tokenizer)
    conversations, _ = load_rows(data)
    shuffled, _ = split_rows(conversations[:2000], set(), 0, 0)
    for row in shuffled:
        found = encode_rows([row], chat, max_length)
        if len(found) == 1:
            rows.append(dict(messages=row))
            examples += found
        if len(rows) == N_EXAMPLES:
            break
    return rows, examples


def peft_step(base: Path, examples: list[Example], dtype: torch.dtype, rt: Runtime) -> Step:
    """The plain loop: peft on GPT2LMHeadModel."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2LMHeadModel

    settings = LoraConfig(
        r=LORA_DIM,
        lora_alpha=LORA_ALPHA,
        target_modules=list(TARGETS),
        fan_in_fan_out=True,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(GPT2LMHeadModel.from_pretrained(base), settings).to(rt.device)
    factors = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(factors, lr=MAX_LR, fused=True)
    micros = [padded(examples[i : i + PEFT_BATCH]) for i in range(0, len(examples), PEFT_BATCH)]
    n_targets = sum(int((micro["labels"] >= 0).sum()) for micro in micros)

    def step(_: int) -> torch.Tensor:
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
        return loss

    return step, 0


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
