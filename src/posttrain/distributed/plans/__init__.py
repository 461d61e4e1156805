"""What a cluster would come to before it is there: measured costs, and a simulation with them."""
