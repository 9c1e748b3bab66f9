"""The last lines of a search: what came out, at what scale, how far from the papers, and where it lies."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path

from costmodel.config.units import format_bytes, format_seconds
from costmodel.cost import Budget
from costmodel.protocols.published_rows import published_rows
from nas.corpus.ngrams import NgramFloors
from nas.report.floor_lines import floor_lines, mark
from nas.results import ledger
from nas.results.front import crosses, front, unearned
from nas.results.ledger import Record
from search_spaces.budget.feasible import format_budget

FEW = 4  # a front of fewer members is said to be one


def closing_lines(
    records: Sequence[Record],
    budget: Budget,
    *,
    num_layers: int,
    seq_len: int,
    folder: Path,
    plots: Iterable[Path],
    floors: NgramFloors | None = None,
) -> list[str]:
    """Only what this run established, in order: front, floor, baselines, order against the papers, scale, places."""
    members = front(records, budget)
    done = ledger.completed(records)
    lines = [
        f"front: {len(members)} {'member' if len(members) == 1 else 'members'} within {format_budget(budget)} per token"
    ]
    lines += [f"  {_described(member)}{_doubt(member, budget)}{_known(member, floors)}" for member in members]
    lines += floor_lines(floors)
    if len(members) < FEW:
        lines.append(f"note: the front has fewer than {FEW} members; more trials may fill it (--resume, --num-trials)")
    lines += unearned_lines(records, budget)
    lines += _baseline_lines(done, members, floors)
    lines += _order_lines(done, num_layers, seq_len)
    example = done[0]
    lines.append(
        f"scale {example.scale}: width {example.width}, {example.tokens:,} training tokens a candidate, one seed; "
        f"perplexities are of {example.tokenizer}, {example.split}, and of this scale only"
    )
    lines.append(f"plot: {', '.join(map(str, plots))}")
    lines.append(f"front: {folder / 'pareto.csv'}; configs: {folder / 'architectures'}/")
    return lines


def unearned_lines(records: Sequence[Record], budget: Budget) -> list[str]:
    """Members whose weights did not fold as the rule promised, so that they are beyond the budget."""
    lines = []
    for record in unearned(records, budget):
        off = record.fold_logits_error
        how_far = "are no numbers" if off is None else f"are off by {off:.1e} of the largest"
        why = f"its folded form failed the check: its logits, in single precision, {how_far}"
        if record.fold_holds is not False:
            earned = f"{format_seconds(record.latency_s)} and {format_bytes(record.sent_bytes)}"
            why = f"its weights earn {earned}: {'; '.join(record.left_unfolded) or 'nothing was left unfolded'}"
        lines.append(f"not on the front: {record.arch_id} {record.notation}, {why}")
    return lines


def _described(record: Record) -> str:
    runs_as = f" runs as {record.deployed}" if record.deployed not in (None, record.placement) else ""
    return (
        f"{record.arch_id} {record.notation}{runs_as}: perplexity {record.perplexity:.2f}, "
        f"{format_seconds(record.latency_s)}, {format_bytes(record.sent_bytes)}"
    )


def _doubt(record: Record, budget: Budget) -> str:
    """Says so where the price is within budget only for some of the coefficients the data allow."""
    if not crosses(record, budget) or record.latency_s_range is None:
        return ""
    low, high = record.latency_s_range
    return f" (its range, {format_seconds(low)} to {format_seconds(high)}, crosses the budget)"


def _known(record: Record, floors: NgramFloors | None) -> str:
    """Says so where a trigram predicts better."""
    marked = mark(record, floors)
    return f"; {marked}" if marked else ""


def _baseline_lines(done: Sequence[Record], members: Sequence[Record], floors: NgramFloors | None) -> list[str]:
    """Each baseline with the gap of the best candidate within budget, whatever its sign."""
    losses = [member.val_loss for member in members if member.val_loss is not None]
    lines = []
    for baseline in (record for record in done if record.role == "baseline"):
        text = f"baseline outside the budget: {_described(baseline)}{_known(baseline, floors)}"
        if losses and baseline.perplexity:
            best = min(member.perplexity for member in members if member.perplexity is not None)
            text += f"; best in budget is {best / baseline.perplexity - 1:+.1%} in perplexity"
        lines.append(text)
    return lines


def _order_lines(done: Sequence[Record], num_layers: int, seq_len: int) -> list[str]:
    """Says so where this run orders published rows otherwise than the papers do."""
    printed = {
        row.notation: row.perplexity
        for row in published_rows()
        if (row.num_layers, row.seq_len) == (num_layers, seq_len) and row.perplexity is not None
    }
    ours = {record.notation: record.perplexity for record in done if record.notation in printed and record.perplexity}
    pairs = list(combinations(ours, 2))
    swapped = [(one, other) for one, other in pairs if (ours[one] - ours[other]) * (printed[one] - printed[other]) < 0]
    if not swapped:
        return []
    return [
        f"note: the order differs from the papers' in {len(swapped)} of {len(pairs)} pairs of published rows:",
        f"  here:   {_ascending(ours)}",
        f"  papers: {_ascending({name: printed[name] for name in ours})}",
    ]


def _ascending(perplexities: Mapping[str, float]) -> str:
    ordered = sorted(perplexities.items(), key=lambda item: item[1])
    return " < ".join(f"{name} {perplexity:.4g}" for name, perplexity in ordered)
