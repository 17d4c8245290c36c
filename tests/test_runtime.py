"""The machine as a run sees it: batches on their way to the device."""

import json
import threading
import time

import numpy as np
import pytest
import torch

from parts.cli import UserError
from parts.runtime import prefetch


def batches_of(n):
    return ([(torch.full((2,), i), np.full(2, -i))] for i in range(n))


def test_prefetch_makes_tensors_of_arrays_in_any_nesting_and_keeps_their_order():
    received = list(prefetch(batches_of(50), torch.device("cpu")))
    assert [[part.tolist() for part in micro] for [micro] in received] == [[[i, i], [-i, -i]] for i in range(50)]
    assert all(isinstance(part, torch.Tensor) for [micro] in received for part in micro)


def test_prefetch_raises_an_error_when_its_batch_is_due():
    def failing():
        yield from batches_of(3)
        raise UserError("BROKEN")

    batches = prefetch(failing(), torch.device("cpu"))
    for _ in range(3):
        next(batches)
    with pytest.raises(UserError, match="BROKEN"):
        next(batches)


def test_prefetch_is_one_batch_ahead_and_ends_with_its_reader():
    made = []

    def counting():
        for batch in batches_of(100):
            made.append(batch)
            yield batch

    reader = prefetch(counting(), torch.device("cpu"))
    next(reader)
    while len(made) < 2:  # one read, one in the thread's hand
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(made) == 2
    reader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@pytest.mark.parametrize("max_steps, profile", [(4, 1), (3, 5)])
def test_a_profile_has_the_operators_of_the_steps_that_were_asked_for(train, run_dir, max_steps, profile):
    result = train(max_steps=max_steps, profile=profile, eval_interval=0, sample_interval=0, checkpoint_interval=0)
    trace = json.loads((run_dir / "profile.json").read_text())
    assert "aten::addmm" in result.stdout
    n_forward = len([event for event in trace["traceEvents"] if event.get("name") == "aten::embedding"])
    assert n_forward == 2  # of wte and wpe: the third step has one micro-batch
