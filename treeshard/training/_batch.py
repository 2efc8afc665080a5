"""Places a batch on the mesh of a step. Processes compare their batches once for each form.

`jax.jit` would place numpy arrays too. It would replicate them on every device before it splits
them, and on several processes it would not notice that their arrays differ.
"""

import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import tree_leaves, tree_map

from treeshard._core.arguments import PLAIN_VALUES
from treeshard._core.arrays import array_text, data_of, has_shape, is_spread
from treeshard._core.facts import SMALL_BYTES
from treeshard._core.meetings import known_checksum, origin
from treeshard._core.mesh import axis_sizes
from treeshard._core.paths import PyTree, leaf_paths, path_under
from treeshard._core.processes import require_agreement
from treeshard._core.replicas import checksum_text
from treeshard._core.spec_trees import SpecTree, specs_of_leaves
from treeshard._core.specs import axes_of, entries
from treeshard._placement.moves import through_host
from treeshard._placement.shard import move_leaves, shardings_to_compare
from treeshard._placement.targets import raise_unmovable, targets, unmovable
from treeshard.errors import SpecError, TreeShardError

Targets = dict[int, NamedSharding]  # by the index of a leaf; leaves without a spec have none


class BatchPlacement:
    """Places batches by their specs. Scalars are replicated.

    Attributes:
        specs: The specs of a batch, or a prefix of them.
        mesh: The mesh of the step.
        processes: The processes that must pass batches of one form; empty if there is one process.
        where: The name of the function that made the step, for messages.
    """

    def __init__(self, specs: SpecTree, mesh: Mesh, processes: Sequence[int], where: str) -> None:
        self.specs, self.mesh, self.processes, self.where = specs, mesh, processes, where
        self._targets_by_form: dict[Any, tuple[Targets, str]] = {}
        # The text of the last batch on which the processes have agreed.
        self._last_text = None if processes else ""

    def place(self, data: list[Any], treedef: Any) -> tuple[list[Any], str]:
        """Places the leaves of a batch on the mesh. Leaves that are on it stay the same objects.

        Returns the leaves, and the text that the processes compare at their next exchange.
        """
        form = (treedef, *map(_form, data))
        known = self._targets_by_form.get(form)
        if known is None:
            text = self._text(data, treedef)
            known = self._agree_on(data, treedef, text), text
            self._targets_by_form[form] = known
        placed, text = known
        if text != self._last_text:
            self._agree_on_change(data, treedef, text)
        away = {i: target for i, target in placed.items() if not _is_placed(data[i], target)}
        # A numpy array of this form was read before, but another array may be deleted by now.
        if not all([type(data[i]) is np.ndarray for i in away]):
            self._check_readable(data, treedef, away)
        if self.processes:
            text = ", ".join([text, *filter(None, map(_value_to_note, data))])
        if away:
            move_leaves(data, away, self.where, through_host)
        return data, text

    def _text(self, data: list[Any], treedef: Any) -> str:
        if not self.processes:
            return ""
        forms = ", ".join(f"{path}: {x}" for path, x in _forms(data, treedef).items())
        return f"the batch of a {self.where}: {forms}"

    def _agree_on_change(self, data: list[Any], treedef: Any, text: str) -> None:
        """Raises on all processes unless they change to batches of the same shapes together.

        A process that changes alone waits here, before its program starts, so the programs of
        the other processes cannot end.
        """
        with require_agreement(self.where, among=self.processes) as facts:
            facts |= _forms(data, treedef)
        self._last_text = text

    def _check_readable(self, data: list[Any], treedef: Any, away: Targets) -> None:
        misfits = {i: unmovable(data[i]) for i in away}
        raise_unmovable(treedef.unflatten(data), misfits, self.where, "batch")

    def targets(self, data: Sequence[Any], treedef: Any) -> Targets:
        """The target sharding of each leaf of a batch, by its shape alone.

        Raises `SpecError` or `UnknownAxisError` if the batch does not fit its specs.
        """
        structs = treedef.unflatten(map(struct_of, data))
        specs = treedef.unflatten(self.specs_of(structs))
        try:
            return targets(structs, specs, self.mesh, self.where, "batch", accept_structs=True)
        except SpecError as error:
            if not self._splits_one_row(structs):
                raise
            advice = "To compute a batch of one row in full on every device: `batch=P()`."
            raise type(error)(f"{error}\n{advice}") from None

    def _splits_one_row(self, batch: PyTree) -> bool:
        """Whether the specs split the only row of an array."""
        sizes = axis_sizes(self.mesh)
        for leaf, spec in zip(tree_leaves(batch), self.specs_of(batch), strict=True):
            if spec is None or not has_shape(leaf) or not leaf.shape or not entries(spec):
                continue
            axes = axes_of(entries(spec)[0])
            if leaf.shape[0] == 1 and any(sizes.get(axis, 1) > 1 for axis in axes):
                return True
        return False

    def specs_of(self, batch: PyTree) -> list[Any]:
        """The spec of each leaf of a batch; `None` for leaves that are not placed."""
        specs = specs_of_leaves(self.specs, batch, "batch specs")
        scalars = [getattr(x, "shape", None) == () for x in tree_leaves(batch)]
        pairs = zip(specs, scalars, strict=True)
        return [PartitionSpec() if spec is not None and scalar else spec for spec, scalar in pairs]

    def _agree_on(self, data: list[Any], treedef: Any, text: str) -> Targets:
        """The targets of a batch, on which all processes agree."""
        if all(is_spread(x) and (not self.processes or origin(x, self.processes)) for x in data):
            in_place = self._targets_in_place(data, treedef)
            if in_place is not None:
                return in_place
        processes = self.processes if data else []
        with require_agreement(self.where, among=processes) as facts:
            agreed = self.targets(data, treedef)
            self._check_readable(data, treedef, agreed)
            if processes:
                paths = leaf_paths(treedef.unflatten(data))
                rows = (
                    (path_under("batch", paths[i]), data[i], shardings_to_compare(data[i], target))
                    for i, target in agreed.items()
                )
                # In full only for the first batch of a form, and later for small arrays.
                facts.describe(rows, self.processes, sys.maxsize)
                others = ((paths[i], x) for i, x in enumerate(data) if not has_shape(x))
                facts |= {path_under("batch", path): _constant(x) for path, x in others}
        if processes:
            self._last_text = text
        return agreed

    def _targets_in_place(self, data: list[Any], treedef: Any) -> Targets | None:
        """The targets of a batch of global arrays, if they are already sharded by their targets.

        If treeshard made the arrays, all processes made them together, and agree already.
        """
        try:
            there = self.targets(data, treedef)
        except TreeShardError:  # raised later, together with the other processes
            return None
        return there if all(_is_placed(data[i], there[i]) for i in there) else None


