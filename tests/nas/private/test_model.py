import json
import math
import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from costmodel.engine.greedy import Agreement
from costmodel.network import load_network
from costmodel.protocols.primitives import EngineSetting
from nas.conversion.parent import BUILTIN_FOLDER
from nas.corpus.documents import GivenTokenizer
from nas.private.fixed_point import Scored, fixed_point_document, lines_below
from nas.private.model import PrivateModel, load_model, with_gelu
from nas.private.prompt import read_prompt
from nas.private.setup import Setup
from nas.run.config import StudyConfig
from nas.run.folder import write_config, write_meta
from search_spaces.bases import base_architecture
from search_spaces.notation import parse


@pytest.fixture(scope="module")
def builtin():
    """Its folding is checked in fixed point, which takes seconds."""
    return load_model("builtin", "knee")


def test_an_export_is_run_as_it_was_folded_or_folded(export, builtin):
    model = load_model(str(export), "knee")
    assert model.architecture.folded
    assert model.weights is not None
    assert set(model.weights) >= {"embed.weight", "logits.weight"}
    assert model.notes == ()
    assert builtin.architecture.folded
    assert not any(name.endswith("norm1.weight") for name in builtin.weights)


def test_gelu_in_another_form_is_said(builtin, export):
    model = with_gelu(builtin, "exact")
    assert (builtin.architecture.gelu, model.architecture.gelu) == ("tanh", "exact")
    assert model.notes[-1] == "GELU is exact here, in the clear too; the model was trained with tanh"
    assert with_gelu(builtin, "tanh").notes == with_gelu(builtin, None).notes == builtin.notes
    with pytest.raises(ValueError, match="--gelu must be of a model with GELU, but SM.* has none; leave it out"):
        with_gelu(load_model(str(export), "knee"), "exact")


def test_a_client_needs_no_weights_and_without_checksums_nothing_is_checked(export, tmp_path):
    folder = shutil.copytree(export, tmp_path / "copy")
    (folder / "checksums.json").unlink()
    assert load_model(str(folder), "knee").notes == (f"{folder} has no checksums.json: not checked",)
    folder = shutil.copytree(export, tmp_path / "other")
    (folder / "weights.safetensors").unlink()
    assert load_model(str(folder), "knee", weights_here=False).weights is None
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json must be as it was written"):
        load_model(str(folder), "knee", weights_here=False)


def test_what_holds_no_model_is_refused(tmp_path, make_meta):
    run, empty = tmp_path / "run", tmp_path / "empty"
    run.mkdir()
    empty.mkdir()
    write_config(run, StudyConfig(budget_latency="5min"))
    write_meta(run, make_meta())
    folder = shutil.copytree(BUILTIN_FOLDER, tmp_path / "copy")
    (folder / "weights.safetensors").unlink()
    for name, pick, here, line in (
        ("x", "knee", True, "be a run, a training, an export, a checkpoint, `latest` or `builtin`, but got 'x'"),
        (empty, "knee", True, "RUN must be the folder of a run"),
        (run, "knee", True, "has no completed candidate within its budget yet"),
        (run, "abc", True, "must be knee, best or the arch_id of a completed trial .on the front: none., but got"),
        (folder, "knee", False, "must be a folded export where it is without weights; write one with --fold"),
    ):
        with pytest.raises(ValueError, match=line):
            load_model(str(name), pick, weights_here=here)


def prompt_of(text, tokenizer, new_tokens=2):
    return read_prompt(text, tokenizer, context=8, new_tokens=new_tokens)


def test_a_prompt_is_some_tokens_of_its_text_and_fits_into_the_context(tokenizer):
    prompt = prompt_of("value", tokenizer)
    assert len(prompt.ids) == 1  # merged
    assert prompt.decoded(list(prompt.ids)) == "value"
    assert prompt.decoded([prompt.encoder.end]) == "<|endoftext|>"
    assert len(prompt_of("abcdef", tokenizer).ids) == 6
    for text, new_tokens, line in (
        ("abcdef", 3, "must fit into the context of 8 tokens, but they are 6 . 3; shorten"),
        ("a", 0, "--new-tokens must be at least 1, but got 0"),
    ):
        with pytest.raises(ValueError, match=line):
            prompt_of(text, tokenizer, new_tokens)


def test_characters_that_the_tokenizer_lacks_are_named(tokenizer):
    assert prompt_of("é", tokenizer).ids  # of two bytes, and this one knows all
    data = json.loads(tokenizer.json)
    data["model"]["vocab"] = {
        piece: index for piece, index in data["model"]["vocab"].items() if piece not in ("q", "z")
    }
    data["model"]["merges"] = []
    poor = GivenTokenizer(name="bpe", json=json.dumps(data), end_of_text=tokenizer.end_of_text)
    with pytest.raises(ValueError, match="must be in what the model's tokenizer knows, but that lacks 'z', 'q'"):
        prompt_of("zzq", poor)


@pytest.fixture
def setup_of(tokenizer: GivenTokenizer):
    """Makes the set-up of an untrained model by its name."""

    def make(name: str) -> Setup:
        architecture = parse(name, base_architecture("tiny")).architecture
        model = PrivateModel(name=name, architecture=architecture, weights=None, tokenizer=tokenizer, corpus=None)
        return Setup(model=model, protocol="semi2k", setting=EngineSetting(), network=load_network("loopback"))

    return make


@pytest.mark.parametrize(("name", "is_said"), [("SM+LN+G", True), ("SM+LN+R", False), ("1xlSlEo-1xlSlGo", True)])
def test_what_the_engine_makes_of_tanh_is_said_where_there_is_one(name, is_said, setup_of):
    lines = lines_below(setup_of(name), {})
    assert [line for line in lines if "--gelu exact" in line] == lines
    assert bool(lines) == is_said
    assert lines_below(replace(setup_of(name), protocol="crypten"), {}) == []  # whose tanh is ours


def test_a_perplexity_that_overflowed_is_null(setup_of):
    agreement = Agreement(num_positions=1, num_equal=0, largest_error=1.0)
    numbers: dict[str, Any] = {"sent_bytes": 1, "seconds": 1.0, "predicted_bytes": 1, "predicted_s": None}
    scored = Scored(perplexity=math.inf, agreement=agreement, **numbers)
    document = fixed_point_document(
        setup_of("SM+LN+R"), math.inf, {EngineSetting(): scored}, np.zeros((1, 9), dtype=np.uint16)
    )
    assert document["clear_perplexity"] is document["arithmetics"][0]["perplexity"] is None
    json.dumps(document, allow_nan=False)
