"""Answers one prompt privately, and reports every token and its cost, as lines and as data."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from costmodel.config.units import format_bytes, format_seconds
from costmodel.engine.agreement import Agreement, joined
from costmodel.engine.assignment import Assignment
from costmodel.engine.greedy import ClearRun, PrivateToken, generate
from costmodel.engine.plan import Plan
from costmodel.engine.predicted import Prediction
from costmodel.engine.session import Ready, Session
from costmodel.errors import OutOfRangeError, StoppedError
from nas.conversion.fixed_point_check import MAX_ERROR
from nas.private.in_range import prompt_arithmetic
from nas.private.prompt import Prompt
from nas.private.setup import Setup, setup_document

COLUMNS = ("token", "top-1", "error", "sent bytes", "predicted", "messages", "predicted", "seconds", "predicted")
WIDTHS = (16, 5, 8, 15, 15, 9, 9, 8, 9)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Answer:
    """A prompt, and its new tokens with the prediction of each. `agreement` is None without the model in plaintext."""

    prompt: Prompt
    tokens: tuple[tuple[PrivateToken, Prediction], ...]
    ready: Ready

    @property
    def text(self) -> str:
        return self.prompt.continued([token.token for token, _ in self.tokens])

    @property
    def agreement(self) -> Agreement | None:
        parts = [token.agreement for token, _ in self.tokens if token.agreement is not None]
        return joined(parts) if parts else None


def answer(
    setup: Setup,
    prompt: Prompt,
    new_tokens: int,
    parties: Callable[[Assignment], AbstractContextManager[tuple[Session, Ready]]],
    on_ready: Callable[[Ready], None],
    on_token: Callable[[PrivateToken, Prediction], None],
) -> Answer:
    """Answer a prompt with the parties that `parties` starts: all on this machine, or only the client.

    Raise UserError before anything runs if the run cannot be priced or the prompt is out of range; StoppedError if a
    later token is out of range; and any error that `parties` raises.
    """
    plan = Plan(kind="tokens", num_tokens=len(prompt.ids), num_new=new_tokens)
    steps = setup.steps(plan)
    predicted = setup.predicted(steps)
    own = setup.own_layers(plan)
    arithmetic = prompt_arithmetic(setup, steps[0], prompt.ids, own)
    clear = None if setup.model.weights is None else ClearRun(setup.model.weights, arithmetic)
    tokens: list[tuple[PrivateToken, Prediction]] = []
    with parties(setup.client(plan)) as (session, ready):
        on_ready(ready)
        answered = generate(session, steps, prompt.ids, clear, prompt.end, own)
        try:
            for token, expected in zip(answered, predicted, strict=False):
                on_token(token, expected)
                tokens.append((token, expected))
                if token.token in prompt.encoder.ends:
                    break
        except OutOfRangeError as error:
            raise StoppedError(
                f"the answer left the range of protocol {setup.protocol} after {len(tokens)} tokens: {error}; the "
                f"tokens before are right, and --allow-out-of-range true goes on."
            ) from None
        session.leave()
    return Answer(prompt=prompt, tokens=tuple(tokens), ready=ready)


def ready_lines(ready: Ready, prompt: Prompt) -> list[str]:
    return [
        f"prompt: {len(prompt.ids)} tokens; {ready.num_steps} steps, op graph {ready.op_graph} at every party",
        f"ready after {format_seconds(ready.seconds)}; sent beside the protocol, and not counted below: programs and "
        f"weights' shares, {format_bytes(ready.shared_bytes)}; with each token its shares and those of the logits",
        "top-1, error: whether the model in the clear prefers the same token, and the largest error of a logit",
        _row(COLUMNS),
    ]


def token_line(setup: Setup, prompt: Prompt, token: PrivateToken, expected: Prediction) -> str:
    agreement, cost = token.agreement, token.cost
    return _row(
        (
            repr(prompt.decoded([token.token])),
            "?" if agreement is None else "same" if agreement.num_equal else "other",
            "?" if agreement is None else f"{agreement.largest_error:.2g}",
            f"{cost.sent_bytes:,}",
            f"{expected.sent_bytes:,}",
            f"{cost.messages:,}",
            f"{expected.messages:,}",
            f"{cost.seconds:.2f}",
            "?" if expected.seconds is None else f"{expected.seconds:.2f}",
        )
    ) + ("" if setup.out_of_range is None else "  out of range")


def _row(cells: Sequence[str]) -> str:
    first, *rest = cells
    width, *widths = WIDTHS
    return "  ".join([f"{first:<{width}}", *(f"{cell:>{size}}" for cell, size in zip(rest, widths, strict=True))])


def summary_lines(setup: Setup, answer: Answer) -> list[str]:
    """Return lines on all tokens together."""
    measured, predicted = _costs(answer.tokens).values()
    peaks = ["not known" if peak is None else format_bytes(peak) for peak in measured["peak_bytes"]]
    seconds = predicted["latency_s"] and f"predicted {format_seconds(predicted['latency_s'])}"
    return [
        f"text: {answer.text!r}",
        f"{len(answer.tokens)} tokens: {agreement_text(answer.agreement)}",
        f"sent by all parties: {measured['sent_bytes']:,} bytes, predicted {predicted['sent_bytes']:,} "
        f"({difference(predicted['sent_bytes'], measured['sent_bytes'])}); messages: {measured['messages']:,}, "
        f"predicted {predicted['messages']:,}",
        f"seconds: {format_seconds(measured['latency_s'])}, {seconds or 'not predicted'} on {setup.network.name}",
        f"memory, by party: at most {', '.join(peaks)}",
    ]


def why_wrong(answer: Answer) -> str | None:
    """Return why an answer is not that of the model in plaintext; None if it is, or nothing is known."""
    agreement = answer.agreement
    if agreement is None:
        return None
    if (num_other := agreement.num_positions - agreement.num_equal) > 0:
        return f"private tokens must be those of the model in plaintext, but {num_other} of {len(answer.tokens)} differ"
    if not agreement.largest_share <= MAX_ERROR:
        return (
            f"private logits must be within {MAX_ERROR} of the largest of those in plaintext, but are off by "
            f"{agreement.largest_share:.2g} of it"
        )
    return None


def agreement_text(agreement: Agreement | None) -> str:
    """Return, in words, the share of equal tokens with its interval, and the largest error."""
    if agreement is None:
        return "not compared with the model in the clear, whose weights are not on this machine"
    low, high = agreement.interval
    return (
        f"the model in the clear prefers the same on {agreement.num_equal} of {agreement.num_positions} "
        f"({agreement.top1:.2%}; 95 % interval {low:.2%} to {high:.2%}), largest error of a logit "
        f"{agreement.largest_error:.2g}"
    )


def difference(predicted: int, measured: int) -> str:
    """Return the error of a prediction relative to the measured value, in words."""
    return "equal" if predicted == measured else f"{predicted / measured - 1:+.3%}"


def answer_document(setup: Setup, answer: Answer) -> dict[str, Any]:
    """Return JSON data in SI units; every key is always present, and unknown values are null."""
    return {
        **setup_document(setup),
        "prompt": {"text": answer.prompt.text, "tokens": list(answer.prompt.ids)},
        "op_graph": answer.ready.op_graph,
        "ready_s": answer.ready.seconds,
        "shared_bytes": answer.ready.shared_bytes,
        "tokens": [
            {**_token_document(answer.prompt, token, expected), "in_range": setup.out_of_range is None}
            for token, expected in answer.tokens
        ],
        "text": answer.text,
        "agreement": agreement_document(answer.agreement),
        "total": _costs(answer.tokens),
    }


def agreement_document(agreement: Agreement | None) -> dict[str, Any] | None:
    if agreement is None:
        return None
    return {
        "num_positions": agreement.num_positions,
        "top1": agreement.top1,
        "top1_interval": list(agreement.interval),
        "largest_logit_error": agreement.largest_error,
    }


def _token_document(prompt: Prompt, token: PrivateToken, expected: Prediction) -> dict[str, Any]:
    agreement = token.agreement
    return {
        "token": token.token,
        "text": prompt.decoded([token.token]),
        "top1_agrees": None if agreement is None else bool(agreement.num_equal),
        "largest_logit_error": None if agreement is None else agreement.largest_error,
        **_costs([(token, expected)]),
    }


def _costs(tokens: Sequence[tuple[PrivateToken, Prediction]]) -> dict[str, dict[str, Any]]:
    costs, expected = [token.cost for token, _ in tokens], [prediction for _, prediction in tokens]
    seconds = [prediction.seconds for prediction in expected if prediction.seconds is not None]
    by_party = zip(*(cost.peak_bytes for cost in costs), strict=True)
    return {
        "measured": {
            "sent_bytes": sum(cost.sent_bytes for cost in costs),
            "messages": sum(cost.messages for cost in costs),
            "latency_s": sum(cost.seconds for cost in costs),
            "peak_bytes": [max((peak for peak in peaks if peak is not None), default=None) for peaks in by_party],
        },
        "predicted": {
            "sent_bytes": sum(prediction.sent_bytes for prediction in expected),
            "messages": sum(prediction.messages for prediction in expected),
            "latency_s": sum(seconds) if len(seconds) == len(expected) else None,
        },
    }
