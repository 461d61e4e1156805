"""Learning: a learner owns weights and optimiser, and takes exactly one step at a time."""
