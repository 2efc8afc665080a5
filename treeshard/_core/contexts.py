"""The contexts that are part of the key under which JAX keeps traces and programs.

When a context is made, JAX drops all traces and programs, the user's too. `import treeshard`
therefore makes all contexts here. If a module made one at its first use inside a trace, the next
call of the jitted function would be traced and compiled again.

Since 0.12, importing `jax.extend` makes contexts, too. Equinox and treeshard import it, so it is
imported here.
"""

import jax
import jax.extend.core

# The plan of the step that is traced: see `_planning/plan_in_force.py`.
plan_in_force = jax.make_user_context(None)
# The rules for logical names: see `_planning/logical.py`.
logical_rules = jax.make_user_context(None)
# On Explicit axes, the axes named by the user, over which gradients wait for one sum.
deferred_axes = jax.make_user_context(())
# Whether these sums end in the function that accumulates gradients, not in the one that made them.
summed_later = jax.make_user_context(False)
# Whether `accumulate_gradients` takes the full batch in one pass, for a check of several passes.
in_one_pass = jax.make_user_context(False)
# The axes over which `accumulate_gradients` has split the batch by `shard_map`. Although they are
# Manual, arrays that the user's function closes over are full.
full_over = jax.make_user_context(())
