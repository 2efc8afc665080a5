"""Which tensors of a file make which array of a tree."""

import re
from collections.abc import Iterable, Sequence
from itertools import chain, islice

from treeshard.errors import MismatchError, listed


def map_tensors(
    names: Iterable[str], pairs: Sequence[tuple[str, str | None]]
) -> dict[str, str | tuple[str, ...]]:
    """Gives the tensors of a file the names that your code has for them, one for each layer or one.

    Every tensor goes to exactly one place, and every pair has a tensor; nothing is read. The result
    is a dict of names: `jax.tree.map(tensors.get, result)` puts arrays in their place.

    Args:
        names: The names of the tensors, such as the keys of `tensor_shapes(path)`.
        pairs: `(pattern, name)`. The first pattern that matches a full name (`re.fullmatch`)
            decides; the name may have `\\1` for its groups. A group `(?P<layer>\\d+)` collects one
            tensor for each layer. `None` as a name leaves tensors out.

    Returns:
        The tensor of each name; for a pattern with `layer`, a tuple of tensors in the order of
        their numbers.

    Raises:
        MismatchError: If a tensor has no pattern or a pattern no tensor; if two tensors have one
            name; if layers are missing, from 0 on. All are listed.

    Examples:
        >>> pairs = [("model.embed.weight", "embed"), (r"h.(?P<layer>\\d+).(q|k).weight", r"\\2")]
        >>> map_tensors(["model.embed.weight", "h.1.q.weight", "h.0.q.weight"], pairs)
        {'embed': 'model.embed.weight', 'q': ('h.0.q.weight', 'h.1.q.weight')}

    Source:
        The names of Hugging Face's checkpoints, and the maps from regular expressions of big_vision
        and kauldron.
    """
    patterns = [(re.compile(pattern), name) for pattern, name in pairs]
    used: set[int] = set()
    facts: list[str] = []
    found: dict[str, dict[int, list[str]]] = {}  # by name and layer; -1 without layers
    for tensor in names:
        for i, (pattern, name) in enumerate(patterns):
            if match := pattern.fullmatch(tensor):
                used.add(i)
                if name is not None:
                    layer = int(match.groupdict().get("layer") or -1)
                    found.setdefault(match.expand(name), {}).setdefault(layer, []).append(tensor)
                break
        else:
            facts.append(f"{tensor}: no pattern matches it. `(pattern, None)` leaves it out.")
    facts += [
        f"pattern {i} {pattern.pattern!r}: no tensor matches it first."
        for i, (pattern, _) in enumerate(patterns)
        if i not in used
    ]
    for name, layers in found.items():
        # A tensor without a layer shares its name with no other.
        groups = [[*chain(*layers.values())]] if -1 in layers else layers.values()
        facts += [
            f"{name}: the name of {' and '.join(tensors)}. Write the groups that tell them apart"
            r" into the name (`\1`), or call the number of a layer `(?P<layer>\d+)`."
            for tensors in groups
            if len(tensors) > 1
        ]
        if gaps := [*islice((i for i in range(max(layers)) if i not in layers), 5)]:
            missing = ", ".join(map(str, gaps))
            facts.append(
                f"{name}: of {max(layers) + 1:,} layers, there is none with number {missing}."
            )
    if facts:
        raise MismatchError(f"map_tensors: {listed(f'{len(facts)} names do not fit:', facts)}")
    return {
        name: layers[-1][0] if -1 in layers else tuple(layers[i][0] for i in sorted(layers))
        for name, layers in found.items()
    }
