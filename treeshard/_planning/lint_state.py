"""The checks of a training state: the order of axes, and optimizer state.

A plan has paths and no optimizers, so these are recognised by the names of their state, as optax
has them.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from treeshard._core.mesh import AnyMesh, axis_sizes
from treeshard._core.specs import all_axes, axes_of, dim_entries, entries, entry_of
from treeshard._core.text import human_bytes
from treeshard._planning.findings import Finding, decided_by, finding
from treeshard._planning.matching import PlannedLeaf, state_with_parameters, tails
from treeshard._planning.plan_json import kind_of

# Where `by_matrix` keeps stacked matrices. Their padding is matrices that no other sees.
_STACKS = "/matrices/"
# A part of the optimizer state below this share is not worth a warning.
_SMALL_SHARE = 0.05
# How optimizers that multiply matrices name their state, such as `MuonState(count, mu, ns_coeffs)`
# at `opt_state/inner_states/muon/...`, which `optax.contrib.muon` makes by partitioning; SOAP has
# `GG`, and Shampoo `statistics` and `preconditioners`.
_MATRIX = re.compile(
    r"(^|/)(\w*(muon|shampoo|soap)\w*|ns_coeffs|GG|preconditioners?|statistics)(/|$)",
    re.IGNORECASE,
)
_NOT_ELEMENTWISE = re.compile(
    _MATRIX.pattern.replace("muon|", "adafactor|muon|").replace("GG|", "GG|v_row|v_col|"),
    re.IGNORECASE,
)

Order = tuple[str, ...]


def axis_orders(leaves: Sequence[PlannedLeaf], mesh: AnyMesh) -> Iterator[Finding]:
    """Dims that are sharded over several axes in another order than elsewhere, or than the mesh.

    Each order puts the shards on the devices in another way, so that arrays of two orders cannot
    be combined without sending almost all of them.
    """
    sizes = axis_sizes(mesh)
    by_axes: dict[frozenset[str], dict[Order, list[PlannedLeaf]]] = defaultdict(dict)
    for leaf in leaves:
        for entry in entries(leaf.given):
            order = tuple(axis for axis in axes_of(entry) if sizes[axis] > 1)
            if len(order) > 1:
                by_axes[frozenset(order)].setdefault(order, []).append(leaf)
    for axes, orders in by_axes.items():
        of_mesh = tuple(axis for axis in sizes if axis in axes)
        for order, members in orders.items():
            if order == of_mesh:
                continue
            others = len(orders.get(of_mesh, ()))
            have = f"the mesh and {others} other leaves have" if others else "the mesh has"
            paths = dict.fromkeys(leaf.path for leaf in members)
            values = {"order": entry_of(order), "have": have, "of_mesh": entry_of(of_mesh)}
            yield finding("axis-order", paths, members[0].rule, **values)


def unsharded_state(
    leaves: Sequence[PlannedLeaf], rules: Sequence[tuple[Any, Any]], mesh: AnyMesh
) -> Iterator[Finding]:
    """Optimizer state that ZeRO-1 does not reach, where it shards other state further.

    ZeRO-1 is recognised by axes that shard state and not its parameter, or that are to do so.
    """
    pairs = state_with_parameters(leaves)
    meant: set[str] = set()
    for leaf, parameter in pairs:
        meant |= _meant(leaf, rules) - _meant(parameter, rules)
    further = {axis: size for axis, size in axis_sizes(mesh).items() if axis in meant and size > 1}
    missed = [leaf for leaf, _ in pairs if leaf.shape and further.keys().isdisjoint(_axes(leaf))]
    total = sum(leaf.bytes for leaf, _ in pairs)
    in_missed = sum(leaf.bytes for leaf in missed)
    if not further or not total or in_missed < _SMALL_SHARE * total:
        return
    parts = math.prod(further.values())
    per_device = sum(leaf.bytes_per_device(mesh) for leaf in missed)
    yield finding(
        "zero1-no-op" if in_missed == total else "zero1-no-op, in part",
        [leaf.path for leaf in missed],
        missed[0].rule,
        per_device - per_device // parts,
        axes=" and ".join(map(repr, further)),
        waste=human_bytes(in_missed),
        share=in_missed / total,
        parts=parts,
    )


def state_unlike_weights(
    leaves: Sequence[PlannedLeaf],
    mesh: AnyMesh,
    min_size: int,
) -> Iterator[Finding]:
    """Optimizer state that is split unlike its parameter, and not further in the same dims.

    State that is split further is as in ZeRO-1. `axis_orders` tells of other orders in one dim.
    """
    sizes = axis_sizes(mesh)
    alike: dict[Any, list[tuple[PlannedLeaf, PlannedLeaf]]] = defaultdict(list)
    for leaf, parameter in state_with_parameters(leaves):
        is_wrong = leaf.decision.errors or parameter.decision.errors
        if is_wrong or leaf.size < min_size:
            continue
        dims = zip(_split_by(leaf, sizes), _split_by(parameter, sizes), strict=True)
        if not all(of_parameter <= own for own, of_parameter in dims):
            key = leaf.rule, leaf.given, parameter.rule, parameter.given
            alike[key].append((leaf, parameter))
    for pairs in alike.values():
        leaf, parameter = pairs[0]
        yield finding(
            "state-unlike-weight",
            [each.path for each, _ in pairs],
            leaf.rule,
            given=leaf.given,
            by=decided_by(leaf),
            parameter=parameter.path,
            of_parameter=parameter.given,
            parameter_by=decided_by(parameter),
        )


def _split_by(leaf: PlannedLeaf, sizes: Mapping[str, int]) -> list[set[str]]:
    """The axes that split each dim."""
    dims = dim_entries(leaf.given, len(leaf.shape))
    return [{axis for axis in axes_of(entry) if sizes[axis] > 1} for entry in dims]


def padded_state(leaves: Sequence[PlannedLeaf]) -> Iterator[Finding]:
    """Padded leaves in the state of an optimizer that does not treat each element by itself."""
    roots = _roots(leaves, _NOT_ELEMENTWISE)
    of_these = [leaf for leaf in leaves if leaf.path.startswith(tuple(roots))]
    padded = [leaf for leaf in of_these if leaf.unpadded and _STACKS not in leaf.path]
    if padded:
        yield finding("not-elementwise", [leaf.path for leaf in padded], padded[0].rule)


def matrix_optimizers(leaves: Sequence[PlannedLeaf], mesh: AnyMesh) -> Iterator[Finding]:
    """State of Muon, Shampoo or SOAP whose matrices are sharded in dims that they contract."""
    roots = tuple(_roots(leaves, _MATRIX))
    if not roots:
        return
    weights = _matrices(leaves, {root.partition("/")[0] for root in roots})
    split_axes = {axis for axis, size in axis_sizes(mesh).items() if size > 1}
    contracted: dict[str, PlannedLeaf] = {}
    for leaf in leaves:
        if leaf.path.startswith(roots):
            weight = next((weights[tail] for tail in tails(leaf.path) if tail in weights), None)
            if weight is not None and _contracted_axes(weight) & split_axes:
                contracted.setdefault(weight.path, weight)
    if contracted:
        first = next(iter(contracted.values()))
        yield finding("matrix-optimizer", contracted, first.rule)


def _matrices(leaves: Sequence[PlannedLeaf], state_branches: set[str]) -> dict[str, PlannedLeaf]:
    """The matrices outside the branches of state, by their paths without the first key."""
    matrices: dict[str, PlannedLeaf] = {}
    for leaf in leaves:
        branch, _, rest = leaf.path.partition("/")
        if branch not in state_branches and len(leaf.shape) > 1:
            matrices[rest] = leaf
    return matrices


def _roots(leaves: Sequence[PlannedLeaf], pattern: re.Pattern[str]) -> set[str]:
    """The paths at which state of these optimizers begins."""
    roots: set[str] = set()
    for leaf in leaves:
        if match := pattern.search(leaf.path):
            is_name = match[3] is not None  # of the optimizer, or else of a field of its state
            roots.add(leaf.path[: match.end() if is_name else match.start() + 1])
    return roots


def _axes(leaf: PlannedLeaf) -> set[str]:
    return set(all_axes(entries(leaf.given)))


def _meant(leaf: PlannedLeaf, rules: Sequence[tuple[Any, Any]]) -> set[str]:
    """The axes that shard a leaf, or that its tactic would shard it over."""
    axes = _axes(leaf)
    if not rules or leaf.rule is None:
        return axes
    action = rules[leaf.rule][1]
    return axes.union(action.fsdp_axes) if kind_of(action) == "tactic" else axes


def _contracted_axes(leaf: PlannedLeaf) -> set[str]:
    """The axes that shard the last two dims."""
    before_matrix = len(leaf.shape) - 2
    return set(all_axes(entries(leaf.given)[before_matrix:]))
