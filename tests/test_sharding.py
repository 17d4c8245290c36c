"""A model that is divided over ranks trains as one that every rank has whole, and takes a fraction of the bytes.

That losses and weights are those of one process is in test_distributed.py, with every run of the tests.
"""

import pytest

from run.checkpoint import load_train_state
from tests.helpers import log_of, text_file
from tests.test_distributed import (
    STEP,
    alone,
    args,
    copy_of_run,
    loss_of,
    on_ranks,
    ranks_of,
    same_losses,
    same_weights,
)

HALF = dict(max_steps=10, eval_interval=10)
PAIRS = {  # the same run with --shard none and with another one
    "dropout": dict(dropout=0.2, optimizer="muon", **HALF),
    "float16": dict(dtype="float16", max_lr=1e-3, **HALF),
    "bfloat16": dict(dtype="bfloat16", **HALF),
    "jump": dict(max_steps=30, eval_interval=30),
    "sample": dict(sample_interval=10, sample_tokens=40, eval_steps=0, **HALF),  # ranks with other numbers of windows
}
SHARDED = {name: dict(shard="full") for name in PAIRS} | {
    "dropout": dict(shard="full", activation_checkpointing=True),
    "jump": dict(shard="optimizer"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharding")
    text_file(folder / "text.txt")
    return folder


@pytest.fixture(scope="module")
def pairs(folder):
    def job(name, kind, changes) -> dict:
        return dict(args=args(folder, f"{name}-{kind}", **changes), jump=24 if name == "jump" else 0)

    jobs = [job(name, "none", changes) for name, changes in PAIRS.items()]
    jobs += [job(name, "divided", changes | SHARDED[name]) for name, changes in PAIRS.items()]
    late = dict(resume=True, shard="full", max_steps=12, eval_interval=0, sample_interval=10)
    jobs += [dict(args=args(folder, "late", **late), start=str(folder / "jump-none"))]
    on_ranks(2, jobs)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dropout", "sample", "jump"])
def test_a_divided_model_trains_as_a_whole_one(pairs, name):
    same_losses(pairs / f"{name}-divided", pairs / f"{name}-none")
    step = 30 if name == "jump" else 10
    same_weights(pairs / f"{name}-divided", pairs / f"{name}-none", step=step)


@pytest.mark.slow
def test_a_divided_model_goes_back_to_a_checkpoint(pairs):
    assert [r["step"] for r in log_of(pairs / "jump-divided", "rollback")] == [20]


@pytest.mark.slow
def test_a_divided_model_writes_the_same_samples(pairs):
    texts = [[r["text"] for r in log_of(pairs / f"sample-{kind}", "sample")] for kind in ("none", "divided")]
    assert texts[0] == texts[1] and len(texts[0]) == 1


@pytest.mark.slow
def test_a_divided_model_can_be_asked_for_a_sample_before_its_first_step(pairs):
    assert [r["step"] for r in log_of(pairs / "late", "sample")][0] == 10


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_are_as_precise_in_a_divided_model(pairs, dtype):
    """Within 2e-3 of each other, over ten steps: sums of rounded numbers in another order."""
    same_losses(pairs / f"{dtype}-divided", pairs / f"{dtype}-none", rel=2e-3)
    states = [load_train_state(pairs / f"{dtype}-{kind}" / "step_000010") for kind in ("none", "divided")]
    assert states[0]["optimizer"]["scaler"] == states[1]["optimizer"]["scaler"]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_ranks_differ_from_one_process_in_bf16_far_less_than_two_seeds_do(folder, optimizer):
    def difference(run: str) -> float:
        ours, theirs = loss_of(folder / run), loss_of(folder / one)
        return max(abs(ours[key] - theirs[key]) for key in theirs)

    changes = dict(optimizer=optimizer, dtype="bfloat16")
    one, other = f"{optimizer}-bf16", f"{optimizer}-bf16-other-seed"
    alone(folder, one, **changes)
    alone(folder, other, seed=1338, **changes)
    print(f"\n{optimizer}: largest difference of a loss in 20 steps between two seeds {difference(other):.4f}")
    for ranks in (2, 3):
        runs = {how: f"{one}-{ranks}-{how}" for how in ("none", "optimizer", "full")}
        on_ranks(ranks, [dict(args=args(folder, run, shard=how, **changes)) for how, run in runs.items()])
        for how, run in runs.items():
            print(f"  {ranks} ranks, --shard {how}: {difference(run):.6f} from one process")
            assert difference(run) < difference(other) / 10


@pytest.mark.slow
@pytest.mark.parametrize("how", ["optimizer", "full"])
def test_a_divided_model_that_is_compiled_trains_as_one_process_does(folder, how):
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


@pytest.mark.slow
def test_every_matrix_is_orthogonalized_once_by_one_rank(pairs):
    for kind in ("none", "divided"):
        seen = [rank["matrices"] for rank in ranks_of(pairs / f"dropout-{kind}")]
        assert sum(seen) == 10 * 2 * 6 and max(seen) == min(seen)  # steps, blocks, matrices of each: Q, K, V apart


@pytest.mark.slow
def test_a_rank_holds_its_fraction_of_everything(pairs):
    whole, divided = (ranks_of(pairs / f"dropout-{kind}") for kind in ("none", "divided"))
    for ours, theirs in zip(divided, whole, strict=True):
        for kind, n_bytes in theirs["held"].items():
            assert ours["held"][kind] == pytest.approx(n_bytes / 2, rel=0.05), kind


# ---- more ranks, and every way from one to another


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_of_a_rank(folder, ranks):
    """The table of docs/cluster.md: 4 layers and 128 channels."""
    sizes = dict(n_layer=4, n_embd=128, vocab_size=1024, max_steps=2, eval_interval=2, total_batch_size=32 * 4 * ranks)
    sizes |= dict(micro_batch_size=2)
    jobs = [
        dict(args=args(folder, f"bytes-{ranks}-{how}-{optimizer}", shard=how, optimizer=optimizer, **sizes))
        for how in ("none", "optimizer", "full")
        for optimizer in ("adamw", "muon")
    ]
    on_ranks(ranks, jobs)
    for optimizer in ("adamw", "muon"):
        none, some, full = (
            ranks_of(folder / f"bytes-{ranks}-{how}-{optimizer}") for how in ("none", "optimizer", "full")
        )
        for kind, n_bytes in none[0]["held"].items():
            fullest = max(rank["held"][kind] for rank in full)
            print(f"{ranks} ranks, {optimizer}: {kind} {n_bytes:,} -> {fullest:,} = {fullest / n_bytes:.4f}")
            assert fullest == pytest.approx(n_bytes / ranks, rel=0.05)
            assert max(rank["held"][kind] for rank in some) == fullest


WAYS = [(1, "none"), *((ranks, how) for ranks in (2, 3) for how in ("none", "optimizer", "full"))]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_checkpoint_goes_on_in_every_way(folder, optimizer):
    def name(ranks: int, how: str) -> str:
        return f"{optimizer}-{ranks}-{how}"

    changes = dict(STEP, optimizer=optimizer)
    for ranks in (1, 2, 3):
        jobs = [dict(args=args(folder, name(n, how), shard=how, **changes)) for n, how in WAYS if n == ranks]
        on_ranks(ranks, jobs) if ranks > 1 else alone(folder, name(1, "none"), **changes)
    reference = folder / name(1, "none")
    for ranks in (1, 2, 3):
        targets = [(start, how, f"{name(*start)}-to-{ranks}-{how}") for start in WAYS for n, how in WAYS if n == ranks]
        if ranks == 1:
            for start, _, out in targets:
                copy_of_run(folder / name(*start), folder / out)
                alone(folder, out, resume=True, **changes)
        else:
            on_ranks(
                ranks,
                [
                    dict(args=args(folder, out, resume=True, shard=how, **changes), start=str(folder / name(*start)))
                    for start, how, out in targets
                ],
                timeout=1200,
            )
        for _, _, out in targets:
            same_losses(folder / out, reference)
            same_weights(folder / out, reference)
