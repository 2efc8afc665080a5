"""`treeshard inspect`, `verify` and `export`: the commands that read files.

They list leaves from the files alone. `restore` would need a tree with the model's structure, and
therefore the code of the run.
"""

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from treeshard._cli.stored_trees import StoredTree, use_stored
from treeshard._core.processes import TIMEOUT, show_progress, wants_bar
from treeshard._core.text import human_bytes, parse_bytes, parse_dtype, parse_pattern
from treeshard._disk.files import file_path
from treeshard._disk.leaves import Contents, SavedLeaf, describe_leaf, raise_damages
from treeshard.errors import (
    CheckpointError,
    DamagedError,
    FormatError,
    LeafError,
    counted,
    listed,
    short,
)
from treeshard.interchange._files import destination, lay_out_files, write_files
from treeshard.interchange._format import Tensor, code_of
from treeshard.interchange._tensors import tensor_names

# ------------------------------------------------------------------ inspect


def run_inspect(options: argparse.Namespace) -> tuple[str, int]:
    """Prints the leaves of a stored tree."""
    tree = use_stored(options.path, options.step, lambda tree: tree)
    contents = tree.contents
    if not options.json:
        steps = ", ".join(map(str, tree.steps))
        head = f"{contents.path}, of steps {steps}:\n" if steps else ""
        return f"{head}{contents}", 0
    facts = {
        "path": contents.path,
        "format": tree.format,
        "steps": tree.steps,
        "meshes": contents.meshes,
        "bytes": contents.bytes,
        "leaves": [_to_json(leaf) for leaf in contents.leaves],
    }
    return json.dumps(facts), 0


def _to_json(leaf: SavedLeaf) -> dict[str, Any]:
    what: dict[str, Any] = {"value": leaf.value}
    if leaf.dtype:
        what = {"shape": leaf.shape, "dtype": leaf.dtype, "spec": leaf.spec}
    return {"path": leaf.path, "kind": leaf.kind, **what, "bytes": leaf.bytes}


# ------------------------------------------------------------------ verify


def run_verify(options: argparse.Namespace) -> tuple[str, int]:
    """Prints which leaves are damaged. Returns 1 if there are any."""
    try:
        return use_stored(options.path, options.step, _verify)
    except (DamagedError, FormatError) as error:  # the leaves cannot be listed
        return str(error), 1


def _verify(tree: StoredTree) -> tuple[str, int]:
    path, leaves = tree.contents.path, tree.contents.leaves
    count = counted(len(leaves), "leaf")
    total = f"{path}: {count}, {human_bytes(tree.contents.bytes)}."
    if tree.damages is None:
        return (
            f"{total} Headers and sizes are correct. The format has no checksums, so the values"
            " cannot be verified."
        ), 0
    damages, other_files = tree.damages(show_progress(leaves, "verify", show=wants_bar()))
    tree.check()
    lines = [f"  {short(leaf)}: {why}" for leaf, why in damages.items()]
    lines += [f"  {file} {why}." for file, why in other_files.items()]
    headline = f"{path}: {len(damages):,} of {count} damaged"
    if other_files:
        headline += f", and {counted(len(other_files), 'other file')}"
    if lines:
        return "\n".join([f"{headline}:", *lines]), 1
    return f"{total} All match their checksums.", 0


# ------------------------------------------------------------------ export


def run_export(options: argparse.Namespace) -> tuple[str, int]:
    """Writes the arrays of a stored tree to safetensors."""
    return use_stored(options.path, options.step, partial(_export, options)), 0


