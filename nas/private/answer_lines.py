"""An answer for people, token by token, and for programs."""

from collections.abc import Sequence
from typing import Any

from costmodel.config.units import format_bytes, format_seconds
from costmodel.generation.agreement import Agreement
from costmodel.generation.assignment import holds, role
from costmodel.generation.greedy import PrivateToken
from costmodel.generation.predicted import Prediction
from costmodel.protocols import TRUST
from costmodel.protocols.identity import ENGINE
from costmodel.report.trust import trust_document
from nas.private.answer import Answer, Ready
from nas.private.prompt import Prompt
from nas.private.setup import Setup, said_setting, trust_lines

COLUMNS = ("token", "top-1", "error", "sent bytes", "predicted", "messages", "predicted", "seconds", "predicted")
WIDTHS = (16, 5, 8, 15, 15, 9, 9, 8, 9)


def header_lines(setup: Setup) -> list[str]:
    """What is about to be run, and whom it trusts."""
    return [
        f"{setup.model.name}; protocol {setup.protocol}, {said_setting(setup.setting)}; {ENGINE}",
        *setup.model.notes,
        *trust_lines(setup),
    ]


def ready_lines(ready: Ready, prompt: Prompt) -> list[str]:
    return [
        f"prompt: {len(prompt.ids)} tokens; {ready.num_steps} steps, op graph {ready.op_graph} at every party",
        f"ready after {format_seconds(ready.seconds)}; sent beside the protocol, and not counted below: programs and "
        f"weights' shares, {format_bytes(ready.shared_bytes)}; with each token its shares and those of the logits",
        "top-1, error: whether the model in the clear prefers the same token, and the largest error of a logit",
        _row(COLUMNS),
    ]


def token_line(prompt: Prompt, token: PrivateToken, expected: Prediction) -> str:
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
    )


def _row(cells: Sequence[str]) -> str:
    first, *rest = cells
    width, *widths = WIDTHS
    return "  ".join([f"{first:<{width}}", *(f"{cell:>{size}}" for cell, size in zip(rest, widths, strict=True))])


def summary_lines(setup: Setup, answer: Answer) -> list[str]:
    """All tokens together."""
    total = _total(answer)
    measured, predicted = total["measured"], total["predicted"]
    seconds = (
        "not predicted" if predicted["latency_s"] is None else f"predicted {format_seconds(predicted['latency_s'])}"
    )
    return [
        f"text: {answer.text!r}",
        f"{len(answer.tokens)} tokens: {agreement_text(answer.agreement)}",
        f"sent by all parties: {measured['sent_bytes']:,} bytes, predicted {predicted['sent_bytes']:,} "
        f"({difference(predicted['sent_bytes'], measured['sent_bytes'])}); messages: {measured['messages']:,}, "
        f"predicted {predicted['messages']:,}",
        f"seconds: {format_seconds(measured['latency_s'])}, {seconds} on {setup.network.name}",
    ]


def agreement_text(agreement: Agreement | None) -> str:
    """The share of positions with its interval, and the largest error."""
    if agreement is None:
        return "not compared with the model in the clear, whose weights are not on this machine"
    low, high = agreement.interval
    return (
        f"the model in the clear prefers the same on {agreement.num_equal} of {agreement.num_positions} "
        f"({agreement.top1:.2%}; 95 % interval {low:.2%} to {high:.2%}), largest error of a logit "
        f"{agreement.largest_error:.2g}"
    )


def difference(predicted: int, measured: int) -> str:
    """Error of the prediction, relative to what was measured."""
    return "equal" if predicted == measured else f"{predicted / measured - 1:+.3%}"


def answer_document(setup: Setup, answer: Answer) -> dict[str, Any]:
    """As JSON data: SI numbers, every key always there, null for what is not known."""
    return {
        **setup_document(setup),
        "prompt": {"text": answer.prompt.text, "tokens": list(answer.prompt.ids)},
        "op_graph": answer.ready.op_graph,
        "ready_s": answer.ready.seconds,
        "shared_bytes": answer.ready.shared_bytes,
        "tokens": [_token_document(answer.prompt, token, expected) for token, expected in answer.tokens],
        "text": answer.text,
        "agreement": agreement_document(answer.agreement),
        "total": _total(answer),
    }


def setup_document(setup: Setup) -> dict[str, Any]:
    """The model and how it is run, as JSON data."""
    setting, trust = setup.setting, TRUST[setup.protocol]
    return {
        "model": setup.model.name,
        "notes": list(setup.model.notes),
        "protocol": setup.protocol,
        "network": setup.network.name,
        "setting": {
            "engine": ENGINE,
            "ring_bits": setting.ring_bits,
            "fraction_bits": setting.fraction_bits,
            "weights": setting.weights,
            "weight_masks": setting.weight_masks,
        },
        "trust": trust_document(trust),
        "parties": [
            {"rank": rank, "role": role(rank), "holds": holds(rank, setting)} for rank in range(trust.num_parties)
        ],
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
        "measured": {
            "sent_bytes": token.cost.sent_bytes,
            "messages": token.cost.messages,
            "latency_s": token.cost.seconds,
        },
        "predicted": {
            "sent_bytes": expected.sent_bytes,
            "messages": expected.messages,
            "latency_s": expected.seconds,
        },
    }


def _total(answer: Answer) -> dict[str, dict[str, Any]]:
    costs, expected = [token.cost for token, _ in answer.tokens], [each for _, each in answer.tokens]
    seconds = [each.seconds for each in expected if each.seconds is not None]
    return {
        "measured": {
            "sent_bytes": sum(cost.sent_bytes for cost in costs),
            "messages": sum(cost.messages for cost in costs),
            "latency_s": sum(cost.seconds for cost in costs),
        },
        "predicted": {
            "sent_bytes": sum(each.sent_bytes for each in expected),
            "messages": sum(each.messages for each in expected),
            "latency_s": sum(seconds) if len(seconds) == len(expected) else None,
        },
    }
