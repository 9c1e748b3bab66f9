"""What the engines' fixed point holds of an op's numbers, and that what is emulated is what the op computes."""

from typing import Any

import numpy as np
import pytest

from costmodel import ops
from costmodel.deployment.deploy import Deployment
from costmodel.engine import programs
from costmodel.engine.spu import ops_job
from costmodel.errors import OutOfRangeError, UserError
from costmodel.execution import interpreter
from costmodel.execution.engine_arithmetic import arithmetic_of
from costmodel.execution.op_functions import evaluate, numpy_library
from costmodel.ops import Node
from costmodel.protocols.crypten import CryptenSetting
from costmodel.protocols.primitives import EngineSetting
from tests.costmodel.protocols.test_measured_bytes import some_ops

SETTINGS = {"semi2k": EngineSetting(), "crypten": CryptenSetting()}


def why_not(protocol, op, *sources, weights=None, bits=None, **of):
    """Return why an op does not hold, and its arithmetic."""
    setting = SETTINGS[protocol] if bits is None else CryptenSetting(fraction_bits=bits)
    arithmetic = arithmetic_of(protocol, setting, **of)
    try:
        arithmetic.evaluate(Node(name="op", layer=0, op=op, inputs=("source",)), weights or {}, *sources)
        arithmetic.check_wrong()
    except OutOfRangeError as error:
        return str(error), arithmetic
    return None, arithmetic


def row(*values):
    return np.array([values])


SOFTMAX: dict[str, Any] = {"heads": 1, "queries": 2, "keys": 2}
ALONE: dict[str, Any] = {"heads": 1, "queries": 1, "keys": 1}
LINEAR = ops.Linear(rows=1, in_features=2, out_features=1, bias=False)
RMS, LAYER = ops.RmsNorm(rows=1, features=2, affine=False), ops.LayerNorm(rows=1, features=2, affine=False)
SILU, TANH = ops.Silu(rows=1, features=2), ops.Tanh(rows=1, features=2)
GELU: dict[str, Any] = {"rows": 1, "features": 2}
HIDDEN, SEEN = np.array([[[0.0, 9999.0], [0.0, 1.0]]]), np.array([[[0.0, 0.0], [0.0, 600.0]]])
CASES = [
    ("semi2k", RMS, row(300.0, 300.0), None),
    ("semi2k", RMS, row(400.0, 400.0), "arguments of inverse roots are from 1.6e+05"),  # of 131,072
    ("semi2k", RMS, row(8200.0, 0.0), "products are from 0 to 6.724e+07"),
    ("semi2k", LAYER, row(299.9, 300.1), None),
    ("semi2k", LINEAR, row(8000.0, 8000.0), None),
    ("semi2k", LINEAR, row(9000.0, 0.0), "products are from 8.1e+07"),
    ("semi2k", SILU, row(-241.0, 0.0), "arguments of logistic functions are from -241"),
    ("semi2k", SILU, row(481.0, 0.0), "arguments of logistic functions are from 0 to 481"),
    ("semi2k", SILU, row(240.0, -50.0), None),
    ("semi2k", TANH, row(-1e5, 1e5), None),
    ("semi2k", ops.Gelu(**GELU, form="tanh"), row(-1000.0, 1000.0), None),
    ("semi2k", ops.Gelu(**GELU, form="tanh"), row(0.0, 1500.0), "products are from 0 to 1.2"),
    ("semi2k", ops.Gelu(**GELU, form="exact"), row(-1e5, 1e5), None),
    ("semi2k", ops.Gelu(**GELU, form="piecewise"), row(-1e5, 1e5), None),  # overflowed powers cancel
    ("semi2k", ops.Softmax(**SOFTMAX), HIDDEN, None),  # the last key is hidden from the first query
    ("semi2k", ops.Softmax(**SOFTMAX), SEEN, "arguments of exponentials are from -600 to 0, not within -480"),
    ("semi2k", ops.Softmax(**SOFTMAX, form="bounded"), SEEN, "arguments of exponentials are from 0 to 600"),
    ("semi2k", ops.Softmax(**SOFTMAX, form="power8"), SEEN / 50, "products are from 0 to 4.3e+08"),
    ("semi2k", ops.Softmax(**ALONE, form="power8"), np.array([[[1e4]]]), None),
    ("semi2k", ops.Add(rows=1, features=2), row(2.0**44, 0.0), "numbers are from 0 to 3.518e+13"),
    ("semi2k", ops.Add(rows=1, features=2), row(np.nan, 0.0), "numbers are from nan"),
    ("crypten", RMS, row(300.0, 300.0), None),
    ("crypten", RMS, row(400.0, 400.0), "mean squares are from 1.6e+05"),
    ("crypten", RMS, row(0.01, 0.01), "mean squares are from 0.000"),
    ("crypten", LAYER, row(299.9, 300.1), None),
    ("crypten", SILU, row(-257.0, 0.0), "arguments of logistic functions are from -257"),
    ("crypten", TANH, row(-129.0, 0.0), "arguments of logistic functions are from -258"),
    ("crypten", ops.Gelu(**GELU, form="tanh"), row(-50.0, 50.0), None),
    ("crypten", ops.Gelu(**GELU, form="exact"), row(-3.0, 1.0), "arguments of the error function are from -2.1"),
    ("crypten", ops.Softmax(**SOFTMAX), HIDDEN, None),
    ("crypten", ops.Softmax(**SOFTMAX), SEEN / 2, "arguments of exponentials are from -300"),
    ("crypten", ops.Softmax(**ALONE, form="power8"), np.array([[[0.1]]]), None),
    ("crypten", ops.Softmax(heads=1, queries=1, keys=2, form="power8"), np.array([[[6.0, 1.0]]]), "sums of rows"),
    ("crypten", ops.Softmax(heads=1, queries=1, keys=2, form="bounded"), np.array([[[-3.0, -1.0]]]), None),
]  # fmt: skip


