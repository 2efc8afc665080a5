"""docs/migrate.md: the lines of Orbax and of safetensors, and ours. Both are asked themselves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from helpers import arange, assert_same, files_in, struct
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from migration import table
from safetensors.numpy import load_file, save_file

import treeshard as ts

# Orbax warns of its older functions, which most programs call.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:orbax")
row = table("From Orbax and safetensors", "data=8")

STATE = {"params": {"w": arange(8, 4), "b": arange(4)}, "pair": (arange(2), 3), "none": None}


def placed(tree: Any = STATE) -> Any:
    return ts.shard(tree, P(), row.mesh)


def plan_of(tree: Any) -> ts.Plan:
    return ts.plan(tree, [("w$", P("data")), (".*", None)], row.mesh, min_size=0)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[Any], tuple[Path, Path]]:
    """Saves a tree with Orbax and with ours."""

    def save(tree: Any) -> tuple[Path, Path]:
        with ocp.StandardCheckpointer() as theirs:
            theirs.save(tmp_path / "theirs", tree)
        ts.checkpoint.save(tmp_path / "ours", tree)
        return tmp_path / "theirs", tmp_path / "ours"

    return save


@row("StandardCheckpointer().save(path, state)")
def test_save(ours, saved, tmp_path: Path) -> None:
    state = placed() | {"act": jax.nn.relu}
    with pytest.raises(ValueError, match="Unsupported type"):
        saved(state)
    ours(path=tmp_path / "state", state=state)
    assert_same(
        ts.gather(ts.checkpoint.restore(tmp_path / "state", state)), STATE | {"act": state["act"]}
    )
    # Orbax reads the arrays of ours.
    arrays = ocp.StandardCheckpointer().restore(tmp_path / "state" / "state")
    assert_same(jax.tree.leaves(arrays)[0], STATE["pair"][0])


@row("StandardCheckpointer().restore(path, abstract_state)", "StandardCheckpointer().restore(path)")
def test_restore(as_planned, as_saved, saved) -> None:
    theirs, ours = saved(placed())
    reader, plan = ocp.StandardCheckpointer(), plan_of(STATE)
    both = reader.restore(theirs, plan.structs), as_planned(path=ours, plan=plan)
    for state in both:
        assert state["params"]["w"].sharding == NamedSharding(row.mesh, P("data"))
        assert_same(ts.gather(state), STATE)

    narrow = plan_of({**STATE, "params": {"w": struct(8, 4, dtype="bfloat16"), "b": struct(4)}})
    assert reader.restore(theirs, narrow.structs)["params"]["w"].dtype == "bfloat16"
    with pytest.raises(ts.MismatchError, match="w: saved as float32.*`cast='bfloat16'`"):
        as_planned(path=ours, plan=narrow)

    whole = reader.restore(theirs)
    assert isinstance(whole["params"]["w"], jax.Array)
    assert isinstance(whole["pair"], list)
    assert_same(as_saved(path=ours), STATE | {"pair": {"0": STATE["pair"][0], "1": 3}})


@row(
    "Checkpointer(PyTreeCheckpointHandler()).restore(path,"
    " args=PyTreeRestore(item, partial_restore=True))",
    'restore(path, args=PyTreeRestore({"params": abstract_params},'
    ' partial_restore=True))["params"]',
)
def test_restore_in_part(of_item, of_subtree, saved) -> None:
    theirs, ours = saved(placed())
    assert ocp.PLACEHOLDER is ...

    def restore(item: Any) -> Any:
        reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
        args = {
            "partial_restore": True,
            "restore_args": ocp.checkpoint_utils.construct_restore_args(item),
        }
        return reader.restore(theirs, args=ocp.args.PyTreeRestore(item, **args))

    params = {"w": jnp.zeros((8, 4)), "b": None}
    for item in ({"params": params}, {"params": params, "pair": (..., 0)}):
        found = of_item(path=ours, item=item)
        assert_same(ts.gather(found), ts.gather(restore(item)))
        assert_same(found["params"], {"w": jnp.asarray(STATE["params"]["w"]), "b": None})
    item = {"params": params, "new": jnp.ones(3)}
    assert_same(restore(item)["new"], item["new"])
    with pytest.warns(ts.ShardingWarning, match="new: not in"):
        assert of_item(path=ours, item=item)["new"] is item["new"]

    plan = plan_of(STATE)
    found = of_subtree(path=ours, plan=plan)
    assert_same(found, restore({"params": plan.structs["params"]})["params"])
    assert not ts.diff_shardings(found, plan["params"])


test_checkpoints = row.keeps_checkpoints(
    "CheckpointManager(directory,"
    " options=CheckpointManagerOptions(max_to_keep=3, save_interval_steps=100))",
    SAVED := {0: True, 50: False, 100: True, 150: False, 200: True, 300: True},
    KEPT := (100, 200, 300),
)


def test_steps_that_orbax_keeps(tmp_path: Path) -> None:
    options = ocp.CheckpointManagerOptions(max_to_keep=3, save_interval_steps=100)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        args = ocp.args.StandardSave({"x": jnp.ones(2)})
        assert {step: manager.save(step, args=args) for step in SAVED} == SAVED
        manager.wait_until_finished()
        assert tuple(manager.all_steps()) == KEPT


@row(
    'safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})',
    "safetensors.numpy.load_file(path)",
    'model.save_pretrained(folder, max_shard_size="5GB")',
)
def test_safetensors(save, load, save_folder, tmp_path: Path) -> None:
    tensors, theirs, ours = {"w": arange(8, 4), "b": arange(4)}, tmp_path / "x", tmp_path / "new/y"
    save_file(tensors, theirs, metadata={"format": "pt"})
    save(tensors=tensors, path=ours.with_suffix(".safetensors"))
    assert ours.with_suffix(".safetensors").read_bytes() == theirs.read_bytes()
    assert_same(load(path=ours.parent), load_file(theirs))
    save_folder(folder=tmp_path / "out", params={"w": placed(tensors["w"])})
    assert files_in(tmp_path / "out") == ["model.safetensors"]
    assert_same(load(path=tmp_path / "out"), {"w": np.asarray(tensors["w"])})
