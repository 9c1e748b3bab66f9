"""`BLOCKS`: what is particular to each block, whatever its layers choose. A new block is an entry of the table.

Lowering, decoder, folding and transformers' layout read these facts; none of them asks which block it has. X is the
residual stream, A what the FFN's result is added to, Y what leaves the layer.
"""

from dataclasses import dataclass, replace
from typing import Literal

BlockName = Literal[
    "gpt2", "opt", "pythia", "neox", "sas", "llama", "qwen2", "qwen3", "phi3", "starcoder2", "stablelm", "stablelm2",
    "olmo2", "gemma2", "gemma3",
]  # fmt: skip
QUERIES_KEYS_VALUES = ("attention.q", "attention.k", "attention.v")  # linears, where they are three
Join = Literal["sequential", "parallel", "shaped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Facts of a block.

    join: `sequential` is A = X + MHA(Norm1(X)), Y = A + FFN(Norm2(A)); `parallel` is Y = X + MHA(Norm1(X)) +
        FFN(Norm2(X)); `shaped` is A = shaped MHA(Norm1(X)) without a skip, its V and O the identity but for layer 0's
        V, and Y = A + FFN(Norm2(A)).
    rotary_share: positions are rotations of one in so many features of a head; None has a learned table of positions.
    packs_qkv: whether queries, keys and values are one linear, or three.
    query_key_norm: an RMSNorm of queries and one of keys, before they are rotated: of each `head`, with one gain for
        all, or over the whole `width` of the heads; only where they are linears of their own.
    norms_after: whether an RMSNorm follows attention, and one the FFN, before their results join the stream.
    biases: the linears that carry a bias although the architecture has none.
    has_centred_norms: whether a norm may take the mean away; its bias, folded, gives one to every linear.
    keeps_final_norm: whether a norm follows the last layer where the layers have one, unless a name says otherwise.
    wrapper: what notation puts around the names of its placements, for a block that a base model does not have.
    first_norm: before layer 0's attention, whatever the rest of a paper's name says; None for what the name says.
    branch_gain: of an FFN's result at the start of training.
    """

    join: Join
    rotary_share: int | None = None
    packs_qkv: bool = True
    query_key_norm: Literal["none", "head", "width"] = "none"
    norms_after: bool = False
    biases: tuple[str, ...] = ()
    has_centred_norms: bool = True
    keeps_final_norm: bool = True
    wrapper: str | None = None
    first_norm: Literal["layernorm"] | None = None
    branch_gain: float = 1.0

    @property
    def is_shaped(self) -> bool:
        """Whether heads pass on slices of the stream itself, so that no layer can do without one of them, only a
        multiple of the identity changes the stream's coordinates, and queries start at 0.
        """
        return self.join == "shaped"

    @property
    def tables(self) -> tuple[str, ...]:
        """The nodes of the tables whose sum the stream starts as."""
        return ("embed", "position") if self.rotary_share is None else ("embed",)

    @property
    def queries(self) -> str:
        """The linear whose first rows are the queries."""
        if self.is_shaped:
            return "attention.qk"
        return "attention.qkv" if self.packs_qkv else "attention.q"

    def passes_values(self, depth: int) -> bool:
        """Whether attention reads its values from the norm before it without a linear between."""
        return self.is_shaped and depth > 0

    def makes_stream(self, depth: int) -> bool:
        """Whether attention's values, through a linear, replace the stream."""
        return self.is_shaped and depth == 0

    def norm1_readers(self, depth: int) -> tuple[str, ...]:
        """The linears that take up the norm before attention; none where it is read without a linear, too."""
        if self.passes_values(depth):
            return ()
        if not self.packs_qkv:
            return QUERIES_KEYS_VALUES
        return (self.queries, "attention.v") if self.is_shaped else (self.queries,)


GPT2 = Block(join="sequential")  # Radford et al. 2019, GPT-2
# Biderman et al. 2023, Pythia's configurations: rotary covers a quarter of a head's features.
PYTHIA = Block(join="parallel", rotary_share=4)
# Touvron et al. 2023, arXiv 2302.13971, section 2.2: RMSNorm, rotary of every feature, gated FFN; no bias anywhere.
LLAMA = Block(join="sequential", rotary_share=1, packs_qkv=False, has_centred_norms=False)
STARCODER2 = replace(LLAMA, has_centred_norms=True)
STABLELM = replace(STARCODER2, rotary_share=4)
BLOCKS: dict[BlockName, Block] = {
    "gpt2": GPT2,
    # Zhang et al. 2022, arXiv 2205.01068.
    "opt": replace(GPT2, packs_qkv=False),
    "pythia": PYTHIA,
    # GPT-NeoX of transformers with `use_parallel_residual` off.
    "neox": replace(PYTHIA, join="sequential"),
    # He and Hofmann 2024, arXiv 2311.01906, section 4; the gain is of its published configuration `skipless`.
    "sas": Block(join="shaped", keeps_final_norm=False, wrapper="HH", first_norm="layernorm", branch_gain=0.1),
    "llama": LLAMA,
    # Yang et al. 2024, arXiv 2407.10671, section 2.2.1: Llama's, with biases of queries, keys and values.
    "qwen2": replace(LLAMA, biases=QUERIES_KEYS_VALUES),
    # Yang et al. 2025, arXiv 2505.09388, section 2: Llama's, with norms of queries and keys.
    "qwen3": replace(LLAMA, query_key_norm="head"),
    # Abdin et al. 2024, arXiv 2404.14219.
    "phi3": replace(LLAMA, packs_qkv=True),
    # Lozhkov et al. 2024, arXiv 2402.19173: rotary of every feature, norms that take the mean away.
    "starcoder2": STARCODER2,
    # Bellagamba et al. 2024, StableLM 2, arXiv 2402.17834, and StableLM 3B before it, without biases.
    "stablelm": STABLELM,
    "stablelm2": replace(STABLELM, biases=QUERIES_KEYS_VALUES),
    # OLMo team 2024, arXiv 2501.00656, section 3: norms after a sub-layer alone, which its layers choose.
    "olmo2": replace(LLAMA, query_key_norm="width", norms_after=True),
    # Gemma team 2024, arXiv 2408.00118, section 2, and 2025, arXiv 2503.19786, section 2.
    "gemma2": replace(LLAMA, norms_after=True),
    "gemma3": replace(LLAMA, query_key_norm="head", norms_after=True),
}
WRAPPERS: dict[str, BlockName] = {block.wrapper: name for name, block in BLOCKS.items() if block.wrapper}
