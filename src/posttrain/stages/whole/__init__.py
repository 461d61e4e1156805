"""Whole runs: one, or several that are made together."""
