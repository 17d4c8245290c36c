"""LoRA (Hu et al. 2021): the method, merging, and adapters as PEFT files.

A projection y = x W^T + b of a block keeps W and b, and gains a bypass of rank r:

    x ──┬── W (frozen) ──────────────────────(+)── y        A (r, in)  Kaiming uniform
        └── dropout ── A ── B ── * alpha / r ──┘            B (out, r) zero, so that y starts as the base's

The paper's hypothesis is that finetuning moves a weight along few directions (section 4.1). If so, r (in + out) numbers
can replace in * out of them. Only they need gradients and optimizer state, and only they are in an adapter's file.

This file knows nothing of training or conversations, and of the command line only the flag --targets.
"""

import hashlib
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn as nn
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from model import GPT, local_directory
from parts.checkpoint import SUMS, find_damage, find_model, newest_intact
from parts.cli import UserError
from parts.files import read_json

SETTINGS = "adapter_config.json"
TARGETS = ("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj")  # all projections of a block


@dataclass(frozen=True)
class LoRAConfig:
    """What defines an adapted model besides A and B."""

    r: int
    alpha: float
    dropout: float = 0.0  # on the input of the bypass
    targets: tuple[str, ...] = TARGETS
    rslora: bool = False  # scale by alpha / sqrt(r), so that a large r does not shrink the update (Kalajdzievski 2023)

    def __post_init__(self):
        if not (self.r >= 1 and 0 < self.scale < math.inf):
            raise UserError(f"rank {self.r} and alpha {self.alpha:g} make no scale; give both above 0")

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)


# -------------------------------------------------------------------------------------------------------- the method


class LowRankLinear(torch.autograd.Function):
    """x W^T + b + s (x A^T) B^T, for frozen W and b.

    Autograd would compute the same from the formula, but allocate and keep more tensors as large as x and y. Here the
    bypass is added in place, forward and backward. All tensors have one dtype; x is (N, in).
    """

    @staticmethod
    def forward(ctx, x, weight, bias, A, B, scale: float):
        h = x @ A.T  # (N, r)
        ctx.save_for_backward(x, weight, A, B, h)  # the formula would keep x as well, and h is small
        ctx.scale = scale
        return F.linear(x, weight, bias).addmm_(h, B.T, alpha=scale)  # (N, out)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):  # (N, out)
        x, weight, A, B, h = ctx.saved_tensors
        # the chain rule on y = x W^T + s h B^T and h = x A^T; W and b are frozen, which saves the largest product
        grad_h = (grad_y @ B) * ctx.scale  # (N, r)
        # nothing below the first adapted projection needs a gradient
        grad_x = (grad_y @ weight).addmm_(grad_h, A) if ctx.needs_input_grad[0] else None  # (N, in)
        grad_B = (h.T @ grad_y).T * ctx.scale  # (out, r); transposed because a tall thin product is slow on a CPU
        return grad_x, None, None, grad_h.T @ x, grad_B, None


class LoRALinear(nn.Module):
    """A frozen nn.Linear with a bypass of rank r."""

    def __init__(self, linear: nn.Linear, config: LoRAConfig):
        super().__init__()
        self.weight = linear.weight  # names as in nn.Linear, so that a base's checkpoint fits
        self.bias = linear.bias
        device = linear.weight.device
        self.lora_A = nn.Parameter(torch.empty(config.r, linear.in_features, device=device))
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, config.r, device=device))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))  # as in the authors' code and in nn.Linear
        self.scale = config.scale
        self.dropout = config.dropout
        self.register_buffer("unmerged", None, persistent=False)  # the base's weight, while merged

    def forward(self, x):
        if self.unmerged is not None:  # merged: the weight contains the bypass
            return F.linear(x, self.weight, self.bias)
        if self.dropout and self.training:  # W and A read different inputs, so the fused Function does not apply
            bypass = F.linear(F.linear(F.dropout(x, self.dropout), self.lora_A), self.lora_B)
            return F.linear(x, self.weight, self.bias) + bypass * self.scale
        # autocast does not reach into a Function, so we choose the precision of its products here
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        tensors = (t.to(dtype) for t in (x.flatten(0, -2), self.weight, self.bias, self.lora_A, self.lora_B))
        return LowRankLinear.apply(*tensors, self.scale).unflatten(0, x.shape[:-1])

    @torch.no_grad()
    def merge(self) -> None:
        """Add the bypass to the weight, in fp64 so that fp32 is rounded only once. Merging again changes nothing."""
        if self.unmerged is None:
            self.unmerged = self.weight.data
            # on the CPU, because MPS has no fp64
            delta = self.lora_B.cpu().double() @ self.lora_A.cpu().double() * self.scale  # (out, in)
            self.weight.data = (self.weight.cpu().double() + delta).to(self.weight)

    def unmerge(self) -> None:
        """Put the base's weight back. `merge` kept it: subtracting the bypass would not restore the exact bits."""
        if self.unmerged is not None:
            self.weight.data = self.unmerged
            self.unmerged = None


