"""A restart by the loop of the page holds the state once, on the devices and on the host."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same

import treeshard as ts
from treeshard._disk import to_devices
from treeshard.checkpoint import Checkpoints
from treeshard.training import init_sharded

ROOT = Path(__file__).parents[2]
RULES = [(".*", ts.fsdp("fsdp", min_size=0))]


class State(eqx.Module):
    layers: list[jax.Array]
    step: jax.Array
    key: jax.Array
    activation: Callable


def init(key: jax.Array) -> State:
    layers = [jax.random.normal(jax.random.fold_in(key, i), (256, 256)) for i in range(8)]
    return State(layers, jnp.int32(0), key, jax.nn.relu)


BYTES = 8 * 256 * 256 * 4


def bytes_on_devices() -> int:
    """The bytes of all live arrays; views of one buffer count once."""
    numbers = [x for x in jax.live_arrays() if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    shards = [shard.data for x in numbers for shard in x.addressable_shards]
    return sum({x.unsafe_buffer_pointer(): x.nbytes for x in shards}.values())


def documented_loop() -> str:
    page = (ROOT / "docs/how-to/checkpoints.md").read_text()
    [loop] = re.findall(r"```python\n(key = .*?    done, state = [^\n]*\n)", page, re.DOTALL)
    return loop


def test_a_restart_holds_the_state_once(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = documented_loop()
    names: dict[str, Any] = {
        "jax": jax, "eqx": eqx, "ts": ts, "Checkpoints": Checkpoints,
        "init_sharded": init_sharded, "init": init, "rules": RULES,
    }  # fmt: skip
    first = dict(names)
    exec(text, first)
    assert first["done"] == 0
    with Checkpoints("run") as checkpoints:
        checkpoints.save(7, first["state"])
    expected = ts.gather(first.pop("state"))
    first.clear()

    seen: list[int] = []
    moved = to_devices._move_regions

    def watched(*args: Any) -> Any:
        result = list(moved(*args))
        seen.append(bytes_on_devices())
        return result

    monkeypatch.setattr(to_devices, "_move_regions", watched)
    before = bytes_on_devices()
    again = dict(names)
    exec(text, again)
    times = (max(seen) - before) / BYTES
    assert times == pytest.approx(1, abs=0.1)
    assert again["done"] == 7
    assert again["state"].activation is jax.nn.relu
    assert_same(ts.gather(again["state"]), expected)


def test_no_page_or_example_initialises_before_it_restores() -> None:
    files = [ROOT / "README.md", *(ROOT / "examples").iterdir(), *(ROOT / "docs").rglob("*.md")]
    loops = [file for file in files if file.is_file() and "restore_latest(" in file.read_text()]
    assert len(loops) >= 3
    assert [file for file in loops if "or (0, state)" in file.read_text()] == []
