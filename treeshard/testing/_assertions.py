"""Assertions that plans and trees are sharded as expected.

They compare what was decided and what is there, not the code that decides: a plan in a file shows
each leaf that a change of a rule or of a name moves, and a review can refuse it.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chex
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.tree_util import tree_leaves

from treeshard._core.arrays import array_text, has_shape
from treeshard._core.mesh import AnyMesh, describe_mesh, same_axes
from treeshard._core.paths import PyTree, leaf_paths
from treeshard._core.spec_trees import SpecCarrier, SpecTree, specs_of_leaves
from treeshard._core.specs import axes_of, entries
from treeshard._planning.plan import Plan
from treeshard.errors import SpecError, UnexpectedShardingError, listed
from treeshard.programs._lock import compare_locks, lock_of, read_lock, write_lock
from treeshard.training._step import Step

_UPDATE = "TREESHARD_UPDATE_PLANS"
_UPDATE_LOCKS = "TREESHARD_UPDATE_LOCKS"


def assert_same_plan(plan: Plan, path: str | os.PathLike[str], *, update: bool = False) -> None:
    """Checks that a plan is equal to the one stored in a file.

    The file is the plan's JSON, with one line per leaf: commit it, and a review shows every
    leaf whose sharding changes. Run the test with `TREESHARD_UPDATE_PLANS=1` in the
    environment to write the file, the first time and after an intended change.

    Plans are equal if their meshes have the same axes and sizes, and their leaves the same
    paths, shapes, dtypes, specs and kinds of memory. Their rules may differ.

    Args:
        plan: The plan. It needs no devices: plan from `jax.eval_shape` and a mesh as text.
        path: The file, by convention `*.json`. Missing directories are created.
        update: Whether to write the file instead of comparing, whatever the environment.

    Raises:
        UnexpectedShardingError: If the plan differs from the stored one; the message lists
            every leaf that changes. If the file does not exist. It is an `AssertionError`.
        FormatError: If the file is not a plan.
        ShardingRuleError: If the file is to be written and leaves share a path.

    Examples:
        >>> shapes = {"w": jax.ShapeDtypeStruct((512, 64), "float32")}
        >>> decided = plan(shapes, [("w", fsdp("fsdp"))], "data=2,fsdp=16")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     assert_same_plan(decided, folder + "/mlp.json", update=True)
        ...     assert_same_plan(decided, folder + "/mlp.json")
    """
    file = Path(path)
    if update or _is_set(_UPDATE):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(plan.to_json(), encoding="utf-8")
        return
    if not file.exists():
        raise UnexpectedShardingError(
            f"{file} does not exist. Run this test with {_UPDATE}=1 in the environment to write it."
        )
    changes = Plan.from_json(file.read_text(encoding="utf-8")).diff(plan)
    if changes:
        raise UnexpectedShardingError(
            f"The plan differs from the one stored in {file}:\n{changes}\n"
            f"If this is intended, run the test with {_UPDATE}=1 in the environment to store the"
            " new plan."
        )


def assert_types(
    step: Step,
    state: PyTree,
    batch: PyTree,
    path: str | os.PathLike[str],
    *,
    update: bool = False,
    min_size: int | None = None,
) -> tuple[str, ...]:
    """Checks that a step still means and costs what is locked in a file.

    The step is compiled and not run. The file is that of `treeshard gate`, JSON with a line for
    each fact: specs and roles of the leaves, bytes moved by kind, axes and leaf, memory,
    operations, and how large values are split. Commit it, and a review shows what a change does.
    Run the test with `TREESHARD_UPDATE_LOCKS=1` in the environment to write the file, the first
    time and after an intended change.

    Values are compared by file, function, pass, dtype and shape, and never by line. More than
    locked by 2% of bytes moved or of operations, or by 5% of memory, is a difference; less is not.
    What one of the two programs does not tell is not compared.

    Args:
        step: A step of `jit_step` or `shard_map_step`.
        state: The state, or `plan.structs`.
        batch: A batch, or `jax.ShapeDtypeStruct`s of one.
        path: The file, by convention `*.lock`. Missing directories are created.
        update: Whether to write the file instead of comparing, whatever the environment.
        min_size: For a new file: values with fewer elements are left out; 16,384 by default. A
            stored one keeps its own.

    Returns:
        A line for each thing that was not compared, is less than locked, or was made by another
        version of JAX or treeshard. Empty if there is none, or if the file was written.

    Raises:
        UnexpectedShardingError: If the step differs from the stored one; the message lists every
            leaf, sum and value that differs. If the file does not exist. It is an `AssertionError`.
        FormatError: If the file is not a lock, or has another format.
        MeshError: If the file is for other devices or another mesh.
        DoesNotFitError, SpecError, StateError: As `step.compile`.

    Examples:
        >>> mesh = make_mesh("fsdp=8")
        >>> decided = plan({"w": jnp.ones((64, 64))}, [("w", P("fsdp"))], mesh, min_size=0)
        >>> @jit_step(plan=decided, batch=P("fsdp"))
        ... def step(state, batch):
        ...     return state, jnp.sum(batch @ state["w"])
        >>> batch = np.ones((512, 64), "float32")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     written = assert_types(step, decided.structs, batch, folder + "/lock", update=True)
        ...     not_compared = assert_types(step, decided.structs, batch, folder + "/lock")
    """
    file = Path(path)
    if update or _is_set(_UPDATE_LOCKS):
        write_lock(lock_of(step.compile(state, batch), min_size), file)
        return ()
    if not file.exists():
        raise UnexpectedShardingError(
            f"{file} does not exist. Run this test with {_UPDATE_LOCKS}=1 in the environment to"
            " write it."
        )
    stored = read_lock(file)
    lock = lock_of(step.compile(state, batch), stored.record["min_size"])
    changes, notes = compare_locks(stored, lock, str(file))
    if changes:
        facts = [change.text + (f" ({change.line})" if change.line else "") for change in changes]
        headline = f"The step differs from the one stored in {file}:"
        lines = [listed(headline, facts, shown=len(facts), headed=True), *notes]
        raise UnexpectedShardingError(
            "\n".join(lines) + f"\nIf this is intended, run the test with {_UPDATE_LOCKS}=1 in the"
            " environment to store the new step."
        )
    return notes


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")


def assert_trees_sharded_as(tree: PyTree, expected: SpecTree) -> None:
    """Checks that every array of a tree is sharded as expected.

    Specs are compared by the shards that they make: `P("data", None)` is `P("data")`, and an
    axis of size 1 makes no difference.

    Args:
        tree: Arrays, or `jax.ShapeDtypeStruct`s with shardings. Non-array leaves are ignored.
        expected: A `Plan`, a tree of `PartitionSpec`s or `NamedSharding`s with the structure
            of `tree`, or a prefix of one. Arrays for which it is `None` are not checked. A
            plan checks meshes, shapes, dtypes and kinds of memory too, and a `NamedSharding`
            its mesh and its kind of memory.

    Raises:
        UnexpectedShardingError: If an array is sharded differently; the message lists all of
            them. If `expected` has another structure. It is an `AssertionError`.
        SpecError: If `expected` has a leaf that is not a spec.

    Examples:
        >>> mesh = make_mesh("data=2,fsdp=4")
        >>> params = shard({"w": np.ones((8, 8))}, {"w": P("fsdp")}, mesh)
        >>> assert_trees_sharded_as(params, {"w": P("fsdp", None)})
        >>> assert_trees_sharded_as(params, P("data"))
        Traceback (most recent call last):
            ...
        treeshard.errors.UnexpectedShardingError: w: is P('fsdp',), expected P('data',).
    """
    spec_tree = expected.specs if isinstance(expected, SpecCarrier) else expected
    try:
        specs = specs_of_leaves(spec_tree, tree, "expected specs")
    except SpecError as error:
        chex.assert_trees_all_equal_structs(
            tree,
            spec_tree,
            custom_message="{}",
            custom_message_format_vars=[error],
            exception_type=UnexpectedShardingError,
        )
        raise
    leaves = tree_leaves(tree)
    planned: Sequence[Any] = [None] * len(leaves)
    mesh = None
    if isinstance(expected, Plan):
        planned, mesh = expected.leaf_at_each_index(), expected.mesh
    facts: list[str] = []
    for path, leaf, spec, struct in zip(leaf_paths(tree), leaves, specs, planned, strict=True):
        if spec is None or not has_shape(leaf):
            continue
        why = _difference(leaf, spec, mesh, struct)
        if why is not None:
            facts.append(f"{path or 'the tree'}: {why}")
    if facts:
        headline = f"{len(facts)} arrays are not sharded as expected:"
        raise UnexpectedShardingError(listed(headline, facts, shown=len(facts)))


def _difference(leaf: Any, spec: Any, mesh: AnyMesh | None, planned: Any) -> str | None:
    """How an array differs from what is expected; `None` if it does not."""
    memory = None  # which a bare spec leaves open
    if isinstance(spec, NamedSharding):
        spec, mesh, memory = spec.spec, spec.mesh, spec.memory_kind
    elif planned is not None and mesh is not None:
        # With devices, the kind of their own memory where the plan names none.
        memory = NamedSharding(mesh, spec, memory_kind=planned.memory).memory_kind
    if planned is not None and (planned.shape, planned.dtype) != (leaf.shape, leaf.dtype):
        return f"is {array_text(leaf)}, expected {array_text(planned)}."
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return f"is a {type(leaf).__name__} without a sharding, expected {spec}."
    if memory is not None and sharding.memory_kind not in (None, memory):
        return f"is in the memory {sharding.memory_kind!r}, expected {memory!r}."
    actual = sharding
    if isinstance(sharding, NamedSharding):
        if mesh is not None and not same_axes(sharding.mesh, mesh):
            return f"is on {describe_mesh(sharding.mesh)}, expected {describe_mesh(mesh)}."
        # Meshes are compared by their axes: the devices may be others, or absent.
        actual, mesh = sharding.spec, sharding.mesh
    elif not isinstance(mesh, Mesh):
        mesh = None
    if _is_same(sharding, spec, mesh, len(leaf.shape)):
        return None
    return f"is {actual}, expected {spec}."


def _is_same(sharding: Sharding, spec: PartitionSpec, mesh: AnyMesh | None, ndim: int) -> bool:
    """Whether a sharding has the shards of a spec; only `P()` is known to have them on no mesh."""
    if mesh is None:
        return sharding.is_fully_replicated and not any(map(axes_of, entries(spec)))
    try:
        expected = NamedSharding(mesh, spec, memory_kind=sharding.memory_kind)
        return expected.is_equivalent_to(sharding, ndim)
    except ValueError:  # the mesh lacks an axis of the spec
        return False
