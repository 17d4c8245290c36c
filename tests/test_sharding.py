"""A model that is sharded over ranks trains as one that every rank has in full, and takes a fraction of the bytes.

That losses and weights are those of one process is in test_distributed.py, with every run of the tests.
"""

import pytest

from parts.checkpoint import load_train_state
from tests.helpers import column, text_file
from tests.test_distributed import alone, args, on_ranks, ranks_of, same_losses, same_weights

pytestmark = pytest.mark.slow
HALF = dict(max_steps=10, eval_interval=10)
PAIRS = {  # the same run with --shard none and with another one
    "dropout": dict(dropout=0.2, optimizer="muon", **HALF),
    "float16": dict(dtype="float16", max_lr=1e-3, **HALF),
    "bfloat16": dict(dtype="bfloat16", **HALF),
    "plain": HALF,
    "sample": dict(sample_interval=10, sample_tokens=40, eval_steps=0, **HALF),  # ranks with other numbers of windows
}
SHARDED = {name: dict(shard="full") for name in PAIRS} | {
    "dropout": dict(shard="full", activation_checkpointing=True),
    "plain": dict(shard="optimizer"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharding")
    text_file(folder / "text.txt")
    return folder


@pytest.fixture(scope="module")
def pairs(folder):
    def job(name, kind, changes) -> dict:
        return dict(args=args(folder, f"{name}-{kind}", **changes))

    jobs = [job(name, "none", changes) for name, changes in PAIRS.items()]
    jobs += [job(name, "sharded", changes | SHARDED[name]) for name, changes in PAIRS.items()]
    late = dict(resume=True, shard="full", max_steps=12, eval_interval=0, sample_interval=10)
    jobs += [dict(args=args(folder, "late", **late), start=str(folder / "plain-none"))]
    on_ranks(2, jobs)
    return folder


@pytest.mark.parametrize("name", ["dropout", "sample", "plain"])
def test_a_sharded_model_trains_as_an_unsharded_one(pairs, name):
    same_losses(pairs / f"{name}-sharded", pairs / f"{name}-none")
    same_weights(pairs / f"{name}-sharded", pairs / f"{name}-none")


def test_a_sharded_model_writes_the_same_samples(pairs):
    texts = [column(pairs / f"sample-{kind}", "sample", "text") for kind in ("none", "sharded")]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 1


def test_a_sharded_model_can_be_asked_for_a_sample_before_its_first_step(pairs):
    assert column(pairs / "late", "sample", "step")[0] == 10


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_are_as_precise_in_a_sharded_model(pairs, dtype):
    """Within 2e-3 of each other, over ten steps: sums of rounded numbers in another order."""
    same_losses(pairs / f"{dtype}-sharded", pairs / f"{dtype}-none", rel=2e-3)
    states = [load_train_state(pairs / f"{dtype}-{kind}" / "step_000010") for kind in ("none", "sharded")]
    assert states[0]["optimizer"]["scaler"] == states[1]["optimizer"]["scaler"]


@pytest.mark.parametrize("how", ["optimizer", "full"])
def test_a_sharded_model_that_is_compiled_trains_as_one_process_does(folder, how):
    variants = {
        "adamw": dict(optimizer="adamw"),
        "muon": dict(optimizer="muon"),
        "recomputed": dict(optimizer="muon", activation_checkpointing=True),
    }
    runs = {name: f"compiled-{how}-{name}" for name in variants}
    jobs = [dict(args=args(folder, runs[name], shard=how, compile="on", **variants[name])) for name in variants]
    on_ranks(2, jobs, timeout=1200)
    for name, changes in variants.items():
        reference = f"uncompiled-{changes['optimizer']}"
        if not (folder / reference).exists():
            alone(folder, reference, optimizer=changes["optimizer"])
        same_losses(folder / runs[name], folder / reference)
        same_weights(folder / runs[name], folder / reference)


def test_a_rank_holds_its_fraction_of_everything(pairs):
    full = ranks_of(pairs / "dropout-none")
    sharded = ranks_of(pairs / "dropout-sharded")
    for ours, theirs in zip(sharded, full, strict=True):
        for kind, n_bytes in theirs["held"].items():
            assert ours["held"][kind] == pytest.approx(n_bytes / 2, rel=0.05), kind
