"""LoRA (Hu et al. 2021): the method, merging, and adapters as PEFT files.

A projection y = x W^T + b of a block keeps W and b, and gains a bypass of rank r:

    x ──┬── W (frozen) ──────────────────────(+)── y        A (r, in)  Kaiming uniform
        └── dropout ── A ── B ── * alpha / r ──┘            B (out, r) zero, so that y starts as the base's

The paper's hypothesis is that finetuning moves a weight along few directions (section 4.1). If so, r (in + out) numbers
can stand for in * out of them. They are also what training needs gradients and optimizer states for, and all that an
adapter's file holds.

- `add_lora`, `merge`, `unmerge`, `remove_lora` change a GPT in place
- `read_adapter`, `load_adapter` read a directory of ours or of peft, and refuse what they do not compute
- `AdapterFiles` writes one, for checkpoints and for the result

This file knows nothing of training or conversations, and of the command line only the flag --targets.
"""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn as nn
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn import functional as F

from cli import UserError, read_json
from model import GPT
from run.checkpoint import SUMS, damage, newest_intact

TARGETS = ("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj")  # all projections of a block
BOTH_PROJECTIONS = "c_proj"  # peft's name for the second and the last of them together


@dataclass(frozen=True)
class LoRAConfig:
    """What is needed, besides the factors, to compute an adapted model."""

    r: int
    alpha: float
    dropout: float = 0.0  # on the input of the bypass
    targets: tuple[str, ...] = TARGETS
    rslora: bool = False  # scale by alpha / sqrt(r): a large r then does not shrink the update (Kalajdzievski 2023)

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)


# -------------------------------------------------------------------------------------------------------- the method


class LowRankLinear(torch.autograd.Function):
    """x W^T + b + s (x A^T) B^T, for frozen W and b.

    The same as three products written out, with nothing as large as x or y in between: the bypass is added in place,
    forward and backward. Written out, autograd would also keep an (N, out) tensor for the sum of both ways. All tensors
    in one dtype; x (N, in).
    """

    @staticmethod
    def forward(ctx, x, weight, bias, A, B, scale: float):
        h = x @ A.T  # (N, r)
        ctx.save_for_backward(x, weight, A, B, h)  # x would be kept in any case, and h is small
        ctx.scale = scale
        return F.linear(x, weight, bias).addmm_(h, B.T, alpha=scale)  # (N, out)

    @staticmethod
    def backward(ctx, grad_y):  # (N, out)
        x, weight, A, B, h = ctx.saved_tensors
        # from y = x W^T + s h B^T and h = x A^T by the chain rule; W and b are frozen, so no product is due for them
        grad_h = (grad_y @ B) * ctx.scale  # (N, r)
        grad_x = (grad_y @ weight).addmm_(grad_h, A) if ctx.needs_input_grad[0] else None  # none below the first one
        grad_B = (h.T @ grad_y).T * ctx.scale  # (out, r), in this order: a tall thin product is slow on a CPU
        return grad_x, None, None, grad_h.T @ x, grad_B, None


class LoRALinear(nn.Module):
    """A frozen nn.Linear with a bypass of rank r."""

    def __init__(self, linear: nn.Linear, config: LoRAConfig):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias  # under their own names: a base's checkpoint fits
        device = linear.weight.device
        self.lora_A = nn.Parameter(torch.empty(config.r, linear.in_features, device=device))
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, config.r, device=device))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))  # as in the authors' code, and in nn.Linear
        self.scale, self.dropout = config.scale, config.dropout
        self.register_buffer("unmerged", None, persistent=False)  # the base's weight, while merged

    def forward(self, x):
        if self.unmerged is not None:  # merged: the bypass is in the weight
            return F.linear(x, self.weight, self.bias)
        if self.dropout and self.training:  # the two ways then have different inputs
            bypass = F.linear(F.linear(F.dropout(x, self.dropout), self.lora_A), self.lora_B)
            return F.linear(x, self.weight, self.bias) + bypass * self.scale
        # autocast does not look into a Function, so that the precision of its products is chosen here
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        tensors = (t.to(dtype) for t in (x.flatten(0, -2), self.weight, self.bias, self.lora_A, self.lora_B))
        return LowRankLinear.apply(*tensors, self.scale).unflatten(0, x.shape[:-1])

    @torch.no_grad()
    def merge(self) -> None:
        """Add the bypass to the weight: in fp64, so that fp32 is rounded once. Merging again changes nothing."""
        if self.unmerged is None:
            if self.weight.dtype != torch.float32:
                raise ValueError(f"the weight is {self.weight.dtype}; merge into fp32 weights")
            self.unmerged = self.weight.data
            # on the CPU, since MPS has no fp64
            delta = self.lora_B.cpu().double() @ self.lora_A.cpu().double() * self.scale  # (out, in)
            self.weight.data = (self.weight.cpu().double() + delta).to(self.weight)

    def unmerge(self) -> None:
        """Put the base's own weight back. It was kept, since subtracting the bypass would not give every bit again."""
        if self.unmerged is not None:
            self.weight.data, self.unmerged = self.unmerged, None


