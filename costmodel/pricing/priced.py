"""`PricedModel`: what `costmodel.price` returns, as typed data, records, a table of pandas or the command's JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich.table import Table

from costmodel.cost import Price
from costmodel.errors import UserError
from costmodel.estimate import Estimate, Generation, Pricer, estimate, estimate_generation
from costmodel.execution.memory import PeakMemory
from costmodel.ops import LayerId, OpGraph
from costmodel.ops import shape as dimensions
from costmodel.pricing.asked import AskedModel
from costmodel.pricing.memory import held_by_op, most_memory
from costmodel.protocols.derived import Derived
from costmodel.protocols.primitives import EngineSetting
from costmodel.randomness.makers import Made, alternatives
from costmodel.report import estimates
from costmodel.report.tokens import Tokens, token_records, tokens_table
from costmodel.trust.adversary import Trust
from search_spaces.architecture import arch_id
from search_spaces.notation import name_of, placement


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedOp:
    """One op of a model and what it costs.

    op: its kind. layer: its index, `embed` or `head`. shape: dimensions by name.
    extrapolation: how many times more it does than any that seconds were measured on, at least 1; None if not known.
    """

    op: str
    layer: LayerId
    name: str
    shape: dict[str, int]
    price: Price
    extrapolation: float | None


def generation_of(runs: Sequence[OpGraph], pricer: Pricer, new_tokens: int | None) -> Generation:
    """The prices of a run for each new token; of the only run, which may be any token's, where none are asked for."""
    if new_tokens is None:
        (run,) = runs
        whole = estimate(run, pricer)
        return Generation(whole=whole, by_token=(whole.total,))
    return estimate_generation(runs, pricer)


@dataclass(frozen=True, kw_only=True)
class PricedModel:
    """A model with its prices, as it is written; seconds, bytes and rounds, of all parties.

    For one token out, or for all `new_tokens` together. asked: the model and its op graph. pricer: protocol, network
    and testbed. runs: the op graph of each run. generation: their prices, together and by token.
    """

    asked: AskedModel
    pricer: Pricer
    new_tokens: int | None
    runs: tuple[OpGraph, ...]
    generation: Generation

    @property
    def name(self) -> str:
        return self.asked.title["architecture"]

    @property
    def graph(self) -> OpGraph:
        return self.asked.graph

    @property
    def estimate(self) -> Estimate:
        """The prices by op and layer."""
        return self.generation.whole

    @property
    def tokens(self) -> Tokens | None:
        """What each new token costs; None unless they are asked for."""
        if self.new_tokens is None:
            return None
        batch, prompt_len = self.asked.deployment.batch, self.asked.title["seq_len"]
        return Tokens(prompt_len=prompt_len, by_token=self.generation.by_token, batch=batch)

    @cached_property
    def memory(self) -> PeakMemory | None:
        """Peak memory of a party; None where nobody measured it."""
        return most_memory(self.runs, self.pricer)

    @property
    def total(self) -> Price:
        """Of the whole model; `rows` sum to it."""
        return self.estimate.total

    @property
    def latency_s(self) -> float:
        """Seconds from prompt to token, or to the last new one."""
        return self.total.latency_s

    @property
    def latency_s_range(self) -> tuple[float, float] | None:
        """Least and greatest latency that the data of the prices allow, or None if exact."""
        return self.estimate.latency_s_range

    @property
    def sent_bytes(self) -> float:
        """Bytes on the wire, summed over parties."""
        return self.total.sent_bytes

    @property
    def rounds(self) -> float | None:
        """Waits for a message on the critical path; None where the protocol does not say."""
        return self.total.rounds

    @property
    def trust(self) -> Trust:
        """Whom the protocol trusts."""
        return self.estimate.trust

    @property
    def by_layer(self) -> tuple[tuple[LayerId, Price], ...]:
        return self.estimate.by_layer

    @property
    def setting(self) -> EngineSetting | None:
        """What of the engine is priced; None where a protocol has it fitted in."""
        return self.pricer.setting if isinstance(self.pricer, Derived) else None

    @property
    def rows(self) -> tuple[PricedOp, ...]:
        """Every op, in execution order."""
        return tuple(self._rows())

    def _rows(self) -> Iterator[PricedOp]:
        for (node, price), extrapolation in zip(self.estimate.by_op, self.estimate.extrapolations, strict=True):
            yield PricedOp(
                op=type(node.op).__name__,
                layer=node.layer,
                name=node.name,
                shape=dimensions(node.op),
                price=price,
                extrapolation=extrapolation,
            )

    @cached_property
    def deployed(self) -> estimates.DeployedForm | None:
        """What folding leaves of an architecture to deploy, with its own price; None of an op graph."""
        if (folded := self.asked.folded) is None:
            return None
        left = folded.architecture
        assert left is not None
        return estimates.DeployedForm(
            notation=name_of(left),
            placement=placement(left),
            deployed_id=arch_id(left),
            estimate=generation_of(folded.runs(self.new_tokens), self.pricer, self.new_tokens).whole,
        )

    @cached_property
    def without_dealer(self) -> tuple[Made, ...]:
        """What it costs to make otherwise what a dealer makes; nothing where there is none."""
        if not (self.trust.dealer and isinstance(self.pricer, Derived)):
            return ()
        return alternatives([node.op for run in self.runs for node in run], self.pricer.setting, self.pricer.link)

    def to_dict(self, *, egress_price: float | None = None) -> dict[str, Any]:
        """The JSON document of `python -m costmodel estimate --format json`. egress_price: money for each GB sent."""
        return estimates.document(
            self.estimate,
            self.setting,
            **self.asked.title,
            deployed=self.deployed,
            tokens=self.tokens,
            memory=self.memory,
            made=self.without_dealer,
            egress_price=egress_price,
        )

    def to_records(self) -> list[dict[str, Any]]:
        """An op each, or a new token each, with the keys of the command's `--format csv`; prices sum to the total.

        held_bytes of an op: shares that a party holds meanwhile; None where no engine runs it.
        """
        if self.tokens is not None:
            return token_records(self.tokens)
        held = held_by_op(self.graph, self.pricer)
        records = estimates.op_records(self.estimate)
        return [{**record, "held_bytes": each} for record, each in zip(records, held, strict=True)]

    def to_pandas(self) -> Any:
        """`to_records` as a pandas.DataFrame, num_ops x 14, or num_new_tokens x 10.

        Raises UserError if pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise UserError("a table of pandas needs pandas, but it is not installed; pip install pandas.") from None
        return pandas.DataFrame(self.to_records())

    def summary(self, *, egress_price: float | None = None) -> list[str]:
        """What the command prints above its tables, a line each."""
        return estimates.summary(
            self.estimate,
            self.setting,
            **self.asked.title,
            deployed=self.deployed,
            tokens=self.tokens,
            memory=self.memory,
            egress_price=egress_price,
        )

    def tables(self) -> list[Table]:
        """What the command prints below its lines."""
        by_token = [] if self.tokens is None else [tokens_table(self.tokens)]
        return [*by_token, *estimates.estimate_tables(self.estimate, self.without_dealer)]

    def __str__(self) -> str:
        return "\n".join(self.summary())
