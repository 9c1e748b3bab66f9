"""Check in plaintext, before a private run, whether an engine's fixed point has enough range and digits for a model.

Sequences of tokens pass through the op graph in double precision and in the emulated fixed point
(`costmodel.execution.arithmetic`): a text, random tokens, and the tokens with the largest and smallest embeddings.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from costmodel import ops
from costmodel.deployment.deploy import Deployment
from costmodel.errors import OutOfRangeError
from costmodel.execution import interpreter
from costmodel.execution.arithmetic import Arithmetic
from costmodel.execution.engine_arithmetic import arithmetic_of
from costmodel.execution.memory import last_readers
from costmodel.execution.op_functions import Array, Weights, evaluate, numpy_library
from costmodel.ops import OpGraph
from costmodel.protocols.formulas import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import EngineSetting
from nas.conversion.verified_fold import MARGIN, Tokens, check_tokens
from nas.corpus.corpus import Corpus
from nas.corpus.tokenizer import BeginOfText
from search_spaces.architecture import Architecture
from search_spaces.lower import lower

NUM_TOKENS = 128  # of a sequence
SEEDS = (1, 2)  # of random sequences
REPEATED = 16  # times that each token comes in a row, in one of the sequences of extreme tokens
EXTREME = 2  # sequences of extreme tokens, which no text may have, so that their range counts but not their accuracy
MAX_ERROR = 0.1  # of a logit, relative to the largest
MIN_AGREEMENT = 0.9  # share of positions with at most that error and the same most likely token
ENOUGH = 30  # positions; with fewer, the share is not checked


class Both(NamedTuple):
    """Outputs of a graph in double precision and in fixed point, and the node where the relative error grows most."""

    exact: Array
    fixed: Array
    worst: str


def check_sequences(table: Array, corpus: Corpus | None, length: int, begin: BeginOfText | None = None) -> Tokens:
    """Return the tokens of 5 sequences to check a model on, 5 x length.

    The first is validation text, the next two are random, and the last two have the tokens with the largest and
    smallest embeddings. Without a corpus with enough validation text, the first is random too. table: embedding table,
    vocab x features. length: at most FIXED_POSITIONS. begin: the token that begins sequences without a corpus, or None.
    """
    _, text = check_tokens(corpus, len(table), length, begin)
    random = [np.random.default_rng(seed).integers(len(table), size=length) for seed in SEEDS]
    extreme = np.resize(_extreme(table, max(1, length // 4)), length)
    drawn = np.stack([*random, extreme, extreme[: -(-length // REPEATED)].repeat(REPEATED)[:length]])
    if begin := begin if corpus is None else corpus.begin_of_text:
        drawn[:, 1:] = drawn[:, :-1].copy()
        begin.set_in(drawn)
    return np.concatenate([text[:1], drawn])


def _extreme(table: Array, few: int) -> list[int]:
    """Return indices of rows with the largest or smallest numbers: `few` by each of four measures, extremes first."""
    squares = np.square(table).mean(axis=-1)
    ranks = (-np.abs(table).max(axis=-1), -squares, squares, table.var(axis=-1))
    return list(dict.fromkeys(np.stack([np.argsort(rank)[:few] for rank in ranks], axis=1).flat))


def fitting(
    protocol: str,
    setting: EngineSetting,
    graph_of: Callable[[int, Deployment], OpGraph],
    weights: Weights,
    sequences: Tokens,
    *,
    fraction_bits: int | None = None,
    inputs_of: Callable[[Array, Deployment], Mapping[str, Array]] | None = None,
) -> EngineSetting:
    """Return the setting with the most fraction bits that keep a model within range and its logits accurate.

    graph_of: returns the op graph of a number of tokens in a deployment. sequences: result of `check_sequences`.
    fraction_bits: the only number to try; None for those that the protocol lists or, if it lists none, the setting's.
    inputs_of: returns the graph's inputs for given tokens in a deployment; None if the tokens are the only input.
    Raises OutOfRangeError, naming op and values, if no number of bits suffices, or fewer bits would not help.
    """
    num_sequences, length = sequences.shape
    batch = Deployment(batch=num_sequences)
    graph, tokens, table = graph_of(length, batch), sequences.T.reshape(-1), weights.get("position.weight")
    if table is not None and len(table) > length:  # the extreme positions beyond the length are the last within it
        table = table.copy()
        late = _extreme(table[length:], length // 8)[: length // 2]
        table[length - len(late) : length] = table[length:][late]
        weights = {**weights, "position.weight": table}
    inputs = {"tokens": tokens} if inputs_of is None else inputs_of(tokens, batch)
    choices = ENGINE_PROTOCOLS[protocol].fraction_bits or (setting.fraction_bits,)
    choices = choices if fraction_bits is None else (fraction_bits,)
    for bits in choices:
        chosen = replace(setting, fraction_bits=bits)
        arithmetic = arithmetic_of(protocol, chosen, margin=MARGIN, num_sequences=num_sequences, num_extreme=EXTREME)
        try:
            runs = both(graph, weights, inputs, arithmetic)
            exact, fixed = (
                logits.reshape(length, num_sequences, -1)[:, :-EXTREME] for logits in (runs.exact, runs.fixed)
            )
            require_accuracy(runs._replace(exact=exact, fixed=fixed))
            return chosen
        except OutOfRangeError as error:
            if not error.with_fewer_bits or bits == choices[-1]:
                raise OutOfRangeError(f"with {bits} fraction bits, {error}") from None
    raise AssertionError("one of the choices returns or raises")


def recorded(architecture: Architecture, weights: Mapping[str, Array], corpus: Corpus | None) -> dict[str, Any]:
    """Return an export's record by protocol: `ring_bits`, `fraction_bits` and `failure`.

    `failure`: why numbers leave the range or results are too inaccurate; None if neither is so.
    """
    sequences = check_sequences(weights["embed.weight"], corpus, min(NUM_TOKENS, architecture.context))
    of_engines: dict[str, dict[str, Any]] = {}
    for protocol, facts in ENGINE_PROTOCOLS.items():
        if facts.engine not in of_engines:
            setting, failure = facts.setting(), None
            try:
                setting = fitting(protocol, setting, partial(lower, architecture), weights, sequences)
            except OutOfRangeError as error:
                failure = str(error)
            bits = {"ring_bits": setting.ring_bits, "fraction_bits": setting.fraction_bits}
            of_engines[facts.engine] = {**bits, "failure": failure}
    return {protocol: dict(of_engines[facts.engine]) for protocol, facts in ENGINE_PROTOCOLS.items()}


def both(graph: OpGraph, weights: Weights, inputs: Mapping[str, Array], arithmetic: Arithmetic) -> Both:
    """Return the outputs of a graph in double precision and in emulated fixed point. inputs: arrays by name.

    Raises OutOfRangeError at the first op whose numbers leave the range, or if too many results are expected wrong.
    """
    exact, fixed, errors = dict(inputs), dict(inputs), dict.fromkeys(inputs, 0.0)
    spent, library = last_readers(graph.nodes), numpy_library()
    with np.errstate(all="ignore"):  # what is not finite is out of range
        for node in graph:
            operands = interpreter.operands(node, weights)
            sources = [exact[name] for name in node.inputs]
            is_table = isinstance(node.op, ops.TokenEmbedding)
            output = operands["weight"][sources[0]] if is_table else evaluate(node.op, library, operands, *sources)
            exact[node.name] = output
            fixed[node.name] = arithmetic.evaluate(node, operands, *(fixed[name] for name in node.inputs))
            errors[node.name] = _relative_error(fixed[node.name].view(np.ndarray), output)
            for name in spent[node.name]:
                del exact[name], fixed[name]
    arithmetic.check_wrong()
    grown = {node.name: errors[node.name] - max(errors[name] for name in node.inputs) for node in graph}
    last = graph.nodes[-1].name
    return Both(exact[last], fixed[last].view(np.ndarray), max(grown, key=lambda name: grown[name]))


def _relative_error(fixed: Array, exact: Array) -> float:
    largest = float(np.abs(exact).max())
    return float(np.abs(fixed - exact).max()) / largest if largest else 0.0


def require_accuracy(runs: Both) -> None:
    """Raise OutOfRangeError if logits, ... x vocab, are too inaccurate in fixed point.

    They may be off by MAX_ERROR of the largest logit of all positions, and a share of at least MIN_AGREEMENT of the
    positions must be right: logits off by MAX_ERROR of the position's largest at most, and the same most likely token.
    With fewer than ENOUGH positions, the share is not checked.
    """
    error, largest = _relative_error(runs.fixed, runs.exact), np.abs(runs.exact).max(axis=-1)
    same = runs.exact.argmax(axis=-1) == runs.fixed.argmax(axis=-1)
    same &= np.abs(runs.fixed - runs.exact).max(axis=-1) <= MAX_ERROR * largest
    if not (error <= MAX_ERROR and (same.mean() >= MIN_AGREEMENT or same.size < ENOUGH)):
        raise OutOfRangeError(
            f"logits are off by {error:.2g} of the largest (at most {MAX_ERROR}) and {same.mean():.0%} of the "
            f"positions are right (at least {MIN_AGREEMENT:.0%}), mostly because of {runs.worst}"
        )
