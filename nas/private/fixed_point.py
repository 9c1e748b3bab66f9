"""Perplexity of a model in fixed point, on validation tokens by teacher forcing, privately and in plaintext."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from costmodel.config.units import format_seconds
from costmodel.engine.greedy import Agreement, ClearRun, compared, joined, run_step
from costmodel.engine.plan import Plan, graphs, predictions
from costmodel.engine.session import on_this_machine
from costmodel.errors import StoppedError, UserError
from costmodel.execution.interpreter import Array
from costmodel.protocols.primitives import EngineSetting
from nas.corpus.corpus import Corpus, known_corpus, prepare
from nas.corpus.documents import GivenTokenizer
from nas.corpus.sequences import gather, held_out_targets
from nas.corpus.tokenizer import given_encoder
from nas.private.answer import agreement_document, difference
from nas.private.setup import Setup, describe_setting, setup_document
from search_spaces.architecture import gelu_form

DEFAULT_DATA = "stdlib"  # validation text of a model whose corpus is not known
LONGEST = 128  # tokens of a sequence; costs grow with its square
ACCURACY = ("perplexity", "top-1 as in the clear", "95 % interval", "largest error")  # columns

Tokens = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Results on validation tokens in a setting; costs are summed over sequences, and bytes also over parties.

    predicted_s: predicted seconds; None if the committed testbed was measured in another setting.
    """

    perplexity: float
    agreement: Agreement
    sent_bytes: int
    predicted_bytes: int
    seconds: float
    predicted_s: float | None


# By setting, in order: the results, or the reason why the model cannot run in it.
Scores: TypeAlias = Mapping[EngineSetting, Scored | str]


def corpus_for(
    tokenizer: GivenTokenizer, fingerprint: str | None, data: str | None, *, vocab_size: int, context: int
) -> Corpus:
    """Return the corpus `data`; for None, the one with `fingerprint` if it is in the cache, else DEFAULT_DATA.

    tokenizer, vocab_size, context: the model's. Raise errors as `prepare`.
    """
    if data is None and (known := known_corpus(fingerprint)) is not None:
        return replace(known, begin_of_text=given_encoder(tokenizer, vocab_size, None).begin)
    return prepare(data or DEFAULT_DATA, vocab_size, seq_len=min(context, LONGEST), tokenizer=tokenizer)


def validation_sequences(corpus: Corpus, num_tokens: int, context: int) -> Tokens:
    """Return about `num_tokens` validation tokens, sequences x (length + 1): the last of each is only a target.

    The sequences are spread over documents. `length` is at most LONGEST, or that of the corpus if it is cut into
    sequences. Raise UserError if the split is too small.
    """
    length = corpus.chunk_len or min(context, num_tokens, LONGEST)
    return gather(corpus, "validation", held_out_targets(corpus, length, num_tokens).indices, length)


def clear_perplexity(setup: Setup, tokens: Tokens) -> float:
    """Return the model's perplexity in plaintext and double precision. tokens: sequences x (length + 1)."""
    (graph,) = graphs(replace(setup, client_layers=None).graph_of, _plan(tokens))
    assert setup.model.weights is not None
    clear = ClearRun(setup.model.weights)
    return _perplexity([_losses(clear.output(graph, row[:-1]), row[1:]) for row in tokens])


def score_setting(setup: Setup, tokens: Tokens, on_sequence: Callable[[int], None]) -> Scored | str:
    """Run all parties on this machine, and return the results of a model in a setting, or the reason why it cannot run.

    tokens: sequences x (length + 1). on_sequence: called with the index of each finished sequence.
    """
    plan = _plan(tokens)
    (graph,) = graphs(setup.graph_of, plan)
    assert setup.model.weights is not None
    clear, own = ClearRun(setup.model.weights), setup.own_layers(plan)
    losses, agreements, sent_bytes, seconds = [], [], 0, 0.0
    try:
        predicted = predictions([graph] * len(tokens), setup.protocol, setup.setting, setup.network)
        with on_this_machine(setup.client(plan)) as session:
            for index, row in enumerate(tokens):
                run, expected = run_step(session, 0, graph, row[:-1], clear, own)
                losses.append(_losses(run.logits, row[1:]))
                agreements.append(compared(run.logits, expected))
                sent_bytes, seconds = sent_bytes + run.sent_bytes, seconds + run.seconds
                on_sequence(index)
            session.leave()
    except (UserError, StoppedError) as error:
        return str(error)
    known = [step.seconds for step in predicted if step.seconds is not None]
    return Scored(
        perplexity=_perplexity(losses),
        agreement=joined(agreements),
        sent_bytes=sent_bytes,
        predicted_bytes=sum(step.sent_bytes for step in predicted),
        seconds=seconds,
        predicted_s=sum(known) if len(known) == len(predicted) else None,
    )


