"""Converts settings of transformers to an `Architecture`, and back, without weights."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from costmodel.errors import UserError
from costmodel.ops import ROTARY_BASE
from costmodel.rotary import RotaryScaling
from search_spaces.architecture import Architecture, Positions, canonical, gelu_form, rotary_dim
from search_spaces.bases import MAX_LAYERS
from search_spaces.checkpoints.families import FAMILIES, Family, Number

FULL, SLIDING = "full_attention", "sliding_attention"  # types of layers in transformers
# Features that no block has, with the settings that show them if they are neither missing nor 0.
FOREIGN: dict[str, tuple[str, ...]] = {
    "chooses experts by token": (
        "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok",
    ),
    "has state-space layers": ("state_size", "mamba_d_state", "ssm_state_size", "mamba_d_ssm"),
    "has convolutions over tokens": ("conv_L_cache", "conv1d_width"),
    "has recurrent layers": ("attention_hidden_size", "lru_width"),
    "knows positions by ALiBi": ("alibi",),
}  # fmt: skip
BY_ALIBI = ("bloom", "mpt")  # types whose settings need not say so
ROPE_NAMES = {"yarn": "YaRN", "longrope": "LongRoPE", "dynamic": "dynamic NTK scaling"}


def architecture_of(config: Any, path: str) -> Architecture:
    """Return the architecture of a config of transformers.

    Fields that equal their defaults are left out, so that equal models have one `arch_id`. path: the name in errors.

    Raises UserError, naming the setting, for a model that no block computes exactly.
    """
    settings, family = config.to_dict(), family_of(config, path)
    activation, known = settings[family.activation], ", ".join(family.activations)
    if activation not in family.activations:
        raise UserError(f"the activation of {path!r} must be one of {known}, but is {activation!r}.")
    ffn, form = family.activations[activation]
    fields = _fields(family, settings, path)
    layer, num_layers = replace(family.layer, ffn=ffn), fields.pop("num_layers")
    made = f"{path!r} must have the settings of a model that can be made, but"
    if not 1 <= num_layers <= MAX_LAYERS:  # before they are made
        raise UserError(f"{made}: the number of layers must be from 1 to {MAX_LAYERS}, but is {num_layers}.")
    fields |= _positions(settings, path) if family.turns else {}
    try:
        architecture = Architecture(
            layers=(layer,) * num_layers,
            block=family.block,
            bias=family.bias,
            tied_embeddings=config.tie_word_embeddings,
            gelu="exact" if form == "exact" else "tanh",
            final_norm=family.final_norm or layer.norm1,
            **fields,
        )
        if any(positions.rotates for positions in architecture.positions):
            rotary_dim(architecture)
        return _unsaid(architecture)
    except UserError as error:
        raise UserError(f"{made}: {error}") from None


def family_of(config: Any, path: str) -> Family:
    """Return the family of a config. Raises UserError if there is none, or our block lacks a part of it."""
    settings = config.to_dict()
    families = [family for family in FAMILIES if family.model_type == config.model_type]
    if not families:
        raise UserError(_unknown(settings, path))
    family = min(families, key=lambda family: len(_unlike(family, settings)))  # the first of several alike
    for name, value in _unlike(family, settings).items():
        raise UserError(f"`{name}` of {path!r} must be {value!r}, but is {settings[name]!r}; it cannot be imported.")
    return family


def _unknown(settings: Mapping[str, Any], path: str) -> str:
    """Return an error text for an unknown type, with the reason if its settings show one."""
    kind = settings.get("model_type")
    what = next((what for what, names in FOREIGN.items() if any(settings.get(name) for name in names)), None)
    if what is None and kind in BY_ALIBI:
        what = "knows positions by ALiBi"
    if what is not None:
        return f"{path!r} must be a decoder that a block can be, but is of type {kind!r}, which {what}."
    known = ", ".join(dict.fromkeys(family.model_type for family in FAMILIES))
    return f"{path!r} must be a model of type {known} or an export of ours, but is {kind!r}."


def _unlike(family: Family, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the expected values of settings that differ from what is built into a family."""
    expected = {**family.fixed, **family.read_only}
    return {name: value for name, value in expected.items() if settings.get(name, value) != value}


