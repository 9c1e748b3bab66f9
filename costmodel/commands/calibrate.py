"""`python -m costmodel calibrate`: fits a testbed on measurements of the engine on this machine."""

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from costmodel.calibration import microbenchmark
from costmodel.calibration.fits import fit_testbed as fit_compute
from costmodel.calibration.fits import measured_memory, measured_model
from costmodel.calibration.microbenchmark import check_engine, timed_run, timings_file
from costmodel.config.files import dump
from costmodel.config.units import format_seconds
from costmodel.engine.ckks_library import Library, load_library, measured_times
from costmodel.errors import UserError
from costmodel.ops import OpGraph
from costmodel.pricing.model_spec import ModelOptions, resolve_model
from costmodel.protocols.ckks import MOST_LEVELS
from costmodel.protocols.derived import dump_compute
from costmodel.protocols.formulas import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import EngineSetting, Holder
from costmodel.report.tables import console, print_blocks, table

NUM_PASSES = 2  # over all kinds of op, since a slowdown of minutes can outlast the repeats of one op

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


def calibrate(
    protocol: Literal["semi2k", "aby3", "cheetah", "crypten", "ckks"] = "semi2k",
    engine: Literal["spu", "crypten"] | None = None,
    output: Path | None = None,
    for_: str | None = None,
    weights: Holder = "secret",
    threads: int = 1,
    memory: bool = False,
    **model: Any,
) -> None:
    """Fit a testbed on measurements of the engine on this machine, and write it.

    All kinds of op are measured twice, minutes apart, and the faster runs count; under ckks, only primitives are
    measured. With --for, every op of one model is measured at its full size instead, and the testbed can price only
    these ops. If a calibration is interrupted, the same command resumes it from the timings, which are in files beside
    the output; under ckks and with --memory it starts again.

    Args:
        protocol: protocol whose testbed is fitted.
        engine: the protocol's engine, which is also the default.
        output: the .yaml file to write.
        for_: model to measure, as for `estimate`; --weights and the flags of dimensions and deployment describe it.
        weights: secret-shared, or known only to the server.
        threads: threads of each party.
        memory: measure the peak memory of the parties on a few models instead of seconds, and write that.
    """
    options = ModelOptions(context=None, **model)
    if for_ is None and (options, weights) != (ModelOptions(), "secret"):
        raise UserError("flags of a model need --for ARCH, the model to measure; give it or leave them out.")
    if protocol == "ckks":
        if (engine, for_, threads, memory) != (None, None, 1, False):
            raise UserError("protocol ckks is measured by primitive, on one thread; leave all flags but --output out.")
        to = _writable(protocol, output)
        load_library()
        return write(to, dump(asdict(measured_times(Library(MOST_LEVELS, is_bootstrapped=True)))))
    if engine not in (None, own := ENGINE_PROTOCOLS[protocol].engine):
        raise UserError(f"--engine of protocol {protocol} is {own}, but got {engine}; leave it out.")
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
        return write(to, dump(asdict(measured_memory(graphs, protocol, console(stderr=True).print))))
    asked = None if for_ is None else resolve_model(for_, options)
    measured = [] if asked is None else [asked, asked.folded]  # `estimate` also prices the folded model
    graphs, setting = [part.graph for part in measured if part], ENGINE_PROTOCOLS[protocol].setting
    return _calibrate_engine(protocol, setting(weights=weights, threads=threads), graphs, output)


def _calibrate_engine(protocol: str, setting: EngineSetting, graphs: Sequence[OpGraph], output: Path | None) -> None:
    to = _writable(protocol, output)
    check_engine(protocol)
    if graphs:
        files = [timings_file(to, protocol, setting)]
        testbed = measured_model(graphs, protocol, setting, *files)
        write(to, dump_compute(testbed))
        lines = []
        for name, timed in sorted(testbed.ops.items(), key=lambda item: -item[1].seconds):
            ahead = format_seconds(timed.setup_s) if timed.setup_s else ""
            lines.append([name, format_seconds(timed.seconds), ahead, f"{timed.spread:.0%}", str(timed.num_runs)])
        print_blocks([], [table(["op"], ["seconds", "made ahead", "spread", "runs"], lines)])
    else:
        plan = microbenchmark.plan(protocol)
        files = [timings_file(to, protocol, setting, number) for number in range(1, NUM_PASSES + 1)]
        passes = [timed_run(plan, protocol, setting, file) for file in files]
        write(to, dump_compute(fit_compute(protocol, setting, microbenchmark.fastest(passes))))
    for file in files:
        file.unlink()


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
