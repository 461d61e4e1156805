"""The stages of a run, one file each, and the run that takes them in order."""
