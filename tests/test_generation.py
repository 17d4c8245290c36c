"""Text, token by token, against the loop that computes everything anew for each."""

import pytest
import torch

from model import GPT, sample_tokens
from tests.test_model import small, tokens


def greedy_by_hand(model, prompt, n):
    row = list(prompt)
    for _ in range(n):
        window = torch.tensor([row[-model.config.sequence_length :]])
        row.append(model(window)[0][0, -1].argmax().item())
    return row[len(prompt) :]


@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_tokens_of_unequal_prompts_equal_the_naive_loop_past_the_window_too(use_cache):
    model = small()
    with torch.no_grad():
        model.transformer.wpe.weight.mul_(10)
        model.transformer.ln_f.weight.normal_()  # or the tied embedding makes a random model repeat its last token
        prompts = [tokens(n, seed=n).tolist() for n in (1, 5, 30, 50)]
        steps = list(model.generate(prompts, 40, temperature=0, use_cache=use_cache))
        assert len({token for step in steps for token in step}) > 20  # else this proves little
        for i, prompt in enumerate(prompts):
            expected = greedy_by_hand(model, prompt, 40)
            assert [step[i] for step in steps] == expected


def test_a_row_stops_at_the_stop_token_and_the_others_go_on():
    model = small()
    prompts = [[1, 2, 3], [4, 5]]
    free = list(model.generate(prompts, 20, temperature=0))
    stop = free[4][0]
    steps = list(model.generate(prompts, 20, temperature=0, stop_token=stop))
    first = [step[0] for step in free].index(stop)
    assert all(step[0] == stop for step in steps[first:])
    seen = [step[1] for step in free]
    until = seen.index(stop) if stop in seen else len(seen)
    assert [step[1] for step in steps][:until] == seen[:until]


def test_padded_ids_are_never_generated():
    model = small()
    with torch.no_grad():
        model.transformer.wte.weight[200:] *= 50
    ids = {
        i
        for step in model.generate([[1]] * 8, 24, n_tokens=200, generator=torch.Generator().manual_seed(0))
        for i in step
    }
    assert max(ids) < 200


def test_generation_leaves_the_training_mode_as_it_was():
    model = small().train()
    list(model.generate([[1]], 2))
    assert model.training


def test_sampling_follows_the_distribution():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(20_000, 1)
    generator = torch.Generator().manual_seed(0)

    def frequencies(**kwargs):
        return torch.bincount(sample_tokens(logits, generator=generator, **kwargs), minlength=4) / len(logits)

    torch.testing.assert_close(frequencies(), torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=0.02, rtol=0)
    torch.testing.assert_close(frequencies(top_k=2), torch.tensor([0.625, 0.375, 0, 0]), atol=0.02, rtol=0)
    torch.testing.assert_close(frequencies(top_p=0.8), torch.tensor([0.625, 0.375, 0, 0]), atol=0.02, rtol=0)
    torch.testing.assert_close(frequencies(top_p=0.81), torch.tensor([10 / 19, 6 / 19, 3 / 19, 0]), atol=0.02, rtol=0)
    squared = torch.tensor([0.25, 0.09, 0.0225, 0.0025])
    torch.testing.assert_close(frequencies(temperature=0.5), squared / squared.sum(), atol=0.02, rtol=0)
    assert frequencies(temperature=0)[0] == 1
    assert frequencies(top_p=0.0)[0] == 1


def lively(**kwargs) -> GPT:
    """A random model whose greedy tokens differ from each other."""
    model = small(**kwargs)
    with torch.no_grad():
        model.transformer.wpe.weight.mul_(10)
        model.transformer.ln_f.weight.normal_()
    return model


def test_compiled_generation_makes_the_same_tokens_with_one_graph_that_writes_in_place(monkeypatch):
    from torch._dynamo.utils import counters
    from torch._functorch import config as aot_config
    from torch._inductor import compile_fx

    model = lively()
    prompts = [tokens(n, seed=n).tolist() for n in (1, 5, 20)]
    eager = list(model.generate(prompts, 40, temperature=0))  # past the window
    model.compile_generation()
    torch._dynamo.reset()
    counters.clear()
    operators, real = [], compile_fx.post_grad_passes

    def post_grad_passes(module, *args, **kwargs):
        real(module, *args, **kwargs)
        operators.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")

    monkeypatch.setattr(compile_fx, "post_grad_passes", post_grad_passes)
    # without caches on the disk, or a second run of this test has no graph to see; pytest's own patch would delete
    # these settings afterwards
    with compile_fx.config.patch(fx_graph_cache=False), aot_config.patch(enable_autograd_cache=False):
        assert list(model.generate(prompts, 40, temperature=0)) == eager
        assert list(model.generate([p + [7] for p in prompts], 9, temperature=0)) != eager
    assert counters["stats"]["unique_graphs"] == 1
    # keys and values of two layers, and nothing that copies a cache
    assert [name for name in operators if "index_put" in name] == ["aten.index_put_.default"] * 4
    assert not [name for name in operators if "scatter" in name]


@pytest.fixture
def kept_cache(monkeypatch):
    """A model that keeps its cache from call to call as a compiled one does, but runs eagerly."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    model = lively()
    model.compile_generation()
    return model


def test_a_cache_that_is_used_again_remembers_nothing(kept_cache):
    for lengths in ((20, 30), (3, 1), (7, 9, 2), (4, 6, 25)):
        prompts = [tokens(n, seed=n).tolist() for n in lengths]
        expected = list(lively().generate(prompts, 10, temperature=0))
        assert list(kept_cache.generate(prompts, 10, temperature=0)) == expected


def test_a_cache_that_is_used_again_stays_where_it_is(kept_cache):
    addresses = []
    for prompt in ([1, 2, 3], [4], [5, 6]):
        list(kept_cache.generate([prompt], 4))
        addresses.append([t.data_ptr() for t in kept_cache._kept_cache.k])
    assert addresses[0] == addresses[1] == addresses[2]


def test_two_generators_at_once_do_not_share_a_cache(kept_cache):
    prompts = [[tokens(5, seed=n).tolist()] for n in (1, 2)]
    alone = [list(lively().generate(p, 10, temperature=0)) for p in prompts]
    list(kept_cache.generate([[1]], 2))  # leaves one behind, which only one of them may take
    together = zip(*(kept_cache.generate(p, 10, temperature=0) for p in prompts), strict=True)
    assert [list(steps) for steps in zip(*together, strict=True)] == alone
