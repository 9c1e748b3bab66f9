"""The cost of an op as the sum of the costs of its calls of a protocol's primitives.

An op is a sequence of calls, which is the same for every protocol of SecretFlow-SPU except for the tiles of matrix
products. Under semi2k and aby3 the cost of a call depends only on its fields and the setting, under cheetah also on
earlier calls. Calls run one after the other, as in the engine.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, ClassVar, Literal, TypeAlias

from costmodel.errors import UnpricedOpError, UserError
from costmodel.estimate import ENGINE
from costmodel.ops import Op

# primitive: its operation on secret-shared integers of the ring
#   multiply, square: element-wise products; matmul: a matrix product; public_matmul: one whose right factor is public
#   truncate: division by a power of two, which every product of fixed-point numbers needs
#   msb: the most significant bit of an arithmetic sharing, as a boolean sharing of one bit
#   mux: an arithmetic sharing times a boolean sharing of one bit
#   a2b: arithmetic to boolean sharing of every bit; b2a: boolean to arithmetic sharing of the lowest `bits` bits
#   equal: whether a number equals a public number, as an arithmetic sharing
#   and: AND of two boolean sharings of `bits` bits
#   share: an arithmetic sharing of a public number
#   input: an arithmetic sharing of a number that one party holds
Primitive = Literal[
    "multiply", "square", "matmul", "public_matmul", "truncate", "msb", "mux", "a2b", "b2a", "equal", "and",
    "share", "input",
]  # fmt: skip
Holder = Literal["secret", "server"]
WeightMasks = Literal["fresh", "kept"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSetting:
    """How the engine represents the numbers of a model, and who holds the model's weights.

    ring_bits: Secret-shared integers are modulo 2^ring_bits.
    fraction_bits: Bits after the binary point; 18 is the engine's default for a ring of 64 bits.
    weights: `secret`, shared by all parties before the run; `server`, held by one party and seen by no other.
    weight_masks: Masks under which a matrix product of `semi2k` opens its weight: `fresh` in every run, or `kept`
        from an earlier run, so that only the other factor is masked and opened.
    threads: Threads of each party. Formulas are for one thread; with more, cheetah preprocesses more than is counted.

    Raises:
        UserError: Unless `ring_bits` is 32, 64 or 128, `fraction_bits` from 1 to ring_bits / 2 - 1 and `threads` at
            least 1; or if masks are kept for weights that the server holds, since the engine shares these in each run.
    """

    formulas_of: ClassVar[str] = ENGINE

    ring_bits: int = 64
    fraction_bits: int = 18
    weights: Holder = "secret"
    weight_masks: WeightMasks = "fresh"
    threads: int = 1

    @property
    def device(self) -> str:
        """The device that the parties compute on: `cpu`."""
        return "cpu"

    @property
    def of_first_run(self) -> "EngineSetting":
        """The setting of the first of several runs: masks of weights are fresh, even if later runs reuse them."""
        return replace(self, weight_masks="fresh")

    @property
    def of_testbed(self) -> dict[str, int]:
        """Values, by field name, with which a testbed must have been measured."""
        return {"threads": self.threads, "ring_bits": self.ring_bits, "fraction_bits": self.fraction_bits}

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

    elements: Number of elements of the result.
    operands: Number of elements of both factors of a matrix product together; 0 for other primitives.
    factors: Numbers of rows and of columns of a matrix product's result; empty for other primitives.
    bits: Width of the operands of `and` and `b2a`, or number of bits that `truncate` cuts off; 0 for other primitives.
    private: Whether the right factor of a `multiply` or `matmul` is held by one party and not yet shared.
    opened: Whether the right factor of a `matmul` was opened under a mask in an earlier run.
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
    """The communication of a call or an op: rounds on the critical path; messages and bytes summed over all parties.

    setup_bytes: Bytes of preprocessing, or from the dealer of `crypten`; `online_bytes` does not include them.
    waited_bytes: Bytes on the critical path, preprocessing included, if each pair of parties has a separate full-duplex
        link; bytes that are sent at the same time count once.
    key_bytes: Bytes of keys that the dealer of `sigma` gives each party; no other field includes them.
    """

    rounds: int
    messages: int
    online_bytes: int
    setup_bytes: int = 0
    waited_bytes: int
    key_bytes: int = 0

    @property
    def sent_bytes(self) -> int:
        """Bytes on the wire, summed over all parties, preprocessing included."""
        return self.online_bytes + self.setup_bytes


NOTHING = Comm(rounds=0, messages=0, online_bytes=0, waited_bytes=0)
COUNTS = tuple(field.name for field in fields(Comm))
COUNTS_OF = attrgetter(*COUNTS)


def local(call: Call, _: object) -> Comm:
    """Return the cost of a call that every party computes by itself: nothing."""
    return NOTHING


def refuse_public(op: Op, protocol: str) -> None:
    """Raise UnpricedOpError if an op's weights are public; the protocol has formulas only for hidden weights."""
    if op.public:
        raise UnpricedOpError(
            f"`public_layers` go with protocols semi2k, aby3 and cheetah, but got protocol {protocol}, which has no "
            "formula for public weights; price under one of those, or with no layer public."
        )


def price_calls(
    calls: Iterable[Call], setting: EngineSetting, prices: Mapping[str, Callable[[Call, EngineSetting], Comm]]
) -> Comm:
    """Return the summed cost of calls; a UserError is raised for a primitive whose formula is not in `prices`."""
    calls = list(calls)
    if unknown := [call.primitive for call in calls if call.primitive not in prices]:
        raise UserError(f"the protocol has no formula for {unknown[0]!r}; add one to its table.")
    return total_comm(prices[call.primitive](call, setting) for call in calls)


def one_by_one(comm: Callable[[Op, Any], Comm], some: Sequence[Op], setting: Any) -> tuple[Comm, ...]:
    """Return the cost `comm(op, setting)` of each op in `some`, in order; equal ops are priced once."""
    costs = {op: comm(op, setting) for op in dict.fromkeys(some)}
    return tuple(costs[op] for op in some)


def total_comm(parts: Iterable[Comm]) -> Comm:
    """Return the cost of steps that run one after the other: the sum of the parts, field by field."""
    columns = zip(*map(COUNTS_OF, (NOTHING, *parts)), strict=True)
    return Comm(**dict(zip(COUNTS, map(sum, columns), strict=True)))


def on(elements: int, calls: Calls) -> Calls:
    """Return the calls that do for `elements` elements what `calls` do for one element."""
    return tuple(replace(call, elements=call.elements * elements) for call in calls)


def stored_bytes(bits: int) -> int:
    """Return the number of bytes, a power of two, in which the engine stores and sends `bits` shared bits."""
    return max(1, 1 << max(0, (bits - 1).bit_length() - 3))


def halves(setting: EngineSetting) -> list[int]:
    """Return the widths, in bits, of the levels of a carry tree: half the ring's bits, a quarter, and so on to 1."""
    widths = [setting.ring_bits // 2]
    while widths[-1] > 1:
        widths.append(widths[-1] // 2)
    return widths
