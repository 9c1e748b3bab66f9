"""The block library: sub-layers that may replace the parent's, each trained separately on the parent's hidden states.

On a CPU, sub-layers are trained layer by layer, so that memory holds only the input and output of one parent layer.
Several threads train one sub-layer each; their number and order change no result. On a GPU, sub-layers with up to
MOST_TOGETHER numbers are trained at once (`trained_together`).

A block score is the change of the parent's predictions when one of its sub-layers is replaced. Scoring takes a few
minutes on one core at the width of the builtin parent, once for each parent, corpus and set of forms. Scores are cached
next to the corpus as soon as a layer is scored, and saved with the run.

Source: Bercovich et al. 2024, "Puzzle", arXiv 2411.19146, section 3: a library of separately trained blocks.
"""

import math
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional

from nas.conversion.parent import Parent
from nas.conversion.transfer import transferred
from nas.corpus.corpus import Corpus
from nas.corpus.sequences import gather, held_out_targets
from nas.malloc import num_cores
from nas.model.bf16_products import bf16_products
from nas.model.decoder import Decoder
from nas.model.layers import Block
from nas.model.weights import deployed_weights
from nas.recipe.candidate import Candidate
from nas.recipe.distillation import parent_architecture
from nas.recipe.recipe import Recipe
from nas.storage import replace_file
from nas.training.batches import train_batch
from nas.training.distillation.blocks import (
    DEFAULT,
    BlockwiseDistillation,
    HiddenStates,
    trained_block,
    trained_together,
)
from nas.training.distillation.parts import MODULES
from nas.training.distillation.sub_layers import (
    BlockScores,
    SubLayer,
    from_csv,
    sub_layers_of,
    to_csv,
    trained_sub_layers,
)
from nas.training.memory import raise_out_of_memory
from search_spaces.architecture import Layer

T = TypeVar("T")

FORMAT = 10  # version of the stored files; raised when their numbers change
MOST_IN_MEMORY = 1 << 28  # numbers, 1 GiB; larger tensors are in memory-mapped files
MOST_TOGETHER = 1 << 30  # numbers in sub-layers that train at once on a GPU, 4 GiB; gradients and moments take more
SCORED_TOKENS = 8_192  # of the validation split: the standard error of most scores is then a few percent
MOST_PREDICTED = 1 << 27  # log-probabilities, 512 MiB: scoring SmolLM2 on 2,688 tokens takes as long as training


def parent_hidden_states(
    parent: Parent, depths: Collection[int], corpus: Corpus, settings: BlockwiseDistillation, *, seq_len: int
) -> Iterator[tuple[int, HiddenStates]]:
    """Yield each of `depths`, rising, with the hidden states of its layer, which the next iteration overwrites."""
    if not depths:
        return
    model, batch = parent.decoder(), settings.batch_of(seq_len)
    shape = (settings.num_steps(seq_len), batch, seq_len, parent.model.architecture.d_model)
    read, left = (allocate_buffer(shape, Path(corpus.folder)) for _ in range(2))
    for step, stream in enumerate(read):
        inputs, _ = train_batch(corpus, step=step, batch=batch, seq_len=seq_len, seed=0)
        with torch.no_grad():
            stream.copy_(model.embedded(inputs))
    for depth in range(max(depths) + 1):
        for source, stream in zip(read, left, strict=True):
            with torch.no_grad(), bf16_products("cpu", enabled=settings.lowered):
                stream.copy_(model.layers[depth](source, False)[0])
        if depth in depths:
            yield depth, HiddenStates(read, left)
        read, left = left, read


def allocate_buffer(shape: tuple[int, ...], folder: Path, device: str = "cpu") -> Tensor:
    """Return an uninitialised fp32 tensor; above MOST_IN_MEMORY on a CPU, it is in a temporary file in `folder`."""
    size = math.prod(shape)
    if size <= MOST_IN_MEMORY or device != "cpu":
        return torch.empty(shape, device=device)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        return torch.from_file(file.name, shared=True, size=size).view(shape)


def settings_of(recipe: Recipe) -> BlockwiseDistillation:
    """Return a recipe's settings for training sub-layers separately; `DEFAULT` if it has no `blockwise_tokens`.

    The batch is `micro_batch`: for linear gates at SmolLM2's width, 64 steps of 4 sequences leave errors of 0.050, and
    32 steps of 8 leave 0.056. Rates from 5e-4 to 2e-3 are equally good.
    """
    tokens, lowered = recipe.distillation.blockwise_tokens if recipe.distillation else 0, recipe.precision == "bfloat16"
    return replace(DEFAULT, tokens=tokens, batch=recipe.scale.micro_batch, lowered=lowered) if tokens else DEFAULT


