"""The change to compiled graphs: bias gradients are summed by sequence, other sums are left alone."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.helpers import seeded

B, T, C = 2, 3, 8
X = torch.randn(B, T, C, generator=seeded(), dtype=torch.float64)


def changed(function) -> tuple[torch.fx.GraphModule, int]:
    """The graph of a function as Inductor gets it, changed by the pass, and how many sums it has more than before."""
    from torch._inductor.fx_passes.post_grad import view_to_reshape  # slow imports

    from parts.graphs import BiasGradients

    module = make_fx(function)(X)
    view_to_reshape(module)
    n_sums = len(sums(module))
    BiasGradients()(module.graph)
    module.recompile()
    return module, len(sums(module)) - n_sums


def sums(module: torch.fx.GraphModule) -> list:
    return module.graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList)


def test_the_gradient_of_a_bias_is_summed_by_sequence_and_stays_what_it_was():
    linear = torch.nn.Linear(C, C).double()

    def bias_gradient(x):
        return torch.autograd.grad(linear(x).sin().sum(), linear.bias)[0]

    module, more = changed(bias_gradient)
    assert more == 1
    torch.testing.assert_close(module(X), bias_gradient(X), rtol=1e-12, atol=0)


OTHERS = {
    "rows of another width": lambda x: x.reshape(4, 12).sum(0, keepdim=True),
    "halves of sequences": lambda x: x[:, :2].reshape(8, 4).sum(0, keepdim=True),
    "the other dimension": lambda x: x.reshape(-1, C).sum(1, keepdim=True),
}


@pytest.mark.parametrize("function", OTHERS.values(), ids=OTHERS)
def test_another_sum_of_reshaped_states_is_left_alone(function):
    module, more = changed(function)
    assert more == 0
    assert torch.equal(module(X), function(X))
