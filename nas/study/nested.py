"""Nested training: one training in which a parent's layers lose parts at random, from which any placement can be cut.

Every step trains another placement, with weights that all of them share: each layer keeps, halves, replaces or drops
its norms, attention and FFN as it is drawn, and learns from the parent's predictions and streams. A placement cut from
the trained weights, which nothing trains further, loses more than the same placement trained by itself, but nearly in
the same order: of 58 placements from the builtin parent, every third of those that come with it, Spearman's rank
correlation with their trainings is 0.950 after 327,680 tokens, as many as one of those trainings takes (without streams
in the loss 0.919; after 655,360 tokens 0.959), and a cut takes 0.7 seconds. As a start of a training it is worse than
the parent (`docs/search.md`).

Source: Cai et al. 2020, "Once-for-All", arXiv 1908.09791, for weights that all sub-networks share; Nemotron Elastic,
arXiv 2511.16664, for one distillation of nested models.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from nas.conversion.linear_fit import fitted_linears
from nas.conversion.parent import Parent
from nas.conversion.transfer import transferred
from nas.corpus.corpus import Corpus
from nas.corpus.token_files import Log, locked
from nas.model.cross_entropy import distilled
from nas.model.decoder import Decoder
from nas.model.norms import FrozenNorm, frozen_norms
from nas.model.weights import load_deployed
from nas.recipe.distillation import FROZEN
from nas.recipe.recipe import Recipe
from nas.training import checkpoint
from nas.training.batches import train_batch, train_indices, validate
from nas.training.checkpoint import Checkpoint
from nas.training.distillation.teacher import Teacher
from nas.training.optimizer import adamw, learning_rate, load_state_tensors, state_tensors
from search_spaces.architecture import Architecture, Attention, Ffn, Layer, Norm
from search_spaces.lower import GATE_OPS

ANNEALED_SHARE = 0.15  # of the steps, over which placements move away from the parent's
WEIGHT_OF_NONE = 0.5  # of the others' in what share of the layers has no attention, or no FFN
CALIBRATED_SEQUENCES = 16  # of training, over which frozen norms of a cut take their deviations
STEPS_KEPT = 256  # between two checkpoints
# what a form is as it starts
ALIKE: Mapping[str, str] = {"softmax-temperature": "softmax", "leaky-relu": "relu", "identity": "fused"}
FORMAT = 2  # of what is computed and kept; raised when numbers change


class Forms(NamedTuple):
    """What each part of a layer may be in a placement that is drawn."""

    norms: tuple[Norm, ...]
    attentions: tuple[Attention, ...]
    ffns: tuple[Ffn, ...]


def can_nest(parent: Architecture) -> bool:
    """Whether a parent's weights can be shared as they are: live norms, softmax and FFNs without a gate, not shaped."""
    plain = all(
        layer.norm1 in FROZEN
        and layer.norm2 in FROZEN
        and layer.attention == "softmax"
        and layer.stabiliser == "none"
        and layer.ffn not in GATE_OPS
        for layer in parent.layers
    )
    return plain and not parent.block_facts.is_shaped and not parent.folded and parent.final_norm in FROZEN


def forms_of(layers: Iterable[Layer], parent: Architecture) -> Forms:
    """The forms of a space's layers, those that start alike once; what has no norm is trained with a frozen one."""
    listed = list(layers)
    live = parent.layers[0].norm1
    is_live = {norm == live for layer in listed for norm in (layer.norm1, layer.norm2)}
    attentions = {ALIKE.get(layer.attention, layer.attention) for layer in listed}
    ffns = {ALIKE.get(layer.ffn, layer.ffn) for layer in listed}
    return Forms(
        tuple(live if kept else FROZEN[live] for kept in sorted(is_live)),
        tuple(sorted(attentions)),  # type: ignore[arg-type]
        tuple(sorted(ffns)),  # type: ignore[arg-type]
    )


