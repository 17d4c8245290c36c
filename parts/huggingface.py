"""Hugging Face's files: GPT-2 checkpoints of transformers, and LoRA adapters of peft.

transformers keeps a GPT-2 under the names of model.py, with two differences: the hub's files leave out the prefix
`transformer.`, and `Conv1D` stores a projection as (in, out), the transpose of nn.Linear's weight.

Whether a model is a GPT-2, transformers is asked (`is_gpt2`). Any other model is saved under a type and an activation
that no other program knows, so that none takes it for a GPT-2; here it loads like any other.

This file knows nothing of runs, tokenizers or training.
"""

import contextlib
import hashlib
import math
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from model import GPT, GPTConfig
from parts.cli import UserError
from parts.files import read_json, write_json
from parts.lora import TARGETS, LoRAConfig, add_lora

# ------------------------------------------------------------------------------------------------------------ models

HEAD = "lm_head.weight"
TABLE = "transformer.wte.weight"
CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # transposed in the files
GPT2 = dict(  # what a config.json says of the computation; a missing key means this value
    model_type="gpt2",
    activation_function="gelu_new",
    layer_norm_epsilon=1e-5,
    scale_attn_weights=True,
    scale_attn_by_inverse_layer_idx=False,
    add_cross_attention=False,
)
CHANGED = "changed-gpt2"
HUB_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "model*.safetensors"]


def snapshot(model: str) -> Path:
    """Return the directory `model`, or else that of a hub model in the cache, downloaded once. Raises UserError."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=HUB_FILES))
    except Exception as e:  # the network, the hub's client and a broken server each raise their own
        raise UserError(
            f"{model} is not a local directory and could not be downloaded ({type(e).__name__}); check the name, or "
            f"download it elsewhere: hf download {model}"
        ) from e


def to_files(model: GPT) -> dict[str, Tensor]:
    """Return a model's tensors as the files have them, as views. A tensor with two names, as the tied head, is there
    once, under its first."""
    tensors = {}
    seen = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = transposed(name, tensor.detach())
    return tensors


def transposed(name: str, tensor: Tensor) -> Tensor:
    """Turn nn.Linear's weight into Conv1D's, or back; leave other tensors as they are."""
    return tensor.t() if name.endswith(CONV1D) and tensor.dim() == 2 else tensor


def config_of(model: GPT, gpt2: bool) -> dict:
    """Return a model's config.json."""
    config = asdict(model.config) | dict(dtype="float32")
    if not gpt2:
        return config | dict(architectures=["ChangedGPT2"], model_type=CHANGED, activation_function=CHANGED)
    return config | GPT2 | dict(
        architectures=["GPT2LMHeadModel"],
        tie_word_embeddings=model.lm_head.weight is model.transformer.wte.weight,
        n_ctx=model.config.n_positions,  # llama.cpp reads this name
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), model.config.dropout),
    )


@torch.no_grad()
def is_gpt2(model: GPT, ids: tuple[int, ...] | None = None) -> bool:
    """Ask transformers whether it computes the same logits after every token of `ids`, by default of a whole context,
    from these very tensors; one note says if not. It takes the time of two forward passes."""
    if getattr(model, "is_changed", False):
        return False  # found at an earlier save, and said then
    from transformers import GPT2Config, GPT2LMHeadModel

    device = model.lm_head.weight.device
    n = model.config.n_positions
    idx = torch.tensor([ids or fixed_row(model, n)], device=device)  # (1, T)
    buffers = dict(model.named_buffers())  # transformers passes over those that it does not know, such as a mask
    tensors = {name: tensor for name, tensor in to_files(model).items() if name not in buffers}
    tensors.setdefault(HEAD, tensors.get(TABLE))
    try:
        with torch.device("meta"):
            config = GPT2Config(**config_of(model, True), bos_token_id=None, eos_token_id=None)
            theirs = GPT2LMHeadModel(config).eval()
        theirs.load_state_dict(tensors, assign=True)  # no copies
        with exactly(model):
            expected = theirs(idx).logits
            tolerance = 2e-5 * expected.nan_to_num().abs().max().item() + 1e-6
            same = torch.allclose(model(idx), expected, rtol=0, atol=tolerance, equal_nan=True)  # nan: it has diverged
    except Exception:  # of a model with other tensors, or with other arguments
        same = False
    if not same:
        model.is_changed = True
        print("note: transformers has other logits or tensors: this model is saved as changed-gpt2", file=sys.stderr)
    return same


def fixed_row(model: GPT, n: int = 16) -> list[int]:
    return [7919 * i % model.config.vocab_size for i in range(1, 1 + min(n, model.config.n_positions))]


@torch.no_grad()
def logits_of_fixed_row(model: GPT) -> list[float]:
    """Compute up to 16 logits after a fixed row of up to 16 ids, which config.json keeps."""
    ids = torch.tensor(fixed_row(model), device=model.lm_head.weight.device)
    with exactly(model):
        return model(ids[None])[0, -1, ids].float().tolist()


