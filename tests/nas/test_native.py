"""C++ compiled on first use: kept, shared, and told in a line when it fails."""

import logging
import os
import shutil
from pathlib import Path

import pytest
import torch

from nas import attention, native
from nas.native import NotCompiledError, library

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "cache" / "private-inference-nas" / "native"


def source(folder: Path, text: str = 'extern "C" int answer() { return ANSWER; }') -> Path:
    path = folder / "answer.cpp"
    path.write_text(text)
    return path


@needs_compiler
def test_a_library_is_compiled_once_for_what_it_is_of(tmp_path: Path, cache: Path, monkeypatch) -> None:
    assert library(source(tmp_path), ANSWER=42).answer() == 42
    (kept,) = cache.iterdir()
    monkeypatch.setattr(native, "_compile", lambda *args: pytest.fail("compiled again"))
    assert library(source(tmp_path), ANSWER=42).answer() == 42
    monkeypatch.undo()
    assert kept.exists()


@needs_compiler
def test_another_macro_or_text_is_another_library(tmp_path: Path, cache: Path) -> None:
    assert library(source(tmp_path), ANSWER=1).answer() == 1
    assert library(source(tmp_path), ANSWER=2).answer() == 2
    assert library(source(tmp_path, 'extern "C" int answer() { return -ANSWER; }'), ANSWER=2).answer() == -2
    assert len(list(cache.iterdir())) == 3


@needs_compiler
def test_an_error_of_the_compiler_is_one_line_and_nothing_is_kept(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(NotCompiledError, match=r"^.*g\+\+ failed: .*error: .*ANSWR.*$") as raised:
        library(source(tmp_path, 'extern "C" int answer() { return ANSWR; }'), ANSWER=1)
    assert "\n" not in str(raised.value)
    assert list(cache.iterdir()) == []


def test_no_compiler_is_said_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NotCompiledError, match="no C\\+\\+ compiler 'no-such-compiler' is installed"):
        library(source(tmp_path), ANSWER=1)


@needs_compiler
def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(NotCompiledError, match="cannot be written or loaded"):
        library(source(tmp_path), ANSWER=1)


@needs_compiler
@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="loaded libraries are not told here")
def test_torchs_openmp_is_shared(tmp_path: Path) -> None:
    library(source(tmp_path), ANSWER=1)
    runtimes = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    assert len(runtimes) <= 1


def test_attention_without_a_compiler_is_slower_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    attention.has_native.cache_clear()
    attention.native_attention.compiled.cache_clear()
    parts = torch.randn(3, 1, 2, 5, 8)
    with caplog.at_level(logging.INFO, "nas.attention"):
        fallen_back = [attention.causal_attention(*parts) for _ in range(2)]
    assert [record.levelname for record in caplog.records if "C++" in record.message] == ["WARNING"]
    torch.testing.assert_close(fallen_back[0], attention.attention_reference(*parts))
    attention.has_native.cache_clear()
