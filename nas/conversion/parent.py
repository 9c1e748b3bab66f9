"""The trained model that candidates start from: how it is loaded and checked, and how it initialises candidates."""

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from costmodel.errors import UserError
from nas.conversion.gguf_file import load_gguf, read_gguf_settings
from nas.conversion.huggingface import load_pretrained, read_pretrained_config
from nas.conversion.linear_fit import fitted_linears
from nas.conversion.pretrained import (
    Pretrained,
    is_export,
    read_architecture,
    read_export,
    read_windows,
    require_checksums,
)
from nas.conversion.transfer import SAME, transferred
from nas.corpus.corpus import Corpus
from nas.corpus.documents import OWN_RULE
from nas.corpus.sequences import epoch_order, gather, num_sequences
from nas.corpus.tokenizer import with_begin_of_text
from nas.model.decoder import Decoder
from nas.model.weights import load_deployed
from nas.recipe.candidate import Candidate
from nas.recipe.distillation import DistillationSchedule, fitted_parts
from nas.recipe.recipe import Scale
from search_spaces.architecture import Architecture, canonical
from search_spaces.checkpoints.checkpoint import is_gguf
from search_spaces.notation import placement

BUILTIN = "builtin"
LARGEST_WEIGHT = 2.0**45  # the largest number of 64 bits with 18 of them behind the point, and one for the sign
BUILTIN_FOLDER = Path(__file__).parents[1] / "parents" / "gpt2-small-proxy"


def load_initial(path: str) -> Pretrained:
    """Load a model: a folder of `nas.export` or of transformers' `save_pretrained`, a GGUF file, or an id on the hub.

    path: the config.json of a folder stands for the folder. Raises UserError as `read_export`, `load_gguf` and
    `load_pretrained` do, or if a checksum differs, a weight is beyond +-LARGEST_WEIGHT, or the embedding is 0.
    """
    if Path(path).name == "config.json" and Path(path).is_file():
        path = str(Path(path).parent)
    if is_export(Path(path)):
        model = read_export(Path(path))
    elif is_gguf(path):
        model = load_gguf(path)
    else:
        require_checksums(Path(path))
        model = load_pretrained(path)._replace(windows=read_windows(Path(path)))
    for name, value in model.weights.items():
        if value.numel() and (largest := float(value.abs().max())) > LARGEST_WEIGHT:
            raise UserError(
                f"weights of {path!r} must be at most 2^45, but {name!r} has {largest:.3g}; no ring holds it."
            )
    if not model.weights["embed.weight"].any():
        raise UserError(f"{path!r} must have an embedding, but its 'embed.weight' is zero.")
    return model


def read_parent_architecture(name: str) -> Architecture:
    """Return the architecture of `load_parent`'s model by its settings. Raises UserError if they cannot be read."""
    if name == BUILTIN or is_export(Path(name)):
        return read_architecture(BUILTIN_FOLDER if name == BUILTIN else Path(name))[0]
    return (read_gguf_settings if is_gguf(name) else read_pretrained_config)(name)[1]


