"""The parts of JAX that are private, or that differ between the versions that treeshard supports.

Each function says why it is needed, what happens without it, which JAX versions it is for, and
when it can go. No other module imports from `jax._src` or asks which attributes JAX has. "All"
are 0.10.2 to 0.12.0, where the tests ran.
"""

import importlib
import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh

F = TypeVar("F", bound=Callable[..., Any])


@cache  # `import_module` takes longer than most functions that are called here
def _module(name: str) -> Any:
    """`jax._src.<name>`; `None` if this version of JAX does not have it."""
    try:
        return importlib.import_module(f"jax._src.{name}")
    except ImportError:
        return None


def _private(module: str, name: str) -> Any:
    """`jax._src.<module>.<name>`; `None` if this version of JAX does not have it."""
    return getattr(_module(module), name, None)


def _result(module: str, name: str) -> Any:
    """The result of that function without arguments; `None` if it does not exist."""
    function = _private(module, name)
    return None if function is None else function()


# ------------------------------------------------------------------ contexts


def mesh_of_with_statement() -> Mesh | None:
    """The mesh of `with mesh:`.

    Why: the public name, `jax.interpreters.pxla.thread_resources`, warns that it is deprecated.
    Without it: `None`. When JAX removes both, `with mesh:` is gone too.
    Versions: all. It can go with `with mesh:`, which JAX deprecated in 0.10.1.
    """
    resources = _private("mesh", "thread_resources")
    mesh = None if resources is None else resources.env.physical_mesh
    return None if mesh is None or mesh.empty else mesh


def mesh_of_set_mesh(abstract: AbstractMesh) -> Mesh | AbstractMesh:
    """The mesh with devices that `jax.set_mesh` set, if its abstract mesh is `abstract`.

    Why: `jax.sharding.get_mesh` raises inside traces.
    Without it: `abstract`. Under `use_abstract_mesh` and `shard_map` it is `abstract` too, since
    the mesh with devices belongs to an outer context or is empty.
    Versions: all. It can go when a public function works inside traces: `jax.get_mesh` of JAX 0.11
    and 0.12 raises too.
    """
    concrete = _result("mesh", "get_concrete_mesh")
    return concrete if concrete is not None and concrete.abstract_mesh == abstract else abstract


def mesh_set_outside() -> Mesh | None:
    """The mesh with devices that `jax.set_mesh` set, also inside `shard_map`.

    Why: as for `mesh_of_set_mesh`; inside `shard_map` the abstract mesh has other types.
    Without it: `None`; gathers by hand in a `shard_map` without a plan then are not split by the
    dims of a torus.
    Versions: all. It can go with `mesh_of_set_mesh`.
    """
    return _result("mesh", "get_concrete_mesh")


def is_tracing() -> bool:
    """Whether this thread is inside a JAX trace.

    Why: no function reports it, but `jax.sharding.get_mesh` raises inside any trace.
    Without it: `False`, if JAX stops raising; the tests of contexts would then fail.
    Versions: all. It can go when JAX has a public function for it.
    """
    try:
        jax.sharding.get_mesh()
    except ValueError:
        return True
    return False


def is_in_jit() -> bool:
    """Whether code is staged for a program, rather than executed operation by operation.

    Why: all functions for it have deprecated or "do not use" names.
    Without it: `False`; `with_sharding_constraint` then loses the axes of `spmd_axis_name` on a
    mesh with Explicit and Auto axes, under jit.
    Versions: 0.11 and 0.12, which lose them. It can go when JAX no longer does: the tests of
    `vmap(spmd_axis_name=...)` compare with `jax.lax.with_sharding_constraint`.
    """
    return bool(_result("core", "unsafe_am_i_under_a_jit"))


def vmapped_axes() -> frozenset[str]:
    """The axes that the mapped dim of an enclosing `vmap` is sharded over.

    These are the axes of its `spmd_axis_name`, and the Explicit axes that the mapped dim is
    sharded over. Specs inside the `vmap` must not name them.

    Why: no public function returns them.
    Without it: no axes; JAX then rejects such specs itself.
    Versions: all. It can go when types of traced values name these axes.
    """
    axes = _result("core", "get_axis_env")
    return frozenset(getattr(axes, "spmd_axis_names", ())) | frozenset(
        getattr(axes, "explicit_mesh_axis_names", ())
    )


