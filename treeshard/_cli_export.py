"""`treeshard export`: from a checkpoint to safetensors, leaf by leaf."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from treeshard._byte_ranges import write, write_bytes
from treeshard._cli_options import off_accelerators, pattern, renamed, wants_bar
from treeshard._contents import describe_leaf
from treeshard._describe import human_bytes
from treeshard._errors import CheckpointError, FormatError, LeafError, listed
from treeshard._literals import parse_bytes, parse_dtype
from treeshard._new_files import new_files
from treeshard._processes import TIMEOUT
from treeshard._progress import with_bar
from treeshard._read_leaf import raise_damages
from treeshard._safetensors import code_of
from treeshard._saved_leaf import SavedLeaf
from treeshard._stored_trees import StoredTree, open_stored, whole
from treeshard._tensor_files import NewFile, left_over, spread

_WHERE = "export"


class _Exported(NamedTuple):
    """What is to be written: leaves by the names of their tensors, and those that cannot be."""

    leaves: dict[str, SavedLeaf]
    left_out: list[SavedLeaf]


def run_export(options: argparse.Namespace) -> tuple[str, int]:
    """Writes the arrays of a tree on disk to safetensors."""
    off_accelerators()
    to = Path(options.out)
    most = None if options.max_file_size is None else parse_bytes(options.max_file_size)
    metadata = dict(map(_entry, options.metadata))
    with open_stored(options.path, options.step) as tree:
        found = _exported(tree, options)
        rows = [
            (name, code_of(parse_dtype(leaf.dtype)) or "", leaf.shape)
            for name, leaf in found.leaves.items()
        ]
        files = spread(to, rows, most, metadata)
        try:
            _write(tree, to, files, found.leaves)
        except OSError as error:
            why = f"{to} cannot be written: {error}. What was there is there still."
            raise CheckpointError(why) from error
    return _told(found, to, files), 0


def _entry(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise FormatError(f"--metadata {text!r} has no '='. Write it as 'format=pt'.")
    return key, value


def _exported(tree: StoredTree, options: argparse.Namespace) -> _Exported:
    only = pattern(options.only or "", "--only")
    path = tree.contents.path
    asked = [leaf for leaf in tree.contents.leaves if only.search(leaf.path)]
    fit = [leaf for leaf in asked if _has_code(leaf)]
    left_out = [leaf for leaf in asked if leaf.kind != "none" and not _has_code(leaf)]
    if left_out and not options.skip:
        facts = [f"{leaf.path}: {describe_leaf(leaf)}" for leaf in left_out]
        raise LeafError(
            f"{path}: {listed('safetensors does not have leaves such as', facts, headed=True)}\n"
            "--skip leaves them out; --only says which leaves to export."
        )
    if not fit:
        which = f" with a path that {options.only!r} matches" if options.only else ""
        there = ", ".join([*(leaf.path for leaf in tree.contents.leaves[:5]), "..."])
        raise CheckpointError(f"{path} has no array to export{which}. It has {there}")
    names = renamed([leaf.path for leaf in fit], options.rename, _WHERE)
    return _Exported({names[leaf.path]: leaf for leaf in fit}, left_out)


def _has_code(leaf: SavedLeaf) -> bool:
    return leaf.kind == "array" and code_of(parse_dtype(leaf.dtype)) is not None


def _write(
    tree: StoredTree, to: Path, files: Sequence[NewFile], leaves: dict[str, SavedLeaf]
) -> None:
    stale = left_over(to, files)
    with new_files(to, [new.path for new in files], stale, _WHERE, TIMEOUT) as opened:
        places = {
            leaves[one.name].path: (file, len(new.head) + one.start)
            for new, file in zip(files, opened, strict=True)
            for one in new.tensors
        }
        damages: dict[str, str] = {}
        rows = with_bar(list(leaves.values()), _WHERE, show=wants_bar())
        for row, x, damage in tree.read(rows):
            if x is None:
                damages[row.path] = damage
            else:
                write(*places[row.path], x.shape, [whole(x)])
        raise_damages(tree.contents.path, damages)
        for new, file in zip(files, opened, strict=True):
            write_bytes(file, 0, new.head)


def _told(found: _Exported, to: Path, files: Sequence[NewFile]) -> str:
    total = human_bytes(sum(leaf.bytes for leaf in found.leaves.values()))
    names = [new.path.name for new in files]
    where = str(to) if len(names) == 1 else f"{len(names) - 1} files and {to.parent / names[-1]}"
    lines = [f"{len(found.leaves):,} tensors, {total}: {where}"]
    if found.left_out:
        lines.append(f"{len(found.left_out):,} leaves were left out:")
        lines += [f"  {leaf.path}: {describe_leaf(leaf)}" for leaf in found.left_out]
    return "\n".join(lines)
