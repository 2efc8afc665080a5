"""Splits a tree into arrays, which a compiled step takes, and static leaves, which it contains."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.tree_util import DictKey, register_pytree_with_keys

from treeshard._errors import StateError, listed
from treeshard._paths import leaf_paths
from treeshard._specs import array_text, has_shape


class Layout:
    """Which leaves of a tree are traced; all others are static, a part of the program."""

    def __init__(self, leaves: list[Any], treedef: Any, traced: Callable[[Any], bool]) -> None:
        self.treedef = treedef
        self.paths = leaf_paths(treedef.unflatten(leaves))
        self.traced = [i for i, x in enumerate(leaves) if traced(x)]
        self.static = {i: x for i, x in enumerate(leaves) if not traced(x)}
        self._blank = [self.static.get(i) for i in range(len(leaves))]

    def fits(self, leaves: list[Any], treedef: Any) -> bool:
        return treedef == self.treedef and all(_same(leaves[i], x) for i, x in self.static.items())

    def arrays(self, leaves: list[Any]) -> list[Any]:
        return [leaves[i] for i in self.traced] if self.static else leaves

    def tree(self, arrays: list[Any]) -> Any:
        if not self.static:
            return self.treedef.unflatten(arrays)
        leaves = self._blank.copy()
        for i, x in zip(self.traced, arrays, strict=True):
            leaves[i] = x
        return self.treedef.unflatten(leaves)

    def check_kept(self, new: list[Any], treedef: Any) -> None:
        """Raises `StateError` if a step changed the structure, or a static leaf."""
        if treedef != self.treedef:
            raise self._other_structure(new, treedef)
        facts = [
            f"{self.paths[i]}: the step turns {named(old)} into {named(new[i])}. A leaf that is"
            f" not an array is a constant of the compiled program. {_fix(old)}"
            for i, old in self.static.items()
            if not _same(new[i], old)
        ]
        if facts:
            raise StateError(listed(f"{len(facts)} leaves change that are not arrays:", facts))

    def _other_structure(self, new: list[Any], treedef: Any) -> StateError:
        paths = leaf_paths(treedef.unflatten(new))
        facts = only_in(self.paths, paths, "the returned state lacks it.")
        facts += only_in(paths, self.paths, "the step adds it to the state.")
        facts = facts or ["the step changes a container of the state, or a static field in one."]
        headline = "The step changes the structure of its state:"
        return StateError(listed(headline, facts, headed=True))


class Names:
    """The names of the arrays in a `Named`. It compares by identity, which is fast."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = keys


class Named:
    """A list of arrays with names, which appear in the compiled program.

    A dict has them too, but JAX sorts its keys at every call.
    """

    def __init__(self, arrays: Sequence[Any], names: Names) -> None:
        self.arrays, self.names = arrays, names


def _with_keys(x: Named) -> tuple[list[Any], Names]:
    return [(DictKey(k), a) for k, a in zip(x.names.keys, x.arrays, strict=True)], x.names


register_pytree_with_keys(
    Named,
    _with_keys,
    lambda names, arrays: Named(list(arrays), names),
    lambda x: (x.arrays, x.names),
)


def only_in(paths: list[str], others: list[str], fact: str) -> list[str]:
    known = set(others)
    return [f"{path}: {fact}" for path in paths if path not in known]


def is_data(x: Any) -> bool:
    return has_shape(x) or isinstance(x, bool | int | float | complex)


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and bool(a == b))


def named(x: Any) -> str:
    return array_text(x) if has_shape(x) else f"the {type(x).__name__} {x!r}"


def _fix(old: Any) -> str:
    makers = {bool: "jnp.bool_", int: "jnp.int32", float: "jnp.float32"}
    if maker := makers.get(type(old)):
        return f"Start it as an array: `{maker}({old!r})`."
    return "Keep it out of the state, or leave it unchanged."
