"""`costmodel.price`: the cost of a model under private inference, as typed data, records, a table or JSON."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.table import Table

from costmodel.config.units import BYTES, format_bytes, format_seconds
from costmodel.cost import Price
from costmodel.data_range import describe
from costmodel.errors import UserError
from costmodel.estimate import Estimate, Generation, Pricer, estimate, estimate_generation
from costmodel.execution.memory import PeakMemory, alive_bytes, held_bytes, load_memory, peak_memory
from costmodel.network import Network, link
from costmodel.ops import LayerId, Op, OpGraph
from costmodel.pricing.model_spec import Model, ModelOptions, ModelSpec, resolve_model
from costmodel.protocols import Setting, load_pricer, setting_of
from costmodel.protocols.derived import ByFormula, Derived
from costmodel.protocols.primitives import Holder, WeightMasks
from costmodel.randomness import GeneratorCost, alternatives
from costmodel.report import estimates
from costmodel.report.estimates import Tokens
from costmodel.report.savings import Saving, savings, savings_line
from costmodel.trust import Trust, described
from search_spaces.architecture import arch_id
from search_spaces.notation import placement

UNCHECKED = "costs are assumed to grow with these as counts do, with an unknown error"
WIDER = "these ops are so many times larger than any that was measured, so the range is wider"


@dataclass(frozen=True, kw_only=True, slots=True)
class DealtKeys:
    """The keys that a dealer makes for one run or, with new tokens, for all runs together.

    party_bytes: Bytes that each party stores until the run.
    sent_bytes: Bytes that the dealer sends to all parties together.
    network_s: Seconds to send the keys, over a link to each party as fast as the parties' link; no latency includes it.
    """

    party_bytes: float
    sent_bytes: float
    network_s: float


@dataclass(frozen=True, kw_only=True)
class PricedModel:
    """A model with its costs for one token, or for all `new_tokens` together; sent bytes are summed over parties.

    `asked` is the priced model; it is not folded, except in `deployed`. `pricer` combines protocol, network and
    testbed. Costs are computed when first used; a UserError is then raised if the protocol has no formula for an op.
    """

    asked: ModelSpec
    pricer: Pricer
    new_tokens: int | None = None

    @cached_property
    def runs(self) -> tuple[OpGraph, ...]:
        """The op graph of each run: one per new token, or a single one."""
        return tuple(self.asked.runs(self.new_tokens))

    @cached_property
    def generation(self) -> Generation:
        """The costs of all runs together (`whole`), and the cost of each token (`by_token`)."""
        if self.new_tokens is not None:
            return estimate_generation(self.runs, self.pricer)
        whole = estimate(self.graph, self.pricer)
        return Generation(whole=whole, by_token=(whole.total,))

    @property
    def name(self) -> str:
        """The notation of an architecture, the name of a checkpoint or factory, a module's class, or `op graph`."""
        return self.asked.name

    @property
    def graph(self) -> OpGraph:
        """The op graph of the first run, rewritten for the deployment."""
        return self.asked.graph

    @property
    def estimate(self) -> Estimate:
        """The costs in total, by layer and by op, with the range of latencies."""
        return self.generation.whole

    @property
    def tokens(self) -> Tokens | None:
        """The cost of each new token; None if none were asked for."""
        if self.new_tokens is None:
            return None
        batch, prompt_len = self.asked.deployment.batch, self.asked.seq_len
        return Tokens(prompt_len=prompt_len, by_token=self.generation.by_token, batch=batch)

    @cached_property
    def memory(self) -> PeakMemory | None:
        """Predicted peak memory of the first or the last run, whichever is larger; None if none was measured."""
        if not isinstance(self.pricer, Derived):
            return None
        testbed = load_memory(self.pricer.protocol)
        peaks = [peak_memory(run, self.pricer.setting, testbed) for run in (self.runs[0], self.runs[-1])]
        return max((peak for peak in peaks if peak is not None), key=lambda peak: peak.party_bytes, default=None)

    @property
    def total(self) -> Price:
        """The cost of the whole model, which is the sum of the costs in `to_records`."""
        return self.estimate.total

    @property
    def latency_s(self) -> float:
        """Seconds from the prompt to the token, or to the last new token."""
        return self.total.latency_s

    @property
    def latency_s_range(self) -> tuple[float, float] | None:
        """Least and greatest latency, in seconds, by the errors expected of costs; None if they are not known."""
        return self.estimate.latency_s_range

    @property
    def sent_bytes(self) -> float:
        """Bytes on the wire, summed over parties."""
        return self.total.sent_bytes

    @property
    def rounds(self) -> float | None:
        """Number of waits for a message on the critical path; None if it is not known for the protocol."""
        return self.total.rounds

    @property
    def trust(self) -> Trust:
        """Whom you must trust under the protocol."""
        return self.estimate.trust

    @property
    def by_layer(self) -> tuple[tuple[LayerId, Price], ...]:
        """The cost of each layer, in order; `embed` and `head` are layers too."""
        return self.estimate.by_layer

    @property
    def setting(self) -> Setting | None:
        """The ring, the fraction bits and who holds the weights; None if the protocol has no choice of them."""
        setting: Setting | None = self.pricer.setting
        return setting

    @cached_property
    def deployed(self) -> "PricedModel | None":
        """The folded model under the same pricer; None if `asked.folded` is None, such as for a torch module."""
        return None if (folded := self.asked.folded) is None else replace(self, asked=folded)

    @cached_property
    def without_dealer(self) -> tuple[GeneratorCost, ...]:
        """The costs of making semi2k's randomness in other ways than by its dealer; empty under other protocols."""
        if not isinstance(self.pricer, Derived) or self.pricer.protocol != "semi2k":
            return ()
        return alternatives([node.op for run in self.runs for node in run], self.pricer.setting, self.pricer.link)

    @cached_property
    def savings(self) -> tuple[Saving, ...]:
        """Flags that lower the cost but keep the function; each cost is per new token and includes earlier flags."""
        return savings(
            self.asked.whole,
            self.pricer,
            self.asked.deployment,
            prompt_len=self.asked.seq_len,
            new_tokens=self.new_tokens or 1,
            makes_masks=self.new_tokens is not None,
        )

    @property
    def keys(self) -> DealtKeys | None:
        """The dealer's keys; None if the protocol has no such keys."""
        if (key_bytes := self.total.key_bytes) is None or not isinstance(self.pricer, ByFormula):
            return None
        return DealtKeys(
            party_bytes=key_bytes,
            sent_bytes=self.trust.num_parties * key_bytes,
            network_s=key_bytes * 8 / self.pricer.link.bandwidth_bits_per_s,
        )

    def to_dict(self, *, egress_price: float | None = None) -> dict[str, Any]:
        """Return the JSON document of `python -m costmodel estimate --format json`.

        Numbers are in SI units; every key is always present, with null for what is not known or was not asked for.
        Costs in `by_layer` and in `by_op` sum to those in `total`; all three are of the unfolded model and all tokens
        together. `egress_price` is the price of a GB (1e9 bytes) sent, in any currency; None leaves `egress` null.
        """
        left = self.deployed and self.deployed.asked.architecture
        return {
            **self.asked.title,
            "protocol": self.estimate.protocol,
            "network": self.estimate.network,
            "trust": estimates.trust_document(self.trust, self.without_dealer),
            "total": estimates.total_document(self.estimate),
            "by_layer": [{"layer": layer, **estimates.price_numbers(price)} for layer, price in self.by_layer],
            "by_op": estimates.op_records(self.estimate),
            "setting": estimates.setting_document(self._ops, self.setting, asdict(self.asked.deployment)),
            "deployed": self.deployed
            and left
            and {
                "notation": self.deployed.name,
                "placement": placement(left),
                "deployed_id": arch_id(left),
                "total": estimates.total_document(self.deployed.estimate),
            },
            "tokens": self.tokens and estimates.tokens_document(self.tokens),
            "memory": self.memory and asdict(self.memory),
            "keys": self.keys and asdict(self.keys),
            "egress": None
            if egress_price is None
            else {"price_per_gigabyte": egress_price, "price": self.sent_bytes / BYTES["GB"] * egress_price},
            "savings": [asdict(saving) for saving in self.savings],
        }

    @property
    def _ops(self) -> list[Op]:
        return [node.op for node, _ in self.estimate.by_op]

    def to_records(self) -> list[dict[str, Any]]:
        """Return one record per op or, with `new_tokens`, per new token; keys are those of `--format csv`.

        The costs of all records sum to `total`. `held_bytes` of an op is the bytes of shares that a party stores while
        the op runs; None if no MPC engine runs the protocol.
        """
        if self.tokens is not None:
            return estimates.token_records(self.tokens)
        records = estimates.op_records(self.estimate)
        held: Iterable[int | None] = [None] * len(records)
        if isinstance(self.pricer, Derived):
            running = self.graph, self.pricer.protocol, self.pricer.setting
            held = (held_bytes(*running) + alive for alive in alive_bytes(*running))
        return [{**record, "held_bytes": size} for record, size in zip(records, held, strict=True)]

    def to_pandas(self) -> Any:
        """Return `to_records` as a pandas.DataFrame, num_ops x 15 or num_new_tokens x 11.

        A UserError is raised if pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise UserError("a table of pandas needs pandas, but it is not installed; pip install pandas.") from None
        return pandas.DataFrame(self.to_records())

    def summary(self, *, egress_price: float | None = None) -> list[str]:
        """Return the lines that `estimate` prints above its tables. egress_price: price of a GB sent, or None."""
        priced, tokens = self.estimate, self.tokens
        on_network = f" on {priced.network}" if priced.network else ""
        asked = estimates.unusual(self._ops, self.setting, asdict(self.asked.deployment))
        lines = [
            f"{self.asked.heading}, protocol {priced.protocol}{on_network}{asked}",
            f"latency: {format_seconds(self.latency_s)}",
        ]
        if self.total.network_s is not None:
            compute_s, network_s = self.total.compute_s or 0.0, self.total.network_s
            lines[-1] += f" (compute {format_seconds(compute_s)} + network {format_seconds(network_s)})"
        if priced.latency_s_range is not None:
            low, high = map(format_seconds, priced.latency_s_range)
            lines.append(f"latency range: {low} to {high} ({priced.range_over})")
        lines.append(f"communication: {format_bytes(self.sent_bytes)}")
        if self.total.network_s is not None:
            dealt = "from the dealer" if priced.protocol == "crypten" else "the dealer's material is not counted"
            dealer = f"; {dealt}" * self.trust.dealer
            lines[-1] += f" (of which set-up {format_bytes(self.total.setup_bytes or 0)}{dealer})"
            lines.append(f"rounds: {self.total.rounds:,}")
        if tokens is not None:
            lines.append(estimates.tokens_line(tokens))
        if priced.extrapolated:
            lines.append(f"{describe(priced.extrapolated)}; {UNCHECKED if self.total.network_s is None else WIDER}")
        if self.keys is not None:
            lines.append(
                f"dealer's keys: {format_bytes(self.keys.party_bytes)} a party for this answer alone, sent beforehand "
                f"({format_bytes(self.keys.sent_bytes)} in all, {format_seconds(self.keys.network_s)} on the network, "
                "not counted elsewhere)"
            )
        if self.memory is not None:
            lines.append(_memory_line(self.memory))
        if egress_price is not None:
            tokens_out = self.asked.deployment.batch * (self.new_tokens or 1)
            money = egress_price / BYTES["GB"] / tokens_out
            dealt = f"; the dealer's keys {self.keys.sent_bytes * money:.4g} more" if self.keys else ""
            lines.append(
                f"egress: {self.sent_bytes * money:.4g} per token at {egress_price:g} a GB, all parties' bytes{dealt}"
            )
        lines.append(f"trust: {described(self.trust)}{self.asked.whose}")
        if self.setting is not None:
            lines.append(f"source: formulas and seconds of {self.setting.formulas_of}")
        if self.deployed is not None:
            lines.append(_deployed_line(self.deployed))
        lines.append(savings_line(self.savings, "per new token, " * (self.new_tokens is not None)))
        return [line for line in lines if line]

    def tables(self) -> list[Table]:
        """Return the tables of `estimate`: new tokens and replacements of a dealer (both if any), layers, op types."""
        by_token = [] if self.tokens is None else [estimates.tokens_table(self.tokens)]
        made = [estimates.made_table(self.without_dealer)] if self.without_dealer else []
        return [*by_token, *made, *estimates.estimate_tables(self.estimate)]

    def __str__(self) -> str:
        return "\n".join(self.summary())


def _memory_line(memory: PeakMemory) -> str:
    beyond = f", {memory.extrapolation:.1f}x beyond what was measured" if memory.extrapolation > 1 else ""
    return (
        f"peak memory of a party: {format_bytes(memory.party_bytes)}, of which shares "
        f"{format_bytes(memory.held_bytes)}; of the first party, which also prepares the run, "
        f"{format_bytes(memory.client_bytes)} (held-out error {memory.held_out_error:.0%}{beyond})"
    )


def _deployed_line(deployed: PricedModel) -> str:
    assert deployed.asked.architecture is not None
    placed, outside = placement(deployed.asked.architecture), describe(deployed.estimate.extrapolated)
    layers = "" if deployed.name == placed else f" ({placed})"
    price = f"{format_seconds(deployed.latency_s)}, {format_bytes(deployed.sent_bytes)}"
    return f"folded: {deployed.name}{layers}, {price}{outside and f'; {outside}'}"


@dataclass(frozen=True, kw_only=True)
class PricingOptions:
    """The protocol, network and testbed that a model is priced under.

    Args:
        protocol: published, semi2k, aby3, cheetah, sigma, crypten, ckks, or module:Class of your own.
        network: loopback, lan (the default), wan, another preset (cheetah-lan, bumblebee-wan, aero-stated, sigma-lan,
            sigma-wan) or a .yaml file, or a Network in Python; `published` includes its own network and takes none.
        bandwidth: bandwidth of the link instead of the network's, such as 1Gbps.
        rtt: round-trip time of the link instead of the network's, such as 4ms.
        testbed: a .yaml file of compute seconds, such as from `calibrate`, instead of the committed one; under ckks
            also the name of a card, such as a100; not for published.
        weights: secret-shared (the default), or held by the server alone.
        weight_masks: under semi2k, masks of weights that are fresh in every run (the default), or kept (reused) from an
            earlier run; with new tokens, the first run makes the masks that later runs reuse.
        threads: threads of each party, for a testbed measured with as many (default 1).
        ring_bits: bits of a number (default 64; sigma 50). A testbed is for one ring, except under sigma.
        fraction_bits: fractional bits of a number (default 18; sigma 12; crypten 16).
        new_tokens: price this number of generated tokens. The first run reads the prompt and projects its last token;
            each later run reads one token and the cached keys and values.
    """

    protocol: str = "published"
    network: str | None = None
    bandwidth: str | None = None
    rtt: str | None = None
    testbed: Path | None = None
    weights: Holder | None = None
    weight_masks: WeightMasks | None = None
    threads: int | None = None
    ring_bits: int | None = None
    fraction_bits: int | None = None
    new_tokens: int | None = None

    @property
    def link(self) -> Network | None:
        """The network with bandwidth and RTT replaced if given; None if no network option is given."""
        return link(self.network, self.bandwidth, self.rtt)

    @property
    def setting(self) -> Setting | None:
        """The protocol's setting; None if no option sets it. A UserError is raised for an unsupported option."""
        names = ("weights", "weight_masks", "threads", "ring_bits", "fraction_bits")
        return setting_of(self.protocol, **{name: getattr(self, name) for name in names})

    @property
    def pricer(self) -> Pricer:
        """The pricer of these options; a UserError is raised if they are not valid, or not of the protocol."""
        return load_pricer(self.protocol, self.link, self.testbed, self.setting)


