"""Asserts that plans and trees are sharded as expected.

The assertions compare results, not rules. If a changed rule or name changes the sharding of a leaf,
the diff of the plan in a file shows that leaf to the reviewer.
"""

import os
from collections.abc import Sequence
from difflib import unified_diff
from pathlib import Path
from typing import Any

import chex
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.tree_util import tree_leaves

from treeshard._core.arguments import check_no_refs
from treeshard._core.arrays import array_text, has_shape
from treeshard._core.mesh import AnyMesh, describe_mesh, same_axes
from treeshard._core.paths import PyTree, leaf_paths
from treeshard._core.spec_trees import SpecCarrier, SpecTree, specs_of_leaves
from treeshard._core.specs import axes_of, entries, trim_spec
from treeshard._planning.plan import Plan
from treeshard._planning.wrong_arguments import check_plan
from treeshard.errors import SpecError, UnexpectedShardingError, listed
from treeshard.programs._lock import diff_of_locks, lock_text, write_lock
from treeshard.training._step import Step

_UPDATE = "TREESHARD_UPDATE_PLANS"


def assert_same_plan(plan: Plan, path: str | os.PathLike[str], *, update: bool = False) -> None:
    """Checks that a plan is equal to the one stored in a file.

    The file is text, with the mesh and one line per leaf. Commit the file, and a review shows every
    leaf whose sharding changes. To write the file, the first time and after an intended change, run
    the test with `TREESHARD_UPDATE_PLANS=1` in the environment.

    Plans are equal if their meshes have the same axes and sizes, and their leaves the same
    paths, shapes, dtypes, specs and kinds of memory. Their rules may differ.

    Args:
        plan: The plan. For a plan without devices, use `jax.eval_shape` and a mesh as text.
        path: The file, by convention `*.txt`. Missing directories are created.
        update: Whether to write the file instead of comparing, whatever the environment.

    Raises:
        UnexpectedShardingError: If the plan differs from the stored one, with every changed leaf,
            or if the file does not exist. The error is an `AssertionError`.
        ArgumentError: If `plan` is not a plan.

    Examples:
        >>> shapes = {"w": jax.ShapeDtypeStruct((512, 64), "float32")}
        >>> decided = plan(shapes, [("w", fsdp("fsdp"))], "data=2,fsdp=16")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     assert_same_plan(decided, folder + "/mlp.txt", update=True)
        ...     assert_same_plan(decided, folder + "/mlp.txt")
    """
    check_plan(plan, "assert_same_plan(plan(tree, rules, mesh), path)")
    file, text = Path(path), _plan_text(plan)
    if update or _is_set(_UPDATE):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return
    if not file.exists():
        raise UnexpectedShardingError(
            f"{file} does not exist. Run this test with {_UPDATE}=1 in the environment to write it."
        )
    stored = file.read_text(encoding="utf-8")
    if stored != text:
        lines = [*unified_diff(stored.splitlines(), text.splitlines(), n=0, lineterm="")][2:]
        changes = "\n".join(line for line in lines if not line.startswith("@@"))
        raise UnexpectedShardingError(
            f"The plan differs from the one stored in {file}:\n{changes}\n"
            f"If this is intended, run the test with {_UPDATE}=1 in the environment to store the"
            " new plan."
        )


def _plan_text(plan: Plan) -> str:
    """The text of a plan, which equal plans share: the mesh, and a line for each leaf."""
    leaves: list[str] = []
    for leaf in plan.leaves:
        memory = "" if leaf.memory is None else f" in {leaf.memory}"
        # `P("fsdp", None)` is the same as `P("fsdp")`.
        leaves.append(f"{leaf.path}: {array_text(leaf)} {trim_spec(leaf.given)}{memory}")
    return "\n".join([f"mesh: {describe_mesh(plan.mesh)}", *sorted(leaves)]) + "\n"


