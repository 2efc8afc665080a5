"""The table behind docs/errors.md: everything that has a name in what treeshard raises or reports.

An entry has code that provokes it and code that does not. `tests/test_catalogue.py` runs both, and
finds in the sources what has no entry; `python tests/errors_page.py` writes the page.
"""

from typing import NamedTuple


class Entry(NamedTuple):
    """One class, code or kind.

    Attributes:
        name: The class, code or kind, as it is printed.
        means: What it says, and what to do.
        wrong: Code that raises or prints it.
        right: Code that does neither, and says so (`assert`) where nothing would be raised.
        about: Stands beside the name in the heading, where a name has several entries.
        shows: What `wrong` prints, if it is not the name.
    """

    name: str
    means: str
    wrong: str
    right: str
    about: str = ""
    shows: str = ""


class Group(NamedTuple):
    """Entries of one symptom, with the code that they share."""

    title: str
    about: str
    setup: str
    entries: list[Entry]


SETUP = """
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

import treeshard as ts
from treeshard.manual import value_and_grad
from treeshard.training import init_sharded, jit_step, shard_map_step

ts.simulate_devices(8)
mesh = ts.make_mesh("data=2,fsdp=4")
w = np.ones((1024, 64), "float32")
"""

# ------------------------------------------------------------------ where

MESHES = Group(
    "A mesh is missing, or an axis",
    "",
    "",
    [
        Entry(
            "NoMeshError",
            "A mesh is needed, and neither an argument nor a context gives one. It is a"
            " `RuntimeError` too.",
            """
            ts.shard(w, P("fsdp"))
            """,
            """
            ts.shard(w, P("fsdp"), mesh)
            with jax.set_mesh(mesh):
                ts.shard(w, P("fsdp"))
            """,
        ),
        Entry(
            "MeshError",
            "A mesh cannot be built, or is not one that can be used here: its sizes do not"
            " multiply to the devices there are, its text cannot be read, or it is abstract where"
            " devices are needed. It is a `ValueError` too.",
            """
            ts.make_mesh("data=3,fsdp=4")
            """,
            """
            ts.make_mesh("data=2,fsdp=-1")
            """,
        ),
        Entry(
            "UnknownAxisError",
            "The mesh has no axis of this name. What takes names of axes raises it; rules and"
            " specs raise the two classes below, which are of this class too. It is a"
            " `ValueError` and a `KeyError`.",
            """
            ts.get_axes_size_in_mesh("fdsp", mesh)
            """,
            """
            ts.get_axes_size_in_mesh("fsdp", mesh)
            """,
        ),
        Entry(
            "UnknownAxisInRuleError",
            "Rules name an axis that the mesh lacks: a `ShardingRuleError` and an"
            " `UnknownAxisError`. Other misfits of the same rules are in the message too.",
            """
            rules = [("w", P("fdsp"))]
            ts.match_partition_rules(rules, {"w": w}, mesh)
            """,
            """
            rules = [("w", P("fsdp"))]
            ts.match_partition_rules(rules, {"w": w}, mesh)
            """,
        ),
        Entry(
            "UnknownAxisInSpecError",
            "Specs name an axis that the mesh lacks: a `SpecError` and an `UnknownAxisError`."
            " Where one model is to run on many meshes, `with_sharding_constraint` drops such"
            " axes.",
            """
            ts.shard({"w": w}, {"w": P("tensor")}, mesh)
            """,
            """
            ts.shard({"w": w}, {"w": P("fsdp")}, mesh)
            """,
        ),
        Entry(
            "axis-not-in-mesh",
            "The same as a finding: a plan does not raise. The axis is dropped, and"
            " `plan.check()` raises.",
            """
            plan = ts.plan({"w": w}, [("w", P("data", "tensor"))], mesh)
            print(*plan.findings)
            """,
            """
            tensor = ts.make_mesh("data=2,tensor=4")
            plan = ts.plan({"w": w}, [("w", P("data", "tensor"))], tensor)
            assert not plan.findings
            """,
        ),
    ],
)

# ------------------------------------------------------------------ decide

