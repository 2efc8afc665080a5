"""What would lower the memory that a compiled step needs."""

from collections.abc import Iterator, Sequence

from treeshard._core.text import fold_paths, human_bytes
from treeshard._planning.plan import Plan
from treeshard.programs._buffers import LiveBuffer

# Parts of all memory that are worth a line.
_WORTH = 0.1


def advise(
    total: int, results: int, temporaries: int, at_peak: Sequence[LiveBuffer], plan: Plan
) -> Iterator[str]:
    """Yields a sentence for each thing that would save a tenth of the memory of a step or more.

    `results` are the bytes of those that do not reuse the memory of donated arguments.
    """
    least = _WORTH * total
    held = sum(leaf.bytes_per_device(plan.mesh) for leaf in plan.leaves)
    if results >= max(least, held / 2):
        yield (
            f"Donate the state (`donate=True`): the new state takes {human_bytes(results)} beside"
            " the old one."
        )
    full = [
        x for x in plan.leaves if plan.mesh.size > 1 and x.bytes_per_device(plan.mesh) == x.bytes
    ]
    if (size := sum(leaf.bytes for leaf in full)) >= least:
        full.sort(key=lambda leaf: -leaf.bytes)
        paths = ", ".join(fold_paths(leaf.path for leaf in full[:3]))
        yield f"Shard the leaves that are replicated, {human_bytes(size)} on each device: {paths}."
    weights = [x for x in at_peak if x.path in {f"state/{leaf.path}" for leaf in plan.leaves}]
    if (size := sum(x.bytes for x in weights)) >= least and len(weights) > 2:
        yield (
            f"Gather the weights of each layer just before their use, in a scan with"
            f" `jax.checkpoint` around the layer: {len(weights)} gathered ones are live at once,"
            f" {human_bytes(size)}."
        )
    names = " ".join(x.op_name or "" for x in at_peak)
    # What a scan keeps has no name.
    kept = [x for x in at_peak if x.path is None and "transpose(" not in (x.op_name or "")]
    size = sum(x.bytes for x in kept)
    if size >= least and "transpose(" in names and "checkpoint" not in names:
        yield (
            f"Put `jax.checkpoint` around the layers: {human_bytes(size)} of values of the forward"
            f" pass are kept for the gradients, of which the largest is {kept[0].array}."
        )
    elif temporaries >= total / 2:
        yield (
            "Split the batch over more devices, or run it in minibatches (`accumulate_gradients`):"
            f" {human_bytes(temporaries)} are values that grow with its rows, or gathered weights."
        )
