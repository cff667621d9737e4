"""Each leaf of JSON values changed, one at a time."""

from __future__ import annotations

import copy
import json

from dpfunc._utils.validation import signed


def others(value):
    """Other values of a leaf: larger and smaller numbers, another truth, longer and other words."""
    if value is None:
        return [1.5]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, max(0, value - 1)] if value else [1]
    if isinstance(value, float):
        return [value * 1.1, value * 0.9] if value else [0.5]
    if len(value) >= 16 and not set(value) - set("0123456789abcdef"):
        return [f"{value}x", "", value[:-1] + ("0" if value[-1] != "0" else "1")]
    return [f"{value}x", ""]


def leaves(values, path=()):
    """(path, leaf) of all values that are neither lists nor objects."""
    if isinstance(values, (dict, list)):
        for name, inner in values.items() if isinstance(values, dict) else enumerate(values):
            yield from leaves(inner, (*path, name))
    else:
        yield path, values


def at(values, path):
    for name in path:
        values = values[name]
    return values


def with_leaf(values, path, value):
    changed = copy.deepcopy(values)
    at(changed, path[:-1])[path[-1]] = value
    return changed


def altered(values):
    """(name, values) with one leaf changed."""
    for path, leaf in leaves(values):
        for other in others(leaf):
            if type(other) is not type(leaf) or other != leaf:
                yield f"{'.'.join(map(str, path))}={other!r}", path, with_leaf(values, path, other)


def reshaped(values, path=()):
    """(name, values) with a name or an element more, fewer, or elsewhere, in one object or list."""
    inner = at(values, path)
    where = ".".join(map(str, path)) or "all"
    if isinstance(inner, dict):
        yield f"{where} with a name more", with_inner(values, path, {**inner, "comment": "fine"})
        for name in inner:
            fewer = {other: value for other, value in inner.items() if other != name}
            yield f"{where} without {name}", with_inner(values, path, fewer)
            yield from reshaped(values, (*path, name))
    elif isinstance(inner, list):
        yield f"{where} as an object", with_inner(values, path, dict(enumerate(inner)))
        if inner:
            yield f"{where} twice the first", with_inner(values, path, [inner[0], *inner])
            yield f"{where} twice the last", with_inner(values, path, [*inner, inner[-1]])
            yield f"{where} without the first", with_inner(values, path, inner[1:])
            yield f"{where} without the last", with_inner(values, path, inner[:-1])
        if inner[::-1] != inner:
            yield f"{where} backwards", with_inner(values, path, inner[::-1])
        for number, _ in enumerate(inner):
            yield from reshaped(values, (*path, number))


def with_inner(values, path, inner):
    return with_leaf(values, path, inner) if path else inner


def resigned(values):
    """The values with fitting digests, of the whole and of each ledger in it."""

    def again(inner):
        if isinstance(inner, dict):
            inner = {name: again(value) for name, value in inner.items()}
            return signed(inner) if "digest" in inner else inner
        return [again(value) for value in inner] if isinstance(inner, list) else inner

    return json.dumps(again(values))
