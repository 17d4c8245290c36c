"""One model on several ranks, each of which keeps a fraction of every parameter, its gradient and its moments.

In plain data parallelism every rank keeps everything. In fp32 with AdamW that is 16 bytes a parameter: 4 for the
weight, 4 for its gradient, 8 for two moments. On W ranks, W - 1 of these copies are superfluous (ZeRO, Rajbhandari et
al. 2020, section 5). Here rank r keeps the r-th of W slices of rows of every tensor, and gets the others when it needs
them:

    forward     an all-gather before each block gives every rank all weights of that block
    backward    a reduce-scatter after each block leaves every rank the averaged gradient of its own rows
    step        each rank updates its own rows: AdamW treats each number by itself (for Muon see parts/optim.py)

Plain data parallelism does an all-reduce, which consists of these two, so this exchanges no more bytes:

    --shard optimizer    weights stay gathered from their first use in a step to the last, and gradients unsharded until
                         the last micro-batch is done. The moments, half of the 16 bytes, are always sharded (ZeRO-1,
                         and ZeRO-2 if a step has one micro-batch)
    --shard full         weights of a block are gathered only while it computes, and again for the backward pass;
                         gradients are sharded after each micro-batch: least memory, and in each micro-batch 1.5 times
                         the bytes that plain data parallelism exchanges once per step (ZeRO-3)

PyTorch's `fully_shard` (Zhao et al. 2023 describe its predecessor) does the work, with hooks on the modules. Sharded
tensors are DTensors: they show the full shape, and `to_local()` is this rank's rows.

This file knows nothing of GPT-2, optimizers, files or training loops.
"""

from collections.abc import Sequence

import torch

from parts.runtime import Runtime


def shard(model: torch.nn.Module, blocks: Sequence[torch.nn.Module], rt: Runtime) -> None:
    """Shard a model over the ranks as `rt.shard` says, in place; every rank passes the same weights.

    Each of `blocks` is gathered by itself, everything else together. With compilation each block is compiled by itself,
    so that gathering and computing overlap.
    """
    from torch.distributed.fsdp import fully_shard  # a slow import, which one rank does not need

    # Weights travel in fp32, so that autocast rounds the same numbers as on one rank. (FSDP's own policy would halve
    # the bytes; but it rounds LayerNorm's gains too, and CPUs do not even accept that.)
    for block in blocks:
        block.forward = rt.compiled(block.forward)
        fully_shard(block, mesh=rt.mesh, reshard_after_forward=rt.shard == "full")
    fully_shard(model, mesh=rt.mesh, reshard_after_forward=False)  # backward starts with these
    for module in (*blocks, model):
        module.set_force_sum_reduction_for_comms(rt.device.type == "cpu")  # Gloo has no AVG


def unsharded(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor with all its rows, on every rank; any other tensor as it is. All ranks call this together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a sharded tensor, which share its memory; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def all_gather(like: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """All rows of a matrix that is sharded as `like` is, from `rows` of each rank; `rows` if it is not sharded."""
    if not hasattr(like, "to_local"):
        return rows
    sharded = type(like).from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return sharded.full_tensor()


def sharded_as(like: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """An unsharded `tensor`, which every rank has, sharded as `like` is, without asking another rank."""
    if not hasattr(like, "to_local") or tensor.dim() == 0:
        return tensor
    from torch.distributed.tensor import distribute_tensor  # a slow import, which one rank does not need

    tensor = tensor.to(like.device)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
