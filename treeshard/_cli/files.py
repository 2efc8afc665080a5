"""`treeshard inspect`, `verify` and `export`: the commands on files.

They need no model: what a file has is read from the file. A tree with the structure of the model,
as `restore` wants it, would take the code of the run that saved it.
"""

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from treeshard._cli.stored_trees import StoredTree, open_stored
from treeshard._core.processes import TIMEOUT, wants_bar, with_bar
from treeshard._core.text import human_bytes, parse_bytes, parse_dtype, parse_pattern
from treeshard._disk.files import file_path
from treeshard._disk.leaves import SavedLeaf, describe_leaf, raise_damages
from treeshard.errors import (
    CheckpointError,
    DamagedError,
    FormatError,
    LeafError,
    counted,
    listed,
    short,
)
from treeshard.interchange._byte_ranges import Piece, full_region
from treeshard.interchange._files import lay_out_files, write_files
from treeshard.interchange._format import Tensor, code_of
from treeshard.interchange._tensors import tensor_names

# ------------------------------------------------------------------ inspect


def run_inspect(options: argparse.Namespace) -> tuple[str, int]:
    """Prints the leaves of a stored tree."""
    _off_accelerators()
    with open_stored(options.path, options.step) as tree:
        return _as_json(tree) if options.json else _as_text(tree), 0


def _as_text(tree: StoredTree) -> str:
    steps = ", ".join(map(str, tree.steps))
    head = f"{tree.contents.path}, of steps {steps}:\n" if steps else ""
    return f"{head}{tree.contents}"


