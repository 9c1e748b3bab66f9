"""Fills jinja templates: the report page and the model card."""

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from costmodel.config.console import visible
from costmodel.config.units import format_bytes, format_seconds
from costmodel.data_range import describe
from costmodel.trust import described
from nas.report.summary import agreement_text, on_second, perplexity_text, seeds_text, sent_text, spread_words
from nas.run.run import Run
from search_spaces.budget.feasible import format_budget, format_price


def rendered(template: Path, run: Run | None, **facts: Any) -> str:
    """Return a template filled with `run` and `facts`. Texts are escaped for HTML in .html files, else for Markdown."""
    is_html = template.suffix == ".html"
    environment = Environment(
        loader=FileSystemLoader(template.parent), autoescape=is_html, undefined=StrictUndefined,
        finalize=None if is_html else _markdown, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= {
        "seconds": format_seconds,
        "bytes": format_bytes,
        "count": "{:,.0f}".format,
        "budget": format_budget,
        "price": format_price,
        "code": _code,
        "fenced": lambda text: Markup(f"{_fence(text, 3)}\n{text}\n{_fence(text, 3)}"),
        "trust": described,
        "outside": describe,
        "perplexity": perplexity_text,  # of a member, like the next four
        "seeds": seeds_text,
        "sent": sent_text,
        "on_second": lambda member: on_second(run, member) if run else "",
        "agreement": agreement_text,
        "spread": spread_words,  # of several members
    }
    return environment.get_template(template.name).render(run=run, **facts)


def _markdown(value: Any) -> Any:
    """Escape what begins a tag, link, code or cell in Markdown; what `_code` and `fenced` return is whole already."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return re.sub(r"[<\[`|]", lambda match: f"&#{ord(match[0])};", visible(value).replace("\n", " "))


def _code(text: object) -> Markup:
    """Return a text as code in a line, or in a cell of a table."""
    fence, line = _fence(str(text), 1), visible(str(text)).replace("\n", " ").replace("|", "\\|")
    return Markup(f"{fence}{line}{fence}" if len(fence) == 1 else f"{fence} {line} {fence}")


def _fence(text: str, least: int) -> str:
    """Return more backticks than the text has in a row, and at least `least`."""
    return "`" * max(least, 1 + max(map(len, re.findall("`+", text)), default=0))
