"""Run one training step: the loop over the schedule's actions, its batch, and the numbers that it reports."""
