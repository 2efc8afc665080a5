"""Decides: a tree and rules become specs. Needs shapes only, and no devices."""