class Nested:
    """Trained weights that placements are cut from. weights: of the parent and a linear in place of each FFN, by node.

    recipe: of the candidates, whose scale says what validates.
    """

    def __init__(self, parent: Architecture, weights: Mapping[str, Tensor], corpus: Corpus, recipe: Recipe) -> None:
        self.parent, self.weights, self.corpus, self.scale = parent, weights, corpus, recipe.scale
        batches = [
            train_batch(corpus, step=step, batch=1, seq_len=self.scale.seq_len, seed=0)[0]
            for step in range(CALIBRATED_SEQUENCES)
        ]
        self._calibration = torch.cat(batches)

    @torch.no_grad()
    def loss(self, trained: Architecture) -> float:
        """Nats per token of a placement that is cut from the weights, on what validates at a rung.

        trained: as it would be trained, with frozen norms where it has none.
        """
        model = Decoder(trained).eval()
        load_deployed(model, transferred(self.parent, self.weights, trained))
        with _calibrating(model):
            model.features(self._calibration, with_entropies=False)
        return validate(model, self.corpus, self.scale, self.scale.rung_validation_tokens).loss


def nested_training(
    parent: Parent,
    layers: Iterable[Layer],
    corpus: Corpus,
    recipe: Recipe,
    teacher: Teacher,
    *,
    tokens: int,
    log: Log = lambda line: None,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Nested:
    """Trains weights for placements of these layers; goes on from, or reads, what is kept of them beside the corpus.

    recipe: of the candidates; its rate, batch and length are taken. teacher: the parent. tokens: to train on. log: is
    told if another process trains the same, which is waited for.
    """
    recipe = replace(recipe, scale=replace(recipe.scale, tokens=tokens))
    forms = forms_of(layers, parent.model.architecture)
    key = {"format": FORMAT, "parent": parent.digest, "corpus": corpus.fingerprint, "of": repr((forms, recipe))}
    name = sha256(repr(key).encode()).hexdigest()[:12]
    folder = Path(corpus.folder) / f"nested-{name}"
    with locked(folder, log):
        run = _NestedRun(parent, forms, corpus, recipe, teacher, folder, key)
        while run.step < recipe.scale.num_steps:
            run.train_step()
            on_progress(run.step / recipe.scale.num_steps)
    weights = {name: value.detach() for name, value in run.shared.weights().items()}
    return Nested(parent.model.architecture, weights, corpus, recipe)


class _Shared(nn.Module):
    """The weights that all placements share."""

    def __init__(self, parent: Parent, tokens: Tensor) -> None:
        super().__init__()
        source = parent.model.architecture
        self.model = Decoder(source)
        load_deployed(self.model, parent.model.weights)
        linear = replace(source, layers=tuple(replace(layer, ffn="fused") for layer in source.layers))
        fused = Decoder(linear)
        load_deployed(fused, transferred(source, parent.model.weights, linear))
        depths = range(source.num_layers)
        load_deployed(fused, fitted_linears(parent.decoder(), fused, depths, tokens))
        self.fused = nn.ModuleList(fused.get_submodule(f"layers.{depth}.ffn.fused") for depth in depths)

    def weights(self) -> dict[str, Tensor]:
        """By node, those of a linear in place of an FFN beside the FFN's own."""
        weights: dict[str, Tensor] = dict(self.model.named_parameters())
        for depth, linear in enumerate(self.fused):
            weights |= {f"layers.{depth}.ffn.fused.{name}": value for name, value in linear.named_parameters()}
        return weights


class _Features(nn.Module):
    """A decoder whose call gives the stream that logits are a projection of, and those between layers."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        streams: list[Tensor] = []
        hidden, _ = self.model.features(tokens, with_entropies=False, streams=streams)
        return hidden, streams


class _NestedRun:
    """A nested training between two steps, as far as it was kept."""

    def __init__(
        self,
        parent: Parent,
        forms: Forms,
        corpus: Corpus,
        recipe: Recipe,
        teacher: Teacher,
        folder: Path,
        identity: Mapping[str, Any],
    ) -> None:
        assert recipe.route is not None
        self.parent, self.forms, self.corpus, self.recipe = parent.model.architecture, forms, corpus, recipe
        self.teacher, self.folder, self.identity, self.step = teacher, folder, identity, 0
        self.route = recipe.route
        num_fitted = max(1, recipe.route.linear_fit_tokens // recipe.scale.seq_len)
        tokens, _ = train_batch(corpus, step=0, batch=num_fitted, seq_len=recipe.scale.seq_len, seed=0)
        self.shared = _Shared(parent, tokens)
        self.optimizer = adamw(self.shared, recipe)
        if saved := checkpoint.load_latest(folder, identity):
            self.step = saved.step
            self.shared.load_state_dict(dict(saved.weights))
            if saved.optimizer is not None:
                load_state_tensors(self.shared, [self.optimizer], dict(saved.optimizer))

    def train_step(self) -> None:
        """Trains one placement for a batch."""
        scale = self.recipe.scale
        drawn = {"step": self.step, "batch": scale.batch, "seq_len": scale.seq_len, "seed": 0}
        inputs, targets = train_batch(self.corpus, **drawn)
        indices = train_indices(self.corpus, **drawn)
        predictions = self.teacher.predictions(indices, inputs)
        trained = self._placement()
        weights = transferred(self.parent, self.shared.weights(), trained)
        given = {f"model.{name}": value for name, value in weights.items() if not name.endswith(".frozen")}
        model = Decoder(trained)
        with _calibrating(model):
            hidden, streams = functional_call(_Features(model), given, (inputs,))
        table = self.shared.model.logits.weight
        likely, log_probabilities = (part.flatten(0, 1) for part in predictions)
        share = self.route.distillation
        loss = distilled(hidden.flatten(0, 1), table, targets.flatten(), likely, log_probabilities, share).loss
        if self.route.streams:
            loss = loss + self.route.streams * self.teacher.stream_error(self.teacher.streams(indices, inputs), streams)
        torch.autograd.backward(loss)
        norm = nn.utils.clip_grad_norm_(self.shared.parameters(), self.recipe.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.recipe, self.step)
        if norm.isfinite():  # what overflows is that placement's
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        if self.step % STEPS_KEPT == 0 or self.step == scale.num_steps:
            self._save()

    def _placement(self) -> Architecture:
        """What the next step trains: of the parent's layers as many as are left, and of the others each part by itself,
        from shares of its forms that are drawn for all layers.
        """
        rng = np.random.default_rng(self.step)
        left = 1 - self.step / (ANNEALED_SHARE * self.recipe.scale.num_steps)
        norm1, norm2, attention, ffn = (
            _drawer(rng, forms)
            for forms in (self.forms.norms, self.forms.norms, self.forms.attentions, self.forms.ffns)
        )

        def layer() -> Layer:
            kept, active = attention(), ffn()
            return Layer(
                norm1="none" if kept == "none" else norm1(),
                attention=kept,
                norm2="none" if active == "none" else norm2(),
                ffn=active,
            )

        layers = tuple(theirs if rng.random() < left else layer() for theirs in self.parent.layers)
        final_norm = self.parent.final_norm if rng.random() < left else norm1()
        return replace(self.parent, layers=layers, final_norm=final_norm)

    def _save(self) -> None:
        ended = self.step == self.recipe.scale.num_steps
        optimizer = None if ended else state_tensors(self.shared, [self.optimizer])
        weights = {name: value.detach().clone() for name, value in self.shared.state_dict().items()}
        checkpoint.save(
            self.folder,
            Checkpoint(step=self.step, identity=self.identity, progress={}, weights=weights, optimizer=optimizer),
        )


def _drawer(rng: np.random.Generator, forms: tuple[str, ...]) -> Callable[[], Any]:
    """Draws of a form, by shares that are drawn evenly from all there are, but for less of what is not there."""
    shares = rng.dirichlet([WEIGHT_OF_NONE if form == "none" else 1.0 for form in forms])
    return lambda: str(rng.choice(forms, p=shares))


@contextmanager
def _calibrating(model: Decoder) -> Iterator[None]:
    """While it lasts, frozen norms of a model divide by the mean deviation of the rows that they read."""
    norms = list(frozen_norms(model).values())
    for norm in norms:
        norm.set_frozen()
    hooks = [norm.register_forward_pre_hook(_calibrate) for norm in norms]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _calibrate(norm: FrozenNorm, inputs: tuple[Tensor, ...]) -> None:
    norm.calibrate(inputs[0].detach())
