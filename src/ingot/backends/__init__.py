"""The interface between the training loop and a framework: one step, one evaluation, state in and out."""
