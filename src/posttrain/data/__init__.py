"""Data: the only text-to-token code, sources of rows, and the way from rollouts to batches."""