def target_names(model: GPT, targets) -> list[str]:
    """The modules that `targets`, names or their endings, mean. Raises UserError for what cannot be adapted."""
    if not targets:
        raise UserError(f"--targets names no projection; choose from {', '.join(TARGETS)}")
    for target in targets:
        if target.split(".")[-1] in ("wte", "lm_head"):
            raise UserError(
                f"--targets {target}: wte and lm_head are one tied matrix, and a bypass on one would untie them "
                "(and could not be merged); choose from " + ", ".join(TARGETS)
            )
        if target not in (*TARGETS, BOTH_PROJECTIONS):
            raise UserError(f"--targets {target}: there is no such projection; choose from {', '.join(TARGETS)}")
    ends = tuple(f".{target}" for target in targets)  # the dot keeps c_proj from meaning some other_c_proj
    return [name for name, module in model.named_modules() if name.endswith(ends) and hasattr(module, "weight")]


def add_lora(model: GPT, config: LoRAConfig) -> GPT:
    """Freeze `model` and give its targets a bypass, in place. Its outputs stay as they are until B is trained."""
    model.requires_grad_(False)  # embeddings and LayerNorm too: the adapter is all that changes
    for name in target_names(model, config.targets):
        replace_module(model, name, LoRALinear(model.get_submodule(name), config))
    return model


