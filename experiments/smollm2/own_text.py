"""Recovers one placement of SmolLM2-135M on text that the model generates, on code and English, and on half of each.

All three texts have the same number of tokens, in documents of equal length. Perplexities are those of the text of
`experiments run smollm2`, of which none of the three contains validation files, and of English.
"""

import csv
import json
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from tokenizers import Tokenizer

from experiments.bars import table
from experiments.smollm2 import healing
from experiments.smollm2.settings import Length
from experiments.smollm2.settings import Settings as HealingSettings
from nas.conversion.parent import digest_of, load_parent
from nas.conversion.sampled_text import LONGEST, sampled_source
from nas.corpus.corpus import prepare
from nas.corpus.documents import texts
from nas.model.decoder import Decoder
from nas.recipe.recipe import SCALES
from nas.storage import RUNS, locked
from nas.training.batches import validate

COLUMNS = ("recovered on", "seed", "perplexity on code and English", "on other English")
SEEDS = (0,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment's YAML: the model's file in the current folder, and how the placement is trained."""

    parent: str
    placement: str
    tokens: int
    batch: int
    learning_rate: float
    library_tokens: int
    validation_tokens: int


def run(name: str, settings: Settings, console: Console) -> None:
    """Train what is missing, print the table and write it to `own-text.csv`. Raises UserError without the model."""
    folder = RUNS / "experiments" / name
    folder.mkdir(parents=True, exist_ok=True)
    length = Length(tokens=settings.tokens, batch=settings.batch)
    shared = HealingSettings(
        parent=settings.parent,
        placements={"member": settings.placement},
        searched=("member",),
        lengths=(length,),
        parent_lengths=(length,),
        learning_rate=settings.learning_rate,
        parent_rate=settings.learning_rate,
        micro_batch=settings.batch,
        library_tokens=settings.library_tokens,
        validation_tokens=settings.validation_tokens,
    )
    with locked(folder):
        source = load_parent(settings.parent)
        setting = healing.setting_of(shared, source, folder, console, time.perf_counter())
        scale = replace(SCALES["parent"], seq_len=shared.seq_len, validation_tokens=settings.validation_tokens)

        def perplexities(model: Decoder) -> tuple[str, str]:
            code, english = (
                math.exp(validate(model, corpus, scale).loss) for corpus in (setting.corpus, setting.second)
            )
            return f"{code:.3f}", f"{english:.3f}"

        rows = [("nothing: the model itself", "", *perplexities(source.decoder()))]
        for kind, path in _texts(setting, settings.tokens + settings.library_tokens).items():
            model = source.model
            own = prepare(str(path), model.architecture.vocab_size, tokenizer=model.tokenizer)
            on_text = replace(setting, corpus=own, results=[])
            start = healing.start_of(on_text, "member", settings.placement, source, None)
            for seed in SEEDS:
                found: list[tuple[str, str]] = []

                def keep(_: float, trained: Decoder, found: list[tuple[str, str]] = found) -> None:
                    found.append(perplexities(trained))

                healing.train(on_text, start, length, settings.learning_rate, seed=seed, on_model=keep)
                rows += [(kind, str(seed), *pair) for pair in found]
                with (folder / "own-text.csv").open("w", newline="") as file:
                    csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    console.print(table(COLUMNS, rows))


def _texts(setting: healing.Setting, tokens: int) -> dict[str, Path]:
    """Return a file of documents of each text by its name; every file has about this many tokens."""
    model = setting.source.model
    assert model.tokenizer is not None
    tokenizer, whole = Tokenizer.from_str(model.tokenizer.json), setting.corpus.tokens("train")
    starts = range(0, len(whole) - LONGEST, len(whole) * LONGEST // tokens)
    real = [tokenizer.decode(whole[start : start + LONGEST].tolist()) for start in starts]
    path = setting.folder / "its-own-text.jsonl"
    if not path.exists():
        source = sampled_source(f"parent:tokens={tokens}", model, digest_of(model), tokens, setting.device)
        assert source is not None
        _write(path, texts(source, "train"))
    own = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    files = {"its own text": own, "code and English": real, "half of each": own[::2] + real[::2]}
    paths = {kind: setting.folder / f"{kind.replace(' ', '-')}.jsonl" for kind in files}
    for kind, documents in files.items():
        _write(paths[kind], documents)
    return paths


def _write(path: Path, documents: Iterable[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