@contextlib.contextmanager
def exactly(model: GPT):
    """Compute in fp32 and without dropout while the block runs."""
    training = model.training
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(model.lm_head.weight.device.type, enabled=False):
            model.eval()
            yield
    finally:
        model.train(training)
        torch.set_float32_matmul_precision(precision)


def write_model(folder: str | Path, model: GPT, gpt2: bool, eos: int | None = None, suppress: list[int] = ()) -> None:
    """Write config.json, generation_config.json and model.safetensors in fp32. `suppress` are ids that are no token."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokens = dict(bos_token_id=eos, eos_token_id=eos)
    config = config_of(model, gpt2) | tokens
    with contextlib.suppress(Exception):  # an edited model may refuse 16 ids
        logits = logits_of_fixed_row(model)
        if all(map(math.isfinite, logits)):  # JSON has no nan
            config["logits_of_fixed_row"] = logits
    generation = dict(do_sample=True, top_k=50, **tokens)
    if suppress:
        generation["suppress_tokens"] = suppress
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", generation)
    tensors = {}
    for name, tensor in to_files(model).items():
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        tensors[name] = tensor.to("cpu", dtype).contiguous()
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    # safetensors writes mode 0600; use the mode of the files next to it
    with contextlib.suppress(OSError):  # a file system may have no modes, or let nobody change them
        weights.chmod((folder / "config.json").stat().st_mode)


def read_config(folder: Path, dropout: float = 0.0, attention: str = "flash") -> GPTConfig:
    """Read the sizes of a model. Raises UserError for a config.json that is damaged, or of another kind of model."""
    file = folder / "config.json"
    config = read_json(file)
    if config.get("model_type") != CHANGED:
        for key, value in GPT2.items():
            if config.get(key, value) != value:
                raise UserError(f"{file}: {key} is {config[key]!r}, not GPT-2's {value!r}; choose a GPT-2")
    try:
        stored = {field.name: config[field.name] for field in fields(GPTConfig) if field.name in config}
        tuples = {field.name for field in fields(GPTConfig) if isinstance(field.default, tuple)}
        stored |= {name: tuple(stored[name]) for name in tuples & stored.keys()}  # JSON has lists
        return GPTConfig(**stored | dict(dropout=dropout, attention=attention))
    except (AssertionError, TypeError, ValueError) as e:
        raise UserError(f"{file}: {e}") from e


class Uninitialized(TorchFunctionMode):
    """Skip torch.nn.init while a model is built whose weights are read next: drawing them takes longer than reading.
    `torch.device("meta")` would also leave buffers without values, such as a mask or a table of angles."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", None) != "torch.nn.init":
            return function(*args, **(kwargs or {}))
        return args[0] if args else kwargs["tensor"]  # as these functions do


def read_model(folder: Path, dropout: float = 0.0, attention: str = "flash") -> GPT:
    """Read a model in fp32 on the CPU. One note says if it computes other logits than when it was saved.

    Raises UserError for files that are missing or damaged, and for tensors that do not fit this model.py.
    """
    with Uninitialized():
        model = GPT(read_config(folder, dropout, attention))
    ours = model.state_dict(keep_vars=True)
    found = {}
    for name, tensor in read_tensors(folder).items():
        if f"transformer.{name}" in ours:
            name = f"transformer.{name}"
        if name in ours or not name.endswith((".attn.bias", ".attn.masked_bias")):  # the causal masks of old files
            found[name] = transposed(name, tensor)
    if HEAD in ours and TABLE in found:
        found.setdefault(HEAD, found[TABLE])  # a file has a tied matrix once, also for a model that does not tie it
    first = {}
    for name, tensor in ours.items():
        written = first.setdefault(id(tensor), name)
        if name != written and written in found:
            shared = found.setdefault(name, found[written])  # a file has a shared tensor once
            if not torch.equal(shared, found[written]):
                raise UserError(f"{folder}: {name} is not {written}, but model.py ties them; remove that line")
    try:
        model.load_state_dict(found)
    except RuntimeError as e:
        raise UserError(f"{folder} does not fit ({str(e):.200}); choose the model.py that wrote it") from e
    compare_logits(model, folder)
    return model


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of model.safetensors, or of the parts that its index lists. Raises UserError."""
    index = folder / "model.safetensors.index.json"
    files = [folder / "model.safetensors"]
    if index.exists():
        files = sorted({folder / name for name in read_json(index)["weight_map"].values()})
    tensors = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (OSError, SafetensorError) as e:
            raise UserError(f"{file} cannot be read ({e}); pass another checkpoint, or write it again") from e
    return tensors


def compare_logits(model: GPT, folder: Path) -> None:
    """Print one note if a model computes other logits than its config.json keeps."""
    kept = read_json(folder / "config.json").get("logits_of_fixed_row")
    if not kept:  # of another program
        return
    found = torch.tensor(logits_of_fixed_row(model))
    expected = torch.tensor(kept, dtype=torch.float32)
    if (found - expected).abs().max() > 1e-3 * expected.abs().max():
        print(f"note: {folder} was saved with other logits: a weight, a buffer or model.py is another", file=sys.stderr)


# ---------------------------------------------------------------------------------------------------------- adapters

SETTINGS = "adapter_config.json"
FACTORS = "adapter_model.safetensors"
# Keys of adapter_config.json that say nothing beyond the tensors' names and shapes, alpha and rslora
PASSED_OVER = set(
    "base_model_name_or_path revision auto_mapping peft_version inference_mode lora_dropout target_modules r "
    "lora_alpha use_rslora fan_in_fan_out megatron_core qalora_group_size".split()
)
# All other settings are off, or one of these: another initialization changes the base's weights
COMPUTED = dict(peft_type=["LORA"], task_type=["CAUSAL_LM"], bias=["none"], init_lora_weights=[True, "gaussian"])


def save_adapter(folder: Path, model: GPT, base: str, base_sha256: str) -> None:
    """Write the adapter of `model` as peft reads it. `base` names the model that it was trained on."""
    config = model.lora
    settings = dict(
        peft_type="LORA",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        r=config.r,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=list(config.targets),
        fan_in_fan_out=True,
        bias="none",
        use_rslora=config.rslora,
        inference_mode=True,
    )
    write_json(folder / SETTINGS, settings)
    tensors = {name: p.detach().to("cpu", torch.float32) for name, p in factors(model).items()}
    # not save_file, which makes a file that only its owner may read
    (folder / FACTORS).write_bytes(save(tensors, dict(base_sha256=base_sha256)))  # peft reads no metadata


def factors(model: GPT) -> dict[str, torch.nn.Parameter]:
    """Return A and B of every adapted module, under peft's names."""
    ours = (".lora_A", ".lora_B")
    return {f"base_model.model.{name}.weight": p for name, p in model.named_parameters() if name.endswith(ours)}


