"""Answers one prompt privately, and reports every token and its cost, as lines and as data."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

from costmodel.config.units import format_bytes, format_seconds
from costmodel.engine.greedy import Agreement, ClearRun, generate, joined
from costmodel.engine.plan import Assignment, Plan, Prediction, graphs, predictions
from costmodel.engine.session import Session, StepRun
from costmodel.errors import OutOfRangeError, StoppedError
from nas.conversion.fixed_point_check import MAX_ERROR
from nas.private.prompt import Prompt
from nas.private.setup import Setup, prompt_arithmetic, setup_document

COLUMNS = ("token", "top-1", "error", "sent bytes", "predicted", "messages", "predicted", "seconds", "predicted")
WIDTHS = (16, 5, 8, 15, 15, 9, 9, 8, 9)


class Token(NamedTuple):
    """A new token: its step's run, agreement with the model in plaintext (None without weights), and prediction."""

    run: StepRun
    agreement: Agreement | None
    predicted: Prediction


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Answer:
    """An answer to a prompt, after its session. agreement: with the model in plaintext; None without weights here."""

    prompt: Prompt
    tokens: list[Token]
    session: Session

    @property
    def text(self) -> str:
        return self.prompt.continued([token.run.token for token in self.tokens])

    @property
    def agreement(self) -> Agreement | None:
        parts = [token.agreement for token in self.tokens if token.agreement is not None]
        return joined(parts) if parts else None


def answer(
    setup: Setup,
    prompt: Prompt,
    new_tokens: int,
    parties: Callable[[Assignment], AbstractContextManager[Session]],
    report: Callable[..., None],
) -> Answer:
    """Answer a prompt with the parties that `parties` starts: all on this machine, or only the client.

    new_tokens: most tokens to generate. report: called with lines for the user, first on the session and then on each
    token. Raise UserError before anything runs if the cost cannot be predicted, or as `prompt_arithmetic` if fixed
    point does not hold the prompt; StoppedError if a later token is out of range or a party fails; and any error that
    `parties` raises.
    """
    plan = Plan(kind="tokens", num_tokens=len(prompt.ids), num_new=new_tokens)
    steps = graphs(setup.graph_of, plan)
    predicted = predictions(steps, setup.protocol, setup.setting, setup.network)
    own = setup.own_layers(plan)
    arithmetic = prompt_arithmetic(setup, steps[0], prompt.ids, own)
    clear = None if setup.model.weights is None else ClearRun(setup.model.weights, arithmetic)
    tokens: list[Token] = []
    with parties(setup.client(plan)) as session:
        report(
            f"prompt: {len(prompt.ids)} tokens; {session.num_steps} steps, op graph {session.op_graph} at every party",
            f"ready after {format_seconds(session.ready_s)}; sent beside the protocol, and not counted below: programs "
            f"and weights' shares, {format_bytes(session.shared_bytes)}; with each token its shares and those of the "
            f"logits",
            "top-1, error: whether the model in the clear prefers the same token, and the largest error of a logit",
            _row(COLUMNS),
        )
        answered = generate(session, steps, prompt.ids, clear, prompt.encoder.ends, own)
        try:
            for (run, agreement), expected in zip(answered, predicted, strict=False):
                tokens.append(Token(run, agreement, expected))
                report(_token_line(setup, prompt, tokens[-1]))
        except OutOfRangeError as error:
            raise StoppedError(
                f"the answer left the range of protocol {setup.protocol} after {len(tokens)} tokens: {error}; the "
                f"tokens before are right, and --allow-out-of-range true goes on."
            ) from None
        session.leave()
    return Answer(prompt=prompt, tokens=tokens, session=session)


def _token_line(setup: Setup, prompt: Prompt, token: Token) -> str:
    run, agreement, expected = token
    cells = (
        repr(prompt.decoded([run.token])),
        "?" if agreement is None else "same" if agreement.num_equal else "other",
        "?" if agreement is None else f"{agreement.largest_error:.2g}",
        f"{run.sent_bytes:,}",
        f"{expected.sent_bytes:,}",
        f"{run.messages:,}",
        f"{expected.messages:,}",
        f"{run.seconds:.2f}",
        "?" if expected.seconds is None else f"{expected.seconds:.2f}",
    )
    return _row(cells) + ("" if setup.out_of_range is None else "  out of range")


