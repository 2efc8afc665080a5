"""`treeshard inspect`, `verify` and `diff`."""

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import jax

from treeshard._cli.differences import Changed, Difference, difference
from treeshard._cli.stored_trees import StoredTree, open_stored
from treeshard._core.processes import with_bar
from treeshard._core.text import columns, fold_paths, human_bytes
from treeshard._disk.leaves import SavedLeaf, describe_leaf
from treeshard.errors import DamagedError, FormatError
from treeshard.interchange._tensors import tensor_names

# ------------------------------------------------------------------
# What several commands share: renaming, progress bars, and where JAX runs.


def off_accelerators() -> None:
    """Keeps JAX on the CPU, which is enough for files, unless the user chose a platform."""
    if not jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]  (JAX defines it at run time)
        jax.config.update("jax_platforms", "cpu")


def wants_bar() -> bool:
    """Whether to show a progress bar: on a terminal, if `tqdm` is installed."""
    return sys.stderr.isatty() and find_spec("tqdm") is not None


def pattern(text: str, option: str) -> re.Pattern[str]:
    """Reads a regular expression."""
    try:
        return re.compile(text)
    except re.error as error:
        raise FormatError(f"{option} {text!r}: the pattern does not compile: {error}.") from None


def renamed(paths: Iterable[str], rules: Sequence[str], where: str) -> dict[str, str]:
    """The new names of leaves, by their paths.

    Args:
        paths: The paths.
        rules: Strings `REGEX=>NEW`, applied in order.
        where: The name of the command, for messages.

    Raises:
        FormatError: If a rule is malformed.
        CheckpointError: If leaves would share a name.
    """
    pairs = [_read_rule(rule) for rule in rules]

    def rename(path: str) -> str:
        for old, new in pairs:
            try:
                path = old.sub(new, path)
            except (re.error, IndexError) as error:
                raise FormatError(f"--rename: {new!r} is not a replacement: {error}.") from None
        return path

    tree = dict.fromkeys(sorted(paths), jax.ShapeDtypeStruct((), "bool"))
    return dict(zip(tree, tensor_names(tree, rename, where).values(), strict=True))


def _read_rule(rule: str) -> tuple[re.Pattern[str], str]:
    old, arrow, new = rule.partition("=>")
    if not arrow:
        raise FormatError(f"--rename {rule!r} has no '=>'. Write it as 'REGEX=>NEW', '/=>.'.")
    return pattern(old, "--rename"), new


# ------------------------------------------------------------------ inspect


def run_inspect(options: argparse.Namespace) -> tuple[str, int]:
    """Prints the leaves of a stored tree."""
    off_accelerators()
    with open_stored(options.path, options.step) as tree:
        return _as_json(tree) if options.json else _as_text(tree), 0


def _as_text(tree: StoredTree) -> str:
    text = str(tree.contents)
    if tree.steps:
        steps = ", ".join(map(str, tree.steps))
        text = f"{tree.contents.path}, of steps {steps}:\n{text}"
    return text


def _as_json(tree: StoredTree) -> str:
    about = {
        "path": tree.contents.path,
        "format": tree.format,
        "steps": tree.steps,
        "meshes": tree.contents.meshes,
        "bytes": tree.contents.bytes,
        "leaves": [_row(leaf) for leaf in tree.contents.leaves],
    }
    return json.dumps(about)


def _row(leaf: SavedLeaf) -> dict[str, Any]:
    about: dict[str, Any] = {"path": leaf.path, "kind": leaf.kind}
    if leaf.dtype:
        about |= {"shape": leaf.shape, "dtype": leaf.dtype, "spec": leaf.spec}
    else:
        about |= {"value": leaf.value}
    return about | {"bytes": leaf.bytes, "crc32": leaf.crc}


# ------------------------------------------------------------------ verify


def run_verify(options: argparse.Namespace) -> tuple[str, int]:
    """Prints which leaves are damaged. Returns 1 if any is."""
    off_accelerators()
    try:
        with open_stored(options.path, options.step) as tree:
            return _verified(tree)
    except (DamagedError, FormatError) as error:
        return str(error), 1


def _verified(tree: StoredTree) -> tuple[str, int]:
    path, leaves = tree.contents.path, tree.contents.leaves
    total = f"{len(leaves):,} leaves, {human_bytes(tree.contents.bytes)}"
    if tree.format == "safetensors":
        return (
            f"{path}: {total}. Headers and sizes are correct. The format has no checksums, so the"
            " values cannot be verified.",
            0,
        )
    read = tree.read(with_bar(leaves, "verify", show=wants_bar()))
    if damages := [f"  {leaf.row.path}: {leaf.damage}" for leaf in read if leaf.damage]:
        head = f"{path}: {len(damages):,} of {len(leaves):,} leaves are damaged:"
        return "\n".join([head, *damages]), 1
    bare = sum(leaf.crc is None for leaf in leaves)
    but = f", except {bare:,} that have no checksum but can be read" if bare else ""
    return f"{path}: {total}. All match their checksums{but}.", 0


# ------------------------------------------------------------------ diff


def run_diff(options: argparse.Namespace) -> tuple[str, int]:
    """Prints how two stored trees differ. Returns 1 if they do."""
    off_accelerators()
    with open_stored(options.a) as a, open_stored(options.b) as b:
        names = renamed([leaf.path for leaf in a.contents.leaves], options.rename, "diff")
        result = difference(a, b, names, progress=wants_bar())
        to_text = _difference_json if options.json else _difference_text
        return to_text(result, a.contents.path, b.contents.path), int(bool(result))


def _difference_text(result: Difference, a: str, b: str) -> str:
    parts: list[str] = []
    if result.changed:
        rows = [("path", "leaf", "differ", "max abs", "max relative")]
        rows += [(path or "(the tree)", *_cells(x)) for path, x in result.changed.items()]
        parts.append(columns(rows))
    for where, paths in ((a, result.only_in_a), (b, result.only_in_b)):
        if paths:
            lines = [f"  {path or '(the tree)'}" for path in fold_paths(paths)]
            parts.append("\n".join([f"only in {where}:", *lines]))
    by = f" ({result.unread:,} by checksum alone)" if result.unread else ""
    counts = [f"{result.same:,} leaves are the same{by}", f"{len(result.changed):,} differ"]
    counts += [f"{len(result.only_in_a):,} only in {a}"] * bool(result.only_in_a)
    counts += [f"{len(result.only_in_b):,} only in {b}"] * bool(result.only_in_b)
    return "\n".join([*parts, ", ".join(counts) + "."])


def _cells(x: Changed) -> tuple[str, str, str, str]:
    a, b, numbers = describe_leaf(x.a), describe_leaf(x.b), x.numbers
    if numbers is None:
        return f"{a} -> {b}", "", "", ""
    odd = f" ({numbers.not_finite:,} NaN or infinite)" if numbers.not_finite else ""
    differ = f"{numbers.differing:,} of {numbers.size:,}{odd}"
    return a, differ, _short(numbers.max_abs), _short(numbers.max_relative)


def _short(x: int | float | None) -> str:
    return "" if x is None else f"{x:.3g}"


def _difference_json(result: Difference, a: str, b: str) -> str:
    changed = [
        {"path": path, "a": _row(x.a), "b": _row(x.b)} | _numbers(x)
        for path, x in result.changed.items()
    ]
    return json.dumps({"a": a, "b": b, **result._asdict(), "changed": changed})


def _numbers(x: Changed) -> dict[str, Any]:
    if x.numbers is None:
        return {}
    return {
        name: None if isinstance(n, float) and math.isinf(n) else n
        for name, n in x.numbers._asdict().items()
    }
