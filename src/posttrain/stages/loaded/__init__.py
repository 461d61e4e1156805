"""A policy in memory, for whoever asks it: from Python, from the page, from clients."""