@pytest.mark.parametrize(("protocol", "op", "source", "why"), CASES)
def test_what_leaves_the_range_of_an_engine_is_named(protocol, op, source, why):
    weights = {"weight": np.array([[9000.0], [1.0]]) if source.max() == 9000 else np.array([[1.0], [1.0]])}
    sources = [source] * op.num_inputs if isinstance(op, ops.Add) else [source]
    found, _ = why_not(protocol, op, *sources, weights=weights if op is LINEAR else None)
    assert (found is None) == (why is None), found
    assert why is None or f"in op {why}" in found


def test_a_margin_is_left_for_other_text():
    assert why_not("semi2k", SILU, row(-200.0, 0.0), margin=1.0)[0] is None
    assert "not within -192 and 384" in why_not("semi2k", SILU, row(-200.0, 0.0), margin=1.25)[0]


def test_wrong_truncations_are_added_up():
    def truncated(op, *sources, **of):
        return sum(why_not("crypten", op, *sources, **of)[1].wrong.values()) * 2.0**32

    assert truncated(ops.Multiply(rows=1, features=2), row(3.0, -4.0), row(1.0, 1.0)) == 7.0
    assert truncated(ops.Add(rows=1, features=2), row(3.0, -4.0), row(1.0, 1.0)) == 0.0
    roots = truncated(RMS, row(3.0, -4.0))  # products with 8 times the root
    assert roots == pytest.approx(8 * 7 / 12.5**0.5, rel=1e-3)
    logits = ops.VocabProjection(rows=2, features=1, vocab=2)
    counted = truncated(logits, np.ones((2, 1)), weights={"weight": np.full((1, 2), 3.0)})
    assert counted == (12 + 2 / 8) / 2  # of one row, and of its input over 8
    many, _ = why_not("crypten", ops.Square(rows=1, features=2), row(1e4, 1e4))
    assert "results of a sequence would be wrong, most in op" in many
    squares, _ = why_not("crypten", RMS, row(200.0, 0.0), bits=24)
    assert "sums of squares are from 4e+04 to 4e+04, not within 0 and 3.277e+04" in squares


