"""The loop gives a GPU its work and never waits for it: no operator of a step needs a value on the host.

Where such an operator shows without a GPU: `.item()`, `if tensor:`, `tensor[mask]` and their like reach the dispatcher;
`.cpu()`, `.tolist()` and `.numpy()` of a tensor that is on the host already do not, but they are calls from Python.
"""

from contextlib import ExitStack
from itertools import count

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import train_gpt2
from parts.optim import learning_rate
from parts.run import Run
from parts.runtime import Runtime
from tests.helpers import column

OPERATORS = {"_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "_unique2", "unique_dim"}
CALLS = {"cpu", "tolist", "numpy", "item", "__array__", "__bool__", "__int__", "__float__", "__index__", "__repr__"}


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else ()
        if name in OPERATORS or any(i is not None and i.dtype == torch.bool for i in indices):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    copies: list = []  # on the host

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        given = [*args[1:], *(kwargs or {}).values()]
        if kwargs and kwargs.get("non_blocking"):  # on a GPU a copy is started, and read a step later
            self.copies.append(args[0])
        # a device that is no word is that of another tensor, and would be the GPU there
        elif any(copy is args[0] for copy in self.copies):
            pass
        elif name in CALLS or (name == "to" and any(isinstance(x, str) and x == "cpu" for x in given)):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


class Watch(ExitStack):
    """Notes in `found` what would wait, between `start` and `close`."""

    def __init__(self):
        super().__init__()
        self.found = []

    def start(self) -> None:
        self.close()
        for mode in (Operators(), Calls()):
            mode.found = self.found
            self.enter_context(mode)


@pytest.mark.parametrize("optimizer, dtype", [("adamw", "float16"), ("muon", "bfloat16")])
def test_nothing_in_the_loop_s_body_waits_for_the_device(train, run_dir, monkeypatch, optimizer, dtype):
    watch = Watch()
    log = Run.log

    def first_call(*args):  # of the body
        watch.start()
        return learning_rate(*args)

    def last_call(*args):
        log(*args)
        watch.close()

    monkeypatch.setattr(train_gpt2, "learning_rate", first_call)
    monkeypatch.setattr(Run, "log", last_call)
    clock = count()
    monkeypatch.setattr(Runtime, "mark_time", lambda rt: next(clock))
    monkeypatch.setattr(Runtime, "steps_ahead", 1)
    with watch:
        train(dtype=dtype, optimizer=optimizer, max_steps=4, eval_interval=0, sample_interval=0, dropout=0.1)
    assert column(run_dir, "train", "dt_ms") == [1000] * 4
    assert not watch.found