RULES = Group(
    "Rules do not say what they should",
    "`plan.findings` has all of these at once, from shapes alone; [a broken list,"
    " mended](broken-rules.md) goes through one.",
    "",
    [
        Entry(
            "ShardingRuleError",
            "Rules are malformed, leave a leaf undecided, or do not fit one. All such leaves are in"
            " the message. `init_sharded`, `match_partition_rules` and `Plan.check` raise it;"
            " `strict=False` records instead. It is a `ValueError` too.",
            """
            def init():
                return {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 64))}


            init_sharded(init, rules=[("up", P("fsdp"))], mesh=mesh)
            """,
            """
            rules = [("up", P("fsdp")), (".*", None)]
            state, plan = init_sharded(init, rules=rules, mesh=mesh)
            """,
        ),
        Entry(
            "unmatched",
            "No rule matches the leaf's path. In the plan it is whole on every device.",
            """
            plan = ts.plan({"mlp": {"w": w}}, [("^w", P("fsdp"))], mesh)
            print(*plan.findings, sep="\\n")
            """,
            """
            plan = ts.plan({"mlp": {"w": w}}, [("w", P("fsdp"))], mesh)
            assert not plan.findings
            """,
        ),
        Entry(
            "dead-rule",
            "A rule matches no leaf, or only scalars, which need none. Most often its pattern is"
            " misspelt, and a later rule has taken its leaves.",
            """
            plan = ts.plan({"mlp": w}, [("mpl", P("fsdp")), (".*", P("data"))], mesh)
            print(*plan.findings)
            """,
            """
            plan = ts.plan({"mlp": w}, [("mlp", P("fsdp")), (".*", P("data"))], mesh)
            assert not plan.findings
            """,
        ),
        Entry(
            "shadowed-rule",
            "Every leaf that a rule matches is taken by earlier rules. A last rule that matches"
            " every leaf is a net under the others, and no finding.",
            """
            tree = {"mlp": {"w": w}, "head": w}
            rules = [("w|head", P("data")), ("mlp", P("fsdp"))]
            print(*ts.plan(tree, rules, mesh).findings)
            """,
            """
            rules = [("mlp", P("fsdp")), ("w|head", P("data"))]
            assert not ts.plan(tree, rules, mesh).findings
            """,
        ),
        Entry(
            "path-collision",
            "Two leaves have one path, so no rule and no file can tell them apart.",
            """
            tree = {"mlp/w": w, "mlp": {"w": w}}
            print(*ts.plan(tree, [("w", P("fsdp"))], mesh).findings)
            """,
            """
            tree = {"mlp.w": w, "mlp": {"w": w}}
            assert not ts.plan(tree, [("w", P("fsdp"))], mesh).findings
            """,
        ),
        Entry(
            "name-without-rule",
            "A logical name of a dim has no logical rule, so the dim is not sharded. If that is"
            ' meant, say so: `("mlp", None)`.',
            """
            with ts.logical_axis_rules([("embed", "fsdp")]):
                plan = ts.plan({"w": w}, [("w", ("embed", "mlp"))], mesh)
            print(*plan.findings)
            """,
            """
            with ts.logical_axis_rules([("embed", "fsdp"), ("mlp", None)]):
                plan = ts.plan({"w": w}, [("w", ("embed", "mlp"))], mesh)
            assert not plan.findings
            """,
        ),
        Entry(
            "already-sharded",
            "A tactic is to shard, or to replicate, what an earlier one of the same rule has"
            " sharded.",
            """
            rules = [("w", ts.shard_dim("data", 0) | ts.shard_dim("fsdp", 0))]
            print(*ts.plan({"w": w}, rules, mesh).findings)
            """,
            """
            rules = [("w", ts.shard_dim(("data", "fsdp"), 0))]
            assert not ts.plan({"w": w}, rules, mesh).findings
            """,
        ),
    ],
)

