"""Damages files anywhere in a checkpoint: reading it raises a located error, or is exact."""

import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from helpers import assert_same
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.checkpoint import restore, save, verify

DAMAGES = 2000 if os.environ.get("TREESHARD_SOAK") else 150  # `make soak`
PAGE = 4096
RULES = [("key|whole", None), (".*", P("fsdp"))]


def state(seed: int) -> dict[str, Any]:
    """A state. States of different seeds differ in every leaf that can differ."""
    draw = np.random.default_rng(seed)
    quarters = draw.integers(0, 4, (8, 6))
    return {
        "w": draw.normal(size=(64, 96)).astype(np.float32),
        "half": draw.normal(size=(16, 40)).astype(ml_dtypes.bfloat16),
        "int4": (quarters - 2).astype(ml_dtypes.int4),
        "uint4": quarters.astype(ml_dtypes.uint4),
        "whole": draw.integers(0, 99, 7).astype(np.int32),
        "key": jax.random.split(jax.random.key(seed), 2),
        "empty": np.zeros((0, 8), np.float32),
        "step": 1000 + seed,
        "lr": 0.1 / (1 + seed),
        "name": f"run {seed} of the same model",
        "bytes": bytes([seed, 255 - seed]),
        "none": None,
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, mesh) -> tuple[Path, Path]:
    """A checkpoint, and another one of the same model."""
    where = tmp_path_factory.mktemp("saved")
    for seed, path in enumerate((where / "one", where / "other")):
        tree = state(seed)
        save(path, ts.shard(tree, ts.plan(tree, RULES, mesh, min_size=0)))
    return where / "one", where / "other"


def flip(draw: random.Random, path: Path, other: Path) -> None:
    file, data = some(draw, path)
    for _ in range(draw.choice([1, 1, 1, 2, 20])):
        if data:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def zero(draw: random.Random, path: Path, other: Path) -> None:
    """Zeroes a page of a file, or part of its only page."""
    file, data = some(draw, path)
    start = draw.randrange(0, len(data), PAGE) if len(data) > PAGE else draw.randrange(len(data))
    data[start : start + PAGE] = bytes(len(data[start : start + PAGE]))
    file.write_bytes(data)


def cut(draw: random.Random, path: Path, other: Path) -> None:
    file, data = some(draw, path)
    file.write_bytes(data[: draw.choice([0, draw.randrange(len(data)), len(data) - 1])])


def delete_folder(draw: random.Random, path: Path, other: Path) -> None:
    shutil.rmtree(draw.choice([x for x in sorted(path.rglob("*")) if x.is_dir()]))


def swap_with_other(draw: random.Random, path: Path, other: Path) -> None:
    """Replaces a file with the same file of another checkpoint."""
    file, _ = some(draw, path)
    there = other / file.relative_to(path)
    if not there.exists():  # the name of this file is random
        there = draw.choice(files(there.parent))
    file.write_bytes(there.read_bytes())


OUTCOMES = {"the table of leaves", "leaves that cannot be read", "leaves in other files"}
KINDS = [flip, zero, cut, delete_folder, swap_with_other]


def files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def some(draw: random.Random, path: Path) -> tuple[Path, bytearray]:
    """A non-empty file and its bytes, drawn in proportion to size."""
    there = [file for file in files(path) if file.stat().st_size]
    file = draw.choices(there, [100 + file.stat().st_size for file in there])[0]
    return file, bytearray(file.read_bytes())


def outcomes(path: Path, mesh: jax.sharding.Mesh) -> tuple[str, str]:
    """The outcomes of `restore` and `verify`."""
    whole = state(0)
    like = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") else x
        for name, x in whole.items()
    }
    heard: list[str] = []
    for read in (
        lambda: restore(path, like, rules=RULES, mesh=mesh, min_size=0),
        lambda: verify(path),
    ):
        try:
            found = read()
        except ts.CheckpointError as error:
            heard.append(judged(error, path))
        else:
            if found is not None:
                assert_same(jax.device_get(found), jax.device_get(whole))
            heard.append("nothing was changed")
    return heard[0], heard[1]


def judged(error: ts.CheckpointError, path: Path) -> str:
    """Classifies an error. It names the checkpoint, and the leaves if the table could be read."""
    text = str(error)
    assert str(path) in text.splitlines()[0], text
    if "table of leaves" in text.splitlines()[0]:
        return "the table of leaves"
    assert isinstance(error, ts.DamagedError), text
    facts = text.removeprefix(f"{path}: ").splitlines()
    assert "copy this one again" in facts.pop(), text
    facts = [fact.strip() for fact in (facts[1:] if len(facts) > 1 else facts)]
    assert facts, text
    if "0 leaves and " in text:  # `verify` alone looks at all files
        assert all(fact.startswith("state/") for fact in facts), text
        return "other files"
    files = [fact for fact in facts if fact.startswith("state/")]
    leaves = [fact for fact in facts if fact not in files]
    assert all(fact.split(":")[0] in state(0) for fact in leaves), text
    assert all("state/" in fact or "not in the array store" in fact for fact in leaves), text
    cannot = any("it cannot be read" in fact for fact in facts)
    return "leaves that cannot be read" if cannot else "leaves in other files"


def test_no_damage_is_silent(saved, mesh, tmp_path: Path, capfd, caplog, record_property) -> None:
    one, other = saved
    draw = random.Random(0)
    path, counts = tmp_path / "damaged", Counter[str]()
    for i in range(DAMAGES):
        kind = KINDS[i % len(KINDS)]
        shutil.copytree(one, path)
        kind(draw, path, other)
        try:
            restored, verified = outcomes(path, mesh)
        except BaseException as error:
            error.add_note(f"damage {i}: {kind.__name__}")
            raise
        # A file from which no leaf is read changes no leaf.
        same = "nothing was changed" if verified == "other files" else verified
        assert restored == same, f"damage {i}: {kind.__name__}"
        counts[verified] += 1
        shutil.rmtree(path)
    record_property("damages", ", ".join(f"{n} {name}" for name, n in counts.items()))
    assert {*counts} >= OUTCOMES
    assert not caplog.records
    assert capfd.readouterr() == ("", "")
