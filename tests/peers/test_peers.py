"""Rules, constraints and `PartitionAxis` beside eformer's and scalax's, on random inputs.

`make test-peers` has both, in the versions that docs/migrate.md is about. A result may differ only
for a reason that the page gives: each reason is a sentence of the page, and says which inputs it is
about. Elsewhere these tests are skipped.
"""

import dataclasses
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import legacy, struct
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from migration import PAGE, short

import treeshard as ts
from treeshard._core.specs import axes_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    es = pytest.importorskip("eformer.escale")
    sx = pytest.importorskip("scalax.sharding")

# Theirs warns of what JAX has deprecated, and ours of specs that do not fit.
pytestmark = pytest.mark.filterwarnings("ignore")
COUNT = 500
TEXT = " ".join(PAGE.read_text().split())
SIZES = [1, 3, 4, 6, 8, 16]
AXES = ["dp", "fsdp", "mp"]


def meshes() -> list[jax.sharding.Mesh]:
    return [ts.make_mesh(m) for m in ("dp=2,fsdp=2,mp=2", "dp=1,fsdp=4,mp=2", "fsdp=8", "mp=8")]


class Reasons:
    """Why results differ, each as it stands on the page, and how often each was met."""

    def __init__(self, **sentences: str) -> None:
        self.sentences = sentences
        self.met: Counter[str] = Counter()
        self.unlisted: list[Any] = []

    def compare(self, theirs: Any, ours: Any, why: str | None, *given: Any) -> None:
        if theirs == ours:
            self.met["same"] += 1
        elif why is None:
            self.unlisted.append((*given, theirs, ours))
        else:
            self.met[why] += 1

    def check(self, record: Callable[[str, object], None]) -> None:
        record("compared", dict(self.met))
        assert self.unlisted == []
        for why, sentence in self.sentences.items():
            assert sentence in TEXT, why
            assert self.met[why], f"nothing differs because of {why}: remove it from the page"
        assert self.met["same"] >= sum(self.met.values()) / 4


def shape(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.choice(SIZES) for _ in range(rng.randint(0, 3)))


def spec(rng: random.Random, axes: list[str]) -> P:
    """A spec for any rank, which names no axis twice."""
    free = rng.sample(axes, len(axes))
    dims: list[Any] = []
    for _ in range(rng.randint(0, 4)):
        count = min(rng.choice([0, 0, 1, 1, 2]), len(free))
        taken = tuple(free.pop() for _ in range(count))
        dims.append(taken if count > 1 else taken[0] if taken else None)
    return P(*dims)


