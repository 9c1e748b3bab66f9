"""The block library: every sub-layer that may replace one of the parent's, trained alone on its hidden states.

Blockwise distillation goes layer by layer. The parent's hidden states are computed once, each layer's from the one
before, so that memory holds what one layer reads and leaves, and the alternatives that are in training: as many as
there are threads, each on one. Alternatives do not see one another, so their number, order and threads change nothing.

Source: Bercovich et al. 2024, "Puzzle", arXiv 2411.19146, section 3: a library of blocks trained apart.
"""

import math
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from nas.conversion.linear_fit import fit_linear, fit_polynomial, fit_queries, weights_by_position
from nas.conversion.parent import Parent
from nas.conversion.transfer import transferred
from nas.corpus.corpus import Corpus
from nas.model.decoder import Block
from nas.model.norms import followed_deviations, frozen_norms
from nas.model.weights import deployed_weights, load_deployed
from nas.recipe.candidate import Candidate
from nas.recipe.distillation import KINDS, fitted_degree, parent_architecture
from nas.recipe.recipe import Recipe
from nas.storage import replace_file
from nas.training.batches import train_batch
from nas.training.distillation.parts import MODULES, modules_of
from nas.training.distillation.sub_layers import SubLayer, trained_sub_layers

T = TypeVar("T")

