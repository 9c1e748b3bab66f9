"""The language in which an op's price is stated: calls of a protocol's primitives, and what one call costs.

An op is a sequence of calls, the same for every secret-sharing protocol of the engine; a protocol prices a call from
its size alone. Calls follow one another: no call starts before the one before it is done, as the engine runs them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, ClassVar, Literal, TypeAlias

from costmodel.errors import UnpricedOpError, UserError
from costmodel.ops import Op
from costmodel.protocols.identity import ENGINE

# primitive -> what it does to secret-shared integers of the ring
#   multiply, square: element-wise products; matmul: a matrix product; public_matmul: one with a public right factor
#   truncate: division by a power of two, which every product of fixed-point numbers needs
#   msb: the most significant bit of an arithmetic sharing, as a boolean sharing of one bit
#   mux: an arithmetic sharing times a boolean sharing of one bit
#   a2b: arithmetic to boolean sharing of every bit; b2a: back, from the lowest `bits` bits
#   equal: whether a number is a public one, as an arithmetic sharing
#   and: AND of two boolean sharings of `bits` bits
#   share: an arithmetic sharing of a public number
#   input: an arithmetic sharing of what one party holds
Primitive = Literal[
    "multiply", "square", "matmul", "public_matmul", "truncate", "msb", "mux", "a2b", "b2a", "equal", "and",
    "share", "input",
]  # fmt: skip
Holder = Literal["secret", "server"]
WeightMasks = Literal["fresh", "kept"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSetting:
    """What the numbers of a model are in the engine.

    ring_bits: secret-shared integers are modulo 2^ring_bits.
    fraction_bits: bits after the binary point; 18 is the engine's default for a ring of 64 bits.
    weights: `secret`, shared by all parties before the run; `server`, held by one party, which no other sees.
    weight_masks: of matrices of weights in products that open them masked, `semi2k`'s: `fresh` in every run, or `kept`
        from an earlier one, so that only the other factor is masked and opened.
    threads: that each party computes with. Formulas are for one; cheetah preprocesses some for each thread.

    Raises UserError for a ring the engine does not have, or too small for the fraction, no thread, or masks of weights
    that the server holds, which the engine shares anew in every run.
    """

    formulas_of: ClassVar[str] = ENGINE

    ring_bits: int = 64
    fraction_bits: int = 18
    weights: Holder = "secret"
    weight_masks: WeightMasks = "fresh"
    threads: int = 1

    @property
    def of_first_run(self) -> "EngineSetting":
        """What the first of several runs in turn is under: masks that the others keep are made and opened in it."""
        return replace(self, weight_masks="fresh")

    def __post_init__(self) -> None:
        if self.weight_masks == "kept" and self.weights == "server":
            raise UserError("`weight_masks` kept goes with weights that are secret, but the server holds them.")
        if self.threads < 1:
            raise UserError(f"`threads` must be at least 1, but got {self.threads}.")
        if self.ring_bits not in (32, 64, 128):
            raise UserError(f"`ring_bits` must be 32, 64 or 128, but got {self.ring_bits}.")
        # a product has twice the fraction bits, and division and square root reverse that many bits
        if not 1 <= 2 * self.fraction_bits < self.ring_bits:
            raise UserError(
                f"`fraction_bits` must be from 1 to {self.ring_bits // 2 - 1} in a ring of {self.ring_bits} bits, "
                f"since products carry twice as many, but got {self.fraction_bits}."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call of a primitive.

    elements: of the result.
    operands: elements of both factors of a matrix product; 0 for the rest, whose operands are as large as the result.
    factors: rows and columns of a matrix product; empty for the rest.
    bits: width of what `and`, `b2a` and `truncate` (bits cut off) work on; 0 for the rest.
    private: of `multiply` and `matmul`, whether one factor, the right one, is held by one party and not shared.
    opened: of `matmul`, whether the right factor was opened, masked, in an earlier run.
    """

    primitive: Primitive
    elements: int
    operands: int = 0
    factors: tuple[int, ...] = ()
    bits: int = 0
    private: bool = False
    opened: bool = False


Calls: TypeAlias = tuple[Call, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comm:
    """What a call costs: rounds on the critical path; messages and bytes summed over all parties.

    waited_bytes: of all bytes, preprocessing included, those that follow one another where each pair of parties has a
    full-duplex link of its own: what is under way at once counts once.
    key_bytes: that each party has from a dealer; in no other field.
    """

    rounds: int
    messages: int
    online_bytes: int
    setup_bytes: int = 0
    waited_bytes: int
    key_bytes: int = 0

    @property
    def sent_bytes(self) -> int:
        """Bytes on the wire, preprocessing included."""
        return self.online_bytes + self.setup_bytes


NOTHING = Comm(rounds=0, messages=0, online_bytes=0, waited_bytes=0)
COUNTS = tuple(field.name for field in fields(Comm))
COUNTS_OF = attrgetter(*COUNTS)


def local(call: Call, _: object) -> Comm:
    """What every party does by itself."""
    return NOTHING


def refuse_public(op: Op, protocol: str) -> None:
    """Raises UnpricedOpError for weights that a deployment makes public: of a protocol with formulas of hidden ones."""
    if op.public:
        raise UnpricedOpError(
            f"`public_layers` go with protocols semi2k, aby3 and cheetah, but got protocol {protocol}, which has no "
            "formula for public weights; price under one of those, or with no layer public."
        )


# primitive -> the cost of a call in a setting
Prices: TypeAlias = Mapping[str, Callable[[Call, EngineSetting], Comm]]


def price_calls(calls: Iterable[Call], setting: EngineSetting, prices: Prices) -> Comm:
    """The sum over calls. Raises UserError for a primitive the protocol has no formula for."""
    parts = []
    for call in calls:
        if call.primitive not in prices:
            raise UserError(f"the protocol has no formula for {call.primitive!r}; add one to its table.")
        parts.append(prices[call.primitive](call, setting))
    return total_comm(parts)


def one_by_one(comm: Callable[[Op, Any], Comm], some: Sequence[Op], setting: Any) -> tuple[Comm, ...]:
    """The cost of each op, which does not depend on what ran before it; layers have most ops in common."""
    costs = {op: comm(op, setting) for op in dict.fromkeys(some)}
    return tuple(costs[op] for op in some)


def total_comm(parts: Iterable[Comm]) -> Comm:
    """What steps that wait for one another cost together."""
    columns = zip(*map(COUNTS_OF, (NOTHING, *parts)), strict=True)
    return Comm(**dict(zip(COUNTS, map(sum, columns), strict=True)))


def on(elements: int, calls: Calls) -> Calls:
    """The same calls on `elements` times as many elements: an element-wise function over a whole array."""
    return tuple(replace(call, elements=call.elements * elements) for call in calls)


def stored_bytes(bits: int) -> int:
    """Bytes in which the engine keeps and sends a boolean sharing of so many bits: a power of two, at least one."""
    return max(1, 1 << max(0, (bits - 1).bit_length() - 3))


def halves(setting: EngineSetting) -> list[int]:
    """Widths of the levels of a carry tree: half the ring's bits, a quarter, down to one."""
    widths = [setting.ring_bits // 2]
    while widths[-1] > 1:
        widths.append(widths[-1] // 2)
    return widths
