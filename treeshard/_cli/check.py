"""`treeshard check`: are the gradients of a model the same in every layout?

On simulated CPUs, even where there are accelerators: eight devices are enough for all layouts, and
float32 is multiplied in full, so that a difference is not rounding.
"""

import argparse

from treeshard._cli.compile import mesh_for
from treeshard._cli.functions import call_function, load_function, wrong_result
from treeshard._planning.plan import plan
from treeshard.errors import WrongResultError
from treeshard.testing._checks import check
from treeshard.testing._computations import Gradients
from treeshard.testing._layouts import layouts

_EXPECTED = (
    "It must return (loss, params, batch, rules): a function `loss(params, batch)`, its arguments"
    " as arrays, and the rules."
)


def run_check(options: argparse.Namespace) -> tuple[str, int]:
    """Prints a table of layouts and leaves, and what is wrong. Returns 1 if something is."""
    mesh = mesh_for(options.mesh, None)
    result = call_function(options.function, load_function(options.function))
    if not isinstance(result, tuple) or len(result) != 4 or not callable(result[0]):
        raise wrong_result(options.function, result, _EXPECTED)
    loss, params, batch, rules = result
    planned = plan(params, rules, mesh, min_size=0)
    planned.check()
    try:
        computation = Gradients(loss, params, batch, planned)
        report = call_function(
            options.function,
            lambda: check("check_gradients", computation, layouts(planned, batch)),
        )
    except WrongResultError as error:
        return str(error), 1
    return str(report), 0
