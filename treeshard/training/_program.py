"""A step for one structure of state and batch: what is traced, and what is checked of its result.

The arrays are arguments of the program, and all other leaves are its constants. `jax.jit` alone
would reject such a state, or compile again for each function object in it. It would also accept a
new state with another structure or sharding, and compile again for it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import DictKey, register_pytree_with_keys, tree_flatten, tree_leaves

from treeshard._core.arrays import StaticSplit, array_text, has_shape, is_array
from treeshard._core.contexts import plan_in_force
from treeshard._core.jax_private import is_tracing, show_as, varying_axes
from treeshard._core.paths import PyTree, leaf_paths, pair, path_under
from treeshard._core.reports import report
from treeshard._core.spec_trees import get_names_from_partition_spec
from treeshard._placement.constraint import with_sharding_constraint
from treeshard._planning.plan import Plan
from treeshard._planning.plan_in_force import PlanInForce
from treeshard.errors import SpecError, StateError, listed
from treeshard.training._batch import BatchPlacement
from treeshard.training._type_errors import sharding_type_errors

StepFn = Callable[[Any, Any], tuple[Any, Any]]


class Program:
    """The compiled step for one structure of state and batch.

    Attributes:
        state: Splits a state of this structure into its arrays and its constants.
        batch: Splits a batch in the same way. Python numbers in it are arguments too.
        leaves: The leaves of the plan, in the order of the arrays.
        shardings: The shardings of these leaves.
        run: The jitted function of the arrays of a state and of a batch.
        compiled: The programs that `Step.compile` made, by the `form_of` their batches.
        is_traced: Whether `run` has been traced.
        number: The number of its first call, among the calls of all programs on several processes.
    """

    run: Any
    is_traced = False
    number: int | None = None

    def __init__(
        self,
        fn: StepFn,
        in_force: PlanInForce,
        state: StaticSplit,
        batch: StaticSplit,
        placement: BatchPlacement,
        *,
        donate: bool,
    ) -> None:
        self.state, self.batch = state, batch
        self.compiled: dict[Any, Any] = {}
        self.leaves, self.shardings = in_force.plan.leaves, in_force.plan.sharding_of_each()
        self._fn, self._in_force, self._placement, self._donate = fn, in_force, placement, donate
        self._paths = leaf_paths(state.combine(range(len(state.indices))))
        array_paths = state.dynamic(self._paths)
        _check_fits_plan(array_paths, in_force.plan)
        # `collectives` reads these names of the arguments from the compiled program.
        unique = len(set(array_paths)) == len(array_paths)
        self._names = _Names(array_paths if unique else [f"{i}" for i in range(len(array_paths))])
        self._jit()

    def __call__(self, arrays: list[Any], data: list[Any]) -> tuple[list[Any], Any]:
        """Runs the step, which has been traced, on the arrays of a state and of a batch."""
        run = self.run
        # Inside a jit of the user's, a compiled program cannot be called.
        if self.compiled and not is_tracing():
            run = self.compiled.get(form_of(data), run)
        new, aux = run(_Named(arrays, self._names), data)
        return new.arrays, aux

    def trace(self, arrays: Sequence[Any], data: list[Any]) -> jax.stages.Traced:
        """Traces the step, and warns of pitfalls that the trace shows, once."""
        with sharding_type_errors(self._placement.mesh, self._in_force.gathered_axes):
            traced = self.run.trace(_Named(arrays, self._names), data)
        if not self.is_traced:
            if self._in_force.is_by_hand:
                self._check_gathered(traced.jaxpr.jaxpr, len(tree_leaves((arrays, data))))
            self.is_traced = True
        return traced

    def _check_gathered(self, jaxpr: Any, count: int) -> None:
        """Raises if the step reduces gradients of shards of weights that it never gathers."""
        reduced = {x.path: axes for x in self.leaves if (axes := self._in_force.reduced_axes(x))}
        if not reduced:
            return
        # If another function is being traced, JAX puts the values that the step closes over before
        # its `count` arguments.
        closed_over = len(jaxpr.invars) - count
        variables = [*jaxpr.invars[closed_over:], *jaxpr.invars[:closed_over]]
        jaxpr = jaxpr.replace(invars=variables)
        find_ungathered = report("_trace.by_hand").find_ungathered
        specs = {leaf.path: leaf.given for leaf in self.leaves}
        facts = [
            f"{path}: {specs[path]} splits it over {axes}."
            for path, axes in find_ungathered(jaxpr, self._in_force.plan, reduced).items()
        ]
        if facts:
            headline = "shards are used as if they were full weights: the step never gathers"
            raise SpecError(
                f"{self._placement.where}: {listed(headline, facts, headed=True)}\nCall"
                " `treeshard.unshard(params)` in the loss, or let"
                " `treeshard.manual.value_and_grad(loss, axis_names)` gather."
            )

    # -------------------------------------------------------------- the traced function

    def _jit(self) -> None:
        mesh, in_force = self._placement.mesh, self._in_force
        body = self._run_on_shards if in_force.is_by_hand else self._run_on_full_arrays

        def run(state: _Named, data: list[Any]) -> tuple[_Named, Any]:
            # JAX raises if an op mixes arrays in host and in device memory. Arrays in host memory
            # are copied first, and `out_shardings` copies the new arrays back.
            arrays = [
                x if leaf.memory is None else jax.device_put(x, NamedSharding(mesh, leaf.given))
                for x, leaf in zip(state.arrays, self.leaves, strict=True)
            ]
            self.check_entering(arrays)
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), plan_in_force(in_force):
                new, aux = body(arrays, data)
            return _Named(new, self._names), aux

        run.__name__ = getattr(self._fn, "__name__", "step")  # what profiles show
        show_as(run, self._fn)
        shardings = _Named(self.shardings, self._names)
        # `None` keeps the shardings of arguments, and leaves results to the partitioner. JAX
        # donates full arguments, so the state and the batch are separate arguments.
        self.run = jax.jit(
            run,
            in_shardings=(shardings, None),
            out_shardings=(shardings, None),
            donate_argnums=0 if self._donate else (),
        )

    def _run_on_full_arrays(self, arrays: list[Any], data: list[Any]) -> tuple[list[Any], Any]:
        # A batch from a jit around this one is not placed yet.
        leaves, treedef = tree_flatten(self.batch.combine(data))
        for i, target in self._placement.targets(leaves, treedef).items():
            leaves[i] = with_sharding_constraint(leaves[i], target)
        return self._step(arrays, treedef.unflatten(leaves))

    def _run_on_shards(self, arrays: list[Any], data: list[Any]) -> tuple[list[Any], Any]:
        def on_this_device(arrays: list[Any], data: list[Any]) -> tuple[list[Any], Any]:
            new, aux = self._step(arrays, self.batch.combine(data))
            self._check_equal(new, aux)
            return new, aux

        specs = [leaf.given for leaf in self.leaves]
        batch_specs = self.batch.dynamic(self._placement.specs_of(self.batch.combine(data)))
        sharded = jax.shard_map(
            show_as(on_this_device, self._fn),
            mesh=self._placement.mesh,
            in_specs=(specs, [_spec_of(spec) for spec in batch_specs]),
            out_specs=(specs, PartitionSpec()),
        )
        return sharded(arrays, data)

    def _step(self, arrays: list[Any], batch: PyTree) -> tuple[list[Any], Any]:
        """Calls the user's function. Returns the new arrays, and `aux`."""
        self._in_force.record_received(arrays)
        out = self._fn(self.state.combine(arrays), batch)
        if not isinstance(out, tuple) or len(out) != 2:
            raise StateError(f"the step must return (state, aux), not {type(out).__name__}.")
        state, aux = out
        if self._is_like(aux, arrays) and not self._is_like(state, arrays):
            raise StateError(
                "The step returns (aux, state): its second result has the form of the state. Return"
                " the state first, as in `return state, loss`."
            )
        new, treedef = tree_flatten(state)
        self._check_static(new, treedef)
        new = self.state.dynamic(new)
        self._check_arrays(new, arrays, "leaves the step as")
        return new, aux

    def check_entering(self, arrays: list[Any]) -> None:
        """Raises `StateError` if arrays of a state differ from the plan in shape or dtype."""
        self._check_arrays(arrays, self.leaves, "enters the step as")

    # -------------------------------------------------------------- what a step may return

    def _check_equal(self, new: list[Any], aux: PyTree) -> None:
        """Raises if results that must be equal on all devices may differ."""
        # JAX checks `out_specs` by the same types, but its message has neither the plan nor a fix.
        facts = []
        for x, leaf in zip(new, self.leaves, strict=True):
            more = varying_axes(x) - set(get_names_from_partition_spec(leaf.given))
            if more:
                facts.append(
                    f"{leaf.path}: the result differs along {_quote(more)}, but the plan shards it"
                    f" as {leaf.given}. Average its gradients: `manual.sync_gradients`, or"
                    " `manual.value_and_grad`."
                )
        for path, x in zip(leaf_paths(aux), tree_leaves(aux), strict=True):
            if is_array(x) and varying_axes(x):
                facts.append(
                    f"{path_under('aux', path)}: it differs along {_quote(varying_axes(x))}."
                    " Reduce it: `Metrics.reduce`, or `jax.lax.pmean`."
                )
        if facts:
            raise StateError(listed(f"{len(facts)} results differ between devices:", facts))

    def _is_like(self, tree: Any, arrays: list[Any]) -> bool:
        """Whether a tree has the structure and the shapes of the state."""
        leaves, treedef = tree_flatten(tree)
        if treedef != self.state.treedef:
            return False
        pairs = zip(self.state.dynamic(leaves), arrays, strict=True)
        return all(is_array(x) and x.shape == old.shape for x, old in pairs)

    def _check_static(self, new: list[Any], treedef: Any) -> None:
        """Raises `StateError` if the step changed the structure, or a static leaf."""
        if treedef != self.state.treedef:
            paths = leaf_paths(treedef.unflatten(new))
            facts = _list_unpaired(
                self._paths, paths, "the returned state lacks it.", "the step adds it to the state."
            ) or ["the step changes a container of the state, or a static field in it."]
            headline = "The step changes the structure of its state:"
            raise StateError(listed(headline, facts, headed=True))
        facts = []
        for i in self.state.find_changes(new):
            old = self.state.static[i]
            facts.append(
                f"{self._paths[i]}: the step turns {_describe(old)} into {_describe(new[i])}. A"
                f" leaf that is not an array is a constant of the compiled program. {_advice(old)}"
            )
        if facts:
            raise StateError(listed(f"{len(facts)} leaves change that are not arrays:", facts))

    def _check_arrays(self, arrays: list[Any], like: Sequence[Any], how: str) -> None:
        facts = [
            f"{leaf.path}: {how} {_describe(x)}, but the plan has {array_text(leaf)}. A state must"
            " keep its shapes and dtypes: convert this leaf, or plan again."
            for x, old, leaf in zip(arrays, like, self.leaves, strict=True)
            if not is_array(x) or x.shape != old.shape or x.dtype != old.dtype
        ]
        if facts:
            raise StateError(listed(f"{len(facts)} leaves differ from the plan:", facts))


