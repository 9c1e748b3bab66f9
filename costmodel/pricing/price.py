"""`costmodel.price`: the cost of a model under private inference."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from costmodel.estimate import Pricer
from costmodel.network import Network, link
from costmodel.pricing.model_spec import Model, ModelOptions, resolve_model
from costmodel.pricing.priced import PricedModel
from costmodel.protocols import Setting, load_pricer, setting_of
from costmodel.protocols.primitives import Holder, WeightMasks


@dataclass(frozen=True, kw_only=True)
class PricingOptions:
    """The protocol, network and testbed that a model is priced under.

    Args:
        protocol: published, semi2k, aby3, cheetah, sigma, crypten, ckks, or module:Class of your own.
        network: loopback, lan (the default), wan, another preset (cheetah-lan, bumblebee-wan, aero-stated, sigma-lan,
            sigma-wan) or a .yaml file, or a Network in Python; `published` includes its own network and takes none.
        bandwidth: bandwidth of the link instead of the network's, such as 1Gbps.
        rtt: round-trip time of the link instead of the network's, such as 4ms.
        testbed: a .yaml file of compute seconds from `calibrate`, instead of the committed one.
        weights: secret-shared (the default), or held by the server alone.
        weight_masks: under semi2k, masks that are fresh in every run, or kept (reused) from an earlier one, as for
            every token after the first; with new tokens, the first run makes them.
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
        """The network with its bandwidth or delay replaced; None if no network option is given."""
        return link(self.network, self.bandwidth, self.rtt)

    @property
    def setting(self) -> Setting | None:
        """The setting of numbers and weights, or None by default; a UserError is raised if it is not supported."""
        names = ("weights", "weight_masks", "threads", "ring_bits", "fraction_bits")
        return setting_of(self.protocol, **{name: getattr(self, name) for name in names})

    @property
    def pricer(self) -> Pricer:
        """The pricer of these options; a UserError is raised if the protocol does not support them."""
        return load_pricer(self.protocol, self.link, self.testbed, self.setting)


@dataclass(frozen=True, kw_only=True)
class PriceOptions(ModelOptions, PricingOptions):
    """Options of `price` and of the commands: those of `PricingOptions` and `ModelOptions`."""


def price(model: Model, **options: Any) -> PricedModel:
    """Price a model in total, by layer and by op, with embedding and vocabulary projection, in seconds and bytes.

    The result is the unfolded model; `.deployed` is the folded one.

    Args:
        model: a notation such as SM+ScFuFFN_i6, the path of an architecture's .yaml file or of an export's folder, a
            checkpoint (a folder of save_pretrained, its config.json, a .gguf file, or OWNER/NAME of the Hugging Face
            hub), module:factory, an Architecture, the op graph of a prompt, or a torch module of 1 x T token ids.
        options: protocol, network and every other field of `PricingOptions` and `ModelOptions`.

    Raises:
        UserError: If the model is none of these, it or the protocol does not support an option, or the protocol has no
            formula for an op.
    """
    given = PriceOptions(context=None, **options)
    asked = resolve_model(model, given)
    if given.new_tokens is not None:
        asked = asked.answering
    priced = PricedModel(asked=asked, pricer=given.pricer, new_tokens=given.new_tokens)
    assert priced.generation  # computes the costs, so that errors are raised here
    return priced
