"""`python -m nas.export RUN --pick knee --output-dir DIR`: exports a candidate of a run, or a model of `nas.train`.

docs/models.md describes the files. The MPC format also has `graph.json`, the op graph node by node. The YAML format has
`trained-on.u32`: hashes of windows of five lines of all training text, if it is known and in the cache. Text that
repeats them is not used to validate models made from this one. With --fold the model is first folded (see
`nas.conversion.fold`) as far as its check allows (`nas.conversion.verified_fold`), to a cheaper architecture with the
same logits up to rounding.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Literal

from safetensors.torch import save

from costmodel.config import cli
from costmodel.config.files import dump
from costmodel.config.units import format_seconds
from costmodel.data_range import describe
from costmodel.errors import UserError
from nas.conversion.pretrained import TRAINED_FILE, WINDOWS_FILE, write_checksums
from nas.corpus.tokenizer import TOKENIZER_FILE, kept_tokenizer, write_tokenizer
from nas.model.weights import WEIGHTS_FILE
from nas.prepare_export import Export, prepare_export, training_export
from nas.recipe.candidate import candidate_id
from nas.report.model_card import EXPORT_FILE, Fold, model_card
from nas.run.run import Run
from nas.training.manifest import is_training
from search_spaces.architecture import arch_id, dump_architecture
from search_spaces.lower import lower
from search_spaces.notation import name_of
from search_spaces.resolve import ARCHITECTURE_FILE

CARD_FILE = "README.md"
Format = Literal["yaml", "hf", "mpc"]


def export(
    run: str, pick: str = "knee", format: Format = "yaml", fold: bool = False, output_dir: str | None = None
) -> None:
    """Export one completed candidate of a run, or the model of a training.

    Args:
        run: folder of a run of nas.search, `latest` for the last one, or folder of nas.train.
        pick: knee or best of the front, or the arch_id of a completed trial; a training has only one model.
        format: YAML files with safetensors weights, a transformers model, or weights for an MPC engine.
        fold: fold scalars, norms and linears as far as the logits stay the same, which makes the model cheaper.
        output_dir: folder to write, new or empty; by default a folder named after the arch_id in `exports` of the run.
    """
    if is_training(Path(run)):
        folder = Path(run)
        made = training_export(folder, fold=fold)
    else:
        source = Run.find(run)
        folder, made = source.folder, prepare_export(source, source.pick(pick), fold=fold)
    name = arch_id(made.facts.candidate.architecture) + "-folded" * fold + ("" if format == "yaml" else f"-{format}")
    target = folder / "exports" / name if output_dir is None else Path(output_dir)
    for path in write_export(made, target, format):
        print(path)
    for protocol, of in made.fixed_point.items():
        if of["failure"] is not None:
            print(f"out of range under {protocol}, where nas.private refuses it: {of['failure']}")
    if made.facts.fold is not None:
        for line in _fold_lines(made, made.facts.fold):
            print(line)


def _fold_lines(made: Export, fold: Fold) -> list[str]:
    facts, cost, check = made.facts, made.facts.estimate, fold.check
    outside = describe(cost.extrapolated)
    failed = "the check failed with nothing left to unfold: do not rely on this model"
    return [
        f"folded: {facts.candidate.name} becomes {name_of(facts.architecture)} at "
        f"{format_seconds(cost.total.latency_s)} a token ({facts.workload.words}, {cost.protocol})"
        f"{outside and f'; {outside}'}",
        f"on {check['positions']:,} {fold.tokens} tokens its logits move by {check['float_error']:.1e} of "
        f"the largest and its most likely token agrees on {check['agreement']:.2%}; in fixed point they are off by "
        f"{check['fixed_error']:.1e}, unfolded by {check['trained_fixed_error']:.1e}",
        *(f"not folded: {reason}" for reason in fold.left),
        *([] if fold.passes else [failed]),
    ]


def write_export(made: Export, target: Path, format: Format = "yaml") -> list[Path]:
    """Write an export and return its files.

    Raises UserError if `target` is not empty or cannot be written or, for `hf`, the tokenizer is missing or
    transformers is not installed.
    """
    try:
        target.mkdir(parents=True, exist_ok=True)
        if any(target.iterdir()):
            raise UserError(f"--output-dir {target} must be new or empty, but holds files; choose another folder.")
        try:
            held = {"fixed_point": made.fixed_point}
            (target / EXPORT_FILE).write_text(dump(made.facts.plain() | held), encoding="utf-8")
            FORMATS[format](made, target)
            (target / CARD_FILE).write_text(model_card(made.facts, format, made.run), encoding="utf-8")
            write_checksums(target)
        except BaseException:  # also Ctrl-C: an export is whole, or the folder is empty again
            with suppress(OSError):
                for path in target.iterdir():
                    path.unlink()
            raise
    except OSError as error:
        raise UserError(f"--output-dir {target} must be a folder we can write to: {error.strerror}.") from None
    return sorted(target.iterdir())


def _write_yaml(made: Export, target: Path) -> None:
    _write_weights(made, target)
    (target / ARCHITECTURE_FILE).write_text(dump_architecture(made.facts.architecture), encoding="utf-8")
    (target / TRAINED_FILE).write_text(dump_architecture(made.trained), encoding="utf-8")
    if (made.tokenizer / TOKENIZER_FILE).is_file():
        kept = kept_tokenizer(made.tokenizer, "")
        write_tokenizer(target, kept.json, kept.end_of_text, kept.files)
    if made.windows is not None:
        (target / WINDOWS_FILE).write_bytes(made.windows.tobytes())


def _write_mpc(made: Export, target: Path) -> None:
    _write_weights(made, target)
    (target / ARCHITECTURE_FILE).write_text(dump_architecture(made.trained), encoding="utf-8")
    seq_len = made.facts.candidate.recipe.scale.seq_len
    nodes = [
        {"name": node.name, "layer": node.layer, "op": type(node.op).__name__, **asdict(node.op), "inputs": node.inputs}
        for node in lower(made.trained, seq_len)
    ]
    (target / "graph.json").write_text(json.dumps({"seq_len": seq_len, "nodes": nodes}, indent=1) + "\n")


def _write_hf(made: Export, target: Path) -> None:
    from nas.conversion.huggingface import save_model  # needs the extra `hf`

    save_model(made.trained, made.weights, made.tokenizer, target)


FORMATS: dict[Format, Callable[[Export, Path], None]] = {"yaml": _write_yaml, "hf": _write_hf, "mpc": _write_mpc}


def _write_weights(made: Export, target: Path) -> None:
    metadata = {"candidate_id": candidate_id(made.facts.candidate)}
    (target / WEIGHTS_FILE).write_bytes(save(made.weights, metadata=metadata))


main = partial(cli.run, export, "python -m nas.export")  # (args=None): runs the command line and exits with its code


if __name__ == "__main__":
    main()
