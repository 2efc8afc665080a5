"""EasyDeL's decorator for classes that are trees."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError, field
from typing import Any, Optional

import jax
import jax.numpy as jnp
import pytest

import treeshard as ts


@ts.auto_pytree(meta_fields=("depth",), max_print_length=20)
class Cache:
    keys: jax.Array
    depth: int
    layout: str = "bhd"
    name: str | None = None
    alias: Optional[str] = None  # noqa: UP045  (both forms are met)
    act: Callable[[Any], Any] = jax.nn.relu
    length: int = field(default=3, metadata={"pytree_node": False})
    label: Any = field(default="x", metadata={"pytree_node": True})
    index: int = 7

    def double(self) -> "Cache":
        return self.replace(index=2 * self.index)


def test_fields_are_nodes_unless_their_type_or_a_name_says_otherwise() -> None:
    cache = Cache(jnp.ones(4), depth=2, name="static", alias="static")
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(cache)]
    assert paths == [".keys", ".label", ".index"]
    assert cache.double().index == 14
    assert cache.index == 7


def test_instances_go_through_jit() -> None:
    compiled = jax.jit(lambda cache: cache.replace(keys=cache.keys * cache.depth))
    cache = Cache(jnp.ones(4), depth=2, label=1)
    assert compiled(cache).keys.sum() == 8
    assert compiled(cache.replace(depth=3)).keys.sum() == 12


def test_repr_shortens_long_fields() -> None:
    text = repr(Cache(jnp.ones(400), depth=2))
    assert text.startswith("Cache(keys=ArrayImpl(...), depth=2, layout='bhd'")


def test_bare_and_frozen() -> None:
    @ts.auto_pytree
    class Bare:
        x: jax.Array

    @ts.auto_pytree(frozen=True)
    class Frozen:
        x: int

        def __repr__(self) -> str:
            return "own"

    bare = Bare(jnp.ones(2))
    bare.x = jnp.zeros(2)
    assert jax.tree.map(lambda x: x + 1, bare).x.sum() == 2
    with pytest.raises(FrozenInstanceError):
        Frozen(1).x = 2
    assert repr(Frozen(1)) == "own"
    assert hash(Frozen(1)) == hash(Frozen(1))


def test_fields_that_do_not_exist_are_an_error() -> None:
    with pytest.raises(TypeError, match=r"meta_fields=\['dept'\] are no fields of Config"):

        @ts.auto_pytree(meta_fields=("dept",))
        class Config:
            depth: int
