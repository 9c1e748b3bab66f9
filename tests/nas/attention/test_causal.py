import logging
import math
import re
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nas.attention import causal
from nas.attention.causal import causal_attention
from nas.attention.reference import attention_reference, row_bounds

HEAD_DIMS = [1, 4, 8, 9, 20, 64]  # without our C++ torch's flash kernel is padded up to 8, and beyond only doubled


def heads(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(scale * torch.randn(*shape, generator=generator, dtype=dtype)).requires_grad_() for _ in range(3)]


@pytest.fixture(params=["compiled", "by torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How fp32 is attended to on the CPU."""
    if request.param == "by torch":
        monkeypatch.setattr(causal, "has_native", lambda head_dim: False)
    elif shutil.which("g++") is None:
        pytest.skip("g++ is not installed")


def naive(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[list, list]:
    """One head, row by row, in plain Python."""
    outputs, entropies = [], []
    for i in range(len(queries)):
        scores = [math.exp(float(queries[i] @ keys[j]) / math.sqrt(queries.shape[1])) for j in range(i + 1)]
        weights = [score / sum(scores) for score in scores]
        outputs.append(sum(weight * values[j] for j, weight in enumerate(weights)))
        entropies.append(-sum(weight * math.log(weight) for weight in weights))
    return outputs, entropies


@pytest.mark.parametrize("attend", [causal_attention, attention_reference])
@pytest.mark.parametrize("head_dim", [3, 9])
def test_output_and_entropy_are_the_textbooks(attend, head_dim):
    queries, keys, values = heads(1, 1, 6, head_dim)
    outputs, entropies = naive(*(part[0, 0].detach() for part in (queries, keys, values)))
    attended = attend(queries, keys, values)
    torch.testing.assert_close(attended.output[0, 0], torch.stack(outputs))
    torch.testing.assert_close(attended.entropy[0, 0], torch.tensor(entropies, dtype=torch.float64))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("length", [1, 17, 70])
def test_fast_paths_equal_the_reference_in_values_and_gradients(head_dim, length):
    parts = [*heads(2, 3, length, head_dim), heads(3, length)[0].detach().exp().requires_grad_()]
    weights = heads(2, 3, length, head_dim, seed=1)[0].detach()
    results = []
    for attend in (causal_attention, attention_reference):
        output, entropy = attend(*parts[:3], temperature=parts[3])
        total = (output * weights).sum() + (entropy * weights[..., 0]).sum()
        results.append((output, entropy, *torch.autograd.grad(total, parts)))
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("way")
def test_packed_heads_need_not_be_contiguous():
    packed = heads(2, 40, 3, 2, 9, dtype=torch.float32)[0]
    parts = packed.permute(2, 0, 3, 1, 4)
    for ours, theirs in zip(causal_attention(*parts), attention_reference(*parts), strict=True):
        torch.testing.assert_close(ours, theirs)
        gradients = [
            torch.autograd.grad(result.square().sum(), packed, retain_graph=True)[0] for result in (ours, theirs)
        ]
        torch.testing.assert_close(*gradients)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("head_dim", [8, 16, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.1, 0.01])
def test_entropy_is_exact_at_low_temperatures(head_dim, temperature):
    parts = [part.detach() for part in heads(2, 4, 300, head_dim, dtype=torch.float32)]
    temperatures = torch.full((4, 300), temperature)
    for dtype in (torch.float32, torch.bfloat16):  # half precision is widened before anything
        lowered = [part.to(dtype) for part in parts]
        wide = [part.double() for part in lowered]
        entropy = causal_attention(*lowered, temperature=temperatures).entropy
        expected = attention_reference(*wide, temperature=temperatures.double()).entropy
        lse = (wide[0] @ wide[1].mT / temperatures[0, 0].double() / math.sqrt(head_dim)).logsumexp(dim=-1)
        assert float(((entropy - expected).abs() / lse.abs().clamp(min=1)).max()) < 1e-5


@given(st.integers(1, 40), st.sampled_from([8, 9]), st.sampled_from([0.0, 0.1, 1.0, 30.0, 1e4]), st.integers(0, 99))
def test_entropy_of_row_i_lies_between_0_and_ln_i(length, head_dim, scale, seed):
    entropy = causal_attention(*heads(1, 2, length, head_dim, seed=seed, dtype=torch.float32, scale=scale)).entropy
    assert bool((entropy >= 0).all())
    assert bool((entropy <= row_bounds(length).float()).all())


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("head_dim", [8, 16])
def test_gradient_stays_finite_where_weights_vanish(head_dim):
    parts = heads(1, 2, 32, head_dim, dtype=torch.float32, scale=100.0)
    for attend in (causal_attention, attention_reference):
        gradients = torch.autograd.grad(attend(*parts).entropy.sum(), parts[:2])
        assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("head_dim", [8, 16])
def test_low_precision_values_keep_their_type_and_the_entropy_is_fp32(head_dim):
    parts = [part.detach().bfloat16() for part in heads(1, 2, 16, head_dim)]
    for lowered in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=lowered):
            output, entropy = causal_attention(*parts)
        assert (output.dtype, entropy.dtype) == (torch.bfloat16, torch.float32)
        torch.testing.assert_close(entropy, causal_attention(*(part.float() for part in parts)).entropy)


def test_without_entropy_the_output_is_the_same():
    parts, temperature = heads(2, 3, 20, 16), torch.rand(3, 20, dtype=torch.float64) + 0.5
    output, entropy = causal_attention(*parts, temperature=temperature, with_entropy=False)
    assert entropy is None
    torch.testing.assert_close(output, causal_attention(*parts, temperature=temperature).output)


@pytest.mark.parametrize(
    ("device", "has_triton", "said"),
    [
        ("cuda", True, "one fused Triton kernel"),
        ("cuda", False, r"holds a T x T matrix .*private-inference-nas\[triton\]"),
        ("xpu", True, "holds a T x T matrix"),
    ],
)
def test_the_way_is_chosen_by_device_and_said_once(device, has_triton, said, monkeypatch, caplog):
    causal._attend_on.cache_clear()
    monkeypatch.setattr(causal, "find_spec", lambda name: object() if has_triton else None)
    with caplog.at_level(logging.INFO, "nas.attention.causal"):
        chosen = {causal._attend_on(device) for _ in range(3)}
    assert len(chosen) == len(caplog.records) == 1
    assert caplog.records[0].levelname == ("WARNING" if "T x T" in said else "INFO")
    assert re.search(said, caplog.text)
    causal._attend_on.cache_clear()