WHOLE = Group(
    "A leaf is whole, or not split as asked",
    "A plan says what was not done as asked beside each leaf, and as values in"
    " `leaf.adjustments`. What nobody would want is in `plan.findings` too. See [why is this leaf"
    " replicated](how-to/replicated.md).",
    "",
    [
        Entry(
            "indivisible",
            "The sizes of the axes do not divide the dim. Those that do, from the first on, are"
            " kept. JAX would replicate such an array in a jitted function, and say nothing.",
            """
            odd = np.ones((1022, 64), "float32")
            print(*ts.plan({"w": odd}, [("w", P(("data", "fsdp")))], mesh).findings)
            """,
            """
            rules = [("w", P("data", "fsdp"))]
            assert not ts.plan({"w": odd}, rules, mesh).findings
            """,
        ),
        Entry(
            "rank",
            "A spec has more entries than the leaf has dims. Entries never move to another dim:"
            " this one is dropped.",
            """
            stack = {"w": w, "scale": np.ones(32768, "float32")}
            print(*ts.plan(stack, [(".*", P("data", "fsdp"))], mesh).findings)
            """,
            """
            rules = [("scale", P("data")), (".*", P("data", "fsdp"))]
            assert not ts.plan(stack, rules, mesh).findings
            """,
        ),
        Entry(
            "axis-already-used",
            "A spec names an axis twice. It goes to the first dim that names it.",
            """
            print(*ts.plan({"w": w}, [("w", P("fsdp", "fsdp"))], mesh).findings)
            """,
            """
            assert not ts.plan({"w": w}, [("w", P("fsdp", "data"))], mesh).findings
            """,
        ),
        Entry(
            "too-small",
            "The leaf has fewer elements than `min_size`, so it stays whole: gathering many small"
            " arrays costs more time than their memory is worth. The floor is the tactic's own,"
            " else the call's, else `MIN_SHARDING_SIZE` from the environment, else 16384.",
            """
            bias = np.ones(512, "float32")
            plan = ts.plan({"bias": bias}, [("bias", P("fsdp"))], mesh)
            for note in plan.leaves[0].adjustments:
                print(f"{note.kind}: {note.why}")
            """,
            """
            plan = ts.plan({"bias": bias}, [("bias", P("fsdp"))], mesh, min_size=0)
            assert not plan.leaves[0].adjustments
            """,
        ),
        Entry(
            "no-dim",
            "`fsdp` finds no dim that is free, not in `skip`, and divisible by the sizes of its"
            " axes.",
            """
            odd = np.ones((1022, 127), "float32")
            plan = ts.plan({"w": odd}, [("w", ts.fsdp("fsdp"))], mesh)
            for note in plan.leaves[0].adjustments:
                print(f"{note.kind}: {note.why}")
            """,
            """
            plan = ts.plan({"w": odd}, [("w", ts.fsdp("data"))], mesh)
            assert not plan.leaves[0].adjustments
            """,
        ),
        Entry(
            "left-whole",
            "A leaf of at least `min_size` elements is whole on every device, and 1% or more of"
            " what a device holds could be saved. The reason is in the finding.",
            """
            print(*ts.plan({"w": w}, [("w", None)], mesh).findings)
            """,
            """
            assert not ts.plan({"w": w}, [("w", ts.fsdp("fsdp"))], mesh).findings
            """,
        ),
        Entry(
            "scan-dim",
            "Leaves seem to be layers stacked on dim 0 for a `lax.scan`, and are sharded on it: the"
            " scan then moves every layer to every device. Nothing says that layers are stacked;"
            " they are told by their shapes.",
            """
            layers = {"norm": w[:8], "up": np.ones((8, 64, 256), "float32")}
            rules = [("norm", None), ("up", P("fsdp"))]
            print(*ts.plan({"layers": layers}, rules, mesh).findings)
            """,
            """
            rules = [("norm", None), ("up", P(None, "fsdp"))]
            assert not ts.plan({"layers": layers}, rules, mesh).findings
            """,
        ),
        Entry(
            "axis-is-manual",
            "Inside `shard_map` the code runs once per device along an axis already, so"
            " `with_sharding_constraint` drops it: one layer may be called in both ways. This is"
            " nothing to mend, and nowhere reported.",
            """
            def layer(x):
                y = ts.with_sharding_constraint(x, P("data"), mesh)
                print(x.shape, "left as it is" if y is x else "constrained")
                return y


            y = jax.jit(layer)(w)
            y = jax.shard_map(layer, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(w)
            """,
            "",
            shows="left as it is",
        ),
        Entry(
            "ShardingWarning",
            "The one class of warnings: something is not sharded as asked. Turn it into an error"
            ' with `warnings.simplefilter("error", treeshard.ShardingWarning)`. Here a constraint'
            ' does not divide a dim; `uneven="error"` raises, and `"drop"` is silent.',
            """
            x = ts.with_sharding_constraint(jnp.ones((16, 6)), P("data", "fsdp"), mesh)
            """,
            """
            x = ts.with_sharding_constraint(jnp.ones((16, 8)), P("data", "fsdp"), mesh)
            """,
            about="a constraint",
        ),
        Entry(
            "ShardingWarning",
            "Parameters are sharded by `fsdp` over an axis over which the batch is not split, so"
            " every device along it does the same work.",
            """
            plan = ts.plan({"w": w}, [("w", ts.fsdp("fsdp"))], mesh)
            step = jit_step(lambda state, batch: (state, 0), plan, batch=P("data"))
            """,
            """
            step = jit_step(lambda state, batch: (state, 0), plan, batch=P(("data", "fsdp")))
            """,
            about="a batch",
        ),
        Entry(
            "ShardingWarning",
            "`infer_sharding` replicates leaves that no pattern matches in full, as big_vision"
            " does, and lists them.",
            """
            shardings = ts.infer_sharding({"mlp": {"w": w}}, [("w", "fsdp('fsdp', 0)")], mesh)
            """,
            """
            shardings = ts.infer_sharding({"mlp": {"w": w}}, [(".*w", "fsdp('fsdp', 0)")], mesh)
            """,
            about="a strategy",
        ),
    ],
)

# ------------------------------------------------------------------ do

