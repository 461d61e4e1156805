"""What a run would take, memory and time, told from configurations before anything is allocated."""
