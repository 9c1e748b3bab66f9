from dataclasses import dataclass
from typing import Literal

import pytest

from costmodel.config.files import decode, dump, load_mapping
from costmodel.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Inner:
    kind: Literal["a", "b"] = "a"


@dataclass(frozen=True, kw_only=True)
class Outer:
    count: int
    share: float = 0.5
    name: str | None = None
    pair: tuple[int, str] = (1, "x")
    inners: tuple[Inner, ...] = ()
    weights: dict[str, float] | None = None
    many: tuple[float, ...] | Literal["none"] = ()

    def __post_init__(self) -> None:
        if self.count < 0:
            raise UserError(f"`count` must be at least 0, but got {self.count}.")


def test_plain_data_becomes_nested_dataclasses():
    data = {"count": 2, "share": 1, "pair": [3, "y"], "inners": [{}, {"kind": "b"}], "weights": {"w": 2}}
    inners = (Inner(), Inner(kind="b"))
    expected = Outer(count=2, share=1.0, pair=(3, "y"), inners=inners, weights={"w": 2.0}, many=(1.0, 2.0))
    assert repr(decode(Outer, data | {"many": [1.0, 2]}, "file")) == repr(expected)
    assert decode(Outer, {"count": 2, "many": "none"}, "file").many == "none"  # what the first type refuses


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "file must be a mapping of keys to values"),
        ({}, "file lacks the key 'count'"),
        ({"count": 1, "size": 1}, "file has the unknown key 'size'; known keys are count, share"),
        ({"count": "1"}, "`count` of file must be of type int, but got '1'"),
        ({"count": True}, "`count` of file must be of type int, but got True"),
        ({"count": 1.0}, "`count` of file must be of type int"),
        ({"count": 1, "share": "1e9"}, "`share` of file must be of type float, but got '1e9'; write 1000000000.0"),
        ({"count": 1, "share": "much"}, "`share` of file must be of type float, but got 'much'.$"),
        ({"count": 1, "name": 3}, "`name` of file must be of type str, but got 3"),
        ({"count": 1, "pair": [1]}, r"`pair` of file must have more items, but got \[1\]"),
        ({"count": 1, "pair": [1, "x", 2]}, "`pair` of file must have at most 2 items"),
        ({"count": 1, "pair": "ab"}, "`pair` of file must be a list"),
        ({"count": 1, "inners": [{"kind": "c"}]}, "`kind` of item 0 of `inners` of file must be one of a, b"),
        ({"count": 1, "weights": [1]}, "`weights` of file must be a mapping"),
        ({"count": 1, "weights": {"w": "x"}}, "`w` of `weights` of file must be of type float, but got 'x'"),
        ({"count": 1, "inners": [{}, 2]}, "item 1 of `inners` of file must be a mapping of keys to values, but got 2"),
        ({"count": 1, "many": [1.0, True]}, "item 1 of `many` of file must be of type float, but got True"),
        ({"count": 1, "many": "x"}, "`many` of file must be a list"),
        ({"count": -1}, "file: `count` must be at least 0, but got -1"),
    ],
)
def test_anything_else_is_refused_with_its_place(data, message):
    with pytest.raises(ValueError, match=message):
        decode(Outer, data, "file")


@dataclass(frozen=True, kw_only=True)
class Versioned:
    schema_version: int = 2
    name: str


def test_another_schema_version_is_named_before_any_other_complaint():
    for data in ({"schema_version": 3, "name": "x", "colour": 1}, {"schema_version": 1}, {"name": "x"}):
        with pytest.raises(ValueError, match="file: `schema_version` must be 2, but got .*; it was written by another"):
            decode(Versioned, data, "file")
    assert decode(Versioned, {"schema_version": 2, "name": "x"}, "file") == Versioned(name="x")
    with pytest.raises(ValueError, match="unknown key 'colour'"):
        decode(Versioned, {"schema_version": 2, "name": "x", "colour": 1}, "file")


def test_what_is_dumped_loads_in_the_same_order_and_a_missing_file_is_named(tmp_path):
    data = {"b": 1, "a": [1, 2.5, None, "x"], "c": {"d": True}}
    path = tmp_path / "x.yaml"
    path.write_text(dump(data))
    loaded = load_mapping(path)
    assert (loaded, list(loaded)) == (data, list(data))
    with pytest.raises(ValueError, match=r"absent\.yaml cannot be read: No such file"):
        load_mapping(tmp_path / "absent.yaml")


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
