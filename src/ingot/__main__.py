"""`python -m ingot` is `ingot`."""

from ingot.cli.main import run

if __name__ == "__main__":
    run()
