"""What a mesh, a leaf path, a spec, an array and a process are. Needs jax and numpy only."""
