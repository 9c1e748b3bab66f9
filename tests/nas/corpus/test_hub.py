"""The hub: one line for what cannot be had, and streams that go on where they were."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyarrow import parquet

from nas.corpus.documents import Document
from nas.corpus.hub import Repository, hub_stream, reach
from nas.corpus.sources import PAPER_CORPORA, open_source


class Rows:
    """A dataset that goes away after one row."""

    def __iter__(self) -> Iterator[dict]:
        yield {"text": "abc"}
        raise ConnectionError("gone\nfor good")

    def state_dict(self) -> dict:
        return {}


def test_the_extra_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs the extra `hf`; install it with pip install -e '\.\[hf\]', or put"):
        open_source("codeparrot")


@pytest.mark.needs_hf
def test_a_hub_out_of_reach_is_one_line_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Api:
        def repo_info(self, name: str, repo_type: str) -> SimpleNamespace:
            raise ConnectionError("no\nroute")

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    wanted = rf"{PAPER_CORPORA['codeparrot'].hub.validation} of the .* \(ConnectionError\).* give codeparrot:FOLDER"
    with pytest.raises(ValueError, match=wanted) as error:
        open_source("codeparrot")
    assert "\n" not in str(error.value)


@pytest.mark.needs_hf
def test_a_repository_is_pinned_to_its_present_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    api = SimpleNamespace(repo_info=lambda name, repo_type: SimpleNamespace(sha=f"{repo_type}-1"))
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: api)
    assert reach("some/data", "dataset", "") == Repository("some/data", "dataset-1", "")


def test_a_hub_that_goes_away_while_it_is_read_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nas.corpus.hub._load", lambda repository: Rows())
    monkeypatch.setattr("nas.corpus.documents.BATCH_DOCUMENTS", 1)
    batches = hub_stream(Repository("some/data", "1", "wait"), "text", "train").batches(None)
    assert next(batches).documents == [Document("train", "abc")]
    with pytest.raises(ValueError, match=r"some/data .* cannot be read \(ConnectionError\).*, or wait") as error:
        next(batches)
    assert "\n" not in str(error.value)


@pytest.mark.needs_hf
def test_a_stream_goes_on_at_its_position(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("nas.corpus.documents.BATCH_DOCUMENTS", 7)
    for index in range(3):
        rows = [f"row {index} {place}" for place in range(25)]
        parquet.write_table(pa.table({"text": rows}), tmp_path / f"part-{index}.parquet", row_group_size=10)
    stream = hub_stream(Repository(str(tmp_path), "local", ""), "text", "train")
    batches = list(stream.batches(None))
    assert [document.text for batch in batches for document in batch.documents][:30:24] == ["row 0 0", "row 0 24"]
    assert sum(len(batch.documents) for batch in batches) == 75
    for index in (0, 3, 6, 10):
        position = json.loads(json.dumps(batches[index].position))
        rest = [batch.documents for batch in stream.batches(position)]
        assert rest == [batch.documents for batch in batches[index + 1 :]]
