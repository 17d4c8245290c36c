"""What every script shares: constants and their help, files that appear whole, errors that name their place."""

import errno
import os
import re
import resource
import signal
import sys
from dataclasses import MISSING, asdict, fields
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

import pytest

import cli
import train_gpt2
from cli import UserError, parse_args
from files import exclusive_lock, read_json, replace_file, set_aside, write_atomically
from tests.helpers import assert_refused, environment, json_values, resume_table, run_script, table

DOORS = {
    name: import_module(name) for name in "train_gpt2 lora_finetune fineweb hellaswag sample plot bpe.train".split()
}
EDITED = """
max_steps "1200" | max_steps is '1200'; it must be a whole number
max_steps 12.5 | max_steps is 12.5; it must be a whole number
max_lr "6e-4" | max_lr is '6e-4'; it must be a number
optimizer "adam" | optimizer is 'adam'; it must be one of 'adamw', 'muon'
shuffle "no" | shuffle is 'no'; it must be True or False
beta1 1.0 | --beta1 must be in
"""


@pytest.mark.parametrize("edit, words", table(EDITED))
def test_a_constant_that_was_edited_wrongly_gives_one_line(edit, words):
    assert_refused(words[0], parse_args, train_gpt2.Config, [], train_gpt2.Config(**dict(json_values(edit))))
    assert parse_args(train_gpt2.Config, [], train_gpt2.Config(max_lr=1)).max_lr == 1  # a whole number is a number


# a run of today is compared with one of last year: to change a constant is a decision, not a slip
CONSTANTS = """
train_gpt2 data='edu_fineweb10B' tokenizer='gpt2' bpe_dropout=0.0 out_dir='' resume=False overwrite=False
  dry_run=False price=0.0 init_from='' n_layer=12 n_head=12 n_embd=768 sequence_length=1024 vocab_size=50304
  dropout=0.0 attention='auto' total_batch_size=524288 micro_batch_size=0 max_steps=19073 target_loss=0.0
  warmup_steps=715 max_lr=0.0006 min_lr=6e-05 lr_schedule='cosine' decay_fraction=0.5 optimizer='adamw' muon_lr=0.02
  weight_decay=0.1 beta1=0.9 beta2=0.95 eps=1e-08 grad_clip=1.0 max_bad_steps=20 spike_threshold=1.0 seed=1337
  shuffle=True eval_interval=250 eval_steps=20 hellaswag_interval=1000 hellaswag_data='' sample_interval=1000
  sample_prompt="Hello, I'm a language model," sample_tokens=128 checkpoint_interval=1000 keep_checkpoints=3
  device='auto' dtype='auto' compile='auto' shard='none' activation_checkpointing=False threads=0 report_to='none'
lora_finetune base='gpt2' data='tatsu-lab/alpaca' out_dir='' resume=False overwrite=False adapter='' merge=''
  lora_dim=8 lora_alpha=0.0 lora_dropout=0.0 targets=('c_attn', 'attn.c_proj', 'c_fc', 'mlp.c_proj') rslora=False
  sequence_length=0 val_rows=1000 batch_size=32 micro_batch_size=0 epochs=3.0 max_steps=0 warmup_steps=0 max_lr=0.0
  min_lr=0.0 lr_schedule='cosine' decay_fraction=0.5 weight_decay=0.01 beta1=0.9 beta2=0.999 eps=1e-08 grad_clip=1.0
  max_bad_steps=20 spike_threshold=2.0 dropout=0.0 seed=1337 eval_interval=-1 sample_interval=0 sample_prompt='Give
  three tips for a good meal.' sample_tokens=128 checkpoint_interval=500 keep_checkpoints=2 device='auto' dtype='auto'
  compile='off' activation_checkpointing=False threads=0 report_to='none'
fineweb source=('HuggingFaceFW/fineweb-edu/sample/10BT',) revision='main' text_field='text' tokenizer='gpt2'
  out_dir='edu_fineweb10B' encoder='auto' shard_size=0 limit_tokens=0 workers=0 downloads=2 verify=False dry_run=False
hellaswag data='' limit=0 style='both' show=0 adapter='' control=False json='' device='auto' dtype='auto' threads=0
sample prompt='' num_samples=1 max_new_tokens=200 temperature=1.0 top_k=50 top_p=1.0 seed=1337 adapter='' chat=False
  device='auto' dtype='auto' threads=0
plot x='steps' y='loss' reference=False out='plot.png'
bpe.train input=() text_field='text' max_bytes=0 vocab_size=1024 pattern='gpt2' special_tokens=('<|endoftext|>',)
  tie_break='lowest_id' workers=0 out='out/bpe' overwrite=False
gpt2
gpt2-medium n_layer=24 n_head=16 n_embd=1024 max_lr=0.0003 min_lr=3e-05
gpt2-large n_layer=36 n_head=20 n_embd=1280 max_lr=0.00025 min_lr=2.5e-05
gpt2-xl n_layer=48 n_head=25 n_embd=1600 total_batch_size=1048576 max_steps=9536 warmup_steps=358 max_lr=0.0002
  min_lr=2e-05
speedrun max_steps=9537 warmup_steps=256 max_lr=0.003 min_lr=0.0 lr_schedule='four_phases' optimizer='muon'
tiny data='input.txt' tokenizer='train' n_layer=4 n_head=2 n_embd=128 sequence_length=128 vocab_size=2048
  total_batch_size=2048 max_steps=1200 warmup_steps=20 max_lr=0.003 min_lr=0.0 lr_schedule='wsd' decay_fraction=0.4
  optimizer='muon' weight_decay=0.15 eval_interval=200 eval_steps=0 hellaswag_interval=0 sample_interval=600
  sample_prompt='' checkpoint_interval=600
cores data='input.txt' tokenizer='train' bpe_dropout=0.1 n_layer=4 n_head=4 n_embd=256 sequence_length=256
  vocab_size=2048 total_batch_size=2048 max_steps=2000 warmup_steps=20 max_lr=0.003 min_lr=0.0 lr_schedule='wsd'
  decay_fraction=0.4 optimizer='muon' weight_decay=0.15 eval_interval=200 eval_steps=0 hellaswag_interval=0
  sample_interval=600 sample_prompt='' checkpoint_interval=600
record data='fineweb10B' max_steps=9537 target_loss=3.28 warmup_steps=256 max_lr=0.003 min_lr=0.0
  lr_schedule='four_phases' optimizer='muon' hellaswag_interval=0
"""


