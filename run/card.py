"""A model card: the README.md beside a model's weights, for the hub and for people, from the log of its run.

    ---
    library_name: "transformers"         what the hub reads: YAML; a value is written as JSON, which YAML contains
    ...
    ---
    # tiny                               what people read: data, figures, command, versions, how to use it

A run writes it with every checkpoint, and anew once an evaluation of that checkpoint's step is done. It is made to be
edited (a license has to be chosen), so that no checksum covers it.
This file knows nothing of torch, or of how checkpoints are written: a log is a list of dicts, any of which may be odd.
"""

import json
import math
import shutil
from pathlib import Path

from cli import replace_file

FILES = {"README.md", "learning_curve.png"}
METRICS = (  # kind and key in the log, its name for people, its type on the hub
    ("val", "loss", "validation loss, nats per token", "loss"),
    ("val", "bpb", "validation, bits per byte", "bits_per_byte"),
    ("hellaswag", "acc_norm", "HellaSwag accuracy, lengths normalized", "accuracy"),
    ("hellaswag", "acc", "HellaSwag accuracy", "accuracy"),
)
LANGUAGES = {"HuggingFaceFW/fineweb": "en", "HuggingFaceFW/fineweb-edu": "en", "tatsu-lab/alpaca": "en"}


def provenance(data: dict, dataset: str, base: str) -> dict:
    """What the first record of a run says of where its model comes from, for the card.

    `data` is what is known of it, `dataset` its name on the hub, `base` a directory or a name on the hub; "" for none.
    """
    hub = dict(dataset=dataset, base_model="" if Path(base).exists() else base)  # Path("") is the current directory
    return dict(data=data, base=base, hub={key: name for key, name in hub.items() if name})


def write_card(directory: Path, name: str, records: list[dict], curve: Path) -> None:
    """Put README.md beside the weights in `directory`, and a copy of the learning curve if one is drawn by now.

    `records` are those of the run's log, up to the step that the weights are of.
    """
    if curve.exists():
        shutil.copyfile(curve, directory / "learning_curve.png")
    replace_file(directory / "README.md", model_card(name, records, {path.name for path in directory.iterdir()}))


def model_card(name: str, records: list[dict], files: set[str]) -> str:
    """The card of a model whose directory holds `files`: they tell an adapter from a model, and whether it chats."""
    metadata = [f"{key}: {json.dumps(value)}" for key, value in hub_metadata(name, records, files).items()]
    parts = [
        "\n".join(["---", *metadata, "---"]),
        f"# {name}",
        what_it_is(records, files),
        "License: not chosen yet. Choose one in the first lines of this file; those of data and base have a say in it.",
        "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in facts(records).items())]),
        *["![Learning curve](learning_curve.png)"] * ("learning_curve.png" in files),
        "## How it was made",
        # indented, because no command can end such a block, as three backquotes would end a fenced one
        "\n".join("    python " + " ".join(command.split()) for command in said(records, "command", str)),
        "## How to use it",
        usage(files),
    ]
    return "\n\n".join(parts) + "\n"


# --------------------------------------------------------------------------------------------------- what the log says


def said(records: list[dict], key: str, kind: type) -> list:
    """What the `run` records, one for each start of the run, say of `key`, each value once."""
    values = [record[key] for record in records if record["kind"] == "run" and isinstance(record.get(key), kind)]
    return [value for i, value in enumerate(values) if value not in values[:i]]


def first(records: list[dict], key: str, kind: type):
    """The first of them, else an empty value of this type."""
    return next(iter(said(records, key, kind)), kind())


def newest(records: list[dict], kind: str, key: str) -> tuple[int, float] | None:
    """(step, figure) of the last record of a kind that has one: a loss that was not finite is null in a log."""
    for record in reversed(records):
        if record["kind"] == kind and type(value := record.get(key)) in (int, float) and math.isfinite(value):
            return record["step"], value
    return None


