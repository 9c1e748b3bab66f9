"""What is left of a model in fixed point: validation tokens by teacher forcing, privately and in the clear.

Of the builtin parent (12 layers, LayerNorm, GELU by tanh), `python -m nas.private builtin --perplexity 2048`, semi2k:
perplexity 7.375 in the clear and 7.378 privately, top-1 as in the clear on 98.4 % (97.8 to 98.9 %), logits off by up to
0.46. Most of that is the engine's tanh (`tests/costmodel/engine/test_gelu_forms.py`): with `--gelu exact` 7.375, 99.3 %
(98.8 to 99.6 %) and 0.14.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from costmodel.errors import StoppedError, UserError
from costmodel.execution.interpreter import Array
from costmodel.generation.agreement import Agreement, compared, joined
from costmodel.generation.clear import ClearRun
from costmodel.generation.greedy import sequences
from costmodel.generation.plan import Plan
from costmodel.generation.session import loopback_addresses, on_loopback
from costmodel.protocols.primitives import EngineSetting
from nas.private.answer import meeting
from nas.private.setup import Setup
from nas.private.validation import Tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Validation tokens under one arithmetic; costs are summed over them, bytes and messages over parties too.

    predicted_s: None where the committed testbed has no seconds for the setting.
    """

    setting: EngineSetting
    perplexity: float
    agreement: Agreement
    sent_bytes: int
    predicted_bytes: int
    seconds: float
    predicted_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Unscored:
    """An arithmetic that the model cannot be run in, and why."""

    setting: EngineSetting
    reason: str


def clear_perplexity(setup: Setup, tokens: Tokens) -> float:
    """Of the model in double precision. tokens: sequences x (length + 1)."""
    (graph,) = setup.steps(_plan(tokens))
    clear = _clear(setup)
    return _perplexity([_losses(clear.logits(graph, each[:-1]), each[1:]) for each in tokens])


def score(setup: Setup, tokens: Tokens, on_sequence: Callable[[int, int], None]) -> Scored | Unscored:
    """The model in a setting, on parties of this machine. tokens: sequences x (length + 1)."""
    plan = _plan(tokens)
    (graph,) = setup.steps(plan)
    losses, agreements, sent_bytes, seconds = [], [], 0, 0.0
    try:
        predicted = setup.predicted([graph] * len(tokens))
        client = setup.client(plan, loopback_addresses(setup.protocol))
        with meeting(on_loopback(client)) as (session, _):
            done = sequences(session, graph, [each[:-1] for each in tokens], _clear(setup))
            for index, (ours, each) in enumerate(zip(done, tokens, strict=True)):
                losses.append(_losses(ours.cost.logits, each[1:]))
                agreements.append(compared(ours.cost.logits, ours.clear))
                sent_bytes, seconds = sent_bytes + ours.cost.sent_bytes, seconds + ours.cost.seconds
                on_sequence(index, len(tokens))
            session.leave()
    except (UserError, StoppedError) as error:
        return Unscored(setting=setup.setting, reason=str(error))
    known = [each.seconds for each in predicted if each.seconds is not None]
    return Scored(
        setting=setup.setting,
        perplexity=_perplexity(losses),
        agreement=joined(agreements),
        sent_bytes=sent_bytes,
        predicted_bytes=sum(each.sent_bytes for each in predicted),
        seconds=seconds,
        predicted_s=sum(known) if len(known) == len(predicted) else None,
    )


def _plan(tokens: Tokens) -> Plan:
    return Plan(kind="sequences", num_tokens=tokens.shape[1] - 1)


def _clear(setup: Setup) -> ClearRun:
    assert setup.model.weights is not None
    return ClearRun(setup.model.weights)


def _losses(logits: Array, targets: Tokens) -> Array:
    """Of every token, in nats. logits: tokens x vocab."""
    logits = np.asarray(logits, dtype=np.float64)
    largest = logits.max(axis=-1)
    total = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=-1))
    return total - logits[np.arange(len(targets)), targets.astype(np.int64)]


def _perplexity(losses: list[Array]) -> float:
    mean = float(np.concatenate(losses).mean())
    return math.exp(mean) if mean < math.log(1e300) else math.inf
