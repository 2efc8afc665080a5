"""Paths and texts of any kind, and files that change or are withheld: what is raised is typed."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard._core.text import parse_names, parse_spec
from treeshard.checkpoint import Checkpoints, _array_store, inspect, restore, save, verify
from treeshard.compat._strategies import parse_strategy
from treeshard.interchange import load_safetensors, save_safetensors

TREE = {"w": np.ones((8, 4), np.float32)}


# ------------------------------------------------------------------ paths


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("hdfs://a/b", "hdfs://a/b: there is no access to hdfs://. Pass a local path, gs:// or"),
        ("http://a/b", "http://a/b: there is no access to http://. Pass a local path, gs:// or"),
        ("a\0b", r"a\x00b: a path cannot contain a NUL character."),
    ],
)
def test_a_path_that_is_none_is_an_error_of_every_function(path, message) -> None:
    calls = [lambda: save(path, TREE), lambda: restore(path), lambda: inspect(path)]
    calls += [lambda: verify(path), lambda: Checkpoints(path), lambda: save_safetensors(path, TREE)]
    for call in [*calls, lambda: load_safetensors(path)]:
        with pytest.raises(ts.CheckpointError) as told:
            call()
        assert str(told.value).startswith((message, f"{path} is not in a file system."))


def test_the_root_is_no_checkpoint() -> None:
    with pytest.raises(ts.CheckpointError, match="^/ is the root of a file system. Save to a dir"):
        save("/", TREE)


def test_tildes_and_addresses_of_files_are_paths(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save("~/one", TREE)
    assert inspect(f"file://{tmp_path}/one").path == str(tmp_path / "one")
    save_safetensors("~/x.safetensors", TREE)
    assert list(load_safetensors(f"file://{tmp_path}/x.safetensors")) == ["w"]
    with Checkpoints("~/run") as run:
        run.save(1, TREE)
    assert Checkpoints(tmp_path / "run", read_only=True).steps() == (1,)


# ------------------------------------------------------------------ permissions and races


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """A directory, in a process that must obey permissions, unlike root."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    save(folder / "run/1", {"w": np.ones((1024, 4), np.float32)})
    yield folder
    os.seteuid(os.getuid())
    folder.chmod(0o755)
    for path in [folder / "run", *(x for x in folder.rglob("*") if x.is_dir())]:
        path.chmod(0o755)
    shutil.rmtree(folder)


def forbid(*paths: Path) -> None:
    for path in paths:
        path.chmod(0)
    if os.getuid() == 0:
        os.seteuid(65534)


@pytest.mark.parametrize("name", ["state/manifest.ocdbt", "state/d", "state/ocdbt.process_0/d/*"])
def test_files_that_may_not_be_read_are_not_damaged(as_nobody: Path, name: str) -> None:
    # TensorStore writes one file of data or two, of which reading may need only one.
    forbid(*(as_nobody / "run/1").glob(name))
    for call in (verify, restore):
        with pytest.raises(ts.CheckpointError, match="Permission|PERMISSION_DENIED") as told:
            call(as_nobody / "run/1")
        assert not isinstance(told.value, ts.DamagedError)


def test_steps_that_may_not_be_listed_are_an_error(as_nobody: Path) -> None:
    forbid(as_nobody / "run")
    with pytest.raises(ts.CheckpointError, match="run cannot be listed: Permission denied."):
        Checkpoints(as_nobody / "run", read_only=True).steps()


def test_a_reader_that_races_keep_reads_the_later_step(tmp_path: Path, monkeypatch) -> None:
    run = Checkpoints(tmp_path, keep=1)
    run.save(1, {"w": TREE["w"]})
    run.wait()
    reader = Checkpoints(tmp_path, read_only=True)
    read = _array_store.ArrayStore.read

    def save_first(*args, **options):
        if run.steps() == (1,):
            run.save(2, {"w": 2 * TREE["w"]})
            run.wait()
        return read(*args, **options)

    monkeypatch.setattr(_array_store.ArrayStore, "read", save_first)
    with pytest.raises(ts.CheckpointError) as told:
        reader.restore(1)
    assert f"{tmp_path}/1 was removed while it was read" in str(told.value)
    assert not isinstance(told.value, ts.DamagedError)
    shutil.rmtree(tmp_path / "2")
    run.save(1, TREE)
    run.wait()
    step, tree = reader.restore_latest()
    assert (step, tree["w"].max()) == (2, 2)
    run.close()


# ------------------------------------------------------------------ text


@pytest.mark.parametrize(
    "parse",
    [
        lambda: parse_spec("P(0x" + "f" * 100_000 + ")"),
        lambda: parse_spec("P(0x" + "f" * 3_400 + ")"),
        lambda: parse_names("(0x" + "f" * 100_000 + ",)"),
        lambda: parse_strategy("-" * 100_000 + "1"),
        lambda: parse_strategy("-" * 3_400 + "1"),
        lambda: parse_strategy("a." * 1_700 + "b()"),
    ],
)
def test_text_beyond_the_limits_of_python_is_an_error(parse) -> None:
    with pytest.raises((ts.FormatError, ts.ShardingRuleError)) as told:
        parse()
    assert len(str(told.value)) < 9_000


def test_axis_types_of_jax_are_an_error(unchecked) -> None:
    with pytest.raises(ts.MeshError) as told:
        ts.make_mesh("data=2,fsdp=4", axis_types=AxisType.Explicit)
    assert str(told.value).endswith("Pass 'auto' or 'explicit', or a dict of these by axis.")


def test_empty_arrays_are_gathered_after_they_were_resharded(mesh) -> None:
    empty = {"e": np.zeros((8, 0), np.float32), "k": jax.random.split(jax.random.key(0), (8, 0))}
    moved = ts.reshard(ts.shard(empty, P("fsdp"), mesh), P("data"), mesh)
    for full in (ts.gather(moved), ts.gather(moved, to=0), dict(ts.iter_gather(moved))):
        assert {name: x.shape for name, x in full.items()} == {"e": (8, 0), "k": (8, 0)}


def test_names_cannot_command_the_terminal(tmp_path: Path) -> None:
    red = "\x1b[31mw\n9 leaves\u202e"
    save(tmp_path / "x", {red: np.ones(2, np.float32)})
    shown = str(inspect(tmp_path / "x"))
    assert r"\x1b[31mw\n9 leaves\u202e" in shown
    assert shown.replace("\n", "").isprintable()
    with pytest.raises(ts.MismatchError) as told:
        restore(tmp_path / "x", {"w": np.ones(2, np.float32)})
    assert "\x1b" not in str(told.value)