def what_it_is(records: list[dict], files: set[str]) -> str:
    """One sentence."""
    config, base, size = (first(records, *what) for what in (("config", dict), ("base", str), ("parameters", int)))
    model, data = f"GPT-2 with {size:,} parameters" if size else "GPT-2", code(config.get("data", "unknown data"))
    if not base:
        return f"A {model}, trained on {data} from random weights."
    adapter, rank = "adapter_config.json" in files, config.get("lora_dim")
    how = f"with LoRA of rank {rank}" if rank else "all weights"
    return f"{'An adapter for a' if adapter else 'A'} {model}, {code(base)}, trained further on {data}, {how}" + (
        ", which is merged into them." if rank and not adapter else "."
    )


def facts(records: list[dict]) -> dict[str, str]:
    """The rows of the table."""
    rows = {}
    if data := first(records, "data", dict):
        values = {key: f"{v:,}" if type(v) is int else code(v) for key, v in data.items()}
        rows["data"] = ", ".join(f"{cell(key)} {value}" for key, value in values.items())
    if trained := newest(records, "train", "tokens"):
        rows["trained"] = f"{trained[0]:,} steps, {trained[1]:,} tokens"
    for kind, key, label, _ in METRICS:
        if found := newest(records, kind, key):
            n = newest(records, kind, "n")
            rows[label] = f"{found[1]:.4f} at step {found[0]:,}" + (f", {n[1]:,} examples" if n else "")
    for key, kind in dict(commit=str, machine=str, versions=dict).items():
        values = [v if kind is str else ", ".join(f"{k} {v[k]}" for k in v) for v in said(records, key, kind)]
        rows |= {key: "; ".join(map(code, values))} if values else {}
    return rows


def code(value) -> str:
    return f"`{cell(value)}`"


def cell(value) -> str:
    """Text that ends neither its cell of a table nor the backquotes around it."""
    return " ".join(str(value).replace("|", "\\|").replace("`", "'").split())


# ------------------------------------------------------------------------------------------------------------ the hub


def hub_metadata(name: str, records: list[dict], files: set[str]) -> dict:
    """What https://huggingface.co/docs/hub/model-cards describes. Bases and data are named if they are on the hub."""
    adapter, hub = "adapter_config.json" in files, first(records, "hub", dict)
    fields = dict(library_name="peft" if adapter else "transformers", pipeline_tag="text-generation", license="unknown")
    if base := hub.get("base_model"):
        fields |= dict(base_model=base, base_model_relation="adapter" if adapter else "finetune")
    if dataset := hub.get("dataset"):
        fields |= dict(datasets=[dataset]) | ({"language": LANGUAGES[dataset]} if dataset in LANGUAGES else {})
    own = dict(name="validation split of the training data", type=dataset or "text", split="validation")
    datasets = dict(val=own, hellaswag=dict(name="HellaSwag", type="Rowan/hellaswag", split="validation"))
    results, task = [], dict(name="Text Generation", type="text-generation")
    for kind, measured_on in datasets.items():
        found = [(label, type, newest(records, kind, key)) for k, key, label, type in METRICS if k == kind]
        metrics = [dict(name=label, type=type, value=round(figure[1], 4)) for label, type, figure in found if figure]
        results += [dict(task=task, dataset=measured_on, metrics=metrics)] if metrics else []
    if results:
        types = [metric["type"] for result in results for metric in result["metrics"]]
        fields |= {"metrics": list(dict.fromkeys(types)), "model-index": [dict(name=name, results=results)]}
    return fields


def usage(files: set[str]) -> str:
    """A few lines of Python. HERE is the repository's name on the hub, or a directory."""
    prompt = '[dict(role="user", content="Hi")]' if "chat_template.jinja" in files else '"Hello, I\'m"'
    lines = ["from transformers import pipeline", f'print(pipeline("text-generation", "HERE")({prompt}))']
    if "adapter_config.json" in files:
        lines = ["from peft import AutoPeftModelForCausalLM", 'AutoPeftModelForCausalLM.from_pretrained("HERE")']
    return "\n".join(["```python", *lines, "```"])
