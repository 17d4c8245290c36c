"""A model card: the README.md beside a model's weights, for the hub and for people, from the log of its run.

The first lines are metadata for https://huggingface.co/docs/hub/model-cards; below them people read the data, figures,
command and commit; the hub itself says how to load a model. A run writes the card with every checkpoint, and again
after an evaluation of that checkpoint's step. People edit it (a license has to be chosen), so no checksum covers it.

This file knows nothing of torch, or of how checkpoints are written: a log is a list of dicts.
"""

import shutil
from pathlib import Path

from huggingface_hub import ModelCardData

from files import replace_file

FIGURES = (  # kind and key in the log, and the name for people
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
    hub = dict(dataset=dataset, base_model="" if Path(base).exists() else base)  # Path("") is the current directory
    return dict(data=data, base=base, hub={key: name for key, name in hub.items() if name})


def write_card(directory: Path, name: str, records: list[dict], curve: Path) -> None:
    """Put README.md, and the learning curve if there is one, beside the weights; `records` end with their step."""
    if curve.exists():
        shutil.copyfile(curve, directory / "learning_curve.png")
    replace_file(directory / "README.md", model_card(name, records, {path.name for path in directory.iterdir()}))


def model_card(name: str, records: list[dict], files: set[str]) -> str:
    """The card of a model whose directory holds `files`: they tell an adapter from a model."""
    starts = [record for record in records if record["kind"] == "run"]  # a resume adds one
    run = {key: value for start in reversed(starts) for key, value in start.items() if value is not None}
    commands, commits = (dict.fromkeys(start.get(key) for start in starts) for key in ("command", "commit"))
    hub, is_adapter = run.get("hub", {}), "adapter_config.json" in files
    metadata = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        license="unknown",
        base_model=hub.get("base_model"),  # this and the data are named if they are on the hub
        datasets=[hub["dataset"]] if "dataset" in hub else None,
    )
    rows = {"data": ", ".join(f"{key} {shown(value)}" for key, value in run.get("data", {}).items())}
    rows |= figures(records) | {"commit": ", ".join(shown(commit) for commit in commits if commit)}
    parts = [
        f"---\n{metadata.to_yaml()}\n---",
        f"# {name}",
        ("An adapter for a " if is_adapter else "A ") + what_it_is(run),
        "License: not chosen yet. Choose one in the first lines of this file; the licenses of the data and the base "
        "model may limit the choice.",
        "\n".join(["| | |", "|---|---|", *(f"| {label} | {value} |" for label, value in rows.items() if value)]),
        *["![Learning curve](learning_curve.png)"] * ("learning_curve.png" in files),
        "## How it was made",
        # indented: no command can end such a block, as three backquotes would end a fenced one
        "\n".join("    python " + " ".join(command.splitlines()) for command in commands if command),
    ]
    return "\n\n".join(parts) + "\n"


def what_it_is(run: dict) -> str:
    config, base = run.get("config", {}), run.get("base")
    size = f" with {shown(run['parameters'])} parameters" if "parameters" in run else ""
    start = f"trained further from {shown(base)}" if base else "trained from random weights"
    how = f" with LoRA of rank {rank}" if (rank := config.get("lora_dim")) else ""
    return f"GPT-2{size}, {start} on {shown(config.get('data', 'unknown data'))}{how}."


def figures(records: list[dict]) -> dict[str, str]:
    """{label: the newest figure}; null in a log was not finite."""
    found = {}
    for kind, key, label in FIGURES:
        if known := [r for r in records if r["kind"] == kind and r.get(key) is not None]:
            found[label] = f"{shown(known[-1][key])} at step {shown(known[-1]['step'])}"
    return found


def shown(value) -> str:
    """A number, or text in backquotes that ends neither them nor its cell of a table."""
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
    return "`" + " ".join(str(value).replace("|", "\\|").replace("`", "'").split()) + "`"
