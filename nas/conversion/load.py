"""Weights that a training starts from: an export of ours, or a model of transformers."""

import os
from pathlib import Path

from nas.conversion.pretrained import CHECKSUMS_FILE, TRAINED_FILE, Pretrained, read_export


def load_initial(path: str) -> Pretrained:
    """The model in a folder of `nas.export` or of transformers' `save_pretrained`, or of an id on the hub.

    Raises UserError if there is none, or its weights are not whole and finite.
    """
    if any(os.path.isfile(Path(path, name)) for name in (TRAINED_FILE, CHECKSUMS_FILE)):
        return read_export(Path(path))
    from nas.conversion.huggingface import load_pretrained  # needs the extra `hf`

    return load_pretrained(path)
