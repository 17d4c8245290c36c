"""A change to the graphs that torch.compile has made of a model, before it turns them into kernels.

This file knows nothing of GPT-2. It is imported by compiled runs alone, since it imports Inductor.
"""

import torch
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

aten = torch.ops.aten


class BiasGradients(CustomGraphPass):
    """Sums the gradient of a bias over the tokens of each sequence, and then over the sequences.

    The gradient of a linear layer's bias is the sum of the gradient (B, T, C) of its output over B and T. Autograd asks
    for it as one sum over B * T rows, which Inductor computes in a kernel of its own: that reads again what another has
    just written. A sum over T alone has the loops of the kernel that writes, and becomes a part of it: the backward
    pass of GELU, and the one that puts the gradients of queries, keys and values side by side, each read once less.
    """

    def __call__(self, graph: torch.fx.Graph) -> None:
        for total in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
            rows, dims, *keepdim = total.args
            if dims != [0] or keepdim != [True] or rows.target is not aten.reshape.default:
                continue
            gradient = rows.args[0]
            shape = gradient.meta["val"].shape  # (B, T, C)
            if len(shape) != 3 or tuple(rows.meta["val"].shape) != (shape[0] * shape[1], shape[2]):
                continue  # a sum of something else: over other rows than those of the tokens
            with graph.inserting_before(total):
                by_sequence = graph.call_function(aten.sum.dim_IntList, (gradient, [1]), total.kwargs)  # (B, C)
                by_both = graph.call_function(aten.sum.dim_IntList, (by_sequence, [0], True), total.kwargs)  # (1, C)
            total.replace_all_uses_with(by_both)
            graph.erase_node(total)
            counters["bias_gradients"]["by_sequence"] += 1  # for whoever wants to know whether it found any

    def uuid(self) -> bytes:
        """Part of the key of compiled graphs on the disk."""
        return get_hash_for_files((__file__,))