def weights_sha256(model: GPT) -> str:
    """Return a sha256 over a plain model's names, shapes and fp32 values: equal for equal weights in any storage."""
    digest = hashlib.sha256()
    # sorted and in fp32, so that neither the order in a file nor 16-bit storage of the same numbers changes it
    for name, tensor in sorted(model.state_dict().items()):
        if name != HEAD or model.lm_head.weight is not model.transformer.wte.weight:
            digest.update(f"{name} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().float().cpu().contiguous().numpy())
    return digest.hexdigest()


def read_adapter(folder: Path) -> tuple[LoRAConfig, dict[str, Tensor], dict]:
    """Read an adapter's config, its tensors under peft's names, and where it says that it comes from: `base`, and its
    `base_sha256`. Raises UserError for files that are missing or damaged, and for any setting that parts/lora.py does
    not compute."""
    file = folder / FACTORS
    settings = read_json(folder / SETTINGS)
    try:
        with safe_open(file, "pt") as f:
            tensors = {name: f.get_tensor(name) for name in f.keys()}
            metadata = f.metadata() or {}
    except (OSError, SafetensorError) as e:
        raise UserError(f"{file} cannot be read ({e}); write or download it again, as safetensors") from None
    for key, value in settings.items():
        if key not in PASSED_OVER and value and value not in COMPUTED.get(key, []):
            raise UserError(f"{folder / SETTINGS}: {key} {value!r:.80} is not computed here; use it in peft")
    # target_modules may be a regular expression; the tensors say what was adapted, and at which rank
    targets = tuple(target for target in TARGETS if any(f".{target}.lora_A" in name for name in tensors))
    if not targets:
        raise UserError(f"{file} adapts {', '.join(tensors)[:80]}; choose an adapter of {', '.join(TARGETS)}")
    r = next(tensor.shape[0] for name, tensor in tensors.items() if ".lora_A" in name)
    rslora = settings.get("use_rslora") is True
    config = LoRAConfig(r, float(settings.get("lora_alpha") or 0), 0.0, targets, rslora)
    origin = dict(base=settings.get("base_model_name_or_path"), base_sha256=metadata.get("base_sha256"))
    return config, tensors, origin


def load_adapter(model: GPT, folder: Path, dropout: float = 0.0) -> GPT:
    """Add an adapter of ours or of peft to `model`, a plain base in fp32, in place; all but A and B is then frozen.

    `dropout` is for further training. Raises UserError if the adapter cannot be read, does not fit the model, or was
    trained on another base.
    """
    config, tensors, origin = read_adapter(folder)
    if origin["base_sha256"] and origin["base_sha256"] != weights_sha256(model):
        raise UserError(f"{folder} was trained on other weights, those of {origin['base']}; pass that base")
    add_lora(model, replace(config, dropout=dropout))
    wanted = factors(model)
    for name in wanted | tensors:  # a block without its own would silently stay the base's
        if name not in wanted or name not in tensors or wanted[name].shape != tensors[name].shape:
            raise UserError(f"{folder}: {name} does not fit; pass its own base, or use the adapter in peft")
        wanted[name].data.copy_(tensors[name])
    return model
