"""Classes of pytrees that look at what they are rebuilt from, or change it.

Arrays and their types they take; a spec or `None` would become another leaf, or an error.
"""

from typing import Any

import flax
import jax
import numpy as np


@flax.struct.dataclass
class Checked:
    """Looks at its children, also when it is rebuilt."""

    a: Any
    b: Any

    def __post_init__(self) -> None:
        assert (len(self.a.shape), len(self.b.shape)) == (2, 1)


@jax.tree_util.register_pytree_node_class
class Rebuilt:
    """Flattens and converts what it is rebuilt from, and has its shapes in its structure."""

    def __init__(self, *children: Any) -> None:
        self.leaves = [x if hasattr(x, "shape") else np.asarray(x) for x in children]

    def tree_flatten(self) -> tuple[Any, Any]:
        return self.leaves, tuple(getattr(x, "shape", None) for x in self.leaves)

    @classmethod
    def tree_unflatten(cls, _: Any, leaves: Any) -> "Rebuilt":
        return cls(*jax.tree.leaves(leaves))