def test_no_constant_of_a_door_or_of_a_recipe_changes_by_accident():
    found = []
    for name, door in DOORS.items():
        found += [name, *(f"{c.name}={c.default!r}" for c in fields(door.Config) if c.default is not MISSING)]
    for name, recipe in train_gpt2.RECIPES.items():
        changed = [(key, value) for key, value in asdict(recipe).items() if value != getattr(train_gpt2.Config, key)]
        found += [name, *(f"{key}={value!r}" for key, value in changed)]
    assert " ".join(found).split() == CONSTANTS.split()


# what was measured, or is agreed on with others
NUMBERS = """
bpe.chunks.BLOCK | 1048576
bpe.chunks.LONG_CHUNK | 24
bpe.chunks.PLACE_BITS | 32
bpe.tokenizer.CACHED_CHUNKS | 262144
bpe.tokenizer.CACHED_LENGTH | 64
bpe.tokenizer.HIGHEST_ID | 16777216
bpe.train.HELD_OUT | 1048576
bpe.training.PAIR_SHIFT | 32
corpus.sources.KINDS | {'.parquet': 1.55, '.jsonl': 0.95, '.jsonl.gz': 2.6, '.jsonl.zst': 3.0, \
'.json.gz': 2.6, '.txt': 1.0, '.txt.gz': 2.6, '.txt.zst': 3.0}
corpus.sources.UNIT_BYTES | 4194304
corpus.sources.AS_STREAM | {'buffer_size': 1048576, 'pre_buffer': False}
corpus.shards.TRAIN_FRACTION | 0.9
corpus.shards.FEW_TOKENS | 10000
corpus.stream.RELEASE_AFTER | 512
files.LOCK_SECONDS | 10
finetuning.lora.LIMITS | {'r': (1, 4096), 'lora_alpha': (1e-09, 1000000000.0), 'lora_dropout': (0.0, 0.9999)}
fineweb.UNITS_AHEAD | 3
fineweb.TOKENS_PER_BYTE | 0.23
fineweb.COMPARED | 8192
fineweb.FORGET_AFTER | 256
hellaswag.BATCH_TOKENS | {'cpu': 512, 'mps': 8192, 'cuda': 32768}
hellaswag.CHUNK_LOGITS | 33554432
learning.loss.LOGITS | {'cpu': 524288, 'cuda': 536870912}
learning.loss.TILE | 256
learning.loss.MOST_CHUNKS | 12
lora_finetune.MICRO_BATCH_COST | {'cpu': 64, 'mps': 1024, 'cuda': 4096}
machine.runtime.COLLECTIVE_TIMEOUT | datetime.timedelta(seconds=600)
model.LARGEST | 1048576
model.SIZES | {'gpt2': {'n_layer': 12, 'n_head': 12, 'n_embd': 768}, 'gpt2-medium': {'n_layer': 24, 'n_head': 16, \
'n_embd': 1024}, 'gpt2-large': {'n_layer': 36, 'n_head': 20, 'n_embd': 1280}, 'gpt2-xl': {'n_layer': 48, \
'n_head': 25, 'n_embd': 1600}}
pretraining.plan.CARDS | ('B200', 'H200', 'H100', 'A100', 'L40S', 'RTX 4090', 'RTX 3090')
pretraining.plan.DEVICES | (16, 24, 40, 80, 141)
pretraining.plan.WORKSPACES | 67108864
pretraining.plan.MICRO_BATCHES | (1, 8, 64)
pretraining.plan.RANKS | (1, 2, 4, 8)
pretraining.plan.STEP | 65536
pretraining.plan.REACHED | {'matrix': 0.72, 'attention': 0.25, 'memory': 0.66}
run.curves.CHANCE | 0.25
run.curves.POINTS | 800
run.log.LINE_SECONDS | 30
run.log.TRACKERS | {'tensorboard': 'torch.utils.tensorboard', 'wandb': 'wandb', 'trackio': 'trackio'}
run.records.NEEDED | {'train': 'loss', 'val': 'loss', 'sample': 'text'}
run.spikes.SpikeDetector.WINDOW | 100
run.spikes.SpikeDetector.MIN_LOSSES | 20
run.spikes.SpikeDetector.PATIENCE | 3
run.spikes.SpikeDetector.MAX_RETURNS | 3
sample.BATCH | 64
hellaswag.LOGGED | ('acc', 'acc_norm', 'acc_norm_stderr', 'gold_bpb', 'gold_bpb_stderr', 'n')
model.HF_CONFIG | {'model_type': 'gpt2', 'activation_function': 'gelu_new', 'n_inner': None, 'layer_norm_epsilon': \
1e-05, 'tie_word_embeddings': True, 'scale_attn_weights': True, 'scale_attn_by_inverse_layer_idx': False, \
'add_cross_attention': False}
model.SIZE_NAMES | {'n_positions': 'max_position_embeddings', 'vocab_size': 'vocab_size', 'n_layer': \
'num_hidden_layers', 'n_head': 'num_attention_heads', 'n_embd': 'hidden_size'}
run.curves.LEGEND | {'fontsize': 8.5, 'title_fontsize': 8.5, 'framealpha': 0.85}
run.curves.PUBLISHED | (('GPT-2 124M', 124000000.0, 0.2955), ('GPT-2 XL', 1558000000.0, 0.4893), ('GPT-3 Small', \
125000000.0, 0.337), ('GPT-3 Medium', 350000000.0, 0.436), ('GPT-3 Large', 760000000.0, 0.51), ('GPT-3 XL', \
1300000000.0, 0.547))
run.curves.UNITS | {'steps': [(1, 'step')], 'tokens': [(1000000000.0, 'billions of tokens'), (1000000.0, 'millions \
of tokens'), (1, 'tokens')], 'seconds': [(3600, 'hours of training'), (60, 'minutes of training'), (1, 'seconds of \
training')], 'flops': [(1e+18, 'exaFLOPs of training'), (1000000000000000.0, 'petaFLOPs of training'), (1, 'FLOPs of\
 training')]}
run.records.NUMBERS | ('loss', 'lr', 'bpb', 'dt_ms', 'tokens_per_sec', 'tokens', 'memory_gib', 'skipped_steps')
finetuning.lora.TARGETS | ('c_attn', 'attn.c_proj', 'c_fc', 'mlp.c_proj')
learning.optim.MOMENTS | {'adamw': 2, 'muon': 1}
bpe.tokenizer.SIGNS | {32: 9251, 10: 9166, 9: 8677}
corpus.stream.BIN_MAGIC | 20240520
corpus.stream.BIN_HEADER | 256
machine.runtime.MALLOC | {-3: 1073741824, -1: 1073741824, -2: 67108864}
run.curves.SCORES | {'acc_norm': (2.1, 'how often the right ending of four is the likeliest, lengths normalised', \
100, 'accuracy (%)'), 'gold_bpb': (1.5, 'what the right ending costs', 1, 'bits per byte')}
run.curves.COLORS | ('#0072B2', '#E69F00', '#000000', '#D55E00', '#56B4E9', '#009E73', '#CC79A7')
run.curves.DASHES | ('-', '--', '-.', ':')
run.curves.MARKS | ('o', 's', '^', 'D', 'v', 'P', 'X')
run.curves.EACH_STEP | {'color': '#0072B2', 'alpha': 0.25, 'linewidth': 0.8}
run.curves.REFERENCE_LINE | {'color': 'gray', 'linestyle': '--', 'linewidth': 0.8}
run.curves.DRAWN | {'run': ('parameters', 'flops_per_token', 'uniform_loss'), 'train': ('loss', 'grad_norm', 'lr', \
'tokens', 'dt_ms', 'skipped'), 'val': ('loss', 'bpb'), 'hellaswag': ('acc_norm', 'acc_norm_stderr', 'gold_bpb', \
'gold_bpb_stderr')}
run.curves.LOSS_IN | {'loss': 'nats per token', 'bpb': 'bits per byte'}
run.card.METRICS | (('train', 'tokens', 'training tokens'), ('val', 'loss', 'validation loss, nats per token'), \
('val', 'bpb', 'validation, bits per byte'), ('hellaswag', 'acc_norm', 'HellaSwag accuracy, lengths normalized'), \
('hellaswag', 'acc', 'HellaSwag accuracy'), ('hellaswag', 'gold_bpb', 'HellaSwag, bits per byte of the right \
ending'), ('hellaswag', 'n', 'HellaSwag, examples'))
run.directory.FILES | ('config.json', 'log.jsonl', 'samples.txt', 'learning_curve.png')
run.checkpoint.MODEL_FILES | ('model.safetensors', 'config.json')
run.checkpoint.ADAPTER_FILES | ('adapter_model.safetensors', 'adapter_config.json')
bpe.try_tokenizer.COLORS | ('#fbe6c8', '#93cba0', '#dcebfb', '#ee9fae', '#efe6f8', '#d8c25c')
finetuning.chat.ROLES | ('system', 'user', 'assistant')
"""


