"""Several ranks: the same losses and weights as one process, whatever their number and the interruptions."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt2
from model import GPT
from parts.checkpoint import checkpoint_steps
from tests.forks import fork_script
from tests.helpers import SMALL, arguments, column, log_of, losses, quietly, read_json, remove_after, text_file
from tests.ranks import FAULTS, OTHER_MOMENTS, OTHER_WEIGHTS, OUT_OF_MEMORY, RANDOM_DEPTH

# 24 sequences a step: 6, 3 and 2 micro-steps on 1, 2 and 3 ranks
STEP = SMALL | dict(optimizer="adamw", total_batch_size=768, micro_batch_size=4, max_steps=6, eval_interval=6,
                    sample_interval=0, checkpoint_interval=3, keep_checkpoints=0, threads=1)  # fmt: skip


def args(folder: Path, out: str, **changes) -> list[str]:
    return ["tiny", *arguments(**{**STEP, "data": folder / "text.txt", "out_dir": folder / out, **changes})]


def on_ranks(n: int, jobs: list[dict], timeout=400) -> None:
    """Run jobs one after the other on n ranks; see ranks.py."""
    result = fork_script("tests/ranks.py", json.dumps(jobs), ranks=n, timeout=timeout)
    assert result.returncode == 0, re.sub(r"^.*?(?=Traceback|terminate)", "", result.stderr, flags=re.DOTALL)[:3000]


def alone(folder: Path, out: str, **changes) -> None:
    """One process, this one."""
    quietly(train_gpt2.main, *args(folder, out, **changes))


def ranks_of(run: Path) -> list[dict]:
    """What was seen on each rank; see ranks.py."""
    return read_json(run / "ranks.json")


def same_losses(run: Path, reference: Path) -> None:
    """And norms of gradients, and bits per byte."""
    assert np.array(losses(run)) == pytest.approx(np.array(losses(reference)), rel=1e-5)


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    """The weights at the end by name, except the biases of c_attn: that of the keys shifts all scores of a query alike,
    so that its gradient is zero but for rounding, and AdamW makes steps of a full learning rate out of that."""
    state = GPT.from_pretrained(run / "step_000006").state_dict()
    return {name: tensor for name, tensor in state.items() if not name.endswith("c_attn.bias")}


def same_weights(run: Path, reference: Path) -> None:
    ours = weights_of(run)
    theirs = weights_of(reference)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert (ours[name] - theirs[name]).norm() <= 1e-5 * theirs[name].norm(), name


RUNS = {"adamw": {}, "muon": dict(optimizer="muon", activation_checkpointing=True)}  # on several ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One process, on the same global batches as the ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    text_file(folder / "text.txt")
    for name in RUNS:
        alone(folder, f"1-{name}", optimizer=name)
    return folder


@pytest.fixture(scope="module")
def two_ranks(folder):
    faulty = dict(max_steps=4, checkpoint_interval=1, eval_interval=1)
    jobs = [dict(args=args(folder, f"2-{name}", **changes)) for name, changes in RUNS.items()]
    jobs += [dict(args=args(folder, fault, **faulty), fault=fault) for fault in (*FAULTS, OTHER_WEIGHTS, RANDOM_DEPTH)]
    shutil.copytree(folder / "1-adamw", folder / OTHER_MOMENTS)
    jobs.append(dict(args=args(folder, OTHER_MOMENTS, max_steps=9, resume=True), fault=OTHER_MOMENTS))
    jobs += [dict(kind=kind, file=str(folder / f"{kind}.json")) for kind in OUT_OF_MEMORY]
    on_ranks(2, jobs)
    return folder


def assert_as_alone(folder, n: int, name: str) -> None:
    """n ranks have the figures and weights of one process, and the same as each other."""
    same_losses(folder / f"{n}-{name}", folder / f"1-{name}")
    same_weights(folder / f"{n}-{name}", folder / f"1-{name}")
    ranks = ranks_of(folder / f"{n}-{name}")
    assert len({rank["checksum"] for rank in ranks}) == 1
    assert len({seed for rank in ranks for seed in rank["seeds"]}) == 6 * n  # dropout of every step and rank differs
    tokens = [step * STEP["total_batch_size"] for step in range(1, 7)]  # of all ranks
    assert column(folder / f"{n}-{name}", "train", "tokens") == tokens


def assert_goes_on(folder: Path, source: str, n: int, compile="off") -> None:
    """The first half of a run goes on on n ranks to the losses and weights of one process."""
    out = folder / f"{source}-to-{n}-{compile}"
    shutil.copytree(folder / source, out)
    remove_after(out, 3)
    if n == 1:
        alone(folder, out.name, resume=True, compile=compile)
    else:
        on_ranks(n, [dict(args=args(folder, out.name, resume=True, compile=compile))])
    same_losses(out, folder / "1-adamw")
    same_weights(out, folder / "1-adamw")


# ---- one process, two and three ranks


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_train_as_one_process_does(two_ranks, name):
    assert_as_alone(two_ranks, 2, name)


@pytest.mark.slow
def test_three_ranks_train_as_one_process_does(folder):
    on_ranks(3, [dict(args=args(folder, f"3-{name}", **RUNS[name])) for name in RUNS])
    for name in RUNS:
        assert_as_alone(folder, 3, name)


@pytest.mark.parametrize("source, n", [("1-adamw", 2), ("2-adamw", 1)])
def test_any_checkpoint_goes_on_anywhere(two_ranks, source, n):
    assert_goes_on(two_ranks, source, n)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2])
def test_compiled_checkpoints_go_on_anywhere_and_others_in_compiled_runs(two_ranks, n):
    if not (two_ranks / "1-compiled").exists():
        alone(two_ranks, "1-compiled", compile="on")
    assert_goes_on(two_ranks, "1-compiled", n)
    for source in ("1-compiled", "1-adamw"):
        assert_goes_on(two_ranks, source, n, compile="on")


@pytest.mark.parametrize("fault", FAULTS)
def test_an_infinite_gradient_on_one_rank_changes_no_weight_on_any(two_ranks, fault):
    run = two_ranks / fault
    one, two, three, four = column(run, "val", "loss")
    assert len({one, two, four}) == 3
    assert two == three
    assert [step for step, _ in checkpoint_steps(run)] == [1, 2, 3, 4]  # a skipped step leaves finite weights
    assert column(run, "train", "skipped_steps") == [0, 0, 1, 1]
    assert log_of(run, "train")[2]["grad_norm"] is None
    assert len({rank["checksum"] for rank in ranks_of(run)}) == 1


# ---- what ranks have to agree on


def test_a_rank_with_other_weights_ends_the_run_on_all_ranks_before_a_checkpoint_is_written(two_ranks):
    run = two_ranks / OTHER_WEIGHTS
    one, two = (rank["error"] for rank in ranks_of(run))
    assert one == two
    assert "step 3" in one
    assert [step for step, _ in checkpoint_steps(run)] == [1, 2]


def test_a_rank_that_resumes_with_other_moments_ends_the_run_before_its_first_step(two_ranks):
    run = two_ranks / OTHER_MOMENTS
    one, two = (rank["error"] for rank in ranks_of(run))
    assert one == two != ""
    assert column(run, "train", "step") == column(two_ranks / "1-adamw", "train", "step")


def test_a_model_of_which_ranks_leave_out_parts_trains(two_ranks):
    run = two_ranks / RANDOM_DEPTH
    assert [step for step, _ in checkpoint_steps(run)] == [1, 2, 3, 4]
    assert len({rank["checksum"] for rank in ranks_of(run)}) == 1


@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
def test_all_ranks_leave_a_trial_together_whichever_runs_out_of_memory(two_ranks, kind):
    one, two = read_json(two_ranks / f"{kind}.json")
    assert one["size"] == two["size"] == 4
    assert one["norm"] == pytest.approx(two["norm"])  # and gradients are exchanged
