"""A run in lines of text: its front, scale, comparison with the papers, origin of costs, and files."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean

from costmodel.config.units import format_bytes, format_seconds
from costmodel.estimate import outside_data
from costmodel.protocols.published import published_rows
from costmodel.trust import caption, shown
from nas.corpus.ngrams import NgramBaseline
from nas.run.folder import ParentResult
from nas.run.intervals import ERRORS_APART, differences, document_error, joined
from nas.run.ledger import deployed_of
from nas.run.members import (
    TrainedMember,
    crosses,
    difference_error,
    found_infeasible,
    holds_on_first_alone,
    in_noise,
    is_feasible,
    picked,
    rank_correlation,
    verdict,
)
from nas.run.run import Run
from search_spaces.budget.feasible import format_budget, format_price

LEAST_EXPECTED = 8  # fewest candidates for which the searcher's predictions are evaluated
FEW = 4  # a front with fewer members gets a note
KNOWS_LESS = "is worse than a trigram model"
FIRST_ALONE = "dominated there"
IN_NOISE = "within noise of its cheaper neighbour"


def closing_lines(run: Run, plots: Iterable[Path]) -> list[str]:
    """Return lines on what a run with a completed trial found. plots: files that are named."""
    lines = [
        f"front: {len(run.front)} {'member' if len(run.front) == 1 else 'members'} within {format_budget(run.budget)} "
        "per token"
    ]
    for member, inside in zip(run.front, in_noise(run.front), strict=True):
        crossing, noise = "", f", {IN_NOISE}" if inside else ""
        if crosses(member, run.budget) and member.latency_s_range is not None:
            low, high = map(format_seconds, member.latency_s_range)
            crossing = f" (its range, {low} to {high}, crosses the budget)"
        knows = _knows(member, run.ngrams)
        lines.append(f"  {_described(member)}{crossing}{noise}{knows}{on_second(run, member)}")
    lines += [*ngram_lines(run.ngrams), *second_lines(run)]
    if len(run.front) < FEW:
        lines.append(f"note: the front has fewer than {FEW} members; more trials may fill it (--resume, --num-trials)")
    for describe in (infeasible_lines, unstable_lines, parent_lines, _baseline_lines, order_lines, searcher_lines):
        lines += describe(run)
    example, most = run.completed[0], max(member.num_seeds for member in run.members)
    seeds = "one seed" if most == 1 else f"1 to {most} seeds"
    if words := spread_words(run.members):
        compare = "compare models by the paired differences: better or worse means beyond two standard errors"
        seeds = f"{seeds} ({words}); {compare}"
    else:
        seeds = f"{seeds}, which shows no difference"
    return [
        *lines,
        f"scale {example.scale}: width {example.width}, {example.tokens:,} training tokens per candidate"
        f"{in_sequences(run)}, {seeds}; perplexities are of {example.tokenizer}, {example.split}"
        + (", and of this scale only" if run.is_proxy else ""),
        f"plot: {', '.join(map(str, plots))}",
        f"front: {run.folder / 'pareto.csv'}; configs: {run.folder / 'architectures'}/",
        price_line(run),
    ]


def in_sequences(run: Run) -> str:
    """Return the words for the length of training sequences, after a number of tokens; empty if it is the prompt's."""
    length = run.config.sequence_len
    return "" if length == run.seq_len else f" in sequences of {length}"


def ngram_lines(ngrams: NgramBaseline | None) -> list[str]:
    """Return one line with the perplexities of all n-gram baselines; no line if there are none."""
    if ngrams is None:
        return []
    reached = ", ".join(f"{name} {perplexity:.4g}" for name, perplexity in ngrams.perplexities.items())
    return [f"n-gram baselines, perplexity after {ngrams.tokens:,} training tokens: {reached}"]


def second_lines(run: Run) -> list[str]:
    """Return a line on the second corpus: rank correlation with the first, parent and n-grams; no line without one."""
    if (second := run.meta.second) is None:
        return []
    reached = ", ".join(f"{name} {perplexity:.4g}" for name, perplexity in second.ngrams.perplexities.items())
    agreed = rank_correlation(run.front)
    order = "too few to rank" if agreed is None else f"rank correlation of the front with the first {agreed:.2f}"
    parent = "" if second.parent_loss is None else f"the parent {math.exp(second.parent_loss):.2f}, "
    return [f"second corpus {second.data} (fingerprint {second.fingerprint}): {order}; {parent}n-grams: {reached}"]


def second_text(run: Run, member: TrainedMember) -> str:
    """Return the perplexity on the second corpus as text, with a note if it is dominated there; empty if unknown."""
    if (perplexity := member.second_perplexity) is None:
        return ""
    return f"{perplexity:.2f}" + (f", {FIRST_ALONE}" if holds_on_first_alone(member, run.front) else "")