def form_of(data: list[Any]) -> tuple[Any, ...]:
    """The shapes and dtypes for which a program is compiled, and the types of Python numbers."""
    return tuple([(x.shape, x.dtype) if hasattr(x, "shape") else type(x) for x in data])


def _describe(x: Any) -> str:
    return array_text(x) if has_shape(x) else f"the {type(x).__name__} {x!r}"


def _advice(static: Any) -> str:
    makers = {bool: "jnp.bool_", int: "jnp.int32", float: "jnp.float32"}
    if maker := makers.get(type(static)):
        return f"Start it as an array: `{maker}({static!r})`."
    return "Keep it out of the state, or leave it unchanged."


def _spec_of(spec: Any) -> PartitionSpec:
    return PartitionSpec() if spec is None else getattr(spec, "spec", spec)


def _quote(axes: Iterable[str]) -> str:
    return ", ".join(repr(axis) for axis in sorted(axes))


def _check_fits_plan(paths: list[str], plan: Plan) -> None:
    planned = [leaf.path for leaf in plan.leaves]
    if paths == planned:
        return
    facts = _list_unpaired(
        paths, planned, "the plan has no such array.", "the state has no such array."
    ) or ["it has the same arrays in a different order."]
    raise SpecError(listed("The state does not match the plan:", facts, headed=True))


def _list_unpaired(a: list[str], b: list[str], only_a: str, only_b: str) -> list[str]:
    """A fact about each path that only one of two trees has."""
    pairs = pair(((path, True) for path in a), ((path, True) for path in b))
    return [f"{path}: {only_a if x else only_b}" for path, x, y in pairs if not (x and y)]


# ------------------------------------------------------------------ names of arguments


class _Names:
    """The names of the arrays in a `_Named`."""

    # JAX hashes and compares the structure of the arguments, including these names, at each call.
    # It compares objects by identity, which is fast, but a tuple of names name by name.

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = keys


class _Named:
    """A list of arrays with names, which appear in the compiled program.

    A dict has names too, but JAX sorts its keys at every call.
    """

    def __init__(self, arrays: Sequence[Any], names: _Names) -> None:
        self.arrays, self.names = arrays, names


def _with_keys(x: _Named) -> tuple[list[Any], _Names]:
    return [(DictKey(k), a) for k, a in zip(x.names.keys, x.arrays, strict=True)], x.names


register_pytree_with_keys(
    _Named,
    _with_keys,
    lambda names, arrays: _Named(list(arrays), names),
    lambda x: (x.arrays, x.names),
)