@pytest.mark.parametrize("name, value", table(NUMBERS))
def test_no_table_or_number_of_a_room_changes_by_accident(name, value):
    assert [repr(resolve_name(name))] == value


@pytest.mark.parametrize("page, door", [("resume.md", "train_gpt2"), ("lora.md", "lora_finetune")])
def test_a_page_says_of_every_constant_what_a_resume_does_with_another_value(page, door):
    table = resume_table(page)
    assert set(table) == {field.name for field in fields(DOORS[door].Config)}
    assert {name for name in table if table[name] == "refused"} == set(DOORS[door].FIXED)


def test_help_shows_each_constant_with_its_comment_and_the_default_of_the_recipe(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as end:
        parse_args(train_gpt2.Config, ["--help"], train_gpt2.RECIPES["tiny"], prog="x.py", description="Some words.")
    text = capsys.readouterr().out
    assert not end.value.code and "usage: x.py" in text and "Some words." in text
    assert re.search(r"--max_steps INT +optimizer steps; .*\(default: 1200\)", text)
    flags = ("no_shuffle" if name == "shuffle" else name for name in train_gpt2.Config.__dataclass_fields__)
    assert all(f"--{flag}" in text for flag in flags)


def test_files_and_directories_are_on_the_disk_before_they_have_their_name(tmp_path, monkeypatch):
    """A power failure after a rename would otherwise leave an empty file under the final name."""
    events, fsync, real = [], os.fsync, {name: getattr(Path, name) for name in ("rename", "replace")}
    place = lambda fd: Path(os.readlink(f"/proc/self/fd/{fd}")).name  # noqa: E731
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(f"flush {place(fd)}"), fsync(fd)))
    for name, rename in real.items():
        monkeypatch.setattr(Path, name, lambda a, b, rename=rename: (events.append(f"name {b.name}"), rename(a, b))[1])
    me = os.getpid()
    replace_file(tmp_path / "file", "text\ud800")
    assert (tmp_path / "file").read_text() == "text\\ud800"
    assert events == [f"flush .file.{me}.tmp", "name file", f"flush {tmp_path.name}"]
    for n in range(2):
        events.clear()
        write_atomically(tmp_path / "dir", lambda path: (path / "a").write_text("x"))
        old = ["name dir.1"] * n
        assert events == ["flush a", f"flush .dir.{me}.tmp", *old, "name dir", f"flush {tmp_path.name}"]