def on_second(run: Run, member: TrainedMember) -> str:
    """Return text such as `; on dependencies 9.31`, to follow the perplexity on the first corpus; empty if unknown."""
    text = second_text(run, member)
    return f"; on {run.meta.second.data} {text}" if text and run.meta.second is not None else ""


def mark(loss: float, ngrams: NgramBaseline | None) -> str:
    """Return a remark if a loss, in nats per token, is above the trigram baseline's; else an empty string."""
    return KNOWS_LESS if ngrams is not None and ngrams.above_trigram(loss) else ""


def perplexity_text(member: TrainedMember) -> str:
    """Return text such as `33.10 ± 0.42 (3 seeds)`: perplexity, half the width of its bounds if known, and seeds."""
    bounds = member.perplexity_bounds
    spread = "" if bounds is None else f" ± {(bounds[1] - bounds[0]) / 2:.2f}"
    return f"{member.perplexity:.2f}{spread} ({seeds_text(member)})"


def seeds_text(member: TrainedMember) -> str:
    """Return text such as `3 seeds`, or `1 of 3 seeds diverged`."""
    whole = member.num_seeds + member.num_diverged
    if member.num_diverged:
        return f"{member.num_diverged} of {whole} seeds diverged"
    return f"{whole} seed{'s' if whole > 1 else ''}"


def spread_words(trained: Sequence[TrainedMember]) -> str:
    """Return an explanation of the `±` in the perplexities of members; empty if none has a standard error."""
    seeds = any(member.seed_error is not None for member in trained)
    documents = any(member.document_error is not None for member in trained)
    over = " and ".join(["seeds"] * seeds + ["validation documents"] * documents)
    words = over and f"± two standard errors over {over}" + ("" if seeds else "; seeds not repeated")
    return words + "; differences are paired by document, and have smaller errors" * documents


def unstable_lines(run: Run) -> list[str]:
    """Return a line for each candidate of which some seeds completed and others diverged."""
    return [
        f"not on the front: {member.arch_id} {member.notation}: {seeds_text(member)}; perplexity of the "
        f"{'others' if member.num_seeds > 1 else 'other'} {member.perplexity:.2f}"
        for member in run.members
        if member.role == "candidate" and member.num_diverged
    ]


def price_line(run: Run) -> str:
    """Return a line on the protocols and whom you must trust, and on what of the front `published` has no data for."""
    words = ""
    if "published" in run.config.protocols:
        forms = [deployed_of(member, run.base) for member in run.front]
        (published,) = (pricer for pricer in run.pricers if pricer.protocol == "published")
        words = outside_data(published, (graph for form in forms for graph in run.workload.graphs(form)))
    named = ", and ".join(f"protocol {pricer.protocol} ({caption(pricer.trust)})" for pricer in run.pricers)
    whose = shown(run.config.public_layers, run.config.client_layers)
    return f"costs: {named}{words and f'; {words}'}{whose}"


def parent_lines(run: Run) -> list[str]:
    """Return a line on the unmodified parent, and the best member of the front relative to the parent."""
    if (parent := run.parent) is None:
        return []
    best = f"; best in budget is {against_parent(parent, picked(run.front, 'best'))}" if run.front else ""
    result = f"perplexity {parent.perplexity:.2f}, {format_seconds(parent.latency_s)}"
    return [f"parent {parent.name}, {parent.notation} unmodified: {result}{best}"]


def against_parent(parent: ParentResult, member: TrainedMember) -> str:
    """Return text such as `+7.7% ± 1.2% in perplexity, 37% less time`. The ± is two standard errors, if known."""
    less = 1 - member.latency_s / parent.latency_s
    time = f"{less:.0%} less time" if less >= 0 else f"{-less:.0%} more time"
    by_document = document_error(differences(parent.documents, member.documents))
    error, ratio = joined(member.seed_error, by_document), member.perplexity / parent.perplexity
    spread = "" if error is None else f" ± {ratio * math.sinh(ERRORS_APART * error):.1%}"
    return f"{ratio - 1:+.1%}{spread} in perplexity, {time}"


def agreement_text(member: TrainedMember) -> str:
    """Return in words how the predictions of the member's first seed differ from the parent's; empty if unknown."""
    if member.parent_divergence is None or member.parent_agreement is None:
        return ""
    return (
        f"predictions: {member.parent_divergence:.3f} nats per token from the parent's (KL), "
        f"the same most likely token at {member.parent_agreement:.1%} of positions"
    )


def infeasible_lines(run: Run) -> list[str]:
    """Return a line for each trial of `found_infeasible`, which says why it is not feasible."""
    lines = []
    for record in found_infeasible(run.records, run.budget):
        off, fixed, how_far = record.fold_logits_error, record.fold_fixed_point_error, "are no numbers"
        if off is not None and fixed is not None:
            how_far = f"are off by {off:.1e} of the largest in single precision, by {fixed:.1e} in fixed point"
        why = "; ".join((f"its folded form failed the check: its logits {how_far}", *record.left_unfolded))
        if record.fold_holds is not False:
            verified = f"{format_seconds(record.latency_s)} and {format_bytes(record.sent_bytes)}"
            why = f"its weights fold to {verified}: {'; '.join(record.left_unfolded) or 'nothing was left unfolded'}"
        lines.append(f"not on the front: {record.arch_id} {record.notation}, {why}")
    return lines


