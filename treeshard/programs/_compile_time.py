"""How long a compiler takes for a step, before it starts.

The compiler says nothing for minutes. What it takes grows with the number of different products,
not with how often a loop runs them nor with the number of devices, and slowly with their size.
"""

import math
from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr

from treeshard._core.jax_private import shard_map_axes
from treeshard._trace.uses import bodies
from treeshard.programs._flops import product_flops

# Fitted to programs of `tests/targets`, and of `examples/compile_llama.py` with 1B parameters on 8
# chips and 8B on 256: CPU seconds, JAX 0.10.2. TPUs' compiler took 3 to 117 s, and the estimate is
# within 1.5 x of each; that of GPUs took 0.5 to 6 s, and it is within 2 x.
_PER_EQUATION = 0.001
_PER_PRODUCT = {"tpu": 7e-4}
_PER_PRODUCT_ELSEWHERE = 7e-5
_GROWTH = 0.31  # a product with 10 times the operations takes twice as long


def compile_seconds(jaxpr: ClosedJaxpr, devices: int, platform: str) -> float:
    """About how long compiling a step takes on two cores; half or twice as long is usual."""
    equations = list(_equations(jaxpr.jaxpr, devices))
    products = [product for product in equations if product]
    sizes = math.fsum(product**_GROWTH for product in products)
    per_product = _PER_PRODUCT.get(platform, _PER_PRODUCT_ELSEWHERE)
    return _PER_EQUATION * len(equations) + per_product * sizes


def _equations(jaxpr: Any, devices: int) -> Iterator[float]:
    """The operations of each equation on one device, 0 if it is no product. A loop's body counts
    once, as it is compiled once."""
    for eqn in jaxpr.eqns:
        yield (product_flops(eqn) or 0) / devices
        inside = devices
        if eqn.primitive.name == "shard_map":  # shapes in it are those of one device
            inside //= math.prod(eqn.params["mesh"].shape[x] for x in shard_map_axes(eqn.params))
        for body in bodies(eqn):
            yield from _equations(body, inside)
