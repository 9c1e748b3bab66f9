"""The set-up of a private run: the model, the protocol with its setting, and the network for predicted seconds.

Before a run, checks that the engine's fixed point holds the model, and the client's own prompt.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from costmodel.deployment.deploy import Deployment
from costmodel.deployment.known_layers import halves
from costmodel.engine.crypten_cuda import check_device
from costmodel.engine.greedy import ClearRun, ClientLayers
from costmodel.engine.plan import CLIENT, RUN, SERVER, Assignment, GraphOf, Plan, graphs, holds, ranks, role
from costmodel.errors import OutOfRangeError, UserError
from costmodel.execution.arithmetic import Arithmetic
from costmodel.execution.engine_arithmetic import arithmetic_of
from costmodel.execution.interpreter import Array, Weights
from costmodel.network import Network, link, load_network
from costmodel.ops import GeluForm, OpGraph
from costmodel.protocols import TRUST
from costmodel.protocols.crypten import CryptenSetting
from costmodel.protocols.derived import check_setting
from costmodel.protocols.primitives import EngineSetting, Holder, WeightMasks
from costmodel.report.estimates import trust_document
from costmodel.trust import at_client, described, shown
from nas.conversion.change_of_basis import inner_norm_linears
from nas.conversion.fixed_point_check import NUM_TOKENS, both, check_sequences, fitting, require_accuracy
from nas.corpus.corpus import known_corpus
from nas.corpus.documents import OWN_RULE
from nas.corpus.tokenizer import given_encoder
from nas.malloc import release_freed_memory
from nas.private.model import PrivateModel, load_model, with_gelu
from search_spaces.architecture import Architecture
from search_spaces.inner import inner_epsilon
from search_spaces.lower import lower, lower_with

# Default fraction bits by ring bits. Source: SecretFlow-SPU 0.9.5, docs, RuntimeConfig, fxp_fraction_bits
FRACTION_BITS = {32: 8, 64: 18, 128: 26}
# ends of names of what writes to the stream; a linear before an inner norm does not
WRITERS = ("embed", "position", "attention.out", "attention.norm", "ffn.down", "ffn.fused", "ffn.norm")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A private run, with a network for predicted seconds.

    public_layers: layers whose weights all parties know, such as 0-5,7; None if there are none. client_layers: number
    of first layers that the client computes in plaintext, or None. client_weights: weights by `<node>.<suffix>`, those
    of the client's layers included; None if not on this machine. out_of_range: why fixed point does not hold the model,
    or folding changed it, if it runs all the same; else None.
    """

    model: PrivateModel
    protocol: str
    setting: EngineSetting
    network: Network
    public_layers: str | None = None
    client_layers: int | None = None
    client_weights: Weights | None = None
    out_of_range: str | None = None

    @property
    def graph_of(self) -> GraphOf:
        layers = {"public_layers": self.public_layers, "client_layers": self.client_layers}
        return partial(lower_with, self.model.architecture, layers)

    def own_layers(self, plan: Plan) -> ClientLayers | None:
        """Return the layers that the client computes in plaintext, for every step of a plan; None if there are none."""
        if self.client_layers is None:
            return None
        assert self.client_weights is not None
        whole = partial(client_graph, self.model.architecture, self.client_layers)
        return ClientLayers(graphs=graphs(whole, plan), run=ClearRun(self.client_weights))

    def holds(self, rank: int) -> str:
        """Return words for the user on what the party of this rank knows, and on what it has only shares of."""
        words = holds(rank, self.protocol, self.setting)
        if self.public_layers:
            words += f"; the weights of public layers {self.public_layers}, as all parties"
        if self.client_layers is not None and rank == CLIENT:
            words += f"; the weights of {at_client(self.client_layers)}"
        return words

    def client(self, plan: Plan) -> Assignment:
        """Return the client's assignment for a plan, with the data of all parties, as `on_this_machine` takes it."""
        return Assignment(
            protocol=self.protocol,
            setting=self.setting,
            graph_of=self.graph_of,
            plan=plan,
            weights=self.model.weights,
            is_in_range=self.out_of_range is None,
        )


