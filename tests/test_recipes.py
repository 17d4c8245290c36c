"""The recipes, where somebody else decides what a constant is: papers on GPT-2 and GPT-3, and released models."""

import math

import pytest
import torch

import train_gpt2
from model import GPT, GPTConfig
from parts.optim import learning_rate

RECIPES = train_gpt2.RECIPES

# parameters of the released weights, the tied head counted once; learning rate and batch of the GPT-3 that is about as
# large (Brown et al. 2020, table 2.1: Small, Medium, Large, XL)
SIZES = {
    "gpt2": (124_439_808, 6.0e-4, 0.5e6),
    "gpt2-medium": (354_823_168, 3.0e-4, 0.5e6),
    "gpt2-large": (774_030_080, 2.5e-4, 0.5e6),
    "gpt2-xl": (1_557_611_200, 2.0e-4, 1e6),
}


@pytest.mark.parametrize("size", SIZES)
def test_a_recipe_trains_the_model_that_was_released(size):
    recipe = RECIPES[size]
    with torch.device("meta"):
        model = GPT(GPTConfig(n_layer=recipe.n_layer, n_head=recipe.n_head, n_embd=recipe.n_embd))
    assert model.num_params() == SIZES[size][0]
    assert recipe.n_embd / recipe.n_head == 64  # channels of a head, in all four
    assert recipe.sequence_length == 1024


@pytest.mark.parametrize("size", SIZES)
def test_constants_are_those_of_the_gpt3_of_that_size(size):
    """Brown et al. 2020, appendix B; once over FineWeb-Edu's 10 billion tokens."""
    recipe = RECIPES[size]
    assert recipe.max_lr == SIZES[size][1]
    assert recipe.total_batch_size == pytest.approx(SIZES[size][2], rel=0.05)
    assert math.log2(recipe.total_batch_size).is_integer()
    assert (recipe.optimizer, recipe.beta1, recipe.beta2, recipe.eps) == ("adamw", 0.9, 0.95, 1e-8)
    assert (recipe.weight_decay, recipe.grad_clip, recipe.dropout) == (0.1, 1.0, 0)
    assert recipe.max_steps * recipe.total_batch_size == pytest.approx(10e9, rel=1e-3)


@pytest.mark.parametrize("size", SIZES)
def test_the_rate_rises_over_375_million_tokens_and_falls_along_a_cosine_to_a_tenth(size):
    """Brown et al. 2020, appendix B; their cosine ends after 260 billion tokens, ours with the run."""
    recipe = RECIPES[size]
    assert recipe.warmup_steps * recipe.total_batch_size == pytest.approx(375e6, rel=2e-3)
    assert learning_rate(recipe.warmup_steps, recipe) == pytest.approx(recipe.max_lr)
    middle = (recipe.warmup_steps + recipe.max_steps) // 2
    assert learning_rate(middle, recipe) == pytest.approx(0.55 * recipe.max_lr, rel=1e-3)
    assert learning_rate(recipe.max_steps, recipe) == pytest.approx(recipe.max_lr / 10)


def test_vocabularies_are_padded_to_whole_tiles_of_the_tensor_cores():
    assert {recipe.vocab_size % 128 for recipe in RECIPES.values()} == {0}
    assert 50_257 <= RECIPES["gpt2"].vocab_size < 50_257 + 128