def primal_of(x: Any) -> Any:
    """The array that is differentiated, from the tracer that a function gets for it, or `None`.

    Why: no public function shows which argument of a differentiated function a tracer is.
    Without it: `None`; inside a loss, the specs of a leaf are found by structure and shape alone.
    Versions: all. It can go when JAX has a public function for it.
    """
    return getattr(x, "primal", None) if isinstance(x, Tracer) else None


# ------------------------------------------------------------------ the runtime


def has_started_backends() -> bool:
    """Whether JAX has started a backend, and so knows its devices.

    Why: every public function that lists devices starts a backend.
    Without it: `False`; `jax.config` then raises itself if a setting comes too late.
    Versions: all. It can go when JAX has a public function for it.
    """
    return bool(_result("xla_bridge", "backends_are_initialized"))


def coordination_client() -> Any:
    """The client of the coordination service of `jax.distributed`; `None` if not connected.

    Why: `jax.experimental.multihost_utils` runs programs on devices, without a timeout.
    Without it: `None`, as without `jax.distributed.initialize`.
    Versions: all. It can go when JAX has public barriers with timeouts that name absent processes.
    """
    return getattr(_private("distributed", "global_state"), "client", None)


# ------------------------------------------------------------------ attributes by version


def drop_unused(jaxpr: Any) -> Any:
    """A program without the equations whose results are unused. It keeps all arguments.

    Why: a trace has gradients that the update drops, and no public function removes them.
    Without it: the full trace, in which these gradients count.
    Versions: all. It can go when JAX has a public function for it.
    """
    remove = _private("interpreters.partial_eval", "dce_jaxpr")
    if remove is None:
        return jaxpr
    return remove(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def argument_names(program: jax.stages.Compiled) -> list[str] | None:
    """JAX's name of each argument, such as `state['w']`, also of dropped arguments.

    Why: the text of a program has only the names of used arguments.
    Without it: `None`; dropped arguments are then named by their positions.
    Versions: all. It can go when `args_info` has names.
    """
    info = getattr(getattr(program, "_executable", None), "_all_args_info", None)
    names = getattr(getattr(info, "debug_info", None), "arg_names", None)
    if not names:
        return None
    # Constants that JAX passes as arguments come first.
    return list(names[len(names) - program.in_tree.num_leaves :])


def varying_axes(x: Any) -> frozenset[str]:
    """The Manual axes along which devices may have different values of `x`, by its type.

    Why: the attribute of the type was renamed before 0.10 and is not documented.
    Without it: it raises. If the set were wrongly empty, gradients would be too large by a
    factor of the number of devices.
    Versions: all. It can go when JAX documents the attribute.
    """
    return varying_axes_of_type(jax.typeof(x))


def varying_axes_of_type(type_: Any) -> frozenset[str]:
    """The same for a result of `jax.typeof`."""
    return frozenset(type_.manual_axis_type.varying)


# ------------------------------------------------------------------ errors of JAX


def show_as(fn: F, shown: Any) -> F:
    """Makes errors of JAX about `fn` show the name and the line of another function.

    Why: "The error occurred while tracing the function ... at ..." is about the user's function.
    Without it: the name and line of a function inside treeshard, which calls the user's.
    Versions: all. JAX looks for the function that another one wraps.
    """
    # The arguments keep the names of `fn`, which programs show.
    signature = inspect.signature(fn)
    while isinstance(shown, partial) or hasattr(shown, "__wrapped__"):
        shown = shown.func if isinstance(shown, partial) else shown.__wrapped__
    # A callable object has its code in its class.
    has_code = hasattr(shown, "__code__")
    named: Any = fn
    named.__wrapped__ = shown if has_code else type(shown).__call__
    named.__signature__ = signature
    return fn
