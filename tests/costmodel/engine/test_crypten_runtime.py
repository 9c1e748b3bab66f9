"""What CrypTen's parties compute, with masks of their dealer."""

import hashlib

import numpy as np
import pytest

from costmodel import ops
from costmodel.engine import registry, spu
from costmodel.engine.session import on_this_machine
from costmodel.errors import UserError
from costmodel.execution import interpreter
from costmodel.ops import Input, Node, OpGraph
from costmodel.protocols.crypten import CryptenSetting


@pytest.mark.needs_crypten
def test_another_version_is_refused(client, monkeypatch):
    monkeypatch.setattr(registry, "version", lambda package: "0.5.0")
    with (
        pytest.raises(UserError, match=r"^CrypTen must be 0\.4\.1, but 0\.5\.0 is installed; run: .*crypten==0\.4\.1$"),
        on_this_machine(client("crypten")),
    ):
        pass


@pytest.mark.needs_crypten
def test_masks_are_those_of_a_seed_of_256_bits():
    from costmodel.engine.crypten_dealer import Draws

    seed = bytes(range(32))
    first, second = Draws(seed), Draws(seed)
    assert first((2, 3)).tolist() == second((2, 3)).tolist()
    expected = np.frombuffer(hashlib.shake_128(seed + (2).to_bytes(8, "big")).digest(16), dtype=np.int64)
    assert first((2,)).tolist() == expected.tolist() != Draws(seed)((2,)).tolist()
    assert Draws(bytes(32))((2,)).tolist() != Draws(seed)((2,)).tolist()


def run_alone(op, source, weights=None, **setting):
    """The output of an op under CrypTen, and in the clear."""
    node = Node(name="op", layer=0, op=op, inputs=("x",))
    graph = OpGraph(nodes=(node,), inputs=(Input(name="x", shape=source.shape),))
    given = graph, weights or {}, None, {"x": source}
    run = spu.run(*given, protocol="crypten", setting=CryptenSetting(**setting))
    expected = interpreter.execute(*given)
    return run.logits.reshape(expected.shape), expected


@pytest.mark.needs_crypten
@pytest.mark.parametrize("device", ["cpu", pytest.param("emulated", marks=pytest.mark.slow)])
def test_mean_squares_of_large_numbers_are_right(device):
    """If each party truncated its share of the large squares alone, one in 128 would be wrong."""
    norm = ops.RmsNorm(rows=512, features=1024, affine=False)
    source = np.random.default_rng(0).normal(size=norm.output_shape)
    source[:, 0] = 6000
    computed, expected = run_alone(norm, source, device=device)
    np.testing.assert_allclose(computed, expected, rtol=0.005, atol=0.001)


@pytest.mark.needs_crypten
def test_norms_of_small_and_large_rows_are_right():
    """With 15 fraction bits, a mean square of 0.001 has five bits, and the inverse root of 50,000 seven."""
    norm = ops.RmsNorm(rows=60, features=64, affine=False)
    source = np.random.default_rng(0).normal(size=norm.output_shape) * 2.0 ** np.linspace(-5, 8, 60)[:, None]
    private, expected = run_alone(norm, source, fraction_bits=15)
    assert np.abs(np.median(private / expected, axis=1) - 1).max() < 0.002


@pytest.mark.needs_crypten
def test_small_weights_keep_their_digits():
    linear = ops.Linear(rows=8, in_features=512, out_features=64, bias=False)
    generator = np.random.default_rng(0)
    weights = {"op.weight": generator.normal(size=(64, 512)) * 0.02}
    private, expected = run_alone(linear, generator.normal(size=(8, 512)), weights, fraction_bits=15)
    assert np.sqrt(np.square(private - expected).mean()) < 1e-4  # 2e-4 if weights had 15 digits behind the point


@pytest.mark.needs_crypten
def test_weights_of_eighth_powers_are_right_for_sums_of_any_size():
    softmax = ops.Softmax(heads=1, queries=64, keys=64, form="power8")
    scores = np.random.default_rng(0).uniform(0.6, 1, softmax.output_shape)
    sums = (scores**8 * np.tri(64)).sum(axis=-1, keepdims=True)
    scores *= (2.0 ** np.linspace(-11, 17, 64)[:, None] / sums) ** (1 / 8)
    private, expected = run_alone(softmax, scores)
    assert np.abs(private - expected).max() < 0.03
