"""Locks of steps: what changes of a step is found, and what is the same is not a difference."""

import dataclasses
import json

import pytest
from gated_steps import HARMLESS, REGRESSIONS, edited, load

import treeshard as ts
from treeshard.programs._lock import (
    Lock,
    compare_locks,
    lock_of,
    read_lock,
    write_lock,
)

pytestmark = pytest.mark.usefixtures("full_compiles")
SMALL = 256  # elements


def lock(edit: tuple[str, str], folder, mesh) -> Lock:
    step, state, batch = load(edited(edit), folder).make(mesh)
    return lock_of(step.compile(state, batch), SMALL)


@pytest.fixture(scope="module")
def locked(tmp_path_factory, fsdp_mesh, full_compiles) -> Lock:
    return lock(("", ""), tmp_path_factory.mktemp("steps"), fsdp_mesh)


# What the message of each says, in part.
FOUND = {
    "a constraint lost": [
        "all-gather over fsdp: (computed): 64.0 KiB, was 0 B (new).",
        "steps.py make.loss: forward float32[64,64] is P(), was P('fsdp',).",
    ],
    "a rule changed": ["leaf up: spec is P('fsdp',), was P(None, 'fsdp')."],
    "a rule that replicates": [
        "leaf up: spec is P(), was P(None, 'fsdp').",
        "leaf up: role is trained, was trained, gathered.",
    ],
    "a dtype widened": [
        "steps.py make.forward: forward float32[256,64] P(), was bfloat16[256,64] P('fsdp',)"
    ],
    "one more gather": [
        "all-gather over fsdp: state/up: 128.0 KiB, was 64.0 KiB (+100%).",
        "memory, total: ",
    ],
    "a state that is not trained": ["leaf up: role is frozen, gathered, was trained, gathered."],
}


@pytest.mark.parametrize("name", REGRESSIONS)
def test_a_planted_regression_is_found(name, locked, tmp_path, fsdp_mesh) -> None:
    changes, _ = compare_locks(locked, lock(REGRESSIONS[name], tmp_path, fsdp_mesh), "step.lock")
    text = "\n".join(change.text for change in changes)
    for part in FOUND[name]:
        assert part in text


@pytest.mark.parametrize("name", HARMLESS)
def test_an_edit_that_changes_nothing_is_no_difference(name, locked, tmp_path, fsdp_mesh) -> None:
    again = lock(HARMLESS[name], tmp_path, fsdp_mesh)
    changes, notes = compare_locks(locked, again, "step.lock")
    assert changes == ()
    renamed = [note for note in notes if "is now" in note]
    assert bool(renamed) == (name == "a function renamed"), renamed


def with_values(**splits: list[str]) -> Lock:
    """A lock of a step with one value for each name, which is that of its function."""
    values = [
        {"at": f"model.py {name}", "part": "forward", "value": "float32[8,8]", "split": split}
        for name, split in splits.items()
    ]
    return Lock({**EMPTY, "values": values})


EMPTY = {
    "treeshard_lock": 1,
    "devices": "8 x cpu",
    "jax": "0.10.2",
    "mesh": "fsdp=8",
    "min_size": SMALL,
    "treeshard": "0.4.0",
    "leaves": {},
    "collectives": {},
    "memory": {"total": 1000, "on the host": 0},
    "operations": {"on a device": 100, "an even share": 100},
    "values": [],
}


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (["P('fsdp',)"], ["P()"], "differs"),
        (["P('fsdp',)"], ["P('fsdp',)", "P()"], "differs"),
        (["P('fsdp',)"], ["P(None, 'fsdp')"], "differs"),
        (["P('fsdp',)"], ["P(('data', 'fsdp'),)"], "finer"),
        (["P()"], ["P()", "P('fsdp',)"], "finer"),
        (["P()", "P('fsdp',)"], ["P('fsdp',)"], "finer"),
        (["P()", "P('fsdp',)"], ["P()"], "differs"),
        (["over fsdp"], ["P(None, 'fsdp')"], "same"),
        (["over fsdp"], ["P()"], "differs"),
        (["over fsdp"], ["over data"], "differs"),
        (["over fsdp"], ["over fsdp"], "same"),
        (["over fsdp", "unknown"], ["P('fsdp',)"], "same"),
        (["P('fsdp',)"], ["unknown"], "same"),
        (["unknown"], ["P('fsdp',)"], "same"),
        (["P('fsdp',)", "unknown"], ["P()", "unknown"], "same"),
        (["P('fsdp',)", "unknown"], ["P()"], "differs"),
    ],
)
def test_how_values_are_split_is_compared_as_far_as_it_is_known(before, after, verdict) -> None:
    changes, notes = compare_locks(with_values(f=before), with_values(f=after), "step.lock")
    assert len(changes) == (verdict == "differs")
    unknown = "1 value: how they are split is unknown in a program, so it was not compared."
    assert (unknown in notes) == ("unknown" in before + after)
    by_axes = "1 value: which dims are split is unknown in a program: compared by axes only."
    is_by_axes = "over fsdp" in before and "unknown" not in before and verdict == "same"
    assert (by_axes in notes) == is_by_axes
    finer = [note for note in notes if note.endswith("split over more axes than locked.")]
    assert len(finer) == (verdict == "finer")


