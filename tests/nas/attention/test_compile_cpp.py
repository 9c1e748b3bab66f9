import ctypes
import logging
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nas.attention import causal, cpu_native
from nas.attention.cpu_native import NotCompiledError, library
from nas.attention.reference import attention_reference

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
def test_a_library_is_compiled_once_for_its_macros_and_text(tmp_path, cache, monkeypatch):
    assert library(source(tmp_path, 'extern "C" int answer() { return -ANSWER; }'), ANSWER=1).answer() == -1
    assert [library(source(tmp_path), ANSWER=answer).answer() for answer in (1, 2)] == [1, 2]
    assert len(list(cache.iterdir())) == 3
    monkeypatch.setattr(cpu_native, "_compile", lambda *args: pytest.fail("compiled again"))
    assert library(source(tmp_path), ANSWER=2).answer() == 2


@needs_compiler
def test_an_error_of_the_compiler_is_one_line_and_nothing_is_kept(tmp_path, cache):
    with pytest.raises(NotCompiledError, match=r"^.*g\+\+ failed: .*error: .*ANSWR.*$") as raised:
        library(source(tmp_path, 'extern "C" int answer() { return ANSWR; }'), ANSWER=1)
    assert "\n" not in str(raised.value)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("CXX", "no-such-compiler", r"no C\+\+ compiler 'no-such-compiler' is installed"),
        ("CXX", "FILE", "Exec format error"),
        pytest.param("XDG_CACHE_HOME", "FILE", "Not a directory", marks=needs_compiler),
    ],
)
def test_no_compiler_or_cache_to_write_to_is_named(tmp_path, monkeypatch, variable, value, message):
    file = tmp_path / "file"
    file.write_text("nothing")
    file.chmod(0o755)
    monkeypatch.setenv(variable, value.replace("FILE", str(file)))
    with pytest.raises(NotCompiledError, match=message):
        library(source(tmp_path), ANSWER=1)


@needs_compiler
@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is not installed")
def test_the_openmp_that_is_loaded_is_the_one_that_is_used(tmp_path, cache, monkeypatch):
    folder = tmp_path / "a folder" / "torch"
    folder.mkdir(parents=True)
    runtime = folder / "libgomp-renamed.so.1"
    stub = source(tmp_path, 'extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned) {}')
    subprocess.run(["g++", "-shared", "-fPIC", f"-Wl,-soname,{runtime.name}", stub, "-o", runtime], check=True)
    maps = tmp_path / "maps"
    maps.write_text(f"7f0-7f1 r-xp 00000000 08:01 42    {runtime}\n7f2-7f3 r-xp 00000000 08:01 43    /a/libgomp.so.1\n")
    monkeypatch.setattr(cpu_native, "MAPS", maps)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: path)
    text = 'extern "C" void answer(int* all) {\n#pragma omp parallel\n    all[0] = ANSWER;\n}'
    made = library(source(tmp_path, text), ANSWER=1)
    needed = subprocess.run(["readelf", "-d", made], capture_output=True, text=True, check=True).stdout
    assert runtime.name in needed
    assert "libgomp.so.1" not in needed


@needs_compiler
@pytest.mark.parametrize("damage", [b"", b"\x7fELF"])
def test_a_damaged_library_is_compiled_again(tmp_path, cache, damage):
    answer = source(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ctypes, "CDLL", lambda path: path)
        made = Path(library(answer, ANSWER=42))
    made.write_bytes(damage)
    assert library(answer, ANSWER=42).answer() == 42


@needs_compiler
def test_a_folder_that_others_can_write_is_not_trusted(tmp_path, cache):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(NotCompiledError, match="must be writable by its user alone"):
        library(source(tmp_path), ANSWER=1)


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What was found compiled before is not known, and what is found here is not kept."""
    caches = (causal.has_native, cpu_native.compiled)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.usefixtures("forgotten")
def test_attention_without_a_compiler_is_slower_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    parts = torch.randn(3, 1, 2, 5, 8)
    with caplog.at_level(logging.INFO, "nas.attention.causal"):
        fallen_back = [causal.causal_attention(*parts) for _ in range(2)]
    assert [record.levelname for record in caplog.records if "C++" in record.message] == ["WARNING"]
    torch.testing.assert_close(fallen_back[0], attention_reference(*parts))
