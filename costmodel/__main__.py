"""`python -m costmodel estimate|compare|validate|calibrate`: what private inference costs, and how we know.

The one module of this package that knows architectures; everything below it prices op graphs.
"""

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal, NoReturn, TypedDict

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table

from costmodel.calibration import microbenchmark
from costmodel.calibration.fit_compute import fit_testbed as fit_compute
from costmodel.calibration.fit_published import calibrate as fit_testbed
from costmodel.calibration.fit_published import dump_testbed
from costmodel.calibration.validate_published import checks, derived_terms, fit_errors, flops_published
from costmodel.config import cli
from costmodel.config.units import format_bytes, format_seconds
from costmodel.deployment.deploy import Deployment, Phase, Projection
from costmodel.engine import spu as mpc_engine
from costmodel.engine.compare import Comparison, predict
from costmodel.engine.compare import compare as run_both
from costmodel.engine.measured_rounds import parse_delays
from costmodel.errors import StoppedError, UserError
from costmodel.estimate import Pricer
from costmodel.estimate import estimate as price_graph
from costmodel.execution.weights_file import load_weights
from costmodel.ops import Encoding, GeluForm, OpGraph, SoftmaxForm
from costmodel.protocols import load_pricer, published
from costmodel.protocols.compute_testbed import dump_compute
from costmodel.protocols.primitives import Comm, EngineSetting, Holder, total_comm
from costmodel.protocols.published_rows import PublishedRow, published_rows
from costmodel.protocols.published_testbed import load_testbed
from costmodel.report import comparisons, estimates
from costmodel.tracing.trace import trace
from search_spaces.architecture import Architecture, arch_id
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.deployed import deployed
from search_spaces.lower import lower
from search_spaces.notation import name_of, parse, placement
from search_spaces.resolve import call_factory, is_factory, is_notation, resolve

