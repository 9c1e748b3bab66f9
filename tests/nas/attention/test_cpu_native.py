import math
import platform
import shutil
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from nas.attention import cpu_native
from nas.attention.causal import causal_attention
from nas.attention.cpu_native import FLAGS
from nas.attention.reference import attention_reference

CPUINFO = Path("/proc/cpuinfo")
HAS_REGISTERS = platform.machine() == "aarch64" or (CPUINFO.exists() and " avx2 " in CPUINFO.read_text())
needs_kernel = pytest.mark.skipif(not (shutil.which("g++") and HAS_REGISTERS), reason="needs g++, and AVX2 or NEON")
pytestmark = needs_kernel


def operands(*shape: int, seed: int = 0, scale: float = 1.0) -> list[torch.Tensor]:
    """Queries, keys, values and their output's gradient, with tokens outermost as a model has them."""
    batch, num_heads, length, head_dim = shape
    generator = torch.Generator().manual_seed(seed)
    parts = scale * torch.randn(4, batch, length, num_heads, head_dim, generator=generator)
    return [part.transpose(1, 2).requires_grad_() for part in parts]


def results(attend, parts: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Output, entropy and the gradients of a sum that weighs both."""
    *inputs, weights = parts
    output, entropy = attend(*inputs)
    total = (output * weights).sum() + (entropy * weights[..., 0]).sum()
    return output, entropy, *torch.autograd.grad(total, inputs)


def assert_exact(parts: list[torch.Tensor]) -> None:
    """Within rounding of fp32, relative to the largest number of each result."""
    expected = results(attention_reference, [part.double() for part in parts])
    for ours, theirs in zip(results(cpu_native.attend, parts), expected, strict=True):
        bound = 3e-6 * max(1.0, theirs.abs().max().item())
        assert (ours - theirs).abs().max().item() < bound


@pytest.mark.parametrize("head_dim", [1, 8, 9, 16, 40, 64])
@pytest.mark.parametrize(("batch", "num_heads", "length"), [(2, 3, 1), (1, 1, 7), (2, 3, 16), (3, 2, 17), (1, 2, 300)])
def test_values_and_gradients_are_the_textbooks(head_dim, batch, num_heads, length):
    assert_exact(operands(batch, num_heads, length, head_dim))


@pytest.mark.parametrize("head_dim", [1, 9, 16, 64])
@pytest.mark.parametrize("length", [1, 7, 17, 130])
def test_operands_in_bf16_are_computed_with_in_fp32(head_dim, length):
    parts = [part.detach().bfloat16().requires_grad_() for part in operands(2, 3, length, head_dim)]
    ours = results(cpu_native.attend, parts)
    in_fp32 = results(cpu_native.attend, [part.float() for part in parts])
    exact = results(attention_reference, [part.double() for part in parts])
    assert [result.dtype for result in ours] == [torch.bfloat16, torch.float32, *[torch.bfloat16] * 3]
    assert ours[0].equal(in_fp32[0].bfloat16())  # rounded once, to nearest
    assert ours[1].equal(in_fp32[1])
    for result, theirs in zip(ours, exact, strict=True):  # gradients are of the rounded output
        assert (result - theirs).abs().max().item() < 8e-3 * max(1.0, theirs.abs().max().item())


WITHOUT_AVX512 = ["-mno-avx512f"] if "avx512f" in CPUINFO.read_text() else []


@pytest.mark.parametrize("length", [5, 130])
def test_without_avx512_too(length, monkeypatch):
    monkeypatch.setattr("nas.attention.cpu_native.FLAGS", (*FLAGS, *WITHOUT_AVX512))
    cpu_native.compiled.cache_clear()
    for head_dim in (8, 20):
        assert_exact(operands(1, 2, length, head_dim))
    cpu_native.compiled.cache_clear()


@pytest.mark.parametrize("shape", [(0, 2, 5, 8), (2, 0, 5, 8), (2, 3, 0, 8)])
def test_of_nothing_comes_nothing(shape):
    for result in results(cpu_native.attend, operands(*shape)):
        assert result.numel() == 0


def test_operands_may_lie_in_memory_in_any_order_and_repeat():
    queries, keys, values, weights = operands(2, 3, 20, 8)
    repeated = [queries, keys[:1].expand_as(keys), values[:, :1].expand_as(values), weights]
    assert_exact(repeated)
    gradient = torch.autograd.grad(cpu_native.attend(*repeated[:3])[0].sum(), queries)[0]
    expected = torch.autograd.grad(attention_reference(*repeated[:3]).output.sum(), queries)[0]
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)
    parts = operands(2, 3, 20, 8)
    turned = [part.detach().mT.contiguous().mT.requires_grad_() for part in parts]
    for ours, theirs in zip(*(results(cpu_native.attend, tensors) for tensors in (parts, turned)), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("other", [(2, 3, 21, 8), (2, 1, 20, 8), (2, 3, 20, 4)])
def test_operands_that_do_not_fit_are_refused(other):
    queries, keys, *_ = operands(2, 3, 20, 8)
    with pytest.raises(ValueError, match="operands of attention must all be fp32 or bf16"):
        cpu_native.attend(queries, keys, operands(*other)[2])
    with pytest.raises(ValueError, match="float64"):
        cpu_native.attend(queries, keys, keys.double())
    for bounds in (torch.zeros(2), torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, device="meta")):
        with pytest.raises(ValueError, match="bounds of attention must be fp32 on the CPU, one for each of 3 heads"):
            cpu_native.attend(queries, keys, keys, function="relu", bounds=bounds)


def test_a_temperature_in_fp64_cools_queries_in_fp32_and_tensors_without_numbers_are_left_to_torch():
    queries, keys, values, _ = (part.detach() for part in operands(2, 3, 20, 8))
    temperature = torch.rand(3, 20, dtype=torch.float64) + 0.5
    ours = causal_attention(queries, keys, values, temperature=temperature)
    for result, other in zip(ours, attention_reference(queries, keys, values, temperature=temperature), strict=True):
        torch.testing.assert_close(result, other.float())
    with FakeTensorMode():
        parts = [torch.empty(2, 3, 20, 8) for _ in range(3)]
        for with_entropy in (False, True):
            assert causal_attention(*parts, with_entropy=with_entropy).output.shape == (2, 3, 20, 8)


def test_large_scores_and_gradients_do_not_reach_what_is_hidden():
    queries, _, values, _ = operands(1, 1, 4, 8, scale=1e12)
    output, entropy = cpu_native.attend(queries, -queries, values)
    torch.testing.assert_close(output[0, 0, 0], values[0, 0, 0])
    gradients = torch.autograd.grad(1e25 * entropy.sum(), [queries])
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_threads_do_not_change_a_bit():
    parts, before = operands(2, 3, 100, 8), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = results(cpu_native.attend, parts)
        torch.set_num_threads(2)
        together = results(cpu_native.attend, parts)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(first, second) for first, second in zip(alone, together, strict=True))


@pytest.mark.parametrize("dtype", cpu_native.DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_not_hidden(value, dtype):
    queries, keys, values, _ = (part.detach().to(dtype) for part in operands(1, 1, 20, 8))
    keys[0, 0, 5, 3] = value
    output, entropy = cpu_native.attend(queries, keys, values)
    expected = attention_reference(queries, keys, values)
    for ours, theirs in ((output, expected.output), (entropy, expected.entropy)):
        assert ours[0, 0, 5:].isnan().any()
        assert torch.equal(ours[0, 0, :5].isfinite(), theirs[0, 0, :5].isfinite())


def test_it_is_what_causal_attention_uses_for_fp32_and_bf16(monkeypatch):
    calls = []

    def attend(*parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(parts)
        return parts[2], parts[2][..., 0]

    monkeypatch.setattr(cpu_native, "attend", attend)
    parts = [part.detach() for part in operands(1, 1, 4, 8)[:3]]
    causal_attention(*parts)
    causal_attention(*parts, with_entropy=False)
    causal_attention(*(part.bfloat16() for part in parts))
    causal_attention(parts[0], *(part.bfloat16() for part in parts[1:]), with_entropy=False)
    causal_attention(parts[0], *(part.bfloat16() for part in parts[1:]))  # queries keep their digits
    causal_attention(*(part.double() for part in parts))
    assert [part.dtype for part, *_ in calls] == [torch.float32] * 2 + [torch.bfloat16] * 2 + [torch.float32]
