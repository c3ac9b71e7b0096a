"""Pruning: whole channels by L2 norm, and two of every four weights."""
