from importlib import metadata

from nas import provenance


def test_a_source_folder_that_was_never_installed_has_versions(monkeypatch):
    def version(name: str) -> str:
        if name == "private-inference-nas":
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(provenance, "version", version)
    assert provenance.versions() | {"python": ""} == {
        "private-inference-nas": "not installed",
        **dict.fromkeys(("torch", "ray", "tokenizers", "numpy"), "1.0"),
        "python": "",
    }
