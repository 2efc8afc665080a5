"""The contents of a checkpoint, as its table of leaves lists them."""

from dataclasses import dataclass

from treeshard._describe import columns, fold, human_bytes
from treeshard._saved_leaf import SavedLeaf, value_of
from treeshard._specs import array_text


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint. `str()` gives a line per leaf, with repeated layers folded.

    Attributes:
        path: The path of the checkpoint.
        leaves: A `SavedLeaf` for each leaf that is not static, in the order in which JAX
            flattens the tree.
        meshes: The axes and sizes of the meshes that the arrays were on, usually one.
    """

    path: str
    leaves: tuple[SavedLeaf, ...]
    meshes: tuple[dict[str, int], ...]

    @property
    def bytes(self) -> int:
        """The bytes of all leaves in memory."""
        return sum(leaf.bytes for leaf in self.leaves)

    def __str__(self) -> str:
        rows = [("path", "leaf", "spec", "bytes")]
        items = ((x.path, (x.kind, x.shape, x.dtype, x.spec, x.value), x) for x in self.leaves)
        for path, alike in fold(items):
            held = human_bytes(sum(leaf.bytes for leaf in alike))
            rows.append((path or "(the tree)", describe_leaf(alike[0]), alike[0].spec or "", held))
        lay = " and ".join(
            ", ".join(f"{axis}={size}" for axis, size in axes.items()) for axes in self.meshes
        )
        on = f" Saved on {lay}." if lay else ""
        bare = sum(leaf.crc is None for leaf in self.leaves)
        unknown = f" {bare:,} have no fingerprint." if bare else ""
        total = f"{len(self.leaves):,} leaves, {human_bytes(self.bytes)}.{on}{unknown}"
        return f"{columns(rows)}\n{total}"


def describe_leaf(leaf: SavedLeaf) -> str:
    """A leaf's type, and its value if it is not an array."""
    if leaf.dtype:
        return array_text(leaf)
    if leaf.value is None:
        return "None"
    is_number = leaf.kind in ("bool", "int")  # whose text is the number
    text = leaf.value if is_number else repr(value_of(leaf.kind, leaf.value))
    return f"{leaf.kind} {text if len(text) <= 40 else f'{text[:40]}...'}"
