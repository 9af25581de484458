"""The training loop, with evaluation, checkpoints and stopping. Independent of any framework."""
