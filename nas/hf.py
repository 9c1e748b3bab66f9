"""What the code of transformers models that earlier versions exported imports of this package: a frozen interface.

They carry a copy of a modelling file that was not yet self-contained; so these names stay, whatever moves behind them.
"""

from typing import Any

from costmodel.config.schema import decode
from nas.model.decoder import Decoder
from nas.model.norms import frozen_norms
from nas.model.self_attention import rotary_tables
from search_spaces.architecture import Architecture

__all__ = ["Decoder", "load_decoder", "rotary_tables"]


def load_decoder(architecture: dict[str, Any] | None) -> Decoder:
    """A decoder with fresh weights, its norms frozen where they are to be, as in every export.

    architecture: as `search_spaces.architecture.canonical` gives it. Raises UserError if it is none.
    """
    model = Decoder(decode(Architecture, architecture, "`architecture` of config.json"))
    for norm in frozen_norms(model).values():
        norm.set_frozen()
    return model
