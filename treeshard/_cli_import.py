"""`treeshard import`: from safetensors to a checkpoint."""

import argparse

from treeshard._checkpoint_paths import check_vacant, checkpoint_path
from treeshard._cli_options import off_accelerators, renamed, wants_bar
from treeshard._describe import human_bytes
from treeshard.checkpoint import save
from treeshard.interchange import load_safetensors


def run_import(options: argparse.Namespace) -> tuple[str, int]:
    """Makes a checkpoint of safetensors."""
    off_accelerators()
    to = checkpoint_path(options.out)
    check_vacant(to)  # before the tensors are read, which takes longer
    found = load_safetensors(options.source, progress=wants_bar())
    names = renamed(found, options.rename, "import")
    save(to, {names[name]: x for name, x in found.items()})
    total = human_bytes(sum(x.nbytes for x in found.values()))
    return f"{len(found):,} leaves, {total}: {to}", 0
