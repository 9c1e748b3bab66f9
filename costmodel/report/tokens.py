"""Formats the costs of successive new tokens as tables and JSON."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from costmodel.config.units import format_bytes, format_seconds
from costmodel.cost import Price, shared_price, total_price
from costmodel.report.tables import table


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """The cost of each new token; the first comes from the prompt. Each cost is of `batch` sequences together."""

    prompt_len: int
    by_token: tuple[Price, ...]
    batch: int = 1

    @property
    def total(self) -> Price:
        return total_price(self.by_token)

    @property
    def per_token(self) -> Price:
        """The mean over all tokens of all sequences."""
        return shared_price(self.total, len(self.by_token) * self.batch)


def tokens_document(tokens: Tokens) -> dict[str, Any]:
    """Return tokens as JSON data: `prompt` and `decode` sum to the total; `by_token` has the cost of each token."""
    prompt, *steps = tokens.by_token
    return {
        "new_tokens": len(tokens.by_token),
        "per_token": asdict(tokens.per_token),
        "prompt": asdict(prompt),
        "decode": asdict(total_price(steps)) if steps else None,
        "by_token": token_records(tokens),
    }


def token_records(tokens: Tokens) -> list[dict[str, Any]]:
    """Return the cost of every new token and the number of tokens that the model read before it."""
    return [
        {"token": index, "read": tokens.prompt_len + index - 1, **asdict(price)}
        for index, price in enumerate(tokens.by_token, start=1)
    ]


def tokens_line(tokens: Tokens) -> str:
    mean, prompt, num_tokens = tokens.per_token, tokens.by_token[0], len(tokens.by_token)
    asked = f"{num_tokens:,} new tokens" + (f" of each of {tokens.batch} sequences" if tokens.batch > 1 else "")
    return f"{asked}: per token {_price(mean)}; the prompt and its first {_price(prompt)}"


def _price(price: Price) -> str:
    return f"{format_seconds(price.latency_s)}, {format_bytes(price.sent_bytes)}"


def tokens_table(tokens: Tokens) -> Table:
    """Tabulate some of the tokens, with the first and the last, and the total."""
    total, shown, since_s, rows = tokens.total, set(_shown(len(tokens.by_token))), 0.0, []
    for index, price in enumerate(tokens.by_token, start=1):
        since_s += price.latency_s
        if index in shown:
            seconds = format_seconds(price.latency_s), format_seconds(since_s)
            rows.append([f"{index:,}", str(tokens.prompt_len + index - 1), *seconds, format_bytes(price.sent_bytes)])
    return table(
        ["new token"],
        ["tokens read", "latency", "since the start", "communication"],
        rows,
        footers={
            "new token": "total",
            "latency": format_seconds(total.latency_s),
            "communication": format_bytes(total.sent_bytes),
        },
    )


def _shown(num_tokens: int) -> Iterator[int]:
    unit = 1
    while unit < num_tokens:
        yield from (number for number in (unit, 2 * unit, 5 * unit) if number < num_tokens)
        unit *= 10
    yield num_tokens
