"""Weights that a training starts from: an export of ours, or a model of transformers."""

from pathlib import Path

from nas.conversion.pretrained import Pretrained, is_export, read_export, require_checksums


def load_initial(path: str) -> Pretrained:
    """The model in a folder of `nas.export` or of transformers' `save_pretrained`, or of an id on the hub.

    Raises UserError if there is none, a file is not as it was written, or its weights are not whole and finite.
    """
    if is_export(Path(path)):
        return read_export(Path(path))
    require_checksums(Path(path))
    from nas.conversion.huggingface import load_pretrained  # needs the extra `hf`

    return load_pretrained(path)
