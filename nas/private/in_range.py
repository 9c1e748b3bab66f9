"""Checks before a private run that the engine's fixed point holds the model, and the client's own prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from costmodel.deployment.deploy import Deployment
from costmodel.engine.greedy import ClearRun, ClientLayers
from costmodel.errors import OutOfRangeError, UserError
from costmodel.execution.arithmetic import Arithmetic, arithmetic_of
from costmodel.execution.interpreter import Array
from costmodel.ops import OpGraph
from nas.conversion.fixed_point_check import NUM_TOKENS, both, check_sequences, fitting, require_accuracy
from nas.corpus.corpus import known_corpus
from nas.corpus.tokenizer import given_encoder
from nas.private.setup import Setup, client_graph


def in_range(setup: Setup, fraction_bits: int | None, *, is_allowed: bool) -> Setup:
    """Return the set-up with fraction bits that keep its model in fixed-point range, or with the reason why none do.

    fraction_bits: the user's choice, if any. is_allowed: whether a model out of range may run. If the weights are on
        another machine, an export's own record decides; without a record, the server alone checks, and the parties
        agree on that.
    Raise UserError, naming op and values, for a model that is out of range and not allowed.
    """
    model = setup.model
    try:
        if model.weights is None:
            return _folded(_as_recorded(setup, fraction_bits))
        length = min(NUM_TOKENS, model.architecture.context)
        begin = given_encoder(model.tokenizer, None, None).begin
        sequences = check_sequences(model.weights["embed.weight"], known_corpus(model.corpus), length, begin)
        inputs_of = None if setup.client_layers is None else lambda *of: _stream(setup, length, *of)
        setting = fitting(
            setup.protocol, setup.setting, setup.graph_of, model.weights, sequences,
            fraction_bits=fraction_bits, inputs_of=inputs_of,
        )  # fmt: skip
        return _folded(replace(setup, setting=setting))
    except OutOfRangeError as error:
        return _out_of_range(setup, error, is_allowed=is_allowed)


def _folded(setup: Setup) -> Setup:
    """Return the set-up, of a model that folding did not change; if an op is out of range too, that says more."""
    if setup.model.failed is not None:
        raise OutOfRangeError(setup.model.failed)
    return setup


def _as_recorded(setup: Setup, fraction_bits: int | None) -> Setup:
    recorded = setup.model.recorded.get(setup.protocol)
    if not isinstance(recorded, Mapping) or setup.setting.ring_bits != recorded.get("ring_bits"):
        return setup
    if (failure := recorded.get("failure")) is not None:
        raise OutOfRangeError(str(failure))
    bits = recorded.get("fraction_bits")
    if fraction_bits is not None or not isinstance(bits, int):
        return setup
    return replace(setup, setting=replace(setup.setting, fraction_bits=bits))


def _out_of_range(setup: Setup, error: OutOfRangeError, *, is_allowed: bool) -> Setup:
    if is_allowed:
        return replace(setup, out_of_range=str(error))
    raise UserError(
        f"the model must hold in the fixed point of protocol {setup.protocol}, but {error}; choose another protocol or "
        f"model, or run it for study with --allow-out-of-range true."
    ) from None


def _stream(setup: Setup, length: int, tokens: Array, deployment: Deployment) -> Mapping[str, Array]:
    """Return the hidden states after the client's own layers."""
    assert setup.client_layers is not None
    assert setup.client_weights is not None
    graph = client_graph(setup.model.architecture, setup.client_layers, length, deployment)
    return ClientLayers(graphs=(graph,), run=ClearRun(setup.client_weights)).stream(0, tokens)


def prompt_arithmetic(
    setup: Setup, graph: OpGraph, tokens: Sequence[int], layers: ClientLayers | None
) -> Arithmetic | None:
    """Check the prompt of a client that has weights; return the arithmetic to check each new token with, if any.

    Raise UserError, naming op and values, if the prompt is out of range.
    """
    if setup.model.weights is None or setup.out_of_range is not None:
        return None
    ids, arithmetic = np.asarray(tokens), arithmetic_of(setup.protocol, setup.setting)
    inputs = {"tokens": ids} if layers is None else layers.stream(0, ids)
    try:
        require_accuracy(both(graph, setup.model.weights, inputs, arithmetic))
    except OutOfRangeError as error:
        raise UserError(
            f"the prompt must hold in the fixed point of protocol {setup.protocol}, but {error}; choose another prompt "
            f"or protocol, or run it for study with --allow-out-of-range true."
        ) from None
    arithmetic.wrong.clear()
    return arithmetic
