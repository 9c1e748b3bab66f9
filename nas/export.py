"""`python -m nas.export RUN --pick knee --output-dir DIR`: an architecture of a run, ready to be used elsewhere.

architecture.yaml   the priced architecture; an ARCH of every command
export.yaml         recipe, result, cost breakdown by layer and provenance
trained.yaml        the architecture at the width it was trained at, which the weights belong to
weights.safetensors the weights, named after the nodes of the op graph
"""

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save
from torch import Tensor

from costmodel import cli
from costmodel.estimate import estimate
from costmodel.protocols import load_pricer
from costmodel.yamlfile import dump
from nas import checkpoint
from nas.candidate import Candidate, candidate_id
from nas.front import pick as pick_record
from nas.ledger import Record
from nas.objective import Objective
from nas.run import StudyConfig, find_run, read_config, read_ledger, read_meta, run_space, study_candidate
from nas.weights import deployed_weights, load_stored
from search_spaces.architecture import dump_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse


def export(run: str, pick: str = "knee", format: Literal["yaml"] = "yaml", output_dir: str | None = None) -> None:
    """Exports one completed candidate of a run.

    Args:
        run: folder of a run, or `latest`.
        pick: knee or best of the front, or the arch_id of a completed trial.
        format: YAML files with safetensors weights.
        output_dir: folder to write, new or empty; by default `exports/<arch_id>` in the run.
    """
    folder = find_run(run)
    config = read_config(folder)
    record = pick_record(read_ledger(folder), config.budget, pick)
    target = folder / "exports" / record.arch_id if output_dir is None else Path(output_dir)
    for path in write_export(folder, config, record, target):
        print(path)


def write_export(folder: Path, config: StudyConfig, record: Record, target: Path) -> list[Path]:
    """Writes the export of a completed trial and returns its files.

    Raises ValueError if `target` is not empty or cannot be written, or the trial's last checkpoint is gone.
    """
    candidate = study_candidate(config, parse(record.notation, run_space(folder, config).base))
    weights = _weights(folder / "trials" / record.trial_id, candidate, record)
    files = {
        "weights.safetensors": save(weights, metadata={"candidate_id": record.candidate_id}),
        "architecture.yaml": dump_architecture(candidate.architecture).encode(),
        "trained.yaml": dump_architecture(candidate.trained).encode(),
        "export.yaml": dump(_facts(folder, config, record, candidate)).encode(),
    }
    try:
        target.mkdir(parents=True, exist_ok=True)
        if any(target.iterdir()):
            raise ValueError(f"--output-dir {target} must be new or empty, but holds files; choose another folder.")
        for name, content in files.items():
            (target / name).write_bytes(content)
    except OSError as error:
        for name in files:
            with suppress(OSError):
                (target / name).unlink()
        raise ValueError(f"--output-dir {target} must be a folder we can write to: {error.strerror}.") from None
    return [target / name for name in files]


def _weights(trial: Path, candidate: Candidate, record: Record) -> dict[str, Tensor]:
    """The weights of a trial's last checkpoint, a tied output table written out."""
    found = checkpoint.load_latest(trial, {"candidate": candidate_id(candidate)})
    if found is None or found.step != record.steps:
        raise ValueError(f"{trial} must have a whole checkpoint of step {record.steps}, but has none to export.")
    model = Objective(candidate, torch.Generator()).model
    load_stored(model, found.weights)
    return {name: value.contiguous().clone() for name, value in deployed_weights(model).items()}


def _facts(folder: Path, config: StudyConfig, record: Record, candidate: Candidate) -> dict[str, Any]:
    pricer = load_pricer(protocol=config.protocol, network=config.network)
    result = estimate(lower(candidate.architecture, config.seq_len), pricer)
    meta = read_meta(folder)
    return {
        "notation": record.notation,
        "arch_id": record.arch_id,
        "candidate_id": record.candidate_id,
        "trial_id": record.trial_id,
        "result": {
            "perplexity": record.perplexity,
            "val_loss": record.val_loss,
            "tokenizer": record.tokenizer,
            "split": record.split,
            "scale": record.scale,
            "width": record.width,
            "tokens": record.tokens,
            "seed": record.seed,
            "flags": list(record.flags),
        },
        "cost": {
            "protocol": result.protocol,
            "network": result.network,
            "seq_len": config.seq_len,
            "total": asdict(result.total),
            "latency_s_range": None if result.latency_s_range is None else list(result.latency_s_range),
            "prior_share": result.prior_share,
            "by_layer": [{"layer": layer, **asdict(price)} for layer, price in result.by_layer],
        },
        "recipe": _plain(asdict(candidate.recipe)),
        "provenance": {
            "run": folder.name,
            "created": meta.created,
            "cost_model_id": pricer.cost_model_id,
            "corpus": record.corpus,
            "budget_latency": config.budget_latency,
            "versions": dict(record.versions),
        },
    }


def _plain(value: Any) -> Any:
    """Tuples as lists, for YAML."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


if __name__ == "__main__":
    cli.run(export, prog="python -m nas.export")
