"""Writes a plan as text, for people, and as JSON, for other programs.

In the text, repeated layers share a line: a model of 80 layers has thousands of leaves and about
ten decisions. JSON has a line for each leaf. It has neither devices nor the functions among rules,
so a plan cannot be read back from it.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jax.sharding import AxisType

from treeshard._core.mesh import AnyMesh, axes_of_type, axis_sizes, describe_mesh
from treeshard._core.specs import Adjustment, all_axes, axes_of, dim_entries, entries
from treeshard._core.text import columns, fold, human_bytes
from treeshard._planning.matching import PlannedLeaf
from treeshard._planning.planned import PlannedTree
from treeshard._planning.rules import kind_of
from treeshard.errors import counted, short

_HEADS = ("path", "array", "spec", "per device", "why")
_WITH_ROLES = (*_HEADS[:-1], "in the step", "why")


def describe(plan: PlannedTree) -> str:
    """A plan as aligned columns, followed by its totals."""
    has_roles = any(leaf.role for leaf in plan.leaves)
    rows: list[tuple[str, ...]] = [_WITH_ROLES if has_roles else _HEADS]
    alike = fold((x.path, (x.shape, x.dtype, x.decision, x.role), x) for x in plan.leaves)
    for path, leaves in alike:
        leaf = leaves[0]
        array = type_text(leaf, plan.mesh)
        size = human_bytes(leaf.bytes_per_device(plan.mesh) * len(leaves))
        role = [] if leaf.role is None else [leaf.role]
        why = _reason(leaf, plan.rules)
        rows.append((path or "(the tree)", array, leaf.placement_text(), size, *role, why))
    return f"{columns(rows, right=_HEADS.index('per device'))}\n{_totals(plan)}"


def type_text(leaf: PlannedLeaf, mesh: AnyMesh) -> str:
    """`float32[512,64]`; on Explicit axes the type that JAX prints, `float32[512@fsdp,64]`."""
    # Types do not have Auto axes, and `jax.typeof` does not show them.
    explicit = axes_of_type(mesh, AxisType.Explicit)
    dims: list[str] = []
    for length, entry in zip(leaf.shape, dim_entries(leaf.given, len(leaf.shape)), strict=True):
        axes = [axis for axis in axes_of(entry) if axis in explicit]
        together = ",".join(axes) if len(axes) < 2 else f"({','.join(axes)})"
        dims.append(f"{length}@{together}" if axes else str(length))
    return f"{leaf.dtype}[{','.join(dims)}]"


def _reason(leaf: PlannedLeaf, rules: Sequence[tuple[Any, Any]]) -> str:
    """The rule that decided a leaf, and the adjustments to its result."""
    if not leaf.shape and leaf.rule is None:
        why = "scalar"
    elif leaf.decision.by_spec:
        why = "its spec" if leaf.asked == leaf.given else f"its spec {leaf.asked}"
    elif leaf.rule is None:
        # Unmatched leaves have an adjustment. Leaves without a counterpart have none.
        why = "" if leaf.adjustments else "no counterpart"
    else:
        action = rules[leaf.rule][1]
        kind = kind_of(action)
        why = f"rule {leaf.rule} {leaf.pattern!r}"
        if kind == "tactic":
            why += f" {short(repr(action), 80)}"
        elif kind != "function" and leaf.asked != leaf.given:
            why += f" {leaf.asked}"
    notes = "; ".join(map(_note, leaf.adjustments))
    return ": ".join(part for part in (why, notes) if part)


def _note(adjustment: Adjustment) -> str:
    kind, _, axes, dim = adjustment
    where = "" if dim is None else f" on dim {dim}"
    return f"{kind} {', '.join(axes)}{where}" if axes else kind


def _totals(plan: PlannedTree) -> str:
    leaves, mesh = plan.leaves, plan.mesh
    devices = math.prod(axis_sizes(mesh).values())
    total = sum(leaf.bytes for leaf in leaves)
    of_memory: Counter[str | None] = Counter()  # `None` is the memory of the devices
    for leaf in leaves:
        of_memory[leaf.memory] += leaf.bytes_per_device(mesh)
    per_device = of_memory.total()
    on_device = human_bytes(of_memory.pop(None, 0))
    sizes = [on_device, *(f"{human_bytes(size)} in {kind}" for kind, size in of_memory.items())]
    replicated = sum(not all_axes(entries(leaf.given)) for leaf in leaves)
    kinds = [{note.kind for note in leaf.adjustments} for leaf in leaves]
    small = sum("explicit-spec-too-small" in of_leaf for of_leaf in kinds)
    unused = f"\n{small:,} of them have a spec that `min_size` leaves unused." if small else ""
    ratio = f", {per_device * devices / total:.2f}x an even split" if total else ""
    return (
        f"{counted(len(leaves), 'leaf')}, {counted(sum(leaf.size for leaf in leaves), 'element')},"
        f" {human_bytes(total)} in all; {counted(replicated, 'leaf')}"
        f" {'is' if replicated == 1 else 'are'} replicated.{unused}\n"
        f"{' and '.join(sizes)} on the fullest of"
        f" {counted(devices, 'device')} ({describe_mesh(mesh)}){ratio}."
    )


# ------------------------------------------------------------------ JSON

VERSION = 1


def to_json(plan: PlannedTree) -> str:
    """Writes a plan as JSON, one line per leaf."""
    mesh = zip(axis_sizes(plan.mesh).items(), plan.mesh.axis_types, strict=True)
    head = {
        "treeshard_plan": VERSION,
        "mesh": [{"axis": a, "size": n, "type": kind.name.lower()} for (a, n), kind in mesh],
        "min_size": plan.min_size,
        "strict": plan.strict,
    }
    # By hand, because `json.dumps(indent=...)` would use ten lines for a leaf.
    lines = [f"{json.dumps(key)}: {_dump(value)}" for key, value in head.items()]
    rules = [_dump(_rule_to_json(*rule)) for rule in plan.rules]
    leaves = [_dump(_leaf_to_json(leaf)) for leaf in plan.leaves]
    for name, rows in (("rules", rules), ("leaves", leaves)):
        lines.append(f'"{name}": [\n  ' + ",\n  ".join(rows) + "\n]" if rows else f'"{name}": []')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _dump(value: Any) -> str:
    # Lengths and sizes may be integers of numpy.
    return json.dumps(value, default=int)


# {"path": "mlp/w", "shape": [512, 64], "dtype": "float32", "asked": "P('fsdp',)",
#  "given": "P('fsdp',)", "memory": null, "rule": 0, "adjustments": []}
def _leaf_to_json(leaf: PlannedLeaf) -> dict[str, Any]:
    return {
        "path": leaf.path,
        "shape": leaf.shape,
        "dtype": str(leaf.dtype),
        "asked": None if leaf.asked is None else repr(leaf.asked),
        "given": repr(leaf.given),
        "memory": leaf.memory,
        "rule": leaf.rule,
        "adjustments": [note._asdict() for note in leaf.adjustments],
    }


# {"pattern": "w", "kind": "tactic", "action": "fsdp('fsdp')"}
def _rule_to_json(pattern: Any, action: Any) -> dict[str, Any]:
    kind = kind_of(action)
    text = repr(action)
    if kind == "function":
        text = getattr(action, "__qualname__", type(action).__qualname__)
    return {"pattern": _pattern_text(pattern), "kind": kind, "action": text}


def _pattern_text(pattern: str | re.Pattern[str]) -> str:
    """The text of a pattern, with flags of a compiled one in front: `(?i)norm`."""
    compiled = re.compile(pattern)
    text = compiled.pattern
    in_text = re.compile(text).flags
    letters = [letter for letter, flag in _FLAGS.items() if compiled.flags & flag & ~in_text]
    return f"(?{''.join(letters)}){text}" if letters else text


_FLAGS = {"a": re.ASCII, "i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "x": re.VERBOSE}