def _row(cells: Sequence[str]) -> str:
    first, *rest = cells
    width, *widths = WIDTHS
    return "  ".join([f"{first:<{width}}", *(f"{cell:>{size}}" for cell, size in zip(rest, widths, strict=True))])


def summary_lines(setup: Setup, answer: Answer) -> list[str]:
    """Return lines that sum up an answer: its text, agreement, measured and predicted costs, and memory."""
    measured, predicted = _costs(answer.tokens).values()
    words = "not compared with the model in the clear, whose weights are not on this machine"
    agreement = answer.agreement
    if agreement is not None:
        low, high = agreement.interval
        words = (
            f"the model in the clear prefers the same on {agreement.num_equal} of {agreement.num_positions} "
            f"({agreement.top1:.2%}; 95 % interval {low:.2%} to {high:.2%}), largest error of a logit "
            f"{agreement.largest_error:.2g}"
        )
    peaks = ["not known" if peak is None else format_bytes(peak) for peak in measured["peak_bytes"]]
    seconds = predicted["latency_s"] and f"predicted {format_seconds(predicted['latency_s'])}"
    return [
        f"text: {answer.text!r}",
        f"{len(answer.tokens)} tokens: {words}",
        f"sent by all parties: {measured['sent_bytes']:,} bytes, predicted {predicted['sent_bytes']:,} "
        f"({difference(predicted['sent_bytes'], measured['sent_bytes'])}); messages: {measured['messages']:,}, "
        f"predicted {predicted['messages']:,}",
        f"seconds: {format_seconds(measured['latency_s'])}, {seconds or 'not predicted'} on {setup.network.name}",
        f"memory, by party: at most {', '.join(peaks)}",
    ]


def why_wrong(answer: Answer) -> str | None:
    """Return why an answer is not that of the model in plaintext; None if it is, or if the weights are not here."""
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


def difference(predicted: int, measured: int) -> str:
    """Return the error of a prediction relative to the measured value, such as `+1.250%`, or `equal`."""
    return "equal" if predicted == measured else f"{predicted / measured - 1:+.3%}"


def answer_document(setup: Setup, answer: Answer) -> dict[str, Any]:
    """Return an answer as JSON data in SI units; every key is always present, and unknown values are null."""
    return {
        **setup_document(setup),
        "prompt": {"text": answer.prompt.text, "tokens": list(answer.prompt.ids)},
        "op_graph": answer.session.op_graph,
        "ready_s": answer.session.ready_s,
        "shared_bytes": answer.session.shared_bytes,
        "tokens": [
            {
                "token": token.run.token,
                "text": answer.prompt.decoded([token.run.token]),
                "top1_agrees": token.agreement and bool(token.agreement.num_equal),
                "largest_logit_error": token.agreement and token.agreement.largest_error,
                **_costs([token]),
                "in_range": setup.out_of_range is None,
            }
            for token in answer.tokens
        ],
        "text": answer.text,
        "agreement": agreement_document(answer.agreement),
        "total": _costs(answer.tokens),
    }


def agreement_document(agreement: Agreement | None) -> dict[str, Any] | None:
    """Return an agreement as JSON data; None for None."""
    if agreement is None:
        return None
    return {
        "num_positions": agreement.num_positions,
        "top1": agreement.top1,
        "top1_interval": list(agreement.interval),
        "largest_logit_error": agreement.largest_error,
    }


def _costs(tokens: Sequence[Token]) -> dict[str, dict[str, Any]]:
    seconds = [token.predicted.seconds for token in tokens if token.predicted.seconds is not None]
    by_party = zip(*(token.run.peak_bytes for token in tokens), strict=True)
    return {
        "measured": {
            "sent_bytes": sum(token.run.sent_bytes for token in tokens),
            "messages": sum(token.run.messages for token in tokens),
            "latency_s": sum(token.run.seconds for token in tokens),
            "peak_bytes": [max((peak for peak in peaks if peak is not None), default=None) for peaks in by_party],
        },
        "predicted": {
            "sent_bytes": sum(token.predicted.sent_bytes for token in tokens),
            "messages": sum(token.predicted.messages for token in tokens),
            "latency_s": sum(seconds) if len(seconds) == len(tokens) else None,
        },
    }
