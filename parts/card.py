"""A model card: the README.md beside a model's weights, for the hub and for people, from the log of its run.

A run writes it into its last checkpoint when it ends or is stopped. The first lines are metadata for
https://huggingface.co/docs/hub/model-cards; people edit them (a license has to be chosen), so no checksum covers the
file, and one that exists is left alone. This file knows nothing of torch, or of how checkpoints are written.
"""

import shutil
from pathlib import Path

from huggingface_hub import ModelCardData

from parts.files import replace_file
from parts.log import Records, of_kind

METRICS = {  # of the newest record of a kind
    "train": {"tokens": "training tokens"},
    "val": {"loss": "validation loss, nats per token", "bpb": "validation, bits per byte"},
    "hellaswag": {"acc_norm": "HellaSwag accuracy, lengths normalized", "n": "HellaSwag, examples"},
}


def write_card(directory: Path, name: str, records: Records) -> None:
    """Put README.md beside the weights in `directory`, and the learning curve of the run, if that is its parent."""
    if (directory / "README.md").exists():
        return
    curve = directory.parent / "learning_curve.png"
    if curve.is_file():
        shutil.copyfile(curve, directory / curve.name)
    replace_file(directory / "README.md", model_card(directory, name, records))


def model_card(directory: Path, name: str, records: Records) -> str:
    """The card of the model or adapter in `directory`, from the log of its run."""
    starts = of_kind(records, "run")
    start = starts[-1] if starts else {}
    data = start.get("data") or {}
    base = start.get("base") or ""
    is_adapter = (directory / "adapter_config.json").exists()
    metadata = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        license="unknown",
        base_model=base if base and not Path(base).exists() else None,  # the hub is told of what is on it
        datasets=[data["dataset"]] if data.get("dataset") else None,
    )
    read = [f"{key} {shown(data[key])}" for key in ("source", "tokens", "documents", "examples") if key in data]
    rows = [f"| data | {', '.join(read) or 'unknown'} |"]
    for kind, labels in METRICS.items():
        for newest in of_kind(records, kind)[-1:]:
            for key, label in labels.items():
                if newest.get(key) is not None:  # null was not finite
                    rows.append(f"| {label} | {shown(newest[key])} at step {newest['step']:,} |")
    load = f'PeftModel.from_pretrained(base, "{name}")' if is_adapter else f'pipeline("text-generation", "{name}")'
    commands = [start["command"] for start in starts if start.get("command")]
    begun = f"from {shown(base)}" if base else "from random weights"
    parts = [
        f"---\n{metadata.to_yaml()}\n---",
        f"# {name}",
        f"{'An adapter for a' if is_adapter else 'A'} GPT-2, trained {begun}. "
        "License: not chosen yet; choose one in the first lines of this file.",
        "| | |\n|---|---|\n" + "\n".join(rows),
        "![Learning curve](learning_curve.png)" if (directory / "learning_curve.png").exists() else "",
        f"## How to load it\n\n    {load}",
        # indented: no command can end such a block, as three backquotes would end a fenced one
        "## How it was made\n\n" + "\n".join(f"    python {' '.join(command.split())}" for command in commands),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def shown(value) -> str:
    """A number, or text in backquotes that ends neither them nor its cell of a table."""
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4f}"
    text = str(value).replace("|", "\\|").replace("`", "'")
    return "`" + " ".join(text.split()) + "`"
