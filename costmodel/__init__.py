"""The cost of private inference: `costmodel.price(model, protocol=...)`, and the command `python -m costmodel`.

The names below are imported when they are first used, so that `import costmodel` is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from costmodel.cost import Price
    from costmodel.errors import UserError
    from costmodel.network import Network
    from costmodel.pricing.price import PricedModel, price

__all__ = ["Network", "Price", "PricedModel", "UserError", "price"]

_MODULES = {
    "Network": "costmodel.network",
    "Price": "costmodel.cost",
    "PricedModel": "costmodel.pricing.price",
    "UserError": "costmodel.errors",
    "price": "costmodel.pricing.price",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
