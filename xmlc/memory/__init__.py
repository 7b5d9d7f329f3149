"""What a run's memory will be, what it is, and what it may be."""
