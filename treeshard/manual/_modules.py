"""Wraps modules so that their parameters are gathered only while the modules are called.

Modules come from other libraries, so they need neither a base class nor changes. The parameters of
a Linen module exist only inside `init` and `apply`, where Flax's `map_variables` reaches them.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NamedTuple

import jax
from jax.tree_util import (
    all_leaves,
    register_dataclass,
    tree_flatten,
    tree_map,
    tree_structure,
)
from jax.typing import DTypeLike

from treeshard._core.arrays import StaticSplit
from treeshard._core.mesh import axis_tuple
from treeshard._core.paths import is_box
from treeshard._core.spec_trees import SpecTree, specs_of_leaves
from treeshard._planning.plan import Plan
from treeshard._planning.plan_in_force import current_plan
from treeshard.errors import SpecError
from treeshard.manual._boxes import Partitioned, specs_in_boxes, value_in
from treeshard.manual._fsdp import (
    MIN_WEIGHT_SIZE,
    check_is_size,
    gather_params,
    shard_params,
)


def shard_module_params(
    target: Any,
    axis_name: str | Sequence[str],
    min_weight_size: int = MIN_WEIGHT_SIZE,
    *,
    specs: SpecTree = None,
    dtype: DTypeLike | None = None,
    remat: bool = False,
) -> Any:
    """Wraps a module so that its parameters are gathered only while it is called.

    Use the result inside `shard_map`. It calls `shard_params` and `gather_params`, whose
    conditions on the loss and the axes apply here too.

    Args:
        target: The object to wrap:

            - a function `f(params, *args)`: it gathers `params`;
            - an Equinox module, or any callable pytree, with this device's shards: it gathers
              itself;
            - an Equinox class, or another whose instances are callable pytrees: instances keep
              this device's shards when they are made, and gather themselves;
            - a Flax Linen class: it keeps this device's shards in `init`, in Flax's own boxes,
              and gathers in `apply`.
        axis_name: The axis to gather over and to average gradients over, or several.
        min_weight_size: For classes, as in `shard_params`.
        specs: As in `gather_params`. Linen classes have only boxes.
        dtype: As in `gather_params`.
        remat: Whether the backward pass gathers again, instead of keeping the gathered
            parameters (`jax.checkpoint`).

    Returns:
        The same kind of object as `target`: a function, a pytree that is called like the
        module (its attribute `module`), or a class.

    Raises:
        TypeError: If `target` is not one of these, or is a Linen module instead of its class; if
            `min_weight_size` is not a number.
        SpecError: If specs are given for a Linen class, or do not fit the module. When called,
            as `shard_params` and `gather_params`.

    Examples:
        >>> def predict(params, x):
        ...     return x @ params["w"]
        >>> gathered = shard_module_params(predict, "fsdp", specs={"w": P("fsdp")})
        >>> f = jax.shard_map(
        ...     gathered, mesh=make_mesh("fsdp=8"), in_specs=({"w": P("fsdp")}, P("fsdp")),
        ...     out_specs=P("fsdp"),
        ... )
        >>> f({"w": jnp.ones((8, 2))}, jnp.ones((16, 8))).shape
        (16, 2)

    Source:
        The function of this name in the UvA deep-learning tutorials on FSDP.
    """
    check_is_size(min_weight_size, "shard_module_params(target, axis_name, specs={})")
    axes = axis_tuple(axis_name, "shard_module_params")
    how = _How(axes, specs, min_weight_size, dtype, remat)
    linen = sys.modules.get("flax.linen")  # unless imported, `target` is not a Linen class
    is_class = isinstance(target, type)
    if linen is not None and is_class and issubclass(target, linen.Module):
        if specs is not None:
            raise SpecError(
                "shard_module_params: Linen modules carry their specs in boxes. Omit `specs`, and"
                " declare them with `flax.linen.with_partitioning`."
            )
        return _linen_class(linen, target, how)
    if linen is not None and isinstance(target, linen.Module):
        name = type(target).__name__
        raise TypeError(
            f"shard_module_params: Flax wraps classes, not modules. Wrap the class {name}, and"
            f" make the module from the result: `shard_module_params({name}, ...)(...)`."
        )
    if is_class:
        return _class(target, how)
    return _wrap_to_gather(target, how)


class _How(NamedTuple):
    """The options of `shard_module_params`."""

    axes: tuple[str, ...]
    specs: Any  # a tree of specs, a plan, or the specs of all leaves as a tuple
    min_weight_size: int
    dtype: Any
    remat: bool  # gather again in the backward pass
    # Whether `shard_params` made the shards, and put boxes around them.
    is_made: bool = False


def _specs_of_made(params: Any) -> Any:
    """The specs of parameters with boxes around shards; `None` in a step, whose plan has them."""
    return specs_in_boxes(params) if current_plan() is None else None


def _wrap_to_gather(target: Any, how: _How) -> Any:
    """A function, or a callable pytree, that gathers when it is called."""
    if not callable(target):
        raise TypeError(
            f"shard_module_params: {target!r} ({type(target).__name__}) is not callable. Pass a"
            " function of the parameters, a module, or a module's class."
        )
    # A function is a leaf for JAX, and a module is a node with parameters inside.
    if all_leaves([target]):
        return _function(target, how)
    if how.specs is None or isinstance(how.specs, Plan):
        return GatheredModule(target, how)
    # JAX hashes the static parts of a pytree, and a tree of specs may be a dict or a module.
    flat = tuple(specs_of_leaves(how.specs, target, cut=False))
    return GatheredModule(target, how._replace(specs=flat))


def _function(f: Callable[..., Any], how: _How) -> Callable[..., Any]:
    @wraps(f)
    def gathered(params: Any, *args: Any, **kwargs: Any) -> Any:
        leaves, treedef = tree_flatten(params)
        split = StaticSplit(leaves, treedef)

        def call(arrays: list[Any]) -> Any:
            own = split.combine(arrays)
            specs = _specs_of_made(own) if how.is_made else how.specs
            full = gather_params(own, how.axes, specs, dtype=how.dtype)
            return f(full, *args, **kwargs)

        # `jax.checkpoint` takes arrays only.
        return (jax.checkpoint(call) if how.remat else call)(split.dynamic(leaves))

    return gathered


@partial(register_dataclass, data_fields=["module"], meta_fields=["_how"])
@dataclass(eq=False, repr=False)
class GatheredModule:
    """A callable pytree that gathers itself when it is called: see `shard_module_params`.

    Attributes:
        module: The module, with this device's shards of its parameters.
    """

    module: Any
    _how: _How

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        how = self._how
        if isinstance(how.specs, tuple):  # of all leaves, see `_wrap_to_gather`
            specs = tree_structure(self.module).unflatten(how.specs)
            how = how._replace(specs=specs)
        call = _function(lambda module, *a, **k: module(*a, **k), how)
        return call(self.module, *args, **kwargs)

    def __repr__(self) -> str:
        return f"shard_module_params({self.module!r}, {self._how.axes!r})"


def _class(kind: type, how: _How) -> Callable[..., Any]:
    # A function rather than a subclass, because wrappers are not instances of `kind`.
    @wraps(kind, updated=())
    def make(*args: Any, **kwargs: Any) -> Any:
        full = kind(*args, **kwargs)
        shards = shard_params(full, how.axes, how.min_weight_size, specs=how.specs)
        return _wrap_to_gather(shards, how._replace(is_made=how.specs is None))

    return make


def _linen_class(linen: Any, kind: type, how: _How) -> type:
    def gather(params: Any) -> Any:
        gathered = gather_params(params, how.axes, _specs_of_made(params), dtype=how.dtype)
        # Boxes remain around leaves that another axis shards. Linen would constrain their
        # values when it unboxes them, which fails inside `shard_map`.
        return tree_map(lambda x: value_in(x) if is_box(x) else x, gathered, is_leaf=is_box)

    def shard(params: Any) -> Any:
        sharded = shard_params(params, how.axes, how.min_weight_size)
        return tree_map(in_linens_box, sharded, is_leaf=is_box)

    # Linen's own functions, such as `get_partition_spec` of variables, know only Linen's boxes.
    def in_linens_box(leaf: Any) -> Any:
        return linen.Partitioned(leaf.value, leaf.names) if isinstance(leaf, Partitioned) else leaf

    # `mutable` lets the module write its parameters, as it does in `init`.
    mapped = linen.map_variables(
        kind, "params", trans_in_fn=gather, trans_out_fn=shard, mutable=True
    )
    return linen.remat(mapped) if how.remat else mapped
