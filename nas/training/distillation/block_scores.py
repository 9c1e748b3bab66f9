"""Block scores: the change of the parent's predictions when one sub-layer is replaced by a trained alternative.

Scoring takes a few minutes on one core at the width of the builtin parent, once for each parent, corpus and set of
forms. Scores are cached next to the corpus as soon as a layer is scored, and saved with the run.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from nas.conversion.parent import Parent
from nas.corpus.corpus import Corpus
from nas.corpus.sequences import gather, held_out_targets
from nas.model.bf16_products import bf16_products
from nas.model.decoder import Decoder
from nas.model.layers import Block
from nas.storage import replace_file
from nas.training.distillation.blocks import DEFAULT, BlockwiseDistillation
from nas.training.distillation.library import FORMAT, Library, allocate_buffer
from nas.training.distillation.sub_layers import (
    BlockScores,
    SubLayer,
    from_csv,
    sub_layers_of,
    to_csv,
    trained_sub_layers,
)
from search_spaces.architecture import Layer

SCORED_TOKENS = 8_192  # of the validation split: the standard error of most scores is then a few percent
MOST_PREDICTED = 1 << 27  # numbers, 512 MiB: scoring SmolLM2 on 2,688 tokens takes as long as training the sub-layer
LOGITS_AT_A_TIME = 1 << 24  # 64 MiB


def block_scores(
    parent: Parent,
    layers: Iterable[Layer],
    corpus: Corpus,
    settings: BlockwiseDistillation = DEFAULT,
    *,
    seq_len: int,
    first_depth: int = 0,
    device: str = "cpu",
    keep: bool = False,
    on_progress: Callable[[float], None] = lambda share: None,
) -> BlockScores:
    """Return the scores of these layers' sub-layers at every depth of the parent, from the cache if they are in it.

    first_depth: earlier layers stay the parent's, and only their own sub-layers have scores. keep: whether to save the
        trained sub-layers, for candidates to start from (`Library`). on_progress: called with the share of the work
        that is done. Raises UserError if the corpus is too short.
    """
    architecture = parent.model.architecture
    depths, parent_sub_layers = range(first_depth, architecture.num_layers), trained_sub_layers(architecture)
    wanted = sorted(
        {sub_layer for layer in layers for depth in depths for sub_layer in sub_layers_of(architecture, depth, layer)}
        | {sub_layer for sub_layer in parent_sub_layers if sub_layer.depth < first_depth}
    )
    tokens = scored_tokens(corpus, seq_len, architecture.vocab_size)
    digest = sha256(repr((settings, seq_len, tokens.numel())).encode()).hexdigest()[:12]
    path = Path(corpus.folder) / f"blocks-{FORMAT}-{parent.digest}-{corpus.fingerprint}-{digest}.csv"
    library = Library(parent, corpus, settings, seq_len=seq_len, device=device)
    divergences = dict.fromkeys(parent_sub_layers, 0.0)
    with suppress(FileNotFoundError):
        divergences |= from_csv(path.read_text(encoding="utf-8"), str(path)).divergences
    missing = [
        sub_layer
        for sub_layer in wanted
        if sub_layer not in divergences
        or (keep and sub_layer not in parent_sub_layers and not library.holds(sub_layer))
    ]
    if not missing:
        return BlockScores(divergences={sub_layer: divergences[sub_layer] for sub_layer in wanted})
    model, lowered = parent.decoder().to(device), settings.lowered and device == "cpu"
    with bf16_products(device, enabled=lowered):
        hidden_states = model.hidden_states(tokens.to(device))
        predicted = _predicted(model, hidden_states[-1], Path(corpus.folder))

    def score(sub_layer: SubLayer, block: Block) -> float:
        if keep:
            library.keep(sub_layer, block)
        with bf16_products(device, enabled=lowered):
            return _divergence(model, hidden_states[sub_layer.depth], predicted, block, sub_layer.depth)

    for scored in library.trained(missing, score, on_progress):
        divergences |= scored
        with suppress(OSError):  # the cache may be read-only
            replace_file(path, to_csv(BlockScores(divergences=divergences)))
    return BlockScores(divergences={sub_layer: divergences[sub_layer] for sub_layer in wanted})


def scored_tokens(corpus: Corpus, seq_len: int, vocab_size: int) -> Tensor:
    """Return the tokens used for scores, sequences x seq_len. Raises UserError if the corpus is too short."""
    num_tokens = max(seq_len, min(SCORED_TOKENS, MOST_PREDICTED // vocab_size))
    sequences = gather(corpus, "validation", held_out_targets(corpus, seq_len, num_tokens).indices, seq_len)
    return torch.from_numpy(sequences[:, :-1].astype("int64"))


@torch.no_grad()
def _divergence(model: Decoder, stream: Tensor, predicted: Tensor, block: Block, depth: int) -> float:
    """Return KL(parent || parent with one layer replaced), nats per token. predicted: by the parent, rows x vocab."""
    for layer in (block.eval(), *model.layers[depth + 1 :]):
        stream, _ = layer(stream, False)
    total = 0.0
    for rows, replaced in _log_probabilities(model, stream):
        total += float(functional.kl_div(replaced, predicted[rows], reduction="sum", log_target=True))
    return total / len(predicted)


@torch.no_grad()
def _predicted(model: Decoder, stream: Tensor, folder: Path) -> Tensor:
    """Return the log-probabilities of all rows, rows x vocab. stream: the output of the last layer."""
    shape = stream.shape[:-1].numel(), model.architecture.vocab_size
    predicted = allocate_buffer(shape, folder, stream.device.type)
    for rows, part in _log_probabilities(model, stream):
        predicted[rows] = part
    return predicted


def _log_probabilities(model: Decoder, stream: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield the log-probabilities of the last layer's output in parts: rows, and rows x vocab."""
    features, num_rows = model.read_out(stream).flatten(0, 1), LOGITS_AT_A_TIME // model.architecture.vocab_size
    for start in range(0, len(features), num_rows):
        rows = slice(start, start + num_rows)
        yield rows, model.logits_of(features[rows]).log_softmax(dim=-1)
