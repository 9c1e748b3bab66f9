"""Perplexities in fixed point, for people and for programs."""

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from costmodel.config.units import format_seconds
from nas.private.answer_lines import agreement_document, difference, setup_document
from nas.private.fixed_point import Scored, Unscored
from nas.private.setup import Setup, said_setting
from nas.private.validation import Tokens
from search_spaces.architecture import gelu_form


def fixed_point_table(setup: Setup, clear: float, found: Sequence[Scored | Unscored], tokens: Tokens) -> Table:
    """A line for the model in the clear, and one for each arithmetic that it runs in."""
    count, length = len(tokens), tokens.shape[1] - 1
    title = f"{count * length:,} validation tokens by teacher forcing, {count} sequences of {length}"
    table = Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False)
    table.add_column("arithmetic", no_wrap=True)
    for name in ("perplexity", "top-1 as in the clear", "95 % interval", "largest error", "bytes as predicted"):
        table.add_column(name, justify="right")
    for name in ("seconds", "predicted"):
        table.add_column(name, justify="right")
    table.add_row("in the clear", f"{clear:.4f}")
    for each in found:
        if isinstance(each, Scored):
            table.add_row(f"{setup.protocol}, {said_setting(each.setting)}", *_cells(each))
    return table


def _cells(scored: Scored) -> list[str]:
    low, high = scored.agreement.interval
    return [
        f"{scored.perplexity:.4f}",
        f"{scored.agreement.top1:.2%}",
        f"{low:.2%} to {high:.2%}",
        f"{scored.agreement.largest_error:.2g}",
        difference(scored.predicted_bytes, scored.sent_bytes),
        format_seconds(scored.seconds),
        "?" if scored.predicted_s is None else format_seconds(scored.predicted_s),
    ]


def gelu_lines(setup: Setup) -> list[str]:
    """Of a model with GELU by tanh, what the engine makes of it; nothing of others."""
    architecture = setup.model.architecture
    if all(gelu_form(architecture, layer) != "tanh" for layer in architecture.layers):
        return []
    return [
        "the engine's tanh is off by up to 0.005, and GELU by tanh, beyond inputs of 5, by 0.0013 times the input; "
        "with --gelu exact GELU is off by less than 0.001, and more is sent"
    ]


def unscored_lines(setup: Setup, found: Sequence[Scored | Unscored]) -> list[str]:
    """What it cannot be run in."""
    return [
        f"not run: {setup.protocol}, {said_setting(each.setting)}: {each.reason}"
        for each in found
        if isinstance(each, Unscored)
    ]


def fixed_point_document(
    setup: Setup, clear: float, found: Sequence[Scored | Unscored], tokens: Tokens
) -> dict[str, Any]:
    """As JSON data; `reason` is null for an arithmetic that the model was run in, all else null for one it was not.

    So is a perplexity that is no finite number, as of logits that overflowed.
    """
    return {
        **setup_document(setup),
        "sequences": len(tokens),
        "seq_len": tokens.shape[1] - 1,
        "clear_perplexity": clear if math.isfinite(clear) else None,
        "arithmetics": [_document(each) for each in found],
    }


def _document(each: Scored | Unscored) -> dict[str, Any]:
    scored = each if isinstance(each, Scored) else None
    return {
        "ring_bits": each.setting.ring_bits,
        "fraction_bits": each.setting.fraction_bits,
        "reason": each.reason if isinstance(each, Unscored) else None,
        "perplexity": scored.perplexity if scored and math.isfinite(scored.perplexity) else None,
        "agreement": scored and agreement_document(scored.agreement),
        "measured": scored and {"sent_bytes": scored.sent_bytes, "latency_s": scored.seconds},
        "predicted": scored and {"sent_bytes": scored.predicted_bytes, "latency_s": scored.predicted_s},
    }
