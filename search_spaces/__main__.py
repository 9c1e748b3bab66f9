"""`python -m search_spaces count|list|show SPACE`: size, members (all or within a budget) and definition of a space."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any, Literal, NoReturn

from costmodel.config import cli
from costmodel.config.units import format_count, format_seconds
from costmodel.cost import Budget, Price
from costmodel.data_range import describe
from costmodel.errors import UserError
from costmodel.protocols import load_pricer
from costmodel.trust import facts
from search_spaces.architecture import arch_id
from search_spaces.budget.feasible import (
    Bounded,
    FeasibleSpace,
    check_feasible,
    format_budget,
    format_left_out,
    format_price,
    priced_within,
)
from search_spaces.budget.options import BudgetOptions
from search_spaces.budget.priced_space import (
    UNITS_PER,
    CostForm,
    cheapest,
    extrapolated,
    most_expensive,
    price_by_part,
    price_of,
)
from search_spaces.lower import Workload
from search_spaces.notation import Member
from search_spaces.space import load_space, members, num_architectures, num_members


def count(space: str, format: Literal["text", "json"] = "text", **asked: Any) -> None:
    """Print the size of a space, the share of it within the budget, and its cheapest and most expensive member.

    Args:
        space: gpt2-small, gpt2-papers, gpt2-forms, smollm2-135m, ladder, tiny or a .yaml file.
        format: lines of text, or one JSON document in SI units.
    """
    feasible = _feasible(space, **asked)
    priced, size = feasible.priced, num_members(feasible.space)
    ends = {"cheapest": cheapest(priced), "most_expensive": most_expensive(priced)}
    if format == "json":
        shown = {end: _member(feasible, member) for end, member in ends.items()}
        document = {**_setting(feasible), "feasible_share": feasible.num_feasible / size, **shown}
        print(json.dumps(document, allow_nan=False))
    else:
        recipes = " and ".join(("plain", "entropy-regularised")[recipe] for recipe in feasible.space.recipes)
        architectures = f"{format_count(num_architectures(feasible.space))} architectures, recipes {recipes}"
        print(f"{feasible.space.name}: {format_count(size)} members, {architectures}")
        within = ", and ".join(
            f"{'no budget' if budget == Budget() else f'within {format_budget(budget)}'} per token "
            f"at T={priced.seq_len}, protocol {_protocol(constraint)}"
            for constraint in feasible.every
            for budget in [constraint.budget]
        )
        num, left_out = format_count(feasible.num_feasible), format_left_out(feasible)
        print(f"{within}: {num} members ({100 * feasible.num_feasible / size:.3g} %){left_out}")
        if priced.cost_of == "folded":
            parts = price_by_part(priced, ends["cheapest"]).items()
            seconds = ", ".join(f"{part} {format_seconds(price.latency_s)}" for part, price in parts)
            print(f"seconds of the cheapest: {seconds}")
        for end, member in ends.items():
            print(f"{end.replace('_', ' ')}: {_line(feasible, member)}")
    check_feasible(feasible)


def list_members(space: str, limit: int = 20, format: Literal["text", "json"] = "text", **asked: Any) -> None:
    """Print the members of a space, or those within the budget if there is one: name, id and cost.

    Args:
        space: gpt2-small, gpt2-papers, gpt2-forms, smollm2-135m, ladder, tiny or a .yaml file.
        limit: largest number of members to print.
        format: lines of text, or one JSON document in SI units.
    """
    if limit < 1:
        raise UserError(f"--limit must be at least 1, but got {limit}.")
    feasible = _feasible(space, **asked)
    check_feasible(feasible)
    is_whole = all(constraint.budget == Budget() for constraint in feasible.every)
    within = members(feasible.space) if is_whole else feasible.members()
    listed = list(islice(within, min(limit, sys.maxsize)))
    if format == "json":
        document = {**_setting(feasible), "members": [_member(feasible, member) for member in listed]}
        print(json.dumps(document, allow_nan=False))
        return
    for member in listed:
        print(_line(feasible, member))
    if more := feasible.num_feasible - len(listed):
        print(f"and {format_count(more)} more; raise --limit {limit} to see them")


def show(space: str, format: Literal["text", "json"] = "text") -> None:
    """Print the definition of a space (base, choices or members, constraints, recipes) and the size of its graph.

    Args:
        space: gpt2-small, gpt2-papers, gpt2-forms, smollm2-135m, ladder, tiny or a .yaml file.
        format: lines of text, or one JSON document.
    """
    loaded = load_space(space)
    document = asdict(loaded.definition) | {
        "num_architectures": num_architectures(loaded),
        "num_members": num_members(loaded),
        "num_vertices": loaded.graph.number_of_nodes(),
        "num_edges": loaded.graph.number_of_edges(),
    }
    if format == "json":
        print(json.dumps(document, allow_nan=False))
    else:
        print("\n".join(line for key, value in document.items() for line in _shown(key, value)))


def _feasible(space: str, *, cost_of: CostForm | None = None, **options: Any) -> FeasibleSpace:
    """Return the members within a budget; the commands take their flags from here.

    Args:
        space: a shipped space or a .yaml file.
        cost_of: costs of the folded architecture or of the unfolded one, as the papers price;
            by default folded, but unfolded for a space that lists its members.
        options: fields of `BudgetOptions`.
    """
    given, loaded = BudgetOptions(**options), load_space(space)
    cost_of = cost_of or ("folded" if loaded.definition.choices else "unfolded")
    budgets = [
        (load_pricer(name, said["network"], said["testbed"]), budget)
        for (name, said), budget in zip(given.asked.items(), given.budgets.values(), strict=True)
    ]
    feasible, left_out = priced_within(loaded, budgets, Workload(prompt_len=given.seq_len), cost_of)
    for choice, reason in left_out.items():
        print(f"left out of the space: {choice}: {reason}", file=sys.stderr)
    return feasible


def _setting(feasible: FeasibleSpace) -> dict[str, Any]:
    priced = feasible.priced
    also = {_protocol(constraint): _costs(constraint.budget) for constraint in feasible.also}
    return {
        "space": priced.space.name,
        "base": priced.space.definition.base,
        "seq_len": priced.seq_len,
        "protocol": priced.pricer.protocol,
        "network": priced.pricer.network,
        "trust": facts(priced.pricer.trust),
        "cost_of": priced.cost_of,
        "budget": _costs(feasible.budget),
        **({"also": also} if also else {}),
        "num_architectures": num_architectures(priced.space),
        "num_members": num_members(priced.space),
        "num_feasible": feasible.num_feasible,
        "tolerance": feasible.tolerance,
    }


def _member(feasible: FeasibleSpace, member: Member) -> dict[str, Any]:
    also = {_protocol(constraint): _costs(price_of(constraint.priced, member)) for constraint in feasible.also}
    return {
        "name": member.name,
        "arch_id": arch_id(member.architecture),
        **_costs(price_of(feasible.priced, member)),
        "extrapolated": list(extrapolated(feasible.priced, member)),
        **({"also": also} if also else {}),
    }


def _costs(price: Price | Budget) -> dict[str, float | None]:
    return {measure: getattr(price, measure) for measure in UNITS_PER}


def _line(feasible: FeasibleSpace, member: Member) -> str:
    prices = [format_price(price_of(feasible.priced, member))]
    prices += [f"{_protocol(other)}: {format_price(price_of(other.priced, member))}" for other in feasible.also]
    prices += filter(None, [describe(extrapolated(feasible.priced, member))])
    return f"{member.name}  {arch_id(member.architecture)}  {'; '.join(prices)}"


def _protocol(constraint: Bounded) -> str:
    pricer = constraint.priced.pricer
    return pricer.protocol if pricer.network is None else f"{pricer.protocol} on {pricer.network}"


def _shown(key: str, value: Any) -> list[str]:
    if value is None:
        return []
    if value == ():
        return [f"{key}: none"]
    if isinstance(value, dict):
        given = {name: item for name, item in value.items() if item is not None}
        return [line for name, item in given.items() for line in _shown(f"{key}.{name}", item)]
    if isinstance(value, tuple):
        return [f"{key}: {', '.join(str(item).lower() if isinstance(item, bool) else str(item) for item in value)}"]
    return [f"{key}: {format_count(value)}" if isinstance(value, int) else f"{key}: {value}"]


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command that `args` (default: the process's) name, and exit with its exit code."""
    cli.run({"count": count, "list": list_members, "show": show}, prog="python -m search_spaces", args=args)


if __name__ == "__main__":
    main()
