"""A study before anything is trained: the costs of its space, and the members of the space within the budget."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from costmodel.config.units import format_count, format_seconds, parse_share
from costmodel.cost import Budget
from costmodel.data_range import describe
from costmodel.errors import UserError
from costmodel.estimate import Pricer
from nas.recipe.recipe import SCALES, trained_architecture, usual_scale
from nas.run.config import NO_PARENT, USUAL_SPACE, StudyConfig, flag, is_share
from nas.run.folder import is_on_parent, run_pricers, run_space
from nas.run.run import Run
from nas.searchers.strategy import check_searcher, searcher_of
from search_spaces.bases import OWN, base_architecture
from search_spaces.budget.feasible import (
    FeasibleSpace,
    format_budget,
    format_left_out,
    format_price,
    priced_within,
    within_budget,
)
from search_spaces.budget.priced_space import (
    UNITS_PER,
    cheaper,
    cheapest,
    extrapolated,
    most_expensive,
    price_architecture,
    price_of,
    price_space,
)
from search_spaces.deployed import reads_live_norm
from search_spaces.notation import name_of, parse, placement
from search_spaces.space import SearchSpace, load_definition, member_of, num_members, with_first_layers, without

if TYPE_CHECKING:
    from nas.conversion.parent import Parent


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedStudy:
    """A study and the costs of its whole space, before anything is trained.

    Attributes:
        config: the configuration, with the space, scale and budgets that the parent decides.
        run: the run to resume, or None.
        parent: the model that a new study names; None if it names none, or for a run to resume.
        feasible: the members of the space within the budget, with their costs.
        left_out: for each choice that was removed from the space because it has no cost, the reason.
    """

    config: StudyConfig
    run: Run | None
    parent: "Parent | None"
    feasible: FeasibleSpace
    left_out: Mapping[str, str]

    @property
    def num_members(self) -> int:
        """Number of members of the whole space, exact."""
        return num_members(self.feasible.space)

    @property
    def num_feasible(self) -> int:
        """Number of members within the budget; exact, or too small if costs had to be rounded (`FeasibleSpace`)."""
        return self.feasible.num_feasible

    @property
    def lines(self) -> list[str]:
        """Lines of text: choices left out, size of the space, members within budget, range of costs, cheaper flags."""
        feasible, priced, choices = self.feasible, self.feasible.priced, self.feasible.space.definition.choices
        lines = [f"left out of the space: {choice}: {reason}" for choice, reason in self.left_out.items()]
        size, within = num_members(priced.space), feasible.num_feasible
        budgets = (
            f"{format_budget(constraint.budget)} per token at T={priced.seq_len}, "
            f"protocol {constraint.priced.pricer.protocol}"
            + (f" on {constraint.priced.pricer.network}" if constraint.priced.pricer.network else "")
            for constraint in feasible.every
        )
        lines.append(
            f"space {priced.space.name}: {format_count(size)} members, {format_count(within)} "
            f"({100 * within / size:.3g} %) within {', and within '.join(budgets)}"
            + (f", per token of {priced.workload.new_tokens}" if priced.workload.new_tokens > 1 else "")
            + format_left_out(feasible)
        )
        if priced.cost_of == "folded":
            lines.append(
                "costs are those of the folded models: what exact algebra removes, such as linear FFNs, costs nothing"
            )
        for title, member in (("cheapest", cheapest(priced)), ("most expensive", most_expensive(priced))):
            name = name_of(member.architecture, entropy_regularised=member.entropy_regularised)
            outside = describe(extrapolated(priced, member))
            lines.append(f"{title}: {name}, {format_price(price_of(priced, member))}{outside and f'; {outside}'}")
        if priced.pricer.protocol == "published" and choices is not None and "softmax-half" in choices.attention:
            lines.append(  # all of its rows have 12
                "note: layers with half of the heads are priced by extrapolation, since no printed row varies heads"
            )
        return [*lines, *_last_projection(feasible), *_cheaper(feasible)]


def price_study(config: StudyConfig, run: Run | None = None, *, reads_weights: bool = True) -> PricedStudy:
    """Return a study with the costs of its whole space.

    run: the run to resume, or None for a new study. reads_weights: whether weights and tokenizer of the parent are
        loaded, as trainings need them; else only its settings, as far as `find_parent_settings` can.

    With a parent, a new study differs in five ways. The default space becomes `parent`, the parent's layers and cheaper
    replacements, if the parent has another block or other dimensions. The default scale becomes `parent` if the parent
    has another head size or vocabulary size. Models are priced with the parent's vocabulary and context, if the scale
    states no vocabulary or the space is made from the parent. Budgets given as shares of the parent's cost become
    seconds and bytes. Public layers, and layers of the client, are the parent's in every member.

    Raises UserError if the space needs a parent and none is named; the space, a protocol, network or testbed, the
    parent or the searcher is unknown or cannot be read; a protocol cannot price the space, or has no keys but a budget
    of them; costs are too many or too large to tabulate; or candidates cannot start from the parent, or keep its public
    and client layers. Samplers of Optuna are not checked.
    """
    check_searcher(config.searcher)
    if ":" in config.searcher:  # load a searcher of the user's own now, so that its errors come before anything slow
        searcher_of(config.searcher)
    parent = None
    if run is None and config.parent is not None and config.parent != NO_PARENT:
        from nas.study.parent import find_parent, find_parent_settings  # imported late, because torch takes long

        find = partial(find_parent, begin_of_text=config.begin_of_text) if reads_weights else find_parent_settings
        parent = find(config.parent)
        config = _with_usual_of(config, parent)
    folder = None if run is None else run.folder
    tables = None  # the architecture whose vocabulary and context enter the costs; None for those of space and scale
    if config.parent not in (None, NO_PARENT) and (
        SCALES[config.scale].vocab_size is None or is_on_parent(folder, config)
    ):
        assert run is not None or parent is not None
        tables = run.meta.base if run is not None else parent and parent.model.architecture
    space, pricers = run_space(folder, config, tables), run_pricers(folder, config)
    if parent is not None:
        config = _with_budgets_of(config, parent, space, pricers)
    if run is not None:
        space = without(space, run.meta.withheld)
    if config.kept_layers is not None:
        space = _with_kept_layers(config, space, run, parent)
    if config.sequence_len > space.base.context:
        raise UserError(
            f"{'--seq-len' if config.train_len is None else '--train-len'} must be at most the context of the model, "
            f"{space.base.context}, but got {config.sequence_len}."
        )
    if parent is not None:
        from nas.conversion.parent import require_fit

        scale = replace(SCALES[config.scale], seq_len=config.sequence_len)
        require_fit(parent, trained_architecture(space.base, scale))
    feasible, left_out = priced_within(
        space, list(zip(pricers, config.budgets.values(), strict=True)), config.workload, config.cost_of
    )
    return PricedStudy(config=config, run=run, parent=parent, feasible=feasible, left_out=left_out)


def _with_usual_of(config: StudyConfig, parent: "Parent") -> StudyConfig:
    """Use the parent's own space and scale if the default ones do not have its dimensions."""
    from nas.conversion.transfer import SAME  # torch was imported with the parent

    architecture = parent.model.architecture
    if config.scale == usual_scale(None):
        config = replace(config, scale=usual_scale(architecture))
    if config.space != USUAL_SPACE:
        return config
    scale = replace(SCALES[config.scale], seq_len=1)  # whether sequences fit is checked later
    definition = load_definition(config.space)
    base = base_architecture(definition.base, definition.dimensions)
    usual = trained_architecture(parent.tables_on(base, scale), scale)
    is_usual = all(getattr(architecture, name) == getattr(usual, name) for name in SAME)
    return config if is_usual else replace(config, space=OWN)