@dataclass(frozen=True, kw_only=True)
class PriceOptions(ModelOptions, PricingOptions):
    """Options of `price` and of the commands: those of `PricingOptions` and `ModelOptions`."""


def price(model: Model, **options: Any) -> PricedModel:
    """Price a model in total, by layer and by op, with embedding and vocabulary projection, in seconds and bytes.

    The result has the costs of the unfolded model; its `deployed` has those of the folded model.

    Args:
        model: a notation such as SM+ScFuFFN_i6, the path of an architecture's .yaml file or of an export's folder, a
            checkpoint (a folder of save_pretrained, its config.json, a .gguf file, or OWNER/NAME of the Hugging Face
            hub), module:factory, an Architecture, the op graph of a prompt, or a torch module of 1 x T token ids.
        options: protocol, network and every other field of `PricingOptions` and `ModelOptions`, except `context`.

    Raises:
        UserError: If the model is none of these or cannot be read, an option is not valid, the model or the protocol
            does not support an option, or the protocol has no formula for an op.
    """
    given = PriceOptions(context=None, **options)
    asked = resolve_model(model, given)
    if given.new_tokens is not None:
        asked = asked.answering
    priced = PricedModel(asked=asked, pricer=given.pricer, new_tokens=given.new_tokens)
    assert priced.generation  # computes the costs, so that errors are raised here
    return priced