class Parent(NamedTuple):
    """A trained model with its tokenizer.

    name: as the user gave it. digest: hash of architecture, weights and tokenizer (`digest_of`).
    """

    name: str
    model: Pretrained
    digest: str

    @property
    def distillation(self) -> DistillationSchedule:
        """The default distillation schedule from this parent. Raises UserError if the parent is a folded model."""
        architecture = self.model.architecture
        if architecture.folded:
            raise UserError(f"parent {self.name!r} must be a model as it was trained, but is a folded one.")
        weights = self.model.weights.items()
        linears = [
            value.double()
            for name, value in weights
            if name.startswith("layers.") and value.ndim == 2 and not name.endswith("temperature.weight")
        ]
        squares, count = sum(value.square().sum().item() for value in linears), sum(value.numel() for value in linears)
        return DistillationSchedule(
            parent=self.digest,
            placement=placement(architecture),
            spread_over_depth=True,
            weight_rms=math.sqrt(squares / count) if count else None,
        )

    def tables_on(self, base: Architecture, scale: Scale) -> Architecture:
        """Return `base` with the parent's vocab_size and context, or unchanged if the scale has its own vocab_size."""
        vocab_size, context = self.model.architecture.vocab_size, self.model.architecture.context
        return base if scale.vocab_size is not None else replace(base, vocab_size=vocab_size, context=context)

    def start(self, candidate: Candidate, corpus: Corpus) -> dict[str, Tensor]:
        """Return the weights from which the training of a candidate starts, as `load_deployed` takes them.

        corpus: text on which linears are fitted, if the candidate needs that (`fitted_parts`).
        Raises UserError if the candidate does not fit the parent, or there is no sequence to fit linears on.
        """
        source, distillation = self.model.architecture, candidate.recipe.distillation
        weights = transferred(source, self.model.weights, candidate.initial_architecture)
        if distillation is not None and (parts := fitted_parts(candidate.initial_architecture, source)):
            model = Decoder(candidate.initial_architecture)
            load_deployed(model, weights)
            seq_len = candidate.recipe.scale.seq_len
            order = epoch_order(0, 0, num_sequences(corpus, "train", seq_len))  # first seen by a training of seed 0
            sequences = gather(corpus, "train", order[: max(1, distillation.linear_fit_tokens // seq_len)], seq_len)
            tokens = torch.from_numpy(sequences[:, :-1].astype("int64"))
            weights |= fitted_linears(self.decoder(), model, parts, tokens)
        return weights

    def decoder(self) -> Decoder:
        """Return the parent as a decoder whose weights need no gradients, in evaluation mode."""
        model = Decoder(self.model.architecture)
        load_deployed(model, self.model.weights)
        return model.requires_grad_(False).eval()


def load_parent(name: str) -> Parent:
    """Load a parent by its name: `builtin`, or a folder, file or id that `load_initial` takes.

    Raises UserError as `load_initial` does, or if the model has no tokenizer.
    """
    return parent_of(name, read_export(BUILTIN_FOLDER) if name == BUILTIN else load_initial(name))


def parent_of(name: str, model: Pretrained, begin_of_text: str = OWN_RULE) -> Parent:
    """Return a model as a parent called `name`.

    begin_of_text: `rule` of `with_begin_of_text`. Raises UserError if there is no tokenizer, or it lacks that token.
    """
    if model.tokenizer is None:
        raise UserError(f"model {name!r} must come with its tokenizer; put its tokenizer.json beside the weights.")
    model = model._replace(tokenizer=with_begin_of_text(model.tokenizer, begin_of_text))
    return Parent(name, model, digest_of(model))


def require_fit(parent: Parent, target: Architecture) -> None:
    """Raise UserError, with a remedy, if `target` differs from the parent in a setting of SAME or has a longer context.

    target: any candidate of the space, with the dimensions in which candidates are trained. For what else must fit,
    such as `d_ff`, `transferred` raises UserError.
    """
    source = parent.model.architecture
    for name in SAME:
        theirs, ours = getattr(source, name), getattr(target, name)
        if theirs != ours:
            raise UserError(
                f"parent {parent.name!r} must have the `{name}` that candidates are trained with, {ours!r}, but has "
                f"{theirs!r}; give another --parent, a --scale or --space of its dimensions, or --parent none."
            )
    if target.context > source.context:
        raise UserError(
            f"training sequences (--seq-len, in a search --train-len) must be at most the context of parent "
            f"{parent.name!r}, {source.context}, but got {target.context}."
        )


def kept_parent(folder: Path, name: str, digest: str) -> Parent:
    """Load the copy of a run's parent from `folder`, which is inside the run's folder. name: the parent's name.

    Raises UserError as `read_export` does, or if the copy's digest (`digest_of`) is not `digest`.
    """
    model = read_export(folder)
    if (actual := digest_of(model)) != digest:
        raise UserError(f"{folder} must hold the parent {digest} of the run, but holds {actual}; start a new run.")
    return Parent(name, model, digest)


def digest_of(model: Pretrained) -> str:
    """Return the first twelve hexadecimal digits of a SHA-256 of architecture, tokenizer and weights."""
    digest = hashlib.sha256(json.dumps(canonical(model.architecture), sort_keys=True).encode())
    digest.update((model.tokenizer.json if model.tokenizer else "").encode())
    for name, value in sorted(model.weights.items()):
        digest.update(f"{name} {tuple(value.shape)}".encode())
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]