@pytest.mark.parametrize(
    ("section", "before", "after", "change", "note"),
    [
        ("collectives", {"all-gather: w": 100}, {"all-gather: w": 102}, "", ""),
        ("collectives", {"a: w": 100}, {"a: w": 103}, "a: w: 103 B, was 100 B (+3%).", ""),
        ("collectives", {}, {"a: w": 8}, "a: w: 8 B, was 0 B (new).", ""),
        ("collectives", {"a: w": 8}, {}, "", "a: w: 0 B, was 8 B: less than locked."),
        ("collectives", {"a: w": 8}, {"a: w": None}, "a: w: unknown, was 8 B.", ""),
        ("collectives", {"a: w": None}, {"a: w": 8}, "a: w: 8 B, was unknown.", ""),
        ("collectives", {"a: w": None}, {}, "a: w: 0 B, was unknown.", ""),
        (
            "collectives",
            {"a: w": None},
            {"a: w": None},
            "",
            "a: w: unknown in both, so it was not compared.",
        ),
        ("memory", {"total": 1000}, {"total": 1050}, "", ""),
        (
            "memory",
            {"total": 1000},
            {"total": 1060},
            "memory, total: 1.0 KiB, was 1000 B (+6%).",
            "",
        ),
        (
            "operations",
            {"on a device": 1000},
            {"on a device": 2000},
            "operations, on a device: 2,000, was 1,000 (+100%).",
            "",
        ),
        ("jax", "0.10.2", "0.12.0", "", "The lock is of JAX 0.10.2, and this is JAX 0.12.0."),
    ],
)
def test_sums_have_tolerances_and_unknown_is_not_zero(section, before, after, change, note) -> None:
    locks = [Lock({**EMPTY, section: x}) for x in (before, after)]
    changes, notes = compare_locks(*locks, "step.lock")
    assert [x.text for x in changes] == [change] * bool(change)
    assert list(notes) == [note] * bool(note)


def test_a_lock_for_other_devices_is_not_compared() -> None:
    other = Lock({**EMPTY, "devices": "8 x TPU v5 lite"})
    message = r"step.lock is a lock for 8 x TPU v5 lite \(fsdp=8\), and the step is for 8 x cpu"
    with pytest.raises(ts.errors.MeshError, match=message):
        compare_locks(other, Lock(EMPTY), "step.lock")
    with pytest.raises(ts.errors.MeshError, match="nothing was compared"):
        compare_locks(Lock({**EMPTY, "mesh": "data=8"}), Lock(EMPTY), "step.lock")


def test_a_lock_is_written_the_same_twice_and_read_back(locked, tmp_path) -> None:
    path = tmp_path / "deep" / "step.lock"
    write_lock(locked, path)
    text = path.read_text()
    again = read_lock(path)
    assert again.record == locked.record
    write_lock(again, path)
    assert path.read_text() == text == locked.to_json()
    assert [x.name for x in path.parent.iterdir()] == ["step.lock"]
    assert all(str(tmp_path.parent) not in line for line in text.splitlines())
    assert compare_locks(again, locked, "step.lock").changes == ()
    # A reader of a review sees a line for each leaf and value.
    assert '  "up": {"array": "float32[64,256]",' in text
    assert len(text.splitlines()) > len(locked.record["leaves"]) + len(locked.record["values"])


def test_a_write_that_fails_leaves_the_old_file(locked, tmp_path) -> None:
    path = tmp_path / "step.lock"
    path.write_text("old")
    broken = dataclasses.replace(locked, record={**locked.record, "jax": object()})
    with pytest.raises(TypeError):
        write_lock(broken, path)
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("<<<<<<< HEAD\n{}", "not valid JSON"),
        ("[]", r"a lock is \[\] \(list\), not an object"),
        ("{}", "not a lock: it has no 'treeshard_lock'"),
        ({"treeshard_lock": 2}, "its format is 2, and this version reads 1"),
        ({"treeshard_lock": 1}, "it has no 'devices', 'jax', "),
        ({**EMPTY, "min_size": "all"}, "min_size is 'all'"),
        ({**EMPTY, "collectives": {"a": "b"}}, "collectives: a is 'b'"),
        ({**EMPTY, "leaves": {"w": "P()"}}, "leaves: w is "),
        ({**EMPTY, "values": [{"at": "model.py"}]}, "a value has at"),
        ({**EMPTY, "values": [{"at": 1, "part": "", "value": "", "split": []}]}, "at is 1"),
    ],
)
def test_a_file_that_is_no_lock_is_refused(text, message, tmp_path) -> None:
    path = tmp_path / "step.lock"
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    with pytest.raises(ts.errors.FormatError, match=message) as caught:
        read_lock(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert str(caught.value).endswith("Write the lock again.")
