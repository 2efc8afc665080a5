"""Reads the tables of docs/migrate.md: what stands under "here" in a row is what its test runs.

A row is found by the first code of its first cell. Its test gets `ours`, which runs the code of
the second cell, a line for each `<br>`, with what it is given by name, and returns the value of
the last line. So a page and its test cannot come apart.
"""

import ast
import inspect
import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard import manual, training

PAGE = Path(__file__).parent.parent / "docs" / "migrate.md"

_NAMES = {"jax": jax, "jnp": jnp, "np": np, "optax": optax, "P": P, "ts": ts}
for _module in (training, manual):
    _NAMES |= {name: getattr(_module, name) for name in dir(_module) if not name.startswith("_")}


class Ours:
    """The code of a row."""

    def __init__(self, code: str) -> None:
        *self._before, last = ast.parse(code).body
        if not isinstance(last, ast.Expr):
            raise ValueError(f"the last line has no value: {code}")
        self._last = last.value
        self.ran = False

    def __call__(self, **names: Any) -> Any:
        self.ran = True
        known = _NAMES | names
        exec(compile(ast.Module(self._before, []), "ours", "exec"), known)
        return eval(compile(ast.Expression(self._last), "ours", "eval"), known)


class Table:
    """The rows of a page or a section, by their first code; and which of them have a test."""

    def __init__(self, page: Path, section: str = "") -> None:
        self.page = page
        self.rows = _rows(_section(page.read_text(), section))
        self.tested: set[str] = set()

    def row(self, theirs: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Marks a test as that of a row; its first argument is the row's code."""
        if theirs not in self.rows:
            raise LookupError(f"{self.page} has no row {theirs!r}. It has {list(self.rows)}.")
        self.tested.add(theirs)
        ours = Ours(self.rows[theirs])

        def mark(test: Callable[..., None]) -> Callable[..., None]:
            @wraps(test)
            def run(**fixtures: Any) -> None:
                test(ours, **fixtures)
                assert ours.ran, "the test does not run the row's code"

            _, *rest = inspect.signature(test).parameters.values()
            run.__signature__ = inspect.Signature(rest)  # type: ignore[attr-defined]
            return run

        return mark

    def check(self) -> None:
        """Raises for rows that no test is marked with."""
        untested = self.rows.keys() - self.tested
        assert not untested, f"{self.page}: rows without a test: {sorted(untested)}"


def table(section: str) -> Table:
    return Table(PAGE, section)


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
        theirs, here, _ = cells
        key = re.findall("`(.+?)`", theirs)[0]
        if key in found:
            raise ValueError(f"two rows start with {key}")
        found[key] = "\n".join(re.findall("`(.+?)`", here))
    return found


def short(specs: Any) -> Any:
    """Specs (or shardings) without the `None`s at their ends, which say nothing."""

    def one(spec: Any) -> P:
        kept = list(spec.spec if isinstance(spec, NamedSharding) else spec)
        while kept and kept[-1] is None:
            kept.pop()
        return P(*kept)

    return jax.tree.map(one, specs)
