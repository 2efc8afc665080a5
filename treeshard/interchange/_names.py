"""Maps the names of tensors in a file to names of your own.

Files have a tensor for each layer, and trees often have one array of all layers. A pattern names
all layers at once, where a mapping from names to names would have a line for each tensor.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice

from treeshard.errors import MismatchError, listed

_NO_LAYER = -1  # the number of a tensor whose pattern has no group `layer`

_UNMATCHED = "{tensor}: no pattern matches it. `(pattern, None)` leaves it out."
_UNUSED = "pattern {i} {pattern!r}: it matches no tensor that earlier patterns leave over."
_SHARED = (
    "{name}: {tensors} all get this name. Write the groups that differ into the name (`\\1`), or"
    " call the number of a layer `(?P<layer>\\d+)`."
)
_GAPS = "{name}: layers are missing: {missing} of {count:,}."


def map_tensors(
    names: Iterable[str], pairs: Sequence[tuple[str, str | None]]
) -> dict[str, str | tuple[str, ...]]:
    """Maps the names of tensors in a file to your names, by regular expressions.

    The result has names only, and no file is read. If `tensors` is a dict of arrays,
    `jax.tree.map(tensors.get, result)` replaces the names by the arrays.

    Args:
        names: The names of the tensors, such as the keys of `tensor_shapes(path)`.
        pairs: Pairs `(pattern, name)`. The first pattern that matches a full name (`re.fullmatch`)
            decides. The name may contain groups, such as `\\1`. A group `(?P<layer>\\d+)` collects
            the tensors of all layers. Tensors with the name `None` are skipped.

    Returns:
        A dict from your names to the names of tensors. A name of a pattern with `layer` gets a
        tuple of tensors, ordered by their numbers.

    Raises:
        MismatchError: If a tensor matches no pattern, or a pattern matches no tensor. If two
            tensors get the same name. If numbers of layers are missing, from 0 on. All mistakes are
            listed.

    Examples:
        >>> pairs = [("model.embed.weight", "embed"), (r"h.(?P<layer>\\d+).(q|k).weight", r"\\2")]
        >>> map_tensors(["model.embed.weight", "h.1.q.weight", "h.0.q.weight"], pairs)
        {'embed': 'model.embed.weight', 'q': ('h.0.q.weight', 'h.1.q.weight')}

    Source:
        The maps from regular expressions in big_vision and kauldron.
    """
    patterns = [re.compile(pattern) for pattern, _ in pairs]
    facts: list[str] = []
    used: set[int] = set()
    # By name and number of the layer. A list has several tensors only if they share a name.
    layers_of: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for tensor in dict.fromkeys(names):
        matches = ((i, pattern.fullmatch(tensor)) for i, pattern in enumerate(patterns))
        i, match = next((x for x in matches if x[1]), (-1, None))
        if match is None:
            facts.append(_UNMATCHED.format(tensor=tensor))
            continue
        used.add(i)  # even if it skips the tensor: a pattern without a tensor is a typing error
        name = pairs[i][1]
        if name is not None:
            layer = int(match.groupdict().get("layer") or _NO_LAYER)
            layers_of[match.expand(name)][layer].append(tensor)
    unused = [(i, pattern) for i, (pattern, _) in enumerate(pairs) if i not in used]
    facts += [_UNUSED.format(i=i, pattern=pattern) for i, pattern in unused]
    for name, layers in layers_of.items():
        facts += _misfits(name, layers)
    if facts:
        raise MismatchError(f"map_tensors: {listed(f'{len(facts)} names do not fit:', facts)}")
    return {name: _tensors_of(layers) for name, layers in layers_of.items()}


def _misfits(name: str, layers: Mapping[int, list[str]]) -> Iterator[str]:
    """Why some tensors cannot be one array."""
    groups = list(layers.values())
    if _NO_LAYER in layers:  # such a tensor shares its name with no other
        groups = [[*chain(*groups)]]
    for tensors in groups:
        if len(tensors) > 1:
            yield _SHARED.format(name=name, tensors=" and ".join(tensors))
    # A file may claim a layer of any number, so only the first gaps are listed.
    last = max(layers)
    missing = [*islice((str(i) for i in range(last) if i not in layers), 5)]
    if missing:
        yield _GAPS.format(name=name, count=last + 1, missing=", ".join(missing))


def _tensors_of(layers: Mapping[int, list[str]]) -> str | tuple[str, ...]:
    if _NO_LAYER in layers:
        return layers[_NO_LAYER][0]
    return tuple(layers[i][0] for i in sorted(layers))
