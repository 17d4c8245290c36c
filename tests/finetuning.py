"""What the tests of finetuning share: a small base, adapters on it, rows to finetune it on, conversations."""

from pathlib import Path

import torch

from model import GPT, GPTConfig
from parts import chat, huggingface, lora
from parts.lora import TARGETS, LoRAConfig
from tests.helpers import seeded


def small_gpt(seed=0, **changes) -> GPT:
    torch.manual_seed(seed)
    return GPT(GPTConfig(**{**dict(n_positions=64, vocab_size=320, n_layer=2, n_head=2, n_embd=32), **changes}))


def adapted(model: GPT, targets=TARGETS, r=4, alpha=8.0, random=True, **options) -> GPT:
    """`model` with an adapter; a random one has an up-projection as after training, not zero."""
    lora.add_lora(model, LoRAConfig(r, alpha, targets=tuple(targets), **options))
    for module in lora.lora_modules(model).values():
        if random:
            torch.nn.init.normal_(module.lora_B, std=0.05)
    return model


def tokens(*shape) -> torch.Tensor:
    return torch.randint(0, 320, shape, generator=seeded(1))


def save_adapter(model: GPT, path: Path, sha256="") -> Path:
    """The adapter that `adapted` makes, as files."""
    path.mkdir()
    huggingface.save_adapter(path, model, "base", sha256)
    return path


@torch.no_grad()
def logits(model, idx):
    out = model.eval()(idx)
    return out if isinstance(out, torch.Tensor) else out.logits


def distance(a, b) -> float:
    """The largest difference of two models' logits."""
    return (logits(a, tokens(2, 30)) - logits(b, tokens(2, 30))).abs().max().item()


def row(instruction, output, input="") -> dict:
    return dict(instruction=instruction, input=input, output=output)


def said(*turns) -> list[dict]:
    """said("s: Be kind.", "u: Hi", "a: Ho"), with the blanks after the colon's one left in."""
    roles = dict(s="system", u="user", a="assistant")
    return [dict(role=roles[turn[0]], content=turn[3:]) for turn in turns]


def written(messages, tokenizer) -> str:
    """A conversation in our format, as text."""
    return chat.our_chat(tokenizer).prompt(messages) if messages else ""


WORDS = "sea tide boat gull sand wind rope sail reef moon star fish".split()
ROWS = [row(f"Say {WORDS[n % 12]}.", f"{WORDS[n % 12]} " * (1 + n % 7), "now" * (n % 2)) for n in range(60)]
