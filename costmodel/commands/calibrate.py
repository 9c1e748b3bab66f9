"""`python -m costmodel calibrate`: fits a testbed on printed rows or on measurements of the engine on this machine."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from costmodel.calibration import microbenchmark
from costmodel.calibration.fit_compute import fit_testbed as fit_compute
from costmodel.calibration.fit_memory import dump_memory, measured_memory
from costmodel.calibration.fit_published import calibrate as fit_published
from costmodel.calibration.fit_published import dump_testbed
from costmodel.calibration.fit_sigma import dump_sigma
from costmodel.calibration.fit_sigma import fit as fit_sigma
from costmodel.calibration.model_testbed import measured_model
from costmodel.calibration.sigma_rows import sigma_rows
from costmodel.calibration.timed_run import check_engine, timed_run, timings_file
from costmodel.commands.output import console, print_blocks
from costmodel.commands.validate import row_graph
from costmodel.config.units import format_seconds
from costmodel.errors import UserError
from costmodel.ops import OpGraph
from costmodel.pricing.model_spec import ModelOptions, resolve_model
from costmodel.protocols import published, sigma
from costmodel.protocols.compute_testbed import ComputeTestbed, dump_compute
from costmodel.protocols.engine_protocols import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import EngineSetting, Holder
from costmodel.protocols.published_rows import published_rows
from costmodel.report.tables import table

NUM_PASSES = 2  # over all kinds of op, since a slowdown of minutes outlasts the repeats of one op

# whether a protocol is slow -> width, layers and tokens of the models whose memory is measured
MEMORY_SIZES = {
    False: (
        (64, 1, 32), (64, 2, 128), (128, 2, 64), (256, 1, 32), (256, 2, 64), (384, 1, 128), (512, 1, 64), (768, 1, 32),
        (512, 2, 32), (768, 2, 64), (768, 2, 128),
    ),
    True: (
        (64, 1, 32), (64, 2, 128), (128, 1, 32), (128, 2, 64), (192, 1, 64), (256, 1, 32), (256, 2, 64), (384, 1, 32),
        (512, 1, 32), (768, 1, 32),
    ),
}  # fmt: skip


# protocol without measurements of an engine here -> its committed testbed, and the text of a fit on its rows
FITTED: dict[str, tuple[Path, Callable[[], str]]] = {
    "published": (
        published.TESTBED,
        lambda: dump_testbed(fit_published(published_rows(), {row.name: row_graph(row) for row in published_rows()})),
    ),
    "sigma": (sigma.TESTBED, lambda: dump_sigma(fit_sigma([row for row in sigma_rows() if row.fitted]))),
}


def calibrate(
    protocol: Literal["published", "semi2k", "aby3", "cheetah", "sigma", "crypten"] = "published",
    engine: Literal["spu", "crypten"] | None = None,
    output: Path | None = None,
    for_: str | None = None,
    weights: Holder = "secret",
    threads: int = 1,
    memory: bool = False,
    **model: Any,
) -> None:
    """Fit a testbed and write it, from printed or logged rows or from measurements of the engine on this machine.

    All kinds of op are measured twice, minutes apart, and the faster runs count. With --for, every op of one model is
    measured once at its full size, and the testbed can price only these ops. An interrupted calibration resumes from
    its timings, which are in files beside the output.

    Args:
        protocol: protocol whose testbed is fitted.
        engine: spu or crypten, to measure a protocol of that engine; leave it out for published and sigma.
        output: file to write; for published and sigma, the committed one by default.
        for_: model to measure, as for `estimate`; all other flags but --threads then describe it.
        weights: secret-shared, or held by the server alone.
        threads: threads of each party.
        memory: measure the peak memory of the parties on a few models instead, and write that.
    """
    options = ModelOptions(context=None, **model)
    if for_ is None and (options, weights) != (ModelOptions(), "secret"):
        raise UserError("flags of a model need --for ARCH, the model to measure; give it or leave them out.")
    wanted = None if protocol in FITTED else ENGINE_PROTOCOLS[protocol].engine
    if engine != wanted:
        how = f"with --engine {wanted}" if wanted else f"without --engine {engine}"
        raise UserError(f"--protocol {protocol} must be fitted {how}.")
    if engine is None:
        if (for_, threads, memory) != (None, 1, False):
            raise UserError(
                "--for, --threads and --memory are of an engine; give --engine and its --protocol with them."
            )
        path, fitted = FITTED[protocol]
        return write(output or path, fitted())
    if memory:
        if (for_, weights, threads) != (None, "secret", 1):
            raise UserError("--memory is measured of models of its own, on one thread; leave all other flags out.")
        to = _writable(protocol, output)
        check_engine(protocol)
        graphs = [
            resolve_model(
                "SM+LN+R",
                ModelOptions(layers=layers, heads=max(1, d_model // 64), d_model=d_model, vocab=1000, seq_len=seq_len),
            ).graph
            for d_model, layers, seq_len in MEMORY_SIZES[ENGINE_PROTOCOLS[protocol].is_slow]
        ]
        return write(to, dump_memory(measured_memory(graphs, protocol, console(stderr=True).print)))
    asked = None if for_ is None else resolve_model(for_, options)
    measured = [] if asked is None else [asked, asked.folded]  # `estimate` also prices the folded model
    graphs = [part.graph for part in measured if part is not None]
    return _calibrate_engine(
        protocol, ENGINE_PROTOCOLS[protocol].setting(weights=weights, threads=threads), graphs, output
    )


def _calibrate_engine(protocol: str, setting: EngineSetting, graphs: Sequence[OpGraph], output: Path | None) -> None:
    to = _writable(protocol, output)
    check_engine(protocol)
    if graphs:
        files = [timings_file(to, protocol, setting)]
        testbed = measured_model(graphs, protocol, setting, *files)
        write(to, dump_compute(testbed))
        print_blocks([], [_ops_table(testbed)])
    else:
        plan = microbenchmark.plan(protocol)
        files = [timings_file(to, protocol, setting, number) for number in range(1, NUM_PASSES + 1)]
        passes = [timed_run(plan, protocol, setting, file) for file in files]
        write(to, dump_compute(fit_compute(protocol, setting, microbenchmark.fastest(passes))))
    for file in files:
        file.unlink()


def _ops_table(testbed: ComputeTestbed) -> Table:
    lines = []
    for name, timed in sorted(testbed.ops.items(), key=lambda item: -item[1].seconds):
        ahead = format_seconds(timed.setup_s) if timed.setup_s else ""
        lines.append([name, format_seconds(timed.seconds), ahead, f"{timed.spread:.0%}", str(timed.num_runs)])
    return table(["op"], ["seconds", "made ahead", "spread", "runs"], lines)


def _writable(protocol: str, output: Path | None) -> Path:
    """Return the output path; a UserError is raised if it is missing or not writable, before minutes of measuring."""
    if output is None:
        raise UserError(f"--output is required for protocol {protocol}: the .yaml file to write.")
    if os.path.isdir(output) or not os.access(output.parent, os.W_OK):
        raise UserError(f"--output {output} must be a file in a folder that can be written to.")
    return output


def write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {path} cannot be written: {error.strerror}.") from None
    console().print(f"wrote {path}")
