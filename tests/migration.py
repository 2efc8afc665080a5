"""Reads the tables of docs/migrate.md: the test of a row runs the code under "treeshard".

A row is found by the first code of its first cell. Its test gets `ours`, which runs the code that
the second cell starts with, a line for each `<br>`, with the names that it is given, and returns
the value of the last line.

What the old functions do was read in their sources or observed, and is written down here anew.
"""

import ast
import inspect
import re
from collections.abc import Callable
from functools import cached_property, wraps
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import arange, assert_close, assert_same, struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard import manual, training

PAGE = Path(__file__).parent.parent / "docs" / "migrate.md"

_NAMES = {"jax": jax, "jnp": jnp, "np": np, "optax": optax, "P": P, "ts": ts}
for _module in (training, manual):
    _NAMES |= {name: getattr(_module, name) for name in dir(_module) if not name.startswith("_")}


class Ours:
    """The code of a row, which may use the mesh of its table."""

    def __init__(self, code: str, table: "Table") -> None:
        *self._before, last = ast.parse(code).body
        if not isinstance(last, ast.Expr):
            raise ValueError(f"the last line has no value: {code}")
        self._last = last.value
        self._table = table
        self.ran = False

    def __call__(self, **names: Any) -> Any:
        self.ran = True
        known = _NAMES | {"mesh": self._table.mesh} | names
        exec(compile(ast.Module(self._before, []), "ours", "exec"), known)
        return eval(compile(ast.Expression(self._last), "ours", "eval"), known)


