"""`treeshard import`: from safetensors to a checkpoint."""

import argparse

from treeshard._cli.files import off_accelerators, renamed, wants_bar
from treeshard._core.text import human_bytes
from treeshard.checkpoint import save
from treeshard.checkpoint._paths import check_vacant, checkpoint_path
from treeshard.interchange import load_safetensors


def run_import(options: argparse.Namespace) -> tuple[str, int]:
    """Saves the tensors of safetensors files as a checkpoint."""
    off_accelerators()
    to = checkpoint_path(options.out)
    check_vacant(to)  # before the slow part
    tensors = load_safetensors(options.source, progress=wants_bar())
    names = renamed(tensors, options.rename, "import")
    save(to, {names[name]: x for name, x in tensors.items()})
    total = human_bytes(sum(x.nbytes for x in tensors.values()))
    return f"{len(tensors):,} leaves, {total}: {to}", 0
