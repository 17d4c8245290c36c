"""A model card: the README.md beside a model's weights, for the hub and for people, from the log of its run.

The first lines are metadata for https://huggingface.co/docs/hub/model-cards; below them people read the data, metrics,
command and commit; the hub itself says how to load a model. A run writes the card with every checkpoint, and again
after an evaluation of that checkpoint's step. People edit it (a license has to be chosen), so no checksum covers it.

This file knows nothing of torch, or of how checkpoints are written: a log is a list of dicts.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import ModelCardData

from parts.files import replace_file
from parts.log import Records, of_kind

METRICS = (  # kind and key in the log, and the name for people
    ("train", "tokens", "training tokens"),
    ("val", "loss", "validation loss, nats per token"),
    ("val", "bpb", "validation, bits per byte"),
    ("hellaswag", "acc_norm", "HellaSwag accuracy, lengths normalized"),
    ("hellaswag", "acc", "HellaSwag accuracy"),
    ("hellaswag", "gold_bpb", "HellaSwag, bits per byte of the right ending"),
    ("hellaswag", "n", "HellaSwag, examples"),
)


def provenance(data: dict, dataset: str, base: str) -> dict:
    """What the first record of a run says about where its model comes from, for the card.

    `data` is what is known of it, `dataset` its name on the hub, `base` a directory or a name on the hub; "" for none.
    """
    hub = {}
    if dataset:
        hub["dataset"] = dataset
    if not Path(base).exists():  # Path("") is the current directory
        hub["base_model"] = base
    return dict(data=data, base=base, hub=hub)


@dataclass(frozen=True)
class Card:
    """The card of a run at one step, with which `records` end."""

    name: str
    records: Records
    curve: Path

    def write(self, directory: Path) -> None:
        """Put README.md, and the learning curve if there is one, beside the weights."""
        if self.curve.exists():
            shutil.copyfile(self.curve, directory / "learning_curve.png")
        files = {path.name for path in directory.iterdir()}
        replace_file(directory / "README.md", model_card(self.name, self.records, files))


def model_card(name: str, records: Records, files: set[str]) -> str:
    """The card of a model whose directory holds `files`: they tell an adapter from a model."""
    starts = of_kind(records, "run")  # a resume adds one, and the first one counts
    run = {}
    for start in reversed(starts):
        run |= {key: value for key, value in start.items() if value is not None}
    is_adapter = "adapter_config.json" in files
    parts = [
        f"---\n{metadata(run, is_adapter)}\n---",
        f"# {name}",
        ("An adapter for a " if is_adapter else "A ") + what_it_is(run),
        "License: not chosen yet. Choose one in the first lines of this file; the licenses of the data and the base "
        "model may limit the choice.",
        table(run.get("data", {}), records, distinct(starts, "commit")),
    ]
    if "learning_curve.png" in files:
        parts.append("![Learning curve](learning_curve.png)")
    # indented: no command can end such a block, as three backquotes would end a fenced one
    commands = ["    python " + " ".join(command.splitlines()) for command in distinct(starts, "command")]
    parts += ["## How it was made", "\n".join(commands)]
    return "\n\n".join(parts) + "\n"


def distinct(starts: Records, key: str) -> list[str]:
    """What the starts of a run had under `key`, each once."""
    return [value for value in dict.fromkeys(start.get(key) for start in starts) if value]


def metadata(run: dict, is_adapter: bool) -> str:
    """What the hub reads. It is told of the base and the data if they are on the hub."""
    hub = run.get("hub", {})
    data = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        license="unknown",
        base_model=hub.get("base_model"),
        datasets=[hub["dataset"]] if "dataset" in hub else None,
    )
    return data.to_yaml()


def what_it_is(run: dict) -> str:
    config = run.get("config", {})
    base = run.get("base")
    rank = config.get("lora_dim")
    size = f" with {shown(run['parameters'])} parameters" if "parameters" in run else ""
    start = f"further from {shown(base)}" if base else "from random weights"
    how = f" with LoRA of rank {rank}" if rank else ""
    return f"GPT-2{size}, trained {start} on {shown(config.get('data', 'unknown data'))}{how}."


def table(data: dict, records: Records, commits: list[str]) -> str:
    """The data, the newest metrics and the commits in Markdown; null in a log was not finite."""
    lines = ["| | |", "|---|---|"]
    if data:
        lines.append("| data | " + ", ".join(f"{key} {shown(value)}" for key, value in data.items()) + " |")
    for kind, key, label in METRICS:
        known = [record for record in of_kind(records, kind) if record.get(key) is not None]
        if known:
            lines.append(f"| {label} | {shown(known[-1][key])} at step {shown(known[-1]['step'])} |")
    if commits:
        lines.append(f"| commit | {', '.join(map(shown, commits))} |")
    return "\n".join(lines)


def shown(value) -> str:
    """A number, or text in backquotes that ends neither them nor its cell of a table."""
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4f}"
    text = str(value).replace("|", "\\|").replace("`", "'")
    return "`" + " ".join(text.split()) + "`"