def _fields(family: Family, settings: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the fields of an architecture that are numbers in the settings."""
    fields: dict[str, Any] = {}
    for name, ours in family.sizes.items():
        value = settings.get(name)
        field = ours.ours if isinstance(ours, Number) else ours
        value = ours.read(value) if isinstance(ours, Number) and value is not None else value
        if fields.get(field, value) != value:
            raise UserError(f"`{name}` of {path!r} must be {fields[field]}, but is {value}; it cannot be imported.")
        fields[field] = value
    if family.scales_embedding:
        fields["embedding_scale"] = fields["d_model"] ** 0.5
    fields["d_ff"] = fields["d_ff"] or 4 * fields["d_model"]  # GPT-2's is None where it is that
    return fields


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
    if features is not None and rotary_dim(replace(architecture, rotary_features=None)) == features:
        architecture = replace(architecture, rotary_features=None)
    return architecture


def _positions(settings: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the fields on positions and windows."""
    num_layers, context = settings["num_hidden_layers"], settings["max_position_embeddings"]
    window = settings.get("sliding_window") if settings.get("use_sliding_window", True) else None
    types = settings.get("layer_types") or [FULL if window is None else SLIDING] * num_layers
    turned = settings.get("no_rope_layers") or [1] * num_layers
    if len(types) != num_layers or len(turned) != num_layers or not {*types} <= {FULL, SLIDING}:
        raise UserError(
            f"`layer_types` of {path!r} must be {FULL!r} or {SLIDING!r} for each of {num_layers} layers, but is "
            f"{types!s:.200}; it cannot be imported."
        )
    ropes = {kind: _rope(settings, kind) for kind in sorted({*types})}
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
    share = main.get("partial_rotary_factor")
    head_dim = int(settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"])
    return {
        "rotary_base": base,
        "rotary_features": None if share is None else int(head_dim * share),
        "positions": distinct,
        "layer_positions": tuple(map(distinct.index, kinds)) if len(distinct) > 1 else (),
        "context": shortest,
        "longest_context": None if shortest == context else context,
    }


def _rope(settings: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the rotary settings of a type of layers, from any version of transformers."""
    rope = settings.get("rope_parameters")
    if rope is None:  # before version 5
        base = settings.get("rope_theta", settings.get("rotary_emb_base", ROTARY_BASE))
        if kind == SLIDING and "rope_local_base_freq" in settings:
            return {"rope_theta": settings["rope_local_base_freq"]}
        share = settings.get("partial_rotary_factor", settings.get("rotary_pct"))
        partial = {} if share is None else {"partial_rotary_factor": share}
        return {"rope_theta": base, **partial, **(settings.get("rope_scaling") or {})}
    return dict(rope.get(kind, rope))


def _scaling(rope: Mapping[str, Any], settings: Mapping[str, Any], path: str) -> RotaryScaling | None:
    """Return the scaling of rotary angles. Raises UserError for a kind that no block has."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RotaryScaling(factor=float(rope["factor"]))
    if kind == "llama3":
        context = rope.get("original_max_position_embeddings") or settings["max_position_embeddings"]
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        return RotaryScaling(factor=float(rope["factor"]), low=low, high=high, context=int(context))
    named = ROPE_NAMES.get(kind, "another")
    raise UserError(
        f"`rope_type` of {path!r} must be 'default', 'linear' or 'llama3', but is {kind!r} ({named}); it cannot be "
        "imported."
    )


def plain_settings(architecture: Architecture, library: Any) -> tuple[Family, dict[str, Any]] | None:
    """Return the family of transformers that computes this architecture, and its settings; None if there is none.

    The config of these settings must convert back to the same architecture. library: the module transformers.
    """
    for family in FAMILIES:
        if family.block == architecture.block and (settings := _settings(family, architecture)) is not None:
            config = getattr(library, family.config)
            known = config().to_dict()
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
