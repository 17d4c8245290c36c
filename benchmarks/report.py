"""The report of `bench.py gpu`: what is wrong, the targets and what was reached, a table for each part, two pictures.

It is written after every part, from what there is until then. This file knows the rows by their keys, not how they were
measured.
"""

import statistics
from pathlib import Path

from benchmarks import ladder
from benchmarks.measure import markdown_table

HIDDEN = {"unit", "low", "high", "flops", "over_before", "over_first"}  # said in other columns, or for the pictures


def markdown(report: dict, titles: dict[str, str]) -> str:
    parts, machine = report["parts"], report["machine"]
    minutes = sum(part["seconds"] for part in parts.values()) / 60
    about = f"PyTorch {machine['torch']}, Python {machine['python']}; {minutes:.1f} minutes"
    lines = [f"# {machine['device']}", "", about]
    if wrong := what_is_wrong(parts):
        lines += ["", "## What is wrong", "", *(f"- {line}" for line in wrong)]
    full = report["device"] == "cuda" and report["size"] in ("", "gpt2")  # what the targets are for
    if rows := full and targets(parts, machine["device"]):
        lines += ["", "## Targets", "", markdown_table(rows).rstrip()]
    for name, part in parts.items():
        lines += ["", f"## {titles[name]}", "", f"`bench.py gpu --only {name}`, {part['seconds']:.0f} s"]
        if part["rows"]:
            lines += ["", markdown_table(cells(part["rows"])).rstrip()]
        if part["error"]:
            lines += ["", f"**{part['error']}**", "", "```", *part["said"].strip().splitlines()[-30:], "```"]
    if report["left_out"]:
        left = " ".join(report["left_out"])
        lines += ["", f"No time was left for these; add them with `bench.py gpu --out FOLDER --only {left}`."]
    return "\n".join(lines) + "\n"


def what_is_wrong(parts: dict) -> list[str]:
    found = [f"{row['name']}: {row['wrong']} ({row['found']})" for row in rows_of(parts, "machine") if row["wrong"]]
    for name, part in parts.items():
        found += [f"{row['name']}: {row['found']}" for row in part["rows"] if row.get("ok") is False]
        found += [f"{name}: {part['error']}"] * bool(part["error"])
    return found


def rows_of(parts: dict, name: str) -> list[dict]:
    return parts[name]["rows"] if name in parts else []


def targets(parts: dict, device: str) -> list[dict]:
    """What there is to reach on an H100 or H200, and what was."""
    at_64 = {row["name"]: row for row in rows_of(parts, "train") if row["batch_size"] == 64}
    ours = at_64.get("this project")
    eager, compiled = at_64.get("plain, eager, bf16"), at_64.get("plain with torch.compile, bf16")
    found = []
    if ours and eager and compiled:
        found.append(("training at 64, times the plain recipe", ours["rate"] / eager["rate"], 1.6))
        found.append(("the same, times the plain recipe compiled", ours["rate"] / compiled["rate"], 1.2))
        found.append(("the plain recipe's memory, times ours", eager["memory"] / ours["memory"], 2.0))
    if ours and ours["mfu"]:
        found.append(("MFU at 64", ours["mfu"], 0.57 if "H200" in device else 0.51))
    rates = {(row["name"], row["batch_size"]): row["rate"] for row in rows_of(parts, "sample")}
    for n in sorted({n for _, n in rates}):
        best = max(rates["this project", n], rates["this project, compiled", n])
        found.append((f"generation at {n}, times transformers", best / rates["transformers generate", n], 1.0))
    for row in rows_of(parts, "hellaswag"):
        if row["name"].startswith("this project"):
            found.append(("HellaSwag's 10,042 rows, a second", row["rate"], 10_042 / 15))
    for row in rows_of(parts, "memory"):
        if row["name"] == "gpt2-xl":
            found.append(("sequences of gpt2-xl that fit", row["micro_batch_size"], 1))
    return [dict(what=what, reached=f"{value:.3g}", target=f"{goal:.3g}", there="yes" if value >= goal else "no")
            for what, value, goal in found]  # fmt: skip


def cells(rows: list[dict]) -> list[dict]:
    """Rows as text, all with the same columns."""
    hidden = HIDDEN | ({"seconds"} if "rate" in rows[0] else set())
    columns = dict.fromkeys(key for row in rows for key in row if key not in hidden)
    return [{key: cell(row, key) for key in columns} for row in rows]


def cell(row: dict, key: str) -> str:
    value = row.get(key)
    if isinstance(value, list):
        return f"{statistics.median(value):.4f}" if value else ""
    if value is None or isinstance(value, str):
        return (value or "").replace("|", "\\|")
    if isinstance(value, bool):
        return "ok" if value else "WRONG"
    if key == "rate":
        return f"{value:,.1f} {row['unit']}"
    if key == "memory":
        return f"{value / 2**30:.2f} GiB"
    if key in ("mfu", "fraction"):
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def draw(report: dict, folder: Path) -> None:
    """train.png, at the largest batch size; the ladder draws its own."""
    rows = rows_of(report["parts"], "train")
    if rows:
        largest = max(row["batch_size"] for row in rows)
        bars = [row | dict(over_first=row["ratio"]) for row in rows if row["batch_size"] == largest]
        ladder.draw(bars, folder / "train.png", f"{report['machine']['device']}, batch size {largest}")