def target_names(model: GPT, targets) -> list[str]:
    """The names of the modules to adapt, in every block. Raises UserError for what cannot be adapted."""
    if not targets or not set(targets) <= set(TARGETS):
        raise UserError(
            f"--targets {' '.join(targets)!r:.80}: choose from {', '.join(TARGETS)} "
            "(wte and lm_head are one tied matrix; a bypass on one would untie them and could not be merged)"
        )
    return [name for name, _ in model.named_modules() if name.endswith(tuple(targets))]


def add_lora(model: GPT, config: LoRAConfig) -> GPT:
    """Freeze `model` and add a bypass to each target, in place, and keep the config as `model.lora`. Its outputs do not
    change until B is trained."""
    model.requires_grad_(False)  # embeddings and LayerNorm too: only the adapter is trained
    for name in target_names(model, config.targets):
        model.set_submodule(name, LoRALinear(model.get_submodule(name), config))
    model.lora = config
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
    """Turn the adapted modules back into plain nn.Linear, with their present weights, merged or not: a plain model that
    can be trained. (Autocast keeps its casts of such weights alone, and would cast frozen ones in every pass.)"""
    for name, module in lora_modules(model).items():
        n_out, n_in = module.weight.shape
        linear = nn.Linear(n_in, n_out, device="meta")  # no memory for weights that are about to be replaced
        linear.weight = module.weight
        linear.bias = module.bias
        model.set_submodule(name, linear)
    return model.requires_grad_(True)


def cast_frozen(model: GPT, dtype: torch.dtype) -> None:
    """Cast frozen projections to the dtype of the matrix products once, instead of in every forward pass.

    The output projection becomes a separate copy, because `wte`, to which it is tied, is looked up in fp32. The results
    equal those of autocast bit for bit.
    """
    for module in model.transformer.h.modules():
        if isinstance(module, nn.Linear | LoRALinear):
            module.weight.data = module.weight.data.to(dtype)
            module.bias.data = module.bias.data.to(dtype)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.data.to(dtype), requires_grad=False)


def trainable_parameters(model: GPT, targets: tuple[str, ...], r: int) -> tuple[int, float]:
    """(number at rank r, fraction of base and adapter together), for a plain model; rank 0 is full finetuning."""
    total = model.num_params()
    if not r:
        return total, 1.0
    n = r * sum(sum(model.get_submodule(name).weight.shape) for name in target_names(model, targets))  # r (in + out)
    return n, n / (total + n)


# ------------------------------------------------------------------------------------------------------ adapter files

# Keys of adapter_config.json that do not say what an adapter computes: where it comes from and how it began, what the
# tensors' names and shapes say, and options of features that are off by themselves.
NOT_COMPUTED = set(
    "base_model_name_or_path revision auto_mapping peft_version inference_mode lora_dropout target_modules "
    "fan_in_fan_out megatron_core qalora_group_size".split()
)


@dataclass(frozen=True)
class Adapter:
    """What an adapter's directory holds."""

    path: Path
    config: LoRAConfig
    tensors: dict[str, torch.Tensor]  # under peft's names
    base: str | None  # the model that it was trained on, where the files say so
    base_sha256: str | None  # of the base's weights, see `weights_sha256`


def save_adapter(path: Path, model: GPT, base: str, base_sha256: str) -> None:
    """Write the adapter of `model` as peft reads it. `base` names the model that it was trained on."""
    (path / SETTINGS).write_text(json.dumps(settings_of(model.lora, base), indent=2) + "\n")
    tensors = {name: p.detach().to("cpu", torch.float32) for name, p in factors(model).items()}
    metadata = dict(format="pt", base_sha256=base_sha256)  # peft ignores the latter
    # not save_file, which makes a file that only its owner may read
    (path / "adapter_model.safetensors").write_bytes(in_order(save(tensors, metadata), metadata))


def settings_of(config: LoRAConfig, base: str = "") -> dict:
    """The adapter_config.json of an adapter that computes the picture above."""
    return dict(
        peft_type="LORA", task_type="CAUSAL_LM", base_model_name_or_path=base, r=config.r, lora_alpha=config.alpha,
        lora_dropout=config.dropout, target_modules=list(config.targets), fan_in_fan_out=True, bias="none",
        use_rslora=config.rslora, inference_mode=True,
    )  # fmt: skip


def in_order(file: bytes, metadata: dict[str, str]) -> bytes:
    """The same safetensors file with its metadata in this order: the library's changes, and equal adapters are to be
    equal files."""
    end = 8 + int.from_bytes(file[:8], "little")
    header = json.loads(file[8:end]) | {"__metadata__": metadata}
    return file[:8] + json.dumps(header, separators=(",", ":")).encode().ljust(end - 8) + file[end:]


def factors(model: GPT) -> dict[str, nn.Parameter]:
    """A and B of every adapted module, under the names that they have in peft's files; the shapes are ours."""
    ours = (".lora_A", ".lora_B")
    return {f"base_model.model.{name}.weight": p for name, p in model.named_parameters() if name.endswith(ours)}


