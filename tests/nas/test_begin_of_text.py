"""The token that begins a text: found as transformers does, and put before every sequence and prompt."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from costmodel.errors import UserError
from nas import train
from nas.conversion.parent import load_initial, parent_of
from nas.conversion.pretrained import read_export, write_pretrained
from nas.conversion.score_bounds import bounding_tokens
from nas.conversion.verified_fold import check_tokens
from nas.corpus.corpus import FORMAT, Corpus, prepare
from nas.corpus.documents import GivenTokenizer
from nas.corpus.ngrams import ngram_baseline
from nas.corpus.sequences import gather
from nas.corpus.sources import open_source
from nas.corpus.tokenizer import begin_line, given_encoder, with_begin_of_text
from nas.private.prompt import read_prompt
from nas.recipe.recipe import SCALES
from nas.training.batches import train_batch, validation_batches
from nas.training.distillation.library import scored_tokens
from nas.training.manifest import read_training

TEXTS = ("", "a", "def f(a, b):\n    return a * 3 + b\n", "  two  spaces\t", "u\u0308 \u00fc \u65e5 12345", "a</s> b")
LLAMA = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAMA |= {"num_key_value_heads": 1, "max_position_embeddings": 32, "head_dim": 8}
OTHERS = {"word_embed_proj_dim": 16, "ffn_dim": 16, "n_embd": 16, "n_head": 2, "n_layer": 1, "n_positions": 32}
Make = Callable[[Tokenizer], Any]


def byte_level(special: Sequence[str], post: Make | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return trained(tokenizer, [*special], sorted(pre_tokenizers.ByteLevel.alphabet()), post)


def sentence_piece(special: Sequence[str], prefix: str | None, post: Make | None = None) -> Tokenizer:
    """prefix: how a space is put before a text; None for none, as in Gemma."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if prefix is None:
        tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    elif prefix == "normalised":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    made = trained(tokenizer, [*special, *(f"<0x{byte:02X}>" for byte in range(256))], [], post)
    plain = json.loads(made.to_str())
    plain["added_tokens"] = [token for token in plain["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(plain))


def trained(tokenizer: Tokenizer, special: list[str], alphabet: list[str], post: Make | None) -> Tokenizer:
    size: dict[str, Any] = {"vocab_size": len(special) + len(alphabet) + 40, "show_progress": False}
    trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, **size)
    tokenizer.train_from_iterator([f"def f{index}(a, b):\n    return a * {index} + b\n" for index in range(9)], trainer)
    if post is not None:
        tokenizer.post_processor = post(tokenizer)
    return tokenizer


def around(single: str, *tokens: str) -> Make:
    return lambda tokenizer: processors.TemplateProcessing(
        single=single, special_tokens=[(token, tokenizer.token_to_id(token)) for token in tokens]
    )


def after_byte_level(tokenizer: Tokenizer) -> Any:
    return processors.Sequence([processors.ByteLevel(trim_offsets=True), around("<s> $A", "<s>")(tokenizer)])


PLAIN = ("<unk>", "<s>", "</s>", "<pad>")
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
KINDS: dict[str, tuple[Callable[[], Tokenizer], dict[str, Any], str, str | None]] = {  # ..., its model, what begins
    "gpt2": (partial(byte_level, PLAIN), {"tokenizer_class": "GPT2Tokenizer"}, "gpt2", None),
    "qwen2": (partial(byte_level, PLAIN), {"tokenizer_class": "Qwen2Tokenizer"}, "qwen2", None),
    "llama3": (partial(byte_level, PLAIN, after_byte_level), {}, "llama", "<s>"),
    "opt": (
        partial(byte_level, PLAIN, around("</s> $A", "</s>")),
        {"tokenizer_class": "GPT2Tokenizer", "bos_token": "</s>", "add_bos_token": True}, "opt", "</s>",
    ),
    "llama2": (
        partial(sentence_piece, PLAIN, "normalised", around("<s> $A", "<s>")),
        {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False}, "llama", "<s>",
    ),
    "mistral": (
        partial(sentence_piece, PLAIN, "first", around("<s> $A", "<s>")),
        {"tokenizer_class": "LlamaTokenizer"}, "mistral", "<s>",
    ),
    "gemma": (
        partial(sentence_piece, PLAIN, None, around("<s> $A", "<s>")),
        {"tokenizer_class": "GemmaTokenizer"}, "gemma", "<s>",
    ),
    "ends": (partial(sentence_piece, PLAIN, "always", around("$A </s>", "</s>")), {}, "llama", None),
    "both": (partial(byte_level, PLAIN, around("<s> $A </s>", "<s>", "</s>")), {}, "llama", "<s>"),
}  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Saves a small model of transformers with a tokenizer of a kind."""
    transformers = pytest.importorskip("transformers")

    def save(kind: str, cut: int | None = None, **settings: Any) -> Path:
        make, own, model_type, _ = KINDS[kind]
        tokenizer, folder = make(), tmp_path / kind
        if cut is not None:
            tokenizer.enable_truncation(cut)
            tokenizer.enable_padding(length=cut)
        known = transformers.AutoConfig.for_model(model_type).to_dict()
        sizes = {name: value for name, value in {**OTHERS, **LLAMA, "vocab_size": 400}.items() if name in known}
        config = transformers.AutoConfig.for_model(model_type, **sizes)
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({**TOKENS, **own, **settings}))
        return folder

    return save


@pytest.mark.needs_hf
@pytest.mark.parametrize("cut", [None, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_the_tokens_of_auto_tokenizer(kind: str, cut: int | None, checkpoint: Callable[..., Path]) -> None:
    from transformers import AutoTokenizer

    folder = checkpoint(kind, cut)
    given, theirs = load_initial(str(folder)).tokenizer, AutoTokenizer.from_pretrained(folder)
    assert given is not None
    encoder = given_encoder(given, None, None)
    assert (encoder.begin and encoder.begin.token) == KINDS[kind][3]
    for text in TEXTS:
        ours, expected = encoder.encode_prompt(text), theirs(text).input_ids
        assert expected[: len(ours)] == ours
        assert expected[len(ours) :] == (list(encoder.after) if kind in ("ends", "both") else [])


def given_of(kind: str) -> GivenTokenizer:
    return GivenTokenizer(name=kind, json=KINDS[kind][0]().to_str(), end_of_text="</s>")


def corpora(source_files: str, kind: str = "llama3") -> tuple[Corpus, Corpus]:
    begun, plain = (with_begin_of_text(given_of(kind), rule) for rule in ("tokenizer", "none"))
    return prepare(source_files, 400, tokenizer=begun), prepare(source_files, 400, tokenizer=plain)


def test_every_sequence_begins_with_it_and_predicts_the_same_targets(source_files: str, tiny_scale: Any) -> None:
    begun, plain = corpora(source_files)
    assert begun.fingerprint != plain.fingerprint
    assert plain.begin_of_text is None
    assert begun.begin_of_text is not None
    first = begun.begin_of_text.id
    for name in ("train", "validation"):
        assert np.array_equal(begun.tokens(name), plain.tokens(name))  # the files are of text alone
        ours, theirs = (gather(corpus, name, [0, 2], 16) for corpus in (begun, plain))
        assert (ours[:, 0] == first).all()
        assert (theirs[:, 0] != first).all()
        assert np.array_equal(ours[:, 1:], theirs[:, 1:])
    inputs, targets = train_batch(begun, step=0, batch=2, seq_len=16, seed=0)
    assert (inputs[:, 0] == first).all()
    assert not (targets == first).any()
    checked = check_tokens(begun, 400, 16)[1]
    read = [checked, bounding_tokens(begun, 400, 16), scored_tokens(begun, 16, 400)]
    for sequences in (*read, *validation_batches(begun, tiny_scale)[0][:1]):
        assert (sequences[:, 0] == first).all()
    assert (check_tokens(None, 400, 16, begun.begin_of_text)[1][:, 0] == first).all()
    settings: dict[str, Any] = {"seq_len": 16, "validation_tokens": 256}
    assert ngram_baseline(begun, **settings) == ngram_baseline(plain, **settings)
    assert prepare(source_files, 400, tokenizer=given_of("llama3")) == begun  # as read from the cache


@pytest.fixture
def tiny_scale() -> Any:
    return replace(SCALES["smoke"], seq_len=16, validation_tokens=64)


def test_a_corpus_without_the_rule_has_the_fingerprint_that_it_had(source_files: str) -> None:
    given = given_of("gpt2")
    said = [FORMAT, open_source(source_files).fingerprint, hashlib.sha256(given.json.encode()).hexdigest(), "</s>"]
    made = prepare(source_files, 400, tokenizer=with_begin_of_text(given, "none"))
    assert made.fingerprint == hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]
    assert with_begin_of_text(given, "none") is given


@pytest.mark.parametrize(
    ("kind", "rule", "begin", "line"),
    [
        ("llama3", "none", None, "each sequence begins with no token of its own: the rule of --begin-of-text"),
        ("gpt2", "<s>", "<s>", "each sequence begins with '<s>', which is not predicted: the rule of --begin-of-text"),
        ("both", "<unk>", "<unk>", "each sequence begins with '<unk>', which"),
        ("ends", "tokenizer", None, "each sequence begins with no token of its own: the rule of its tokenizer"),
    ],
)
def test_a_flag_changes_the_rule_and_keeps_the_rest(kind: str, rule: str, begin: str | None, line: str) -> None:
    given = given_of(kind)
    before, after = (given_encoder(each, None, None) for each in (given, with_begin_of_text(given, rule)))
    assert (after.begin and after.begin.token) == begin
    assert after.after == before.after
    assert begin_line(after.begin, rule).startswith(line)
    assert np.array_equal(before.encode([TEXTS[2]])[0], after.encode([TEXTS[2]])[0])
    with pytest.raises(UserError, match=r"--begin-of-text must be tokenizer, none or a token of .*, but got '<no>'"):
        with_begin_of_text(given, "<no>")
    damaged = json.loads(given.json)
    del damaged["model"]["vocab"]
    with pytest.raises(UserError, match="^the tokenizer of .* must be"):
        with_begin_of_text(replace(given, json=json.dumps(damaged)), rule if rule != "tokenizer" else "none")


def test_a_prompt_begins_with_it_and_its_text_does_not_show_it() -> None:
    plain, begun = (read_prompt("f(a", given_of(kind), context=9, new_tokens=2) for kind in ("gpt2", "llama3"))
    assert begun.ids == (begun.encoder.tokenizer.token_to_id("<s>"), *plain.ids)
    assert begun.continued([plain.ids[0]]) == plain.continued([plain.ids[0]])
    with pytest.raises(UserError, match=f"they are {len(begun.ids)} . 7"):
        read_prompt("f(a", given_of("llama3"), context=len(begun.ids) + 6, new_tokens=7)


@pytest.mark.needs_hf
def test_a_training_keeps_the_rule_its_tokenizer_and_its_parent(checkpoint, source_files, tmp_path, capsys) -> None:
    parent, out = checkpoint("llama3", chat_template="{{ messages }}"), tmp_path / "out"
    args = ["SM", "--init-from", str(parent), "--scale", "smoke", "--seq-len", "16", "--tokens", "512"]
    assert train.main([*args, "--data", source_files, "--output-dir", str(out)]) == 0, capsys.readouterr().err
    assert "each sequence begins with '<s>', which is not predicted" in capsys.readouterr().out
    assert read_training(out).begin_of_text == "<s>"
    assert json.loads((out / "tokenizer" / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"
    (parent / "tokenizer.json").write_text(given_of("both").json)
    assert train.main(["--resume", str(out)]) == 2
    assert "must be the model" in (error := capsys.readouterr().err)
    assert error.count("\n") == 1
    assert train.main(["SM", "--begin-of-text", "none", "--data", source_files]) == 2
    assert "--begin-of-text is of the tokenizer of --parent or --init-from" in capsys.readouterr().err


TURN = {"eos_token_id": [2, 3], "bos_token_id": 1, "pad_token_id": 3, "temperature": 0.6, "do_sample": True}


@pytest.mark.needs_hf
@pytest.mark.parametrize("kind", ["gpt2", "llama3", "llama2", "gemma", "opt"])
def test_an_export_carries_the_tokenizers_files_and_predicts_as_its_parent(kind, checkpoint, tmp_path) -> None:
    """Scores of continuations are what evaluation harnesses compare."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from nas.conversion.huggingface import save_model

    extra = {"chat_template": "{{ messages[0].content }}", "extra_special_tokens": ["<unk>"]}
    folder = checkpoint(kind, pad_token="<pad>", **extra)
    (folder / "generation_config.json").write_text(json.dumps(TURN))
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<pad>"}))
    source = load_initial(str(folder))
    write_pretrained(source, tmp_path / "parent")  # as a run keeps it
    kept = read_export(tmp_path / "parent")
    save_model(kept.architecture, kept.weights, tmp_path / "parent", tmp_path / "export")
    theirs, ours = (AutoTokenizer.from_pretrained(path) for path in (folder, tmp_path / "export"))
    assert [ours.bos_token, ours.eos_token, ours.pad_token] == [theirs.bos_token, theirs.eos_token, "<pad>"]
    assert ours.apply_chat_template([{"role": "user", "content": "b"}], tokenize=False) == "b"
    assert json.loads((tmp_path / "export" / "generation_config.json").read_text()) == TURN
    assert (tmp_path / "export" / "special_tokens_map.json").is_file()
    models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in (folder, tmp_path / "export")]
    assert models[1].generation_config.eos_token_id == models[1].config.eos_token_id == [2, 3]
    for text in TEXTS[1:]:
        ids = [tokenizer(text, return_tensors="pt").input_ids for tokenizer in (theirs, ours)]
        assert ids[0].equal(ids[1])
        losses = [model(each, labels=each).logits.log_softmax(dim=-1) for model, each in zip(models, ids, strict=True)]
        assert torch.allclose(losses[0], losses[1], atol=1e-5)
    begins = with_begin_of_text(source.tokenizer, "none")  # type: ignore[arg-type]
    assert parent_of("m", source, "none").digest == parent_of("m", source._replace(tokenizer=begins)).digest


