"""Finds a parent by name: an external model, or the result of a training with `nas.train`."""

from pathlib import Path

from costmodel.errors import UserError
from nas.conversion.parent import BUILTIN, Parent, load_initial, load_parent, parent_of, read_parent_architecture
from nas.conversion.pretrained import Pretrained, read_tokenizer
from nas.conversion.score_bounds import bounding_tokens
from nas.conversion.verified_fold import check_tokens
from nas.corpus.corpus import known_corpus
from nas.corpus.documents import OWN_RULE
from nas.corpus.held_out import trained_on
from nas.corpus.tokenizer import with_begin_of_text
from nas.recipe.candidate import candidate_id
from nas.storage import RUNS, newest
from nas.study.verify_fold import deployable
from nas.training import checkpoint
from nas.training.manifest import TRAINING_FILE, is_training, read_training, training_tokenizer

UNREAD = "unread"  # digest of a parent whose weights are not read


def find_parent(name: str, begin_of_text: str = OWN_RULE) -> Parent:
    """Load a parent by a name that `load_parent` takes, by a training's folder, or as the `latest` training.

    begin_of_text: as in `StudyConfig`. Raises UserError as `load_parent` does, if the tokenizer lacks the token, or if
    a training has no whole checkpoint or lost its tokenizer.
    """
    folder = _training(name)
    found = load_parent(name) if folder is None else parent_of(str(folder), _trained(folder))
    return found if begin_of_text == OWN_RULE else parent_of(found.name, found.model, begin_of_text)


def find_parent_settings(name: str) -> Parent:
    """Return the parent that `find_parent` loads, without weights and tokenizer, from its settings alone.

    A training is loaded, since its weights decide its form. Raises UserError as `read_parent_architecture` does.
    """
    if name == BUILTIN or _training(name) is not None:
        return find_parent(name)
    return Parent(name, Pretrained(read_parent_architecture(name), {}, None), UNREAD)


def find_initial(name: str, begin_of_text: str = OWN_RULE) -> Pretrained:
    """Load a model by a name that `load_initial` takes, by a training's folder, or as the `latest` training.

    begin_of_text: as in `StudyConfig`. Raises UserError as `load_initial` does, or if the tokenizer lacks the token.
    """
    folder = _training(name)
    found = load_initial(name) if folder is None else _trained(folder)
    if found.tokenizer is None:
        return found
    return found._replace(tokenizer=with_begin_of_text(found.tokenizer, begin_of_text))


def _training(name: str) -> Path | None:
    folder = newest(TRAINING_FILE) if name == "latest" else Path(name)
    if folder is None:
        raise UserError(f"there is no training under {RUNS}/ yet; start one with python -m nas.train ARCH.")
    return folder if is_training(folder) else None


def _trained(folder: Path) -> Pretrained:
    training = read_training(folder)
    candidate, corpus = training.candidate, known_corpus(training.corpus)
    last = checkpoint.load_latest(folder, {"candidate": candidate_id(candidate)})
    if last is None:
        raise UserError(f"{folder} must have a whole checkpoint, but has none; train on with --resume.")
    _, tokens = check_tokens(corpus, candidate.trained.vocab_size, candidate.recipe.scale.seq_len)
    architecture, weights, _ = deployable(candidate, last, bounding_tokens(corpus, tokens))
    windows = None if corpus is None else trained_on(Path(corpus.folder))
    return Pretrained(architecture, weights, read_tokenizer(training_tokenizer(folder, training.corpus)), windows)
