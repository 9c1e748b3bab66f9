"""Weights that a training starts from: an export of ours, or a model of transformers."""

from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load
from tokenizers import Tokenizer
from torch import Tensor

from nas.data import Corpus
from nas.weights import WEIGHTS_FILE, weight_shapes
from search_spaces.architecture import Architecture, load_architecture
from search_spaces.lower import lower

TRAINED_FILE = "trained.yaml"
TOKENIZER_FILE = "tokenizer.json"


class Source(NamedTuple):
    """A model from elsewhere: its architecture, and its deployed weights in single precision."""

    architecture: Architecture
    weights: dict[str, Tensor]


def load_initial(path: str) -> Source:
    """The model in a folder of `nas.export` or of transformers' `save_pretrained`, or of an id on the hub.

    Raises ValueError if there is none, or its weights are not whole and finite.
    """
    if Path(path, TRAINED_FILE).is_file():
        return read_export(Path(path))
    from nas.huggingface import load_pretrained  # needs the extra `hf`

    return load_pretrained(path)


def read_export(folder: Path) -> Source:
    """The model that `nas.export` wrote. Raises ValueError, naming the file, if it is damaged."""
    architecture, path = load_architecture(folder / TRAINED_FILE), folder / WEIGHTS_FILE
    try:
        weights = load(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} must be the weights of {TRAINED_FILE} beside it, but: {error}.") from None
    for node in lower(architecture, architecture.context):
        for suffix, shape in weight_shapes(node.op).items():
            name = f"{node.name}.{suffix}"
            if name not in weights or weights[name].shape != shape:
                found = tuple(weights[name].shape) if name in weights else "none"
                raise ValueError(
                    f"{path} must hold {name!r} of shape {shape}, as {TRAINED_FILE} says, but has {found}."
                )
            if not weights[name].is_floating_point() or not weights[name].isfinite().all():
                raise ValueError(f"{path} must hold finite floating-point numbers, but {name!r} does not.")
    return Source(architecture, {name: value.float() for name, value in weights.items()})


def require_tokenizer(path: str, vocab_size: int, corpus: Corpus) -> None:
    """Raises ValueError unless the corpus is in the tokens that the weights know.

    Told by the tokenizer beside the weights where there is one, else by the size of the vocabulary.
    """
    beside = Path(path, TOKENIZER_FILE)
    if beside.is_file():
        vocabularies = [Tokenizer.from_file(str(file)).get_vocab() for file in (beside, _tokenizer_of(corpus))]
        same = vocabularies[0] == vocabularies[1]
    else:
        same = vocab_size == corpus.vocab_size
    if not same:
        raise ValueError(
            f"data {corpus.data!r} must be in the tokens of {path!r}, a vocabulary of {vocab_size}, but is in those of "
            f"{corpus.tokenizer}; weights and data need one tokenizer."
        )


def _tokenizer_of(corpus: Corpus) -> Path:
    return Path(corpus.folder, TOKENIZER_FILE)