PIPE_WIDTH = 140  # columns of a table that no terminal limits
LARGE_BYTES = 1e9  # small models took the engine 60 to 260 s/GB on 2 cores: a minute or more
DEFAULT_SETTING = EngineSetting()
DEFAULT_DEPLOYMENT = Deployment()


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
        format: tables for people or one JSON document in SI units.
    """
    dimensions = Dimensions(
        layers=layers, heads=heads, d_model=d_model, d_ff=d_ff, vocab=vocab, gelu=gelu, softmax=softmax
    )
    deployment = Deployment(embedding=embedding, projection=projection, phase=phase)
    title, graph, architecture = _lowered(arch, base, dimensions, seq_len, deployment)
    asked = None if weights is None else EngineSetting(weights=weights)
    pricer = load_pricer(protocol, network, testbed, asked)
    priced = price_graph(graph, pricer)
    form = None if architecture is None else _deployed_form(architecture, seq_len, deployment, pricer)
    setting = None if protocol == "published" else asked or DEFAULT_SETTING
    if format == "json":
        print(json.dumps(estimates.document(priced, setting, **title, deployed=form), allow_nan=False))
    else:
        _print_blocks(estimates.summary(priced, setting, **title, deployed=form), estimates.estimate_tables(priced))


def compare(
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
    protocol: str = "semi2k",
    weights: Holder = "secret",
    weights_file: Path | None = None,
    ring_bits: int = DEFAULT_SETTING.ring_bits,
    fraction_bits: int = DEFAULT_SETTING.fraction_bits,
    delays: str | None = None,
    format: Literal["table", "json"] = "table",
) -> None:
    """Run an architecture under the MPC engine, and print predicted against measured costs and the logits' error.

    Tokens, and weights unless a file is given, are drawn with seed 0. Needs the engine, SecretFlow-SPU.

    Args:
        arch: an existing .yaml file, module:factory, or a name such as SM+ScFuFFN_i6 or 6xLSLGo-6xoSoFs.
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
        protocol: semi2k, aby3 or cheetah.
        weights: secret-shared before the run, or held by the server alone.
        weights_file: a .safetensors file of weights by <node>.<suffix>, such as `nas.export --format mpc` writes.
        ring_bits: bits of a secret-shared integer.
        fraction_bits: bits after the binary point.
        delays: three or more one-way delays to measure rounds at, such as 10ms,20ms,40ms; takes two runs for
            each, and two more.
        format: tables for people or one JSON document in SI units.
    """
    dimensions = Dimensions(
        layers=layers, heads=heads, d_model=d_model, d_ff=d_ff, vocab=vocab, gelu=gelu, softmax=softmax
    )
    deployment = Deployment(embedding=embedding, projection=projection, phase=phase)
    title, graph, _ = _lowered(arch, base, dimensions, seq_len, deployment)
    setting = EngineSetting(ring_bits=ring_bits, fraction_bits=fraction_bits, weights=weights)
    comparison = _run_both(graph, protocol, setting, weights_file, None if delays is None else parse_delays(delays))
    if format == "json":
        print(json.dumps(comparisons.document(comparison, **title), allow_nan=False))
    else:
        _print_blocks(comparisons.summary(comparison, **title), [comparisons.comparison_table(comparison)])


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


def _run_both(
    graph: OpGraph,
    protocol: str,
    setting: EngineSetting,
    weights_file: Path | None,
    delays_s: tuple[float, ...] | None,
) -> Comparison:
    predicted = predict(graph, protocol, setting)
    weights = None if weights_file is None else load_weights(weights_file, graph)
    mpc_engine.check_installed()
    _announce(graph, total_comm(predicted))
    try:
        return run_both(graph, predicted, protocol=protocol, setting=setting, weights=weights, delays_s=delays_s)
    except mpc_engine.EngineError as error:
        raise StoppedError(str(error)) from None


def _print_blocks(lines: Iterable[str], tables: Iterable[Table]) -> None:
    """Lines, then tables, each after an empty line."""
    console = _console()
    for line in lines:
        console.print(line)
    for table in tables:
        console.print()
        console.print(table)


def _announce(graph: OpGraph, predicted: Comm) -> None:
    """On stderr, since a run may take long."""
    size = predicted.online_bytes + predicted.setup_bytes
    slow = "; at this size it takes minutes or more" if size > LARGE_BYTES else ""
    print(f"running {len(graph.nodes)} ops under the engine, {format_bytes(size)} to send{slow}", file=sys.stderr)


def validate(protocol: Literal["published"] = "published") -> int:
    """Compare every printed row with its prediction, refit without each row, and check the bars.

    Args:
        protocol: the protocol whose testbed is checked.
    """
    testbed = load_testbed(published.TESTBED)
    pricer = published.load()
    rows = published_rows()
    architectures = {row.name: _architecture(row) for row in rows}
    counts = {row.name: published.graph_counts(_graph(row)) for row in rows}
    flops = {
        row.name: flops_published(
            row,
            [layer.ffn for layer in architectures[row.name].layers],
            simplified=architectures[row.name].block == "sas",
        )
        for row in rows
    }
    found = checks(
        rows,
        counts,
        sent_bytes=pricer.sent_bytes,
        latency_s=pricer.latency_s,
        num_flops_wrong=sum(not flops[row.name].matches(row) for row in rows),
    )
    console = _console()
    console.print(
        estimates.rows_table(
            rows,
            sent_bytes_errors=fit_errors("sent_bytes", rows, counts, pricer.sent_bytes),
            latency_errors=fit_errors("latency_s", rows, counts, pricer.latency_s),
            flops=flops,
        )
    )
    console.print()
    console.print(estimates.checks_table(found))
    console.print("\nfirst principles (protocol cheetah, GPT-2 small at T=128):")
    console.print(estimates.derived_table(derived_terms(), pricer.sent_bytes))
    console.print("\nidentified by a prior alone:")
    for quantity, constants in (("sent_bytes", testbed.sent_bytes), ("latency_s", testbed.latency_s)):
        for term, constant in constants.items():
            if constant.identified_by == "prior":
                console.print(f"- {quantity} of {term}: {constant.source}")
    console.print("\nnot identified by the rows:")
    for text in testbed.not_identified:
        console.print(f"- {text}")
    return cli.STOPPED if any(not check.passed for check in found) else 0


def calibrate(
    protocol: Literal["published", "semi2k", "aby3", "cheetah"] = "published",
    engine: Literal["spu"] | None = None,
    output: Path | None = None,
) -> None:
    """Fit a testbed and write it: on the printed rows, or on what the engine takes on this machine.

    A calibration that was stopped goes on where it was: its timings so far are in a file beside the output.

    Args:
        protocol: the protocol whose testbed is fitted.
        engine: spu to measure a protocol of the engine; none for published.
        output: the file to write; for published, by default the committed one.
    """
    if (protocol == "published") != (engine is None):
        raise UserError(f"--protocol {protocol} must be fitted with{'out' if engine else ''} --engine spu.")
    if engine is None:
        rows = published_rows()
        _write(output or published.TESTBED, dump_testbed(fit_testbed(rows, {row.name: _graph(row) for row in rows})))
        return
    if output is None:
        raise UserError(f"--output is required for protocol {protocol}: the .yaml file to write.")
    if os.path.isdir(output) or not os.access(output.parent, os.W_OK):  # before it is measured for minutes
        raise UserError(f"--output {output} must be a file in a folder that can be written to.")
    mpc_engine.check_installed()
    timings = output.with_suffix(f".{protocol}.timings.jsonl")
    _write(output, _measured_testbed(protocol, timings))
    timings.unlink()


def _measured_testbed(protocol: str, path: Path) -> str:
    """The text of a testbed; every timing is saved in a file as soon as it is there."""
    setting = EngineSetting()
    known = microbenchmark.saved(path)
    timings = []
    console, total = Console(stderr=True, highlight=False, soft_wrap=True), len(microbenchmark.plan(protocol))
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(protocol, total=total, visible=console.is_terminal)
        try:
            for timing in microbenchmark.measure(protocol, setting, known):
                if timing not in known:
                    microbenchmark.save(timing, path)
                timings.append(timing)
                progress.update(task, advance=1, description=f"{protocol}: {timing.kind}")
                if not console.is_terminal:
                    left_s = progress.tasks[task].time_remaining
                    eta = "" if left_s is None else f", about {format_seconds(left_s)} left"
                    console.print(f"{protocol}: {timing.kind}, {len(timings)} of {total} kinds of op{eta}")
        except mpc_engine.EngineError as error:
            raise StoppedError(f"{error} Timings so far are in {path}; run the command again to go on.") from None
    return dump_compute(fit_compute(protocol, setting, timings))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {path} cannot be written: {error.strerror}.") from None
    _console().print(f"wrote {path}")


class _Title(TypedDict):
    """What the output calls the model."""

    architecture: str
    base: str | None
    seq_len: int
    deployment: Mapping[str, str | None]


def _lowered(
    arch: str, base: str, dimensions: Dimensions, seq_len: int, deployment: Deployment = DEFAULT_DEPLOYMENT
) -> tuple[_Title, OpGraph, Architecture | None]:
    """The architecture is None where a torch model was traced.

    Raises UserError for an unknown architecture or base, or dimensions that do not fit.
    """
    named_base = base if is_notation(arch) else None
    if named_base is None and dimensions != Dimensions():
        raise UserError(f"architecture {arch!r} brings its own dimensions; leave out the flags that change them.")
    if is_factory(arch) and not isinstance(made := call_factory(arch), Architecture):
        if deployment != DEFAULT_DEPLOYMENT:
            raise UserError(
                f"model {arch!r} is priced as it is traced; leave out the flags that change its deployment."
            )
        facts = {"embedding": "one-hot", "projection": None, "phase": None}  # the model decides
        title = _Title(architecture=arch, base=None, seq_len=seq_len, deployment=facts)
        return title, trace(made, seq_len, name=arch), None
    named = resolve(arch, base_architecture(base, dimensions))
    name = name_of(named.architecture, entropy_regularised=named.entropy_regularised)
    title = _Title(architecture=name, base=named_base, seq_len=seq_len, deployment=asdict(deployment))
    return title, lower(named.architecture, seq_len, deployment), named.architecture


def _architecture(row: PublishedRow) -> Architecture:
    dimensions = Dimensions(layers=row.num_layers, heads=row.num_heads, d_model=row.d_model, vocab=row.vocab_size)
    return parse(row.notation, base_architecture("gpt2-small", dimensions)).architecture


def _graph(row: PublishedRow) -> OpGraph:
    return lower(_architecture(row), row.seq_len)


def _console() -> Console:
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, soft_wrap=True, width=PIPE_WIDTH)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits with its code."""
    commands: dict[str, cli.Command] = {
        "estimate": estimate,
        "compare": compare,
        "validate": validate,
        "calibrate": calibrate,
    }
    cli.run(commands, prog="python -m costmodel", args=args)


if __name__ == "__main__":
    main()