# rotary settings of version 5, and the same of version 4
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (
        {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "gpt_neox": (
        {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.5},
        {"rotary_emb_base": 2e4, "rotary_pct": 0.5, "rope_scaling": None},
    ),
    "gemma3_text": (
        {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
        | {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
}


@pytest.mark.needs_hf
@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_has_its_rotary_settings_for_versions_4_and_5_of_transformers(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from nas.conversion.huggingface import save_model

    rope, before = FAMILIES[family]
    layers = ["sliding_attention", "full_attention"] if "gemma3" in family else ["full_attention"] * 2
    sizes = LLAMA | {"num_hidden_layers": 2, "layer_types": layers, "sliding_window": 64, "vocab_size": 400}
    known = AutoConfig.for_model(family).to_dict()
    sizes = {name: value for name, value in sizes.items() if name in known}
    config = AutoConfig.for_model(family, **sizes, rope_parameters=rope)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "theirs")
    KINDS["gemma"][0]().save(str(tmp_path / "theirs" / "tokenizer.json"))
    (tmp_path / "theirs" / "tokenizer_config.json").write_text(json.dumps(TOKENS))
    source = load_initial(str(tmp_path / "theirs"))
    write_pretrained(source, tmp_path / "kept")
    save_model(source.architecture, source.weights, tmp_path / "kept", tmp_path / "ours")
    saved = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert {name: saved[name] for name in before} == before
    assert load_initial(str(tmp_path / "ours")).architecture == source.architecture
    settings = json.loads((tmp_path / "ours" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"  # version 4 has no TokenizersBackend


def words(ids: dict[str, int], added: Sequence[str] = ()) -> GivenTokenizer:
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([*added])
    return GivenTokenizer(name="words", json=tokenizer.to_str(), end_of_text="</s>")


def test_ids_with_gaps_are_kept_as_they_are_and_too_large_ones_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "text"
    folder.mkdir()
    ids = {"?": 0, "</s>": 1, **{f"w{index}": index * 24 for index in range(1, 2_740)}}
    for index in range(60):
        text = " ".join(f"w{1 + (index * 331 + place * 7) % 2_739}" for place in range(60))
        (folder / f"{index}.txt").write_text(text)
    corpus = prepare(str(folder), 65_740, tokenizer=words(ids))
    assert corpus.vocab_size == 2_739 * 24 + 1
    stored = {int(id_) for split in ("train", "validation") for id_ in corpus.tokens(split)}
    assert max(stored) > 1 << 16
    assert stored <= set(ids.values())
    assert ngram_baseline(corpus, seq_len=8, validation_tokens=64).losses[0] > 0
    with pytest.raises(UserError, match=r"has 2741 entries, but the model's vocabulary, .* up to 65736, only 2741"):
        prepare(str(folder), 2_741, tokenizer=words(ids))
    few = {"?": 0, "</s>": 1} | {f"w{index}": 1 + index for index in range(1, 300)}
    beyond = given_encoder(words(few, ["<image>"]), 301, None)  # as in Gemma 3
    assert (beyond.vocab_size, beyond.encode(["w1"])[0].tolist()) == (301, [2, 1])
    with pytest.raises(UserError, match="must be in the 301 tokens of the model, but has '<image>', of id 301"):
        beyond.encode(["w1 <image>"])


@pytest.mark.needs_hf
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_the_end_of_a_text_is_that_of_the_config_if_the_tokenizer_names_none(file: str, checkpoint) -> None:
    folder = checkpoint("llama3", eos_token=None)
    settings = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
    (folder / file).write_text(json.dumps(settings | {"eos_token_id": [2, 3]}))
    given = load_initial(str(folder)).tokenizer
    assert given is not None
    assert given.end_of_text == "</s>"
