from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nas.attention.reference import attention_reference, capped
from nas.model import bf16_products, cross_entropy
from nas.model.bf16_products import add_product, wide_product
from nas.model.cross_entropy import (
    distilled,
    fully_distilled,
    padded,
    projected_cross_entropy,
    token_cross_entropies,
)
from nas.model.decoder import Decoder, build
from nas.model.self_attention import Past
from nas.model.weights import deployed_weights
from search_spaces.architecture import Architecture, Layer
from search_spaces.bases import BASES
from search_spaces.notation import parse
from tests.small_models import GPT2, PYTHIA

LAYOUTS = {
    "rows": lambda matrix: matrix,
    "transposed": lambda matrix: matrix.T.contiguous().T,
    "of a larger one": lambda matrix: torch.nn.functional.pad(matrix, (3, 2, 1, 1))[1:-1, 3:-2],
    "neither": lambda matrix: torch.stack((matrix, matrix), dim=2)[..., 0],
    "one row for all": lambda matrix: matrix[:1].expand_as(matrix),
}


def seeded(architecture: Architecture, seed: int = 0) -> Decoder:
    return build(architecture, torch.Generator().manual_seed(seed), temperature_init=0.5)


def test_gpt2_small_has_gpt2s_parameters_and_rotary_an_even_number_of_features():
    # Radford et al. 2019's released small model: 124,439,808 with 50,257 tokens and 1,024 positions.
    architecture = replace(BASES["gpt2-small"], vocab_size=50_257)
    with torch.device("meta"):
        model = Decoder(architecture)
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808
    odd = replace(PYTHIA, num_heads=2, d_model=24, layers=(Layer(),))  # head_dim 12, a quarter of which is 3
    with pytest.raises(ValueError, match="must be even"):
        Decoder(odd)


def test_entropies_are_those_of_every_layer_and_head(some_tokens):
    architecture = parse("SM", GPT2).architecture
    model = seeded(architecture)
    tokens = some_tokens(architecture.vocab_size, length=16)
    entropies = model(tokens).entropies
    assert [layer.shape for layer in entropies] == [(2, 2, 16)] * 2  # batch x heads x T
    stream = model.embed(tokens) + model.position.weight[:16]
    queries, keys, values = model.layers[0].attention.qkv(stream).view(2, 16, 3, 2, 8).permute(2, 0, 3, 1, 4)
    torch.testing.assert_close(entropies[0], attention_reference(queries, keys, values).entropy, rtol=1e-4, atol=1e-5)


def test_a_fresh_simplified_block_passes_the_stream_on_and_all_of_it_learns(some_tokens):
    model = seeded(parse("HH(SM+ScFuFFN)", GPT2).architecture)
    stream = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(2))
    attended, entropy = model.layers[1].attention(stream)
    torch.testing.assert_close(attended, stream)  # I + softmax - C with queries of 0
    torch.testing.assert_close(entropy, torch.arange(1, 10).log().expand(2, 2, 9))
    assert model.layers[1].ffn.residual.alpha.item() == pytest.approx(10)
    model = seeded(parse("HH(SM(t)+ScFFN)", GPT2).architecture)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):  # keys and temperatures have no gradient before the queries have left 0
        optimizer.zero_grad()
        functional.cross_entropy(
            model(some_tokens(GPT2.vocab_size, length=16)).logits.flatten(0, 1),
            some_tokens(GPT2.vocab_size, length=16).flatten(),
        ).backward()
        optimizer.step()
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]


def test_one_slope_for_all_layers_is_learned_once():
    architecture = parse("SM+LR", GPT2).architecture
    model = build(architecture, torch.Generator().manual_seed(0), slopes="global")
    assert sum(name.endswith("slope") for name, _ in model.named_parameters()) == 1
    with torch.no_grad():
        model.layers[1].ffn.activation.slope.fill_(0.5)
    weights = deployed_weights(model)
    assert [weights[f"layers.{index}.ffn.activation.slope"].item() for index in (0, 1)] == [0.5, 0.5]


ROWS, WIDTH, VOCAB = 10, 6, 7


@pytest.fixture(params=[1, 3 * VOCAB, 5 * VOCAB + 2], ids=["a row", "uneven chunks", "halves"])
def chunked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cross_entropy.CHUNK_SIZE, "cpu", request.param)
    monkeypatch.setattr(cross_entropy, "LEAST_ROWS", 1)


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=dtype).requires_grad_()
    return hidden, weight, torch.randint(VOCAB, (ROWS,), generator=generator)


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chunks_give_the_loss_and_gradients_of_all_logits(dtype, cap):
    results = []
    for way in (lambda h, w, t, c: functional.cross_entropy(capped(h @ w.T, c), t), projected_cross_entropy):
        hidden, weight, targets = drawn(dtype)
        loss = way(hidden, weight, targets, cap)
        (3 * loss).backward()
        results.append((loss, hidden.grad, weight.grad))
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


