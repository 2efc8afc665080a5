"""Moves: arrays go to the shardings that specs say, and come back."""