def test_linears_lose_the_digits_of_inputs_that_crypten_divides_away():
    linear = ops.Linear(rows=1000, in_features=1, out_features=1, bias=False)
    node, unit = Node(name="op", layer=0, op=linear, inputs=("source",)), 2.0**-16
    arithmetic = arithmetic_of("crypten", CryptenSetting())
    found = arithmetic.evaluate(node, {"weight": np.eye(1)}, np.full((1000, 1), 3 * unit)).view(np.ndarray) / unit
    assert {*found.flat} == {0.0, 8.0}
    assert found.mean() == pytest.approx(3, abs=0.5)


@pytest.mark.parametrize("protocol", SETTINGS)
def test_every_op_is_emulated_as_it_is_computed(protocol):
    some = some_ops(rows=4, features=8, heads=2, keys=4, vocab=16)
    job = ops_job(some, protocol=protocol, setting=SETTINGS[protocol])
    graph = job.client.graph_of(1, Deployment())
    assert {type(node.op) for node in graph} == set(ops.OP_TYPES)
    for node in graph:
        operands = interpreter.operands(node, job.client.weights or {})
        inputs = [job.inputs[name] for name in node.inputs]
        if isinstance(node.op, ops.TokenEmbedding):
            inputs = [
                np.eye(node.op.tokens, node.op.vocab) if node.op.encoding == "one-hot" else np.arange(node.op.tokens)
            ]
        exact = evaluate(node.op, numpy_library(), operands, *inputs)
        arithmetic = arithmetic_of(protocol, SETTINGS[protocol])
        try:
            fixed = arithmetic.evaluate(node, operands, *inputs).view(np.ndarray)
        except OutOfRangeError as error:
            assert "softmax" in node.name.lower() or "Gelu" in node.name, str(error)  # noqa: PT017
            continue
        assert np.abs(fixed - exact).max() < 0.02 * np.abs(exact).max() + 2 * arithmetic.unit, node.name


def test_a_function_that_is_not_emulated_is_refused(monkeypatch):
    monkeypatch.setitem(
        __import__("costmodel.execution.op_functions", fromlist=["FUNCTIONS"]).FUNCTIONS,
        ops.Relu, lambda op, library, weights, source: library.numpy.sin(source),
    )  # fmt: skip
    with pytest.raises(UserError, match=r"no emulated fixed point computes sin; add it to Arithmetic.functions"):
        why_not("semi2k", ops.Relu(rows=1, features=2), row(1.0, 2.0))


@pytest.mark.needs_engine
def test_the_limits_are_those_of_the_engine():
    import jax
    from spu import libspu
    from spu.utils import simulation

    from costmodel.engine.spu_runtime import configuration

    engine = simulation.Simulator(2, configuration("semi2k", EngineSetting()))
    secret = libspu.Visibility.VIS_SECRET

    def under_engine(function, *values):
        arguments = [np.array([value], dtype=np.float32) for value in values]
        names = [f"input{index}" for index in range(len(values))]
        code, _ = programs._code(function, arguments, names, [secret] * len(values))
        executable = libspu.Executable(name="", input_names=names, output_names=["output"], code=code)
        return float(np.asarray(engine(executable, *arguments)).reshape(-1)[0])

    def logistic(x):
        return 1 / (jax.numpy.exp(-x) + 1)

    for function, held, exact, beyond in (
        (jax.numpy.exp, -480.0, 0.0, -600.0),
        (jax.numpy.exp, 17.0, None, 20.0),
        (jax.lax.rsqrt, 2.0**16.9, 2.0**-8.45, 2.0**17.1),
        (lambda x: 1 / x, 2.0**16.9, 2.0**-16.9, 2.0**18.1),
        (logistic, -239.5, 0.0, -256.0),
        (logistic, 480.0, 1.0, 600.0),
    ):
        assert exact is None or under_engine(function, held) == pytest.approx(exact, rel=0.3, abs=1e-4)
        wrong, right = under_engine(function, beyond), float(np.asarray(function(np.float64(beyond))))
        assert abs(wrong - right) > 0.3 * abs(right)
    product = [under_engine(lambda x, y: x * y, side, side) for side in [2.0**12.9] * 20]
    assert product == pytest.approx([2.0**25.8] * 20, rel=1e-3)
    overflowed = [under_engine(lambda x, y: x * y, side, side) for side in [2.0**13.4] * 20]
    assert max(abs(value / 2.0**26.8 - 1) for value in overflowed) > 0.1
