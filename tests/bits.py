"""Print sha256 of what a change of code must not change, one line each, so that "the same bits" is one command:

    python tests/bits.py > before.txt                # at the old commit; a minute of one core
    python tests/bits.py | diff before.txt -         # at the new one; prints nothing if all bits are the same

Shards (also after kill -9), merges, ids, losses, weights, adapters, HellaSwag's sums and samples, on a CPU with one
thread. Everything is run as a user runs it, and only files and the text of samples are read, so that this file works on
any commit: `python NEW/tests/bits.py --root OLD`. Another machine or another PyTorch has other bits.
"""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors import safe_open

CPU = ["--device", "cpu", "--dtype", "float32", "--threads", "1"]
TRAIN = ["--compile", "off", "--attention", "flash", *CPU]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent, help="the project to run")
    args = parser.parse_args()
    with TemporaryDirectory() as work:
        small(Doors(args.root.resolve(), Path(work)))


def small(doors: "Doors") -> None:
    """Two texts that are written here, and models of a few thousand parameters."""
    write_texts(doors.root, doors.work)
    doors.tokenizer("english", "--input", "english.txt", "--vocab_size", 400)
    doors.tokenizer("chinese", "--input", "chinese.txt", "--vocab_size", 400)
    doors.shards("text", "--source", "english.txt", "--tokenizer", "english")
    doors.shards("chinese", "--source", "chinese.txt", "--tokenizer", "chinese")
    parquet = ["--source", "parquet/*.parquet", "--tokenizer", "english", "--shard_size", 5000]
    doors.shards("parquet", *parquet)
    doors.shards("killed", *parquet, kill=True)
    sizes = ["--n_layer", 2, "--n_embd", 32, "--sequence_length", 32, "--vocab_size", 384, "--total_batch_size", 256]
    often = ["--data", "english.txt", "--eval_interval", 2, "--eval_steps", 2, "--sample_interval", 4]
    doors.train("adamw", 6, *sizes, *often, "--micro_batch_size", 4, "--optimizer", "adamw", resume_at=4)
    doors.train("muon", 4, *sizes, *often, "--micro_batch_size", 4, "--optimizer", "muon")
    doors.train("adamw-2", 4, *sizes, *often, "--micro_batch_size", 4, "--optimizer", "adamw", ranks=2)
    doors.train("muon-2", 4, *sizes, *often, "--micro_batch_size", 4, "--optimizer", "muon", ranks=2, resume_at=2)
    doors.finetune("--base", "adamw", "--data", "rows.jsonl", "--max_steps", 3, "--batch_size", 8)
    doors.hellaswag("adamw", "--data", "hellaswag.jsonl", "--control")
    doors.sample("adamw", "The man", "--max_new_tokens", 30)