def _with_budgets_of(
    config: StudyConfig, parent: "Parent", space: SearchSpace, pricers: Sequence[Pricer]
) -> StudyConfig:
    """Replace budgets that are shares of the parent's cost by seconds and bytes."""
    if not any(is_share(text) for said in config.asked.values() for text in said.values()):
        return config
    architecture = parse(placement(parent.model.architecture), space.base).architecture
    resolved: dict[str, list[str]] = {}
    for pricer in pricers:
        price = price_architecture(architecture, pricer, config.workload, config.cost_of).price
        said = config.asked[pricer.protocol]
        if is_share(said["budget_keys"]):
            Budget(key_bytes=1.0).check_keys(pricer.protocol, has_keys=price.key_bytes is not None)
        wholes = {"budget_latency": price.latency_s, "budget_comm": price.sent_bytes, "budget_keys": price.key_bytes}
        for name, whole in wholes.items():
            if (budget := said[name]) is not None:
                if is_share(budget):
                    share = parse_share(budget, flag(name))
                    budget = f"{(whole or 0) * share!r}{'s' if name == 'budget_latency' else 'B'}"
                resolved.setdefault(name, []).append(
                    f"{pricer.protocol}={budget}" if len(config.protocols) > 1 else budget
                )
    budgets: dict[str, Any] = {name: ",".join(texts) for name, texts in resolved.items()}
    return replace(config, **budgets)