FORMAT = 3  # of what is computed and kept; raised when numbers change
MOST_IN_MEMORY = 1 << 28  # numbers, 1 GiB; more are in a file that the system keeps in memory as far as it can
FIT_ROWS = 8  # tokens that a linear in place of an FFN is fitted to, for each of its rows


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockwiseDistillation:
    """How alternatives are trained: by AdamW at a constant rate; norms freeze after their share of the steps.

    batch: sequences a step; fewer where they are so long that the tokens would not do for `least_steps`.
    polynomial_rate, power8_rate: of what is fitted to the parent's before, and so near to it that larger steps undo
        that (`rate_of`).
    """

    tokens: int = 32_768
    batch: int = 8
    least_steps: int = 32  # with 4 the order of scores on the proxy agrees with that of trainings by 0.44, not 0.64
    learning_rate: float = 1e-3
    polynomial_rate: float = 2.5e-4
    power8_rate: float = 1e-4
    freezing_share: float = 0.25

    def rate_of(self, form: str, degree: int | None) -> float:
        """The rate of a form that is fitted by a polynomial of this degree, if by any; a line is far from all it fits.

        Errors on held-out hidden states at three layers of SmolLM2, without training and after 64 steps of 512 tokens:

            rate                    0      1e-4   2.5e-4  5e-4   1e-3
            squared gates, layer 2  0.132  0.073  0.055   0.056  0.057
                           layer 6  0.004  0.002  0.002   0.003  0.005
                          layer 20  0.010  0.006  0.009   0.018  0.038
            eighth powers, layer 2  0.069  0.011  0.016*  0.036  0.040     *: 2e-4
        """
        if form == "power8":
            return self.power8_rate
        return self.polynomial_rate if degree is not None and degree > 1 else self.learning_rate

    def batch_of(self, seq_len: int) -> int:
        return max(1, min(self.batch, self.tokens // (self.least_steps * seq_len)))

    def num_steps(self, seq_len: int) -> int:
        return max(self.least_steps, self.tokens // (self.batch_of(seq_len) * seq_len))


DEFAULT = BlockwiseDistillation()


class HiddenStates(NamedTuple):
    """What a layer of the parent reads and leaves, each steps x batch x T x d_model."""

    read: Tensor
    left: Tensor


def parent_hidden_states(
    parent: Parent,
    depths: Collection[int],
    corpus: Corpus,
    settings: BlockwiseDistillation,
    *,
    seq_len: int,
    device: str = "cpu",
) -> Iterator[tuple[int, HiddenStates]]:
    """The hidden states of these depths in order, good until the next are asked for; the parent runs once."""
    if not depths:
        return
    model, batch = parent.decoder().to(device), settings.batch_of(seq_len)
    shape = (settings.num_steps(seq_len), batch, seq_len, parent.model.architecture.d_model)
    read, left = (allocate_buffer(shape, Path(corpus.folder)) for _ in range(2))
    for step, stream in enumerate(read):
        inputs, _ = train_batch(corpus, step=step, batch=batch, seq_len=seq_len, seed=0)
        with torch.no_grad():
            stream.copy_(model.embedded(inputs.to(device)))
    for depth in range(max(depths) + 1):
        for source, stream in zip(read, left, strict=True):
            with torch.no_grad():
                stream.copy_(model.layers[depth](source.to(device), False)[0])
        if depth in depths:
            yield depth, HiddenStates(read, left)
        read, left = left, read


def allocate_buffer(shape: tuple[int, ...], folder: Path) -> Tensor:
    """A tensor to be filled: in memory or, if it is large, in a file of this folder that goes when the tensor does."""
    size = math.prod(shape)
    if size <= MOST_IN_MEMORY:
        return torch.empty(shape)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        return torch.from_file(file.name, shared=True, size=size).view(shape)


def trained_block(
    parent: Parent,
    sub_layer: SubLayer,
    hidden_states: HiddenStates,
    settings: BlockwiseDistillation,
    device: str = "cpu",
) -> Block:
    """The parent's layer with another sub-layer, trained to leave what the parent's does. A linear in place of an FFN
    starts at the least squares of the first steps, a polynomial in an activation's place at those of the first, queries
    of eighth powers as long as is nearest on it, others as a candidate would.
    """
    block, theirs = _untrained(parent, sub_layer).to(device), parent.model.architecture.layers[sub_layer.depth]
    degree = fitted_degree(sub_layer.form, theirs, parent.model.architecture)
    num_steps, tokens_a_step = len(hidden_states.read), hidden_states.read[0, :, :, 0].numel()
    if sub_layer.form == "fused":
        num_fit = -(-FIT_ROWS * hidden_states.read.shape[-1] // tokens_a_step)
        fit_linear(block, *(stream[:num_fit].flatten(0, 1).to(device) for stream in hidden_states))
    elif degree:
        original = SubLayer(sub_layer.depth, "ffn", theirs.norm2, theirs.ffn)
        fit_polynomial(block, _untrained(parent, original).eval().to(device), hidden_states.read[0].to(device), degree)
    elif sub_layer.form == "power8" and theirs.attention not in ("power8", "none"):
        original = SubLayer(sub_layer.depth, "attention", theirs.norm1, theirs.attention)
        fit_queries(block, _untrained(parent, original).eval().to(device), hidden_states.read[0].to(device))
    block.requires_grad_(False)
    moved = [value for part in modules_of(block, sub_layer.part) for value in part.requires_grad_().parameters()]
    if not moved:
        return block
    optimizer = torch.optim.AdamW(moved, lr=settings.rate_of(sub_layer.form, degree), weight_decay=0.0)
    for step, (read, left) in enumerate(zip(*hidden_states, strict=True)):
        if step >= settings.freezing_share * num_steps:
            for norm in frozen_norms(block).values():
                if not norm.is_frozen:
                    norm.set_frozen()
        source = read.to(device)
        error = distillation_error(block(source, False)[0], source, left.to(device))
        optimizer.zero_grad()
        torch.autograd.backward(error)
        optimizer.step()
        followed_deviations(block)
    return block


def _untrained(parent: Parent, sub_layer: SubLayer) -> Block:
    source, depth = parent.model.architecture, sub_layer.depth
    layers = list(source.layers)
    norm, form, *_, inner = KINDS[sub_layer.part]
    chosen: dict[str, Any] = {norm: sub_layer.norm, form: sub_layer.form, inner: sub_layer.inner}
    layers[depth] = replace(layers[depth], **chosen)
    target = replace(source, layers=tuple(layers))
    block, prefix = Block(target, depth, 1.0), f"layers.{depth}."
    weights = transferred(source, parent.model.weights, target)
    load_deployed(block, {n.removeprefix(prefix): value for n, value in weights.items() if n.startswith(prefix)})
    return block


def distillation_error(made: Tensor, read: Tensor, left: Tensor) -> Tensor:
    """Squared error of what a layer leaves over the square of what the parent's adds, at each position on the mean.

    made, read, left: batch x T x d_model. Positions count alike, since the first one's numbers are far larger.
    """
    return ((made - left).square().mean(dim=(0, 2)) * weights_by_position(read, left)).mean()


def settings_of(recipe: Recipe) -> BlockwiseDistillation:
    """How a recipe has sub-layers trained. At SmolLM2's width 64 steps of 4 sequences leave errors of 0.050 where 32 of
    8 leave 0.056 of gates that are linear, for which rates of 5e-4 to 2e-3 are alike.
    """
    tokens = recipe.distillation.blockwise_tokens if recipe.distillation else 0
    return replace(DEFAULT, tokens=tokens, batch=recipe.scale.micro_batch) if tokens else DEFAULT


def initial_weights(
    parent: Parent,
    candidate: Candidate,
    corpus: Corpus,
    *,
    device: str = "cpu",
    on_progress: Callable[[float], None] = lambda share: None,
) -> dict[str, Tensor]:
    """The deployed weights that training of a candidate begins with: of its parent and, if its recipe says so, of the
    block library, whose norms are frozen where they are to be. on_progress: gets the share of the library that is done.

    Raises UserError if the candidate does not fit, or the corpus holds no sequence.
    """
    recipe, source = candidate.recipe, parent.model
    if recipe.distillation is None or not recipe.distillation.blockwise_tokens:
        return parent.start(candidate, corpus)
    weights = transferred(source.architecture, source.weights, candidate.initial_architecture)
    library = Library(parent, corpus, settings_of(recipe), seq_len=recipe.scale.seq_len, device=device)
    trained = library.start(candidate, on_progress)
    frozen = {name.removesuffix("weight") + "frozen" for name in trained}
    return {name: value for name, value in weights.items() if name not in frozen} | trained


class Library:
    """Sub-layers in place of a parent's: trained, and kept on disk beside the corpus for candidates to start from."""

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
        """What `then` makes of every trained sub-layer, in the layer around it; layer by layer, of those that have one.

        then: is called by several threads. Numbers are those of torch's threads, as they are set here. on_progress:
        gets the share that is done.
        """
        by_depth: dict[int, list[SubLayer]] = {}
        for sub_layer in wanted:
            by_depth.setdefault(sub_layer.depth, []).append(sub_layer)
        num_done, num_threads = 0, torch.get_num_threads()
        at_a_time = max(1, len(os.sched_getaffinity(0)) // num_threads) if self.device == "cpu" else 1

        def made(hidden_states: HiddenStates, sub_layer: SubLayer) -> T:
            return then(sub_layer, trained_block(self.parent, sub_layer, hidden_states, self.settings, self.device))

        layers = parent_hidden_states(
            self.parent, by_depth, self.corpus, self.settings, seq_len=self.seq_len, device=self.device
        )
        with ThreadPoolExecutor(at_a_time, initializer=torch.set_num_threads, initargs=(num_threads,)) as threads:
            for depth, hidden_states in layers:
                yield dict(
                    zip(by_depth[depth], threads.map(partial(made, hidden_states), by_depth[depth]), strict=True)
                )
                num_done += len(by_depth[depth])
                on_progress(num_done / sum(map(len, by_depth.values())))

    def keep(self, sub_layer: SubLayer, block: Block) -> None:
        """Writes what a candidate needs of a trained sub-layer. Raises OSError."""
        weights = {
            f"layers.{sub_layer.depth}.{name}": value.cpu().contiguous()
            for name, value in deployed_weights(block).items()
            if name.startswith(MODULES[sub_layer.part])
        }
        self.folder.mkdir(exist_ok=True)
        replace_file(self._path(sub_layer), safetensors.torch.save(weights))

    def start(
        self, candidate: Candidate, on_progress: Callable[[float], None] = lambda share: None
    ) -> dict[str, Tensor]:
        """Weights of the candidate's sub-layers that are not the parent's, by node. on_progress: as `block_scores`."""
        distillation = candidate.recipe.distillation
        assert distillation is not None
        architecture = parent_architecture(distillation, candidate.trained)
        wanted = trained_sub_layers(candidate.initial_architecture) - trained_sub_layers(architecture)
        weights_by_sub_layer = {
            sub_layer: weights for sub_layer in wanted if (weights := self._read(sub_layer)) is not None
        }
        for layer in self.trained(sorted(wanted - weights_by_sub_layer.keys()), self.keep, on_progress):
            for sub_layer in layer:
                weights = self._read(sub_layer)
                assert weights is not None
                weights_by_sub_layer[sub_layer] = weights
        return {name: value for weights in weights_by_sub_layer.values() for name, value in weights.items()}

    def holds(self, sub_layer: SubLayer) -> bool:
        return self._path(sub_layer).exists()

    def _read(self, sub_layer: SubLayer) -> dict[str, Tensor] | None:
        """None for one that is missing or damaged."""
        with suppress(OSError, SafetensorError):
            return dict(safetensors.torch.load(self._path(sub_layer).read_bytes()))
        return None

    def _path(self, sub_layer: SubLayer) -> Path:
        inner = "" if sub_layer.inner == "own" else f"-{sub_layer.inner}"
        name = f"{sub_layer.depth:03d}-{sub_layer.part}-{sub_layer.norm}-{sub_layer.form}{inner}"
        return self.folder / f"{name}.safetensors"