class Doors:
    """The scripts of the project in `root`, run in the folder `work`; each method prints the bits of what one makes."""

    def __init__(self, root: Path, work: Path):
        self.root = root
        self.work = work
        self.environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

    def start(self, script: str, *args, ranks: int = 0) -> subprocess.Popen:
        torchrun = TORCHRUN if ranks else []
        command = [sys.executable, *torchrun, str(self.root / script), *map(str, args)]
        log = (self.work / "stderr").open("w")
        return subprocess.Popen(command, cwd=self.work, env=self.environment, stdout=subprocess.PIPE, stderr=log)

    def run(self, script: str, *args, ranks: int = 0) -> bytes:
        process = self.start(script, *args, ranks=ranks)
        output = process.communicate()[0]
        if process.returncode:
            said = (self.work / "stderr").read_text()
            sys.exit(f"{script} {' '.join(map(str, args))}: exit code {process.returncode}\n{said[-3000:]}")
        return output

    def tokenizer(self, name: str, *args) -> None:
        self.run("bpe/train.py", *args, "--workers", 1, "--out", name)
        model = read_json(self.work / name / "tokenizer.json")["model"]
        show(f"merges {name}", model["merges"])
        show(f"ids {name}", model["vocab"])

    def shards(self, name: str, *args, kill=False) -> None:
        folder = self.work / f"shards-{name}" / "shards"
        command = ["fineweb.py", *args, "--out_dir", folder]
        if kill:
            process = self.start(*command)
            while process.poll() is None and len(list(folder.glob("*.npy"))) < 2:
                time.sleep(0.001)
            process.kill()
            if process.wait() == 0:
                print("fineweb.py was done before the kill", file=sys.stderr)
        self.run(*command)
        files = sorted(folder.glob("*.npy"))
        show(f"shards {name}", [[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in files])

    def train(self, name: str, max_steps: int, *args, ranks: int = 0, resume_at: int = 0) -> None:
        command = ["train_gpt2.py", "tiny", "--out_dir", name, *TRAIN, *args]
        if resume_at:
            self.run(*command, "--max_steps", resume_at, ranks=ranks)
            command.append("--resume")
        self.run(*command, "--max_steps", max_steps, ranks=ranks)
        log = (self.work / name / "log.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in log]
        show(f"losses {name}", [[r["step"], r["kind"], r["loss"]] for r in records if "loss" in r])
        show(f"bpb {name}", [[r["step"], r["bpb"]] for r in records if "bpb" in r])
        show(f"samples {name}", [[r["step"], r["text"]] for r in records if r["kind"] == "sample"])
        show_tensors(f"weights {name}", self.work / name / f"step_{max_steps:06d}" / "model.safetensors")

    def finetune(self, *args) -> None:
        self.run("lora_finetune.py", *args, "--micro_batch_size", 4, "--out_dir", "lora", *CPU)
        show_tensors("adapter", self.work / "lora" / "adapter" / "adapter_model.safetensors")

    def hellaswag(self, model: str, *args) -> None:
        self.run("hellaswag.py", model, *args, "--json", "scores.json", *CPU)
        for style, scores in read_json(self.work / "scores.json")["styles"].items():
            show(f"hellaswag {style}", scores["log_likelihoods"])

    def sample(self, model: str, prompt: str, *args) -> None:
        show("sample", self.run("sample.py", model, prompt, *args, *CPU).decode())


# ---- what is hashed


def show(name: str, value) -> None:
    """Print the sha256 of a value that JSON can hold; its floats are written to the last digit."""
    print(hashlib.sha256(json.dumps(value).encode()).hexdigest(), name, flush=True)


def show_tensors(title: str, path: Path) -> None:
    """Print the sha256 of the tensors of a .safetensors: names, dtypes, shapes and numbers, in order of their names."""
    with safe_open(path, "np") as file:
        found = []
        for name in sorted(file.keys()):
            about = file.get_slice(name)
            numbers = hashlib.sha256(file.get_tensor(name).tobytes()).hexdigest()
            found.append([name, about.get_dtype(), about.get_shape(), numbers])
    show(title, found)


def read_json(path: Path):
    return json.loads(path.read_text(encoding="utf-8"))


# ---- the texts of the small setting


def write_texts(root: Path, work: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw = random.Random(1337)
    english = (root / "input.txt").read_text(encoding="utf-8")[:150_000]
    characters = "天地玄黄宇宙洪荒日月盈昃辰宿列张寒来暑往秋收冬藏的一是不了人我在有他这为之大来以个中上们"
    words = ["".join(draw.choices(characters, k=draw.randint(1, 3))) for _ in range(200)]
    chinese = "".join(draw.choice(words) + draw.choice(["", "", "", "，", "。", "。\n"]) for _ in range(8000))
    (work / "english.txt").write_text(english, encoding="utf-8")
    (work / "chinese.txt").write_text(chinese, encoding="utf-8")
    documents = [*english.split("\n\n"), "", None, *chinese.split("\n")[:100]]
    draw.shuffle(documents)
    (work / "parquet").mkdir()
    for n, part in enumerate((documents[::2], documents[1::2])):
        table = pa.table({"id": list(range(len(part))), "text": part})
        pq.write_table(table, work / "parquet" / f"part{n}.parquet", row_group_size=100)
    sentences = [line for line in english.splitlines() if 20 < len(line) < 70]
    rows = []
    tasks = []
    for i in range(40):
        question, extra, answer, *endings = draw.sample(sentences, 7)
        rows.append(dict(instruction=question, input=extra if i % 3 else "", output=answer))
        context = dict(ctx=f"{question} {extra}", ctx_a=question, ctx_b=extra, activity_label=answer)
        tasks.append(context | dict(ind=i, endings=endings, label=i % 4))
    write_lines(work / "rows.jsonl", rows)
    write_lines(work / "hellaswag.jsonl", tasks[:8])


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
