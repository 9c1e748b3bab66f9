"""`python -m costmodel compare`: compares predicted costs with a run of the engine."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from costmodel.config.units import format_bytes
from costmodel.engine.children import kept_children
from costmodel.engine.ckks_library import PACKAGE, SECONDS_BAR, STATED_ERROR, VERSION, Library, load_library
from costmodel.engine.ckks_library import compare as compare_ckks
from costmodel.engine.compare import compare as run_both
from costmodel.engine.compare import predict
from costmodel.engine.registry import check_installed, engine_of
from costmodel.engine.spu import parse_delays
from costmodel.errors import UserError
from costmodel.estimate import estimate as price_graph
from costmodel.execution.interpreter import load_weights
from costmodel.ops import OpGraph
from costmodel.pricing.model_spec import resolve_model
from costmodel.pricing.price import PriceOptions
from costmodel.protocols import load_pricer
from costmodel.protocols.ckks import MOST_LEVELS
from costmodel.protocols.formulas import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import EngineSetting, total_comm
from costmodel.report import comparisons
from costmodel.report.tables import print_blocks, print_csv, table

LARGE_BYTES = 1e9  # a minute or more, since small models took the engine 60 to 260 s/GB on 2 cores


def compare(
    arch: str,
    protocol: str = "semi2k",
    weights_file: Path | None = None,
    delays: str | None = None,
    format: Literal["table", "json", "csv"] = "table",
    **options: Any,
) -> None:
    """Run an architecture under a protocol's engine; print predicted and measured costs and the error of the logits.

    Tokens are drawn with seed 0, and so are weights unless a file is given. The engine must be installed:
    SecretFlow-SPU, CrypTen for protocol crypten, or DESILO's library for ckks. The engine runs on this machine; if you
    give a network, seconds on that network are predicted too.

    Args:
        arch: an architecture, as for `estimate`.
        protocol: semi2k, aby3, cheetah, crypten, or ckks, which compares counts, logits and seconds of a small model.
        weights_file: a .safetensors file of weights named <node>.<suffix>, as `nas.export --format mpc` writes it.
        delays: three or more one-way delays at which rounds are measured, such as 10ms,20ms,40ms; takes two runs per
            delay, and two more. Not for crypten, which counts its rounds itself, and ckks.
        format: tables, one JSON document, or CSV with a line per op; in SI units.
    """
    given = PriceOptions(context=None, protocol=protocol, threads=None, new_tokens=None, **options)
    asked = resolve_model(arch, given)
    graph, deployment = asked.graph, asdict(asked.deployment)
    if protocol == "ckks":
        _ = given.setting  # refuses flags that ckks does not take
        for flag, value in {"delays": delays, "network": given.link, "testbed": given.testbed}.items():
            if value is not None:
                raise UserError(f"--{flag} is not of protocol ckks, which has no parties to wait for; leave it out.")
        _compare_ckks(graph, weights_file, format, asked.heading)
        return
    engine = engine_of(protocol)
    setting = given.setting or ENGINE_PROTOCOLS[protocol].setting()
    assert isinstance(setting, EngineSetting)
    other, testbed = given.link, given.testbed
    on_network = None if other is None else price_graph(graph, load_pricer(protocol, other, testbed, setting))
    if delays is not None and engine.counts_rounds:
        raise UserError(f"--delays measures rounds, which {engine.package} counts itself; leave it out.")
    delays_s = None if delays is None else parse_delays(delays)
    predicted = predict(graph, protocol, setting)
    loaded = None if weights_file is None else load_weights(weights_file, graph)
    if testbed is not None:
        load_pricer(protocol, testbed=testbed, setting=setting)  # checks the testbed before anything runs
    check_installed(protocol)
    size = total_comm(predicted).sent_bytes
    slow = "; at this size it takes minutes or more" if size > LARGE_BYTES else ""
    print(f"running {len(graph.nodes)} ops under the engine, {format_bytes(size)} to send{slow}", file=sys.stderr)
    with kept_children():
        comparison = run_both(
            graph, predicted, protocol=protocol, setting=setting, weights=loaded, delays_s=delays_s, testbed=testbed
        )
    if format == "json":
        print(json.dumps(comparisons.document(comparison, asked.title, deployment, on_network), allow_nan=False))
    elif format == "csv":
        print_csv(comparisons.op_records(comparison))
    else:
        lines = comparisons.summary(comparison, asked.heading, deployment, on_network)
        print_blocks(lines, [comparisons.comparison_table(comparison)])


def _compare_ckks(graph: OpGraph, weights_file: Path | None, format: str, heading: str) -> None:
    load_pricer("ckks").prices(graph.nodes)  # refuses what has no formula before keys are made
    weights = None if weights_file is None else load_weights(weights_file, graph)
    load_library()
    print(f"running {len(graph.nodes)} ops under {PACKAGE}; keys and bootstraps take minutes", file=sys.stderr)
    found = compare_ckks(graph, Library(MOST_LEVELS, is_bootstrapped=True), weights)
    columns = {name: getattr(found, name) for name in ("predicted", "measured", "predicted_s", "measured_s")}
    records = [
        {"primitive": name, **{column: values.get(name, 0) for column, values in columns.items()}}
        for name in found.predicted
    ]
    if format == "csv":
        print_csv(records)
    elif format == "json":
        error = {"seconds_error": found.seconds_error, "logits_max_abs_error": found.logits_max_abs_error}
        print(json.dumps({"protocol": "ckks", "primitives": records, **error, "saved": found.saved}, allow_nan=False))
    else:
        seconds = [sum(columns[name].values()) for name in ("predicted_s", "measured_s")]
        lines = [
            f"{heading}; protocol ckks under {PACKAGE} {VERSION}",
            f"counts {'are' if found.predicted == found.measured else 'are NOT'} equal; seconds of the CPU: predicted "
            f"{seconds[0]:.1f}, measured {seconds[1]:.1f} ({found.seconds_error:+.1%}, bound {SECONDS_BAR:.0%})",
            f"logits differ from plaintext by at most {found.logits_max_abs_error:.2g} (bound {STATED_ERROR:g}); "
            f"placing bootstraps over the whole graph would save {found.saved}",
        ]
        cells = [[str(one["primitive"]), *(f"{one[name]:.4g}" for name in columns)] for one in records]
        print_blocks(lines, [table(["primitive"], list(columns), cells)])