def _with_kept_layers(config: StudyConfig, space: SearchSpace, run: Run | None, parent: "Parent | None") -> SearchSpace:
    """Restrict the space to members that begin with the parent's public and client layers.

    Only layers that folding leaves as they are can be kept: the first norm must be live, since folding then does not
    change the basis of the embedding, and each layer must have attention and an FFN, so that none is merged or
    renumbered.
    """
    if space.definition.choices is None:
        raise UserError(
            f"--public-layers and --client-layers need a space that offers choices for each layer, but {space.name} "
            f"lists its members; leave them out, or name another --space."
        )
    if parent is not None:
        parent_placement = placement(parent.model.architecture)
    else:
        assert run is not None
        assert run.meta.recipe.distillation is not None
        parent_placement = run.meta.recipe.distillation.placement
    kept = parse(parent_placement, space.base).architecture.layers[: config.kept_layers]
    live = kept != () and reads_live_norm(space.base.block_facts, 0, kept[0])
    if not live or any("none" in (layer.attention, layer.ffn) for layer in kept):
        theirs = kept and placement(member_of(space, kept, entropy_regularised=False).architecture)
        raise UserError(
            f"--public-layers and --client-layers of a search must keep layers of --parent that have attention and an "
            f"FFN, the first of them a live norm, since folding changes others and an embedding alone, but got "
            f"{theirs or 'no layer'}; keep others, or leave them out."
        )
    return with_first_layers(space, kept)


def _last_projection(feasible: FeasibleSpace) -> list[str]:
    """Say what the budget would admit with --projection last; nothing under several protocols, which take too long."""
    priced, work = feasible.priced, feasible.priced.workload
    if work.deployment.projection == "last" or feasible.also:
        return []
    last = replace(work, deployment=replace(work.deployment, projection="last"))
    other = price_space(priced.space, priced.pricer, last, priced.cost_of)
    ends = (price_of(other, most_expensive(other, name)) for name in UNITS_PER if name in feasible.budget.bounds)
    within = num_members(other.space)  # counting takes long, and most budgets then admit all
    if not all(map(feasible.budget.admits, ends)):
        within = within_budget(other, feasible.budget).num_feasible
    least = format_price(price_of(other, cheapest(other)))
    return [f"with --projection last: {format_count(within)} members within, the cheapest at {least}"]


def _cheaper(feasible: FeasibleSpace) -> list[str]:
    """Say how the most expensive member, such as the parent, runs for less without changing its function."""
    priced, member = feasible.priced, most_expensive(feasible.priced)
    found = cheaper(member.architecture, priced.pricer, priced.workload, priced.cost_of)
    if not found:
        return []
    seconds = (
        f"{format_seconds(each.latency_s)} with {each.flags}{' too' if at else ''}" for at, each in enumerate(found)
    )
    reveals = "; `costmodel estimate` says what they assume" if any(each.note for each in found) else ""
    return [f"with flags of `costmodel estimate`, the most expensive: {', '.join(seconds)}{reveals}"]