@pytest.mark.parametrize("place", [".", "..", "../.."])
def test_what_holds_the_current_directory_is_not_renamed(tmp_path, monkeypatch, place):
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    assert_refused("holds the current directory", set_aside, Path(place))


def test_json_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "a.json").write_text("[1]", encoding="utf-8-sig")
    assert read_json(tmp_path / "a.json") == [1]


def test_what_cannot_be_written_is_named_by_its_path(tmp_path, monkeypatch):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write beyond the limit fails, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        for write in (
            lambda path: replace_file(path, "x" * 5000),
            lambda path: write_atomically(path, lambda directory: (directory / "a").write_bytes(bytes(5000))),
        ):
            with pytest.raises(OSError) as e:
                write(tmp_path / "place")
            assert str(tmp_path / "place") in cli.explain(e.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("code, words", [(errno.ENOLCK, "No locks available"), (errno.EACCES, "grants no locks")])
def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, code, words):
    import fcntl

    def no_locks(*args):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as context, pytest.raises((OSError, UserError)) as e:
        context.setattr(fcntl, "flock", no_locks)
        with exclusive_lock(tmp_path / "lock", str(tmp_path), seconds=0.2):
            pass
    assert words in cli.explain(e.value) and str(tmp_path) in cli.explain(e.value)


