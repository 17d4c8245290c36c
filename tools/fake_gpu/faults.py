"""Changes for the checks: defects of the training loop, which have to be found, and one that has to work."""

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


def attends_by_flex_attention() -> None:
    """As an edit for windows or documents does: no compiled graph calls PyTorch's fused kernels."""
    from torch.nn import functional as F
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    real = F.scaled_dot_product_attention

    def attention(q, k, v, **options):
        if not torch.compiler.is_compiling():
            return real(q, k, v, **options)
        T = q.size(2)
        mask = create_block_mask(lambda b, h, query, key: query >= key, None, None, T, T, device=q.device)
        return flex_attention(q, k, v, block_mask=mask)

    F.scaled_dot_product_attention = attention