def lora_modules(model: GPT) -> dict[str, LoRALinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def merge(model: GPT) -> GPT:
    """Add every bypass to its weight, for inference without overhead. Idempotent."""
    for module in lora_modules(model).values():
        module.merge()
    return model


def unmerge(model: GPT) -> GPT:
    """Undo `merge`; the base's weights come back bit for bit. Idempotent."""
    for module in lora_modules(model).values():
        module.unmerge()
    return model


def remove_lora(model: GPT) -> GPT:
    """Turn the adapted modules into plain nn.Linear again, with the weights that they have: merged or not."""
    for name, module in lora_modules(model).items():
        linear = nn.Linear(module.weight.size(1), module.weight.size(0), device="meta")  # its own weights are not made
        linear.weight, linear.bias = module.weight, module.bias
        replace_module(model, name, linear)
    return model


def replace_module(model: GPT, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def cast_frozen(model: GPT, dtype: torch.dtype) -> None:
    """Cast frozen matrices to the dtype of the matrix products once, instead of in every forward pass.

    The output projection gets a copy of its own, since `wte`, to which it is tied, is looked up in fp32: the numbers
    are those of autocast, bit for bit.
    """
    for module in lora_modules(model).values():
        for p in (module.weight, module.bias):
            p.data = p.data.to(dtype)
    plain = (m for m in model.transformer.h.modules() if isinstance(m, nn.Linear))  # those that are no target
    for p in (p for m in plain for p in m.parameters() if not p.requires_grad):
        p.data = p.data.to(dtype)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.data.to(dtype), requires_grad=False)


def trainable_parameters(model: GPT, targets: tuple[str, ...], r: int) -> tuple[int, float]:
    """(their number at rank r, the fraction of base and adapter together) for a plain model; 0 is full finetuning."""
    total = model.num_params()
    n = r * sum(sum(model.get_submodule(name).weight.shape) for name in target_names(model, targets))  # r (in + out)
    return (n, n / (total + n)) if r else (total, 1.0)


# ------------------------------------------------------------------------------------------------------ adapter files

# What adapter_config.json may say besides what `read_settings` takes from it: the values with which peft computes the
# picture above. None here stands for any value, of keys that say nothing about the computation. A key or a value that
# is not in this table may change the base's weights (pissa, olora) or the forward pass (alora), and is refused.
HARMLESS = dict(
    base_model_name_or_path=None, revision=None, auto_mapping=None, peft_version=None, inference_mode=None,
    target_modules=None,  # the tensors' names say it
    fan_in_fan_out=None,  # whether the base stores (in, out), which peft sees for itself
    megatron_core=None, qalora_group_size=None,  # of what is off
    peft_type=("LORA",), task_type=(None, "CAUSAL_LM"), bias=("none",), init_lora_weights=(True, False, "gaussian"),
    use_rslora=(True, False), use_dora=(False,), lora_bias=(False,), use_qalora=(False,), use_bdlora=(None, False),
    ensure_weight_tying=(False,), modules_to_save=(None, []), exclude_modules=(None, []), layers_to_transform=(None,),
    layers_pattern=(None,), rank_pattern=(None, {}), alpha_pattern=(None, {}), megatron_config=(None,),
    trainable_token_indices=(None,), loftq_config=(None, {}), eva_config=(None,), corda_config=(None,),
    lora_ga_config=(None,), velora_config=(None,), monteclora_config=(None,), kasa_config=(None,),
    arrow_config=(None,), alora_invocation_tokens=(None,), layer_replication=(None,), target_parameters=(None,),
)  # fmt: skip


@dataclass(frozen=True)
class Adapter:
    """What the directory of an adapter holds."""

    path: Path
    config: LoRAConfig
    tensors: dict[str, torch.Tensor]  # under peft's names
    base: str | None  # what it was trained on, and the fingerprint of that, where they are known
    base_sha256: str | None


class AdapterFiles:
    """The adapter of `model` as files: what its checkpoints hold, and what a run goes back to."""

    def __init__(self, model: GPT, config: LoRAConfig, base: str, base_sha256: str):
        self.model, self.config, self.base, self.base_sha256 = model, config, base, base_sha256

    def copy(self) -> Callable[[Path], None]:
        """Copy the factors of this moment; returns a function that writes them into a directory."""
        tensors = {
            peft_name(name, factor): getattr(module, f"lora_{factor}").detach().to("cpu", torch.float32, copy=True)
            for name, module in lora_modules(self.model).items()
            for factor in "AB"
        }
        return lambda path: write_adapter(Adapter(path, self.config, tensors, self.base, self.base_sha256))

    def load(self, path: Path) -> None:
        """Give the model the factors that were written to `path`."""
        copy_factors(self.model, read_adapter(path).tensors)


def peft_name(name: str, factor: str) -> str:
    """The name of a factor, A or B, of the module `name` in peft's files; the shapes are the same."""
    return f"base_model.model.{name}.lora_{factor}.weight"


def fingerprint(model: GPT) -> str:
    """sha256 over names, shapes and fp32 values of a plain model: equal for equal weights, however they are stored."""
    digest = hashlib.sha256()
    # sorted, and in fp32: neither the order in a file nor 16-bit storage of the same numbers changes it
    for name, tensor in sorted(model.state_dict().items()):
        if name != "lm_head.weight":  # tied
            digest.update(f"{name} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().float().cpu().contiguous().numpy())
    return digest.hexdigest()


def write_adapter(adapter: Adapter) -> None:
    """`adapter_config.json` and `adapter_model.safetensors`, as peft reads them. The fingerprint of the base is in the
    header of the latter, where peft does not mind it."""
    config = adapter.config
    settings = dict(
        peft_type="LORA", task_type="CAUSAL_LM", base_model_name_or_path=adapter.base, r=config.r,
        lora_alpha=config.alpha, lora_dropout=config.dropout, target_modules=list(config.targets),
        fan_in_fan_out=True, bias="none", use_rslora=config.rslora, inference_mode=True,
    )  # fmt: skip
    (adapter.path / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    metadata = {"format": "pt", "base_sha256": adapter.base_sha256 or ""}
    save_file(adapter.tensors, adapter.path / "adapter_model.safetensors", metadata=metadata)


def find_adapter(adapter: str | Path) -> Path:
    """The directory with the adapter: the one given, or that of a run's newest checkpoint, or of its result."""
    path = Path(adapter)
    newest = newest_intact(path) if path.is_dir() else None  # `adapter/` may be of a run that this one has replaced
    for directory in (path, newest or path, path / "adapter"):
        if (directory / "adapter_config.json").is_file():
            return directory
    raise UserError(f"{adapter} holds no adapter; give a directory with adapter_config.json, such as out/lora/adapter")


def read_adapter(adapter: str | Path) -> Adapter:
    """An adapter of ours or of peft: a directory with adapter_config.json and adapter_model.safetensors, or a run's.

    Raises UserError for one that is missing, damaged, or does something else than the picture above.
    """
    path = find_adapter(adapter)
    if (path / SUMS).exists() and (problem := damage(path)):
        raise UserError(f"{path} is damaged: {problem}; take an earlier checkpoint of its run")
    settings = read_json(path / "adapter_config.json")
    try:
        with safe_open(path / "adapter_model.safetensors", "pt") as f:
            tensors, metadata = {name: f.get_tensor(name) for name in f.keys()}, f.metadata() or {}
        if not all(t.is_floating_point() and t.isfinite().all() for t in tensors.values()):
            raise ValueError("it holds numbers that are not finite, or no floating-point numbers")
    except FileNotFoundError:
        raise UserError(
            f"{path} has no adapter_model.safetensors; pickled .bin adapters are not read: load it with peft and save "
            "it again, with safe_serialization"
        ) from None
    except (ValueError, OSError, RuntimeError, SafetensorError) as e:
        raise UserError(f"{path}/adapter_model.safetensors is damaged: {e}; write or download it again") from None
    # target_modules may be a regular expression; what was adapted is what has tensors
    targets = tuple(target for target in TARGETS if any(f".{target}.lora_A" in name for name in tensors))
    config = read_settings(settings, targets, path / "adapter_config.json")
    return Adapter(path, config, tensors, settings.get("base_model_name_or_path"), metadata.get("base_sha256"))


def read_settings(settings: dict, targets: tuple[str, ...], file: Path) -> LoRAConfig:
    """The content of an adapter_config.json, checked. Raises UserError for all that is not known to be harmless."""
    if not isinstance(settings, dict):
        raise UserError(f"{file} is damaged: it holds no object; write or download it again")
    limits = dict(r=(1, 2**20), lora_alpha=(1e-9, 1e9), lora_dropout=(0.0, 0.999))
    numbers = {key: settings.get(key, 0.0 if key == "lora_dropout" else None) for key in limits}
    for key, (low, high) in limits.items():
        value = numbers[key]
        number = isinstance(value, int if key == "r" else int | float) and not isinstance(value, bool)
        if not number or not low <= value <= high:
            raise UserError(f"{file} is damaged: {key} is {value!r:.80}; write or download the adapter again")
    for key, value in settings.items():
        if key not in HARMLESS and key not in limits:
            raise UserError(
                f"{file} has the key {key}, which is not known here and may change what the adapter computes; delete "
                "it if it does not, or merge the adapter with peft"
            )
        if HARMLESS.get(key) is not None and value not in HARMLESS[key]:
            raise UserError(
                f"{file}: this code does not compute an adapter whose {key} is {value!r:.80}; merge it with peft, "
                "or train one without it"
            )
    r, alpha, dropout = numbers.values()
    return LoRAConfig(r, float(alpha), float(dropout), targets, settings.get("use_rslora", False))


def load_adapter(model: GPT, adapter: str | Path, dropout: float = 0.0) -> GPT:
    """Put an adapter of ours or of peft onto `model`, a plain base in fp32, in place; returns it, all but A, B frozen.

    `dropout` is that of the training to come. Raises UserError if the adapter cannot be read, is of another shape, or
    was trained on another base.
    """
    found = read_adapter(adapter)
    check_fit(model, found)
    add_lora(model, replace(found.config, dropout=dropout))
    copy_factors(model, found.tensors)
    return model


def check_fit(model: GPT, adapter: Adapter) -> None:
    """Raises UserError where the tensors are not exactly those that this base needs, or come from another base."""
    if not adapter.config.targets:
        raise UserError(f"the adapter {adapter.path} holds no factors of {', '.join(TARGETS)}; train it again")
    shapes = {}  # of all that there must be: a block without its factors would silently be the base's
    for name in target_names(model, adapter.config.targets):
        n_out, n_in = model.get_submodule(name).weight.shape
        shapes[peft_name(name, "A")], shapes[peft_name(name, "B")] = (adapter.config.r, n_in), (n_out, adapter.config.r)
    for name in sorted(adapter.tensors.keys() | shapes):
        found = tuple(adapter.tensors[name].shape) if name in adapter.tensors else "missing"
        if found != shapes.get(name):
            expected = f"{shapes[name]} on this base" if name in shapes else "nothing on this base"
            raise UserError(
                f"the adapter {adapter.path} is of another shape: {name} is {found}, and {expected}; choose its base"
            )
    if adapter.base_sha256 and adapter.base_sha256 != (here := fingerprint(model)):
        raise UserError(
            f"the adapter {adapter.path} was trained on another base, {adapter.base} with sha256 "
            f"{adapter.base_sha256[:12]}; this one has {here[:12]}: give the base that it was trained on"
        )


@torch.no_grad()
def copy_factors(model: GPT, tensors: dict[str, torch.Tensor]) -> None:
    """Give an adapted model the factors of an adapter of its shape, in place."""
    for name, module in lora_modules(model).items():
        module.lora_A.copy_(tensors[peft_name(name, "A")])
        module.lora_B.copy_(tensors[peft_name(name, "B")])
