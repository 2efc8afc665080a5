"""One of several processes that get out of step, and end.

python -m tests.multiprocess.out_of_step PORT INDEX COUNT LEAVES END: process LEAVES makes a call
that the others do not make, while they are in a step that waits for it. `END` says how it ends
then: "raise", or the status for `sys.exit`.
"""

import atexit
import sys

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import treeshard as ts


def main(port: str, index: str, count: str, leaves: str, end: str) -> None:
    ts.simulate_devices(1)
    jax.distributed.initialize(f"localhost:{port}", int(count), int(index))
    mesh = ts.make_mesh(f"data={count}")
    state, plan = ts.init_sharded(lambda: {"w": np.ones(8)}, rules=[("", P())], mesh=mesh)
    step = ts.jit_step(lambda s, b: ({"w": s["w"] + b.sum()}, b.sum()), plan, batch=P("data"))
    batch = ts.from_process_local(np.ones(4, np.float32), P("data"), mesh)
    state, loss = step(state, batch)
    loss.block_until_ready()
    atexit.register(print, "the user's own function at exit", flush=True)
    if index in leaves.split(","):
        try:
            ts.gather(loss, timeout=1)
        except ts.ProcessError:
            if end == "raise":
                raise
            sys.exit(int(end))
    step(state, batch)[1].block_until_ready()


if __name__ == "__main__":
    main(*sys.argv[1:])