def tree(rng: random.Random, depth: int = 2) -> Any:
    if not depth or rng.random() < 0.3:
        return struct(*shape(rng))
    children = [tree(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.4:
        return rng.choice([list, tuple])(children)
    return dict(zip(rng.sample(["wq", "up", "norm", "bias"], len(children)), children, strict=True))


def outcome(f: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """What `f` returns, or the kind of error."""
    try:
        return f(*arguments, **named)
    except Exception as error:
        kinds = [kind for kind in (ValueError, TypeError, KeyError) if isinstance(error, kind)]
        return kinds[0] if kinds else type(error)


def canonical(specs: Any) -> Any:
    """Specs in one form: without `None`s at their ends, and with one axis as a name."""
    if isinstance(specs, type):
        return specs

    def one(spec: Any) -> P:
        kept = [axes[0] if len(axes := axes_of(x)) == 1 else axes or None for x in short(spec)]
        return P(*kept)

    return jax.tree.map(one, specs)


# ------------------------------------------------------------------ rules


def rules(rng: random.Random, axes: list[str]) -> list[tuple[str, P]]:
    patterns = ["wq", "up/.*", "norm", "bias$", "0", "^wq", "q|p"]
    chosen = [(pattern, spec(rng, axes)) for pattern in rng.sample(patterns, rng.randint(1, 5))]
    return [*chosen, *([(".*", spec(rng, axes))] if rng.random() < 0.7 else [])]


def test_rules_beside_eformer(record_property) -> None:
    """No reason: rules need no change."""
    rng, reasons = random.Random(0), Reasons()
    for _ in range(COUNT):
        given, leaves, size = rules(rng, [*AXES, "nope"]), tree(rng), rng.choice([0, 4, 64])
        theirs = outcome(es.match_partition_rules, given, leaves, min_size=size)
        ours = outcome(ts.match_partition_rules, given, leaves, min_size=size)
        reasons.compare(canonical(theirs), canonical(ours), None, given, leaves, size)
    reasons.check(record_property)


def test_rules_beside_scalax(record_property) -> None:
    reasons = Reasons(
        rank="Specs are cut to the rank.",
        one="A leaf of one element needs a rule, too.",
    )
    rng = random.Random(1)
    for _ in range(COUNT):
        given, leaves = rules(rng, AXES), tree(rng)
        theirs = outcome(sx.TreePathShardingRule(*given).apply, leaves)
        ours = outcome(ts.match_partition_rules, given, leaves, min_size=2)
        is_long = theirs is not ValueError and any(
            len(short(found)) > leaf.ndim
            for found, leaf in zip(jax.tree.leaves(theirs), jax.tree.leaves(leaves), strict=True)
        )
        has_one = any(np.prod(leaf.shape) == 1 for leaf in jax.tree.leaves(leaves))
        why = "rank" if is_long else "one" if ours is ValueError and has_one else None
        reasons.compare(canonical(theirs), canonical(ours), why, given, leaves)
    reasons.check(record_property)


@pytest.mark.parametrize("knows_size", [True, False])
def test_fsdp_beside_scalax(knows_size: bool, record_property) -> None:
    tie = "Of equal dims, scalax shards the first."
    power = (
        "scalax shards the dim with the largest power of two, even if the axis does not divide it."
    )
    reasons = Reasons(tie=tie) if knows_size else Reasons(power=power)
    rng = random.Random(2)
    for _ in range(COUNT):
        dims, size = shape(rng), rng.choice([1, 16, 64])
        rule = sx.FSDPShardingRule("fsdp", 4 if knows_size else None, min_fsdp_size=size)
        theirs = outcome(rule.apply, struct(*dims))
        ours = ts.plan(struct(*dims), [(".*", ts.fsdp("fsdp", min_size=size))], "fsdp=4").specs
        divided = [dim for dim in dims if dim % 4 == 0]
        is_tie = divided.count(max(divided, default=0)) > 1
        why = "power" if not knows_size else "tie" if is_tie else None
        reasons.compare(canonical(theirs), canonical(ours), why, dims, size)
    reasons.check(record_property)


# ------------------------------------------------------------------ constraints


UNCONSTRAINED = P("-")  # stands for the sharding of an array that nobody has placed


def specs_of(tree: Any) -> Any:
    if isinstance(tree, type):
        return tree
    return canonical(jax.tree.map(lambda x: getattr(x.sharding, "spec", UNCONSTRAINED), tree))


def made(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(np.ones(x.shape, x.dtype)), tree)


def constrained(
    constrain: Callable[[Any, Any], Any], leaves: Any, given: Any, mesh: Any, in_jit: bool
) -> Any:
    """The specs of the result in a mesh."""

    def run() -> Any:
        f = lambda x: constrain(x, given)  # noqa: E731  (jit takes functions)
        with legacy(mesh):
            return (jax.jit(f) if in_jit else f)(made(leaves))

    return specs_of(outcome(run))


def dropped_otherwise(given: P, dims: tuple[int, ...], mesh: Any) -> Iterator[str]:
    """Why axes of a tuple are dropped in another way."""
    for entry, length in zip(given, dims, strict=False):
        axes = axes_of(entry)
        known = [axis for axis in axes if axis in mesh.shape]
        if len(axes) > 1 and len(known) < len(axes):
            yield "unknown"
        elif len(axes) > 1 and length % np.prod([mesh.shape[axis] for axis in axes]):
            yield "uneven"


@pytest.mark.parametrize("kind", ["array", "tree"])
def test_constraints_beside_eformer(kind: str, record_property) -> None:
    sentences = {
        "empty": "`with_sharding_constraint(x, P())` replicates `x`. eformer leaves it alone.",
        "unknown": "If the mesh lacks one axis of a tuple, treeshard drops this axis.",
        "uneven": "If only the first axes of a tuple divide a dim, treeshard keeps these.",
    }
    if kind == "array":
        sentences["rank"] = (
            "If a spec is longer than the rank of an array, treeshard raises, as JAX"
        )
    reasons, rng = Reasons(**sentences), random.Random(3)
    for _ in range(COUNT):
        leaves = struct(*shape(rng)) if kind == "array" else {"x": tree(rng, 1), "y": tree(rng, 1)}
        given, mesh = spec(rng, [*AXES, "nope"]), rng.choice(meshes())
        whole = given
        if rng.random() < 0.2 and {*ts.get_names_from_partition_spec(given)} <= {*mesh.shape}:
            whole = NamedSharding(mesh, given)
        in_jit = rng.random() < 0.1
        theirs = constrained(es.with_sharding_constraint, leaves, whole, mesh, in_jit)
        ours = constrained(ts.with_sharding_constraint, leaves, whole, mesh, in_jit)
        shapes = [x.shape for x in jax.tree.leaves(leaves)]
        whys = [why for dims in shapes for why in dropped_otherwise(given, dims, mesh)]
        if not len(given):
            why = "empty"
        elif kind == "array" and len(short(given)) > len(shapes[0]):
            why = "rank"
        else:
            why = next(iter(whys), None)
        reasons.compare(theirs, ours, why, shapes, whole, mesh.shape, in_jit)
    reasons.check(record_property)


def constrained_by_scalax(helper: Any, leaves: Any, given: P) -> Any:
    step = helper.sjit(lambda x: sx.with_sharding_constraint(x, given))
    return specs_of(outcome(step, made(leaves)))


def test_constraints_beside_scalax(record_property) -> None:
    beyond = "Unknown axes and extra `None`s are dropped. scalax raises."
    reasons, rng = Reasons(beyond=beyond), random.Random(4)
    helper = sx.MeshShardingHelper([2, 2, 2], AXES)
    for _ in range(COUNT):
        leaves, given = struct(*shape(rng)), spec(rng, [*AXES, "nope"])
        theirs = constrained_by_scalax(helper, leaves, given)
        ours = constrained(ts.with_sharding_constraint, leaves, given, helper.mesh, False)
        named = [axis for entry in given for axis in axes_of(entry)]
        is_long = len(short(given)) <= leaves.ndim < len(given)
        why = "beyond" if "nope" in named or is_long else None
        reasons.compare(theirs, ours, why, leaves.shape, given)
    reasons.check(record_property)


# ------------------------------------------------------------------ PartitionAxis

OURS = {field.name for field in dataclasses.fields(ts.PartitionAxis)}
FIELDS = [
    f.name
    for f in dataclasses.fields(es.PartitionAxis)
    if f.name.replace("decode_", "generation_") in OURS
]
MODES = ["__train__", "__prefill__", "__autoregressive__", "__insert__"]


def fields(rng: random.Random) -> dict[str, Any]:
    chosen = rng.sample(FIELDS, rng.randint(0, 4))
    axes = ["a", "b", ("a", "b"), None]
    return {name: rng.choice("abc") if "parallel" in name else rng.choice(axes) for name in chosen}


def of_ours(given: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("decode_", "generation_"): value for name, value in given.items()}


def test_fields_beside_eformer(record_property) -> None:
    """The fields of decoding differ as the table of the page says."""
    derived = {
        "decode_batch_axis": ("batch_axis", None),
        "decode_head_axis": ("head_axis", "tensor_parallel_axis"),
        "decode_key_sequence_axis": ("key_sequence_axis", "sequence_parallel_axis"),
    }
    reasons, rng = (
        Reasons(
            decode="In decoding, eformer and `ts.compat.PartitionManager` use the axes of training."
        ),
        random.Random(5),
    )
    for _ in range(COUNT):
        given = fields(rng)
        theirs, ours = es.PartitionAxis(**given), ts.PartitionAxis(**of_ours(given))
        for name in FIELDS:
            a, b = getattr(theirs, name), getattr(ours, name.replace("decode_", "generation_"))
            if isinstance(a, tuple):
                a = canonical(P(tuple(dict.fromkeys(a))))[0]  # `("a", "a")` is `"a"`
            why = None
            if name in derived and name not in given:
                as_training, default = derived[name]
                assert getattr(theirs, name) == getattr(theirs, as_training)
                assert b == (None if default is None else getattr(ours, default))
                why = "decode"
            reasons.compare(a, b, why, given, name)
    reasons.check(record_property)


def resolved(manager: Any, names: list[Any], mode: str) -> Any:
    """The axes of each dim; a list of names is flattened."""

    def flat(entry: Any) -> list[str]:
        return (
            [axis for x in entry for axis in flat(x)]
            if isinstance(entry, list | tuple)
            else ([entry] if entry else [])
        )

    found = outcome(lambda: manager.resolve(names, mode))
    return found if isinstance(found, type) else [flat(x) for x in found]


def test_names_beside_eformer(record_property) -> None:
    reasons = Reasons(
        twice="If a `PartitionAxis` maps two dims to one axis, the first gets it.",
        axis="A tuple of names may not have mesh axes: write",
        several="In a tuple of names, one may have several axes. eformer raises.",
    )
    rng = random.Random(6)
    es.PartitionAxis.register("cache", "sp")
    es.PartitionAxis.register("__ATTN_DP__", "dp", generation_axis_rule=None)
    custom = {"cache": "sp", "__ATTN_DP__": "dp", "generation___ATTN_DP__": None}
    known = [name for name in es.PartitionAxis._SEMANTIC_MAP if name != "_"] + [
        "cache",
        "__ATTN_DP__",
    ]
    try:
        for _ in range(2 * COUNT):
            given, mode = fields(rng), rng.choice(MODES)
            names: list[Any] = [rng.choice([*known, None, "_"]) for _ in range(rng.randint(1, 4))]
            if rng.random() < 0.3:
                names.append(rng.sample([*known, "dp"], 2))
            if rng.random() < 0.1:
                names.append("__BACH__")
            theirs = resolved(es.PartitionManager(es.PartitionAxis(**given)), names, mode)
            axes = ts.PartitionAxis(**of_ours(given), custom=custom)
            ours = resolved(ts.compat.PartitionManager(axes), names, mode)
            why = None
            if any(isinstance(name, list) and "dp" in name for name in names):
                why = "axis"
            elif theirs is ValueError and isinstance(names[-1], list):
                why = "several"
            elif not isinstance(theirs, type):
                used: set[str] = set()
                once = [
                    [a for a in dict.fromkeys(dim) if not (a in used or used.add(a))]
                    for dim in theirs
                ]
                why = "twice" if once == ours else None
            reasons.compare(theirs, ours, why, given, names, mode)
    finally:
        es.PartitionAxis.clear_registered_axes()
    reasons.check(record_property)


def by_names(peer: Any) -> Callable[[Any, Any], Any]:
    axes = (es if peer is es else ts).PartitionAxis(batch_axis="fsdp")
    return partial(_by_names, peer.apply_logical_sharding, peer.PartitionManager(axes))


def _by_names(apply: Callable[..., Any], manager: Any, x: Any, given: dict[str, Any]) -> Any:
    return apply(x, partition_manager=manager, **given)


@pytest.mark.parametrize("axes", ["dp=2,fsdp=2,tp=2", "fsdp=4,sp=2", "ep=2,tp=4"])
def test_logical_sharding_beside_eformer(axes: str, record_property) -> None:
    """`apply_logical_sharding`, as EasyDeL calls it, in a mesh."""
    rng, mesh = random.Random(7), ts.make_mesh(axes)
    names = ["__BATCH__", "__QUERY_LENGTH__", "__HEAD__", "__EXPERT__", "_", None]
    reasons = Reasons(
        empty="`with_sharding_constraint(x, P())` replicates `x`. eformer leaves it alone.",
        rank="If a spec is longer than the rank of an array, treeshard raises, as JAX",
    )
    for _ in range(COUNT // 5):
        leaf = struct(*(rng.choice([1, 2, 4, 8]) for _ in range(rng.choice([2, 3, 3, 3]))))
        given = {"axes": rng.sample(names, 3), "mode": rng.choice([*MODES, 1])}
        in_jit = rng.random() < 0.1

        theirs = constrained(by_names(es), leaf, given, mesh, in_jit)
        ours = constrained(by_names(ts.compat), leaf, given, mesh, in_jit)
        why = "rank" if leaf.ndim == 2 else "empty" if ours == P() else None
        reasons.compare(theirs, ours, why, leaf.shape, given)
    reasons.check(record_property)