def test_a_terminal_without_utf8_gets_the_same_line():
    run = lambda code: run_script("plot.py", "--x", "hours", env=environment(PYTHONIOENCODING=code))  # noqa: E731
    errors = [run(code).stderr for code in ("utf-8", "ascii")]
    assert errors[0] == errors[1] and errors[0].startswith("error: ") and "hours" in errors[0]


def test_a_closed_standard_input_is_an_empty_one(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    read = []
    cli.script(lambda: read.append((sys.stdin.buffer.read(), sys.stdin.read())))
    assert read == [(b"", "")]


class OutOfMemoryError(RuntimeError):
    """As CUDA's allocator raises."""


ENDS = [
    (KeyboardInterrupt(), 130, ""),
    (cli.Stopped(signal.SIGTERM), 143, ""),
    (BrokenPipeError(), 0, ""),
    (UserError("one\n  two"), 2, "one two"),
    (OSError(errno.ENOSPC, "Full", "a.png"), 2,
     "no space left on the disk of a.png; free some, then give the same command again"),
    (OSError(errno.EDQUOT, "Full"), 2,
     "no space left on the disk of the output; free some, then give the same command again"),
    (OSError(errno.EACCES, "Permission denied", "a"), 2, "a: Permission denied; fix that, or give another path"),
    (MemoryError(), 2, "out of memory (in Python); use a smaller model or batch"),
    (OutOfMemoryError("a GB\nmore"), 2, "out of memory (a GB); use a smaller model or batch"),
    (RuntimeError("can't allocate memory"), 2, "out of memory (can't allocate memory); use a smaller model or batch"),
    (RuntimeError("can't start new thread"), 2,
     "the system grants no more threads; raise the limit (ulimit -u), or end other processes"),
    *((type(name, (RuntimeError,), {})("lost\nit"), 2,
       "another rank has ended or cannot be reached (lost); then --resume continues")
      for name in ("DistBackendError", "DistNetworkError", "DistStoreError")),
    (RuntimeError("[Gloo] x"), 2, "another rank has ended or cannot be reached ([Gloo] x); then --resume continues"),
]  # fmt: skip
MISTAKES_OF_OURS = [RuntimeError("a mistake of ours"), OSError("a mistake of ours")]


@pytest.fixture
def ends(monkeypatch):
    """A script that ends with an exception."""

    def run(raised, rank="0"):
        def main():
            raise raised

        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(os, "dup2", lambda *_: None)
        monkeypatch.setattr(sys.stdout, "fileno", lambda: 1)
        cli.script(main)

    return run


@pytest.mark.parametrize("rank, who", [("0", ""), ("1", "rank 1: ")])
@pytest.mark.parametrize("raised, code, message", ENDS)
def test_whatever_ends_a_script_has_its_exit_code_and_its_line(ends, capsys, raised, code, message, rank, who):
    with pytest.raises(SystemExit) as end:
        ends(raised, rank)
    assert end.value.code == code
    assert capsys.readouterr().err == (f"error: {who}{message}\n" if message else "")


def test_nothing_but_an_interrupt_is_hidden_before_a_script_begins(capsys):
    for error in (KeyboardInterrupt("hidden"), ValueError("shown")):
        cli.hide_interrupts(type(error), error, None)
    assert capsys.readouterr().err == "ValueError: shown\n"


@pytest.mark.parametrize("raised", MISTAKES_OF_OURS)
def test_a_mistake_of_ours_keeps_its_traceback(ends, raised):
    with pytest.raises(type(raised), match="a mistake of ours"):
        ends(raised)
