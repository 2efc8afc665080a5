"""The table behind docs/errors.md: every error, warning, finding and code of treeshard.

An entry has code that provokes it and code that avoids it. `tests/repository/test_catalogue.py`
runs both, and finds names in the sources without an entry; `python tools/errors_page.py` writes
the pages.
"""

from typing import NamedTuple


class Entry(NamedTuple):
    """One class, code or kind.

    Attributes:
        name: The class, code or kind, as it is printed.
        means: What it means, and what to do.
        wrong: Code that raises or prints it.
        right: Code that does neither; for what is not raised, an `assert` checks it.
        about: Distinguishes several entries of one name in their headings.
        shows: What `wrong` prints, if not the name.
    """

    name: str
    means: str
    wrong: str
    right: str
    about: str = ""
    shows: str = ""


class Group(NamedTuple):
    """The entries of one symptom, with their common setup code.

    Attributes:
        page: The page in docs/. All of errors.md is written; other pages are written by hand, and
            end with the entries.
        title: The symptom.
        about: What comes before the entries.
        setup: Code that runs before that of each entry.
        entries: The names.
    """

    page: str
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

# ------------------------------------------------------------------ decide

RULES = Group(
    "how-to/fix-rules",
    "Rules are wrong",
    "",
    "",
    [
        Entry(
            "ShardingRuleError",
            "Rules are malformed, do not match a leaf, or do not fit one. `init_sharded`,"
            " `match_partition_rules` and `Plan.check` raise it; `strict=False` drops what does"
            ' not fit. A last rule `(".*", None)` replicates what no other rule matches. It is'
            " also a `ValueError`.",
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
            "No rule matches the leaf's path. The plan replicates the leaf.",
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
            "A rule matches no leaf, or only scalars, which need no rule. Usually its pattern is"
            " misspelt.",
            """
            plan = ts.plan({"mlp": w}, [("mpl", P(None, "fsdp")), (".*", P("fsdp"))], mesh)
            print(*plan.findings)
            """,
            """
            plan = ts.plan({"mlp": w}, [("mlp", P(None, "fsdp")), (".*", P("fsdp"))], mesh)
            assert not plan.findings
            """,
        ),
        Entry(
            "shadowed-rule",
            "Earlier rules take every leaf that a rule matches: move it up, or remove it. A last"
            " rule that matches every leaf is a fallback, and not reported.",
            """
            tree = {"mlp": {"w": w}, "head": 2 * w}
            rules = [("w|head", P("fsdp")), ("mlp", P(None, "fsdp"))]
            print(*ts.plan(tree, rules, mesh).findings)
            """,
            """
            rules = [("mlp", P(None, "fsdp")), ("w|head", P("fsdp"))]
            assert not ts.plan(tree, rules, mesh).findings
            """,
        ),
        Entry(
            "path-collision",
            "Two leaves have the same path, so rules and files cannot distinguish them.",
            """
            tree = {"mlp/w": w, "mlp": {"w": w + 1}}
            print(*ts.plan(tree, [("w", P("fsdp"))], mesh).findings)
            """,
            """
            tree = {"mlp.w": w, "mlp": {"w": w + 1}}
            assert not ts.plan(tree, [("w", P("fsdp"))], mesh).findings
            """,
        ),
        Entry(
            "name-without-rule",
            "A logical name has no logical rule, so its dim is not sharded. If this is intended,"
            ' add `("mlp", None)` to the logical rules.',
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
            "contested-axis",
            "Two logical names of a leaf request one axis. A list of logical rules gives it to"
            " the name whose rule comes first, a `PartitionAxis` to the name whose dim comes"
            " first; here they differ. Give each name its own axis.",
            """
            with ts.logical_axis_rules([("vocab", "fsdp"), ("embed", "fsdp")]):
                plan = ts.plan({"w": w}, [("w", ("embed", "vocab"))], mesh)
            print(*plan.findings)
            """,
            """
            with ts.logical_axis_rules([("vocab", "fsdp"), ("embed", None)]):
                assert not ts.plan({"w": w}, [("w", ("embed", "vocab"))], mesh).findings
            """,
        ),
        Entry(
            "already-sharded",
            "A tactic shards or replicates a dim that an earlier tactic of the same rule has"
            " sharded. Give all its axes to one tactic.",
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
    "how-to/replicated",
    "A leaf is replicated, or not sharded as requested",
    "",
    "",
    [
        Entry(
            "indivisible",
            "Axes do not divide the dim; the longest prefix of them that does is kept. [Pad the"
            " dim](uneven-leaves.md), or use another dim or axis. (In a jitted function, JAX"
            " replicates such an array silently.)",
            """
            odd = np.ones((1022, 64), "float32")
            print(*ts.plan({"w": odd}, [("w", P(("data", "fsdp")))], mesh).findings)
            """,
            """
            rules = [("w", P("data", "fsdp"))]
            assert not ts.plan({"w": odd}, rules, mesh).findings

            # or with padding, from 1022 to 1024
            plan = ts.plan({"w": odd}, [("w", P(("data", "fsdp")))], mesh).padded()
            assert not plan.findings
            """,
        ),
        Entry(
            "rank",
            "A spec has more entries than the leaf has dims. The extra entry is dropped.",
            """
            stack = {"w": w, "scale": np.ones(32768, "float32")}
            print(*ts.plan(stack, [(".*", P("data", "fsdp"))], mesh).findings)
            """,
            """
            rules = [("scale", P(("data", "fsdp"))), (".*", P("data", "fsdp"))]
            assert not ts.plan(stack, rules, mesh).findings
            """,
        ),
        Entry(
            "axis-already-used",
            "A spec names an axis twice. The axis shards the first dim that names it.",
            """
            print(*ts.plan({"w": w}, [("w", P("fsdp", "fsdp"))], mesh).findings)
            """,
            """
            assert not ts.plan({"w": w}, [("w", P("fsdp", "data"))], mesh).findings
            """,
        ),
        Entry(
            "reduced-type",
            "A spec has `unreduced` or `reduced` axes. Only `with_sharding_constraint` takes"
            " them, inside jit, on a mesh of Explicit axes alone.",
            """
            rules = [("w", P(None, "fsdp", reduced={"data"}))]
            print(*ts.plan({"w": w}, rules, mesh).findings)
            """,
            """
            types = {"data": "explicit", "tensor": "explicit"}
            explicit = ts.make_mesh("data=2,tensor=4", axis_types=types)
            plan = ts.plan({"w": w}, [("w", P(None, "tensor"))], explicit)
            assert not plan.findings


            def loss(w, x):
                w = ts.with_sharding_constraint(w, P(None, "tensor", reduced={"data"}))
                return jnp.mean(x @ w)


            def step(state, x):
                return {"w": jax.grad(loss)(state["w"], x)}, None


            jit_step(step, plan, batch=P("data"))(ts.shard({"w": w}, plan), w.T)
            """,
        ),
        Entry(
            "too-small",
            "The leaf has fewer elements than"
            " [`min_size`](../guide/rules-and-plans.md#one-threshold), so it is replicated.",
            """
            bias = np.ones(512, "float32")
            plan = ts.plan({"bias": bias}, [("bias", ts.fsdp("fsdp"))], mesh)
            for note in plan.leaves[0].adjustments:
                print(f"{note.kind}: {note.why}")
            """,
            """
            plan = ts.plan({"bias": bias}, [("bias", ts.fsdp("fsdp"))], mesh, min_size=0)
            assert not plan.leaves[0].adjustments
            """,
        ),
        Entry(
            "explicit-spec-too-small",
            "A leaf with a spec from its rule has fewer elements than `min_size`, so it is"
            " replicated. Pass `min_size=0`, or write `None` in the rule. For tactics this is"
            " silent: `too-small`.",
            """
            bias = np.ones(512, "float32")
            print(*ts.plan({"bias": bias}, [("bias", P("fsdp"))], mesh).findings)
            """,
            """
            assert not ts.plan({"bias": bias}, [("bias", P("fsdp"))], mesh, min_size=0).findings
            assert not ts.plan({"bias": bias}, [("bias", None)], mesh).findings
            """,
        ),
        Entry(
            "no-dim",
            "`fsdp` finds no dim that is free, not in `skip`, and divisible by the product of its"
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
            "A large leaf is not split over axes that split neither it nor the batch, which would"
            " save at least 1% of a device's memory. Use a spec or a tactic with these axes. A"
            " rule that names leaves and replicates them is taken as intended; one that matches"
            " all paths is not.",
            """
            print(*ts.plan({"w": w}, [(".*", None)], mesh).findings)
            print(*ts.plan({"w": w}, [("w", ts.fsdp("fsdp"))], "fsdp=2,tensor=4").findings)
            """,
            """
            assert not ts.plan({"w": w}, [("w", ts.fsdp("fsdp"))], mesh).findings
            assert not ts.plan({"w": w}, [("w", None)], mesh).findings
            rules = [("w", ts.fsdp(("fsdp", "tensor")))]
            assert not ts.plan({"w": w}, rules, "fsdp=2,tensor=4").findings
            """,
        ),
        Entry(
            "unlike-siblings",
            "A few layers are sharded unlike the others with the same names and shapes. A pattern"
            " leaves them out, or ends within a number: `layers/1` matches `layers/10` too, so"
            " write `layers/1/`. A rule that names single layers in full is taken as intended.",
            """
            layers = [{"w": np.ones((128, 128))} for _ in range(12)]
            rules = [("layers/1", P(None, "fsdp")), (".*", P("fsdp"))]
            print(*ts.plan({"layers": layers}, rules, mesh).findings)
            """,
            """
            rules = [("layers/1/", P(None, "fsdp")), (".*", P("fsdp"))]
            assert not ts.plan({"layers": layers}, rules, mesh).findings
            """,
        ),
        Entry(
            "state-unlike-weight",
            "A separate rule shards optimizer state unlike its parameter, so each step moves one"
            " of them. Use one rule for both, or `Plan.follow`. ZeRO-1, the same dims split"
            " further, is not reported.",
            """
            state = {"params": {"w": w}, "opt": {"mu": {"w": w + 1}}}
            rules = [("mu", P(None, "fsdp")), (".*", P("fsdp"))]
            print(*ts.plan(state, rules, mesh).findings)
            """,
            """
            assert not ts.plan(state, [(".*", P("fsdp"))], mesh).findings
            zero_1 = [("mu", P(("data", "fsdp"))), (".*", P("fsdp"))]
            assert not ts.plan(state, zero_1, mesh).findings
            """,
            about="by its rule",
        ),
        Entry(
            "cuts-head",
            "An axis for tensor parallelism splits attention heads into parts, so each product of"
            " queries and keys is summed over devices. Use another dim or a smaller axis. Heads"
            " are recognised by shapes, or by a norm of queries or keys beside them.",
            """
            attention = {"q": np.ones((128, 8, 64)), "out": np.ones((8, 64, 128))}
            rules = [("q", P(None, None, "tensor")), ("out", P("tensor"))]
            print(*ts.plan({"attn": attention}, rules, "data=2,tensor=4").findings)
            """,
            """
            rules = [("q", P(None, "tensor")), ("out", P("tensor"))]
            assert not ts.plan({"attn": attention}, rules, "data=2,tensor=4").findings
            """,
        ),
        Entry(
            "scan-dim",
            "Stacked layers, recognised by their shapes, are sharded on the stacked dim, so a"
            " scan gathers every layer on every device. Shard another dim: `ts.fsdp(axis,"
            " skip=(0,))`.",
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
            "axis-order",
            "A dim is sharded over axes in another order than in the mesh or in other leaves. Its"
            " shards are then on other devices, and using it with other arrays moves almost all of"
            " it. Write the axes in the mesh's order.",
            """
            state = {"params": {"w": w}, "opt": {"mu": {"w": w.copy()}}}
            rules = [("opt", P(("fsdp", "data"))), (".*", P(("data", "fsdp")))]
            print(*ts.plan(state, rules, mesh).findings)
            """,
            """
            rules = [(".*", P(("data", "fsdp")))]
            assert not ts.plan(state, rules, mesh).findings
            """,
        ),
        Entry(
            "zero1-no-op",
            "An axis should shard the optimizer state further than the parameters (ZeRO-1), but"
            " at least 5% of that state stays as it is. Lower `min_size`, pad a dim, or shard"
            " another one.",
            """
            odd = np.ones((1021, 127), "float32")
            state = {"params": {"w": w, "odd": odd}, "opt": {"mu": {"w": w + 1, "odd": odd + 1}}}
            rules = [("opt", ts.fsdp("data")), (".*", P())]
            found = ts.plan(state, rules, "data=8").findings
            print(next(finding for finding in found if finding.code == "zero1-no-op"))
            """,
            """
            state = {"params": {"w": w}, "opt": {"mu": {"w": w + 1}}}
            found = ts.plan(state, rules, "data=8").findings
            assert "zero1-no-op" not in [finding.code for finding in found]
            """,
            shows="zero1-no-op",
        ),
        Entry(
            "matrix-optimizer",
            "Muon, Shampoo or SOAP multiplies a weight's matrices by themselves, and the plan"
            " splits them, so each step moves them several times. `training.by_matrix` gives each"
            " device full matrices: see [Shard an optax"
            " state](optimizer-state.md#muon-shampoo-soap).",
            """
            stack = np.ones((8, 128, 128), "float32")
            state = {"params": {"w": stack}, "opt": {"muon": {"mu": {"w": stack + 1}}}}
            print(*ts.plan(state, [(".*", P(None, "fsdp"))], mesh).findings)
            """,
            """
            assert not ts.plan(state, [(".*", P("fsdp"))], mesh).findings
            """,
        ),
        Entry(
            "not-elementwise",
            "A leaf of optimizer state has padding, and its optimizer (Adafactor, Muon, Shampoo,"
            " SOAP) computes an update from other elements too, so the padding changes updates."
            " See [uneven leaves](../how-to/uneven-leaves.md).",
            """
            odd = np.ones((1021, 128), "float32")
            state = {"params": {"w": odd}, "opt": {"muon": {"mu": {"w": odd + 1}}}}
            plan = ts.plan(state, [(".*", ts.shard_dim("fsdp", 0))], mesh).padded()
            print(*[finding for finding in plan.findings if finding.code == "not-elementwise"])
            """,
            """
            state = {"params": {"w": odd}, "opt": {"adam": {"mu": {"w": odd + 1}}}}
            plan = ts.plan(state, [(".*", ts.shard_dim("fsdp", 0))], mesh).padded()
            assert not plan.findings
            """,
        ),
        Entry(
            "same-array",
            "One array is in the tree at two paths, and becomes two arrays. To keep one, see"
            " [tied weights](../how-to/uneven-leaves.md#tied-weights).",
            """
            params = {"embed": w, "head": w}
            print(*ts.plan(params, [(".*", P("fsdp"))], mesh).findings)
            """,
            """
            import equinox as eqx

            shared = eqx.nn.Shared(params, lambda tree: tree["head"], lambda tree: tree["embed"])
            assert not ts.plan(shared, [(".*", P("fsdp"))], mesh).findings
            """,
        ),
        Entry(
            "no-base",
            "A leaf should `follow` a base, and no leaf of that path is beside it or an ancestor."
            " It is replicated. Give the path relative to an ancestor.",
            """
            tree = {"q": {"weight": w, "a": np.ones((8, 64), "float32")}}
            rules = [("weight", P("fsdp")), ("a$", ts.follow("kernel"))]
            print(*ts.plan(tree, rules, mesh).findings)
            """,
            """
            rules = [("weight", P("fsdp")), ("a$", ts.follow("weight"))]
            assert not ts.plan(tree, rules, mesh).findings
            """,
        ),
        Entry(
            "cuts-block",
            "A leaf has one entry for each block of its base, and the base has more shards than"
            " blocks. That dim is replicated. Use larger shards of the base, or smaller blocks.",
            """
            tree = {"q": {"weight": w, "scale": np.ones((2, 64), "float32")}}
            rules = [("weight", P("fsdp")), ("scale", ts.follow("weight", blocks=True))]
            print(*ts.plan(tree, rules, mesh).findings)
            """,
            """
            tree = {"q": {"weight": w, "scale": np.ones((4, 64), "float32")}}
            assert not ts.plan(tree, rules, mesh).findings
            """,
        ),
        Entry(
            "axis-is-manual",
            "Inside `shard_map`, `with_sharding_constraint` drops the axes along which code"
            " already runs once per device. This is not an error, and not reported.",
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
            'Something is not sharded as requested: here a dim is not divisible. `uneven="error"`'
            ' raises, `"drop"` is silent. `warnings.simplefilter("error", ts.ShardingWarning)`'
            " turns all warnings of treeshard into errors.",
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

# ------------------------------------------------------------------ move

PLACING = Group(
    "errors",
    "A mesh is missing, or a tree cannot be placed or read",
    "A message lists all leaves with a problem, and nothing was moved.",
    "",
    [
        Entry(
            "NoMeshError",
            "A mesh is needed, and neither an argument nor a context gives one. It is also a"
            " `RuntimeError`.",
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
            "A mesh cannot be built: its sizes do not multiply to the number of devices (one may"
            " be -1), or its text cannot be read. It is also a `ValueError`.",
            """
            ts.make_mesh("data=3,fsdp=4")
            """,
            """
            ts.make_mesh("data=2,fsdp=-1")
            """,
        ),
        Entry(
            "MeshError",
            "The devices lack the memory that a plan names. The message lists the kinds that they"
            " have.",
            """
            plan = ts.plan({"w": w}, [("w", ts.fsdp("fsdp", memory="vault"))], mesh)
            ts.shard({"w": w}, plan)
            """,
            """
            plan = ts.plan({"w": w}, [("w", ts.fsdp("fsdp", memory="pinned_host"))], mesh)
            ts.shard({"w": w}, plan)
            """,
            about="a memory that devices lack",
        ),
        Entry(
            "NoDevicesError",
            "The mesh is abstract: it has axes, but no devices. Pass `plan.on(mesh)` with a mesh"
            " of devices. It is a `MeshError` and a `NoMeshError`.",
            """
            plan = ts.plan({"w": w}, [("w", P("fsdp"))], "data=2,fsdp=4")
            step = jit_step(lambda state, x: (state, x.sum()), plan)
            """,
            """
            step = jit_step(lambda state, x: (state, x.sum()), plan.on(mesh))
            """,
        ),
        Entry(
            "UnknownAxisError",
            "The mesh has no axis of this name. For rules and specs there are the two subclasses"
            " below. It is also a `ValueError` and a `KeyError`.",
            """
            ts.get_axes_size_in_mesh("fdsp", mesh)
            """,
            """
            ts.get_axes_size_in_mesh("fsdp", mesh)
            """,
        ),
        Entry(
            "UnknownAxisInRuleError",
            "A rule names an axis that the mesh lacks. It is a `ShardingRuleError` and an"
            " `UnknownAxisError`; the message also lists other misfits of the rules.",
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
            "A spec names an axis that the mesh lacks. It is a `SpecError` and an"
            " `UnknownAxisError`. `with_sharding_constraint` drops such axes, so that one model"
            " runs on many meshes.",
            """
            ts.shard({"w": w}, {"w": P("tensor")}, mesh)
            """,
            """
            ts.shard({"w": w}, {"w": P("fsdp")}, mesh)
            """,
        ),
        Entry(
            "axis-not-in-mesh",
            "The same as a finding of a plan. The plan drops the axis, and `plan.check()` raises.",
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
        Entry(
            "ArgumentError",
            "An argument is of another kind than the function takes: a class or a function"
            " instead of a tree of arrays, or two arguments in the wrong order. It is also a"
            " `TypeError`.",
            """
            class Model:
                def init(self):
                    return {"w": w}


            ts.plan(Model, [("w", P("fsdp"))], mesh)
            """,
            """
            ts.plan(Model().init(), [("w", P("fsdp"))], mesh)
            """,
        ),
        Entry(
            "SpecError",
            "Specs do not fit the tree or its arrays: another structure, too many entries, an"
            " indivisible dim, or a value that is not a spec. Specs need the tree's structure, or"
            " a prefix of it. It is also a `ValueError`.",
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
            "A leaf has no values to move: it is traced (inside jit, use"
            " `with_sharding_constraint`), a `ShapeDtypeStruct`, or of a dtype that JAX does not"
            " support. It is also a `TypeError`.",
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
            "DoesNotFitError",
            "A program needs more memory than a device has. Split the batch further, shard more"
            " of the state, or use `jax.checkpoint`. It is also a `MemoryError`.",
            """
from treeshard.programs import Memory

state = {"parameters": 2**33, "other state": 2**34, "batch": 0}
memory = Memory(state, 3 * 2**33, 0, 2**30, 0, 16 * 2**30, "TPU v5 lite", ())
memory.assert_fits()
""",
            """
state = {"parameters": 2**31, "other state": 2**32, "batch": 0}
memory = Memory(state, 3 * 2**31, 0, 2**30, 0, 16 * 2**30, "TPU v5 lite", ())
memory.assert_fits()
""",
        ),
        Entry(
            "DeletedLeafError",
            "An array was deleted, or donated to a step. It is also a `RuntimeError`.",
            """
            plan = ts.plan({"w": w}, [("w", P("fsdp"))], mesh)
            step = jit_step(lambda state, x: ({"w": state["w"] + x}, 0), plan)
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
        Entry(
            "TreeShardError",
            "The base of all errors that treeshard raises on purpose. A package that is not"
            " installed is an `ImportError`, which names the extra.",
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

# ------------------------------------------------------------------ steps

STEPS = Group(
    "errors",
    "A step refuses its state, or warns",
    "",
    """
    def count(state, batch):
        return {"w": state["w"], "step": state["step"] + 1}, batch.sum()
    """,
    [
        Entry(
            "StateError",
            "A step changes its state in a way that one compiled program cannot: its structure, a"
            " shape, a dtype, or a leaf that is not an array. Start counters as arrays:"
            " `jnp.int32(0)`. It is also a `TypeError`.",
            """
            state = {"w": w, "step": 0}
            plan = ts.plan(state, [("w", P("fsdp"))], mesh)
            jit_step(count, plan, batch=P(("data", "fsdp")))(state, w)
            """,
            """
            state = {"w": w, "step": jnp.int32(0)}
            plan = ts.plan(state, [("w", P("fsdp"))], mesh)
            jit_step(count, plan, batch=P(("data", "fsdp")))(state, w)
            """,
        ),
        Entry(
            "ShardingTypeError",
            "JAX cannot tell how the result of a line is split over [Explicit"
            " axes](guide/explicit-axes.md). The message has the line, its leaves, and other ways"
            " to write it: paste one. It is also a `TypeError`.",
            """
            explicit = jax.make_mesh((2, 4), ("data", "fsdp"))
            plan = ts.plan({"w": w}, [("w", P(None, "fsdp"))], explicit)
            loss = lambda state, x: (x @ state["w"]).mean()
            rows = P(("data", "fsdp"))
            step = jit_step(lambda state, x: (state, loss(state, x)), plan, batch=rows)
            step({"w": w}, np.ones((16, 1024), "float32"))
            """,
            """
            loss = lambda state, x: (x @ ts.unshard(state["w"])).mean()
            rows = P(("data", "fsdp"))
            step = jit_step(lambda state, x: (state, loss(state, x)), plan, batch=rows)
            step({"w": w}, np.ones((16, 1024), "float32"))
            """,
        ),
        Entry(
            "SpecError",
            "The state is not the one that the plan was made for, or a batch is not divisible."
            " Plan the full state; drop or pad the batch.",
            """
            state = {"w": w, "step": np.int32(0)}
            plan = ts.plan({"w": w}, [("w", P("fsdp"))], mesh)
            jit_step(count, plan, batch=P(("data", "fsdp")))(state, w)
            """,
            """
            plan = ts.plan(state, [("w", P("fsdp"))], mesh)
            jit_step(count, plan, batch=P(("data", "fsdp")))(state, w)
            """,
            about="a state",
        ),
        Entry(
            "ShardingWarning",
            "Weights are gathered along an axis that does not split the batch, so all devices"
            ' along it do the same work. Split the batch too: `batch=P(("data", "fsdp"))`.',
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
            "No `batch=` is given, and the name of an axis does not say whether it splits the"
            " batch. Pass `batch=`: with the axis for FSDP, without it for tensor parallelism.",
            """
            plan = ts.plan({"w": w}, [("w", P("shard"))], ts.make_mesh("data=2,shard=4"))
            step = jit_step(lambda state, batch: (state, 0), plan)
            """,
            """
            step = jit_step(lambda state, batch: (state, 0), plan, batch=P(("data", "shard")))
            """,
            about="the default batch",
        ),
        Entry(
            "ShardingWarning",
            "Inside a step, `jax.device_put` to one device has no effect: the program runs on all"
            " devices. Do it outside of the step.",
            """
            def shrink(state, batch):
                half = jax.device_put(batch / 2, jax.devices()[0])
                return {"w": state["w"] * half.mean()}, 0


            plan = ts.plan({"w": w}, [("w", ts.fsdp("fsdp"))], mesh)
            step = jit_step(shrink, plan)
            lowered = step.lower(plan.structs, np.ones((8, 4), "float32"))
            """,
            """
            def shrink(state, batch):
                return {"w": state["w"] * (batch / 2).mean()}, 0


            lowered = jit_step(shrink, plan).lower(plan.structs, np.ones((8, 4), "float32"))
            """,
            about="one device in a step",
        ),
        Entry(
            "ShardingWarning",
            "A leaf of the state is a numpy array in each step, so each step copies it. Pass the"
            " state that the step returned.",
            """
            plan = ts.plan({"w": w}, [("w", ts.fsdp("fsdp"))], mesh)
            step = jit_step(lambda state, batch: (state, 0), plan)
            for batch in np.ones((2, 8, 4), "float32"):
                step({"w": w}, batch)
            """,
            """
            state = ts.shard({"w": w}, plan)
            for batch in np.ones((2, 8, 4), "float32"):
                state, _ = step(state, batch)
            """,
            about="a state on the host",
        ),
        Entry(
            "ShardingWarning",
            "Arrays of the state and of the batch share memory, so the step copies them before it"
            " donates the state. Copy with `jnp.copy`, or use `donate=False`.",
            """
            rows = P(("data", "fsdp"))
            p = ts.shard(w, rows, mesh)
            plan = ts.plan({"last": p}, [(".*", rows)], mesh)
            step = jit_step(lambda state, batch: (state, batch.sum()), plan, batch=rows)
            state, total = step({"last": p}, p)
            """,
            """
            p = ts.shard(w, rows, mesh)
            state, total = step({"last": jnp.copy(p)}, p)
            """,
            about="a donated state",
        ),
    ],
)

AGAIN = Group(
    "how-to/compiles-again",
    "A step compiles again",
    "`assert_stable_step` and `diff_shardings` use these words for what differs:",
    """
    def placed(spec, mesh=mesh):
        return {"w": ts.shard(w, spec, mesh)}
    """,
    [
        Entry(
            "UnstableStepError",
            "The step changed the type or the sharding of a leaf of its state. Place the state"
            " with `ts.shard(state, plan)` or `init_sharded`; `jit_step` keeps it so. It is also"
            " an `AssertionError`.",
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
            "A leaf is sharded differently: it was never placed, or the compiler chose another"
            ' sharding. `P("data", None)` and `P("data")` are equal.',
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
            "The meshes differ in axes, sizes or order. `ts.reshard` moves a tree to the other"
            " mesh.",
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
            "The meshes have their devices in a different order. Make one mesh and use it"
            " everywhere.",
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
            "One mesh has Auto axes, the other Explicit ones, as `jax.make_mesh` makes them. A"
            " step takes a state of the other kind without a copy; your own `jax.jit` compiles"
            " again ([Explicit axes](../guide/explicit-axes.md)).",
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
            "One array is in device memory, the other in host memory. `jax.device_put` with"
            " `sharding.with_memory_kind` moves it.",
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
            "One array is bound to its devices, and the other is not, like new arrays of `jnp`."
            " What a step returns is committed; `ts.shard` commits arrays before the first step.",
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
            "A leaf has grown, or the last batch is smaller. Allocate the full length at the"
            " start; drop or pad the last batch.",
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
            "An update in a wider dtype has widened the leaf. Convert the result:"
            " `new.astype(old.dtype)`.",
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
            "A Python number adopts the dtype of the array beside it, and a `jnp.float32` does"
            " not, so their types differ. Start with an array: `jnp.float32(0.1)`.",
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
            "A non-array leaf is part of the compiled program, so another value needs another"
            " program. Make it an array: `jnp.int32(0)`.",
            """
            print(ts.diff_shardings({"step": 0}, {"step": 1}))
            """,
            """
            assert not ts.diff_shardings({"step": jnp.int32(0)}, {"step": jnp.int32(1)})
            """,
        ),
        Entry(
            "leaf",
            "Only one of the trees has the leaf. A state must keep its structure; return new"
            " values of a step in `aux`.",
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
    "how-to/all-gather",
    "A step moves more than was planned",
    "The first word of each line below the table of `step.communication` names the cause. The"
    " attribute `unplanned` has the same as values.",
    """
    line = ts.make_mesh("fsdp=8")
    params = {"w": np.ones((16, 16), "float32")}
    plan = ts.plan(params, [("w", P("fsdp"))], line, min_size=0)
    batch = np.ones((32, 16), "float32")


    def loss(params, x):
        return jnp.mean((x @ ts.unshard(params)["w"]) ** 2)


    def descend(loss, grad=None):
        def step(params, batch):
            value, grads = (grad or jax.value_and_grad(loss))(params, batch)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

        return step


    def by_hand(loss, **options):
        return descend(loss, value_and_grad(loss, "fsdp", plan, **options))


    def unplanned(step, plan=plan, make=jit_step, split=P("fsdp"), **options):
        step = make(step, plan, batch=split)
        differences = step.communication(plan.structs, batch, **options).unplanned
        return {difference.code: difference for difference in differences}
    """,
    [
        Entry(
            "activation",
            "The step moves computed values where it should move weights. Call"
            " [`unshard`](#activations-are-moved-instead-of-weights) on the weights, or constrain"
            " the values.",
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
                params = ts.unshard(params)
                return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)


            assert "activation" not in unplanned(descend(mlp), mlp_plan)
            """,
        ),
        Entry(
            "batch-not-split",
            "Weights are gathered along an axis that does not split the batch, so all devices"
            " along it do the same work. Split the batch over it. For tensor parallelism,"
            " constrain the activations so that the weights stay sharded.",
            """
            print(unplanned(descend(loss), split=P())["batch-not-split"])
            """,
            """
            assert not unplanned(descend(loss), split=P("fsdp"))
            """,
        ),
        Entry(
            "idle-axis",
            "An axis shards neither the state nor the batch, and nothing moves along it. Split"
            " the batch over it too. `jit_step` warns of it.",
            """
            two_axes = ts.plan(params, [("w", P("fsdp"))], mesh, min_size=0)


            def two_axes_loss(params, x):
                return jnp.mean((x @ ts.unshard(params, two_axes, "fsdp")["w"]) ** 2)


            print(unplanned(descend(two_axes_loss), two_axes)["idle-axis"])
            """,
            """
            assert not unplanned(descend(two_axes_loss), two_axes, split=P(("data", "fsdp")))
            """,
        ),
        Entry(
            "all-reduce",
            "Full gradients are all-reduced although each device needs only its shard: twice the"
            " bytes. Use `training.value_and_grad`, or `treeshard.manual`. The CPU compiler always"
            " all-reduces; for a known CPU program, the report has one line and `by_compiler`.",
            """
            program = jit_step(descend(loss), plan, batch=P("fsdp")).lower(plan.structs, batch)
            text = program.compile().as_text()
            print(*ts.compare_communication(plan, text, batch=P("fsdp")).unplanned)
            """,
            """
            def local(params, x):
                return jnp.mean((x @ params["w"]) ** 2)


            assert not unplanned(by_hand(local), make=shard_map_step)
            """,
        ),
        Entry(
            "ShardingWarning",
            "The first call of a step found that its program moves more bytes of activations than"
            " gathering the weights would take. Call"
            " [`unshard`](#activations-are-moved-instead-of-weights) where weights are used.",
            """
            model = {
                "embed": np.ones((64, 16), "float32"),
                "layers": {
                    "up": np.ones((4, 16, 64), "float32"),
                    "down": np.ones((4, 64, 16), "float32"),
                },
            }
            rules = [("layers", ts.fsdp("fsdp", skip=(0,), min_size=0)), (".*", P("fsdp"))]
            of_model = ts.plan(model, rules, line, min_size=0)
            tokens = np.zeros((256, 16), "int32")


            def layer(x, weights):
                return x + jax.nn.relu(x @ weights["up"]) @ weights["down"], None


            def forward(model, tokens):
                return jnp.mean(jax.lax.scan(layer, model["embed"][tokens], model["layers"])[0])


            step = jit_step(descend(forward), of_model)
            state, value = step(ts.shard(model, of_model), tokens)
            """,
            """
            def gathering(x, weights):
                return layer(x, ts.unshard(weights))


            def forward(model, tokens):
                x = ts.unshard(model["embed"])[tokens]
                return jnp.mean(jax.lax.scan(gathering, x, model["layers"])[0])


            step = jit_step(descend(forward), of_model)
            state, value = step(ts.shard(model, of_model), tokens)
            """,
            about="activations in place of weights",
        ),
        Entry(
            "SpecError",
            "`unshard` and `training.value_and_grad` find a tree's specs in the plan by its"
            " structure and shapes, or those of layers stacked on dim 0. Call them on the tree as"
            " it is in the state, or pass specs.",
            """
            def halves(params, x):
                return jnp.mean((x @ ts.unshard(params["w"][:, :8])) ** 2)


            jit_step(descend(halves), plan, batch=P("fsdp")).lower(plan.structs, batch)
            """,
            """
            def halves(params, x):
                return jnp.mean((x @ ts.unshard(params["w"])[:, :8]) ** 2)


            jit_step(descend(halves), plan, batch=P("fsdp")).lower(plan.structs, batch)
            """,
            about="a tree that the plan does not have",
        ),
        Entry(
            "again",
            "A gather, or the reduction of a gradient, runs more often than planned. Call"
            " `unshard` once, before all uses of the weight and before loops.",
            """
            def twice(params, x):
                return jnp.mean((jnp.tanh(x @ params["w"]) @ params["w"].T) ** 2)


            print(unplanned(descend(twice))["again"])
            """,
            """
            def gathered(params, x):
                return twice(ts.unshard(params), x)


            assert "again" not in unplanned(descend(gathered))
            """,
        ),
        Entry(
            "each-use",
            "A weight that is used several times, such as a tied embedding, has a gradient for"
            " each use, and the compiler reduces each one. `manual.value_and_grad` adds them"
            " first; so does `training.value_and_grad` on Explicit axes.",
            """
            def gathered(params, x):
                w = ts.unshard(params)["w"]
                return jnp.mean((jnp.tanh(x @ w) @ w.T) ** 2)


            print(unplanned(descend(gathered))["each-use"])
            """,
            """
            def local(params, x):
                return jnp.mean((jnp.tanh(x @ params["w"]) @ params["w"].T) ** 2)


            assert not unplanned(by_hand(local), make=shard_map_step)
            """,
        ),
        Entry(
            "matrix-optimizer",
            "The update multiplies matrices, as Muon and Shampoo do, and the plan splits them."
            " Use [`training.by_matrix`](optimizer-state.md#muon-shampoo-soap), or stack the"
            " layers and shard the stacked dim.",
            """
            def whitened(loss):
                def step(state, x):
                    value, grads = jax.value_and_grad(loss)(state["model"], x)
                    mu = jax.tree.map(lambda m, g: 0.9 * m + g, state["mu"], grads)
                    update = lambda m: m @ (m.swapaxes(-1, -2) @ m)
                    model = jax.tree.map(lambda p, m: p - 0.1 * update(m), state["model"], mu)
                    return {"model": model, "mu": mu}, value

                return step


            def split(params):
                state = {"model": params, "mu": jax.tree.map(np.copy, params)}
                return ts.plan(state, [(".*", P("fsdp"))], line, min_size=0)


            print(unplanned(whitened(loss), split(params))["matrix-optimizer"])
            """,
            """
            def layers(params, x):
                for w in ts.unshard(params)["w"]:
                    x = jnp.tanh(x @ w)
                return jnp.mean(x**2)


            stacked = {"w": np.ones((8, 16, 16), "float32")}
            assert "matrix-optimizer" not in unplanned(whitened(layers), split(stacked))
            """,
        ),
        Entry(
            "merged",
            "Not a fault: the step calls `unshard` more often than the program gathers, because"
            " these gathers are alike. `by_compiler` has it.",
            """
            def minibatches(params, x):
                def trip(total, x):
                    value, grads = jax.value_and_grad(loss)(params, x)
                    return jax.tree.map(jnp.add, total, grads), value

                x = ts.with_sharding_constraint(
                    x.reshape(8, 4, 16).swapaxes(0, 1), P(None, "fsdp")
                )
                grads, values = jax.lax.scan(trip, jax.tree.map(jnp.zeros_like, params), x)
                return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), values.mean()


            def own(step):
                compared = jit_step(step, plan, batch=P("fsdp")).communication(plan.structs, batch)
                return {one.code: one for one in compared.by_compiler}


            print(own(minibatches)["merged"])
            """,
            """
            assert "merged" not in own(descend(loss))
            """,
        ),
        Entry(
            "reduction-inside-loop",
            "A gradient is reduced in each iteration of a loop, over minibatches, layers or"
            " [steps of time](recurrent.md), instead of once after it. Use"
            " `accumulate_gradients(..., axis_names=...)`; by hand, `manual.vary` the weights"
            " before the loop. Compilers for TPUs and GPUs may do that by themselves.",
            """
            def looped(grad):
                def step(params, x):
                    def one(total, x):
                        value, grads = grad(params, x)
                        return jax.tree.map(jnp.add, total, grads), value

                    x = ts.with_sharding_constraint(
                        x.reshape(8, 4, 16).swapaxes(0, 1), P(None, "fsdp")
                    )
                    grads, values = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, params), x)
                    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), values.mean()

                return step


            print(unplanned(looped(jax.value_and_grad(loss)))["reduction-inside-loop"])
            """,
            """
            def local(params, x):
                return jnp.mean((x @ params["w"]) ** 2)


            assert not unplanned(by_hand(local), make=shard_map_step)
            """,
        ),
        Entry(
            "sharded-further",
            "The step gathers a leaf that it could use as it is, if it were sharded like the"
            " arrays beside it: optimizer state by `Plan.follow`, weights along the axis of the"
            " activations, such as `tensor`.",
            """
            def momentum(state, x):
                value, grads = jax.value_and_grad(loss)(state["model"], x)
                mu = ts.with_sharding_constraint(state["mu"]["model"], P())
                mu = jax.tree.map(lambda m, g: 0.9 * m + g, mu, grads)
                model = jax.tree.map(lambda p, m: p - 0.1 * m, state["model"], mu)
                return {"model": model, "mu": {"model": mu}}, value


            state = {"model": params, "mu": {"model": jax.tree.map(np.copy, params)}}
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
            "state-unlike-weight",
            "Optimizer state is sharded unlike its weight, so each update moves it, or the"
            " gradient. See [Shard an optax state](optimizer-state.md).",
            """
            def adam(state, x):
                value, grads = jax.value_and_grad(loss)(state["model"], x)
                mu = jax.tree.map(lambda m, g: 0.9 * m + g, state["opt"]["mu"], grads)
                model = jax.tree.map(lambda p, m: p - 0.1 * m, state["model"], mu)
                return {"model": model, "opt": {"mu": mu}}, value


            state = {"model": params, "opt": {"mu": jax.tree.map(np.copy, params)}}
            rules = [("mu", P(None, "fsdp")), ("model", P("fsdp"))]
            print(unplanned(adam, ts.plan(state, rules, line, min_size=0))["state-unlike-weight"])
            """,
            """
            alike = ts.plan(state, [("w", P("fsdp"))], line, min_size=0)
            assert not unplanned(adam, alike)
            """,
        ),
        Entry(
            "to-host",
            "A callback, such as `jax.debug.callback`, copies an array to the host in each step,"
            " and the devices wait. Call it on what the step returns, or pass it scalars.",
            """
            def watched(params, x):
                jax.debug.callback(print, params["w"])
                return loss(params, x)


            print(unplanned(descend(watched))["to-host"])
            """,
            """
            def watched(params, x):
                jax.debug.callback(print, jnp.sum(params["w"] ** 2))
                return loss(params, x)


            assert not unplanned(descend(watched))
            """,
        ),
        Entry(
            "batch",
            "The batch is moved: the step shuffles it, compares its rows, or constrains another"
            " dim. Do it before the step or within a row; to accumulate gradients, use"
            " [`accumulate_gradients`](mixed-precision.md#accumulate-gradients).",
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
            "Data moves between devices that do not form axes of the mesh. Usually a batch was"
            " reshaped for gradient accumulation: use"
            " [`accumulate_gradients`](mixed-precision.md#accumulate-gradients).",
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
            "Weights are converted after they were gathered. Convert them first. (CPU compilers"
            " widen 16-bit values again; that is one line of the report, and not a finding.)",
            """
            def cast_late(params, x):
                w = ts.unshard(params, plan, "fsdp")["w"].astype("bfloat16")
                return jnp.mean((x.astype("bfloat16") @ w).astype("float32") ** 2)


            def compared(loss):
                step = jit_step(descend(loss), plan, batch=P("fsdp"))
                program = step.lower(plan.structs, batch).compile()
                return ts.compare_communication(plan, program, dtype="bfloat16").unplanned


            print(*compared(cast_late))
            """,
            """
            def cast_early(params, x):
                w = ts.unshard(params["w"].astype("bfloat16"), P("fsdp"), "fsdp")
                return jnp.mean((x.astype("bfloat16") @ w).astype("float32") ** 2)


            assert not compared(cast_early)
            """,
        ),
        Entry(
            "narrower",
            "Not a fault: the step converts weights before it gathers them, or a TPU compiler"
            " does, because its products round to bfloat16. `by_compiler` has it.",
            """
            step = jit_step(descend(loss), plan, batch=P("fsdp"))
            program = step.lower(plan.structs, batch).compile()
            compared = ts.compare_communication(plan, program, dtype="float64")
            print(next(one for one in compared.by_compiler if one.code == "narrower"))
            """,
            """
            compared = step.communication(plan.structs, batch)
            assert "narrower" not in [one.code for one in compared.by_compiler]
            """,
        ),
        Entry(
            "by-all-reduce",
            "TPUs gather small shards by an all-reduce of arrays of zeros, which sends twice the"
            " bytes. Split the leaf over fewer devices. `by_compiler` has it.",
            """
            text = '''HloModule step, num_partitions=8

            ENTRY %main (w: f32[1,8]) -> f32[8,8] {
              %w = f32[1,8]{1,0} parameter(0), metadata={op_name="params['w']"}
              %zero = f32[] constant(0)
              %zeros = f32[8,8]{1,0} broadcast(%zero), dimensions={}
              %at = s32[] constant(0)
              %placed = f32[8,8]{1,0} dynamic-update-slice(%zeros, %w, %at, %at)
              ROOT %sum = f32[8,8]{1,0} all-reduce(%placed), replica_groups=[1,8]<=[8], MORE
            }
            '''.replace("MORE", "channel_id=1, use_global_device_ids=true, to_apply=%add")
            leaf = {"w": np.ones((8, 8), "float32")}
            small = ts.plan(leaf, [("w", P("fsdp"))], "fsdp=8", min_size=0)
            print(ts.compare_communication(small, text, batch=P("fsdp")).by_compiler[0])
            """,
            """
            gather = "all-gather(%w), dimensions={0}"
            text = text.replace("all-reduce(%placed)", gather)
            assert not ts.compare_communication(small, text, batch=P("fsdp")).by_compiler
            """,
        ),
        Entry(
            "unreadable",
            "The axes, the bytes or the count of an op are unknown, usually in a loop whose"
            " number of iterations depends on data.",
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
            "A planned transfer is not in the program. Usually it is the other side of"
            " `activation`: call `unshard` where the weight is used. Or the plan is that of"
            " another step.",
            """
            up_down = {"up": np.ones((16, 64), "float32"), "down": np.ones((64, 16), "float32")}
            rules = [("up", P(None, "fsdp")), ("down", P("fsdp"))]
            mlp_plan = ts.plan(up_down, rules, line, min_size=0)


            def mlp(params, x):
                return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)


            print(unplanned(descend(mlp), mlp_plan)["not-moved"])
            """,
            """
            def gathering(params, x):
                return mlp(ts.unshard(params), x)


            assert "not-moved" not in unplanned(descend(gathering), mlp_plan)
            """,
        ),
        Entry(
            "CommunicationError",
            "An `assert_collectives` in a test fails. The message lists every collective of the"
            " program. It is also an `AssertionError`.",
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
    ],
)

OPS = {
    "all-gather": "the shards become the full array, on each device",
    "reduce-scatter": "full arrays are added, and each device keeps its shard",
    "all-reduce": "values are added, and each device has the sum",
    "all-to-all": "each device sends every other device a part",
    "collective-permute": "each device sends its part to one other",
    "collective-broadcast": "one device sends its value to others",
    "ragged-all-to-all": "as all-to-all, with parts of unequal size",
    "send": "one device sends a value to another",
    "unknown": "named like one of these, but not known to treeshard",
}
REASONS = {
    "weight": "a parameter is gathered for use",
    "weight, again for its gradient": "and gathered again, under `jax.checkpoint`",
    "gradient": "a gradient is added up over the batch",
    "update": "the optimizer's state is sharded further than its parameter (ZeRO-1)",
    "loss": "the loss is averaged",
}

# ------------------------------------------------------------------ tests

TESTS = Group(
    "how-to/test-your-sharding",
    "A test of sharding fails",
    "",
    """
    from treeshard import testing
    """,
    [
        Entry(
            "UnexpectedShardingError",
            "A plan differs from the one in a file. `TREESHARD_UPDATE_PLANS=1` accepts it. It is"
            " also an `AssertionError`.",
            """
            before = ts.plan({"w": w}, [("w", P("fsdp"))], mesh)
            testing.assert_same_plan(before, "plans/model.json", update=True)

            plan = ts.plan({"w": w}, [("w", P("data"))], mesh)
            testing.assert_same_plan(plan, "plans/model.json")
            """,
            """
            plan = ts.plan({"w": w}, [("w", ts.fsdp("fsdp"))], mesh)
            testing.assert_same_plan(plan, "plans/model.json")
            """,
            about="a plan",
        ),
        Entry(
            "UnexpectedShardingError",
            "Arrays are not sharded as a test expects. The message lists all of them.",
            """
            params = ts.shard({"w": w, "bias": w[0]}, P("fsdp"), mesh)
            testing.assert_trees_sharded_as(params, {"w": P("fsdp"), "bias": P()})
            """,
            """
            params = ts.shard({"w": w, "bias": w[0]}, {"w": P("fsdp"), "bias": P()}, mesh)
            testing.assert_trees_sharded_as(params, {"w": P("fsdp"), "bias": P()})
            """,
            about="a tree",
        ),
        Entry(
            "WrongResultError",
            "Gradients, or the results of a step, differ between layouts, or could not be"
            " compared. The message is the report: see [are my sharded gradients"
            " right?](../guide/are-my-gradients-right.md) It is also an `AssertionError`.",
            """
            random = np.random.default_rng(0)
            params = {"w": random.normal(size=(8, 64)).astype("float32")}
            batch = random.normal(size=(16, 8)).astype("float32")
            plan = ts.plan(params, [("w", None)], mesh)


            def loss(params, batch):
                return jnp.mean((batch @ params["w"]) ** 2)


            def by_hand(params, batch):  # which sums what it should average
                value, grads = jax.value_and_grad(loss)(params, batch)
                return jax.lax.pmean(value, "data"), jax.lax.psum(grads, "data")


            options = {"layouts": ["unchecked", "unchecked mesh"], "batch_specs": P("data")}
            testing.check_gradients(loss, params, batch, plan, by_hand=by_hand, **options)
            """,
            """
            right = value_and_grad(loss, "data", plan)
            testing.check_gradients(loss, params, batch, plan, by_hand=right, **options)
            """,
        ),
    ],
)

# ------------------------------------------------------------------ disk, text, processes

FILES = Group(
    "errors",
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
            "A file or a checkpoint cannot be written or read. Files that existed before are"
            " unchanged. It is also a `RuntimeError`.",
            """
            save("runs/100", {"w": w})
            tree = restore("runs/200", {"w": w})
            """,
            """
            tree = restore("runs/100", {"w": w})
            """,
        ),
        Entry(
            "CheckpointError",
            "Replicas of an array differ between devices: processes use other keys or other data,"
            ' or a `shard_map` returned a varying value as replicated. `on_divergence="warn"`'
            " saves the first.",
            """
            def noisy(v):
                return v + jax.lax.axis_index("fsdp")


            vary = jax.shard_map(noisy, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
            save("runs/700", {"w": jax.jit(vary)(jnp.arange(3))})
            """,
            """
            save("runs/700", {"w": jnp.arange(3)})
            """,
            about="replicas that differ",
        ),
        Entry(
            "DamagedError",
            "The bytes on disk are not those that were saved. Use another copy, or an earlier"
            " step. It is also a `CheckpointError`.",
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
            "FormatError",
            "The header of a tensor file, or an index, has more than 64 MiB, so it is not read.",
            """
            with open("huge.safetensors", "wb") as file:
                file.write((70 * 2**20).to_bytes(8, "little"))
                file.truncate(80 * 2**20)

            tree = load_safetensors("huge.safetensors")
            """,
            """
            save_safetensors("small.safetensors", {"w": w})
            tree = load_safetensors("small.safetensors")
            """,
            about="files that are too large",
        ),
        Entry(
            "MismatchError",
            "The stored leaves are not the requested ones. All differences are listed."
            ' `cast="float32"` converts dtypes; `partial=True` restores what matches. It is also a'
            " `ValueError`.",
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
            "The same for a safetensors file: `rename` maps your paths to its names.",
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
            "Text cannot be read: a plan, a file of shapes or rules, a program, a header. The"
            " message says where. It is also a `ValueError`.",
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
    "how-to/when-a-step-hangs",
    "Processes fail together",
    "If one process fails, all of them raise, and say which one failed.",
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
            "Processes that must act together did not all arrive within `timeout`, do not agree,"
            " or one failed. The message lists the differences by leaf and process. It is also a"
            " `RuntimeError`.",
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
        Entry(
            "ProcessError",
            "The processes place other values: other keys or other data. Leaves of at most 64 KiB"
            ' are compared; `check="values"` compares all.',
            """
            two_processes('''
            try:
                ts.shard({"w": w + me, "step": np.array(me)}, P(), mesh)
            except ts.ProcessError as error:
                print(f"ProcessError: {error}")
            ''')
            """,
            """
            two_processes('''
            ts.shard({"w": w, "step": np.array(7)}, P(), mesh, check="values")
            ''')
            """,
            about="values that differ",
        ),
    ],
)

GROUPS = [PLACING, RULES, WHOLE, STEPS, AGAIN, MOVES, TESTS, FILES, PROCESSES]
