"""What the code of an exported transformers model imports of this package: a frozen interface.

Exports carry a copy of `conversion/huggingface_model.py`, written by whatever version made them; so these names stay,
whatever moves behind them.
"""

from typing import Any

from costmodel.config.schema import decode
from nas.model.decoder import Decoder, rotary_tables
from search_spaces.architecture import Architecture

__all__ = ["Decoder", "load_decoder", "rotary_tables"]


def load_decoder(architecture: dict[str, Any] | None) -> Decoder:
    """A decoder with fresh weights. architecture: as `search_spaces.architecture.canonical` gives it.

    Raises UserError if it is none.
    """
    return Decoder(decode(Architecture, architecture, "`architecture` of config.json"))