def predicted(count: int) -> tuple[Tensor, Tensor]:
    drawn_logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    kept = drawn_logits.log_softmax(1).topk(count)
    return kept.indices, kept.values


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("count", [1, 3, VOCAB - 1])
def test_distillation_in_chunks_is_that_of_all_logits(monkeypatch, share, count):
    results = []
    for chunk_size in (1 << 20, 3 * VOCAB):
        monkeypatch.setitem(cross_entropy.CHUNK_SIZE, "cpu", chunk_size)
        monkeypatch.setattr(cross_entropy, "LEAST_ROWS", 1)
        hidden, weight, targets = drawn(torch.float64)
        losses = distilled(hidden, weight, targets, *predicted(count), share)
        (3 * losses.loss).backward()
        results.append((*losses, hidden.grad, weight.grad))
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6, check_dtype=False)  # in one piece they are fp32


def by_definition(hidden: Tensor, weight: Tensor, targets: Tensor, theirs: Tensor, share: float, cap: float | None):
    """Loss and gradients, in the dtype of what is given."""
    hidden, weight = (value.detach().requires_grad_() for value in (hidden, weight))
    ours = capped(hidden @ weight.T, cap).log_softmax(1)
    divergence = (theirs.softmax(1) * (theirs.log_softmax(1) - ours)).sum(1).mean()
    cross_entropy = functional.nll_loss(ours, targets)
    ((1 - share) * cross_entropy + share * divergence).backward()
    return cross_entropy, divergence, hidden.grad, weight.grad


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_distillation_is_the_divergence_over_the_whole_vocabulary(dtype, share, cap):
    theirs = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    hidden, weight, targets = drawn(dtype)
    losses = fully_distilled(hidden, weight, targets, lambda rows: theirs[rows], share, cap)
    losses.loss.backward()
    got = (losses.cross_entropy, losses.divergence, hidden.grad, weight.grad)
    expected = by_definition(hidden.double(), weight.double(), targets, theirs, share, cap)
    for ours, exact in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, exact.to(dtype))


def test_under_autocast_logits_and_the_gradient_of_the_table_are_not_rounded(monkeypatch):
    monkeypatch.setitem(cross_entropy.CHUNK_SIZE, "cpu", 1)  # 128 rows a chunk
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 64, generator=generator).bfloat16().float() for size in (1024, 300))
    targets, close = torch.randint(300, (1024,), generator=generator), 0.05 * torch.randn(1024, 64, generator=generator)
    theirs = (hidden + close).double() @ weight.double().T  # a parent that is close, so that gradients are small
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = fully_distilled(
            hidden.requires_grad_(), weight.requires_grad_(), targets, lambda rows: theirs[rows], 1.0
        )
    losses.loss.backward()
    exact = by_definition(hidden.double(), weight.double(), targets, theirs, 1.0, None)
    assert weight.grad.dtype == torch.float32
    for ours, float64, most in zip(
        (losses.divergence, hidden.grad, weight.grad), exact[1:], (1e-4, 5e-3, 5e-3), strict=True
    ):
        assert (ours - float64).norm() < most * float64.norm()


def test_a_table_that_is_not_trained_gets_no_gradient(monkeypatch):
    monkeypatch.setitem(cross_entropy.CHUNK_SIZE, "cpu", 1)
    hidden, weight, targets = drawn(torch.float32)
    with torch.no_grad():
        assert not projected_cross_entropy(hidden, weight, targets).requires_grad
    projected_cross_entropy(hidden, weight.requires_grad_(False), targets).backward()
    assert weight.grad is None
    assert hidden.grad is not None


