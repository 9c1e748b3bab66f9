import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from nas.attention import cpu_native
from nas.model.fused_forms import fused_normalised_attention
from nas.model.mpc_friendly import FORMS, ScoreBound, normalised_attention
from tests.nas.attention.test_cpu_native import WITHOUT_AVX512, needs_kernel

pytestmark = needs_kernel


def operands(batch: int, num_heads: int, length: int, head_dim: int, seed: int = 0) -> list[Tensor]:
    """Queries, keys, values and their output's gradient, with tokens outermost as a model has them."""
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(4, batch, length, num_heads, head_dim, generator=generator)
    return [part.transpose(1, 2).requires_grad_() for part in parts]


def results(attend, form: str, parts: list[Tensor], *, has_bound: bool = True, **options) -> list[Tensor]:
    """Output, entropy and the gradients of a sum that weighs both; with a bound, its gradient is last."""
    *inputs, weights = parts
    bound = ScoreBound(inputs[0].shape[1], "power8").to(torch.promote_types(weights.dtype, torch.float32))
    output, entropy = attend(*inputs, form=form, bound=bound if has_bound else None, **options)
    total = (output * weights).sum() + (entropy * weights[..., 0]).sum()
    return [output, entropy, *torch.autograd.grad(total, [*inputs, bound.weight] if has_bound else inputs)]


def assert_same(ours: list[Tensor], expected: list[Tensor], error: float) -> None:
    for mine, theirs in zip(ours, expected, strict=True):
        assert (mine - theirs).abs().max().item() < error * max(1.0, theirs.abs().max().item())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("head_dim", [1, 9, 16, 64])
@pytest.mark.parametrize(("batch", "num_heads", "length"), [(2, 3, 1), (1, 1, 7), (2, 3, 16), (3, 2, 17), (1, 2, 300)])
def test_values_and_gradients_are_those_of_torch(form, head_dim, batch, num_heads, length):
    parts = operands(batch, num_heads, length, head_dim)
    expected = results(normalised_attention, form, [part.double() for part in parts])
    assert_same(results(fused_normalised_attention, form, parts), expected, 2e-4)  # of entropies of weights near 0


@pytest.mark.parametrize("form", FORMS)
def test_without_avx512_too(form, monkeypatch):
    monkeypatch.setattr("nas.attention.cpu_native.FLAGS", (*cpu_native.FLAGS, *WITHOUT_AVX512))
    cpu_native.compiled.cache_clear()
    parts = operands(1, 2, 130, 20)
    expected = results(normalised_attention, form, [part.double() for part in parts])
    assert_same(results(fused_normalised_attention, form, parts), expected, 2e-4)
    cpu_native.compiled.cache_clear()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_what_is_not_finite_is_not_hidden(form, value, place):
    parts = [part.detach() for part in operands(1, 1, 20, 8)[:3]]
    parts[place][0, 0, 5, 3] = value
    ours, theirs = (attend(*parts, form=form) for attend in (fused_normalised_attention, normalised_attention))
    for mine, expected in zip(ours, theirs, strict=True):
        assert torch.equal(mine.isfinite(), expected.isfinite())
        assert not mine.isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_operands_in_bf16_and_temperatures_are_computed_with_in_fp32(form):
    parts = [part.detach().bfloat16().requires_grad_() for part in operands(2, 3, 130, 16)]
    temperature = torch.rand(3, 130) + 0.5
    for options in ({}, {"temperature": temperature}, {"has_bound": False}):
        ours = results(fused_normalised_attention, form, parts, **options)
        assert [result.dtype for result in ours[:3]] == [torch.bfloat16, torch.float32, torch.bfloat16]
        assert_same(ours, results(normalised_attention, form, [part.double() for part in parts], **options), 3e-2)


def test_a_row_without_a_positive_score_attends_to_nothing():
    queries = torch.ones(1, 1, 3, 4).requires_grad_()
    ones = torch.ones(1, 1, 3, 4)
    output, entropy = fused_normalised_attention(queries, -ones, ones, form="relu")
    (output.sum() + entropy.sum()).backward()
    assert output.abs().max() == entropy.abs().max() == queries.grad.abs().max() == 0


def test_the_first_token_attends_to_itself_even_if_its_power_is_0():
    queries = torch.zeros(1, 1, 3, 4).requires_grad_()
    bound = ScoreBound(1, "power8")
    values = torch.arange(12.0).view(1, 1, 3, 4)
    output, entropy = fused_normalised_attention(queries, queries, values, form="power8", bound=bound)
    torch.testing.assert_close(output[0, 0], torch.stack([values[0, 0, :i].mean(dim=0) for i in (1, 2, 3)]))
    assert entropy[0, 0, 0] == 0
    assert torch.autograd.grad(output[0, 0, 0].sum(), bound.weight)[0] == 0


def test_threads_do_not_change_a_bit_and_entropies_are_left_out():
    parts, before = operands(2, 3, 100, 8), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = results(fused_normalised_attention, "power8", parts)
        torch.set_num_threads(2)
        together = results(fused_normalised_attention, "power8", parts)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(first, second) for first, second in zip(alone, together, strict=True))
    assert fused_normalised_attention(*parts[:3], form="2quad", with_entropy=False).entropy is None


def test_torch_computes_what_the_kernel_cannot(monkeypatch):
    parts = [part.detach() for part in operands(1, 2, 20, 8)[:3]]
    capped = normalised_attention(*parts, form="2quad", cap=2.0)
    monkeypatch.setattr(cpu_native, "attend", lambda *operands, **options: pytest.fail("the kernel has no caps"))
    assert fused_normalised_attention(*parts, form="2quad", cap=2.0).output.equal(capped.output)
    doubles = [part.double() for part in parts]
    exact = normalised_attention(*doubles, form="relu")
    assert fused_normalised_attention(*doubles, form="relu").output.equal(exact.output)
    with FakeTensorMode():
        fake = [torch.empty(1, 2, 20, 8) for _ in range(3)]
        assert fused_normalised_attention(*fake, form="power8").output.shape == (1, 2, 20, 8)
    mapped = torch.vmap(partial(fused_normalised_attention, form="2quad"))(*(part[None] for part in parts))
    assert mapped.output[0].equal(normalised_attention(*parts, form="2quad").output)
