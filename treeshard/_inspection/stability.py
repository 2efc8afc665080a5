"""Compares trees in everything that makes a jitted function compile again.

`jax_explain_cache_misses` reports why JAX traces a function again. If only the sharding of an
argument changes, JAX compiles again without a new trace, and that option reports no miss. This
module therefore compares each fact in the keys of the two caches, and words it for a message.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.tree_util import tree_structure

from treeshard._core.arguments import check_no_refs
from treeshard._core.arrays import has_shape
from treeshard._core.mesh import describe_mesh
from treeshard._core.paths import PyTree, pair
from treeshard._core.specs import entries, with_entries
from treeshard._core.text import fold
from treeshard._inspection.memory import named_leaves
from treeshard._planning.plan import Plan
from treeshard.errors import UnstableStepError, counted, listed, short


class LeafDifference(NamedTuple):
    """One difference in a leaf between two trees.

    Attributes:
        path: The path of the leaf.
        what: `"sharding"`, `"mesh"`, `"devices"` (the mesh's), `"axis types"`,
            `"memory kind"`, `"committed"`, `"shape"`, `"dtype"`, `"weak type"`, `"value"` (of a
            leaf that is not an array), or `"leaf"`, if only one tree has it.
        before: Its state in the first tree, in words.
        after: Its state in the second tree.
    """

    path: str
    what: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path or 'the tree'}: {self.what} {self.before} -> {self.after}"


class ShardingDiff(tuple[LeafDifference, ...]):
    """The result of `diff_shardings`. It is empty, and so false, if the trees are equal."""

    __slots__ = ()

    def __str__(self) -> str:
        """One line for each difference, with repeated layers folded."""
        if not self:
            return "No leaf differs."
        folded = fold((difference.path, difference[1:], difference) for difference in self)
        return "\n".join(str(alike[0]._replace(path=path)) for path, alike in folded)


def diff_shardings(a: PyTree, b: PyTree) -> ShardingDiff:
    """Compares two trees leaf by leaf, in everything that makes a jitted function compile again.

    Only facts that both sides have are compared: a `ShapeDtypeStruct` is neither committed nor
    uncommitted, and a sharding on an abstract mesh has no devices. `P("data", None)` and
    `P("data")` are equal. A numpy array counts as an uncommitted array.

    Args:
        a: A live tree, `ShapeDtypeStruct`s, `NamedSharding`s, or a `Plan`.
        b: Another; its leaves are matched with the leaves of `a` by path.

    Returns:
        A tuple of `LeafDifference`, in `a`'s order, followed by the leaves that only `b` has.
        `str()` of it is a table.

    Raises:
        SpecError: If leaves are traced and so have no sharding yet. The message names them.
        LeafError: If a leaf is a mutable reference (`jax.Ref`).

    Examples:
        >>> mesh = make_mesh("fsdp=8")
        >>> decided = plan({"w": np.ones((512, 64))}, [("w", fsdp("fsdp"))], mesh)
        >>> replicated = shard({"w": np.ones((512, 64))}, P(), mesh)
        >>> print(diff_shardings(replicated, decided)[0])
        w: sharding P() -> P('fsdp',)
    """
    check_no_refs((a, b), "diff_shardings")
    return _diff(_facts_by_path(a), _facts_by_path(b))


def assert_stable_step(step: Callable[..., Any], state: PyTree, *args: Any) -> Any:
    """Runs a step once, and raises if the step changed the form of its state.

    Any such change makes the second step compile again: a leaf that starts on a single device, a
    Python number, a dtype that the update widens, a spec that the step does not keep. A step that
    donates its state consumes it here too: continue with the returned state.

    Args:
        step: Takes `(state, *args)` and returns the new state, or a tuple that starts with it:
            a `jit_step`, a jitted function, or any other.
        state: The state.
        args: The other arguments of the step.

    Returns:
        What the step returned.

    Raises:
        UnstableStepError: If a leaf changed. The message lists the changes, each with its fix.
            The error is an `AssertionError`.
        SpecError: If a leaf of the state is traced.
        LeafError: If a leaf is a mutable reference (`jax.Ref`).

    Examples:
        >>> step = jax.jit(lambda state, x: ({"w": state["w"] + x.mean()}, x.sum()))
        >>> x = shard(np.ones(8, "float32"), P("fsdp"), make_mesh("fsdp=8"))
        >>> state, total = assert_stable_step(step, {"w": x}, x)
        >>> float(total)
        8.0
    """
    check_no_refs(state, "assert_stable_step")
    treedef, before = tree_structure(state), _facts_by_path(state)  # the step may donate it
    out = step(state, *args)
    # A tuple is the state if it has the state's structure. Otherwise its first element is.
    new_state = out
    if isinstance(out, tuple) and tree_structure(out) != treedef:
        new_state = out[0] if out else None
    differences = _diff(before, _facts_by_path(new_state))
    by_leaf: dict[str, list[str]] = {}
    for path, what, old, new in differences:
        by_leaf.setdefault(path, []).append(f"{what} {old} -> {new}")
    facts = [f"{path or 'the state'}: {'; '.join(changes)}" for path, changes in by_leaf.items()]
    # JAX's caches distinguish structures that have the same paths.
    if not facts and tree_structure(new_state) != treedef:
        facts = ["the tree: the type of a container, or a static field, changed."]
    if facts:
        headline = f"The step changed {counted(len(facts), 'leaf')} of its state:"
        fixes = dict.fromkeys(_FIXES[difference.what] for difference in differences)
        consequence = "Each such change can make the next step compile again."
        raise UnstableStepError("\n".join([listed(headline, facts), consequence, *fixes]))
    return out


_PLACE = (
    "Place the state before the first step as it should stay: `treeshard.shard(state, plan)`."
    " Return `with_sharding_constraint(state, plan)` from the step, or call"
    " `training.jit_step(step, plan)`."
)
_KEEP = "Keep the shapes and the structure of the state."
_FIXES = {
    **dict.fromkeys(("sharding", "mesh", "devices", "axis types"), _PLACE),
    **dict.fromkeys(("memory kind", "committed"), _PLACE),
    **dict.fromkeys(("shape", "leaf"), _KEEP),
    "dtype": "Convert in the step, `new.astype(old.dtype)`, or start with the wider dtype.",
    "weak type": "Start numbers as arrays with a dtype: `jnp.float32(0.1)` instead of `0.1`.",
    "value": "Leaves that are not arrays are part of the program: store changing values as arrays.",
}


# ------------------------------------------------------------------ comparing


_Facts = dict[str, Any]  # `"dtype"` and the like -> a leaf's value, to compare and to show


def _facts_by_path(tree: PyTree) -> list[tuple[str, _Facts]]:
    """The facts about the leaves of a tree, with their paths."""
    tree = tree.structs if isinstance(tree, Plan) else tree
    return [(path, _facts(leaf)) for path, leaf in named_leaves(tree)]


def _diff(a: list[tuple[str, _Facts]], b: list[tuple[str, _Facts]]) -> ShardingDiff:
    differences: list[LeafDifference] = []
    for path, old, new in pair(a, b):
        if old is None:
            differences.append(LeafDifference(path, "leaf", "absent", "new"))
        elif new is None:
            differences.append(LeafDifference(path, "leaf", "present", "gone"))
        elif (old.keys() == {"value"}) != (new.keys() == {"value"}):
            # An array and a leaf of another kind have no fact in common.
            shown = (
                _shown("value", x["value"]) if "value" in x else "an array" for x in (old, new)
            )
            differences.append(LeafDifference(path, "value", *shown))
        else:
            differences += [
                LeafDifference(path, what, _shown(what, before), _shown(what, new[what]))
                for what, before in old.items()
                if what in new and not _equal(before, new[what])
            ]
    return ShardingDiff(differences)


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    try:
        return type(a) is type(b) and bool(a == b)
    except (TypeError, ValueError):  # a custom `__eq__`, or one that returns an array
        return False


def _shown(what: str, fact: Any) -> str:
    # The text may be long: a mesh may have 65,536 devices.
    return short(repr(fact) if what == "value" else str(fact))


def _facts(leaf: Any) -> _Facts:
    if isinstance(leaf, Sharding):
        return _facts_of_sharding(leaf)
    is_number = isinstance(leaf, bool | int | float | complex)
    if not is_number and not has_shape(leaf):
        return {"value": leaf}
    # Only arrays are committed or not: JAX may move uncommitted arrays to other devices.
    if isinstance(leaf, jax.ShapeDtypeStruct):
        aval = leaf
        facts: _Facts = {} if leaf.sharding is None else _facts_of_sharding(leaf.sharding)
    else:
        aval = jax.typeof(leaf)
        # jit places host values as it places uncommitted arrays.
        facts = {"sharding": "one device (uncommitted)", "committed": "no"}
        if isinstance(leaf, jax.Array) and leaf.committed:
            facts = _facts_of_sharding(leaf.sharding) | {"committed": "yes"}
    # `1.0` and `jnp.float32(1)` have one dtype, and promote other arrays differently.
    facts |= {"shape": aval.shape, "dtype": aval.dtype}
    facts["weak type"] = "yes" if aval.weak_type else "no"
    if is_number:
        facts["value"] = leaf
    return facts


def _facts_of_sharding(sharding: Sharding) -> _Facts:
    facts: _Facts = {"sharding": sharding}
    if isinstance(sharding, SingleDeviceSharding):
        facts["sharding"] = f"only {next(iter(sharding.device_set))}"
    if isinstance(sharding, NamedSharding):
        mesh = sharding.mesh
        # P("data", None) and P("data") are the same placement, and compile to the same program.
        facts["sharding"] = with_entries(sharding.spec, entries(sharding))
        facts["mesh"] = describe_mesh(mesh)
        facts["axis types"] = ", ".join(map(str, mesh.axis_types))
        if isinstance(mesh, Mesh):
            facts["devices"] = ",".join(str(device.id) for device in mesh.devices.flat)
    if sharding.memory_kind is not None:
        facts["memory kind"] = sharding.memory_kind
    return facts
