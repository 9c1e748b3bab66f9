from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import costmodel.__main__ as main
from costmodel.engine import spu
from costmodel.engine.compare import predict
from costmodel.ops import OpGraph
from costmodel.protocols.primitives import EngineSetting
from costmodel.protocols.published import PublishedRow, published_rows
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse

CHEETAH_TOLERANCE = 1e-3  # compressed ciphertexts vary in size


@pytest.fixture
def run(capsys, tmp_path, monkeypatch) -> Callable[..., tuple[Any, str, str]]:
    """`code, stdout, stderr` of a command line, run in an empty folder that has to stay so on bad input."""
    monkeypatch.chdir(tmp_path)

    def run_command(*args: str) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as exit_info:
            main.main(args)
        return exit_info.value.code, *capsys.readouterr()

    return run_command


def refused(result: tuple[Any, str, str], expected: int = 2) -> str:
    """The one line on stderr of bad input, from what `run` returned."""
    code, out, err = result
    assert (code, out, err.count("\n")) == (expected, "", 1)
    assert err.startswith("error: ")
    return err


@pytest.fixture(scope="session")
def graph_of() -> Callable[..., OpGraph]:
    """`graph_of("SM+LN+G", seq_len=256, layers=18)`: the op graph of a name on GPT-2 small."""

    def graph(name: str, seq_len: int = 128, base: str = "gpt2-small", **dimensions: Any) -> OpGraph:
        return lower(parse(name, base_architecture(base, Dimensions(**dimensions))).architecture, seq_len)

    return graph


@pytest.fixture(scope="session")
def rows() -> tuple[PublishedRow, ...]:
    return published_rows()


@pytest.fixture(scope="session")
def row_graphs(rows: tuple[PublishedRow, ...], graph_of: Callable[..., OpGraph]) -> dict[str, OpGraph]:
    return {row.name: graph_of(row.notation, row.seq_len, layers=row.num_layers) for row in rows}


@pytest.fixture(scope="session")
def engine_logits() -> Callable[..., np.ndarray]:
    """The logits of a graph under the engine, which must send what is predicted: to the byte, or nearly for cheetah."""

    def logits(
        graph: OpGraph,
        weights: Mapping[str, np.ndarray],
        tokens: np.ndarray,
        caches: Mapping[str, np.ndarray] | None = None,
        *,
        protocol: str,
    ) -> np.ndarray:
        done = spu.run(graph, weights, tokens, caches, protocol=protocol, setting=EngineSetting())
        predicted = predict(graph, protocol, EngineSetting())
        assert [cost.messages for cost in done.by_op] == [comm.messages for comm in predicted]
        sent = [cost.sent_bytes for cost in done.by_op]
        expected = [comm.online_bytes + comm.setup_bytes for comm in predicted]
        if protocol == "cheetah":
            assert abs(sum(expected) / sum(sent) - 1) < CHEETAH_TOLERANCE
        else:
            assert sent == expected
        return done.logits

    return logits
