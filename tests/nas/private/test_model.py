"""Which model is run, and what is said where there is none."""

import shutil

import pytest

from nas.conversion.parent import BUILTIN_FOLDER
from nas.private.model import load_model, with_gelu
from nas.run.config import StudyConfig
from nas.run.folder import write_config, write_meta


def test_an_export_is_run_as_it_was_folded(export):
    model = load_model(str(export), "knee")
    assert model.architecture.folded
    assert model.weights is not None
    assert set(model.weights) >= {"embed.weight", "logits.weight"}
    assert model.notes == ()


@pytest.fixture(scope="module")
def builtin():
    """Its folding is checked in fixed point, which takes seconds."""
    return load_model("builtin", "knee")


def test_an_export_that_is_not_folded_is_folded(builtin):
    assert builtin.architecture.folded
    assert not any(name.endswith("norm1.weight") for name in builtin.weights)


def test_gelu_in_another_form_is_said(builtin, export):
    model = with_gelu(builtin, "exact")
    assert (builtin.architecture.gelu, model.architecture.gelu) == ("tanh", "exact")
    assert model.notes[-1] == "GELU is exact here, in the clear too; the model was trained with tanh"
    assert with_gelu(builtin, "tanh").notes == with_gelu(builtin, None).notes == builtin.notes
    with pytest.raises(ValueError, match="--gelu must be of a model with GELU, but SM.* has none; leave it out"):
        with_gelu(load_model(str(export), "knee"), "exact")


def test_without_checksums_it_is_said_that_nothing_was_checked(export, tmp_path):
    folder = shutil.copytree(export, tmp_path / "copy")
    (folder / "checksums.json").unlink()
    assert load_model(str(folder), "knee").notes == (f"{folder} has no checksums.json: not checked",)


def test_a_client_needs_no_weights(export, tmp_path):
    folder = shutil.copytree(export, tmp_path / "copy")
    (folder / "weights.safetensors").unlink()
    assert load_model(str(folder), "knee", weights_here=False).weights is None
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json must be as it was written"):
        load_model(str(folder), "knee", weights_here=False)


def test_without_weights_nothing_can_be_folded(tmp_path):
    folder = shutil.copytree(BUILTIN_FOLDER, tmp_path / "copy")
    (folder / "weights.safetensors").unlink()
    with pytest.raises(ValueError, match="must be a folded export where it is without weights; write one with --fold"):
        load_model(str(folder), "knee", weights_here=False)


@pytest.mark.parametrize(
    ("pick", "line"),
    [
        ("knee", "has no completed candidate within its budget yet"),
        ("abc", "--pick must be knee, best or the arch_id of a completed trial .on the front: none., but got 'abc'"),
    ],
)
def test_a_run_without_a_completed_trial_has_nothing_to_run(tmp_path, make_meta, pick, line):
    write_config(tmp_path, StudyConfig(budget_latency="5min"))
    write_meta(tmp_path, make_meta())
    with pytest.raises(ValueError, match=line):
        load_model(str(tmp_path), pick)


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="RUN must be a run, a training, an export, a checkpoint, `latest` or `builtin`, but got 'x'"
    ):
        load_model("x", "knee")
    with pytest.raises(ValueError, match="RUN must be the folder of a run"):
        load_model(str(tmp_path), "knee")
