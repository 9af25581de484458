"""The seam between the loop and a framework: one step, one evaluation, state in and out."""
