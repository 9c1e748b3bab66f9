"""Block scores: every sub-layer that a space offers in place of its parent's, trained alone and scored by itself.

Blockwise distillation is one pass over the data for all of them: the parent runs once a batch, and every alternative is
moved towards what the parent's layer makes of the same stream. Alternatives do not see one another, so their number and
order do not matter. A score is what the parent's predictions lose when one sub-layer is replaced: a few minutes for all
on a core, once for a parent, a corpus and the forms of a space; they are kept beside the corpus, and with the run.

Source: Bercovich et al. 2024, "Puzzle", arXiv 2411.19146, section 3: a library of blocks trained apart.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional

from nas.conversion.linear_fit import fit_linear, streams_of, weights_by_position
from nas.conversion.parent import Parent
from nas.conversion.transfer import transferred
from nas.corpus.corpus import Corpus
from nas.corpus.sequences import gather, validation_indices
from nas.model.decoder import Decoder
from nas.model.norms import followed_deviations, frozen_norms
from nas.model.weights import load_deployed
from nas.run.config import StudyConfig
from nas.searchers.block_scores import BlockScores, SubLayer, from_csv, sub_layers_of, to_csv
from nas.storage import replace_file
from nas.training.batches import train_batch
from search_spaces.architecture import Layer
from search_spaces.budget.feasible import FeasibleSpace

BLOCKS_FILE = "blocks.csv"
READERS = ("trellis",)  # searchers that read them
FORMAT = 1  # of what is computed and cached; raised when numbers change
SCORED_TOKENS = 8_192  # of the validation split: the standard error of most scores is then a few percent
TRAINED_SHARE = 0.7  # of the time, about: the rest is scoring


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockwiseDistillation:
    """How alternatives are trained: by AdamW at a constant rate; norms freeze after their share of the steps."""

    tokens: int = 32_768
    batch: int = 8
    learning_rate: float = 1e-3
    freezing_share: float = 0.25


DEFAULT = BlockwiseDistillation()


def study_blocks(
    config: StudyConfig, feasible: FeasibleSpace, parent: Parent | None, corpus: Corpus, folder: Path, console: Console
) -> BlockScores | None:
    """The scores that the searcher of a run reads; None without a parent, or where it reads none.

    Raises UserError if the run's own are damaged.
    """
    if parent is None or config.searcher not in READERS:
        return None
    path = folder / BLOCKS_FILE
    if path.exists():
        return from_csv(path.read_text(encoding="utf-8"), str(path))
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("scoring the blocks of the parent", total=1.0)
        scores = block_scores(
            parent, feasible.space.layers, corpus, on_progress=lambda share: bar.update(task, completed=share)
        )
    replace_file(path, to_csv(scores))
    return scores


def block_scores(
    parent: Parent,
    layers: Iterable[Layer],
    corpus: Corpus,
    settings: BlockwiseDistillation = DEFAULT,
    on_progress: Callable[[float], None] = lambda share: None,
) -> BlockScores:
    """Scores of the sub-layers of these layers at every depth of the parent; from the cache, if they are there.

    on_progress: gets the share of the work that is done. Raises UserError if the corpus is too short.
    """
    architecture = parent.model.architecture
    depths = range(architecture.num_layers)
    wanted = sorted(
        {sub_layer for layer in layers for depth in depths for sub_layer in sub_layers_of(architecture, depth, layer)}
    )
    digest = sha256(repr((wanted, settings, SCORED_TOKENS)).encode()).hexdigest()[:12]
    path = Path(corpus.folder) / f"blocks-{FORMAT}-{parent.digest}-{corpus.fingerprint}-{digest}.csv"
    with suppress(FileNotFoundError):
        kept = from_csv(path.read_text(encoding="utf-8"), str(path))
        if kept.divergences.keys() >= set(wanted):  # not cut off
            return kept
    known = {
        sub_layer
        for depth, layer in enumerate(architecture.layers)
        for sub_layer in sub_layers_of(architecture, depth, layer)
    }
    others = [sub_layer for sub_layer in wanted if sub_layer not in known]
    trained = trained_alternatives(parent, others, corpus, settings, lambda share: on_progress(TRAINED_SHARE * share))
    model = parent.decoder()
    streams = streams_of(model, scored_tokens(corpus, architecture.context))
    divergences = dict.fromkeys(known & set(wanted), 0.0)
    predicted = _log_probabilities(model, streams[-1])
    for index, alternative in enumerate(trained):
        divergences |= {
            sub_layer: _divergence(model, streams, predicted, alternative, sub_layer)
            for sub_layer in alternative.sub_layers
        }
        on_progress(TRAINED_SHARE + (1 - TRAINED_SHARE) * (index + 1) / len(trained))
    scores = BlockScores(divergences=divergences)
    with suppress(OSError):  # a cache that only others may write to
        replace_file(path, to_csv(scores))
    return scores


class Alternative:
    """One form of a sub-layer in every layer that it is asked for in, and its training."""

    def __init__(self, parent: Parent, sub_layers: list[SubLayer], learning_rate: float) -> None:
        architecture = parent.model.architecture
        layers = list(architecture.layers)
        for sub_layer in sub_layers:
            norm, form = ("norm1", "attention") if sub_layer.part == "attention" else ("norm2", "ffn")
            layers[sub_layer.depth] = replace(layers[sub_layer.depth], **{norm: sub_layer.norm, form: sub_layer.form})  # type: ignore[arg-type]
        target = replace(architecture, layers=tuple(layers))
        self.sub_layers = sub_layers
        self.model = Decoder(target)
        load_deployed(self.model, transferred(architecture, parent.model.weights, target))
        self.model.requires_grad_(False)
        moved = [parameter for sub_layer in sub_layers for parameter in _parameters_of(self.model, sub_layer)]
        for parameter in moved:
            parameter.requires_grad_()
        self.optimizer = torch.optim.AdamW(moved, lr=learning_rate, weight_decay=0.0) if moved else None

    def start(self, streams: list[Tensor]) -> None:
        """Starts single linears in place of FFNs at the least squares of a batch; what others start as is theirs."""
        for sub_layer in self.sub_layers:
            if sub_layer.form == "fused":
                fit_linear(self.model.layers[sub_layer.depth], streams[sub_layer.depth], streams[sub_layer.depth + 1])

    def step(self, streams: list[Tensor]) -> None:
        """streams: what every layer of the parent reads, and what the last one leaves, each batch x T x d_model."""
        if self.optimizer is None:
            return
        errors = [
            distillation_error(
                self.model.layers[sub_layer.depth](streams[sub_layer.depth], False)[0], *streams[sub_layer.depth :][:2]
            )
            for sub_layer in self.sub_layers
        ]
        self.optimizer.zero_grad()
        torch.autograd.backward(torch.stack(errors).sum())
        self.optimizer.step()
        followed_deviations(self.model)

    def freeze_norms(self) -> None:
        for norm in frozen_norms(self.model).values():
            if not norm.is_frozen:
                norm.set_frozen()


def trained_alternatives(
    parent: Parent,
    wanted: Iterable[SubLayer],
    corpus: Corpus,
    settings: BlockwiseDistillation,
    on_step: Callable[[float], None],
) -> list[Alternative]:
    """Every form that is wanted, trained in the layers it is wanted in. on_step: gets the share of the steps done."""
    by_form: dict[tuple[str, str, str], list[SubLayer]] = {}
    for sub_layer in wanted:
        by_form.setdefault((sub_layer.part, sub_layer.norm, sub_layer.form), []).append(sub_layer)
    alternatives = [Alternative(parent, sub_layers, settings.learning_rate) for sub_layers in by_form.values()]
    model, seq_len = parent.decoder(), parent.model.architecture.context
    num_steps = max(1, settings.tokens // (settings.batch * seq_len))
    for step in range(num_steps):
        inputs, _ = train_batch(corpus, step=step, batch=settings.batch, seq_len=seq_len, seed=0)
        streams = streams_of(model, inputs)
        for alternative in alternatives:
            if step >= settings.freezing_share * num_steps:
                alternative.freeze_norms()
            if step == 0:
                alternative.start(streams)
            alternative.step(streams)
        on_step((step + 1) / num_steps)
    return alternatives


def distillation_error(made: Tensor, read: Tensor, left: Tensor) -> Tensor:
    """Squared error of what a layer leaves over the square of what the parent's adds, at each position on the mean.

    made, read, left: batch x T x d_model. Positions count alike, since the first one's numbers are far larger.
    """
    return ((made - left).square().mean(dim=(0, 2)) * weights_by_position(read, left)).mean()


def scored_tokens(corpus: Corpus, seq_len: int) -> Tensor:
    """The tokens that scores are taken on, sequences x seq_len. Raises UserError if the corpus is too short."""
    sequences = gather(corpus, "validation", validation_indices(corpus, seq_len, SCORED_TOKENS), seq_len)
    return torch.from_numpy(sequences[:, :-1].astype("int64"))


@torch.no_grad()
def _divergence(
    model: Decoder, streams: Sequence[Tensor], predicted: Tensor, alternative: Alternative, sub_layer: SubLayer
) -> float:
    """KL(parent || parent with one sub-layer replaced), nats per token. predicted: by the parent."""
    stream, _ = alternative.model.eval().layers[sub_layer.depth](streams[sub_layer.depth], False)
    for layer in model.layers[sub_layer.depth + 1 :]:
        stream, _ = layer(stream, False)
    replaced = _log_probabilities(model, stream)
    divergence = functional.kl_div(replaced, predicted, reduction="sum", log_target=True)
    return float(divergence) / replaced.shape[:-1].numel()


@torch.no_grad()
def _log_probabilities(model: Decoder, stream: Tensor) -> Tensor:
    logits: Tensor = model.logits(model.final_norm(stream))
    return logits.log_softmax(dim=-1)


def _parameters_of(model: Decoder, sub_layer: SubLayer) -> list[nn.Parameter]:
    layer = model.layers[sub_layer.depth]
    modules = (layer.norm1, layer.attention) if sub_layer.part == "attention" else (layer.norm2, layer.ffn)
    return [parameter for module in modules if isinstance(module, nn.Module) for parameter in module.parameters()]
