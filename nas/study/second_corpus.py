"""The second corpus of a study, found and checked."""

from pathlib import Path

from costmodel.errors import UserError
from nas.conversion.parent import BUILTIN, Parent
from nas.corpus.corpus import Corpus
from nas.corpus.second import DEPENDENCIES, require_sequences, second_corpus, second_source
from nas.run.config import StudyConfig
from nas.run.folder import Meta

NO_SECOND = "none"


def study_second(config: StudyConfig, corpus: Corpus, parent: Parent | None) -> Corpus | None:
    """The second corpus that a new study asks for, or None.

    Unless one is named, DEPENDENCIES beside the builtin parent's own corpus. Raises UserError if the one named is not
    there, is the first one's text, or is too small.
    """
    usual = DEPENDENCIES if parent is not None and parent.name == BUILTIN and config.data == "stdlib" else NO_SECOND
    if (data := config.also_validate or usual) == NO_SECOND:
        return None
    second = second_corpus(data, second_source(data), corpus, parent and parent.model.windows)
    require_sequences(second, config.seq_len)
    return second


def run_second(folder: Path, meta: Meta, config: StudyConfig, corpus: Corpus, parent: Parent | None) -> Corpus | None:
    """The second corpus of a run to resume. Raises UserError if it is not what it was."""
    if meta.second is None:
        return None
    second = study_second(config, corpus, parent)
    if second is None or second.fingerprint != meta.second.fingerprint:
        raise UserError(
            f"the second corpus of {folder}, {meta.second.data}, must be the one it was validated on, but its text has "
            f"changed; restore it, or start a new run."
        )
    return second
