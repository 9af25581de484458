"""A fuzzer for the programs: wrong and odd inputs, made from the schema, the flags, the variables and every file format.

    python -m tests.fuzz                          500 cases, as CI runs them
    python -m tests.fuzz --cases 100000 --seed 7  any number of others
    python -m tests.fuzz --seed 7 --case 4711     one of them again, with all that it printed

Run it in the root of the repository. A case is a command that works, on sound files, with up to three things made different. The
first hundred are these commands as they are, so that a fuzzer in which nothing works is noticed. The seed and its number say all
of a case: none depends on those before it. All run in one process, which imports torch once, each by the `main` of its program,
in a separate folder.

What must hold, whatever is given (promises.py): no traceback and no warning of Python's, an exit code that docs/run-folder.md
lists, an error that is one readable line, an end within a minute and 2 GB, no temporary file, process, thread or handler left, no
file of the user's changed.

| file | what is in it |
|---|---|
| values.py | numbers, words, names and JSON that programs stumble over |
| knobs.py | what can be set at a program, and to which value: from the schema, typer, argparse and the tables of the programs |
| damage.py | files made wrong: bytes, JSON, headers, tensors; with checksums that fit again, to try what comes after them |
| models.py | models of one's own, sound and broken |
| world.py | the sound files, made once for each process |
| commands.py, scenarios.py | the commands that work, and what each may be given and may write |
| cases.py | one case, drawn from a seed and a number |
| confine.py | keeps all of it in one folder: as root, a case that writes to /dev/null would replace it |
| running.py | runs a case and watches it |
| promises.py | what a case has broken |
"""

import sys
from pathlib import Path

# Small models and folders from other packages' tests.
_ROOMS = ("data", "compat/golf", "compat/nanogpt", "compat/gpt_simple", "train")
sys.path.extend(str(Path(__file__).resolve().parents[1] / room) for room in _ROOMS)
