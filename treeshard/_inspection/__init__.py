"""Reads live trees: memory, stability across a step, drawings."""