LEAVES = Group(
    "A tree cannot be placed or read",
    "All leaves at fault are in one message, and nothing was moved.",
    "",
    [
        Entry(
            "SpecError",
            "Specs do not fit the tree or the arrays: another structure, too many entries, axes"
            " that do not divide a dim, something that is no spec. It is a `ValueError` too.",
            """
            tree = {"w": w, "bias": w[0], "rate": 0.1}
            ts.shard(tree, {"w": P("fsdp"), "b": P(), "rate": None}, mesh)
            """,
            """
            ts.shard(tree, {"w": P("fsdp"), "bias": P(), "rate": None}, mesh)
            """,
        ),
        Entry(
            "LeafError",
            "A leaf has no numbers that could be moved: it is traced, or a `ShapeDtypeStruct`, or"
            " of a dtype that JAX does not know. It is a `TypeError` too.",
            """
            @jax.jit
            def double(x):
                return ts.shard(2 * x, P("fsdp"), mesh)


            double(w)
            """,
            """
            @jax.jit
            def double(x):
                return ts.with_sharding_constraint(2 * x, P("fsdp"), mesh)


            double(w)
            """,
        ),
        Entry(
            "DeletedLeafError",
            "An array's memory is gone: it was donated to a step, or deleted. Go on with what the"
            " step returned, or make it with `donate=False`. It is a `RuntimeError` too.",
            """
            plan = ts.plan({"w": w}, [("w", P("fsdp"))], mesh)
            step = jit_step(lambda state, x: ({"w": state["w"] + x}, 0), plan, batch=P())
            state = ts.shard({"w": w}, plan)
            new, loss = step(state, w[0])
            step(state, w[0])
            """,
            """
            state = ts.shard({"w": w}, plan)
            for x in w[:2]:
                state, loss = step(state, x)
            """,
        ),
    ],
)

# ------------------------------------------------------------------ the top

STEPS = Group(
    "A step does not take its state",
    "",
    """
    def count(state, batch):
        return {"w": state["w"], "step": state["step"] + 1}, batch.sum()
    """,
    [
        Entry(
            "StateError",
            "A step changes its state in a way that one compiled program cannot: its structure, a"
            " shape, a dtype, or a leaf that is no array. It is a `TypeError` too.",
            """
            state = {"w": w, "step": 0}
            plan = ts.plan(state, [("w", P("fsdp"))], mesh)
            jit_step(count, plan, batch=P("fsdp"))(state, w)
            """,
            """
            state = {"w": w, "step": jnp.int32(0)}
            plan = ts.plan(state, [("w", P("fsdp"))], mesh)
            jit_step(count, plan, batch=P("fsdp"))(state, w)
            """,
        ),
        Entry(
            "SpecError",
            "The state is not the one that the plan was made for, or a batch does not divide.",
            """
            state = {"w": w, "step": np.int32(0)}
            plan = ts.plan({"w": w}, [("w", P("fsdp"))], mesh)
            jit_step(count, plan, batch=P("fsdp"))(state, w)
            """,
            """
            plan = ts.plan(state, [("w", P("fsdp"))], mesh)
            jit_step(count, plan, batch=P("fsdp"))(state, w)
            """,
            about="a state",
        ),
    ],
)

# ------------------------------------------------------------------ look

