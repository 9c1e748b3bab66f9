"""Checks whether a model stays accurate under protocol `crypten`, in plaintext on its own tokens, before it runs.

Approximations are right only in a range, and each party truncates its share of a product by itself, so
that one in 2^(64 - 2f) / |x| results x with f fraction bits is wrong by 2^(64 - 2f), which ruins the answer. Sums of
squares are divided exactly, but must be below 2^(63 - 2f). Source: Mohassel and Zhang 2017, SecureML, theorem 1, https://eprint.iacr.org/2017/396.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from costmodel import ops
from costmodel.engine.crypten_functions import INVERSE_SCALE, ROOT_SCALE
from costmodel.errors import UserError
from costmodel.execution import interpreter
from costmodel.execution.op_functions import GELU_TANH_CUBIC, LAYERNORM_EPSILON, SOFTMAX_FORMS, Array, numpy_library
from costmodel.ops import Node
from costmodel.protocols.crypten import CryptenSetting
from costmodel.protocols.crypten_primitives import EXPONENTIAL_SQUARINGS, LOGISTIC_ITERATIONS
from nas.conversion.verified_fold import check_tokens
from nas.corpus.corpus import known_corpus
from nas.corpus.tokenizer import given_encoder
from nas.private.setup import Setup
from search_spaces.lower import lower

FRACTION_BITS = (16, 15, 14, 13)  # choices; with fewer, an exponential has too few digits
MOST_WRONG = 0.01  # most expected wrong truncations in a sequence of `NUM_TOKENS`
NUM_TOKENS = 128
EXPONENT = 256.0  # range of `crypten_functions.exponential`
# well within those of `reciprocal` and `inverse_root`, since sums and mean squares of other text are larger
SUMS, SQUARES = (2.0**-12, 2.0**17), (2.0**-12, 2.0**17)
TRUNCATED = (ops.Rotary, ops.Temperature)  # local ops that multiply by public numbers


class Reach(NamedTuple):
    """The reach of an op's numbers: `least` and `most` of what is approximated, which must be within `bounds`.

    `truncated` is the sum of the magnitudes of all products that the op truncates, `summed` the largest sum of squares.
    """

    truncated: float
    what: str = ""
    least: float = 0.0
    most: float = 0.0
    bounds: tuple[float, float] = (0.0, np.inf)
    summed: float = 0.0

    @property
    def holds(self) -> bool:
        return self.bounds[0] <= self.least and self.most <= self.bounds[1]


def with_precision(setup: Setup, fraction_bits: int | None) -> Setup:
    """Return the set-up with the most fraction bits that its model allows; unchanged if its weights are elsewhere.

    `fraction_bits` are those that the user asks for. Raise UserError if the model allows none, naming layer and value.
    """
    model, architecture = setup.model, setup.model.architecture
    if not isinstance(setup.setting, CryptenSetting) or model.weights is None:
        return setup
    length = min(NUM_TOKENS, architecture.context)
    begin = given_encoder(model.tokenizer, None, None).begin
    _, tokens = check_tokens(known_corpus(model.corpus), architecture.vocab_size, length, begin)
    graph = lower(architecture, length)
    values = interpreter.values(graph, model.weights, tokens[0])
    reaches = {node.name: _reach(node, values) for node in graph}
    for name, reach in reaches.items():
        if not reach.holds:
            raise UserError(
                f"the model must hold under protocol crypten, but in {name} {reach.what} are from {reach.least:.3g} to "
                f"{reach.most:.3g}, not within {reach.bounds[0]:.3g} and {reach.bounds[1]:.3g}; choose protocol semi2k "
                f"or aby3."
            )
    total = sum(reach.truncated for reach in reaches.values())
    highest = max(reaches, key=lambda name: reaches[name].summed)
    choices = FRACTION_BITS if fraction_bits is None else (fraction_bits,)
    for bits in choices:
        fits = reaches[highest].summed < 2.0 ** (63 - 2 * bits)
        if fits and total * 2.0 ** (2 * bits - 64) <= MOST_WRONG:
            return replace(setup, setting=replace(setup.setting, fraction_bits=bits))
    worst = max(reaches, key=lambda name: reaches[name].truncated)
    wrong = total * 2.0 ** (2 * choices[-1] - 64)
    why = (
        f"{wrong:.2g} truncations in {length} tokens would be wrong, most in {worst}, where products sum to "
        f"{reaches[worst].truncated:.3g}"
        if fits
        else f"squares in {highest} sum to {reaches[highest].summed:.3g}, not below 2^{63 - 2 * choices[-1]}"
    )
    raise UserError(
        f"the model must hold under protocol crypten with {choices[-1]} fraction bits, but {why}; lower "
        f"--fraction-bits, or choose protocol semi2k or aby3."
    )


def _reach(node: Node, values: Mapping[str, Array]) -> Reach:
    sources = [values[name] for name in node.inputs if name in values]
    output = _sum(values[node.name])
    function = REACHES.get(type(node.op))
    if function is None:
        return Reach(0.0 if node.op.is_local and not isinstance(node.op, TRUNCATED) else output)
    return function(node.op, output, *sources)


def _sum(value: Array) -> float:
    return float(np.abs(value).sum())


def _norm(op: ops.LayerNorm | ops.RmsNorm, output: float, source: Array) -> Reach:
    centred = source - source.mean(axis=-1, keepdims=True) if isinstance(op, ops.LayerNorm) else source
    groups, epsilon = (1, LAYERNORM_EPSILON) if isinstance(op, ops.LayerNorm) else (op.groups, op.epsilon)
    sums = np.square(centred).reshape(op.rows, groups, -1).sum(axis=-1)
    means = sums / (op.features // groups) + epsilon
    least, most = float(means.min()), float(means.max())
    return Reach((ROOT_SCALE + 1) * output, "mean squares", least, most, SQUARES, summed=float(sums.max()))


def _softmax(op: ops.Softmax, output: float, scores: Array) -> Reach:
    seen = np.tri(op.queries, op.keys, op.keys - op.queries if op.causal else op.keys, dtype=bool)
    seen = np.broadcast_to(seen, scores.shape)
    highest = np.where(seen, scores, -np.inf).max(axis=-1, keepdims=True)
    exponents = np.where(seen, scores - (0.0 if op.form == "bounded" else highest), 0.0)
    positive, offset = SOFTMAX_FORMS[op.form](numpy_library(), seen, scores)
    sums = np.where(seen, positive, 0.0).sum(axis=-1) + offset
    products_of: dict[str, Callable[[], float]] = {
        "exact": lambda: _squared_exponentials(exponents),
        "bounded": lambda: _squared_exponentials(exponents),
        "relu": lambda: 0.0,
        "2quad": lambda: _sum(positive * seen),
        "power8": lambda: sum(_sum(scores**power * seen) for power in (2, 4, 8)),
    }
    truncated = products_of[op.form]() + INVERSE_SCALE * (sums.size + _sum(1 / sums) + output)
    if op.form == "exact":
        return Reach(truncated, "distances of scores", 0.0, float(-exponents.min()), (0.0, EXPONENT))
    return Reach(truncated, "sums of rows", float(sums.min()), float(sums.max()), SUMS)


def _squared_exponentials(exponents: Array) -> float:
    """Return the sum of the numbers that `crypten_functions.exponential` squares, and of the last results."""
    return sum(_sum(np.exp(exponents / 2**squarings)) for squarings in range(EXPONENTIAL_SQUARINGS + 1))


def _logistic(op: Any, output: float, source: Array, factor: float = 1.0) -> Reach:
    """Return the reach of an op that takes the exponential of `factor` times its input."""
    sizes = np.abs(source) * factor
    steps = _squared_exponentials(-sizes) + 2 * LOGISTIC_ITERATIONS * source.size
    return Reach(steps + output, "magnitudes", 0.0, float(sizes.max()), (0.0, EXPONENT))


def _gelu(op: ops.Gelu, output: float, source: Array) -> Reach:
    if op.form != "tanh":
        return Reach(sum(_sum(source**power) for power in (2, 3, 4, 6)) + output)
    inner = (2 / np.pi) ** 0.5 * (source + GELU_TANH_CUBIC * source**3)
    steps = _squared_exponentials(-2 * np.abs(inner)) + 2 * LOGISTIC_ITERATIONS * source.size
    return Reach(steps + output + 2 * _sum(np.square(source)) + 2 * _sum(inner))


# op type -> its reach, unless that depends only on its output
REACHES: dict[type, Callable[..., Reach]] = {
    ops.LayerNorm: _norm,
    ops.RmsNorm: _norm,
    ops.Softmax: _softmax,
    ops.Sigmoid: _logistic,
    ops.Silu: _logistic,
    ops.Tanh: partial(_logistic, factor=2.0),
    ops.Gelu: _gelu,
    ops.Relu: lambda op, output, source: Reach(0.0),
    ops.VocabProjection: lambda op, output, source: Reach(output / op.rows),  # a token of an answer takes one row
}
