"""Defects that somebody could put into the training loop, for the checks to find."""

import torch
import torch.distributed as dist

from parts.run import Run


def at_the_end_of_step_3(action) -> None:
    """Call `action(run, loss)` inside the body of the training loop."""
    log = Run.log

    def changed(run: Run, loss, *others) -> None:
        if run.step == 3:
            action(run, loss)
        log(run, loss, *others)

    Run.log = changed


def waits_for_the_loss() -> None:
    at_the_end_of_step_3(lambda run, loss: loss.item())


def lonely_collective() -> None:
    at_the_end_of_step_3(lambda run, loss: run.rt.is_main and dist.all_reduce(loss))


def recompiles() -> None:
    """As an evaluation would cause that leaves a global setting changed."""
    at_the_end_of_step_3(lambda run, loss: torch.set_float32_matmul_precision("highest"))