AGAIN = Group(
    "A step compiles again",
    "`assert_stable_step` runs a step once and raises for what comes out other than it went in."
    " `diff_shardings` compares any two trees, or a tree and a plan, in the same things: all that"
    " makes a jitted function compile anew. See [why did it compile"
    " again](how-to/compiles-again.md).",
    """
    def placed(spec, mesh=mesh):
        return {"w": ts.shard(w, spec, mesh)}
    """,
    [
        Entry(
            "UnstableStepError",
            "A leaf of the state comes out of the step other than it went in: the message says"
            " which, in what, and the way out. It is an `AssertionError` too.",
            """
            @jax.jit
            def step(state):
                return {"w": state["w"] * 0.9, "step": state["step"] + 1}


            state = {"w": ts.shard(w, P("fsdp"), mesh), "step": 0}
            ts.assert_stable_step(step, state)
            """,
            """
            state = ts.shard({"w": w, "step": np.int32(0)}, {"w": P("fsdp"), "step": P()}, mesh)
            state = ts.assert_stable_step(step, state)
            """,
        ),
        Entry(
            "sharding",
            'A leaf lies in another way. `P("data", None)` and `P("data")` are one.',
            """
            plan = ts.plan({"w": w}, [("w", P("fsdp"))], mesh)
            print(ts.diff_shardings({"w": jnp.asarray(w)}, plan))
            """,
            """
            assert not ts.diff_shardings(ts.shard({"w": w}, plan), plan)
            """,
        ),
        Entry(
            "mesh",
            "The meshes have other axes, other sizes, or another order of axes.",
            """
            turned = ts.make_mesh("fsdp=4,data=2")
            print(ts.diff_shardings(placed(P("data")), placed(P("data"), turned)))
            """,
            """
            moved = ts.reshard(placed(P("data"), turned), P("data"), mesh)
            assert not ts.diff_shardings(placed(P("data")), moved)
            """,
        ),
        Entry(
            "devices",
            "The meshes have their devices in another order. Make one mesh, and use it everywhere.",
            """
            backwards = ts.make_mesh("data=2,fsdp=4", devices=jax.devices()[::-1])
            print(ts.diff_shardings(placed(P("data")), placed(P("data"), backwards)))
            """,
            """
            moved = ts.reshard(placed(P("data"), backwards), P("data"), mesh)
            assert not ts.diff_shardings(placed(P("data")), moved)
            """,
        ),
        Entry(
            "axis types",
            "The axes of one mesh are Auto, and of the other Explicit, as `jax.make_mesh` makes"
            " them. `ts.make_mesh` makes them Auto, unless it is asked otherwise.",
            """
            theirs = jax.make_mesh((2, 4), ("data", "fsdp"))
            print(ts.diff_shardings(placed(P("data")), placed(P("data"), theirs)))
            """,
            """
            ours = ts.make_mesh("data=2,fsdp=4")
            assert not ts.diff_shardings(placed(P("data")), placed(P("data"), ours))
            """,
        ),
        Entry(
            "memory kind",
            "One lies in the devices' memory, the other in the host's.",
            """
            there = NamedSharding(mesh, P("data"), memory_kind="pinned_host")
            host = {"w": jax.device_put(w, there)}
            print(ts.diff_shardings(placed(P("data")), host))
            """,
            """
            here = jax.device_put(host, there.with_memory_kind("device"))
            assert not ts.diff_shardings(placed(P("data")), here)
            """,
        ),
        Entry(
            "committed",
            "One is bound to its devices, and the other goes wherever it is used, as all that"
            " `jnp` makes does at first. What a step returns is bound.",
            """
            count = {"count": jnp.int32(0)}
            print(ts.diff_shardings(count, ts.shard(count, P(), mesh)))
            """,
            """
            count = ts.shard(count, P(), mesh)
            assert not ts.diff_shardings(count, ts.shard(count, P(), mesh))
            """,
        ),
        Entry(
            "shape",
            "A leaf has grown, or a batch is a smaller last one.",
            """
            seen = {"losses": jnp.zeros(0)}
            print(ts.diff_shardings(seen, {"losses": jnp.append(seen["losses"], 0.5)}))
            """,
            """
            seen = {"losses": jnp.zeros(1000)}
            assert not ts.diff_shardings(seen, {"losses": seen["losses"].at[0].set(0.5)})
            """,
        ),
        Entry(
            "dtype",
            "An update in a wider dtype has widened the leaf.",
            """
            old, update = {"w": jnp.zeros(8, "bfloat16")}, jnp.ones(8)
            print(ts.diff_shardings(old, {"w": old["w"] + update}))
            """,
            """
            assert not ts.diff_shardings(old, {"w": old["w"] + update.astype("bfloat16")})
            """,
        ),
        Entry(
            "weak type",
            "A Python number gives way to the dtype of what it meets, and a `jnp.float32` does"
            " not. To JAX they are two types.",
            """
            old = {"rate": 0.1}
            print(ts.diff_shardings(old, {"rate": jnp.float32(old["rate"]) * 0.9}))
            """,
            """
            old = {"rate": jnp.float32(0.1)}
            assert not ts.diff_shardings(old, {"rate": jnp.float32(old["rate"]) * 0.9})
            """,
        ),
        Entry(
            "value",
            "A leaf that is no array is part of the program, so another value is another program.",
            """
            print(ts.diff_shardings({"step": 0}, {"step": 1}))
            """,
            """
            assert not ts.diff_shardings({"step": jnp.int32(0)}, {"step": jnp.int32(1)})
            """,
        ),
        Entry(
            "leaf",
            "Only one of the trees has the leaf. A state keeps its structure: what is new in a step"
            " goes into `aux`.",
            """
            print(ts.diff_shardings({"w": w}, {"w": w, "loss": 0.5}))
            """,
            """
            state, aux = {"w": w}, {"loss": 0.5}
            assert not ts.diff_shardings({"w": w}, state)
            """,
        ),
    ],
)

