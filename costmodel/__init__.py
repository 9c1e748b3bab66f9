"""What private inference costs: `costmodel.price(model, protocol=...)`, and the command `python -m costmodel`.

The names below are imported when they are first used, so that `import costmodel` costs nothing.
"""

from typing import TYPE_CHECKING

from costmodel.config.lazy_names import lazy_names

if TYPE_CHECKING:
    from costmodel.cost import Price
    from costmodel.errors import UserError
    from costmodel.network import Network
    from costmodel.pricing.price import price
    from costmodel.pricing.priced import PricedModel, PricedOp

__all__ = ["Network", "Price", "PricedModel", "PricedOp", "UserError", "price"]

_MODULES = {
    "Network": "costmodel.network",
    "Price": "costmodel.cost",
    "PricedModel": "costmodel.pricing.priced",
    "PricedOp": "costmodel.pricing.priced",
    "UserError": "costmodel.errors",
    "price": "costmodel.pricing.price",
}

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
