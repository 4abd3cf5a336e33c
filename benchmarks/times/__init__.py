"""Times of steps, of their parts, and of trainings to a target."""
