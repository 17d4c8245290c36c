"""A model card: the README.md beside a model's weights, for the hub and for people, from the log of its run.

The first lines are metadata for https://huggingface.co/docs/hub/model-cards; below them people read the data, figures,
command and commit; the hub itself says how to load a model. A run writes the card with every checkpoint, and again
after an evaluation of that checkpoint's step. People edit it (a license has to be chosen), so no checksum covers it.

This file knows nothing of torch, or of how checkpoints are written: a log is a list of dicts.
"""

import shutil
from pathlib import Path

from huggingface_hub import EvalResult, ModelCardData

from cli import replace_file

METRICS = (  # kind and key in the log, its name for people, its type on the hub
    ("val", "loss", "validation loss, nats per token", "loss"),
    ("val", "bpb", "validation, bits per byte", "bits_per_byte"),
    ("hellaswag", "acc_norm", "HellaSwag accuracy, lengths normalized", "accuracy"),
    ("hellaswag", "acc", "HellaSwag accuracy", "accuracy"),
    ("hellaswag", "gold_bpb", "HellaSwag, bits per byte of the right ending", "bits_per_byte"),
)


def provenance(data: dict, dataset: str, base: str) -> dict:
    """What the first record of a run says about where its model comes from, for the card.

    `data` is what is known of it, `dataset` its name on the hub, `base` a directory or a name on the hub; "" for none.
    """
    hub = dict(dataset=dataset, base_model="" if Path(base).exists() else base)  # Path("") is the current directory
    return dict(data=data, base=base, hub={key: name for key, name in hub.items() if name})


def write_card(directory: Path, name: str, records: list[dict], curve: Path) -> None:
    """Put README.md beside the weights in `directory`, with a copy of the learning curve if there is one.

    `records` are those of the run's log up to the step of the weights.
    """
    if curve.exists():
        shutil.copyfile(curve, directory / "learning_curve.png")
    replace_file(directory / "README.md", model_card(name, records, {path.name for path in directory.iterdir()}))


def model_card(name: str, records: list[dict], files: set[str]) -> str:
    """The card of a model whose directory holds `files`: they tell an adapter from a model."""
    parts = [
        f"---\n{hub_metadata(name, records, files).to_yaml()}\n---",
        f"# {name}",
        what_it_is(records, files),
        "License: not chosen yet. Choose one in the first lines of this file; the licenses of the data and the base "
        "model may limit the choice.",
        "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in facts(records).items())]),
        *["![Learning curve](learning_curve.png)"] * ("learning_curve.png" in files),
        "## How it was made",
        # indented: no command can end such a block, as three backquotes would end a fenced one
        "\n".join("    python " + " ".join(command.splitlines()) for command in said(records, "command")),
    ]
    return "\n\n".join(parts) + "\n"


def said(records: list[dict], key: str) -> list:
    """What the `run` records, one for each start of the run, say about `key`, each value once."""
    values = [record[key] for record in records if record["kind"] == "run" and record.get(key)]
    return [value for i, value in enumerate(values) if value not in values[:i]]


def first(records: list[dict], key: str, default):
    return next(iter(said(records, key)), default)


def newest(records: list[dict], kind: str, key: str) -> tuple[int, float] | None:
    """(step, figure) of the last record of a kind that has one: a figure that was not finite is null in a log."""
    found = [(r["step"], r[key]) for r in records if r["kind"] == kind and r.get(key) is not None]
    return found[-1] if found else None


def what_it_is(records: list[dict], files: set[str]) -> str:
    """One sentence."""
    config, base, size = first(records, "config", {}), first(records, "base", ""), first(records, "parameters", 0)
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
    if data := first(records, "data", {}):
        rows["data"] = ", ".join(f"{k} {v:,}" if type(v) is int else f"{k} {code(v)}" for k, v in data.items())
    if trained := newest(records, "train", "tokens"):
        rows["trained"] = f"{trained[0]:,} steps, {trained[1]:,} tokens"
    for kind, key, label, _ in METRICS:
        if found := newest(records, kind, key):
            n = newest(records, kind, "n")
            rows[label] = f"{found[1]:.4f} at step {found[0]:,}" + (f", {n[1]:,} examples" if n else "")
    if commits := said(records, "commit"):
        rows["commit"] = "; ".join(map(code, commits))
    return rows


def code(value) -> str:
    """Text in backquotes that ends neither them nor its cell of a table."""
    return "`" + " ".join(str(value).replace("|", "\\|").replace("`", "'").split()) + "`"


def hub_metadata(name: str, records: list[dict], files: set[str]) -> ModelCardData:
    """Bases and data are named if they are on the hub."""
    adapter, hub = "adapter_config.json" in files, first(records, "hub", {})
    base, dataset = hub.get("base_model"), hub.get("dataset")
    own = dict(dataset_type=dataset or "text", dataset_name="validation split of the training data")
    measured_on = dict(val=own, hellaswag=dict(dataset_type="Rowan/hellaswag", dataset_name="HellaSwag"))
    task = dict(task_type="text-generation", task_name="Text Generation", dataset_split="validation")
    results = [
        EvalResult(**task, **measured_on[kind], metric_type=type, metric_name=label, metric_value=round(found[1], 4))
        for kind, key, label, type in METRICS
        if (found := newest(records, kind, key))
    ]
    return ModelCardData(
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        license="unknown",
        base_model=base,
        base_model_relation=("adapter" if adapter else "finetune") if base else None,
        datasets=[dataset] if dataset else None,
        model_name=name if results else None,
        eval_results=results or None,
    )
