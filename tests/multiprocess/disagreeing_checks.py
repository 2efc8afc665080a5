"""Calls that differ between processes raise on all of them, before anything can hang."""

import time
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.multiprocess.worker import Context, arriving_last, error_of, start_again, without_lines
from treeshard._core.processes import exchange, require_agreement

HEADLINE = (
    ": the call differs between processes and was cancelled. All processes must make the same call."
    " The differences:\n  "
)


def mesh() -> Mesh:
    return ts.make_mesh("data=3,fsdp=2")


def tree() -> dict[str, Any]:
    return {"layers": [{"w": np.ones((6, 4), np.float32), "b": np.ones(6, np.float32)}]}


def mesh_of(*processes: int) -> Mesh:
    devices = [d for i in processes for d in jax.local_devices(process_index=i)]
    return Mesh(np.array(devices), ("fsdp",), axis_types=(AxisType.Auto,))


def assert_all_can_go_on() -> None:
    whole = ts.gather(ts.shard(tree(), P("data"), mesh()))
    np.testing.assert_array_equal(whole["layers"][0]["w"], np.ones((6, 4)))


def check_other_specs_shapes_leaves_and_meshes(context: Context) -> None:
    spec = P() if context.index == 2 else P("data")
    told = error_of(lambda: ts.shard(tree(), spec, mesh()))
    assert told == f"shard{HEADLINE}" + "\n  ".join(
        f"layers/0/{name}: {x} as P('data',) on processes 0, 1; {x} as P() on process 2"
        for name, x in (("b", "float32[6]"), ("w", "float32[6,4]"))
    )
    x = np.ones((12 if context.index == 1 else 6), np.float32 if context.index else np.int32)
    more = {"v": np.ones(6, np.float32)} if context.index == 0 else {}
    assert error_of(lambda: ts.shard({"w": x} | more, P("data"), mesh())) == (
        f"shard{HEADLINE}v: float32[6] as P('data',) on process 0; nothing on processes 1, 2\n"
        "  w: int32[6] as P('data',) on process 0; float32[12] as P('data',) on process 1;"
        " float32[6] as P('data',) on process 2"
    )
    here = mesh()
    if context.index == 1:
        here = Mesh(here.devices[::-1], here.axis_names, axis_types=here.axis_types)
    told = error_of(lambda: ts.shard(tree(), P("data"), here))
    assert told.startswith(f"shard{HEADLINE}the mesh: data=3, fsdp=2 on the devices ")
    assert " on processes 0, 2; data=3, fsdp=2 on the devices " in told
    specs = {"a/b": P() if context.index == 0 else P("data"), "a": {"b": P("data")}}
    both = {"a/b": np.ones(6, "f"), "a": {"b": np.ones(6, "f")}}  # leaves that share a path
    told = error_of(lambda: ts.shard(both, specs, mesh()))
    assert "a/b (again): float32[6] as P() on process 0" in told
    assert_all_can_go_on()


def check_other_values(context: Context) -> None:
    here = {
        "w": np.ones((6, 4), np.float32),
        "large": np.ones((6, 2**14), np.float32),
        "key": jax.random.split(jax.random.key(context.index == 1), 6),
    }
    if context.index == 2:
        here["w"][5, 3] += 2**-23
        here["large"] = here["large"] * 2
    for move in (ts.shard, ts.reshard):
        told = error_of(lambda move=move: move(here, P("data"), mesh())).splitlines()
        assert [line.split(":")[0] for line in told[1:]] == ["  key (values)", "  w (values)"], told
        assert " on processes 0, 1; CRC-32 " in told[2]
    told = error_of(lambda: ts.shard(here, P("data"), mesh(), check="values"))
    assert "\n  large (values): CRC-32 " in told
    ts.shard(here, P("data"), mesh(), check="form")
    ts.shard({"large": here["large"]}, P("data"), mesh())  # too large for the default
    said = "shard(check='all'): one of 'form', 'small', 'values'."
    assert error_of(lambda: ts.shard(here, P("data"), mesh(), check="all"), ValueError) == said


def check_other_inputs_of_an_initialiser(context: Context) -> None:
    def init(key: jax.Array, scale: float) -> Any:
        return {"w": jax.random.normal(key, (6, 4)) * scale}

    def call(key: int = 0, scale: float = 1.0) -> Any:
        rules = [(".*", P("data"))]
        return ts.init_sharded(init, jax.random.key(key), scale, rules=rules, mesh=mesh())

    other = int(context.index == 2)
    told = error_of(lambda: call(key=other))
    assert "\n  argument 0 (values): CRC-32 " in told
    told = error_of(lambda: call(scale=1.0 + other))
    assert told.endswith("\n  argument 1: 1.0 on processes 0, 1; 2.0 on process 2")
    ts.gather(call()[0])


