"""EasyDeL's decorator that makes a class a dataclass and a pytree."""

import dataclasses
import types
import typing
from collections.abc import Callable, Collection
from typing import Any, TypeVar, dataclass_transform, overload

from jax.tree_util import register_dataclass

_T = TypeVar("_T")


@overload
def auto_pytree(cls: type[_T], /) -> type[_T]: ...
@overload
def auto_pytree(
    *, meta_fields: Collection[str] = (), frozen: bool = False, max_print_length: int = 500
) -> Callable[[type[_T]], type[_T]]: ...
@dataclass_transform()
def auto_pytree(
    cls: type[Any] | None = None,
    meta_fields: Collection[str] = (),
    frozen: bool = False,
    max_print_length: int = 500,
) -> Any:
    """Makes a class a dataclass that is a pytree, and gives it a method `replace(**changes)`.

    A field is static, that is, a part of the tree's structure, if it is in `meta_fields`, if it is
    declared by `field(metadata={"pytree_node": False})`, or if its type is or may be `str`,
    `bytes`, a class or a function. All other fields are nodes. With `"pytree_node": True`, a
    field of any type is a node.

    Args:
        cls: The class. With other arguments, the result is the decorator.
        meta_fields: The names of further static fields.
        frozen: Whether attributes of instances are read-only.
        max_print_length: `repr` shows only the type of a field that has more characters.

    Raises:
        TypeError: If `meta_fields` has a name that is not a field.

    Examples:
        >>> @auto_pytree
        ... class Cache:
        ...     keys: jax.Array
        ...     layout: str = "bhd"
        >>> cache = Cache(jnp.zeros(4))
        >>> jax.tree.leaves(cache.replace(keys=1)), cache.layout
        ([1], 'bhd')

    Source:
        `eformer.pytree.auto_pytree`, without its methods for JSON.
    """

    def make(cls: type[Any]) -> type[Any]:
        return _make(cls, meta_fields, frozen, max_print_length)

    return make if cls is None else make(cls)


def _make(
    cls: type[Any], meta_fields: Collection[str], frozen: bool, max_print_length: int
) -> type[Any]:
    made: Any = dataclasses.dataclass(frozen=frozen, repr=False)(cls)
    fields = {field.name: field for field in dataclasses.fields(made) if field.init}
    if unknown := [name for name in meta_fields if name not in fields]:
        raise TypeError(
            f"auto_pytree: meta_fields={unknown} are no fields of {cls.__name__}, which has"
            f" {', '.join(fields)}."
        )
    hints = typing.get_type_hints(made)
    is_node: dict[str, bool] = {}
    for name, field in fields.items():
        by_type = name not in meta_fields and _may_be_node(hints[name])
        is_node[name] = field.metadata.get("pytree_node", by_type)
    made.replace = dataclasses.replace
    if "__repr__" not in vars(cls):
        made.__repr__ = _make_repr(list(fields), max_print_length)
    return register_dataclass(
        made,
        data_fields=[name for name in fields if is_node[name]],
        meta_fields=[name for name in fields if not is_node[name]],
    )


def _may_be_node(hint: Any) -> bool:
    """Whether values of a type can be parts of a tree."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return all(map(_may_be_node, typing.get_args(hint)))
    kind = typing.get_origin(hint) or hint
    static = (str, bytes, type, types.FunctionType, types.MethodType)
    return not (isinstance(kind, type) and issubclass(kind, static)) and kind is not Callable


def _make_repr(names: list[str], max_print_length: int) -> Callable[[Any], str]:
    def show(value: Any) -> str:
        text = repr(value)
        return text if len(text) <= max_print_length else f"{type(value).__name__}(...)"

    def __repr__(self: Any) -> str:
        fields = [f"{name}={show(getattr(self, name))}" for name in names]
        return f"{type(self).__name__}({', '.join(fields)})"

    return __repr__
