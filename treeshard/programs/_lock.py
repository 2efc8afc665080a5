"""A lock: one file of what a step means and costs, to compare the step of a pull request with.

The text of a program differs between compilers, and its lines move with every edit. So a lock has
what a compiler does not decide (how leaves and values are split, and what the step does with each)
and sums of what it does (bytes moved for each leaf, memory, operations), without lines and names of
variables. What one of two programs does not tell is not compared, and is reported.
"""

import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from treeshard._core.arrays import array_text
from treeshard._core.make_mesh import with_devices
from treeshard._core.mesh import describe_mesh
from treeshard._core.specs import entries
from treeshard._core.text import human_bytes, parse_json, typed
from treeshard.communication._collectives import Collective, axes_text, is_scalar, total_bytes
from treeshard.errors import FormatError, MeshError, counted
from treeshard.programs._compiled_step import CompiledStep
from treeshard.programs._types import StepValue

_FORMAT = 1
_KIND = "treeshard_lock"
_COMPUTED = "(computed)"  # what is moved and is not a leaf, such as an activation or a gradient
_UNKNOWN = "unknown"
_OVER = "over "  # the axes of a value of which it is not known which dims they split
# How much more than locked is no difference: compilers place buffers, and round sizes up.
_MORE_BYTES, _MORE_MEMORY, _MORE_OPERATIONS = 0.02, 0.05, 0.02
_SECTIONS = ("collectives", "leaves", "memory", "operations", "values")
_HEAD = {_KIND: int, "devices": str, "jax": str, "mesh": str, "min_size": int, "treeshard": str}


class Change(NamedTuple):
    """How a step differs from its lock in one leaf, one value or one sum.

    `line` is the line of the user's code, as `file:line`; empty if there is none.
    """

    text: str
    line: str = ""


