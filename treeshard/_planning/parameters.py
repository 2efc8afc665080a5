"""Which leaves of a training state are parameters, and which are optimizer state of them."""

import re
from collections import defaultdict
from collections.abc import Sequence

import jax.numpy as jnp

from treeshard._planning.matching import PlannedLeaf


def parameters(leaves: Sequence[PlannedLeaf], pattern: str | None = None) -> list[PlannedLeaf]:
    """The leaves that have gradients; an array at several paths counts once."""
    once = (leaf for leaf in leaves if leaf.same_as is None)
    floats = [leaf for leaf in once if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    if pattern is not None:
        return [leaf for leaf in floats if re.search(pattern, leaf.path)]
    mirrors = _mirrors(floats)
    return [leaf for leaf in floats if _branch(leaf) not in mirrors]


def state_with_parameters(
    leaves: Sequence[PlannedLeaf], pattern: str | None = None
) -> list[tuple[PlannedLeaf, PlannedLeaf]]:
    """Each leaf of the optimizer state that has the shape of a parameter, and that parameter."""
    chosen = parameters(leaves, pattern)
    paths = {leaf.path for leaf in chosen}
    by_tail = {leaf.path.partition("/")[2]: leaf for leaf in chosen}
    pairs: list[tuple[PlannedLeaf, PlannedLeaf]] = []
    for leaf in leaves:
        if leaf.path in paths or not jnp.issubdtype(leaf.dtype, jnp.inexact):
            continue
        mirrored = next((by_tail[t] for t in tails(leaf.path) if t in by_tail), None)
        if mirrored is not None and mirrored.shape == leaf.shape:
            pairs.append((leaf, mirrored))
    return pairs


def state_of_parameters(
    leaves: Sequence[PlannedLeaf], pattern: str | None = None
) -> dict[str, PlannedLeaf]:
    """Path of a parameter -> the first leaf of its optimizer state, if it has any."""
    pairs = reversed(state_with_parameters(leaves, pattern))
    return {parameter.path: leaf for leaf, parameter in pairs}


def _mirrors(floats: Sequence[PlannedLeaf]) -> set[str]:
    """The top-level branches whose leaves all mirror those of another branch."""
    branches: dict[str, list[str]] = defaultdict(list)
    having: dict[str, set[str]] = defaultdict(set)  # tail -> the branches that have it
    for leaf in floats:
        if leaf.shape:
            branch, _, tail = leaf.path.partition("/")
            branches[branch].append(leaf.path)
            if tail:
                having[tail].add(branch)
    mirrors: set[str] = set()
    for branch, paths in branches.items():
        sources: set[str] | None = None
        for path in paths:
            found: set[str] = set()
            found = found.union(*(having[tail] for tail in tails(path) if tail in having))
            sources = (found if sources is None else sources & found) - {branch}
            if not sources:
                break
        else:
            mirrors.add(branch)
    return mirrors


def _branch(leaf: PlannedLeaf) -> str:
    return leaf.path.partition("/")[0]


def tails(path: str) -> list[str]:
    """The tails of a path without its first two parts or more, longest first."""
    parts = path.split("/")
    return ["/".join(parts[start:]) for start in range(2, len(parts))]
