"""The options of the Python functions as ``TypedDict``: for editors, and for mypy."""
