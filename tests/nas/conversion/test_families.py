from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

from costmodel.deployment.deploy import Deployment  # noqa: E402
from costmodel.engine import spu  # noqa: E402
from costmodel.errors import UnpricedOpError, UserError  # noqa: E402
from costmodel.estimate import estimate  # noqa: E402
from costmodel.execution import interpreter  # noqa: E402
from costmodel.ops import OpGraph  # noqa: E402
from costmodel.protocols import load_pricer, semi2k  # noqa: E402
from costmodel.protocols.primitives import EngineSetting  # noqa: E402
from costmodel.tracing.trace import trace  # noqa: E402
from nas.conversion.fold import fold  # noqa: E402
from nas.conversion.huggingface import load_pretrained, to_transformers  # noqa: E402
from nas.conversion.linear_fit import fitted_linears  # noqa: E402
from nas.conversion.pretrained import Pretrained  # noqa: E402
from nas.conversion.score_bounds import set_bounds  # noqa: E402
from nas.conversion.transfer import transferred  # noqa: E402
from nas.model.decoder import Decoder  # noqa: E402
from nas.model.norms import follow_deviations, frozen_norms  # noqa: E402
from nas.model.self_attention import Past  # noqa: E402
from nas.model.weights import deployed_weights, load_deployed  # noqa: E402
from nas.recipe.distillation import fitted_parts  # noqa: E402
from nas.run.config import StudyConfig  # noqa: E402
from nas.run.folder import own_space  # noqa: E402
from nas.study.priced_study import price_study  # noqa: E402
from search_spaces.architecture import Architecture, Layer  # noqa: E402
from search_spaces.budget.priced_space import (  # noqa: E402
    price_of,
    price_space,
    priceable,
)
from search_spaces.checkpoints.settings import architecture_of  # noqa: E402
from search_spaces.deployed import deployed  # noqa: E402
from search_spaces.inner import inner_choices  # noqa: E402
from search_spaces.lower import Workload, lower  # noqa: E402
from search_spaces.notation import FFN_LETTERS, NORM_LETTERS, name_of, parse  # noqa: E402
from search_spaces.space import member_of  # noqa: E402
from tests.costmodel.kv_cache import kv_cache  # noqa: E402

