"""`BLOCKS`: the kinds of decoder block, such as GPT-2's and Llama's.

A block is described by facts that do not depend on the choices of a layer. To add a block, add its name to `BlockName`
and its facts to `BLOCKS`; lowering, the decoder and folding read only the facts. To convert its checkpoints, add an
entry to `search_spaces.checkpoints.families.FAMILIES` too.
"""

from dataclasses import dataclass, replace
from typing import Literal

BlockName = Literal[
    "gpt2", "opt", "pythia", "neox", "sas", "llama", "qwen2", "qwen3", "phi3", "starcoder2", "stablelm", "stablelm2",
    "olmo2", "gemma2", "gemma3",
]  # fmt: skip
Linear = Literal[  # the linears of a layer
    "attention.q", "attention.k", "attention.v", "attention.qkv", "attention.out", "ffn.gate", "ffn.up", "ffn.down",
    "ffn.fused",
]  # fmt: skip
QUERIES_KEYS_VALUES: tuple[Linear, ...] = ("attention.q", "attention.k", "attention.v")  # if not packed into one
Join = Literal["sequential", "parallel", "shaped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """The facts of a kind of decoder block.

    X is the residual stream before a layer, A the stream to which the FFN's output is added, Y the stream after it.

    join: `sequential` is A = X + MHA(Norm1(X)), Y = A + FFN(Norm2(A)); `parallel` is Y = X + MHA(Norm1(X)) +
        FFN(Norm2(X)); `shaped` is A = S(Norm1(X)) without a skip, and Y = A + FFN(Norm2(A)). S is attention by the
        matrix a I + b softmax - c C of each head, with learned a, b and c, where C averages all visible positions.
        Only layer 0 has a linear for values, and no layer has an output linear.
    rotary_share: by default, one in `rotary_share` features of a head is rotated; None for a learned position table.
    packs_qkv: whether queries, keys and values (in a shaped block only queries and keys) are one linear, not three.
    query_key_norm: RMSNorms of queries and keys before the rotation: none, per `head` (all heads share a gain vector),
        or over the `width` of all heads together; only for blocks with three linears.
    norms_after: whether RMSNorms follow attention and FFN, before their outputs are added to the stream.
    biases: linears that have a bias even if the architecture's `bias` is False.
    has_centred_norms: whether norms may subtract the mean and have a bias; if so, linears have biases after folding.
    keeps_final_norm: whether a name that states no final norm means the one that the layers imply, instead of none.
    wrapper: `HH` if names of architectures of this block are written HH(...); None if the base model states the block.
    first_norm: norm before layer 0's attention in any name from the papers with the wrapper; None to follow the name.
    branch_gain: factor of an FFN's output at initialisation.
    """

    join: Join
    rotary_share: int | None = None
    packs_qkv: bool = True
    query_key_norm: Literal["none", "head", "width"] = "none"
    norms_after: bool = False
    biases: tuple[Linear, ...] = ()
    has_centred_norms: bool = True
    keeps_final_norm: bool = True
    wrapper: str | None = None
    first_norm: Literal["layernorm"] | None = None
    branch_gain: float = 1.0

    @property
    def is_shaped(self) -> bool:
        """Whether the output of attention is the residual stream itself, without a skip or an output linear.

        If so, no head can be removed, the only possible change of basis of the stream is a multiple of the identity,
        and the weights of queries start at 0.
        """
        return self.join == "shaped"

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the nodes of the embedding tables, whose outputs sum to the initial residual stream."""
        return ("embed", "position") if self.rotary_share is None else ("embed",)

    @property
    def queries(self) -> str:
        """The name of the linear that computes the queries; if it also computes keys, the queries' rows come first."""
        if self.is_shaped:
            return "attention.qk"
        return "attention.qkv" if self.packs_qkv else "attention.q"

    def passes_values(self, depth: int) -> bool:
        """Whether attention in layer `depth` (from 0) takes the output of `norm1` as values, without a linear."""
        return self.is_shaped and depth > 0

    def makes_stream(self, depth: int) -> bool:
        """Whether attention in layer `depth` (from 0) replaces the stream by a mix of values that a linear computes."""
        return self.is_shaped and depth == 0

    def norm1_readers(self, depth: int) -> tuple[str, ...]:
        """Return the linears into which the norm before attention in layer `depth` folds; none if `passes_values`."""
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
    # Lozhkov et al. 2024, arXiv 2402.19173: rotary of every feature, norms that subtract the mean.
    "starcoder2": STARCODER2,
    # Bellagente et al. 2024, StableLM 2, arXiv 2402.17834, and StableLM 3B before it, without biases.
    "stablelm": STABLELM,
    "stablelm2": replace(STABLELM, biases=QUERIES_KEYS_VALUES),
    # OLMo team 2024, arXiv 2501.00656, section 3: norms after sub-layers; its layers have none before them.
    "olmo2": replace(LLAMA, query_key_norm="width", norms_after=True),
    # Gemma team 2024, arXiv 2408.00118, section 2, and 2025, arXiv 2503.19786, section 2.
    "gemma2": replace(LLAMA, norms_after=True),
    "gemma3": replace(LLAMA, query_key_norm="head", norms_after=True),
}
WRAPPERS: dict[str, BlockName] = {block.wrapper: name for name, block in BLOCKS.items() if block.wrapper}
