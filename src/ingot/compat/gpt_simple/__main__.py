"""`python -m ingot.compat.gpt_simple`: the command `gpt-simple` as a module, for torchrun and `accelerate launch`."""

from ingot.compat.gpt_simple.main import run

if __name__ == "__main__":
    run()
