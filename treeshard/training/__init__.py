"""For training loops: initialise a state already sharded, and compile a step that keeps it sharded.

A state is any pytree: parameters, optimizer state, step and key together. Its arrays are
traced; everything else in it (functions, strings, Python numbers, the static fields of
Equinox modules) is part of the program.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
from jax.tree_util import tree_leaves

from treeshard._core.arguments import (
    PLAIN_VALUES,
    check_function,
    check_no_refs,
    check_tree,
    describe_argument,
)
from treeshard._core.arrays import array_text, is_array, same_arrays
from treeshard._core.contexts import plan_in_force
from treeshard._core.facts import Facts
from treeshard._core.jax_private import show_as
from treeshard._core.make_mesh import with_devices
from treeshard._core.meetings import breaking_if_left, exclusive, last_meeting, set_origin
from treeshard._core.mesh import MeshLike, axis_sizes, check_axes
from treeshard._core.paths import PyTree, leaf_paths
from treeshard._core.processes import participating_processes, require_agreement
from treeshard._core.spec_trees import SpecTree, get_names_from_partition_spec
from treeshard._placement.targets import replace_names
from treeshard._planning.plan import Plan, plan
from treeshard._planning.plan_in_force import INITIALISING, default_batch
from treeshard._planning.wrong_arguments import check_plan, check_specs
from treeshard.errors import ArgumentError, StateError
from treeshard.training._accumulation import accumulate_gradients
from treeshard.training._gradients import value_and_grad
from treeshard.training._metrics import Metrics, print_metrics
from treeshard.training._step import Step, StepFn

if TYPE_CHECKING:
    from treeshard.training._matrices import by_matrix

__all__ = [
    "Metrics",
    "Step",
    "accumulate_gradients",
    "by_matrix",
    "init_sharded",
    "jit_step",
    "print_metrics",
    "shard_map_step",
    "value_and_grad",
]


# ------------------------------------------------------------------ initialise


def init_sharded(
    fn: Callable[..., Any],
    *args: Any,
    rules: Any,
    mesh: MeshLike,
    min_size: int | None = None,
    strict: bool = True,
) -> tuple[PyTree, Plan]:
    """Calls `fn(*args)` and returns its result initialised sharded: no device holds all of it.

    Examples:
        >>> def init(key):
        ...     return {"w": jax.random.normal(key, (1024, 64)), "step": jnp.int32(0)}
        >>> mesh = ts.make_mesh("fsdp=8")
        >>> state, plan = init_sharded(
        ...     init, jax.random.key(0), rules=[(".*", ts.fsdp("fsdp"))], mesh=mesh
        ... )
        >>> state["w"].sharding.spec
        P('fsdp',)

    `fn` is traced once for the shapes, to which the rules are applied. Then it is compiled
    once, and each device computes its own shards. The values equal
    `jax.jit(fn)(*args)` on one device: bit for bit from elementwise initialisers, and to rounding
    where `fn` sums over a sharded dim, as a normalisation does.

    Args:
        fn: Returns the tree, such as a model with its optimizer state. The tree may have
            functions and other static leaves.
        args: The arguments of `fn`. Arrays and keys are traced; anything else is static. Several
            processes compare them: keys and arrays by checksums, numbers and text as they are.
        rules: As in `treeshard.match_partition_rules`.
        mesh: A mesh with devices, or its axes as text, `"fsdp=8"`. Constraints inside `fn` see
            it as the mesh in force.
        min_size: Leaves with fewer elements are replicated.
        strict: Whether an unmatched leaf, or a spec that does not fit its leaf, is an error.
            Otherwise what fits is kept, with a warning, as in `treeshard.plan`.

    Returns:
        The tree, and the `Plan` that it is sharded by. An array that `fn` returns at two paths
        becomes two arrays, and the plan has the finding `same-array`.

    Raises:
        ShardingRuleError: If `strict` and a leaf is unmatched or a spec does not fit; or if
            the rules are malformed. The error comes before any allocation.
        ArgumentError: If `fn` is not a function, or returns a class, a function or another
            opaque object.
        MeshError: If `mesh` is abstract: it has no devices for the tree.
        ProcessError: If the processes of the mesh do not make the same tree by the same rules
            from the same arguments, or one of them fails or does not arrive. The error comes
            before any allocation.
        LeafError: If a leaf of the arguments, or of the tree that `fn` returns, is a mutable
            reference (`jax.Ref`).

    Warns:
        ShardingWarning: If leaves are replicated for `min_size` although their action is a
            spec, as in `treeshard.match_partition_rules`, or if rules match no leaf. Without
            `strict`, if a leaf is unmatched or a spec does not fit.

    Source:
        Shapes first, then a jitted init with `out_shardings`, as in EasyLM and in Flax's
        own guide.
    """
    call = "init_sharded(fn, key, rules=rules, mesh=mesh)"
    if not callable(fn):
        raise ArgumentError(
            f"init_sharded: fn is {describe_argument(fn)}, and not a function that makes the tree."
            f" Pass the function and its arguments: `{call}`. A tree that exists already is sharded"
            " by `shard(tree, plan(tree, rules, mesh))`."
        )
    mesh = with_devices(mesh, "init_sharded")
    check_no_refs(args, "init_sharded", "argument")
    arguments, static_arguments = eqx.partition(args, is_array)

    def make(arguments: Any) -> PyTree:
        # Inside a trace, `jax.set_mesh` is an error.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), plan_in_force(INITIALISING):
            return fn(*eqx.combine(arguments, static_arguments))

    # The results of the trace that are not arrays.
    found: list[tuple[PyTree, Sequence[tuple[str, str]]]] = []

    def make_and_compare(arguments: Any) -> PyTree:
        tree = make(arguments)
        check_tree(tree, "init_sharded", call, "what fn returns")
        arrays, static = eqx.partition(tree, is_array)
        found.append((static, same_arrays(leaf_paths(tree), tree_leaves(tree))))
        return arrays

    processes = participating_processes((), [mesh])
    with breaking_if_left(), exclusive(processes):
        with require_agreement("init_sharded", among=processes) as facts:
            # Only the trace shows whether two leaves are one array.
            structs = jax.eval_shape(show_as(make_and_compare, fn), arguments)
            static, pairs = found[-1]
            tree_plan = plan(
                eqx.combine(structs, static), rules, mesh, min_size=min_size, strict=strict
            )
            tree_plan = tree_plan.with_same_arrays(pairs)
            tree_plan.check_before_use()
            shardings = tree_plan.sharding_of_each()
            if processes:  # all of them must compile the same program
                leaves = zip(tree_plan.leaves, shardings, strict=True)
                facts.describe((leaf.path, leaf, [sharding]) for leaf, sharding in leaves)
                _add_inputs(facts, args, processes)

        def make_arrays(arguments: Any) -> list[Any]:
            return [_strong(x) for x in tree_leaves(make(arguments)) if is_array(x)]

        # The partitioner splits the initialisers too. Random bits are the same for all splits
        # since JAX 0.5, by its default `jax_threefry_partitionable`.
        arrays = jax.jit(show_as(make_arrays, fn), out_shardings=shardings)(arguments)
        if processes:
            set_origin(arrays, processes, last_meeting(), [leaf.path for leaf in tree_plan.leaves])
    return tree_plan.with_arrays(arrays), tree_plan


def _add_inputs(facts: Facts, args: Any, among: Sequence[int]) -> None:
    """Adds the facts about the arguments of an initialiser that all processes must share."""
    for path, x in zip(leaf_paths(args), tree_leaves(args), strict=True):
        if is_array(x):
            facts[f"argument {path}"] = array_text(x)
            facts.add_values(f"argument {path}", x, among, sys.maxsize)
        elif isinstance(x, PLAIN_VALUES):
            facts[f"argument {path}"] = repr(x)


def _strong(x: Any) -> Any:
    # The first step would return a weakly typed leaf strongly typed, and compile again.
    if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return jax.lax.convert_element_type(x, jax.dtypes.canonicalize_dtype(x.dtype))


# ------------------------------------------------------------------ the step


def jit_step(
    fn: StepFn | None = None,
    plan: Plan | None = None,
    *,
    batch: SpecTree = None,
    donate: bool = True,
) -> Any:
    """Compiles a training step once, with the state sharded by the plan before and after it.

    Examples:
        >>> mesh = ts.make_mesh("fsdp=8")
        >>> state = {"w": jnp.zeros(8), "step": jnp.int32(0)}
        >>> plan = ts.plan(state, [(".*", ts.fsdp("fsdp", min_size=0))], mesh)
        >>> @jit_step(plan=plan)
        ... def step(state, batch):
        ...     return {"w": state["w"] + batch.mean(0), "step": state["step"] + 1}, batch.sum()
        >>> state, total = step(ts.shard(state, plan), np.ones((16, 8), "float32"))
        >>> float(total)
        128.0

    It is a decorator, or `step = jit_step(fn, plan)`. On several processes, all pass
    batches of one form: the full batch in numpy arrays, or a batch of `from_process_local`.

    Args:
        fn: Takes `(state, batch)` and returns `(state, aux)`. The new state has the structure,
            shapes and dtypes of the old one.
        plan: The plan of the state, as `init_sharded` returns it.
        batch: The specs of the batch: a tree of them, or one for all its leaves, which is cut to
            the rank of each leaf. Scalars are replicated. By default dim 0 of each leaf is split
            over `Plan.fsdp_axes` and over axes named `data`, `dp`, `batch`, `replica` or `fsdp`:
            `P(("data", "fsdp"))` on a mesh of both.
        donate: Whether the new state reuses the memory of the old state, which is deleted.

    Returns:
        A `Step`, called as `step(state, batch) -> (state, aux)`. It places numpy batches on the
        devices. Inside `fn` the plan's mesh is the current mesh. `step.communication(state,
        batch)` compares what the compiled program moves with the plan, and `step.lower` returns
        the `jax.stages.Lowered`; both take `plan.structs` and `jax.ShapeDtypeStruct`s too.

    Raises:
        UnknownAxisError: If `batch` names an axis that the mesh lacks.
        SpecError: If `batch` has no specs; when called, if batch or state do not fit.
        StateError: When called, if `fn` changes the state's structure, shapes, dtypes or static
            leaves.
        ProcessError: When called, if processes pass batches of other forms, or values that differ
            in the first batch of a form; if one fails or does not arrive.
        DeletedLeafError: When called, if the state was donated to an earlier step.
        MeshError: If the plan was made for an abstract mesh.
        ShardingRuleError: If the plan has errors, as `Plan.check_before_use`, whose warnings apply
            too.
        LeafError: When called, if leaves of the state or the batch are mutable references
            (`jax.Ref`).

    Warns:
        ShardingWarning: When called, if arrays of the state share memory, and are copied.
    """
    if fn is None:
        return partial(jit_step, plan=plan, batch=batch, donate=donate)
    return _make_step(fn, plan, batch, donate=donate, per_device=False)


def shard_map_step(
    fn: StepFn | None = None,
    plan: Plan | None = None,
    *,
    batch: SpecTree = None,
    donate: bool = True,
) -> Any:
    """Compiles a training step whose code runs once per device, on its shards, as in `shard_map`.

    Examples:
        >>> from treeshard.manual import value_and_grad
        >>> mesh = ts.make_mesh("fsdp=8")
        >>> plan = ts.plan({"w": jnp.zeros(8)}, [("w", P("fsdp"))], mesh, min_size=0)
        >>> grad = value_and_grad(lambda p, x: jnp.mean((x @ p["w"] - 1) ** 2), "fsdp", plan)
        >>> @shard_map_step(plan=plan, batch=P("fsdp"))
        ... def step(state, batch):
        ...     loss, grads = grad(state, batch)
        ...     return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss
        >>> state = ts.shard({"w": np.zeros(8, "float32")}, plan)
        >>> state, loss = step(state, np.ones((16, 8), "float32"))
        >>> float(loss)
        1.0

    Like `jit_step`, but `fn` is called inside `jax.shard_map` over all axes of the mesh, with
    this device's shards of the state and of the batch. `fn` itself gathers parameters and
    reduces gradients: see `treeshard.manual`. JAX tracks which values vary between devices
    (`check_vma=True`), so results that must be equal on all devices are checked.

    Args:
        fn: Takes `(state, batch)` and returns `(state, aux)`. Leaves of the new state must be
            equal on all devices along the axes that do not shard them, and `aux` must be equal
            on all devices: use `manual.value_and_grad` or `manual.sync_gradients`,
            `Metrics.reduce`, `jax.lax.pmean`.
        plan: The plan of the state.
        batch: The specs of the batch, as in `jit_step`.
        donate: Whether the new state reuses the memory of the old state, which is deleted.

    Returns:
        A callable like the result of `jit_step`.

    Raises:
        StateError: When called, if leaves of the new state, or `aux`, may differ between
            devices; lists all of them, with the axes.
        UnknownAxisError, SpecError, StateError, DeletedLeafError, MeshError: As `jit_step`.
        ShardingRuleError, LeafError: As `jit_step`.

    Warns:
        ShardingWarning: As `jit_step`.

    Source:
        The shard_map training steps of the UvA deep-learning tutorials.
    """
    if fn is None:
        return partial(shard_map_step, plan=plan, batch=batch, donate=donate)
    return _make_step(fn, plan, batch, donate=donate, per_device=True)


def _make_step(
    fn: StepFn,
    plan: Plan | None,
    batch: SpecTree,
    *,
    donate: bool,
    per_device: bool,
) -> Step:
    where = "shard_map_step" if per_device else "jit_step"
    check_function(fn, f"{where}(fn, plan)")
    if plan is None:
        raise StateError(f"{where} needs the plan of the state: {where}(fn, plan).")
    check_plan(plan, f"{where}(fn, plan(state, rules, mesh))")
    plan.check_before_use()
    check_specs(batch, f"{where}(fn, plan, batch={{}})")
    specs = replace_names(default_batch(plan) if batch is None else batch, plan.mesh)
    check_axes(get_names_from_partition_spec(specs), axis_sizes(plan.mesh), f"{where}: batch")
    return Step(fn, plan, specs, donate=donate, per_device=per_device)


def __getattr__(name: str) -> Any:
    # Few training loops need it.
    if name == "by_matrix":
        from treeshard.training._matrices import by_matrix

        return by_matrix
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
