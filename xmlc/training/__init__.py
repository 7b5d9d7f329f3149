"""From a data set to a trained run: steps, schedules, checkpoints, and the public entry points."""
