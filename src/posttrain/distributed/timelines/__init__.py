"""What each process did in a step, as a timeline to look at."""