def test_a_padded_vocabulary_changes_no_number(monkeypatch):
    monkeypatch.setattr(cross_entropy, "LEAST_ROWS", 1)
    likely, log_probabilities = predicted(3)
    for chunk_size, cap in product((1 << 20, 3 * VOCAB), (None, 2.0)):
        monkeypatch.setitem(cross_entropy.CHUNK_SIZE, "cpu", chunk_size)
        results = []
        for multiple in (1, 4):
            monkeypatch.setitem(cross_entropy.ROW_MULTIPLE, "cpu", multiple)
            hidden, weight, targets = drawn(torch.float64)
            taught = distilled(hidden, weight, targets, likely, log_probabilities, 0.3, cap)
            (3 * taught.loss + projected_cross_entropy(hidden, weight, targets, cap)).backward()
            results.append((*taught, token_cross_entropies(hidden, weight, targets, cap), hidden.grad, weight.grad))
        for expected, got in zip(*results, strict=True):
            torch.testing.assert_close(got, expected)
    assert len(padded(weight)) == 8
    assert not padded(weight)[VOCAB:].any()


STEPPED = {
    "tiny": "SM+LN+G EReg(SM(t)+ScFuFFN) 1xLHLRo-1xoooRo 1xLPLRo-1xLQLRo 1xLULRo-1xLBLRo HH(SM(t)+ScFFN)",
    "pythia-70m": "SM+LN+G",
    "smollm2-135m": "SM+RMS+SwiGLU",
}


@pytest.mark.parametrize(("name", "base"), [(name, base) for base, names in STEPPED.items() for name in names.split()])
def test_steps_have_the_logits_of_the_whole(name: str, base: str) -> None:
    architecture = parse(name, BASES[base]).architecture
    model = build(architecture, torch.Generator().manual_seed(0)).eval()
    tokens = torch.randint(architecture.vocab_size, (2, 7), generator=torch.Generator().manual_seed(1))
    past = Past()
    with torch.no_grad():
        steps = torch.stack(
            [model.logits_of(model.continued(tokens[:, place, None], past))[:, 0] for place in range(7)], dim=1
        )
        torch.testing.assert_close(steps, model(tokens, with_entropies=False).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", ["_by_vectors", "_mkl", None])
@pytest.mark.parametrize("shape", [(5, 7, 3), (1, 4, 1), (1, 1, 6), (64, 300, 33), (33, 31, 64), (17, 65, 100)])
def test_products_of_bf16_have_sums_and_results_in_fp32(monkeypatch, shape, way):
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    product_of_way = way and getattr(bf16_products, way).__wrapped__()
    if way and product_of_way is None:
        pytest.skip("this processor or torch does not have it")
    for other in ("_by_vectors", "_mkl"):
        monkeypatch.setattr(bf16_products, other, lambda other=other: product_of_way if other == way else None)
    rows, depth, columns = shape
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(rows, depth, generator=generator).bfloat16()
    right = torch.randn(depth, columns, generator=generator).bfloat16()
    before = torch.randn(rows, columns, generator=generator)
    for laid_left, laid_right in product(LAYOUTS.values(), LAYOUTS.values()):
        a, b, total = laid_left(left), laid_right(right), before.clone()
        exact = a.double() @ b.double()
        add_product(total, a, b)
        got = wide_product(a, b)
        assert got.dtype == total.dtype == torch.float32
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(total.double(), before + exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_products_stay_in_their_type(dtype):
    left, right, total = (torch.randn(4, 4, dtype=dtype) for _ in range(3))
    assert wide_product(left, right).equal(left @ right)
    expected = torch.addmm(total, left, right)
    add_product(total, left, right)
    assert total.equal(expected)


def test_weights_are_rounded_once_after_each_change():
    linear, source = torch.nn.Linear(5, 3), torch.randn(4, 5)
    with bf16_products.bf16_products("cpu"):
        first = linear(source)
        copy = bf16_products.rounded(linear.weight)
        assert bf16_products.rounded(linear.weight).data_ptr() == copy.data_ptr()
        first.sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = torch.nn.functional.linear(source, linear.weight, linear.bias)
        gradient = torch.autograd.grad(expected.sum(), linear.weight)[0]
    assert first.equal(expected)
    assert linear.weight.grad.dtype == torch.float32
    assert linear.weight.grad.equal(gradient)
    with torch.no_grad():
        linear.weight.mul_(3.0)
    assert bf16_products.rounded(linear.weight).equal(linear.weight.bfloat16())
    linear.weight.data = torch.ones(3, 5)
    assert bf16_products.rounded(linear.weight).equal(torch.ones(3, 5).bfloat16())
    assert linear(source).dtype == torch.float32  # outside, products are not lowered


def test_logits_are_not_rounded():
    source, weight = torch.randn(2, 3, 8), torch.nn.Parameter(torch.randn(11, 8))
    exact = source.bfloat16().double() @ weight.detach().bfloat16().double().T
    with torch.no_grad():
        logits = bf16_products.wide_linear(source, weight)
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)
