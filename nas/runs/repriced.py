"""The figures of a run as it was, and a run under other prices."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from costmodel.config.units import parse_bytes, parse_seconds
from costmodel.cost import Budget
from costmodel.estimate import Pricer
from costmodel.protocols import load_pricer
from costmodel.protocols.primitives import EngineSetting
from nas.report.plot_files import plot_costs, plot_front, plot_what_if
from nas.report.reprice_lines import what_if_lines, what_if_table
from nas.results.reprice import WhatIf, what_if
from nas.runs.run import Run
from nas.study.run_folder import run_pricer
from search_spaces.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class RepricedRun:
    """A run's members at their prices of then and at others, and which of them survive.

    found: both fronts. pricer, workload: what the other prices are of.
    """

    run: Run
    found: WhatIf
    pricer: Pricer
    workload: Workload

    @property
    def lines(self) -> list[str]:
        """What changes, in words."""
        return what_if_lines(self.found, self.run.meta.ngrams)

    @property
    def table(self) -> Table:
        """Every member of either front, what became of it, and both prices."""
        return what_if_table(self.found, self.run.meta.ngrams)

    def plot(self) -> tuple[Path, ...]:
        """Draws both fronts, and the breakdown and sensitivity at the other prices; returns the paths."""
        run, found = self.run, self.found
        network = [self.pricer.network] if self.pricer.network else []
        words = [self.pricer.protocol, *network, f"T{self.workload.prompt_len}"]
        suffix = "-" + re.sub(r"[^\w.-]+", "_", "-".join(words))
        fronts = plot_what_if(run.folder, found, suffix, run.meta.ngrams)
        costs = plot_costs(run.folder, found.shown, run.records, run.meta.base, self.pricer, self.workload, suffix)
        return fronts + costs


def reprice(
    run: Run,
    *,
    protocol: str | None,
    network: str | None,
    testbed: Path | None,
    seq_len: int | None,
    budget_latency: str | None,
    budget_comm: str | None,
) -> RepricedRun:
    """As `Run.reprice`."""
    config = run.config
    budget = Budget(
        latency_s=None if budget_latency is None else parse_seconds(budget_latency, "--budget-latency"),
        sent_bytes=None if budget_comm is None else parse_bytes(budget_comm, "--budget-comm"),
    )
    if protocol in (None, config.protocol):
        pricer = run_pricer(run.folder, config, network, testbed)
    else:
        setting = None if config.weights is None or protocol == "published" else EngineSetting(weights=config.weights)
        pricer = load_pricer(protocol, network, testbed, setting)
    workload = config.workload if seq_len is None else replace(config.workload, prompt_len=seq_len)
    found = what_if(
        run.records,
        run.meta.base,
        pricer,
        workloads=(config.workload, workload),
        budgets=(config.budget, budget),
    )
    return RepricedRun(run=run, found=found, pricer=pricer, workload=workload)


def plot_as_run(run: Run) -> tuple[Path, ...]:
    """Draws the Pareto plot, and the costs of front and baselines, as the run priced them; returns the paths."""
    config, meta = run.config, run.meta
    fronts = plot_front(
        run.folder,
        run.records,
        config.budget,
        num_layers=meta.base.num_layers,
        seq_len=config.seq_len,
        ngrams=meta.ngrams,
        parent=meta.parent,
    )
    pricer = run_pricer(run.folder, config)
    return fronts + plot_costs(run.folder, run.front, run.records, meta.base, pricer, config.workload)
