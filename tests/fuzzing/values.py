"""Values that nobody expects, and damage to text and JSON."""

import json
from random import Random
from typing import Any

NESTED: Any = [[[[[[[[]]]]]]]]
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 0.5, 1e308, -1e308, 10**400, float("nan"), float("inf"), -float("inf"), 10**30),
    *("", " ", "x", "0", "1", "nan", "1e999", "[bold]x[/bold]", "é\u202e\x00\x1b[31m", "a" * 5000, "${nope}", "\\"),
    *("../..", [], [1], ["x"], [None], {}, {"a": 1}, {"": None}, NESTED, "2026-01-01T00:00:00+00:00", "complete"),
    "\ud800",
)  # fmt: skip
TEXTS = (
    *("", "\n", "null", "[]", "{}", "0", '"x"', "{", "[" * 5000, '{"a":' * 3000, "NaN", "1e999", "1" * 5000, "\x00"),
    *("a: &a [*a]\n", "a: &a {b: *a}\n", "a: !!python/object:os.system x\n", "- a\nb: c\n", "\t", "a: ${b}\nb: ${a}\n"),
)
BYTES = (b"\xff\xfe\x00\x80", b"PK\x03\x04", b"\x80\x04\x95", b"\xed\xa0\x80", b"\r\r\n\x00" * 9)


def odd(rng: Random) -> Any:
    """A value of JSON, and sometimes a list or an object of such."""
    way = rng.random()
    if way < 0.05:
        return [odd(rng) for _ in range(rng.randrange(4))]
    if way < 0.1:
        return {str(rng.choice(("a", "step", "data", ""))): odd(rng) for _ in range(rng.randrange(3))}
    return rng.choice(ODD)


def changed(rng: Random, tree: Any) -> Any:
    """The tree of JSON with one node that is replaced, removed, doubled or renamed."""
    if not isinstance(tree, dict | list) or not tree or rng.random() < 0.25:
        return odd(rng)
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    key = rng.choice(keys)
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    way = rng.random()
    if way < 0.7:
        copy[key] = changed(rng, tree[key])
    elif way < 0.85:
        del copy[key]
    elif isinstance(copy, dict):
        copy[rng.choice(("", "x", "step", str(key) * 2))] = copy.pop(key)
    else:
        copy.insert(key, copy[key])
    return copy


def torn(rng: Random, content: bytes) -> bytes:
    """The content cut off, with bytes changed, added or doubled, or other content."""
    way = rng.randrange(6)
    place = rng.randrange(len(content) + 1)
    if way == 0:
        return content[:place]
    if way == 1:
        return content[:place] + bytes(rng.randrange(256) for _ in range(rng.randrange(1, 6))) + content[place + 3 :]
    if way == 2:
        return content[:place] + rng.choice(BYTES) + content[place:]
    if way == 3:
        return content + content[place:]
    return rng.choice(TEXTS).encode() if way == 4 else rng.choice(BYTES)


def as_json(value: Any) -> bytes:
    """JSON as Python writes it, so that NaN, infinity and numbers without end stay; half a character is escaped."""
    return json.dumps(value).encode()
