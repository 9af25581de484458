"""`python -m ingot` is `ingot`."""

from ingot.doors.cli.main import run

if __name__ == "__main__":
    run()