def check_other_receivers_and_orders_of_leaves(context: Context) -> None:
    placed = ts.shard(tree(), P("data"), mesh())
    for read in (ts.gather, ts.iter_gather):
        assert error_of(lambda read=read: read(placed, to=min(context.index, 1))) == (
            f"{read.__name__}{HEADLINE}the argument `to`: 0 on process 0; 1 on processes 1, 2"
        )
    facts = {"a": "x", "b": "y"}
    here = dict(reversed(facts.items())) if context.index == 0 else facts

    def agree() -> None:
        with require_agreement("save") as told:
            told |= here

    assert error_of(agree) == f"save{HEADLINE}leaf 0: 'b' on process 0; 'a' on processes 1, 2"


def check_an_error_on_one_process_is_raised_on_all(context: Context) -> None:
    spec = P("dota") if context.index == 1 else P("data")
    kind = ts.UnknownAxisError if context.index == 1 else ts.ProcessError
    told = error_of(lambda: ts.shard(tree(), spec, mesh()), kind)
    assert "2 leaves cannot be moved: the mesh has no axis 'dota'" in told
    assert "layers/0/b: float32[6] as P('dota',) on the mesh (data=3, fsdp=2)" in told
    if context.index != 1:
        fact = "shard: the call was cancelled, because process 1 raised UnknownAxisInSpecError: sh"
        assert told.startswith(fact)
    placed = ts.shard(tree(), P("data"), mesh())
    if context.index == 0:
        placed["layers"][0]["w"].delete()
    kind = ts.DeletedLeafError if context.index == 0 else ts.ProcessError
    for read in (ts.gather, ts.iter_gather):
        told = error_of(lambda read=read: read(placed), kind)
        assert "layers/0/w: float32[6,4]: the array was deleted" in told
    assert_all_can_go_on()


def check_a_process_that_does_not_arrive_is_named(context: Context) -> None:
    for what, call in {
        "shard": lambda: ts.shard(tree(), P("data"), mesh(), timeout=1.0),
        "from_process_local": lambda: ts.from_process_local(
            np.ones(8, "f"), P("fsdp"), mesh_of(0, 1, 2), timeout=1.0
        ),
    }.items():
        exchange("ready", b"")
        with arriving_last(context, 2, what):
            told = error_of(call)
        assert told.startswith(
            f"{what}: process 2 of 3 did not arrive within 1 s. The call was cancelled."
        )


def check_a_slow_read_is_waited_for(context: Context) -> None:
    def read(path: str, index: tuple[slice, ...]) -> np.ndarray:
        time.sleep(1.5 if context.index == 2 else 0)
        return np.ones(2, np.float32)

    exchange("ready", b"")
    struct = jax.ShapeDtypeStruct((6,), np.float32)
    placed = ts.shard(struct, P("data"), mesh(), read=read, timeout=1)
    np.testing.assert_array_equal(ts.gather(placed), np.ones(6))


def check_a_process_that_stops_iterating_is_named(context: Context) -> None:
    leaves = {f"{i}": np.ones((6, 2**20), np.float32) for i in range(3)}  # more than a chunk each
    placed = ts.shard(leaves, P("data"), mesh())
    read = ts.iter_gather(placed, to=0, timeout=2)
    assert next(read)[0] == "0"
    exchange("ready", b"")
    if context.index == 1:
        read.close()
    with arriving_last(context, 1, "iter_gather"):
        if context.index == 1:
            told = without_lines(error_of(lambda: ts.gather(placed)))
            assert told.startswith("gather: process 1 of 3 did not arrive within 2 s. "), told
            assert " It was at iter_gather, at 1 (call " in told
        else:
            told = error_of(lambda: list(read))
            assert told.startswith("iter_gather, at 1 (call ")
            assert "process 1 of 3 did not arrive within 2 s" in told
    assert [path for path, _ in ts.iter_gather(placed, to=0, timeout=20)] == ["0", "1", "2"]
    assert_all_can_go_on()


def check_parts_of_a_batch_that_differ(context: Context) -> None:
    part = np.ones((2 if context.index else 4, 5), np.float32)
    assert error_of(lambda: ts.from_process_local({"x": part}, P("data"), mesh())) == (
        f"from_process_local{HEADLINE}x: float32[4,5] as P('data',) on process 0; float32[2,5] as"
        " P('data',) on processes 1, 2"
    )
    part = {"x": np.ones((2, 5), np.float32)}
    ts.from_process_local(part, P("data"), mesh())
    if context.index != 1:  # process 1 waits for none of the others: parts are compared once
        time.sleep(0.5)
    ts.from_process_local(part, P("data"), mesh(), timeout=0.2)


