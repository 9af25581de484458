"""Entry point of `python -m ingot`, which is the same as the command `ingot`."""

from ingot.cli.main import run

if __name__ == "__main__":
    run()
