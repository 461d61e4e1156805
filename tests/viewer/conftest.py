"""The fixtures of :mod:`viewed_runs`, which tests also import from."""

from viewed_runs import hostile, runs, served, served_hostile

__all__ = ["hostile", "runs", "served", "served_hostile"]
