import os
from pathlib import Path

import pytest

from nas import malloc

MEMORY = {"memory.max": "3000", "memory.current": "2500", "memory.stat": "anon 1\ninactive_file 400"}
OLD_MEMORY = {"memory/memory.limit_in_bytes": "3000", "memory/memory.usage_in_bytes": "2100"}
OLD_CPU = {"cpu,cpuacct/cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("groups", "files", "free", "cores"),
    [
        ("0::/", MEMORY, 900, None),
        ("0::/", {"cpu.max": "100000 100000"}, None, 1),
        ("0::/", {"cpu.max": "50000 100000"}, None, 1),
        ("0::/", {"cpu.max": "max 100000", "memory.max": "max", "memory.current": "5"}, None, None),
        ("0::/a/b", {f"a/{name}": text for name, text in MEMORY.items()} | {"a/b/memory.max": "max"}, 900, None),
        ("4:memory:/x\n3:cpu,cpuacct:/x", OLD_MEMORY, 900, None),
        ("3:cpu,cpuacct:/", OLD_CPU | {"cpu,cpuacct/cpu.cfs_quota_us": "100000"}, None, 1),
        ("3:cpu,cpuacct:/", OLD_CPU | {"cpu,cpuacct/cpu.cfs_quota_us": "-1"}, None, None),
        ("", {}, None, None),
    ],
)
def test_a_container_limits_memory_and_cores(tmp_path: Path, monkeypatch, groups, files, free, cores) -> None:
    """None: as the machine has."""
    monkeypatch.setattr(malloc, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(malloc, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(malloc, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    (tmp_path / "meminfo").write_text("MemAvailable: 7 kB\n")
    (tmp_path / "own").write_text(groups)
    for name, text in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(text)
    assert malloc.free_bytes() == (free or 7 * 1024)
    assert malloc.num_cores() == (cores or 8)
