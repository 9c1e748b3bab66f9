import pytest

from costmodel.config.strict_yaml import dump, load_mapping


def test_what_is_dumped_loads_in_the_same_order(tmp_path):
    data = {"b": 1, "a": [1, 2.5, None, "x"], "c": {"d": True}}
    path = tmp_path / "x.yaml"
    path.write_text(dump(data))
    loaded = load_mapping(path)
    assert loaded == data
    assert list(loaded) == list(data)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: 1\na: 2\n", "key 'a' appears twice, line 2"),
        (b"x: {b: 1, b: 1}\n", "key 'b' appears twice"),
        (b"1: 2\n", "key 1 is not a string"),
        (b"a: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
        (b"a: 2020-99-99\n", r"is not valid YAML: month must be in 1\.\.12"),
        (b"a: [1\n", "is not valid YAML"),
        (b"\x80\x81", "holds binary data"),
        (b"a: \x00", "control characters are not allowed"),
        (b"3\n", "must hold a mapping of keys to values, but holds int"),
        (b"", "but holds NoneType"),
        (b"a: " + b"[" * 5000 + b"]" * 5000, "exceeded maximum nesting depth"),
    ],
)
def test_anything_else_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        load_mapping(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"absent\.yaml cannot be read: No such file"):
        load_mapping(tmp_path / "absent.yaml")