def weights_sha256(model: GPT) -> str:
    """sha256 over names, shapes and fp32 values of a plain model: equal for equal weights, however they are stored."""
    digest = hashlib.sha256()
    # sorted and in fp32, so that neither the order in a file nor 16-bit storage of the same numbers changes it
    for name, tensor in sorted(model.state_dict().items()):
        if name != "lm_head.weight":  # tied
            digest.update(f"{name} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().float().cpu().contiguous().numpy())
    return digest.hexdigest()


def find_adapter(adapter: str | Path) -> Path:
    """The directory with the adapter: the one given; or the newest checkpoint of a run, or else its adapter/."""
    path = Path(adapter)
    newest = newest_intact(path)  # adapter/ is older than the checkpoints of a resumed run
    for directory in (path, newest or path, path / "adapter"):
        if (directory / SETTINGS).is_file():
            return directory
    raise UserError(f"{adapter} holds no adapter; give a directory with adapter_config.json, such as out/lora/adapter")


def folders_of(model: str, adapter: str = "") -> list[Path]:
    """The directories of an adapter, if there is one, and of its base: their files say how it is spoken to."""
    base = local_directory(find_model(model), ["*.json", "*.jinja"])
    return [find_adapter(adapter), base] if adapter else [base]


def read_adapter(adapter: str | Path) -> Adapter:
    """Read a directory with adapter_config.json and adapter_model.safetensors, or the one of a run.

    Raises UserError for an adapter that is missing, damaged, or computes something else than the picture above.
    """
    path = find_adapter(adapter)
    if (path / SUMS).exists() and (problem := find_damage(path)):
        raise UserError(f"{path} is damaged: {problem}; take an earlier checkpoint of its run")
    settings = read_json(path / SETTINGS)
    try:
        with safe_open(path / "adapter_model.safetensors", "pt") as f:
            tensors = {name: f.get_tensor(name) for name in f.keys()}
            metadata = f.metadata() or {}
    except FileNotFoundError:
        raise UserError(
            f"{path} has no adapter_model.safetensors; "
            "pickled .bin adapters are not read: load it with peft and save it with safe_serialization=True"
        ) from None
    except (OSError, SafetensorError) as e:
        raise UserError(f"{path}/adapter_model.safetensors is damaged: {e}; write or download it again") from None
    config = config_of(settings, tensors, path)
    return Adapter(path, config, tensors, settings.get("base_model_name_or_path"), metadata.get("base_sha256"))


def config_of(settings: dict, tensors: dict[str, torch.Tensor], path: Path) -> LoRAConfig:
    """What an adapter computes. Raises UserError for any setting that is on and that we would not write for it: it may
    change the base's weights (pissa, olora), or the forward pass (alora), or be of a later version of peft."""
    # target_modules may be a regular expression; the tensors say what was adapted, and at which rank
    targets = tuple(target for target in TARGETS if any(f".{target}.lora_A" in name for name in tensors))
    if not targets:
        raise UserError(f"the adapter {path} has no tensors for {', '.join(TARGETS)}; train it again")
    r = next(tensor.shape[0] for name, tensor in tensors.items() if ".lora_A" in name)
    alpha = float(settings.get("lora_alpha") or 0)
    dropout = settings.get("lora_dropout") or 0.0
    config = LoRAConfig(r, alpha, dropout, targets, settings.get("use_rslora") is True)
    ours = settings_of(config) | dict(init_lora_weights=True)
    for key, value in settings.items():
        is_off = value is None or value is False or value in ("", [], {})
        began = key == "init_lora_weights" and value == "gaussian"  # another start, of the same computation
        if key not in NOT_COMPUTED and not is_off and not began and value != ours.get(key):
            raise UserError(
                f"{path}/{SETTINGS}: this code cannot compute an adapter whose {key} is {value!r:.80}; "
                "merge it with peft, or train one without it"
            )
    return config


def load_adapter(model: GPT, adapter: str | Path, dropout: float = 0.0) -> GPT:
    """Add an adapter of ours or of peft to `model`, a plain base in fp32, in place; all but A and B is then frozen.

    `dropout` is for further training. Raises UserError if the adapter cannot be read, does not fit the model, or was
    trained on another base.
    """
    found = read_adapter(adapter)
    if found.base_sha256 and found.base_sha256 != (ours := weights_sha256(model)):
        raise UserError(
            f"the adapter {found.path} was trained on another base, {found.base} with sha256 {found.base_sha256[:12]}, "
            f"and this one has {ours[:12]}; give that one"
        )
    add_lora(model, replace(found.config, dropout=dropout))
    wanted = factors(model)
    needed = {name: tuple(factor.shape) for name, factor in wanted.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in found.tensors.items()}
    for name in sorted(shapes | needed):
        if shapes.get(name) != needed.get(name):  # a block without its own would silently stay the base's
            raise UserError(
                f"the adapter {found.path} does not fit: "
                f"{name} is {shapes.get(name, 'missing')}, and the base needs {needed.get(name, 'nothing')}; "
                "give the base that it was trained on, or merge it with peft if it adapts some layers only"
            )
    for name, factor in wanted.items():
        factor.data.copy_(found.tensors[name])
    return model
