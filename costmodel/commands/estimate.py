"""`python -m costmodel estimate`."""

import json
from pathlib import Path
from typing import Literal

from costmodel.commands.architectures import lowered
from costmodel.commands.output import print_blocks
from costmodel.errors import UserError
from costmodel.estimate import Pricer
from costmodel.estimate import estimate as price_graph
from costmodel.ops import Encoding, GeluForm, SoftmaxForm
from costmodel.protocols import load_pricer
from costmodel.protocols.primitives import EngineSetting, Holder
from costmodel.report import estimates
from search_spaces.architecture import Architecture, arch_id
from search_spaces.bases import Dimensions
from search_spaces.deployed import deployed
from search_spaces.lower import Deployment, Phase, Projection, lower
from search_spaces.notation import name_of, placement

DEFAULT_SETTING = EngineSetting()


def estimate(
    arch: str,
    base: str = "gpt2-small",
    layers: int | None = None,
    heads: int | None = None,
    d_model: int | None = None,
    d_ff: int | None = None,
    vocab: int | None = None,
    gelu: GeluForm | None = None,
    softmax: SoftmaxForm | None = None,
    seq_len: int = 128,
    embedding: Encoding = "one-hot",
    projection: Projection = "all",
    phase: Phase = "prefill",
    protocol: str = "published",
    network: str | None = None,
    testbed: Path | None = None,
    weights: Holder | None = None,
    threads: int | None = None,
    format: Literal["table", "json"] = "table",
) -> None:
    """Price an architecture: total, per layer and per op, embedding and vocabulary projection included.

    Priced as it is written; beside that, what folding leaves of it to deploy, and the price of that.

    Args:
        arch: an existing .yaml file, module:factory (an Architecture, or a torch module of token ids, which is traced),
            or a name such as SM+ScFuFFN_i6 or 6xLSLGo-6xoSoFs.
        base: the model whose dimensions a name is placed on.
        layers: number of layers, instead of the base's.
        heads: attention heads per layer, instead of the base's.
        d_model: features of the residual stream, instead of the base's.
        d_ff: features inside the FFN (4 * d_model unless given).
        vocab: tokens in the vocabulary, instead of the base's.
        gelu: the form of every GELU, instead of the base's.
        softmax: softmax in every layer, or a form that takes its place, instead of the base's.
        seq_len: tokens of the prompt.
        embedding: tokens one-hot encoded by the client, or looked up under the protocol.
        projection: logits of all tokens, or of the last one.
        phase: the whole prompt, or one more token after seq_len - 1 whose keys and values are kept.
        protocol: published, semi2k, aby3 or cheetah.
        network: loopback, lan (the default), wan, cheetah-lan, bumblebee-wan, aero-stated or a .yaml file; `published`
            has its own fitted in and takes none.
        testbed: compute seconds from `calibrate`, instead of the committed ones.
        weights: secret-shared (the default), or held by the server alone.
        threads: of each party, for a testbed that was measured so (default 1).
        format: tables for people or one JSON document in SI units.
    """
    dimensions = Dimensions(
        layers=layers, heads=heads, d_model=d_model, d_ff=d_ff, vocab=vocab, gelu=gelu, softmax=softmax
    )
    deployment = Deployment(embedding=embedding, projection=projection, phase=phase)
    title, graph, architecture = lowered(arch, base, dimensions, seq_len, deployment)
    asked = _asked(protocol, weights, threads)
    pricer = load_pricer(protocol, network, testbed, asked)
    priced = price_graph(graph, pricer)
    form = None if architecture is None else _deployed_form(architecture, seq_len, deployment, pricer)
    setting = None if protocol == "published" else asked or DEFAULT_SETTING
    if format == "json":
        print(json.dumps(estimates.document(priced, setting, **title, deployed=form), allow_nan=False))
    else:
        print_blocks(estimates.summary(priced, setting, **title, deployed=form), estimates.estimate_tables(priced))


def _asked(protocol: str, weights: Holder | None, threads: int | None) -> EngineSetting | None:
    """None if nothing is asked for."""
    if protocol == "published" and threads is not None:
        raise UserError(f"protocol published has its threads fitted in, but got --threads {threads}; leave it out.")
    if (weights, threads) == (None, None):
        return None
    return EngineSetting(weights=weights or "secret", threads=1 if threads is None else threads)


def _deployed_form(
    architecture: Architecture, seq_len: int, deployment: Deployment, pricer: Pricer
) -> estimates.DeployedForm:
    left = deployed(architecture)
    return estimates.DeployedForm(
        notation=name_of(left),
        placement=placement(left),
        deployed_id=arch_id(left),
        estimate=price_graph(lower(left, seq_len, deployment), pricer),
    )