def resolve_setup(
    run: str,
    pick: str,
    *,
    party: int | None,
    protocol: str = "semi2k",
    weights: Holder = "secret",
    weight_masks: WeightMasks = "fresh",
    ring_bits: int = 64,
    fraction_bits: int | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    network: str | None = None,
    bandwidth: str | None = None,
    rtt: str | None = None,
    begin_of_text: str = OWN_RULE,
    gelu: GeluForm | None = None,
    public_layers: str | None = None,
    client_layers: int | None = None,
    public_checkpoint: str | None = None,
) -> Setup:
    """Return the set-up that flags ask for; run, pick and protocol are those of `private`.

    Raise UserError if a flag has a bad value, flags contradict each other, a model cannot be loaded, there is no GPU
    for `cuda`, or public weights differ.

    Args:
        party: rank of the only party that runs here; None for all. The weights are needed for None and for the server.
        weights: secret-shared by the server before the run, or held only by the server.
        weight_masks: under semi2k, new masks for every token, or the masks of the first token kept.
        ring_bits: bits of a secret-shared integer.
        fraction_bits: bits after the binary point; by default 18 in a ring of 64 bits, 8 in 32, 26 in 128, or at most
            16 under crypten.
        device: under crypten, cpu, or cuda for parties on GPUs, one each, or all on one if there is only one.
        network: network for predicted seconds, by name or as a .yaml file, instead of loopback.
        bandwidth: bandwidth of that network with a unit, such as 1Gbps, instead of its own.
        rtt: round-trip time of that network with a unit, such as 4ms, instead of its own.
        begin_of_text: the token that begins a prompt: tokenizer, for its own rule; none; or a token such as <s>. A
            prompt's length includes it.
        gelu: tanh, exact or piecewise instead of the form in training, also in plaintext; --perplexity measures what
            fixed point costs each of them.
        public_layers: layers whose weights are not secret and go to all parties in plaintext, such as 0-5,7 or embed.
        client_layers: number of first layers that the client computes in plaintext, with the embedding.
        public_checkpoint: checkpoint with the weights of public and client layers, named as RUN is. Weights that are
            here must be equal to the bit, up to the powers of two by which folding scaled them. A run that was
            searched with such layers uses them and its parent by default.
    """
    setting = _setting(protocol, ring_bits, fraction_bits, weights, weight_masks, device)
    if (public_layers is None and client_layers is None) != (public_checkpoint is None):
        raise UserError(
            "--public-checkpoint goes with --public-layers or --client-layers, which are of it; give both, or none."
        )
    model = load_model(run, pick, weights_here=party in (None, SERVER), begin_of_text=begin_of_text)
    return Setup(
        protocol=protocol,
        setting=setting,
        network=link(network, bandwidth, rtt) or load_network("loopback"),
        model=with_gelu(model, gelu),
        **_known_layers(model, pick, party, public_layers, client_layers, public_checkpoint),
    )


def _known_layers(
    model: PrivateModel,
    pick: str,
    party: int | None,
    public_layers: str | None,
    client_layers: int | None,
    public_checkpoint: str | None,
) -> dict[str, Any]:
    """Return the fields of `Setup` on layers whose weights others than the server know; the model's own by default."""
    if public_checkpoint is None and model.known is not None:
        public_layers, client_layers, public_checkpoint = model.known
    weights = model.weights
    if public_checkpoint is not None and (weights is not None or (client_layers is not None and party == CLIENT)):
        checkpoint = load_model(public_checkpoint, pick)
        require_public(model, public_layers, client_layers, checkpoint)
        weights = weights or checkpoint.weights
    return {"public_layers": public_layers, "client_layers": client_layers, "client_weights": weights}


def require_public(
    model: PrivateModel, public_layers: str | None, client_layers: int | None, checkpoint: PrivateModel
) -> None:
    """Raise UserError unless public layers and the client's have the same weights in the model and in a checkpoint.

    Both are folded, so that what was folded into these layers must be the same too. Weights must be equal to the bit,
    but those that write to the stream may differ by the power of two that scales the stream (`with_stream_scale`), and
    those before inner norms by those of `with_inner_scales`. If the model's weights are not on this machine, only
    shapes are compared, and both must have the same scales.
    """
    assert checkpoint.weights is not None
    architecture = model.architecture
    scale = math.sqrt(architecture.norm_epsilon / checkpoint.architecture.norm_epsilon)
    factors = {
        linear: math.sqrt(inner_epsilon(architecture, norm) / inner_epsilon(checkpoint.architecture, norm))
        for norm, _, linear in inner_norm_linears(architecture)
    }
    graph = lower(architecture, architecture.context, Deployment(public_layers=public_layers))
    at_client = () if client_layers is None else halves(graph, client_layers).client.nodes
    compared = [node for node in graph if node.op.public or node in at_client]
    scales = {scale, *(factors[node.name] for node in compared if node.name in factors)}
    if {math.frexp(each)[0] for each in scales} != {0.5} or (scales != {1} and model.weights is None):
        raise UserError(
            f"the stream of --public-checkpoint, and what inner norms read, must differ from the model's by powers of "
            f"two, and not at all at a party without weights, but do by {', '.join(f'{each:g}' for each in scales)} "
            f"({model.name}); give the checkpoint that it is of, or the export with its weights."
        )
    for node in compared:
        for suffix, shape in node.op.weight_shapes.items():
            name = f"{node.name}.{suffix}"
            factor = factors.get(node.name, scale if node.name.endswith(WRITERS) else 1.0)
            theirs = checkpoint.weights.get(name)
            if theirs is None or not (
                theirs.shape == shape if model.weights is None else np.array_equal(model.weights[name], theirs * factor)
            ):
                raise UserError(
                    f"public layers and the client's must have the weights of --public-checkpoint, folded likewise, "
                    f"but {name!r} {'is not in it' if theirs is None else 'differs'} ({model.name}); leave layer "
                    f"{node.layer} out, or give the checkpoint that it is of."
                )


