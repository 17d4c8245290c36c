"""Text, token by token: the cached version against `GPT.generate`, which computes the whole context for each token."""

from dataclasses import replace

import pytest
import torch

from bpe.tokenizer import Tokenizer
from model import GPT
from parts.cli import UserError
from parts.evaluation import complete
from parts.generation import generate, sample_tokens
from tests.helpers import seeded
from tests.test_model import small, tokens

PROMPTS = [tokens(n, seed=n).tolist() for n in (1, 5, 20)]  # the window is 32


def lively() -> GPT:
    """A random model whose tokens depend on each other: attention and positions count, not the last token alone."""
    model = small().eval()
    with torch.no_grad():
        model.transformer.wpe.weight.mul_(10)
        model.transformer.ln_f.weight.normal_()
        for block in model.transformer.h:
            for p in block.parameters():
                if p.dim() == 2:
                    p.mul_(10)
    return model


@pytest.mark.parametrize("longest", [30, 50])
def test_greedy_tokens_of_unequal_prompts_equal_the_plain_version_past_the_window_too(longest):
    model = lively()
    prompts = [*PROMPTS, tokens(longest, seed=longest).tolist()]
    read = []  # tokens a row of each pass
    model.transformer.wte.register_forward_pre_hook(lambda _, args: read.append(args[0].size(1)))
    steps = list(generate(model, prompts, 40, temperature=0))
    assert (1 in read) == (longest < 32)  # decoded with the cache until one fills the window
    assert len({token for step in steps for token in step}) > 15  # else this proves little
    for i, prompt in enumerate(prompts):
        expected = model.generate(torch.tensor([prompt]), 40, temperature=0)[0, len(prompt) :].tolist()
        assert [step[i] for step in steps] == expected


@pytest.mark.parametrize("options", [dict(top_k=5), dict(temperature=0.7, top_k=300)], ids=str)
def test_drawn_tokens_equal_those_of_the_plain_version(options):
    model = lively()
    prompt = PROMPTS[1]
    plain = model.generate(torch.tensor([prompt]), 40, **options, generator=seeded(1))
    steps = generate(model, [prompt], 40, **options, generator=seeded(1))
    assert [token for (token,) in steps] == plain[0, len(prompt) :].tolist()


def test_a_vocabulary_with_gaps_gives_text_from_a_model_that_would_choose_the_gaps(rt):
    tok = Tokenizer([(b"a", b"b")], special_tokens={"<|endoftext|>": 290})  # 257 tokens; 257 .. 289 are none
    model = small(vocab_size=384)
    with torch.no_grad():
        model.transformer.wte.weight[257:] *= 50
        model.transformer.wte.weight[290] /= 50
    assert len(complete(model, tok, "A", 20, rt, 0)) > 1


def test_texts_that_are_generated_in_turns_have_no_dropout_and_leave_the_model_in_training():
    model = GPT(replace(lively().config, dropout=0.5))
    model.load_state_dict(lively().state_dict())
    (expected,) = zip(*generate(model.eval(), PROMPTS[:1], 6, temperature=0), strict=True)
    model.train()
    first = generate(model, PROMPTS[:1], 6, temperature=0)
    second = generate(model, PROMPTS[:1], 6, temperature=0)
    tokens = []
    for (one,), (other,) in zip(first, second, strict=True):
        assert model.training
        tokens += [one, other]
    assert tokens == [token for token in expected for _ in range(2)]
    assert model.training


def test_logits_that_are_not_finite_are_an_error_and_training_goes_on_with_another_sample(small_tokenizer, rt):
    model = small(vocab_size=384)
    model.transformer.ln_f.bias.data[0] = torch.inf  # as after a step that was much too long
    with pytest.raises(UserError):
        next(generate(model, [[1]], 1, temperature=0))
    assert complete(model, small_tokenizer, "A", 8, rt, 0).startswith("A [")


@pytest.mark.parametrize("prompts", [[], [[1], []]])
def test_a_prompt_without_tokens_is_refused(prompts):
    with pytest.raises(ValueError):
        next(generate(small(), prompts, 1))


def test_sampling_follows_the_distribution():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(20_000, 1)
    generator = seeded()

    def frequencies(**kwargs):
        return torch.bincount(sample_tokens(logits, generator=generator, **kwargs), minlength=4) / len(logits)

    for options, expected in (
        (dict(), [0.5, 0.3, 0.15, 0.05]),
        (dict(top_k=2), [0.625, 0.375, 0, 0]),
        (dict(top_p=0.8), [0.625, 0.375, 0, 0]),
        (dict(top_p=0.81), [10 / 19, 6 / 19, 3 / 19, 0]),
        (dict(temperature=0.5), [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),  # squared
    ):
        assert frequencies(**options).tolist() == pytest.approx(expected, abs=0.02)
    for options in (dict(temperature=0), dict(temperature=1e-40), dict(top_p=0.0)):
        assert frequencies(**options)[0] == 1


def test_a_row_that_has_ended_keeps_its_stop_token_and_the_others_continue():
    def draw(**stop) -> list[list[int]]:
        return list(generate(lively(), PROMPTS, 12, generator=seeded(1), **stop))

    free = draw()
    stop = free[2][0]
    steps = draw(stop_tokens={stop})
    assert len(steps) > 4
    assert [step[0] for step in steps[2:]] == [stop] * (len(steps) - 2)
    assert [step[1:] for step in steps[:6]] == [step[1:] for step in free[:6]]
    first = next(generate(lively(), PROMPTS[:1], 1, temperature=0))
    assert list(generate(lively(), PROMPTS[:1], 9, temperature=0, stop_tokens={first[0]})) == [first]  # all have ended


@pytest.mark.parametrize("prompt, specials", [("", ("<|endoftext|>",)), ("A", ("<|endoftext|>",)), ("", ("<x>",))])
def test_a_completion_starts_a_document_if_the_prompt_is_empty_and_ends_with_it(rt, prompt, specials):
    tokenizer = Tokenizer((), special_tokens=specials)
    model = small(vocab_size=257)
    with torch.no_grad():
        model.transformer.wte.weight.mul_(10)
        model.transformer.ln_f.bias += model.transformer.wte.weight[256]  # ends early
    ids = tokenizer.encode_ordinary(prompt) or [tokenizer.eot_token or 0]
    for seed in range(4):
        new = model.generate(torch.tensor([ids]), 30, top_k=50, generator=seeded(seed))[0, len(ids) :]
        text = tokenizer.decode(new).split("<|endoftext|>")[0]
        assert complete(model, tokenizer, prompt, 30, rt, seed) == prompt + text