def initial_weights(
    parent: Parent,
    candidate: Candidate,
    corpus: Corpus,
    *,
    device: str = "cpu",
    on_progress: Callable[[float], None] = lambda share: None,
) -> dict[str, Tensor]:
    """Return the deployed weights, by node, from which a candidate starts.

    Without `blockwise_tokens` in the recipe, this is the result of `Parent.start`. With them, sub-layers that the
    parent lacks come from the library, their frozen norms are frozen from the start, and all other weights come from
    the parent. on_progress: called with the share, from 0 to 1, of the library's missing sub-layers that are trained.
    Raises UserError if the candidate does not fit the parent, or the corpus has no sequence; OSError if writing fails;
    TooLargeError if memory is too small.
    """
    recipe, source = candidate.recipe, parent.model
    if recipe.distillation is None or not recipe.distillation.blockwise_tokens:
        return parent.start(candidate, corpus)
    weights = transferred(source.architecture, source.weights, candidate.initial_architecture)
    library = Library(parent, corpus, settings_of(recipe), seq_len=recipe.scale.seq_len, device=device)
    with raise_out_of_memory(candidate, device):
        trained = library.start(candidate, on_progress)
    frozen = {name.removesuffix("weight") + "frozen" for name in trained}
    return {name: value for name, value in weights.items() if name not in frozen} | trained


