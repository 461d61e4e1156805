"""Several policies in one run: adapters on one base, sampled together, each learned in turn."""
