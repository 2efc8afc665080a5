"""`treeshard export`: from a checkpoint to safetensors, one leaf at a time."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from treeshard._cli.files import off_accelerators, pattern, renamed, wants_bar
from treeshard._cli.stored_trees import StoredTree, open_stored, whole
from treeshard._core.processes import TIMEOUT, with_bar
from treeshard._core.text import human_bytes, parse_bytes, parse_dtype
from treeshard._disk.files import new_files
from treeshard._disk.leaves import SavedLeaf, describe_leaf, raise_damages
from treeshard.errors import CheckpointError, FormatError, LeafError, listed
from treeshard.interchange._byte_ranges import write, write_bytes
from treeshard.interchange._files import NewFile, left_over, spread
from treeshard.interchange._format import code_of

_WHERE = "export"


class _Exported(NamedTuple):
    """The leaves to write, by the names of their tensors, and the leaves to leave out."""

    leaves: dict[str, SavedLeaf]
    left_out: list[SavedLeaf]


def run_export(options: argparse.Namespace) -> tuple[str, int]:
    """Writes the arrays of a stored tree to safetensors."""
    off_accelerators()
    to = Path(options.out)
    most = None if options.max_file_size is None else parse_bytes(options.max_file_size)
    metadata = dict(map(_entry, options.metadata))
    with open_stored(options.path, options.step) as tree:
        selected = _select(tree, options)
        rows = [
            (name, code_of(parse_dtype(leaf.dtype)) or "", leaf.shape)
            for name, leaf in selected.leaves.items()
        ]
        files = spread(to, rows, most, metadata)
        try:
            _write(tree, to, files, selected.leaves)
        except OSError as error:
            why = f"{to} cannot be written: {error}. Existing files are unchanged."
            raise CheckpointError(why) from error
    return _report(selected, to, files), 0


def _entry(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise FormatError(f"--metadata {text!r} has no '='. Write it as 'format=pt'.")
    return key, value


def _select(tree: StoredTree, options: argparse.Namespace) -> _Exported:
    only = pattern(options.only or "", "--only")
    path = tree.contents.path
    leaves = [leaf for leaf in tree.contents.leaves if only.search(leaf.path)]
    arrays = [leaf for leaf in leaves if _has_code(leaf)]
    left_out = [leaf for leaf in leaves if leaf.kind != "none" and not _has_code(leaf)]
    if left_out and not options.skip:
        facts = [f"{leaf.path}: {describe_leaf(leaf)}" for leaf in left_out]
        raise LeafError(
            f"{path}: {listed('safetensors cannot hold these leaves:', facts, headed=True)}\n"
            "--skip leaves them out; --only selects the leaves to export."
        )
    if not arrays:
        which = f" with a path that {options.only!r} matches" if options.only else ""
        paths = ", ".join([*(leaf.path for leaf in tree.contents.leaves[:5]), "..."])
        raise CheckpointError(f"{path} has no array to export{which}. It has {paths}")
    names = renamed([leaf.path for leaf in arrays], options.rename, _WHERE)
    return _Exported({names[leaf.path]: leaf for leaf in arrays}, left_out)


def _has_code(leaf: SavedLeaf) -> bool:
    return leaf.kind == "array" and code_of(parse_dtype(leaf.dtype)) is not None


def _write(
    tree: StoredTree, to: Path, files: Sequence[NewFile], leaves: dict[str, SavedLeaf]
) -> None:
    stale = left_over(to, files)
    with new_files(to, [new.path for new in files], stale, _WHERE, TIMEOUT) as opened:
        positions = {
            leaves[tensor.name].path: (file, len(new.head) + tensor.start)
            for new, file in zip(files, opened, strict=True)
            for tensor in new.tensors
        }
        damages: dict[str, str] = {}
        rows = with_bar(list(leaves.values()), _WHERE, show=wants_bar())
        for row, x, damage in tree.read(rows):
            if x is None:
                damages[row.path] = damage
            else:
                write(*positions[row.path], x.shape, [whole(x)])
        raise_damages(tree.contents.path, damages)
        for new, file in zip(files, opened, strict=True):
            write_bytes(file, 0, new.head)


def _report(selected: _Exported, to: Path, files: Sequence[NewFile]) -> str:
    total = human_bytes(sum(leaf.bytes for leaf in selected.leaves.values()))
    names = [new.path.name for new in files]
    where = str(to) if len(names) == 1 else f"{len(names) - 1} files and {to.parent / names[-1]}"
    lines = [f"{len(selected.leaves):,} tensors, {total}: {where}"]
    if selected.left_out:
        lines.append(f"{len(selected.left_out):,} leaves were left out:")
        lines += [f"  {leaf.path}: {describe_leaf(leaf)}" for leaf in selected.left_out]
    return "\n".join(lines)