MOVES = Group(
    "A step moves more than was planned",
    "`step.communication(state, batch)` holds what the compiled step moves against its plan, and"
    " `compare_communication` does it for any program. How they differ stands below the table, and"
    " as values in `unplanned`. See [why is there an all-gather](how-to/all-gather.md).",
    """
    line = ts.make_mesh("fsdp=8")
    params = {"w": np.ones((16, 16), "float32")}
    plan = ts.plan(params, [("w", P("fsdp"))], line, min_size=0)
    batch = np.ones((32, 16), "float32")


    def loss(params, x):
        return jnp.mean((x @ ts.unshard(params, plan, "fsdp")["w"]) ** 2)


    def descend(loss, grad=None):
        def step(params, batch):
            value, grads = (grad or jax.value_and_grad(loss))(params, batch)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

        return step


    def by_hand(loss, **options):
        return descend(loss, value_and_grad(loss, "fsdp", plan, **options))


    def unplanned(step, plan=plan, make=jit_step, **options):
        step = make(step, plan, batch=P("fsdp"))
        found = step.communication(plan.structs, batch, **options).unplanned
        return {one.code: one for one in found}
    """,
    [
        Entry(
            "activation",
            "Values that the step computes are moved, where weights should be. Say where the"
            " weights are whole, with `unshard`, or where the values lie, with"
            " `with_sharding_constraint`.",
            """
            up_down = {"up": np.ones((16, 64), "float32"), "down": np.ones((64, 16), "float32")}
            rules = [("up", P(None, "fsdp")), ("down", P("fsdp"))]
            mlp_plan = ts.plan(up_down, rules, line, min_size=0)


            def mlp(params, x):
                return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)


            print(unplanned(descend(mlp), mlp_plan)["activation"])
            """,
            """
            def mlp(params, x):
                params = ts.unshard(params, mlp_plan, "fsdp")
                return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)


            assert "activation" not in unplanned(descend(mlp), mlp_plan)
            """,
        ),
        Entry(
            "all-reduce",
            "Whole gradients are all-reduced, where a device needs only its part: twice the bytes"
            " on the wire. The CPU's compiler always does so.",
            """
            print(unplanned(descend(loss))["all-reduce"])
            """,
            """
            def local(params, x):
                return jnp.mean((x @ params["w"]) ** 2)


            assert not unplanned(by_hand(local), make=shard_map_step)
            """,
        ),
        Entry(
            "again",
            "A gather, or the reduction of a gradient, runs more often than planned: once for each"
            " use of a weight, or for each minibatch. By hand, each leaf is gathered and reduced"
            " once.",
            """
            def tied(params, x):
                w = ts.unshard(params, plan, "fsdp")["w"]
                return jnp.mean((jnp.tanh(x @ w) @ w.T) ** 2)


            print(unplanned(descend(tied))["again"])
            """,
            """
            def tied(params, x):
                return jnp.mean((jnp.tanh(x @ params["w"]) @ params["w"].T) ** 2)


            assert not unplanned(by_hand(tied), make=shard_map_step)
            """,
        ),
        Entry(
            "sharded-further",
            "A leaf is gathered that the step could use as it lies, if it lay as what it is used"
            " with: here a moment is split on another dim than its parameter.",
            """
            def momentum(state, x):
                value, grads = jax.value_and_grad(loss)(state["model"], x)
                mu = ts.with_sharding_constraint(state["mu"]["model"], P())
                mu = jax.tree.map(lambda m, g: 0.9 * m + g, mu, grads)
                model = jax.tree.map(lambda p, m: p - 0.1 * m, state["model"], mu)
                return {"model": model, "mu": {"model": mu}}, value


            state = {"model": params, "mu": {"model": params}}
            rules = [("mu", P(None, "fsdp")), ("model", P("fsdp"))]
            print(unplanned(momentum, ts.plan(state, rules, line, min_size=0))["sharded-further"])
            """,
            """
            def momentum(state, x):
                value, grads = jax.value_and_grad(loss)(state["model"], x)
                mu = jax.tree.map(lambda m, g: 0.9 * m + g, state["mu"]["model"], grads)
                model = jax.tree.map(lambda p, m: p - 0.1 * m, state["model"], mu)
                return {"model": model, "mu": {"model": mu}}, value


            alike = ts.plan(state, [("model", P("fsdp"))], line, min_size=0)
            assert "sharded-further" not in unplanned(momentum, alike)
            """,
        ),
        Entry(
            "batch",
            "The batch, or another argument that is no parameter, is moved: the step reverses or"
            " shuffles it, or compares its rows with each other. What can be done before the step,"
            " or within a row, moves nothing.",
            """
            def backwards(params, x):
                return loss(params, x[::-1])


            print(unplanned(descend(backwards))["batch"])
            """,
            """
            def backwards(params, x):
                return loss(params, x[:, ::-1])


            assert "batch" not in unplanned(descend(backwards))
            """,
        ),
        Entry(
            "across-axes",
            "Data moves between devices that form no axis of the mesh: a reshape has split a"
            " sharded dim as the mesh does not. Most often it is a batch that is split for"
            " accumulation.",
            """
            def accumulate(params, x):
                parts = x.reshape(4, 8, 16)
                return jax.lax.map(lambda x: loss(params, x), parts).mean()


            print(unplanned(descend(accumulate))["across-axes"])
            """,
            """
            def accumulate(params, x):
                parts = x.reshape(8, 4, 16).swapaxes(0, 1)
                parts = ts.with_sharding_constraint(parts, P(None, "fsdp"))
                return jax.lax.map(lambda x: loss(params, x), parts).mean()


            assert "across-axes" not in unplanned(descend(accumulate))
            """,
        ),
        Entry(
            "wider",
            "Data moves in a wider dtype than planned. The CPU's compiler widens bfloat16; the"
            " traced program says what was asked for.",
            """
            def local(params, x):
                return jnp.mean((x @ params["w"].astype("float32")) ** 2)


            step = by_hand(local, dtype="bfloat16")
            print(unplanned(step, make=shard_map_step, dtype="bfloat16")["wider"])
            """,
            """
            traced = shard_map_step(step, plan, batch=P("fsdp")).lower(plan.structs, batch)
            assert not ts.compare_communication(plan, traced, dtype="bfloat16").unplanned
            """,
        ),
        Entry(
            "unreadable",
            "The axes, the bytes or the count of an op cannot be told. Most often it runs in a loop"
            " whose trips depend on data.",
            """
            def square(w):
                return ts.with_sharding_constraint(w @ w, P("fsdp"))


            def until(params, x):
                return {"w": jax.lax.while_loop(lambda w: w.sum() < 9, square, params["w"])}, 0


            print(unplanned(until)["unreadable"])
            """,
            """
            def thrice(params, x):
                return {"w": jax.lax.fori_loop(0, 3, lambda i, w: square(w), params["w"])}, 0


            assert "unreadable" not in unplanned(thrice)
            """,
        ),
        Entry(
            "not-moved",
            "What was planned is not in the program: a leaf is not used, or the plan is that of"
            " another step.",
            """
            def decay(params, batch):
                return jax.tree.map(lambda p: 0.9 * p, params), batch.sum()


            print(unplanned(decay)["not-moved"])
            """,
            """
            assert "not-moved" not in unplanned(descend(loss))
            """,
        ),
        Entry(
            "CommunicationError",
            "What `assert_collectives` says in a test does not hold. The message lists every"
            " collective of the program. It is an `AssertionError` too.",
            """
            def program(spec):
                where = NamedSharding(line, spec)
                double = jax.jit(lambda params: 2 * params["w"], out_shardings=where)
                return double.lower(plan.structs).compile()


            ts.assert_collectives(program(P()), all_gather=0)
            """,
            """
            ts.assert_collectives(program(P("fsdp")), all_gather=0)
            """,
        ),
        Entry(
            "Involuntary full rematerialization",
            "The compiler's own words, on the process's standard error: it could lay a value anew"
            " only by way of a whole copy on every device. `capture_partitioner_warnings` says"
            " which value, and where it comes from. Go there in two steps, or lay it otherwise.",
            """
            def compiled(*specs):
                def move(x):
                    for spec in specs:
                        x = 2 * ts.with_sharding_constraint(x, spec, mesh)
                    return x

                with ts.capture_partitioner_warnings(mesh) as found:
                    jax.jit(move).lower(np.ones((8, 8, 8), "float32")).compile()
                return found


            before, after = P("data", None, "fsdp"), P(None, ("fsdp", "data"))
            print(*compiled(before, after))
            """,
            """
            assert not compiled(before, P("data", "fsdp"), after)
            """,
            shows="through a full copy",
        ),
    ],
)