class Differences(NamedTuple):
    """What differs from a lock, and what is to be said besides: less than locked, not compared."""

    changes: tuple[Change, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Lock:
    """What a step means and costs.

    Attributes:
        record: What the file has.
        lines: The line of the user's code of each value, by its key; a file has none.
    """

    record: Mapping[str, Any]
    lines: Mapping["_Key", str] = field(default_factory=dict)

    def to_json(self) -> str:
        """The text of the file: a line for each leaf, collective and value, in sorted order."""
        parts = [f" {json.dumps(key)}: {_section(self.record[key])}" for key in sorted(self.record)]
        return "{\n" + ",\n".join(parts) + "\n}\n"

    def __str__(self) -> str:
        counts = [
            counted(len(self.record["leaves"]), "leaf"),
            counted(len(self.record["collectives"]), "sum") + " of collectives",
            counted(len(self.record["values"]), "value"),
        ]
        return ", ".join(counts)


def _section(value: Any) -> str:
    if not value or not isinstance(value, dict | list):
        return json.dumps(value)
    if isinstance(value, list):
        rows = [json.dumps(each, sort_keys=True) for each in value]
        return "[\n  " + ",\n  ".join(rows) + "\n ]"
    rows = [f"{json.dumps(x)}: {json.dumps(value[x], sort_keys=True)}" for x in sorted(value)]
    return "{\n  " + ",\n  ".join(rows) + "\n }"


# ------------------------------------------------------------------ from a compiled step


class _Key(NamedTuple):
    """What values of a step are compared by: no line, and no name of a variable.

    `value` is `float32[64,128]`, and in a `shard_map` `float32[8,128] by hand over data`.
    """

    at: str
    part: str
    value: str


def lock_of(compiled: CompiledStep, min_size: int | None = None) -> Lock:
    """The lock of a compiled step, with values of at least `min_size` elements."""
    types = compiled.types(min_size=min_size)
    splits: dict[_Key, set[str]] = defaultdict(set)
    lines: dict[_Key, str] = {}
    for value in types:
        key = _key(value)
        splits[key].add(_split(value))
        lines.setdefault(key, value.line)
    device = with_devices(compiled.plan.mesh, "lock", compile_only=True).devices.flat[0]
    record = {
        _KIND: _FORMAT,
        "devices": f"{compiled.plan.mesh.size} x {device.device_kind}",
        "jax": jax.__version__,
        "mesh": describe_mesh(compiled.plan.mesh),
        "min_size": types.min_size,
        "treeshard": sys.modules["treeshard"].__version__,
        "leaves": _leaves(compiled),
        "collectives": _moved(compiled.communication().compiled),
        "memory": _memory(compiled),
        "operations": _operations(compiled),
        "values": [{**key._asdict(), "split": sorted(splits[key])} for key in sorted(splits)],
    }
    return Lock(record, lines)


def _leaves(compiled: CompiledStep) -> dict[str, dict[str, str]]:
    leaves: dict[str, dict[str, str]] = {}
    for leaf in compiled.plan.leaves:
        facts = {
            "array": array_text(leaf),
            "role": str(compiled.roles[leaf.path]),
            "spec": _spec_text(leaf.given),
        }
        if leaf.memory is not None:
            facts["memory"] = leaf.memory
        path = leaf.path
        while path in leaves:  # leaves of a tree may share a path
            path += " (again)"
        leaves[path] = facts
    return leaves


def _moved(collectives: Iterable[Collective]) -> dict[str, int | None]:
    """The payload of a step by kind, axes and leaf, without scalars such as the loss."""
    groups: dict[str, list[Collective]] = defaultdict(list)
    for moved in collectives:
        if not is_scalar(moved):
            what = moved.path or _COMPUTED
            groups[f"{moved.kind} over {axes_text(moved.axes)}: {what}"].append(moved)
    return {name: total_bytes(group) for name, group in groups.items()}


def _memory(compiled: CompiledStep) -> dict[str, int]:
    memory = compiled.memory()
    return {
        **memory.kinds,
        "results": memory.results,
        "temporaries": memory.temporaries,
        "total": memory.total,
        "on the host": memory.host + memory.offloaded,
    }


def _operations(compiled: CompiledStep) -> dict[str, int | None]:
    cost = compiled.cost()
    # A program with a kernel that does not say its operations has a lower bound only.
    is_known = "compute" not in cost.incomplete
    return {"on a device": cost.flops if is_known else None, "an even share": cost.even_flops}


def _key(value: StepValue) -> _Key:
    """`model.py Block.__call__`, `forward`, `float32[64,128]`."""
    file = value.line.rpartition(":")[0]
    at = f"{os.path.basename(file)} {value.function}".strip() or "(no line)"
    array = f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if value.by_hand:
        array += f" by hand over {', '.join(value.by_hand)}"
    return _Key(at, value.part, array)


def _split(value: StepValue) -> str:
    """`P('fsdp',)`; `over fsdp` if it is not known which dim; or `unknown`."""
    if value.spec is not None:
        return _spec_text(value.spec)
    if value.axes is not None:
        return _OVER + ", ".join(sorted(value.axes))
    return _UNKNOWN


def _spec_text(spec: PartitionSpec) -> str:
    # `str(spec)` has sets of axes, whose order differs between processes.
    text = str(PartitionSpec(*entries(spec)))
    for word in ("reduced", "unreduced"):
        if axes := getattr(spec, word):
            text += f" {word} over {', '.join(sorted(axes))}"
    return text


# ------------------------------------------------------------------ files


def write_lock(lock: Lock, path: Path) -> None:
    """Writes a lock: the file has its old text or its new one, whenever the process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(lock.to_json(), encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_lock(path: Path) -> Lock:
    """Reads a lock.

    Raises `FormatError` if the file is not one, or has another format.
    """
    try:
        record = parse_json(path.read_bytes())
        _check(record)
    except FormatError as error:
        raise FormatError(f"{path}: {error} Write the lock again.") from error
    return Lock(record)


def _check(record: Any) -> None:
    """Raises `FormatError` unless a record is one that this version writes."""
    found = typed(record, dict, "a lock", "an object").get(_KIND)
    if found is None:
        raise FormatError(f"not a lock: it has no {_KIND!r}.")
    if found != _FORMAT:
        raise FormatError(f"its format is {found!r}, and this version reads {_FORMAT}.")
    missing = [key for key in (*_HEAD, *_SECTIONS) if key not in record]
    if missing:
        raise FormatError(f"it has no {', '.join(map(repr, missing))}.")
    for key, kind in _HEAD.items():
        typed(record[key], kind, key)
    for key in ("collectives", "memory", "operations"):
        for name, number in typed(record[key], dict, key, "an object").items():
            if number is not None:
                typed(number, int, f"{key}: {name}", "a number or null")
    for path, facts in typed(record["leaves"], dict, "leaves", "an object").items():
        for fact, text in typed(facts, dict, f"leaves: {path}", "an object").items():
            typed(text, str, f"leaves: {path}: {fact}", "a text")
    for value in typed(record["values"], list, "values", "a list"):
        _check_value(typed(value, dict, "a value", "an object"))


def _check_value(value: Mapping[str, Any]) -> None:
    if value.keys() != {*_Key._fields, "split"}:
        raise FormatError(f"a value has {', '.join(sorted(value)) or 'nothing'}.")
    for name in _Key._fields:
        typed(value[name], str, name, "a text")
    for split in typed(value["split"], list, "split", "a list"):
        typed(split, str, "split", "a text")


# ------------------------------------------------------------------ comparing


def compare_locks(before: Lock, after: Lock, path: str) -> Differences:
    """How a step differs from what is locked in the file `path`.

    Raises `MeshError` if the lock is for other devices or another mesh: then nothing that both
    have is comparable.
    """
    old, new = before.record, after.record
    for key in ("devices", "mesh"):
        if old[key] != new[key]:
            raise MeshError(
                f"{path} is a lock for {old['devices']} ({old['mesh']}), and the step is for"
                f" {new['devices']} ({new['mesh']}): nothing was compared. Compile for what the"
                " lock is for, or write another lock for these devices."
            )
    changes: list[Change] = []
    notes: list[str] = []
    for name, key in (("JAX", "jax"), ("treeshard", "treeshard")):
        if old[key] != new[key]:
            notes.append(f"The lock is of {name} {old[key]}, and this is {name} {new[key]}.")
    changes += _changed_leaves(old["leaves"], new["leaves"])
    sums = _Sums(changes, notes)
    sums.compare("", old["collectives"], new["collectives"], _MORE_BYTES, human_bytes)
    memory_of, rows = {"total", "on the host"}, (old["memory"], new["memory"])
    of_old, of_new = ({k: x for k, x in row.items() if k in memory_of} for row in rows)
    sums.compare("memory, ", of_old, of_new, _MORE_MEMORY, human_bytes)
    sums.compare(
        "operations, ", old["operations"], new["operations"], _MORE_OPERATIONS, "{:,}".format
    )
    values = _Values(_splits(old), _splits(new), after.lines)
    changes += values.changes()
    notes += values.notes()
    return Differences(tuple(changes), tuple(notes))


def _changed_leaves(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    for path in sorted({*old, *new}):
        before, after = old.get(path), new.get(path)
        if before is None or after is None:
            has = "is not in the lock" if before is None else "is gone"
            yield Change(f"leaf {path}: {has}: {_facts(before or after)}.")
            continue
        for fact in sorted({*before, *after}):
            was, now = before.get(fact, "none"), after.get(fact, "none")
            if was != now:
                yield Change(f"leaf {path}: {fact} is {now}, was {was}.")


def _facts(leaf: Any) -> str:
    return f"{leaf.get('array')} {leaf.get('spec')}, {leaf.get('role')}"


class _Sums(NamedTuple):
    """Compares numbers, of which more than locked is a difference, and less is worth a note."""

    changes: list[Change]
    notes: list[str]

    def compare(
        self,
        what: str,
        old: Mapping[str, int | None],
        new: Mapping[str, int | None],
        tolerance: float,
        text: Any,
    ) -> None:
        """Compares numbers by name. A name that one of the two lacks is a sum of nothing."""
        for name in sorted({*old, *new}):
            before, after = old.get(name, 0), new.get(name, 0)
            if before is None and after is None:
                self.notes.append(f"{what}{name}: unknown in both, so it was not compared.")
            elif before is None or after is None:
                was = _UNKNOWN if before is None else text(before)
                now = _UNKNOWN if after is None else text(after)
                self.changes.append(Change(f"{what}{name}: {now}, was {was}."))
            elif after > before * (1 + tolerance):
                more = f"+{after / before - 1:.0%}" if before else "new"
                fact = f"{what}{name}: {text(after)}, was {text(before)} ({more})."
                self.changes.append(Change(fact))
            elif after < before * (1 - tolerance):
                fact = f"{what}{name}: {text(after)}, was {text(before)}: less than locked."
                self.notes.append(fact)


_Splits = Mapping[_Key, frozenset[str]]


def _splits(record: Mapping[str, Any]) -> _Splits:
    return {
        _Key(*(value[name] for name in _Key._fields)): frozenset(value["split"])
        for value in record["values"]
    }


class _Values:
    """Compares the values of two steps."""

    def __init__(self, old: _Splits, new: _Splits, lines: Mapping[_Key, str]) -> None:
        self._renamed = _renamed(old, new)
        self._old = {key._replace(at=self._renamed.get(key.at, key.at)): old[key] for key in old}
        self._new, self._lines = new, lines

    def changes(self) -> Iterator[Change]:
        gone = [key for key in self._old if key not in self._new]
        for key in sorted(self._new):
            line, split = self._lines.get(key, ""), _text(self._new[key])
            if key in self._old:
                if not _is_same(self._old[key], self._new[key], or_finer=True):
                    yield Change(f"{_named(key)} is {split}, was {_text(self._old[key])}.", line)
                continue
            other = next((x for x in gone if _differ_in_dtype(x, key)), None)
            if other is None:
                yield Change(f"{_named(key)} is not in the lock: {split}.", line)
                continue
            gone.remove(other)
            was = _text(self._old[other])
            yield Change(f"{_named(key)} {split}, was {other.value} {was}.", line)
        for key in gone:
            yield Change(f"{_named(key)} is gone: it was {_text(self._old[key])}.")

    def notes(self) -> Iterator[str]:
        for was, now in self._renamed.items():
            yield f"{was} is now {now}, with the same values."
        both = sorted(self._new.keys() & self._old.keys())
        for key in both:
            was, now = self._old[key], self._new[key]
            if not _is_same(was, now, or_finer=False) and _is_same(was, now, or_finer=True):
                fact = f"is {_text(now)}, was {_text(was)}: split over more axes than locked."
                yield f"{_named(key)} {fact}"
        unknown = [key for key in both if _UNKNOWN in self._new[key] | self._old[key]]
        if unknown:
            what = counted(len(unknown), "value")
            yield f"{what}: how they are split is unknown in a program, so it was not compared."
        by_axes = [key for key in both if key not in unknown and self._is_by_axes(key)]
        if by_axes:
            what = counted(len(by_axes), "value")
            yield f"{what}: which dims are split is unknown in a program: compared by axes only."

    def _is_by_axes(self, key: _Key) -> bool:
        """Whether a value is as locked, as far as only the axes of a split tell it."""
        was, now = self._old[key], self._new[key]
        return _is_same(was, now, or_finer=True) and any(x.startswith(_OVER) for x in was | now)


def _renamed(old: _Splits, new: _Splits) -> dict[str, str]:
    """Functions that are gone -> new ones with exactly their values."""
    of_old, of_new = _by_function(old), _by_function(new)
    gone = [at for at in of_old if at not in of_new]
    added = [at for at in of_new if at not in of_old]
    renamed: dict[str, str] = {}
    for at in gone:
        other = next((x for x in added if of_new[x] == of_old[at]), None)
        if other is not None:
            renamed[at] = other
            added.remove(other)
    return renamed


def _by_function(splits: _Splits) -> Mapping[str, set[Any]]:
    functions: dict[str, set[Any]] = defaultdict(set)
    for key in sorted(splits):
        functions[key.at].add((key.part, key.value, splits[key]))
    return functions


def _is_same(old: frozenset[str], new: frozenset[str], *, or_finer: bool) -> bool:
    """Whether each split is one of the other side, as far as both tell it; or, where the new one is
    finer, over more axes."""

    def fits(was: str, now: str) -> bool:
        return _may_be(was, now) or (or_finer and _axes(was) < _axes(now))

    has_old = all(any(fits(was, now) for now in new) for was in old)
    return has_old and all(any(fits(was, now) for was in old) for now in new)


def _may_be(one: str, other: str) -> bool:
    """Whether two splits may be the same: `over fsdp` may be `P(None, 'fsdp')`."""
    if _UNKNOWN in (one, other) or one == other:
        return True
    if not (one.startswith(_OVER) or other.startswith(_OVER)):
        return False
    return _axes(one) == _axes(other)


def _axes(split: str) -> set[str]:
    if split.startswith(_OVER):
        return set(filter(None, split.removeprefix(_OVER).split(", ")))
    return set(re.findall(r"'([^']+)'", split))


def _differ_in_dtype(one: _Key, other: _Key) -> bool:
    same = one._replace(value="") == other._replace(value="")
    return same and one.value.partition("[")[2] == other.value.partition("[")[2]


def _named(key: _Key) -> str:
    return f"{key.at}: {key.part} {key.value}"


def _text(splits: Iterable[str]) -> str:
    return " and ".join(sorted(splits))