def _described(member: TrainedMember) -> str:
    folded = f" (folded: {member.deployed})" if member.deployed not in (None, member.placement) else ""
    return (
        f"{member.arch_id} {member.notation}{folded}: perplexity {perplexity_text(member)}, "
        f"{format_seconds(member.latency_s)}, {sent_text(member)}"
    )


def sent_text(member: TrainedMember) -> str:
    """Return bytes, keys, and costs under other protocols, such as `6.43 GB; under sigma 2.00 s and 1.90 GB`."""
    keys = "" if member.key_bytes is None else f", {format_bytes(member.key_bytes)} of keys"
    return "; ".join((f"{format_bytes(member.sent_bytes)}{keys}", *also_texts(member)))


def also_texts(member: TrainedMember) -> list[str]:
    """Return the costs of a member under each of the run's other protocols."""
    return [f"under {name} {format_price(costs)}" for name, costs in member.also.items()]


def _knows(member: TrainedMember, ngrams: NgramBaseline | None) -> str:
    return f"; {marked}" if (marked := mark(member.val_loss, ngrams)) else ""


def _baseline_lines(run: Run) -> list[str]:
    lines = []
    for baseline in (member for member in run.members if member.role == "baseline"):
        outside = "" if is_feasible(baseline, run.budget) else " outside the budget"
        text = f"baseline{outside}: {_described(baseline)}{_knows(baseline, run.ngrams)}"
        if run.front:
            best = picked(run.front, "best")
            gap = best.perplexity / baseline.perplexity - 1
            text += f"; best in budget is {gap:+.1%} in perplexity: {verdict(best, baseline)}"
            if best.seed_error is None and difference_error(best, baseline) is not None:
                text += " over documents, seeds not repeated"
        lines.append(text)
    return lines


def order_lines(run: Run) -> list[str]:
    """Return lines on the pairs of published rows, if there are any, that this run orders unlike the papers."""
    printed = {
        row.notation: row.perplexity
        for row in published_rows()
        if (row.num_layers, row.seq_len) == (run.base.num_layers, run.config.sequence_len)
        and row.perplexity is not None
    }
    members_of_rows = {member.notation: member for member in run.members if member.notation in printed}
    ours = {name: member.perplexity for name, member in members_of_rows.items()}
    pairs = list(combinations(ours, 2))
    swapped = [(a, b) for a, b in pairs if (ours[a] - ours[b]) * (printed[a] - printed[b]) < 0]
    if not swapped:
        return []
    verdicts = [verdict(members_of_rows[a], members_of_rows[b]) for a, b in swapped]
    shown = verdicts.count("better") + verdicts.count("worse")

    def ascending(perplexities: Mapping[str, float]) -> str:
        ordered = sorted(perplexities.items(), key=lambda item: item[1])
        return " < ".join(f"{name} {perplexity:.4g}" for name, perplexity in ordered)

    return [
        f"note: the order differs from the papers' in {len(swapped)} of {len(pairs)} pairs of published rows, "
        f"beyond noise in {shown}:",
        f"  here:   {ascending(ours)}",
        f"  papers: {ascending({name: printed[name] for name in ours})}",
    ]


def searcher_lines(run: Run) -> list[str]:
    """Return a line with the R^2 of the searcher's predictions of final losses, at proposal and after a short training.

    Each is there if at least LEAST_EXPECTED completed candidates have that prediction; with neither, no line.
    """
    proposed = [record for record in run.records if record.event == "proposed" and record.expected_loss is not None]
    ends = {trial.index: trial.val_loss for trial in run.completed if trial.role == "candidate"}
    begun = {record.index for record in proposed if record.is_proxy}
    stages = {
        "at proposal": [record for record in proposed if record.is_proxy or record.index not in begun],
        "after a short training": [record for record in proposed if not record.is_proxy and record.index in begun],
    }
    explained = []
    for stage, records in stages.items():
        pairs = [(record.expected_loss or 0.0, ends[record.index] or 0.0) for record in records if record.index in ends]
        if len(pairs) >= LEAST_EXPECTED:
            mean = fmean(end for _, end in pairs)
            around = sum((end - mean) ** 2 for _, end in pairs)
            off = sum((end - expected) ** 2 for expected, end in pairs)
            explained.append(f"R^2 {1 - off / around if around else 0.0:.2f} {stage} ({len(pairs)} candidates)")
    return [f"{run.config.searcher}: predicted final losses with {', '.join(explained)}"] if explained else []