def _setting(
    protocol: str,
    ring_bits: int,
    fraction_bits: int | None,
    weights: Holder,
    weight_masks: WeightMasks,
    device: Literal["cpu", "cuda"],
) -> EngineSetting:
    if protocol not in RUN:
        raise UserError(f"no engine of private answers runs protocol {protocol!r}; choose one of {', '.join(RUN)}.")
    if protocol == "crypten":
        check_device(device)
        given = {} if fraction_bits is None else {"fraction_bits": fraction_bits}
        return CryptenSetting(ring_bits=ring_bits, weights=weights, weight_masks=weight_masks, device=device, **given)
    if device != "cpu":
        raise UserError(f"--device must be cpu under protocol {protocol}, but got {device}; choose protocol crypten.")
    fraction = FRACTION_BITS.get(ring_bits, 1) if fraction_bits is None else fraction_bits
    setting = EngineSetting(ring_bits=ring_bits, fraction_bits=fraction, weights=weights, weight_masks=weight_masks)
    check_setting(protocol, setting)
    return setting


def client_graph(architecture: Architecture, num_layers: int, num_tokens: int, deployment: Deployment) -> OpGraph:
    """Return the op graph of the embedding and the first `num_layers` layers, which the client computes."""
    return halves(lower(architecture, num_tokens, deployment), num_layers).client


def describe_setting(setting: EngineSetting) -> str:
    """Return words on a setting: its ring and fraction bits, and weights, masks and device if not the default."""
    weights = ", weights held by the server alone" if setting.weights == "server" else ""
    masks = ", masks of weights kept" if setting.weight_masks == "kept" else ""
    on_card = ", on a GPU" if setting.device == "cuda" else ""
    return f"ring of {setting.ring_bits} bits, {setting.fraction_bits} of them fraction{weights}{masks}{on_card}"


def header_lines(setup: Setup) -> list[str]:
    """Return lines that say what is about to run, whom you must trust, and what each party knows."""
    trust = TRUST[setup.protocol]
    of_client = " (that party is the client, which could so learn the weights)"
    dealer = of_client if trust.dealer and len(ranks(setup.protocol)) == trust.num_parties else ""
    return [
        f"{setup.model.name}; protocol {setup.protocol}, {describe_setting(setup.setting)}; "
        f"{setup.setting.formulas_of}",
        *notes(setup),
        f"trust: {described(trust)}{dealer}{shown(setup.public_layers, setup.client_layers)}",
        *(f"  party {rank} ({role(rank, setup.protocol)}): {setup.holds(rank)}" for rank in ranks(setup.protocol)),
    ]


def notes(setup: Setup) -> list[str]:
    """Return remarks on the model for the user; if it is out of fixed-point range, one of them says why."""
    out_of_range = [] if setup.out_of_range is None else [f"out of range, do not rely on it: {setup.out_of_range}"]
    return [*setup.model.notes, *out_of_range]


