"""How values lie in ciphertexts under `ckks`.

A ciphertext holds columns of `tokens` slots, a token each, one column behind the other; a matrix with more
columns than fit takes several ciphertexts, and one with fewer is repeated until the slots are full. So a rotation by a
column moves the features of all tokens. A linear multiplies generalised diagonals by baby and giant steps, both as
chains of one rotation each, so that two keys serve it. Scores are kept by the distance between query and key: column
`d` of a head's window has its scores of keys `d` tokens back, so that later keys are those that wrap around.

Sources: Pang et al. 2024, BOLT, https://eprint.iacr.org/2023/1893, section 4 (columns); Halevi and Shoup 2018,
https://eprint.iacr.org/2018/244 (diagonals); Juvekar et al. 2018, Gazelle, arXiv 1801.05507 (fewer outputs than
inputs); Kim et al. 2022, ARK, arXiv 2205.00922 (chains of one rotation).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from costmodel import ops
from costmodel.errors import UserError
from costmodel.ops import Node


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """How a matrix of tokens lies in ciphertexts.

    tokens: slots of a column, a power of two. slots: slots of a ciphertext.
    """

    tokens: int
    slots: int

    @property
    def columns(self) -> int:
        return self.slots // self.tokens

    def period(self, width: int) -> int:
        """The number of columns after which a matrix of this width is repeated in a ciphertext."""
        return min(power_of_two(width), self.columns)

    def num(self, width: int) -> int:
        """The number of ciphertexts of a matrix of this width."""
        return -(-width // self.columns)

    def linear(self, in_width: int, out_width: int) -> tuple[int, int, int]:
        """The numbers of baby steps, of giant steps, and of rotations that add up parts, in a product with a matrix."""
        read, written = self.period(in_width), self.period(out_width)
        diagonals, a, b = min(read, written), self.num(in_width), self.num(out_width)
        baby = min(
            (1 << k for k in range(diagonals.bit_length())), key=lambda n: a * (n - 1) + b * (diagonals // n - 1)
        )
        return baby, diagonals // baby, log2(max(1, read // written))


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """The output of a step, or an input of the graph, and how it lies in ciphertexts.

    width: columns of a part. parts: such as queries, keys and values, each of which starts in a ciphertext of its own.
    sets: groups of ciphertexts, for scores over more keys than a head's window has columns.
    window: columns of a head of scores; 0 for other values.
    """

    name: str
    width: int
    parts: int = 1
    sets: int = 1
    window: int = 0


def power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def log2(power: int) -> int:
    return power.bit_length() - 1


def packing_of(nodes: Sequence[Node], slots: int) -> Packing:
    """Return the packing for the most tokens in a node of a graph; a UserError is raised if they do not fit."""
    of_tokens = ops.TokenEmbedding, ops.Linear, ops.VocabProjection, ops.LayerNorm, ops.RmsNorm, ops.Add
    rows = max((node.op.output_shape[0] for node in nodes if isinstance(node.op, of_tokens)), default=1)
    if (tokens := power_of_two(rows)) > slots:
        raise UserError(
            f"protocol ckks packs a column of tokens in the {slots} slots of a ciphertext, but got {rows} tokens at "
            "once, of which not even a vocabulary projection fits; use a shorter prompt or a smaller batch."
        )
    return Packing(tokens=tokens, slots=slots)
