"""The last lines of a search: what came out, at what scale, how far from the papers, and where it lies."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path

from costmodel.config.units import format_bytes, format_seconds
from costmodel.cost import Budget
from costmodel.protocols.published_rows import published_rows
from nas.corpus.ngrams import NgramBaseline
from nas.report.ngram_lines import mark, ngram_lines
from nas.report.seed_words import SPREAD, noise_marks, perplexity_text, unstable_lines
from nas.results import ledger
from nas.results.front import crosses, found_infeasible, front, is_feasible, picked
from nas.results.ledger import Record
from nas.results.members import TrainedMember, members, verdict
from nas.results.parent import ParentResult
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
    ngrams: NgramBaseline | None = None,
    parent: ParentResult | None = None,
) -> list[str]:
    """Only what this run established, in order: front, floor, baselines, order against the papers, scale, places."""
    found, trained = front(records, budget), members(records)
    lines = [
        f"front: {len(found)} {'member' if len(found) == 1 else 'members'} within {format_budget(budget)} per token"
    ]
    for member, noise in zip(found, noise_marks(found), strict=True):
        lines.append(f"  {_described(member)}{_doubt(member, budget)}{noise and f', {noise}'}{_known(member, ngrams)}")
    lines += ngram_lines(ngrams)
    if len(found) < FEW:
        lines.append(f"note: the front has fewer than {FEW} members; more trials may fill it (--resume, --num-trials)")
    lines += infeasible_lines(records, budget)
    lines += unstable_lines(records)
    lines += parent_lines(parent, found)
    lines += _baseline_lines(trained, found, budget, ngrams)
    lines += order_lines(trained, num_layers, seq_len)
    example = ledger.completed(records)[0]
    lines.append(
        f"scale {example.scale}: width {example.width}, {example.tokens:,} training tokens a candidate, "
        f"{_seeds(trained)}; perplexities are of {example.tokenizer}, {example.split}, and of this scale only"
    )
    lines.append(f"plot: {', '.join(map(str, plots))}")
    lines.append(f"front: {folder / 'pareto.csv'}; configs: {folder / 'architectures'}/")
    return lines


def parent_lines(parent: ParentResult | None, found: Sequence[TrainedMember]) -> list[str]:
    """The unmodified parent, and how far behind it the best member of the front is."""
    if parent is None:
        return []
    line = (
        f"parent {parent.name}, {parent.notation} as it was given: perplexity {parent.perplexity:.2f}, "
        f"{format_seconds(parent.latency_s)}"
    )
    if found:
        line += f"; best in budget is {against_parent(parent, picked(found, 'best'))}"
    return [line]


def against_parent(parent: ParentResult, member: TrainedMember) -> str:
    """Such as `+7.7% in perplexity, 37% less time`."""
    less = 1 - member.latency_s / parent.latency_s
    time = f"{less:.0%} less time" if less >= 0 else f"{-less:.0%} more time"
    return f"{member.perplexity / parent.perplexity - 1:+.1%} in perplexity, {time}"


def _seeds(trained: Sequence[TrainedMember]) -> str:
    """How many seeds there were, and what that allows to say."""
    most = max(member.num_seeds for member in trained)
    if most == 1:
        return "one seed, which shows no difference"
    return f"1 to {most} seeds ({SPREAD}; better and worse: by more than two of the difference)"


def infeasible_lines(records: Sequence[Record], budget: Budget) -> list[str]:
    """Members whose weights did not fold as the rule predicted, so that they are beyond the budget."""
    lines = []
    for record in found_infeasible(records, budget):
        off = record.fold_logits_error
        how_far = "are no numbers" if off is None else f"are off by {off:.1e} of the largest"
        why = f"its folded form failed the check: its logits, in single precision, {how_far}"
        if record.fold_holds is not False:
            verified = f"{format_seconds(record.latency_s)} and {format_bytes(record.sent_bytes)}"
            why = f"its weights earn {verified}: {'; '.join(record.left_unfolded) or 'nothing was left unfolded'}"
        lines.append(f"not on the front: {record.arch_id} {record.notation}, {why}")
    return lines


def _described(member: TrainedMember) -> str:
    runs_as = f" runs as {member.deployed}" if member.deployed not in (None, member.first.placement) else ""
    return (
        f"{member.arch_id} {member.notation}{runs_as}: perplexity {perplexity_text(member)}, "
        f"{format_seconds(member.latency_s)}, {format_bytes(member.sent_bytes)}"
    )


def _doubt(member: TrainedMember, budget: Budget) -> str:
    """Says so where the price is within budget only for some of the coefficients the data allow."""
    if not crosses(member, budget) or member.latency_s_range is None:
        return ""
    low, high = member.latency_s_range
    return f" (its range, {format_seconds(low)} to {format_seconds(high)}, crosses the budget)"


def _known(member: TrainedMember, ngrams: NgramBaseline | None) -> str:
    """Says so where a trigram predicts better."""
    marked = mark(member.mean_loss, ngrams)
    return f"; {marked}" if marked else ""


def _baseline_lines(
    trained: Sequence[TrainedMember], found: Sequence[TrainedMember], budget: Budget, ngrams: NgramBaseline | None
) -> list[str]:
    """Each baseline with the gap of the best candidate within budget, whatever its sign, and what seeds show of it."""
    lines = []
    for baseline in (member for member in trained if member.role == "baseline"):
        outside = "" if is_feasible(baseline.most_expensive, budget) else " outside the budget"
        text = f"baseline{outside}: {_described(baseline)}{_known(baseline, ngrams)}"
        if found:
            best = picked(found, "best")
            gap = best.perplexity / baseline.perplexity - 1
            text += f"; best in budget is {gap:+.1%} in perplexity: {verdict(best, baseline)}"
        lines.append(text)
    return lines


def order_lines(trained: Sequence[TrainedMember], num_layers: int, seq_len: int) -> list[str]:
    """Says so where this run orders published rows otherwise than the papers do, and whether seeds show it."""
    printed = {
        row.notation: row.perplexity
        for row in published_rows()
        if (row.num_layers, row.seq_len) == (num_layers, seq_len) and row.perplexity is not None
    }
    members_of_rows = {member.notation: member for member in trained if member.notation in printed}
    ours = {name: member.perplexity for name, member in members_of_rows.items()}
    pairs = list(combinations(ours, 2))
    swapped = [(one, other) for one, other in pairs if (ours[one] - ours[other]) * (printed[one] - printed[other]) < 0]
    if not swapped:
        return []
    verdicts = [verdict(members_of_rows[one], members_of_rows[other]) for one, other in swapped]
    shown = sum(one != "no difference shown" for one in verdicts)
    return [
        f"note: the order differs from the papers' in {len(swapped)} of {len(pairs)} pairs of published rows, "
        f"beyond noise in {shown}:",
        f"  here:   {_ascending(ours)}",
        f"  papers: {_ascending({name: printed[name] for name in ours})}",
    ]


def _ascending(perplexities: Mapping[str, float]) -> str:
    ordered = sorted(perplexities.items(), key=lambda item: item[1])
    return " < ".join(f"{name} {perplexity:.4g}" for name, perplexity in ordered)