def setup_document(setup: Setup) -> dict[str, Any]:
    """Return model, protocol, setting, trust and parties of a set-up as JSON data."""
    setting, trust = setup.setting, TRUST[setup.protocol]
    return {
        "model": setup.model.name,
        "notes": notes(setup),
        "in_range": setup.out_of_range is None,
        "protocol": setup.protocol,
        "network": setup.network.name,
        "setting": {
            "engine": setting.formulas_of,
            "ring_bits": setting.ring_bits,
            "fraction_bits": setting.fraction_bits,
            "weights": setting.weights,
            "weight_masks": setting.weight_masks,
            "device": setting.device,
            "public_layers": setup.public_layers,
            "client_layers": setup.client_layers,
        },
        "trust": trust_document(trust),
        "parties": [
            {"rank": rank, "role": role(rank, setup.protocol), "holds": setup.holds(rank)}
            for rank in ranks(setup.protocol)
        ],
    }


def in_range(setup: Setup, fraction_bits: int | None, *, is_allowed: bool) -> Setup:
    """Return the set-up with fraction bits that keep its model in fixed-point range, or with the reason why none do.

    fraction_bits: the user's choice, the only one tried; None to try those of the protocol. is_allowed: whether such a
        model may run; all parties must agree on this. If the weights are on another machine, the export's record
        decides; without a record for this ring, only the server checks. Raise UserError, with the reason, for a model
        that is out of range, too inaccurate or changed by folding, unless that is allowed.
    """
    try:
        fitted = _as_recorded(setup, fraction_bits) if setup.model.weights is None else _fitted(setup, fraction_bits)
        release_freed_memory()  # the parties on this machine need what the check took
        if setup.model.failed is not None:  # folding changed the model; if an op is out of range too, that says more
            raise OutOfRangeError(setup.model.failed)
        return fitted
    except OutOfRangeError as error:
        if is_allowed:
            return replace(setup, out_of_range=str(error))
        raise UserError(
            f"the model must hold in the fixed point of protocol {setup.protocol}, but {error}; choose another "
            f"protocol or model, or run it for study with --allow-out-of-range true."
        ) from None


def _as_recorded(setup: Setup, fraction_bits: int | None) -> Setup:
    recorded = setup.model.recorded.get(setup.protocol)
    if not isinstance(recorded, Mapping) or setup.setting.ring_bits != recorded.get("ring_bits"):
        return setup
    if (failure := recorded.get("failure")) is not None:
        raise OutOfRangeError(str(failure))
    bits = recorded.get("fraction_bits")
    if fraction_bits is not None or not isinstance(bits, int):
        return setup
    return replace(setup, setting=replace(setup.setting, fraction_bits=bits))


def _fitted(setup: Setup, fraction_bits: int | None) -> Setup:
    model, length = setup.model, min(NUM_TOKENS, setup.model.architecture.context)
    assert model.weights is not None

    def stream(tokens: Array, deployment: Deployment) -> Mapping[str, Array]:
        """Return the hidden states after the client's own layers."""
        assert setup.client_layers is not None
        assert setup.client_weights is not None
        graph = client_graph(model.architecture, setup.client_layers, length, deployment)
        return ClientLayers(graphs=(graph,), run=ClearRun(setup.client_weights)).stream(0, tokens)

    begin = given_encoder(model.tokenizer, None, None).begin
    sequences = check_sequences(model.weights["embed.weight"], known_corpus(model.corpus), length, begin)
    setting = fitting(
        setup.protocol, setup.setting, setup.graph_of, model.weights, sequences,
        fraction_bits=fraction_bits, inputs_of=None if setup.client_layers is None else stream,
    )  # fmt: skip
    return replace(setup, setting=setting)


def prompt_arithmetic(
    setup: Setup, graph: OpGraph, tokens: Sequence[int], layers: ClientLayers | None
) -> Arithmetic | None:
    """Check that a prompt stays in fixed-point range, and return the arithmetic that checks each new token.

    Nothing is checked, and None returned, if the model's weights are not here or the model is out of range already.
    graph: the graph of the prompt's step. tokens: ids of the prompt. layers: those that the client computes, or None.
    Raise UserError if numbers leave the range, naming op and values, or if the logits are too inaccurate.
    """
    if setup.model.weights is None or setup.out_of_range is not None:
        return None
    ids, arithmetic = np.asarray(tokens), arithmetic_of(setup.protocol, setup.setting)
    inputs = {"tokens": ids} if layers is None else layers.stream(0, ids)
    try:
        require_accuracy(both(graph, setup.model.weights, inputs, arithmetic))
    except OutOfRangeError as error:
        raise UserError(
            f"the prompt must hold in the fixed point of protocol {setup.protocol}, but {error}; choose another prompt "
            f"or protocol, or run it for study with --allow-out-of-range true."
        ) from None
    arithmetic.wrong.clear()
    return arithmetic