def assert_step(
    step: Step,
    state: PyTree,
    batch: PyTree,
    path: str | os.PathLike[str],
    *,
    update: bool = False,
) -> None:
    """Checks a step's shardings, communication and memory against a file.

    The step is compiled but does not run. The file is JSON: the mesh and the kind of device, the
    spec and the role of each leaf, the specs of the batch, the bytes communicated in a step by
    kind, axes and leaf, and the memory of one device by kind. Commit the file, and a review shows
    the effect of a change.

    Everything in the file is compared exactly. The file has no names of variables, lines or values.
    A number that the program does not show is `null`, which equals only `null`. The compiler
    decides the communication and the temporaries, so they may change with the version of JAX.

    Args:
        step: A step of `jit_step` or `shard_map_step`.
        state: The state, or `plan.structs`.
        batch: A batch, or `jax.ShapeDtypeStruct`s of one.
        path: The file, by convention `*.json`. Missing directories are created.
        update: Whether to write the file instead of comparing: the first time, and after an
            intended change. The write is atomic.

    Raises:
        UnexpectedShardingError: If the step differs from the stored one, with a diff of the two
            files, or if the file does not exist. The error is an `AssertionError`.
        FormatError: If the file is not JSON.
        DoesNotFitError, SpecError, StateError: As `step.compile`.

    Examples:
        >>> mesh = make_mesh("fsdp=8")
        >>> decided = plan({"w": jnp.ones((64, 64))}, [("w", P("fsdp"))], mesh, min_size=0)
        >>> @jit_step(plan=decided, batch=P("fsdp"))
        ... def step(state, batch):
        ...     return state, jnp.sum(batch @ state["w"])
        >>> batch = np.ones((512, 64), "float32")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     assert_step(step, decided.structs, batch, folder + "/step.json", update=True)
        ...     assert_step(step, decided.structs, batch, folder + "/step.json")
    """
    file = Path(path)
    if not update and not file.exists():  # before minutes of compiling
        raise UnexpectedShardingError(
            f"{file} does not exist. Call `assert_step` with `update=True` once to write it."
        )
    lock = lock_text(step.compile(state, batch))
    if update:
        write_lock(file, lock)
        return
    diff = diff_of_locks(file, lock)
    if diff:
        raise UnexpectedShardingError(
            f"The step differs from the one stored in {file}:\n{diff}\n"
            "If this is intended, call `assert_step` with `update=True` once."
        )


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")


def assert_trees_sharded_as(tree: PyTree, expected: SpecTree) -> None:
    """Checks that every array of a tree is sharded as expected.

    Specs are compared by their shards: `P("data", None)` equals `P("data")`, and axes of size 1 do
    not count.

    Args:
        tree: Arrays, or `jax.ShapeDtypeStruct`s with shardings. Non-array leaves are ignored.
        expected: A `Plan`, a tree of `PartitionSpec`s or `NamedSharding`s with the structure
            of `tree`, or a prefix of one. Arrays for which it is `None` are not checked. A
            plan checks meshes, shapes, dtypes and kinds of memory too, and a `NamedSharding`
            its mesh and its kind of memory.

    Raises:
        UnexpectedShardingError: If arrays are sharded differently, with all of them, or if
            `expected` has another structure. The error is an `AssertionError`.
        SpecError: If `expected` has a leaf that is not a spec.
        LeafError: If a leaf is a mutable reference (`jax.Ref`).

    Examples:
        >>> mesh = make_mesh("data=2,fsdp=4")
        >>> params = shard({"w": np.ones((8, 8))}, {"w": P("fsdp")}, mesh)
        >>> assert_trees_sharded_as(params, {"w": P("fsdp", None)})
        >>> assert_trees_sharded_as(params, P("data"))
        Traceback (most recent call last):
            ...
        treeshard.errors.UnexpectedShardingError: w: is P('fsdp',), expected P('data',).
    """
    check_no_refs(tree, "assert_trees_sharded_as")
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
        # On devices, a plan without a kind of memory means the devices' default memory.
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
        # Meshes are compared by their axes: the devices may differ or be absent.
        actual, mesh = sharding.spec, sharding.mesh
    elif not isinstance(mesh, Mesh):
        mesh = None
    if _is_same(sharding, spec, mesh, len(leaf.shape)):
        return None
    return f"is {actual}, expected {spec}."


def _is_same(sharding: Sharding, spec: PartitionSpec, mesh: AnyMesh | None, ndim: int) -> bool:
    """Whether a sharding has the shards of a spec. Without a mesh, only `P()` can be compared."""
    if mesh is None:
        return sharding.is_fully_replicated and not any(map(axes_of, entries(spec)))
    try:
        expected = NamedSharding(mesh, spec, memory_kind=sharding.memory_kind)
        return expected.is_equivalent_to(sharding, ndim)
    except ValueError:  # the mesh lacks an axis of the spec
        return False