class Table:
    """The rows of a page or a section, by their first code; and which of them have a test.

    Args:
        page: The page.
        section: A heading of its second level.
        axes: The mesh of the rows.
        devices: How many devices it has.
    """

    def __init__(self, page: Path, section: str = "", axes: str = "data=8", devices: int = 8):
        self.page, self.section = page, section
        self.rows = _rows(_section(page.read_text(), section))
        self.tested: set[str] = set()
        self._axes = axes, devices

    @cached_property
    def mesh(self) -> Mesh:
        axes, devices = self._axes
        return ts.make_mesh(axes, devices=jax.devices()[:devices])

    def __call__(self, *theirs: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Marks a test as that of rows; its first arguments are the code of each."""
        for key in theirs:
            if key not in self.rows:
                raise LookupError(f"{self.page} has no row {key!r}. It has {list(self.rows)}.")
        self.tested.update(theirs)
        codes = [Ours(self.rows[key], self) for key in theirs]

        def mark(test: Callable[..., None]) -> Callable[..., None]:
            @wraps(test)
            def run(**fixtures: Any) -> None:
                test(*codes, **fixtures)
                for key, code in zip(theirs, codes, strict=True):
                    assert code.ran, f"the test does not run the row's code: {key}"

            rest = list(inspect.signature(test).parameters.values())[len(theirs) :]
            run.__signature__ = inspect.Signature(rest)  # type: ignore[attr-defined]
            return run

        return mark

    def check(self) -> None:
        """Raises for rows that no test is marked with."""
        untested = self.rows.keys() - self.tested
        assert not untested, f"{self.page}: rows without a test: {sorted(untested)}"

    # Tests of what several projects have a row for: `test_mesh = row.makes_mesh("theirs", data=8)`.

    def makes_mesh(self, theirs: str, given: Any = None, **sizes: int) -> Callable[..., None]:
        """A mesh of these axes in this order; `given` are the names of the code."""

        def test(ours: Ours) -> None:
            assert [*ours(**given or {}).shape.items()] == [*sizes.items()]

        return self(theirs)(test)

    def makes_state(self, theirs: str, rules: Any, spec: P) -> Callable[..., None]:
        """A matrix and its momentum are made in their shards, with the numbers of one device."""

        def init(key: jax.Array, given: Any = None) -> Any:
            params = {"b": jnp.zeros(8), "w": jax.random.normal(key, (1024, 1032))} | (given or {})
            return {"opt": optax.sgd(0.1, momentum=0.9).init(params), "params": params}

        def test(ours: Ours) -> None:
            key, given = jax.random.key(0), {"b": arange(8)}
            names = dict.fromkeys(["init", "init_fn"], init) | dict.fromkeys(["key", "rng"], key)
            made = ours(rules=rules, init_rng=key, partial_params=given, **names)
            expected = init(key, given if "partial_params" in self.rows[theirs] else None)
            check_init(made, expected, 2 * [{"b": P(), "w": spec}])

        return self(theirs)(test)

    def steps(self, theirs: str, spec: P) -> Callable[..., None]:
        """Two steps give the numbers of one device; the key of their noise is in the state."""

        def train(state: Any, batch: jax.Array) -> Any:
            key, noise = jax.random.split(state["key"])
            x = batch + jax.random.normal(noise, batch.shape)
            loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
            return {"w": state["w"] - grad, "key": key, "step": state["step"] + 1}, {"loss": loss}

        def test(ours: Ours) -> None:
            keys = jax.random.split(jax.random.PRNGKey(0))
            made = {"w": jax.random.normal(keys[0], (16, 8)), "key": keys[1], "step": jnp.int32(0)}
            state = jax.tree.map(np.array, made)  # on the host, where nothing is donated
            plan = ts.plan(state, [("w", spec), (".*", None)], self.mesh, min_size=0)
            names = dict.fromkeys(["step", "train_step", "update_fn"], train)
            step, batch = ours(plan=plan, **names), np.ones((8, 16), np.float32)
            check_step(step, plan, train, state, batch)
            with pytest.raises(ts.SpecError, match="v: the plan has no such array"):
                step(ts.shard(state, plan) | {"v": jnp.ones(4)}, batch)

        return self(theirs)(test)

    def splits_rows(self, theirs: str, spec: P) -> Callable[..., None]:
        """The rows of each process become a global array; an error names what does not divide."""

        def test(ours: Ours) -> None:
            x = arange(16, 2)
            placed = ours(batch={"image": x, "step": 3})
            assert placed["image"].sharding == NamedSharding(self.mesh, spec)
            np.testing.assert_array_equal(placed["image"], x)
            assert (placed["step"], type(placed["step"])) == (3, int)
            with pytest.raises(ts.SpecError, match="image: .* 15 is not divisible"):
                ours(batch={"image": x[:15]})

        return self(theirs)(test)

    def saves(self, theirs: str, spec: P) -> Callable[..., None]:
        """A sharded state is saved, and restored to the bit on another mesh."""

        def test(ours: Ours, tmp_path: Path) -> None:
            state, path = {"w": arange(8, 4), "act": jax.nn.relu}, tmp_path / "state"
            placed = ts.shard(state, spec, self.mesh)
            ours(path=path, state=placed, train_state=placed)
            plan = ts.plan(state, [("w", P("all"))], ts.make_mesh("all=8"), min_size=0)
            restored = ts.checkpoint.restore(path, plan)
            assert not ts.diff_shardings(restored, plan)
            assert_same(ts.gather(restored), state)

        return self(theirs)(test)

    def restores(self, theirs: str, spec: P) -> Callable[..., None]:
        """An array is restored to the bit as the plan says; another shape or dtype is an error."""

        def plan_of(leaf: Any) -> ts.Plan:
            return ts.plan({"w": leaf}, [("w", spec)], self.mesh, min_size=0)

        def test(ours: Ours, tmp_path: Path) -> None:
            x, path = arange(8, 4), tmp_path / "state"
            ts.checkpoint.save(path, ts.shard({"w": x}, P("all"), ts.make_mesh("all=8")))
            found = ours(path=path, plan=plan_of(x))["w"]
            assert found.sharding == NamedSharding(self.mesh, spec)
            np.testing.assert_array_equal(found, x)
            with pytest.raises(ts.MismatchError, match=r"w: saved as float32\[8,4\]"):
                ours(path=path, plan=plan_of(struct(8, 8)))
            with pytest.raises(ts.MismatchError, match="saved as float32.*, requested as bfloat16"):
                ours(path=path, plan=plan_of(struct(8, 4, dtype="bfloat16")))

        return self(theirs)(test)

    def keeps_checkpoints(
        self, theirs: str, saved: dict[int, bool], kept: tuple[int, ...]
    ) -> Callable[..., None]:
        """A run saves in these of its steps, keeps some of them, and resumes from the last."""

        def test(ours: Ours, tmp_path: Path) -> None:
            x = arange(8)
            spec = P(self.mesh.axis_names[-1])
            plan = ts.plan({"w": x}, [("w", spec)], self.mesh, min_size=0)
            with ours(directory=tmp_path / "run") as checkpoints:
                assert {step: checkpoints.save(step, {"w": x + step}) for step in saved} == saved
                checkpoints.wait()
                assert checkpoints.steps() == kept
                step, state = checkpoints.restore_latest(plan)
            assert step == kept[-1]
            assert not ts.diff_shardings(state, plan)
            np.testing.assert_array_equal(state["w"], x + step)

        return self(theirs)(test)


def table(section: str, axes: str, devices: int = 8) -> Table:
    return Table(PAGE, section, axes, devices)


def _section(text: str, title: str) -> str:
    """What stands under a heading of the second level; the whole text without a title."""
    if not title:
        return text
    _, heading, after = text.partition(f"\n## {title}\n")
    if not heading:
        raise LookupError(f"no section {title!r}")
    return after.partition("\n## ")[0]


def _rows(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in text.splitlines():
        cells = line.split("|")[1:-1] if line.startswith("|") else []
        if not cells or "`" not in cells[0]:
            continue  # no table, or its head
        theirs, here = cells
        key = re.findall("`(.+?)`", theirs)[0]
        code = re.match("`[^`]+`(<br>`[^`]+`)*", here.strip())
        if code is None:
            raise ValueError(f"the row {key} does not start with code")
        if key in found:
            raise ValueError(f"two rows start with {key}")
        found[key] = "\n".join(re.findall("`(.+?)`", code[0]))
    return found


def short(specs: Any) -> Any:
    """Specs (or shardings) without the `None`s at their ends, which say nothing."""

    def one(spec: Any) -> P:
        kept = list(spec.spec if isinstance(spec, NamedSharding) else spec)
        while kept and kept[-1] is None:
            kept.pop()
        return P(*kept)

    return jax.tree.map(one, specs)


# ------------------------------------------------------------------ what old functions do


def first_match(rules: Any, tree: Any, strict: bool = True) -> Any:
    """EasyLM's and scalax's: the first pattern found in a path decides; one element is whole."""

    def spec(path: str, leaf: Any) -> P:
        if np.prod(leaf.shape) == 1:  # of no dims, or of one element
            return P()
        for pattern, given in rules:
            if re.search(pattern, path):
                return given
        if strict:
            raise ValueError(f"no rule for {path}")
        return P()

    return ts.named_tree_map(spec, tree)


def longest_dim(shape: tuple[int, ...], axis: str, size: int, *, first: bool = False) -> P:
    """The longest dim that the axis divides, of equals the last or the first; or none."""
    divisible = [i for i, dim in enumerate(shape) if dim % size == 0]
    if not divisible:
        return P()
    chosen = max(divisible, key=lambda i: (shape[i], -i if first else i))
    return P(*[None] * chosen, axis)


def mebibytes(leaf: Any) -> float:
    return np.prod(leaf.shape) * leaf.dtype.itemsize / 2**20


# ------------------------------------------------------------------ rows of several sections


def check_init(made: tuple[Any, ts.Plan], expected: Any, specs: Any) -> None:
    """A state is made in its shards: as the old way has it, with the numbers of one device."""
    state, plan = made
    assert [leaf.given for leaf in plan.leaves] == jax.tree.leaves(short(specs))
    assert not ts.diff_shardings(state, plan)
    assert_same(ts.gather(state), expected)


def check_step(step: Any, plan: ts.Plan, train: Any, state: Any, batch: Any) -> None:
    """Two steps give the numbers of one device, donate the state, and keep its specs."""
    alone = jax.jit(train)
    first = placed = ts.shard(state, plan)
    for _ in range(2):
        state, expected = alone(state, batch)
        placed, aux = step(placed, batch)
        assert_close(ts.gather((placed, aux)), (state, expected))
    assert all(x.is_deleted() for x in jax.tree.leaves(first))
    assert not ts.diff_shardings(placed, plan)
