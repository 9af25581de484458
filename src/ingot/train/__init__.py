"""The training loop with evaluation, checkpointing and stopping, independent of any framework."""
