"""What tests of several packages share."""

import jax


def struct(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    """An array of a shape without values."""
    return jax.ShapeDtypeStruct(shape, dtype)