def _forms(data: list[Any], treedef: Any) -> dict[str, str]:
    """`{"batch/x": "float32[8,4]"}`"""
    pairs = zip(leaf_paths(treedef.unflatten(data)), data, strict=True)
    return {path_under("batch", path): array_text(x) for path, x in pairs if has_shape(x)}


def struct_of(x: Any) -> Any:
    """The form of an array, which is enough to compile; other leaves unchanged."""
    if not has_shape(x):
        return x
    # JAX narrows 64-bit numbers of numpy when it places them, and JAX 0.12 warns about structs of
    # 64 bits.
    is_number = jax.numpy.issubdtype(x.dtype, np.number)
    dtype = jax.dtypes.canonicalize_dtype(x.dtype) if is_number else x.dtype
    # A weakly typed array, such as `jnp.asarray(1.0)`, is traced as another program.
    return jax.ShapeDtypeStruct(x.shape, dtype, weak_type=getattr(x, "weak_type", False))


def structs_of(tree: PyTree) -> PyTree:
    """The form of each array of a tree."""
    return tree_map(struct_of, tree)


def _form(x: Any) -> Any:
    """The properties of a leaf of the batch that all processes must share."""
    if isinstance(x, jax.Array):
        return x.shape, x.dtype, x.sharding if is_spread(x) else None
    return (x.shape, x.dtype, None) if has_shape(x) else type(x)


def _constant(x: Any) -> str:
    """A number or text, which must be the same on all processes; for another leaf, its type."""
    return repr(x) if isinstance(x, PLAIN_VALUES) else type(x).__name__


def _value_to_note(x: Any) -> str:
    """A number, or the checksum of a small array that every process has passed in full.

    Empty if unknown. Arrays on devices of several processes are not read, because they may still be
    computed. An array of this process is read in any case, on its way to the others.
    """
    if not has_shape(x):
        return _constant(x)
    if is_spread(x):
        return known_checksum(x)
    return checksum_text(x) if 0 < data_of(x).nbytes <= SMALL_BYTES else ""


def _is_placed(x: Any, target: NamedSharding) -> bool:
    # A deleted array still has its sharding.
    return isinstance(x, jax.Array) and x.sharding == target and not x.is_deleted()