# What a comparison lists, beside what differs.
OPS = {
    "all-gather": "the parts of devices become the whole, on each of them",
    "reduce-scatter": "wholes are added, and each device keeps its part",
    "all-reduce": "values are added, and each device has the sum",
    "all-to-all": "each device gives every other one a part",
    "collective-permute": "each device gives one other its part",
    "collective-broadcast": "one device gives its value to others",
    "ragged-all-to-all": "as all-to-all, with parts of unequal size",
    "send": "one device gives another a value",
    "unknown": "named like one of these, and not known here",
}
REASONS = {
    "weight": "a parameter is gathered for use",
    "weight, again for its gradient": "and gathered again, under `jax.checkpoint`",
    "gradient": "a gradient is added up over the batch",
    "update": "the optimizer's state is sharded further than its parameter (ZeRO-1)",
    "loss": "the loss is averaged",
}

# ------------------------------------------------------------------ text, disk, processes

FILES = Group(
    "A checkpoint, a file or a text cannot be read, or written",
    "",
    """
    from pathlib import Path

    from treeshard.checkpoint import restore, save
    from treeshard.interchange import load_safetensors, save_safetensors
    """,
    [
        Entry(
            "CheckpointError",
            "A checkpoint, or a file of tensors, cannot be written or read: it is not there, it is"
            " something else, it may not be overwritten, another writer is at work, the disk is"
            " full. What was there before is still there. It is a `RuntimeError` too.",
            """
            save("runs/100", {"w": w})
            tree = restore("runs/200", {"w": w})
            """,
            """
            tree = restore("runs/100", {"w": w})
            """,
        ),
        Entry(
            "DamagedError",
            "What is on disk is not what was saved there: bytes are others, or a file is cut short."
            " Nothing is returned of it; go back to another copy, or an earlier step. It is a"
            " `CheckpointError` too.",
            """
            save("runs/300", {"w": w})
            largest = max(Path("runs/300").rglob("*"), key=lambda file: file.stat().st_size)
            data = bytearray(largest.read_bytes())
            data[5000] ^= 1
            largest.write_bytes(data)

            tree = restore("runs/300", {"w": w})
            """,
            """
            save("runs/400", {"w": w})
            tree = restore("runs/400", {"w": w})
            """,
        ),
        Entry(
            "MismatchError",
            "What was saved is not what is asked for: leaves are missing, unexpected, or of another"
            " shape or dtype. All of them are in the message, and nothing is converted unasked:"
            ' `cast="float32"` asks for it, and `partial=True` takes what is there. It is a'
            " `ValueError` too.",
            """
            save("runs/500", {"w": w, "bias": w[0]})
            tree = restore("runs/500", {"weight": w, "bias": w})
            """,
            """
            tree = restore("runs/500", {"w": w, "bias": w[0]})
            """,
        ),
        Entry(
            "MismatchError",
            "The same of a safetensors file, whose names are most often another framework's:"
            " `rename` maps paths to them.",
            """
            save_safetensors("model.safetensors", {"mlp.weight": w})
            tree = load_safetensors("model.safetensors", {"mlp": {"weight": w}})
            """,
            """
            def dotted(path):
                return path.replace("/", ".")


            like = {"mlp": {"weight": w}}
            tree = load_safetensors("model.safetensors", like, rename=dotted)
            """,
            about="a file",
        ),
        Entry(
            "FormatError",
            "Text is not what it should be: a plan as JSON, a file of shapes or rules, a compiled"
            " program, the head of a safetensors file. The place is named. It is a `ValueError`"
            " too.",
            """
            ts.Plan.from_json('{"w": [1024, 64]}')
            """,
            """
            plan = ts.plan({"w": w}, [("w", P("fsdp"))], mesh)
            assert ts.Plan.from_json(plan.to_json()) == plan
            """,
        ),
    ],
)