class Library:
    """Trained replacements of a parent's sub-layers, stored next to the corpus, for candidates to start from."""

    def __init__(
        self, parent: Parent, corpus: Corpus, settings: BlockwiseDistillation, *, seq_len: int, device: str = "cpu"
    ) -> None:
        self.parent, self.corpus, self.settings, self.seq_len, self.device = parent, corpus, settings, seq_len, device
        digest = sha256(repr((settings, seq_len)).encode()).hexdigest()[:12]
        self.folder = Path(corpus.folder) / f"library-{FORMAT}-{parent.digest}-{corpus.fingerprint}-{digest}"

    def trained(
        self,
        wanted: Iterable[SubLayer],
        then: Callable[[SubLayer, Block], T],
        on_progress: Callable[[float], None] = lambda share: None,
    ) -> Iterator[dict[SubLayer, T]]:
        """Train the sub-layers `wanted`; yield the results of `then` by sub-layer, each time for a single depth.

        then: called with a sub-layer and the trained layer that contains it, maybe by several threads, each with as
            many torch threads as the caller. on_progress: called with the share of `wanted`, 0 to 1, that is trained.
        """
        by_depth: dict[int, list[SubLayer]] = {}
        for sub_layer in wanted:
            by_depth.setdefault(sub_layer.depth, []).append(sub_layer)
        num_done = 0
        for made in (self._layer_by_layer if self.device == "cpu" else self._together)(by_depth, then):
            yield made
            num_done += len(made)
            on_progress(num_done / sum(map(len, by_depth.values())))

    def _layer_by_layer(
        self, by_depth: Mapping[int, list[SubLayer]], then: Callable[[SubLayer, Block], T]
    ) -> Iterator[dict[SubLayer, T]]:
        num_threads = torch.get_num_threads()
        at_a_time = max(1, num_cores() // num_threads)

        def made(hidden_states: HiddenStates, sub_layer: SubLayer) -> T:
            return then(sub_layer, trained_block(self.parent, sub_layer, hidden_states, self.settings))

        layers = parent_hidden_states(self.parent, by_depth, self.corpus, self.settings, seq_len=self.seq_len)
        with ThreadPoolExecutor(at_a_time, initializer=torch.set_num_threads, initargs=(num_threads,)) as threads:
            for depth, hidden_states in layers:
                results = threads.map(partial(made, hidden_states), by_depth[depth])
                yield dict(zip(by_depth[depth], results, strict=True))

    def _together(
        self, by_depth: Mapping[int, list[SubLayer]], then: Callable[[SubLayer, Block], T]
    ) -> Iterator[dict[SubLayer, T]]:
        model, settings = self.parent.model, self.settings
        size = sum(value.numel() for name, value in model.weights.items() if name.startswith("layers."))
        at_a_time = max(1, MOST_TOGETHER * model.architecture.num_layers // size)
        sub_layers = [sub_layer for depth in by_depth for sub_layer in by_depth[depth]]
        for start in range(0, len(sub_layers), at_a_time):
            some = sub_layers[start : start + at_a_time]
            blocks = trained_together(
                self.parent, some, self.corpus, settings, seq_len=self.seq_len, device=self.device
            )
            for _, layer in groupby(some, key=lambda sub_layer: sub_layer.depth):
                yield {sub_layer: then(sub_layer, blocks[sub_layer]) for sub_layer in layer}

    def keep(self, sub_layer: SubLayer, block: Block) -> None:
        """Write the deployed weights of a sub-layer to its file. block: the layer that contains it. Raises OSError."""
        weights = {
            f"layers.{sub_layer.depth}.{name}": value.cpu().contiguous()
            for name, value in deployed_weights(block).items()
            if name.startswith(MODULES[sub_layer.part])
        }
        self.folder.mkdir(exist_ok=True)
        replace_file(self.path(sub_layer), safetensors.torch.save(weights))

    def start(
        self, candidate: Candidate, on_progress: Callable[[float], None] = lambda share: None
    ) -> dict[str, Tensor]:
        """Return the deployed weights, by node, of the candidate's initial sub-layers that the parent lacks.

        Sub-layers that are not in the library are trained first. The candidate's recipe must have a distillation
        schedule. on_progress and errors: as in `initial_weights`.
        """
        distillation = candidate.recipe.distillation
        assert distillation is not None
        architecture = parent_architecture(distillation, candidate.trained)
        wanted = trained_sub_layers(candidate.initial_architecture) - trained_sub_layers(architecture)
        found = {sub_layer: self._read(sub_layer) for sub_layer in wanted}
        missing = sorted(sub_layer for sub_layer in wanted if found[sub_layer] is None)
        for layer in self.trained(missing, self.keep, on_progress):
            found |= {sub_layer: self._read(sub_layer) for sub_layer in layer}
        assert None not in found.values()
        return {name: value for weights in found.values() if weights for name, value in weights.items()}

    def _read(self, sub_layer: SubLayer) -> dict[str, Tensor] | None:
        with suppress(OSError, SafetensorError):
            return dict(safetensors.torch.load(self.path(sub_layer).read_bytes()))
        return None

    def path(self, sub_layer: SubLayer) -> Path:
        """Return the path of a sub-layer's file of weights, which may not exist yet."""
        inner = "" if sub_layer.inner == "own" else f"-{sub_layer.inner}"
        name = f"{sub_layer.depth:03d}-{sub_layer.part}-{sub_layer.norm}-{sub_layer.form}{inner}"
        return self.folder / f"{name}.safetensors"


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
    """Return the block scores of the sub-layers of `layers` at every depth of the parent; cached scores are reused.

    first_depth: first layer, from 0, that may be replaced; of those before it only the parent's own sub-layers are
        returned, with score 0. keep: whether to save the trained sub-layers (`Library`); any that are not saved yet
        are trained again. on_progress: called with the computed share, from 0 to 1, of the missing scores.
    Raises UserError if the corpus is too short, the cache is damaged or a score is not finite; OSError if sub-layers or
    large temporary files cannot be written. Scores that cannot be cached are only returned.
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
        or (keep and sub_layer not in parent_sub_layers and not library.path(sub_layer).exists())
    ]
    if not missing:
        return BlockScores(divergences={sub_layer: divergences[sub_layer] for sub_layer in wanted})
    model, lowered = parent.decoder().to(device), settings.lowered and device == "cpu"
    with torch.no_grad(), bf16_products(device, enabled=lowered):
        hidden_states = model.hidden_states(tokens.to(device))
        shape = tokens.numel(), architecture.vocab_size
        predicted = allocate_buffer(shape, Path(corpus.folder), torch.device(device).type)
        for rows, logits in model.logits_in_parts(model.read_out(hidden_states[-1])):
            predicted[rows] = logits.log_softmax(dim=-1)

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
    """Return the validation tokens for block scores, sequences x seq_len. Raises UserError as `require_chunks`."""
    num_tokens = max(seq_len, min(SCORED_TOKENS, MOST_PREDICTED // vocab_size))
    sequences = gather(corpus, "validation", held_out_targets(corpus, seq_len, num_tokens).indices, seq_len)
    return torch.from_numpy(sequences[:, :-1].astype("int64"))


@torch.no_grad()
def _divergence(model: Decoder, stream: Tensor, predicted: Tensor, block: Block, depth: int) -> float:
    """Return KL(parent || parent with one layer replaced), nats a token. predicted: the parent's log-probabilities."""
    for layer in (block.eval(), *model.layers[depth + 1 :]):
        stream, _ = layer(stream, False)
    total = 0.0
    for rows, logits in model.logits_in_parts(model.read_out(stream)):
        total += float(functional.kl_div(logits.log_softmax(dim=-1), predicted[rows], reduction="sum", log_target=True))
    return total / len(predicted)