def _export(options: argparse.Namespace, tree: StoredTree) -> str:
    most = None if options.max_file_size is None else parse_bytes(options.max_file_size)
    metadata = dict(_split("--metadata", x, "=", "'format=pt'") for x in options.metadata)
    arrays, others = _choose(tree.contents, options.only, options.skip)
    leaves = _rename(arrays, options.rename)
    rows = [Tensor(name, _code(x) or "", x.shape, x.bytes) for name, x in leaves.items()]
    out, metadata = destination(file_path(options.out), metadata or None)
    files = lay_out_files(out, rows, most, metadata)
    write_files(out, files, _read_values(tree, leaves), "export", TIMEOUT)
    *parts, last = [file.path for file in files]
    names = f"{counted(len(parts), 'file')} and {last}" if parts else last
    total = human_bytes(sum(leaf.bytes for leaf in arrays))
    lines = [f"{counted(len(arrays), 'tensor')}, {total}: {names}"]
    if others:
        lines += [f"{counted(len(others), 'leaf')} left out:", *(f"  {x}" for x in others)]
    return "\n".join(lines)


def _code(leaf: SavedLeaf) -> str | None:
    """The dtype that safetensors has for a leaf; `None` if it has none."""
    return code_of(parse_dtype(leaf.dtype)) if leaf.kind == "array" else None


def _choose(contents: Contents, only: str | None, skip: bool) -> tuple[list[SavedLeaf], list[str]]:
    """The arrays whose path matches a pattern, and a line for each other leaf that matches."""
    pattern = parse_pattern(only or "", "--only")
    chosen = [x for x in contents.leaves if x.kind != "none" and pattern.search(x.path)]
    arrays = [leaf for leaf in chosen if _code(leaf)]
    others = [f"{leaf.path}: {describe_leaf(leaf)}" for leaf in chosen if not _code(leaf)]
    if others and not skip:
        misfits = listed("safetensors cannot hold these leaves:", others, headed=True)
        raise LeafError(
            f"{contents.path}: {misfits}\n--skip leaves them out; --only selects the leaves to"
            " export."
        )
    if not arrays:
        which = f" with a path that {only!r} matches" if only else ""
        paths = ", ".join([*(leaf.path for leaf in contents.leaves[:5]), "..."])
        raise CheckpointError(f"{contents.path} has no array to export{which}. It has {paths}")
    return arrays, others


def _rename(arrays: Sequence[SavedLeaf], rules: Sequence[str]) -> dict[str, SavedLeaf]:
    """The arrays by their new names, after all rules `REGEX=>NEW` in order."""
    rename = {x.path: x.path for x in arrays}
    for rule in rules:
        old, new = _split("--rename", rule, "=>", "'REGEX=>NEW', '/=>.'")
        pattern = parse_pattern(old, "--rename")
        try:
            rename = {path: pattern.sub(new, name) for path, name in rename.items()}
        except (re.error, IndexError) as error:  # IndexError: `\g<name>` names an unknown group
            raise FormatError(f"--rename: {new!r} is not a replacement: {error}.") from None
    flat = {x.path: jax.ShapeDtypeStruct(x.shape, parse_dtype(x.dtype)) for x in arrays}
    names = tensor_names(flat, rename, "export")
    # JAX flattens a dict by its sorted keys.
    name_of = dict(zip(sorted(flat), names.values(), strict=True))
    return {name_of[x.path]: x for x in arrays}


def _read_values(
    tree: StoredTree, leaves: dict[str, SavedLeaf]
) -> Iterator[tuple[str, np.ndarray]]:
    """Reads leaves one by one, as `write_files` takes them."""
    damages: dict[str, str] = {}
    read = tree.read(show_progress(list(leaves.values()), "export", show=wants_bar()))
    for name, leaf in zip(leaves, read, strict=True):
        if leaf.array is None:
            damages[leaf.row.path] = leaf.damage
        else:
            yield name, leaf.array
    tree.check()
    raise_damages(tree.contents.path, damages)


def _split(option: str, text: str, mark: str, example: str) -> tuple[str, str]:
    """The parts of an option's value before and after the first mark."""
    before, separator, after = text.partition(mark)
    if not separator:
        raise FormatError(f"{option} {text!r} has no {mark!r}. Write it as {example}.")
    return before, after
