"""Fits the memory of an engine's processes on runs of whole models on this machine."""

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import numpy as np

from costmodel.config.files import dump
from costmodel.engine import spu
from costmodel.engine.children import own_children
from costmodel.engine.compare import SEED, drawn_caches, drawn_tokens, drawn_weights
from costmodel.errors import StoppedError
from costmodel.execution.memory import FEATURES, MemoryFit, MemoryTestbed, features
from costmodel.ops import OpGraph
from costmodel.protocols.formulas import ENGINE_PROTOCOLS


def measured_memory(graphs: Sequence[OpGraph], protocol: str, report: Callable[[str], None]) -> MemoryTestbed:
    """Run every graph once, report a line for each, and fit the peaks; a StoppedError says that the engine failed."""
    peaks = []
    for index, graph in enumerate(graphs, start=1):
        with own_children():  # a reused process would still hold the memory of earlier runs
            peaks.append(_peaks(graph, protocol))
        sizes = ", ".join(f"{peak / 1e6:.0f} MB" for peak in peaks[-1])
        report(f"{protocol}: {index} of {len(graphs)} models, {sizes}")
    return fit_memory(
        protocol, [features(graph, protocol, ENGINE_PROTOCOLS[protocol].setting()) for graph in graphs], peaks
    )


def _peaks(graph: OpGraph, protocol: str) -> tuple[int, ...]:
    """Return the peak bytes of every party, the first one first; a StoppedError is raised if they are not known."""
    generator = np.random.default_rng(SEED)
    weights = drawn_weights(graph, generator)
    tokens, caches = drawn_tokens(graph, generator), drawn_caches(graph, generator)
    setting = ENGINE_PROTOCOLS[protocol].setting()
    run = spu.run(graph, weights, tokens, caches, protocol=protocol, setting=setting)
    peaks = tuple(peak for peak in run.peak_bytes if peak is not None)
    if len(peaks) < len(run.peak_bytes):
        raise StoppedError("this system does not tell a process its peak memory; calibrate it on Linux.")
    return peaks


def fit_memory(protocol: str, counts: Sequence[dict[Any, int]], peaks: Sequence[tuple[int, ...]]) -> MemoryTestbed:
    """Fit features of models (`counts`) to the peak bytes of every party (`peaks`, the client's first)."""
    setting = ENGINE_PROTOCOLS[protocol].setting()
    return MemoryTestbed(
        protocol=protocol,
        engine=setting.formulas_of,
        ring_bits=setting.ring_bits,
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        measured_on=datetime.now(UTC).date().isoformat(),
        num_points=len(peaks),
        greatest={name: max(count[name] for count in counts) for name in FEATURES},
        client=_fit(counts, [of_all[0] for of_all in peaks]),
        party=_fit(counts, [max(of_all[1:]) for of_all in peaks]),
    )


def _fit(counts: Sequence[dict[Any, int]], peaks: Sequence[int]) -> MemoryFit:
    from costmodel.protocols.linear_fit import least_squares  # imported here, as costs do not need scipy

    table = np.array([[count[name] for name in FEATURES] for count in counts], dtype=float)
    shares = table / np.array(peaks, dtype=float)[:, None]  # of each measured peak
    whole = least_squares(shares)
    apart = [shares[index] @ least_squares(np.delete(shares, index, axis=0)) - 1 for index in range(len(peaks))]
    return MemoryFit(
        coefficients={name: float(f"{value:.4g}") for name, value in zip(FEATURES, whole, strict=True)},
        worst_error=round(float(np.abs(shares @ whole - 1).max()), 4),
        held_out_error=round(float(np.abs(apart).max()), 4),
    )


def dump_memory(testbed: MemoryTestbed) -> str:
    """Return the text of a testbed file."""
    return dump(asdict(testbed))