def check_parts_that_cannot_be_joined(context: Context) -> None:
    placed = ts.shard(np.ones(6, np.float32), P("data"), mesh())
    parts, specs = {"a": np.ones((3, 2), "f"), "c": placed}, {"a": P(("data", "fsdp")), "c": P()}
    told = error_of(lambda: ts.from_process_local(parts, specs, mesh()), ts.SpecError)
    assert "2 leaves cannot be moved:" in told
    assert "joined, the parts have shape (9, 2). P(('data', 'fsdp'),) splits dim 0 of shape" in told
    assert "c: float32[6]: it is already on devices of several processes. `reshard` moves" in told
    devices = np.array([jax.devices()[i] for i in (0, 1, 2, 4, 3, 5)]).reshape(3, 2)
    mixed = Mesh(devices, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    told = error_of(lambda: ts.from_process_local(np.ones(6, "f"), P("data"), mixed), ts.SpecError)
    assert "the processes hold overlapping parts of dim 0, so it is undefined which part" in told
    assert "Order the devices of the mesh so that each process has parts of its own" in told


def check_a_mesh_of_some_processes_needs_no_other(context: Context) -> None:
    if context.index == 1:
        placed = ts.shard(tree(), P("fsdp"), mesh_of(1), timeout=0.2)
        whole = ts.gather(ts.reshard(placed, P(), mesh_of(1), timeout=0.2), timeout=0.2)
        np.testing.assert_array_equal(whole["layers"][0]["w"], np.ones((6, 4)))
        batch = ts.from_process_local(np.ones(6, "f"), P("fsdp"), mesh_of(1), timeout=0.2)
        assert batch.shape == (6,)
    x = np.arange(8, dtype=np.float32)
    if context.index != 2:
        placed = ts.shard(x, P("fsdp"), mesh_of(0, 1), timeout=20)
        np.testing.assert_array_equal(ts.gather(placed, timeout=20), x)


def check_a_third_process_may_watch_or_receive(context: Context) -> None:
    tree = {"x": np.arange(8, dtype=np.float32), "key": jax.random.split(jax.random.key(0), 4)}
    placed = ts.shard(tree, P("fsdp"), mesh_of(0, 1), timeout=20)
    for to, here in (("all", (0, 1)), (0, (0,)), (2, (2,))):
        got = ts.gather(placed, to=to, timeout=20)
        if context.index in here:
            np.testing.assert_array_equal(got["x"], tree["x"])
            assert (got["key"] == tree["key"]).all()
        else:
            assert got["x"] == jax.ShapeDtypeStruct((8,), np.float32)
        assert len(list(ts.iter_gather(placed, to=to, timeout=20))) == 2
    for others, spec in ((mesh_of(1, 2), P("fsdp")), (mesh_of(1, 0), P())):
        moved = ts.reshard(placed, spec, others, timeout=20)
        assert moved["key"].sharding.mesh == others
        for shard in moved["x"].addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), tree["x"][shard.index])
    placed = ts.shard(tree["x"][:6], P("fsdp"), mesh_of(0))  # which process 0 has alone
    moved = ts.reshard(placed, P("data"), mesh())
    np.testing.assert_array_equal(ts.gather(moved), tree["x"][:6])


def check_leaves_that_single_processes_have_alone_are_an_error(context: Context) -> None:
    x = np.arange(6, dtype=np.float32)
    placed = {f"of {i}": ts.shard(x, P("fsdp"), mesh_of(i)) for i in (0, 1)}
    for tree in (placed, placed | {"of all": ts.shard(x, P("data"), mesh())}):
        for read in (lambda tree: [*ts.gather(tree).items()], lambda tree: [*ts.iter_gather(tree)]):
            if context.index == 2 and "of all" not in tree:  # it has no part of the tree
                assert {value for _, value in read(tree)} == {jax.ShapeDtypeStruct((6,), "float32")}
                start_again()
                continue
            told = error_of(lambda tree=tree, read=read: read(tree), ts.LeafError)
            for other in {0, 1} - {context.index}:
                assert f"of {other}: float32[6]: it is on devices of process {other} alone" in told
    moved = ts.gather(ts.reshard(placed, P("data"), mesh()))
    np.testing.assert_array_equal(moved["of 0"], x)
    np.testing.assert_array_equal(moved["of 1"], x)