SIZES: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
SIZES |= {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
LLAMA3 = {"rope_theta": 1000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
LINEAR = {"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0}
PARTLY = {"rope_theta": 1e4, "rope_type": "default"}
TIED = {"tie_word_embeddings": True}
GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.3}
GRANITE |= {"logits_scaling": 6.0}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 12, "sliding_window": 16}
NO_CAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
BY_TYPE = {"sliding_attention": {**PARTLY, "rope_theta": 100.0}, "full_attention": {**LINEAR, "rope_theta": 1e6}}
ONE_LAYER = ("qwen3", "gemma2", "olmo2", "granite")
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 8, **TIED}),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR}),
    "mistral": ("Mistral", {"sliding_window": 16, "head_dim": 8}),
    "mistral-no-window": ("Mistral", {"sliding_window": None}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "phi3": ("Phi3", {"sliding_window": 16}),
    "phi3-partly": ("Phi3", {"hidden_size": 32, "rope_parameters": {**PARTLY, "partial_rotary_factor": 0.75}}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, "rope_parameters": {**PARTLY, "rope_theta": 5e6}}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "granite": ("Granite", GRANITE),
    "granite-tied": ("Granite", {**GRANITE, **TIED, "logits_scaling": 1.0, "residual_multiplier": 1.0}),
    "gemma": ("Gemma", {"head_dim": 8, **TIED}),
    "gemma2": ("Gemma2", {**GEMMA, **TIED}),
    "gemma2-no-caps": ("Gemma2", {**GEMMA, **NO_CAPS, "hidden_activation": "gelu", "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3Text", {**GEMMA, **TIED, "num_hidden_layers": 4, "_sliding_window_pattern": 3}),
    "gemma3-scaled": ("Gemma3Text", {**GEMMA, "layer_types": TYPES, "rope_parameters": BY_TYPE}),
    "olmo2": ("Olmo2", {}),
    "starcoder2": ("Starcoder2", {"sliding_window": 16}),
    "stablelm": ("StableLm", {"hidden_size": 32}),
    "stablelm2": ("StableLm", {"hidden_size": 32, "use_qkv_bias": True}),
    "gpt_neox": ("GPTNeoX", {"use_parallel_residual": False, "hidden_size": 32}),
    "gpt_neox-whole": ("GPTNeoX", {"rope_parameters": {**PARTLY, "partial_rotary_factor": 1.0, "rope_theta": 500.0}}),
    "opt": ("OPT", {"ffn_dim": 20, "word_embed_proj_dim": 24}),
}
ODD: dict[str, tuple[str, dict[str, Any]]] = {  # what few models have: sizes of heads, parts of them turned, biases
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "llama-attention-bias": ("Llama", {"attention_bias": True, **TIED}),
    "llama-mlp-bias": ("Llama", {"mlp_bias": True, "head_dim": 8}),
    "smollm3-bias": ("SmolLM3", {"attention_bias": True, "no_rope_layer_interval": 2}),
    "qwen2-heads": ("Qwen2", {"head_dim": 8, **TIED}),
    "qwen3-bias": ("Qwen3", {"head_dim": 8, "attention_bias": True}),
    "granite-heads": ("Granite", {**GRANITE, "head_dim": 8, "mlp_bias": True}),
    "gemma-bias": ("Gemma", {"head_dim": 8, "attention_bias": True}),
    "gemma2-bias": ("Gemma2", {**GEMMA, "attention_bias": True, "num_key_value_heads": 1}),
    "gemma3-bias": ("Gemma3Text", {**GEMMA, "attention_bias": True}),
    "olmo2-heads": ("Olmo2", {"head_dim": 8, "attention_bias": True, "num_key_value_heads": 1}),
    "starcoder2-heads": ("Starcoder2", {"head_dim": 8, "use_bias": False, "num_key_value_heads": 1}),
    "phi3-heads": ("Phi3", {"head_dim": 8, "rope_parameters": {**PARTLY, "partial_rotary_factor": 0.5}}),
    "stablelm-half": ("StableLm", {"hidden_size": 48, "rope_parameters": {**PARTLY, "partial_rotary_factor": 0.5}}),
    "gpt_neox-bias": ("GPTNeoX", {"attention_bias": False, "hidden_size": 32}),
    "opt-bias": ("OPT", {"ffn_dim": 20, "word_embed_proj_dim": 24, "enable_bias": False}),
}
FAMILIES |= ODD


def with_cheapest_inner(architecture: Architecture, layer: Layer) -> Layer:
    """The layer with the fewest inner norms and caps that it can have in training."""
    inner1, inner2 = (offered[-1] for offered in inner_choices(architecture).values())
    return replace(
        layer, inner1=inner1 if layer.attention != "none" else "own", inner2=inner2 if layer.ffn != "none" else "own"
    )


def their_model(name: str, **changes: Any) -> Any:
    """A small model of a family, with every gain and bias drawn."""
    kind, settings = FAMILIES[name]
    torch.manual_seed(len(name))
    make = getattr(transformers, f"{kind}Config")
    known = make().to_dict()
    sizes = {name: value for name, value in SIZES.items() if name in known}
    config = make(**{**sizes, **settings, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def ours(source: Pretrained) -> Decoder:
    model = Decoder(source.architecture)
    load_deployed(model, source.weights)
    return model.eval()


def assert_close(actual: Any, expected: Any) -> None:
    expected = np.asarray(expected)
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_their_logits_is_its_op_graph_and_is_written_as_itself(name: str, tmp_path: Path) -> None:
    theirs = their_model(name)
    theirs.save_pretrained(tmp_path)
    source = load_pretrained(str(tmp_path))
    architecture = source.architecture
    assert architecture == architecture_of(theirs.config, name)  # no weights are needed
    length = min(architecture.context, 20)
    tokens = torch.randint(40, (2, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits
        model = ours(source)
        assert_close(model(tokens).logits, expected)
    weights, graph = numbers(source.weights), lower(architecture, length)
    assert_close(interpreter.execute(graph, weights, tokens[1].numpy()), expected[1])
    earlier = interpreter.values(lower(architecture, length - 1), weights, tokens[1, :-1].numpy())
    step = lower(architecture, length, Deployment(phase="decode"))
    assert_close(interpreter.execute(step, weights, tokens[1, -1:].numpy(), kv_cache(step, earlier)), expected[1, -1:])
    again = to_transformers(architecture, source.weights)
    assert type(again) is type(theirs) or name == "mistral-no-window"  # which is a Llama
    for key in ("rope_parameters", "sliding_window", "layer_types", "no_rope_layers", "max_position_embeddings"):
        assert said(again.config, key) == said(theirs.config, key)
    for key, value in theirs.state_dict().items():
        value[: 2 * key.endswith("embed_positions.weight")] = 0  # rows of no position
        torch.testing.assert_close(again.state_dict()[key], value, rtol=1e-6, atol=1e-6)


def test_a_sequence_that_a_window_hides_some_of_is_refused_with_the_numbers(tmp_path: Path) -> None:
    their_model("mistral").save_pretrained(tmp_path)
    source = load_pretrained(str(tmp_path))
    assert (source.architecture.context, source.architecture.longest_context) == (16, 32)
    message = "context 16, beyond which attention has windows, but got 17"
    with pytest.raises(UserError, match=f"`seq_len` must be between 1 and the {message}"):
        lower(source.architecture, 17)
    with pytest.raises(UserError, match=r"17 tokens, context=16 \(beyond it attention has windows\)"):
        ours(source)(torch.zeros(1, 17, dtype=torch.int64))


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("Mixtral", {}, "'it' must be a decoder .* of type 'mixtral', which chooses experts by token"),
        ("Mamba", {}, "of type 'mamba', which has state-space layers"),
        ("Lfm2", {}, "of type 'lfm2', which has convolutions over tokens"),
        ("Rwkv", {}, "of type 'rwkv', which has recurrent layers"),
        ("Bloom", {}, "of type 'bloom', which knows positions by ALiBi"),
        ("Falcon", {"alibi": True}, "of type 'falcon', which knows positions by ALiBi"),
        ("BioGpt", {}, "must be a model of type gpt2, gpt_neox, llama"),
        ("Llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "'yarn' .YaRN."),
        ("OPT", {"word_embed_proj_dim": 8}, "`word_embed_proj_dim` of 'it' must be 768, but is 8"),
        ("StableLm", {"qk_layernorm": True}, "`qk_layernorm` of 'it' must be False, but is True"),
        ("Llama", {"is_causal": False}, "`is_causal` of 'it' must be True, but is False"),
        ("Gemma", {"use_bidirectional_attention": True}, "`use_bidirectional_attention` of 'it' .* is True"),
        ("Gemma3Text", {"use_bidirectional_attention": True}, "`use_bidirectional_attention` of 'it' must be False"),
        ("Qwen2", {"partial_rotary_factor": 0.5}, "`partial_rotary_factor` of 'it' must be 1, since .* but is 0.5"),
        ("Olmo2", {"sliding_window": 16}, "`sliding_window` of 'it' is 16, but has no meaning here; remove it if"),
        ("GPT2", {"reads_backwards": True}, "`reads_backwards` of 'it' is True, but has no meaning here"),
        ("GPTNeoX", {"head_dim": 90}, "`head_dim` of 'it' must be 96, but is 90"),
        ("Granite", {"logits_scaling": 0.0}, "`logits_scaling` of 'it' must be above 0, but is 0.0"),
        ("StableLm", {"partial_rotary_factor": 0.01}, "`partial_rotary_factor` of 'it' must be 0.025 to 1"),
        ("Llama", {"rope_parameters": {"rope_theta": 1e4, "mscale": 2.0}}, "has 'mscale' too"),
    ],
)
def test_what_no_block_has_is_named_in_one_line(kind: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        architecture_of(getattr(transformers, f"{kind}Config")(**settings), "it")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_a_checkpoint_in_bfloat16_is_not_rounded_again(name: str, tmp_path: Path) -> None:
    their_model(name).bfloat16().save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(40, (1, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert_close(ours(load_pretrained(str(tmp_path)))(tokens).logits, theirs(tokens).logits)


@pytest.mark.parametrize(
    "name", ["llama3", "phi3-partly", "smollm3", "stablelm2", "opt", "qwen3", "granite", "gemma2", "gemma3", "olmo2"]
)
def test_our_own_class_runs_what_a_family_lacks(name: str, tmp_path: Path) -> None:
    """A layer without attention has none of them, and goes with its positions when it has nothing left."""
    their_model(name).save_pretrained(tmp_path)
    source = load_pretrained(str(tmp_path))
    layers = list(source.architecture.layers)
    layers[1] = replace(layers[1], norm1="none", attention="none", norm2="none", ffn="none")
    architecture = replace(source.architecture, layers=tuple(layers))
    needed = {f"{node.name}.{suffix}" for node in lower(architecture, 8) for suffix in node.op.weight_shapes}
    weights = {key: value for key, value in source.weights.items() if key in needed}
    model = ours(Pretrained(architecture, weights, None))
    tokens = torch.randint(40, (1, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens).logits
        exported = to_transformers(architecture, weights)
        assert type(exported).__name__ == "DecoderForCausalLM"
        assert_close(exported(tokens).logits, expected)
    folded = fold(architecture, weights)
    assert folded.architecture.num_layers == architecture.num_layers - 1
    run = interpreter.execute(lower(folded.architecture, 12), numbers(folded.weights), tokens[0].numpy())
    assert_close(run, expected[0])


@pytest.mark.parametrize(
    "name",
    ["qwen3", "gemma2", "gemma3", "olmo2", "smollm3", "granite", "stablelm", "llama-attention-bias", "gemma2-bias"],
)
def test_candidates_start_from_a_family_and_fold(name: str, tmp_path: Path) -> None:
    their_model(name, num_hidden_layers=3).save_pretrained(tmp_path)
    source = load_pretrained(str(tmp_path))
    norm = NORM_LETTERS[source.architecture.layers[0].norm1]
    target = parse(f"1x{norm}P{norm}Qo-1x{norm}H{norm}Fo-1xoo{norm}Qs", source.architecture).architecture
    tokens = torch.randint(40, (2, 12), generator=torch.Generator().manual_seed(1))
    parent, model = ours(source), Decoder(target)
    load_deployed(model, transferred(source.architecture, source.weights, target))
    load_deployed(model, fitted_linears(parent, model, fitted_parts(target, source.architecture), tokens))
    set_bounds(model, tokens)
    with torch.no_grad():
        expected = model(tokens).logits[0]
    assert expected.isfinite().all()
    assert target.final_norm == source.architecture.final_norm
    weights = deployed_weights(model)
    assert_close(interpreter.execute(lower(target, 12), numbers(weights), tokens[0].numpy()), expected)
    folded = fold(target, weights)
    assert folded.architecture == deployed(target)
    run = interpreter.execute(lower(folded.architecture, 12), numbers(folded.weights), tokens[0].numpy())
    assert_close(run, expected)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gemma3", "olmo2"])
def test_inner_norms_freeze_fold_and_cost_nothing_then(name: str, tmp_path: Path) -> None:
    their_model(name, num_hidden_layers=3).save_pretrained(tmp_path)
    source = load_pretrained(str(tmp_path))
    own, after = source.architecture.layers[0], "o" if name == "qwen3" else "f"
    norm, ffn = NORM_LETTERS[own.norm1], FFN_LETTERS[own.ffn]
    text = f"1x{norm}P{norm}Qof{after}-1x{norm}H{norm}{ffn}of{after}-1xoo{norm}Qso{after}"
    target = parse(text, source.architecture).architecture
    assert parse(name_of(target), source.architecture).architecture == target
    assert set(target.layers[:2]) < set(own_space(source.architecture).layers)
    tokens, model = torch.randint(40, (2, 12), generator=torch.Generator().manual_seed(1)), Decoder(target)
    load_deployed(model, transferred(source.architecture, source.weights, target))
    started = model(tokens).logits
    follow_deviations(model)
    assert all(len(norm.sigma.unique()) == norm.groups for norm in frozen_norms(model).values())
    for frozen in frozen_norms(model).values():
        frozen.set_frozen()
    with torch.no_grad():
        expected = model.eval()(tokens).logits
        past = Past()
        steps = [model.logits_of(model.continued(tokens[:, place, None], past))[:, 0] for place in range(12)]
    assert (started - expected).abs().max() > 1e-3
    assert_close(torch.stack(steps, dim=1), expected)
    weights = deployed_weights(model)
    exact = interpreter.execute(lower(target, 12), numbers(weights), tokens[0].numpy())
    assert_close(exact, expected[0])
    folded = fold(target, weights, dtype=torch.float64)
    assert folded.architecture == deployed(target)
    run = interpreter.execute(lower(folded.architecture, 12), numbers(folded.weights), tokens[0].numpy())
    np.testing.assert_allclose(run, exact, rtol=0, atol=1e-6 * np.abs(np.asarray(exact)).max())
    for architecture, its in ((target, weights), (folded.architecture, folded.weights)):
        exported = to_transformers(architecture, {key: value.float() for key, value in its.items()})
        with torch.no_grad():
            assert_close(exported(tokens).logits, expected)


@pytest.mark.parametrize("protocol", ["semi2k", "aby3", "cheetah", "sigma", "crypten"])
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gemma3", "olmo2"])
def test_a_price_falls_by_the_inner_norms_and_caps_that_go(name: str, protocol: str) -> None:
    own = architecture_of(their_model(name).config, name)
    without = member_of(own_space(own), [with_cheapest_inner(own, layer) for layer in own.layers]).architecture
    before, after = (lower(deployed(whole), 8) for whole in (own, without))
    kept = {node.name for node in after}
    gone = [node for node in before if node.name not in kept]
    ends = ("q_norm", "k_norm", "attention.norm", "ffn.norm", "uncapped", "tanh", "capped")
    assert gone
    assert all(node.name.endswith(ends) for node in gone)
    pricer = load_pricer(protocol)
    if (name, protocol) == ("gemma2", "sigma"):  # its code has no tanh, so that only members without caps have a price
        with pytest.raises(UnpricedOpError):
            estimate(before, pricer)
        space, left_out = priceable(own_space(own), pricer, Workload(prompt_len=8))
        assert {"inner1 own", "inner1 uncapped"} & {*left_out} == {"inner1 own"}
        assert price_of(price_space(space, pricer, 8), member_of(space, without.layers)).sent_bytes > 0
        return
    costs = [sum(pricer.price(node.op).sent_bytes for node in graph) for graph in (before, after, gone)]
    assert costs[0] - costs[1] == costs[2] > 0


# A trace of Phi-3 has gate and up in one linear. Quick is one of each kind of block, with most of what may be odd.
TRACED = "llama-biases mistral smollm3 qwen3-bias granite-heads gemma2 gemma3-scaled olmo2-heads starcoder2 stablelm2"
QUICK = (*TRACED.split(), "qwen2-heads", "gpt_neox-whole", "opt-bias")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in FAMILIES if name[:4] != "phi3"],
)
def test_a_family_costs_what_its_trace_does(name: str) -> None:
    theirs = their_model(name)
    ours, traced = lower(architecture_of(theirs.config, name), 9), trace(theirs, 9)

    def costs(graph: OpGraph) -> Counter[tuple[Any, ...]]:
        return Counter((node.layer, type(node.op), semi2k.comm(node.op, EngineSetting())) for node in graph)

    assert costs(ours) == costs(traced)


@pytest.mark.parametrize("name", ["llama-attention-bias", "llama-mlp-bias", "starcoder2-heads", "stablelm-half"])
def test_a_search_is_priced_from_settings_alone(name: str, tmp_path: Path) -> None:
    their_model(name).config.save_pretrained(tmp_path)
    config = StudyConfig(parent=str(tmp_path), budget_latency="90%", protocol="semi2k", seq_len=16)
    for parent in (tmp_path, tmp_path / "config.json"):
        priced = price_study(replace(config, parent=str(parent)), reads_weights=False)
        assert priced.num_feasible > 0
        assert priced.parent is not None
        assert priced.parent.model.weights == {}
    with pytest.raises(UserError, match="model.safetensors"):
        price_study(config)


@pytest.mark.needs_engine
def test_the_engine_sends_what_a_layer_is_predicted_to() -> None:
    made = [architecture_of(their_model(name, num_hidden_layers=1, head_dim=8).config, name) for name in ONE_LAYER]
    made += [replace(own, layers=(with_cheapest_inner(own, own.layers[0]),)) for own in made]
    graphs = [lower(whole, 5) for own in made for whole in (own, deployed(own))]
    layer = list(dict.fromkeys(node.op for graph in graphs for node in graph))
    measured = spu.measure(layer, protocol="semi2k", setting=EngineSetting())
    for op, cost in zip(layer, measured, strict=True):
        comm = semi2k.comm(op, EngineSetting())
        assert (comm.online_bytes, comm.messages) == (cost.sent_bytes, cost.messages), op


def said(config: Any, key: str) -> Any:
    """A setting; of angles by type of layers, what is said of the types."""
    value = getattr(config, key, None)
    by_type = {name: part for name, part in value.items() if isinstance(part, dict)} if isinstance(value, dict) else {}
    return by_type or value


def numbers(weights: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {key: value.double().numpy() for key, value in weights.items()}
