import os

import pytest

from costmodel.errors import UserError
from nas.study.ray_home import require_home


def test_the_cache_stands_in_for_a_home_that_cannot_be_written_to(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    require_home()
    assert os.environ["HOME"] == str(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    require_home()
    assert os.environ["HOME"] == str(tmp_path / "cache" / "private-inference-nas")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.delenv("XDG_CACHE_HOME")
    with pytest.raises(UserError, match="name one .* in the environment variable XDG_CACHE_HOME"):
        require_home()
