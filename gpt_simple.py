"""gpt-simple's package by its own name, in this checkout: `import gpt_simple` and `python -m gpt_simple`."""

import sys

import ingot.compat.gpt_simple

if __name__ == "__main__":
    from ingot.compat.gpt_simple.main import run

    run()
else:
    sys.modules[__name__] = ingot.compat.gpt_simple
