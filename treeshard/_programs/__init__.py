"""Reads compiled programs: the memory that they need, and what they compute."""