def _as_json(tree: StoredTree) -> str:
    contents = tree.contents
    about = {
        "path": contents.path,
        "format": tree.format,
        "steps": tree.steps,
        "meshes": contents.meshes,
        "bytes": contents.bytes,
        "leaves": [_row(leaf) for leaf in contents.leaves],
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
    _off_accelerators()
    try:
        with open_stored(options.path, options.step) as tree:
            return _verified(tree)
    except (DamagedError, FormatError) as error:
        return str(error), 1


_UNVERIFIABLE = (
    "{path}: {total}. Headers and sizes are correct. The format has no checksums, so the values"
    " cannot be verified."
)
_NO_CHECKSUMS = "{path}: {total}. All can be read, but none has a checksum."
_MATCH = "{path}: {total}. All match their checksums{but}."
_DAMAGED = "{path}: {count:,} of {leaves} damaged:"


def _verified(tree: StoredTree) -> tuple[str, int]:
    path, leaves = tree.contents.path, tree.contents.leaves
    total = f"{counted(len(leaves), 'leaf')}, {human_bytes(tree.contents.bytes)}"
    if tree.format == "safetensors":
        return _UNVERIFIABLE.format(path=path, total=total), 0
    read = tree.damages(with_bar(leaves, "verify", show=wants_bar()))
    damages = [f"  {short(row.path)}: {why}" for row, why in read if why]
    if damages:
        head = _DAMAGED.format(path=path, count=len(damages), leaves=counted(len(leaves), "leaf"))
        return "\n".join([head, *damages]), 1
    bare = sum(leaf.crc is None for leaf in leaves)
    if 0 < bare == len(leaves):
        return _NO_CHECKSUMS.format(path=path, total=total), 0
    but = f", except {bare:,} that have no checksum but can be read" if bare else ""
    return _MATCH.format(path=path, total=total, but=but), 0


# ------------------------------------------------------------------ export


def run_export(options: argparse.Namespace) -> tuple[str, int]:
    """Writes the arrays of a stored tree to safetensors."""
    _off_accelerators()
    most = None if options.max_file_size is None else parse_bytes(options.max_file_size)
    metadata = dict(_split("--metadata", x, "=", "'format=pt'") for x in options.metadata)
    with open_stored(options.path, options.step) as tree:
        leaves, left_out = _select(tree, options)
        rows = [
            Tensor(name, code_of(parse_dtype(leaf.dtype)) or "", leaf.shape)
            for name, leaf in leaves.items()
        ]
        out = file_path(options.out)
        files = lay_out_files(out, rows, most, metadata)
        write_files(out, files, _values(tree, leaves), "export", TIMEOUT)
    return _report(leaves, left_out, [file.path for file in files]), 0


def _values(tree: StoredTree, leaves: dict[str, SavedLeaf]) -> Iterator[tuple[str, list[Piece]]]:
    """Reads leaves one by one, as `write_files` takes them."""
    damages: dict[str, str] = {}
    read = tree.read(with_bar(list(leaves.values()), "export", show=wants_bar()))
    for name, leaf in zip(leaves, read, strict=True):
        if leaf.array is None:
            damages[leaf.row.path] = leaf.damage
        else:
            yield name, [Piece(full_region(leaf.array.shape), leaf.array)]
    raise_damages(tree.contents.path, damages)


_MISFITS = "{path}: {listed}\n--skip leaves them out; --only selects the leaves to export."
_NO_ARRAY = "{path} has no array to export{which}. It has {paths}"


def _select(
    tree: StoredTree, options: argparse.Namespace
) -> tuple[dict[str, SavedLeaf], list[SavedLeaf]]:
    """The leaves to write, by the names of their tensors, and the leaves to leave out."""
    only = parse_pattern(options.only or "", "--only")
    path = tree.contents.path
    leaves = [x for x in tree.contents.leaves if x.kind != "none" and only.search(x.path)]
    arrays = [leaf for leaf in leaves if _has_code(leaf)]
    others = [leaf for leaf in leaves if not _has_code(leaf)]
    if others and not options.skip:
        facts = [f"{leaf.path}: {describe_leaf(leaf)}" for leaf in others]
        misfits = listed("safetensors cannot hold these leaves:", facts, headed=True)
        raise LeafError(_MISFITS.format(path=path, listed=misfits))
    if not arrays:
        which = f" with a path that {options.only!r} matches" if options.only else ""
        paths = ", ".join([*(leaf.path for leaf in tree.contents.leaves[:5]), "..."])
        raise CheckpointError(_NO_ARRAY.format(path=path, which=which, paths=paths))
    names = _renamed(arrays, options.rename)
    return {names[leaf.path]: leaf for leaf in arrays}, others


def _has_code(leaf: SavedLeaf) -> bool:
    return leaf.kind == "array" and code_of(parse_dtype(leaf.dtype)) is not None


def _report(
    leaves: dict[str, SavedLeaf], left_out: Sequence[SavedLeaf], paths: Sequence[Path]
) -> str:
    total = human_bytes(sum(leaf.bytes for leaf in leaves.values()))
    *parts, last = paths
    files = f"{counted(len(parts), 'file')} and {last}" if parts else str(last)
    lines = [f"{counted(len(leaves), 'tensor')}, {total}: {files}"]
    if left_out:
        lines.append(f"{counted(len(left_out), 'leaf')} left out:")
        lines += [f"  {leaf.path}: {describe_leaf(leaf)}" for leaf in left_out]
    return "\n".join(lines)


# ------------------------------------------------------------------ shared


def _off_accelerators() -> None:
    """Keeps JAX on the CPU, which is enough for files, unless the user chose a platform.

    JAX would otherwise take most of a GPU's memory, and fail on a TPU that a training run has.
    """
    # The attribute is defined when JAX is imported.
    if not jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_platforms", "cpu")


def _renamed(arrays: Sequence[SavedLeaf], rules: Sequence[str]) -> dict[str, str]:
    """The new names of arrays by their paths, from rules `REGEX=>NEW` applied in order."""
    pairs = [_split("--rename", rule, "=>", "'REGEX=>NEW', '/=>.'") for rule in rules]
    pairs = [(parse_pattern(old, "--rename"), new) for old, new in pairs]
    rename = {x.path: x.path for x in arrays}
    for old, new in pairs:
        rename = {path: _replaced(old, new, name) for path, name in rename.items()}
    flat = {x.path: jax.ShapeDtypeStruct(x.shape, parse_dtype(x.dtype)) for x in arrays}
    names = tensor_names(flat, rename, "export")
    # JAX flattens a dict by its sorted keys.
    return dict(zip(sorted(flat), names.values(), strict=True))


def _replaced(old: re.Pattern[str], new: str, name: str) -> str:
    try:
        return old.sub(new, name)
    except (re.error, IndexError) as error:  # IndexError: `\g<name>` of no group
        raise FormatError(f"--rename: {new!r} is not a replacement: {error}.") from None


def _split(option: str, text: str, mark: str, example: str) -> tuple[str, str]:
    """What is before and after the first mark in the value of an option."""
    before, separator, after = text.partition(mark)
    if not separator:
        raise FormatError(f"{option} {text!r} has no {mark!r}. Write it as {example}.")
    return before, after
