"""Converts settings of transformers to an `Architecture`, and back, without weights."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from costmodel.errors import UserError
from costmodel.ops import ROTARY_BASE
from costmodel.ops.rotary import RotaryScaling
from search_spaces.architecture import Architecture, canonical, gelu_form, rotary_dim
from search_spaces.block import BLOCKS, QUERIES_KEYS_VALUES
from search_spaces.checkpoints.families import ATTENTION, FAMILIES, FFN, Family, Number
from search_spaces.checkpoints.known_settings import WHOLE, number, require_meaning, shortened
from search_spaces.positions import Positions

FULL, SLIDING = "full_attention", "sliding_attention"  # types of layers in transformers
# Features that no block here has -> settings that are present and not 0 (nor false) in models with the feature.
FOREIGN: dict[str, tuple[str, ...]] = {
    "chooses experts by token": (
        "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok",
    ),
    "has state-space layers": ("state_size", "mamba_d_state", "ssm_state_size", "mamba_d_ssm"),
    "has convolutions over tokens": ("conv_L_cache", "conv1d_width"),
    "has recurrent layers": ("attention_hidden_size", "lru_width"),
    "knows positions by ALiBi": ("alibi",),
}  # fmt: skip
BY_ALIBI = dict.fromkeys(("bloom", "mpt"), "knows positions by ALiBi")  # model types whose settings may leave it out
ROPE_NAMES = {"yarn": "YaRN", "longrope": "LongRoPE", "dynamic": "dynamic NTK scaling"}

ROPE_NUMBERS = (
    "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    "partial_rotary_factor",
)  # fmt: skip
KINDS = {str: "a name", bool: "true or false"}
PACKED = ("attention.qkv",)
OPTIONAL = ("num_kv_heads", "head_size", "d_ff", "score_scale", "score_cap", "logit_cap")


class NoBlockError(UserError):
    """No block of this package computes the model exactly; tracing its torch module may still price it."""


def architecture_of(config: Any, path: str) -> Architecture:
    """Return the architecture of a config of transformers. path: the checkpoint's name in errors.

    Fields that only state their default become None or empty, so that equal models have the same `arch_id`.

    Raises NoBlockError if no block has the model type, the activation, the kind of rotary scaling or a value that
    families fix, and UserError for settings that no model can have, or that could change the model and have no meaning
    here.
    """
    settings, family = config.to_dict(), family_of(config, path)
    fields = _fields(family, settings, path)
    require_meaning(family, config, path)
    activation, known = settings[family.activation], ", ".join(family.activations)
    if activation not in family.activations:
        raise NoBlockError(f"the activation of {path!r} must be one of {known}, but is {activation!r}.")
    ffn, form = family.activations[activation]
    layer, num_layers = replace(family.layer, ffn=ffn), fields.pop("num_layers")
    try:
        fields |= _positions(family, settings, num_layers, path) if family.turns else {}
        architecture = Architecture(
            layers=(layer,) * num_layers,
            block=family.block,
            tied_embeddings=config.tie_word_embeddings,
            gelu="exact" if form == "exact" else "tanh",
            final_norm=family.final_norm or layer.norm1,
            **_biases(family, settings, path),
            **fields,
        )
        if any(positions.rotates for positions in architecture.positions):
            rotary_dim(architecture)
        return _unsaid(architecture)
    except NoBlockError:
        raise
    except UserError as error:
        raise UserError(f"{path!r} must have the settings of a model that can be made, but: {error}") from None


def family_of(config: Any, path: str) -> Family:
    """Return the entry of `FAMILIES` for a config of transformers. path: the checkpoint's name in errors.

    Raises NoBlockError if no family has the config's model type and settings, UserError for a setting that is missing,
    has a wrong type or value, or contradicts another.
    """
    settings = config.to_dict()
    families = [family for family in FAMILIES if family.model_type == config.model_type]
    if not families:
        kind = settings.get("model_type")
        features = [what for what, names in FOREIGN.items() if any(settings.get(name) for name in names)]
        features += [BY_ALIBI[kind]] if kind in BY_ALIBI else []
        if features:
            raise NoBlockError(
                f"{path!r} must be a decoder that a block can be, but is of type {kind!r}, which {features[0]}."
            )
        known = ", ".join(dict.fromkeys(family.model_type for family in FAMILIES))
        raise NoBlockError(f"{path!r} must be a model of type {known} or an export of ours, but is {kind!r}.")
    family = min(families, key=lambda family: len(_unlike(family, settings)))  # the first of several alike
    _fields(family, settings, path)  # before a model unlike it is traced
    for name, value in _unlike(family, settings).items():
        raise NoBlockError(
            f"`{name}` of {path!r} must be {value!r}, but is {shortened(settings[name])}; it cannot be imported."
        )
    for name in (family.activation, "tie_word_embeddings"):
        kind = str if name == family.activation else bool
        if not isinstance(settings[name], kind):
            raise UserError(f"`{name}` of {path!r} must be {KINDS[kind]}, but is {shortened(settings[name])}.")
    return family


def _unlike(family: Family, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the expected values of settings that differ from what is built into a family."""
    expected = {**family.fixed, **family.read_only}
    return {name: value for name, value in expected.items() if settings.get(name, value) != value}


