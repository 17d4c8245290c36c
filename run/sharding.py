"""One model on several ranks, of which each keeps a fraction: of every parameter, its gradient and its moments.

In plain data parallelism every rank keeps everything. In fp32 with AdamW that is 16 bytes a parameter: 4 for the
weight, 4 for its gradient, 8 for two moments. On W ranks, W - 1 of these copies are superfluous (ZeRO, Rajbhandari et
al. 2020, section 5). Here rank r keeps the r-th of W slices of rows of every tensor, and the others are where it asks:

    forward     an all-gather before each block gives every rank the whole weights of that block
    backward    a reduce-scatter after each block leaves every rank the averaged gradient of its own rows
    step        of its own rows, by each rank alone: AdamW treats each number by itself (for Muon see learning/optim.py)

An all-reduce, as in plain data parallelism, consists of just these two, so this exchanges no more bytes than that does:

    --shard optimizer    weights stay whole from their first use in a step to the last; gradients until the last
                         micro-batch is done. The moments, half of the 16 bytes, are divided all the time (ZeRO-1, and
                         ZeRO-2 where a step has one micro-batch)
    --shard full         weights of a block are whole while it computes, gathered for the backward pass once more, and
                         gradients are divided after each micro-batch: least memory, and in each micro-batch 1.5
                         times the bytes that plain data parallelism exchanges once a step (ZeRO-3)

The work is done by PyTorch's `fully_shard` (Zhao et al. 2023 is about its predecessor), which hangs it on the modules'
hooks. Divided tensors are DTensors: to the outside they have the whole shape, and `to_local()` is this rank's rows.

This file knows nothing of GPT-2, optimizers, files or training loops.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from run.runtime import Runtime


def shard(model: torch.nn.Module, blocks: Sequence[torch.nn.Module], rt: Runtime) -> None:
    """Divide a model over the ranks as `rt.shard` says, in place; every rank comes with the same weights.

    Each of `blocks` is gathered by itself, what is outside of them together. Where compilation is on it is by block,
    so that gathering and computing overlap. On several nodes each node keeps one copy (see `Runtime.mesh`).
    """
    from torch.distributed.fsdp import fully_shard  # takes a second, which one rank does not need

    # Weights travel in fp32, so that autocast rounds what it rounds on one rank, and nothing else. (Rounded by FSDP's
    # own policy, half as much would travel; LayerNorm's gains would be rounded, too, which CPUs do not even take.)
    for block in blocks:
        if rt.compile:
            block.forward = torch.compile(block.forward, dynamic=False)
        fully_shard(block, mesh=rt.mesh, reshard_after_forward=rt.shard == "full")
    fully_shard(model, mesh=rt.mesh, reshard_after_forward=False)  # the backward pass begins with what is out here
    for module in (*blocks, model):
        module.set_force_sum_reduction_for_comms(rt.device.type == "cpu")  # Gloo knows no AVG


# --------------------------------------------------------------------------------------------------- divided tensors


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a divided tensor, which share its memory; another tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A divided tensor with all its rows, on every rank; another tensor as it is. All ranks call this together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def divided_as(like: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A whole `tensor`, which every rank has, divided as `like` is, without asking another rank."""
    if not hasattr(like, "to_local") or tensor.dim() == 0:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    tensor = tensor.to(like.device)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def with_rows(like: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A tensor divided as `like` is, with `rows` of this rank, whose memory it shares; `rows` if it is not divided."""
    if not hasattr(like, "to_local"):
        return rows
    sizes = dict(shape=like.shape, stride=like.stride())
    return type(like).from_local(rows, like.device_mesh, like.placements, run_check=False, **sizes)


# ------------------------------------------------------------------------------------- matrices and their owners

# Shapes: N matrices of (R, C) on W ranks; n = N / W of them on each, r = R / W rows of each; both rounded up, so that
# the last ranks may have fewer and what is exchanged is padded. `ranks` is a process group, None for one rank.


def to_owners(mine: torch.Tensor, n_rows: int, ranks) -> torch.Tensor:
    """From this rank's rows of all matrices, (N, r, C), to all rows of its own matrices, (n, R, C)."""
    if ranks is None:
        return mine
    W = ranks.size()
    n, r = -(-mine.size(0) // W), -(-n_rows // W)
    sent = pad(mine, (0, 0, 0, r - mine.size(1), 0, W * n - mine.size(0)))  # (W n, r, C): n matrices for each rank
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=ranks)  # (W n, r, C): r rows of my n matrices from each rank
    return received.view(W, n, r, -1).transpose(0, 1).reshape(n, W * r, -1)[:, :n_rows]


def from_owners(matrices: torch.Tensor, shape: tuple, ranks) -> torch.Tensor:
    """The way back, from (n, R, C) to `shape`, which is (N, r, C)."""
    if ranks is None:
        return matrices
    W, (n, n_rows, C) = ranks.size(), matrices.shape
    r = -(-n_rows // W)
    sent = pad(matrices, (0, 0, 0, W * r - n_rows)).view(n, W, r, C).transpose(0, 1).contiguous()  # r rows for each
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=ranks)
    return received.view(W * n, r, C)[: shape[0], : shape[1]]


def own_part(matrices: torch.Tensor, ranks) -> torch.Tensor:
    """Of N matrices that all ranks have, the n of this rank."""
    if ranks is None:
        return matrices
    n = -(-len(matrices) // ranks.size())
    matrices = pad(matrices, (0, 0, 0, 0, 0, ranks.size() * n - len(matrices)))
    return matrices[ranks.rank() * n : (ranks.rank() + 1) * n]


def all_parts(mine: torch.Tensor, n_matrices: int, ranks) -> torch.Tensor:
    """The way back: all N of them on every rank."""
    if ranks is None:
        return mine
    gathered = mine.new_empty(ranks.size() * len(mine), *mine.shape[1:])
    dist.all_gather_into_tensor(gathered, mine.contiguous(), group=ranks)
    return gathered[:n_matrices]
