"""The base models: dimensions, block and layers of GPT-2, Pythia, SmolLM2 and others, by name."""

from dataclasses import asdict, dataclass, replace

from costmodel.errors import UserError
from costmodel.ops import GeluForm, SoftmaxForm
from search_spaces.architecture import Architecture, Layer

OWN = "parent"  # as a base: the model that candidates of a search start from
MAX_LAYERS = 500  # several times the depth of decoders in use; to list members takes a recursion per layer
GPT2_LAYER = Layer(norm1="layernorm", norm2="layernorm", ffn="gelu")
LLAMA_LAYER = Layer(norm1="rmsnorm", norm2="rmsnorm", ffn="swiglu")


# Radford et al. 2019, GPT-2 small; vocabulary of the CodeParrot tokenizer (arXiv 2410.13060, section 4).
GPT2 = Architecture(
    num_heads=12,
    d_model=768,
    d_ff=3072,
    vocab_size=50_000,
    context=1024,
    final_norm="layernorm",
    layers=(GPT2_LAYER,) * 12,
)
BASES: dict[str, Architecture] = {
    "gpt2-small": GPT2,
    "gpt2-18l": replace(GPT2, layers=(GPT2_LAYER,) * 18),
    # Biderman et al. 2023, Pythia-70M.
    "pythia-70m": Architecture(
        block="pythia",
        num_heads=8,
        d_model=512,
        d_ff=2048,
        vocab_size=50_304,
        context=2048,
        final_norm="layernorm",
        tied_embeddings=False,
        gelu="exact",
        layers=(GPT2_LAYER,) * 6,
    ),
    # Allal et al. 2025, SmolLM2, arXiv 2502.02737; configuration of HuggingFaceTB/SmolLM2-135M.
    "smollm2-135m": Architecture(
        block="llama",
        num_heads=9,
        num_kv_heads=3,
        d_model=576,
        d_ff=1536,
        vocab_size=49_152,
        context=8192,
        final_norm="rmsnorm",
        bias=False,
        rotary_base=100_000.0,
        norm_epsilon=1e-5,
        layers=(LLAMA_LAYER,) * 30,
    ),
    # Small enough to train, enumerate and price in a test.
    "tiny": replace(GPT2, num_heads=2, d_model=16, d_ff=64, vocab_size=512, context=128, layers=(GPT2_LAYER,) * 2),
}


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """Dimensions of a model, and its forms of GELU and softmax, as overrides of a base model; None leaves the base's.

    Args:
        layers: number of layers, instead of the base's.
        heads: attention heads per layer, instead of the base's.
        kv_heads: heads of keys and of values, which the attention heads share, instead of the base's.
        head_size: features of a head, instead of the base's (d_model / heads unless the base has its own).
        d_model: features of the residual stream, instead of the base's.
        d_ff: features inside the FFN (by default the base's multiple of d_model, which is 4 for GPT-2).
        vocab: tokens in the vocabulary, instead of the base's.
        context: largest number of tokens that the model can read, instead of the base's.
        gelu: the form of GELU where layers do not name one, instead of the base's.
        softmax: the form of softmax where layers do not name one, instead of the base's.
    """

    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_size: int | None = None
    d_model: int | None = None
    d_ff: int | None = None
    vocab: int | None = None
    context: int | None = None
    gelu: GeluForm | None = None
    softmax: SoftmaxForm | None = None


# dimension -> field of `Architecture`, where the names differ
FIELDS = {"heads": "num_heads", "kv_heads": "num_kv_heads", "vocab": "vocab_size"}


def base_architecture(name: str, dimensions: Dimensions = Dimensions()) -> Architecture:
    """Return a base model with other dimensions. Raises UserError for an unknown base or impossible dimensions."""
    if name not in BASES:
        where = f" (`{OWN}` is the model of a search with --parent)" if name == OWN else ""
        raise UserError(f"base must be one of {', '.join(BASES)}, but got {name!r}{where}.")
    base = BASES[name]
    stated = {key: value for key, value in asdict(dimensions).items() if value is not None}
    num_layers, d_model = stated.pop("layers", base.num_layers), stated.get("d_model", base.d_model)
    if not 1 <= num_layers <= MAX_LAYERS:
        raise UserError(f"`layers` must be from 1 to {MAX_LAYERS}, but got {num_layers}.")
    changes = {"d_ff": base.d_ff * d_model // base.d_model} | {FIELDS.get(key, key): stated[key] for key in stated}
    return replace(base, layers=base.layers[:1] * num_layers, **changes)
