"""Fills jinja templates: the report page and the model card."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from costmodel.config.units import format_bytes, format_seconds
from costmodel.data_range import describe
from costmodel.trust import described
from nas.report.summary import agreement_text, on_second, perplexity_text, seeds_text, sent_text, spread_words
from nas.run.run import Run
from search_spaces.budget.feasible import format_budget, format_price


def rendered(template: Path, run: Run | None, **facts: Any) -> str:
    """Return the filled template; what comes from a run is escaped if the template is HTML."""
    environment = Environment(
        loader=FileSystemLoader(template.parent), autoescape=select_autoescape(["html"]), undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= {
        "seconds": format_seconds,
        "bytes": format_bytes,
        "count": "{:,.0f}".format,
        "budget": format_budget,
        "price": format_price,
        "trust": described,
        "outside": describe,
        "perplexity": perplexity_text,  # of a member, as are these:
        "seeds": seeds_text,
        "sent": sent_text,
        "on_second": lambda member: on_second(run, member) if run else "",
        "agreement": agreement_text,
        "spread": spread_words,  # of several members
    }
    return environment.get_template(template.name).render(run=run, **facts)