def _plan(tokens: Tokens) -> Plan:
    return Plan(kind="sequences", num_tokens=tokens.shape[1] - 1)


def _losses(logits: Array, targets: Tokens) -> Array:
    """Return the loss of every token, in nats; `logits` are tokens x vocab."""
    logits = np.asarray(logits, dtype=np.float64)
    largest = logits.max(axis=-1)
    total = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=-1))
    return total - logits[np.arange(len(targets)), targets.astype(np.int64)]


def _perplexity(losses: list[Array]) -> float:
    mean = float(np.concatenate(losses).mean())
    return math.exp(mean) if mean < math.log(1e300) else math.inf


def fixed_point_table(setup: Setup, clear: float, scores: Scores, tokens: Tokens) -> Table:
    """Return a table with a row for the model in plaintext, and one for each setting in which it runs.

    clear: perplexity in plaintext. tokens: the scored sequences, sequences x (length + 1).
    """
    count, length = len(tokens), tokens.shape[1] - 1
    title = f"{count * length:,} validation tokens by teacher forcing, {count} sequences of {length}"
    table = Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False)
    table.add_column("arithmetic", no_wrap=True)
    for name in (*ACCURACY, "bytes as predicted", "seconds", "predicted"):
        table.add_column(name, justify="right")
    table.add_row("in the clear", f"{clear:.4f}")
    for setting, score in scores.items():
        if isinstance(score, Scored):
            low, high = score.agreement.interval
            table.add_row(
                f"{setup.protocol}, {describe_setting(setting)}",
                f"{score.perplexity:.4f}",
                f"{score.agreement.top1:.2%}",
                f"{low:.2%} to {high:.2%}",
                f"{score.agreement.largest_error:.2g}",
                difference(score.predicted_bytes, score.sent_bytes),
                format_seconds(score.seconds),
                "?" if score.predicted_s is None else format_seconds(score.predicted_s),
            )
    return table


def lines_below(setup: Setup, scores: Scores) -> list[str]:
    """Return a line for each setting in which the model cannot run.

    Under SPU, if a layer computes GELU by tanh, another line states the error of that approximation.
    """
    lines = [
        f"not run: {setup.protocol}, {describe_setting(setting)}: {reason}"
        for setting, reason in scores.items()
        if isinstance(reason, str)
    ]
    architecture = setup.model.architecture
    if setup.protocol != "crypten" and any(gelu_form(architecture, layer) == "tanh" for layer in architecture.layers):
        lines.append(
            "the engine's tanh is off by up to 0.005, and GELU by tanh, beyond inputs of 5, by 0.0013 times the input; "
            "with --gelu exact GELU is off by less than 0.001, and more is sent"
        )
    return lines


def fixed_point_document(setup: Setup, clear: float, scores: Scores, tokens: Tokens) -> dict[str, Any]:
    """Return the results as JSON data. In each setting, `reason` is null if the model ran; else the results are null.

    A perplexity that is not finite, for example because logits overflowed, is null as well.
    """
    arithmetics = []
    for setting, score in scores.items():
        scored, reason = (None, score) if isinstance(score, str) else (score, None)
        arithmetics.append(
            {
                "ring_bits": setting.ring_bits,
                "fraction_bits": setting.fraction_bits,
                "reason": reason,
                "perplexity": scored.perplexity if scored and math.isfinite(scored.perplexity) else None,
                "agreement": scored and agreement_document(scored.agreement),
                "measured": scored and {"sent_bytes": scored.sent_bytes, "latency_s": scored.seconds},
                "predicted": scored and {"sent_bytes": scored.predicted_bytes, "latency_s": scored.predicted_s},
            }
        )
    return {
        **setup_document(setup),
        "sequences": len(tokens),
        "seq_len": tokens.shape[1] - 1,
        "clear_perplexity": clear if math.isfinite(clear) else None,
        "arithmetics": arithmetics,
    }
