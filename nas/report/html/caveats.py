"""The caveats of a report: everything that limits its results, by subject."""

from collections.abc import Iterator

from costmodel.config.units import format_count, format_seconds
from costmodel.estimate import outside_data
from costmodel.report.savings import savings_line
from costmodel.trust import described, shown
from nas.report.html.answer import rows_of
from nas.report.summary import infeasible_lines, order_lines, second_lines, spread_words, unstable_lines
from nas.run.members import in_noise
from nas.run.run import Run
from search_spaces.bases import base_architecture
from search_spaces.budget.priced_space import cheaper


def caveats(run: Run) -> dict[str, list[str]]:
    """Return the limits of the answer by subject, most important first, without empty subjects."""
    whose = shown(run.config.public_layers, run.config.client_layers)
    known = {
        "Scale": _scale(run),
        "Order": order_lines(run),
        "Seeds": _seeds(run),
        "Second corpus": second_lines(run),
        "Search": _search(run),
        "Costs": list(_prices(run)),
        "Trust": [f"{pricer.protocol}: {described(pricer.trust)}{whose}" for pricer in run.pricers],
        "Folding": [*infeasible_lines(run), *unstable_lines(run)],
    }
    return {subject: lines for subject, lines in known.items() if lines}


def _scale(run: Run) -> list[str]:
    completed = run.completed
    if not completed:
        return []
    trial = completed[0]
    trained = f"{trial.tokens:,} tokens per candidate, {trial.tokenizer}, {trial.split}"
    if run.meta.planned_tokens is not None:
        trained += f" (of {run.meta.planned_tokens:,}, because of the time budget, which costs accuracy)"
    lines = [f"Perplexities are of the model's own width, {trial.width}: {trained}."]
    if run.is_proxy:
        lines = [
            f"Perplexities are of scale {trial.scale}: width {trial.width} instead of {run.base.d_model}, {trained}. "
            "They rank candidates at this scale and are not those that the full model would reach. Costs are those "
            "of the full size."
        ]
        if run.base == base_architecture("gpt2-small"):
            lines.append(
                "Of 24 placements trained at widths 48, 96 and 192 the order held (rank correlation 0.97 and 0.98 a "
                "doubling), but layers in a row without attention came to cost more, and nothing else did: of members "
                "that are close here, the one with no long stretch without attention is the likelier one at full width "
                "(docs/proxies.md)."
            )
    if any(row.perplexity is not None for row in rows_of(run)):
        lines.append(
            "The papers' perplexities are of full-scale models, another corpus and another tokenizer: only their order "
            "can be compared."
        )
    return lines


def _seeds(run: Run) -> list[str]:
    lines = []
    seeds = sorted({member.num_seeds for member in run.front})
    if seeds:
        words = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        spread = spread_words(run.front) or "which shows no difference"
        lines.append(f"Members of the front have {words} seed{'' if seeds[-1] == 1 else 's'}; {spread}.")
    inside = [number for number, noise in enumerate(in_noise(run.front), 1) if noise]
    if inside:
        lines.append(f"Within noise of their cheaper neighbour: no. {', '.join(map(str, inside))}.")
    single = [member for member in run.members if member.num_seeds == 1 and member not in run.front]
    if single:
        lines.append(f"{len(single)} more trained with one seed each: a lucky one may have been passed over.")
    return lines


def _search(run: Run) -> list[str]:
    ended = [record for record in run.finished if record.role == "candidate"]
    early = {status: sum(record.status == status for record in ended) for status in ("paused", "diverged", "failed")}
    counts = ", ".join(f"{count} {status}" for status, count in early.items() if count)
    lines = [
        f"{len(ended)} of {format_count(run.meta.num_feasible)} members within the budget were tried "
        f"({format_count(run.meta.num_members)} in the space)"
        f"{f'; {counts}' if counts else ''}. The best of the space is likely to be another."
    ]
    tried = sum(record.generation >= 0 for record in ended)
    if tried < len(ended):
        lines.append(f"{len(ended) - tried} of them were trained by another run, with which this one began.")
    if tried < run.config.num_trials:
        lines.append(f"The search ended after {tried} of {run.config.num_trials} candidates.")
    return lines


def _prices(run: Run) -> Iterator[str]:
    present = ", ".join(pricer.cost_model_id for pricer in run.pricers)
    if run.meta.cost_model_id != present:
        yield (
            f"The ledger was priced by cost model {run.meta.cost_model_id}; what this page prices itself is of "
            f"{present}, which may price alike or not."
        )
    ranges = [(member.latency_s, member.latency_s_range) for member in run.front]
    widths = [max(high - price, price - low) / price for price, span in ranges if span for low, high in [span]]
    if widths:
        low, high = min(span[0] for _, span in ranges if span), max(span[1] for _, span in ranges if span)
        yield (
            f"Seconds are predicted: over {run.pricer.range_over} they move by up to {max(widths):.1%} "
            f"(the front from {format_seconds(low)} to {format_seconds(high)})."
        )
    forms = [run.priced_form(member.most_expensive) for member in run.front]
    graphs = [graph for form in forms for graph in run.workload.graphs(form)]
    if words := outside_data(run.pricer, graphs):
        yield f"The front's prices are {words}."
    if forms and (found := cheaper(forms[-1], run.pricer, run.workload, run.config.cost_of)):
        how = "flags of `costmodel estimate`, and nas.private computes only the last row by itself"
        yield f"{savings_line(found, 'The pick, ')}; {how}."
