"""Settles what a program moves, op by op, with what was planned; what is left nobody planned."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp

from treeshard._communication import PlannedTransfer
from treeshard._moved import Collective
from treeshard._plan import Plan
from treeshard._spec_trees import get_names_from_partition_spec
from treeshard._unplanned import Unplanned, elements, explained, in_loop, is_scalar


@dataclass
class _Due:
    """What is left of one planned transfer, in elements."""

    planned: PlannedTransfer
    left: int

    @property
    def whole(self) -> int:
        return elements(self.planned.total_bytes, self.planned.dtype) or 0


@dataclass
class Settlement:
    """Takes a program's collectives one by one, and keeps those that nobody planned."""

    plan: Plan
    planned: Sequence[PlannedTransfer]
    names: Mapping[str, str | None]
    split: Sequence[str]
    tensor_parallel: list[Collective] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.due = [
            _Due(x, elements(x.total_bytes, x.dtype) or 0)
            for x in self.planned
            if x.path is not None
        ]
        self.found: dict[tuple[str, str, str], list[tuple[Collective, str | None]]] = {}
        used = get_names_from_partition_spec(self.plan)
        self.tensor_axes = {axis for axis in used if axis not in self.split}

    def take(self, one: Collective) -> None:
        if one.axes == () or is_scalar(one):
            return
        leaf = None if one.path is None else self.names.get(one.path)
        size = elements(one.total_bytes, one.dtype)
        if size is None or one.wire_bytes is None:
            return self._add("unreadable", one, leaf)
        if one.axes is None:
            return self._add("across-axes", one, leaf)
        if (due := self._planned(one, leaf, size)) is not None:
            if jnp.dtype(one.dtype).itemsize > jnp.dtype(due.planned.dtype).itemsize:
                self._add("wider", one, due.planned.path, due.planned.dtype)
        elif one.kind == "all-reduce" and self._settles_gradient(one, size):
            self._add("all-reduce", one, None)
        elif leaf is not None and one.kind == "all-gather":
            known = any(
                due.planned.path == leaf and due.planned.kind == one.kind for due in self.due
            )
            self._add("again" if known else "sharded-further", one, leaf)
        elif one.path is not None and leaf is None:
            self._add("batch", one, None)
        elif set(one.axes) <= self.tensor_axes:
            self.tensor_parallel.append(one)
        elif self._repeats(one):
            self._settles_gradient(one, elements(one.bytes, one.dtype))
            self._add("again", one, None)
        else:
            self._add("activation", one, None)

    def _add(self, code: str, one: Collective, leaf: str | None, detail: str = "") -> None:
        inside = "loop" if code == "activation" and in_loop(one) else ""
        self.found.setdefault((code, detail or inside, one.kind), []).append((one, leaf))

    def _planned(self, one: Collective, leaf: str | None, size: int) -> _Due | None:
        """Settles it with a planned transfer, if there is one that it can be."""
        for due in self.due:
            planned = due.planned
            if (planned.kind, planned.axes) != (one.kind, one.axes) or due.left < size:
                continue
            if one.kind == "all-gather" and planned.why != "update":
                fits = leaf is not None and leaf == planned.path
            else:
                # Gradients and updates have no names: only as a whole are they told apart.
                fits = due.left == size and (leaf is None or leaf == planned.path)
            if fits:
                due.left -= size
                return due
        return None

    def _settles_gradient(self, one: Collective, size: int | None) -> bool:
        """Settles an all-reduce of a whole gradient with all that was planned for it, which may
        be a reduce-scatter and an all-reduce of the part."""
        of_leaf: dict[str | None, list[_Due]] = {}
        for due in self.due:
            if due.planned.why == "gradient":
                of_leaf.setdefault(due.planned.path, []).append(due)
        for dues in of_leaf.values():
            untouched = all(due.left == due.whole for due in dues)
            axes = {axis for due in dues for axis in due.planned.axes}
            if untouched and dues[0].left == size and axes == set(one.axes or ()):
                for due in dues:
                    due.left = 0
                return True
        return False

    def _repeats(self, one: Collective) -> bool:
        """Whether it seems to be one more reduction of a gradient: it has the size of one, and
        runs in a loop or in the backward pass."""
        size = elements(one.bytes, one.dtype)
        backward = (one.count or 1) > 1 or "transpose(" in (one.op_name or "")
        return backward and any(
            due.whole == size and set(due.planned.axes) <= set(one.axes or ())
            for due in self.due
            if due.planned.kind != "all-gather"
        )

    def unplanned(self) -> Iterator[Unplanned]:
        for (code, detail, kind), members in self.found.items():
            moved = tuple(one for one, _ in members)
            paths = tuple(leaf for _, leaf in members if leaf is not None)
            fact, hint = explained(code, kind, detail, moved, self.split)
            yield Unplanned(code, fact, hint, moved, paths)
        left: dict[tuple[str, str], list[str]] = {}
        for due in self.due:
            if due.left:
                key = due.planned.kind, due.planned.why
                left.setdefault(key, []).append(due.planned.path or "")
        for (kind, why), paths in left.items():
            hint = (
                "The compiler gathers once and keeps the result, so it takes memory until its"
                " gradient is done: in a scan it does not."
                if "again" in why
                else "Is the leaf used, and the step the one that was planned?"
            )
            fact = f"the planned {kind} ({why}) is not in the program."
            yield Unplanned("not-moved", fact, hint, (), tuple(paths))