PROCESSES = Group(
    "Processes do not go on together",
    "What one process cannot do, none does: all of them raise, and say which of them it was.",
    """
    import socket
    import subprocess
    import sys

    START = '''
    import sys
    import jax, numpy as np
    import treeshard as ts
    from jax.sharding import PartitionSpec as P

    ts.simulate_devices(1)
    port, me = map(int, sys.argv[1:])
    jax.distributed.initialize(f"localhost:{port}", 2, me, initialization_timeout=60)
    mesh = ts.make_mesh("fsdp=2")
    w = np.ones((1024, 64), "float32")
    '''


    def two_processes(code):
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = str(probe.getsockname()[1])
        command = [sys.executable, "-c", START + code, port]
        started = [
            subprocess.Popen([*command, me], stdout=subprocess.PIPE, text=True) for me in "01"
        ]
        said = [process.communicate()[0] for process in started]
        assert [process.returncode for process in started] == [0, 0]
        print(said[0], end="")
    """,
    [
        Entry(
            "ProcessError",
            "Processes that must go on together did not all come within `timeout`, do not mean the"
            " same, or one of them has failed. It is a `RuntimeError` too.",
            """
            two_processes('''
            try:
                ts.shard({"w": w}, P("fsdp") if me == 0 else P(), mesh)
            except ts.ProcessError as error:
                print(f"ProcessError: {error}")
            ''')
            """,
            """
            two_processes('''
            ts.shard({"w": w}, P("fsdp"), mesh)
            ''')
            """,
        ),
    ],
)

BASE = Group(
    "Any of them",
    "",
    "",
    [
        Entry(
            "TreeShardError",
            "The base of all errors that treeshard raises on purpose. An argument of a type that"
            " cannot be meant is Python's own `TypeError`, and a package that is not installed an"
            " `ImportError`, which names the extra.",
            """
            try:
                ts.make_mesh("data=3")
            except ts.TreeShardError as error:
                print(f"{type(error).__name__}: {error}")
            """,
            """
            ts.make_mesh("data=8")
            """,
            shows="MeshError",
        ),
    ],
)

GROUPS = [MESHES, RULES, WHOLE, LEAVES, STEPS, AGAIN, MOVES, FILES, PROCESSES, BASE]