def _fields(family: Family, settings: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the fields of an architecture that are numbers in the settings, and `num_layers`."""
    fields: dict[str, Any] = {}
    for name, ours in family.sizes.items():
        field = ours.ours if isinstance(ours, Number) else ours
        value = number(settings, name, path, whole=field in WHOLE)
        if isinstance(ours, Number) and value is not None:
            if value <= 0:
                raise UserError(f"`{name}` of {path!r} must be above 0, but is {value}.")
            value = ours.read(value)
        if fields.get(field, value) != value:
            raise UserError(f"`{name}` of {path!r} must be {fields[field]}, but is {value}; it cannot be imported.")
        fields[field] = value
        if value is None and field not in OPTIONAL:
            raise UserError(f"`{name}` of {path!r} must be a number, but is missing.")
        if value is not None and field in WHOLE and value < 1:
            raise UserError(f"`{name}` of {path!r} must be at least 1, but is {value}.")
    if family.scales_embedding:
        fields["embedding_scale"] = fields["d_model"] ** 0.5
    fields["d_ff"] = fields["d_ff"] or 4 * fields["d_model"]  # GPT-2's is None where it is that
    return fields


def _biases(family: Family, settings: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the fields on biases of linears."""
    packs = BLOCKS[family.block].packs_qkv
    every = [linear for linear in (*ATTENTION, *FFN) if linear not in (QUERIES_KEYS_VALUES if packs else PACKED)]
    biased = {*every} if family.bias else set()
    for name, linears in family.biases.items():
        if not isinstance(has := settings.get(name, family.bias), bool):
            raise UserError(f"`{name}` of {path!r} must be true or false, but is {shortened(has)}.")
        biased = biased | {*linears} if has else biased - {*linears}
    named = tuple(linear for linear in every if linear in biased)
    return {"bias": True} if len(named) == len(every) else {"bias": False, "biases": named}


def _unsaid(architecture: Architecture) -> Architecture:
    """Return the architecture without numbers that equal their defaults."""
    heads, features, kinds = architecture.num_heads, architecture.rotary_features, architecture.positions
    architecture = replace(
        architecture,
        num_kv_heads=None if architecture.num_kv_heads == heads else architecture.num_kv_heads,
        head_size=None if architecture.head_dim * heads == architecture.d_model else architecture.head_size,
        score_scale=None if architecture.score_scale == architecture.head_dim**-0.5 else architecture.score_scale,
        positions=() if kinds == (Positions(),) else kinds,
    )
    share = architecture.block_facts.rotary_share
    if features is not None and share is not None and max(2, architecture.head_dim // share) == features:
        architecture = replace(architecture, rotary_features=None)
    return architecture


def _positions(family: Family, settings: Mapping[str, Any], num_layers: int, path: str) -> dict[str, Any]:
    """Return the fields on positions and windows."""
    context, window = settings["max_position_embeddings"], number(settings, "sliding_window", path, whole=True)
    if window is not None and window < 1:
        raise UserError(f"`sliding_window` of {path!r} must be at least 1, but is {window}.")
    window = window if settings.get("use_sliding_window", True) else None
    types = settings.get("layer_types") or [FULL if window is None else SLIDING] * num_layers
    turned = settings.get("no_rope_layers") or [1] * num_layers
    for name, values, known in (("layer_types", types, (FULL, SLIDING)), ("no_rope_layers", turned, (0, 1))):
        if not isinstance(values, list) or len(values) != num_layers or not all(value in known for value in values):
            raise UserError(
                f"`{name}` of {path!r} must be {known[0]!r} or {known[1]!r} for each of {num_layers} layers, but is "
                f"{values!s:.200}; it cannot be imported."
            )
    ropes = {kind: _rope(settings, kind, path) for kind in sorted({*types})}
    main = ropes.get(FULL, ropes[types[0]])
    base = float(main.get("rope_theta", ROTARY_BASE))
    kinds = [
        Positions(
            rotates=bool(rotates),
            base=None if not rotates or (own := float(ropes[kind].get("rope_theta", base))) == base else own,
            scaling=_scaling(ropes[kind], settings, path) if rotates else None,
            window=window if kind == SLIDING else None,
        )
        for kind, rotates in zip(types, turned, strict=True)
    ]
    distinct = tuple(dict.fromkeys(kinds))
    shortest = min([context, *(kind.window for kind in distinct if kind.window)])
    head_dim = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
    share = main.get("partial_rotary_factor")
    for other in (rope.get("partial_rotary_factor", 1) for rope in ropes.values()):
        if other != 1 if not family.partly else not 2 <= int(head_dim * other) <= head_dim:
            rule = f"{2 / head_dim:g} to 1" if family.partly else "1, since transformers rotates all features here"
            raise UserError(
                f"`partial_rotary_factor` of {path!r} must be {rule}, but is {other}; it cannot be imported."
            )
    return {
        "rotary_base": base,
        "rotary_features": None if share is None else int(head_dim * share),
        "positions": distinct,
        "layer_positions": tuple(map(distinct.index, kinds)) if len(distinct) > 1 else (),
        "context": shortest,
        "longest_context": None if shortest == context else context,
    }


def _rope(settings: Mapping[str, Any], kind: str, path: str) -> dict[str, Any]:
    """Return the given rotary settings of layers of type `kind`, as in version 5 of transformers, from any version."""
    given = settings.get("rope_parameters")
    if isinstance(given, Mapping):
        given = given.get(kind, given)
    elif given is None and kind == SLIDING and "rope_local_base_freq" in settings:  # before version 5, as below
        given = {"rope_theta": settings["rope_local_base_freq"]}
    elif given is None and isinstance(scaling := settings.get("rope_scaling") or {}, Mapping):
        share = settings.get("partial_rotary_factor", settings.get("rotary_pct"))
        base = settings.get("rope_theta", settings.get("rotary_emb_base"))
        given = {"rope_theta": base, "partial_rotary_factor": share, **scaling}
    if not isinstance(given, Mapping):
        raise UserError(f"`rope_parameters` or `rope_scaling` of {path!r} must be mappings of names to numbers.")
    type_ = given.get("rope_type", given.get("type", "default"))
    if type_ not in ("default", "linear", "llama3"):
        known = f"{type_!r} ({ROPE_NAMES.get(type_, 'another')})" if isinstance(type_, str) else shortened(type_)
        raise (NoBlockError if isinstance(type_, str) else UserError)(
            f"`rope_type` of {path!r} must be 'default', 'linear' or 'llama3', but is {known}; it cannot be imported."
        )
    rope = {name: number(given, name, path, whole=False) for name in given if name not in ("rope_type", "type")}
    if unknown := [name for name, value in rope.items() if value and name not in ROPE_NUMBERS]:
        raise UserError(
            f"`rope_parameters` of {path!r} may have {', '.join(ROPE_NUMBERS)}, but has {unknown[0]!r} too."
        )
    return {"rope_type": type_, **{name: value for name, value in rope.items() if value is not None}}


def _scaling(rope: Mapping[str, Any], settings: Mapping[str, Any], path: str) -> RotaryScaling | None:
    """Return the scaling of rotary angles; None if they are not scaled."""
    if rope["rope_type"] == "default":
        return None
    needed = ("factor",) if rope["rope_type"] == "linear" else ("factor", "low_freq_factor", "high_freq_factor")
    if missing := [name for name in needed if name not in rope]:
        raise UserError(f"`rope_parameters` of {path!r} must have {missing[0]!r} for type {rope['rope_type']!r}.")
    factor, *turns = (float(rope[name]) for name in needed)
    if not turns:
        return RotaryScaling(factor=factor)
    context = rope.get("original_max_position_embeddings") or settings["max_position_embeddings"]
    return RotaryScaling(factor=factor, low=turns[0], high=turns[1], context=int(context))


def plain_settings(architecture: Architecture, library: Any) -> tuple[Family, dict[str, Any]] | None:
    """Return a family whose models can compute the architecture, and the settings of such a model; None without one.

    `architecture_of` returns the same architecture for a config with these settings, apart from fields that only state
    their default. library: the module transformers.
    """
    families = [family for family in FAMILIES if family.block == architecture.block and hasattr(library, family.config)]
    for unnamed in ((), ("head_dim",)):  # which models read, although their class may not name it
        for family in families:
            if (settings := _settings(family, architecture)) is None:
                continue
            config = getattr(library, family.config)
            known = {*config().to_dict(), *unnamed}
            settings = {name: value for name, value in settings.items() if name in known}
            try:
                again = architecture_of(config(**settings), family.model_type)
            except Exception:  # the family cannot have these settings
                continue
            if canonical(again) == canonical(_unsaid(architecture)):
                return family, settings
    return None


def _settings(family: Family, architecture: Architecture) -> dict[str, Any] | None:
    """Return the settings of an architecture in a family; None if the family lacks its activation."""
    layer = architecture.layers[0]
    form = gelu_form(architecture, layer)
    kind = (layer.ffn if layer.ffn == "geglu" or form is None else "gelu", form or "tanh")
    activation = next((name for name, theirs in family.activations.items() if theirs == kind), None)
    if activation is None:
        return None
    whole = {
        "num_kv_heads": architecture.num_kv_heads or architecture.num_heads,
        "head_size": architecture.head_dim,
        "context": architecture.longest_context or architecture.context,
        "score_scale": architecture.score_factor,
    }
    settings: dict[str, Any] = {
        **family.fixed,
        **{
            name: architecture.bias or not {*linears}.isdisjoint(architecture.biases)
            for name, linears in family.biases.items()
        },
        family.activation: activation,
        "tie_word_embeddings": architecture.tied_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    for theirs, ours in family.sizes.items():
        name = ours.ours if isinstance(ours, Number) else ours
        value = whole.get(name, getattr(architecture, name))
        settings[theirs] = ours.write(value) if isinstance(ours, Number) and value is not None else value
    return settings | (_position_settings(family, architecture) if family.turns else {})


def _position_settings(family: Family, architecture: Architecture) -> dict[str, Any]:
    kinds = architecture.positions or (Positions(),)
    by_layer = [kinds[place] for place in architecture.layer_positions or (0,) * architecture.num_layers]
    types = [FULL if kind.window is None else SLIDING for kind in by_layer]
    partial = {"partial_rotary_factor": rotary_dim(architecture) / architecture.head_dim} if family.partly else {}
    ropes = {}
    for type_, kind in zip(types, by_layer, strict=True):
        if kind.rotates:
            base = kind.base or architecture.rotary_base
            ropes[type_] = {"rope_theta": base, **partial, **_scaling_settings(kind.scaling)}
    settings: dict[str, Any] = {"rope_parameters": ropes.get(FULL, next(iter(ropes.values()), {}))}
    # before version 5
    settings |= {"rope_theta": architecture.rotary_base, "rotary_emb_base": architecture.rotary_base, **partial}
    scalings = (_scaling_settings(kind.scaling) for kind in by_layer if kind.scaling is not None)
    settings["rope_scaling"] = next(scalings, None)
    settings |= {"rotary_pct": partial["partial_rotary_factor"]} if partial else {}
    if len({*types}) > 1:
        settings["layer_types"] = types
        if len(ropes) > 1 and ropes[FULL] != ropes[SLIDING]:
            settings["rope_parameters"] = ropes
    settings["sliding_window"] = next((kind.window for kind in by_layer if kind.window), None)
    settings |= {"use_sliding_window": True} if settings["sliding_window"] else {}
    if not all(kind.rotates for kind in by_layer):
        settings["no_rope_layers"] = [int(kind.rotates) for kind in by_layer]
    return settings


def _scaling_settings(scaling: RotaryScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default"}
    if not scaling.context:
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low,
        "high_freq_factor": scaling.high,
        "original_max_position_embeddings": scaling.context,
    }
