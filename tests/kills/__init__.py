"""Kills: runs that are ended again and again, at any moment, and must end bit for bit like one that nothing happened to.

    python -m tests.kills                        15 kills or more, and every setting at least once
    python -m tests.kills --kills 1000 --seed 7  any number of others
    python -m tests.kills --seed 7 --case 41     one case again, with all that its sessions printed

Run it in the root of the repository. A case is a run with some settings, on one rank or three, whose sessions are killed up to
three times; the last one is left in peace. Its number and the seed say all of it. Sessions are forks of one process that has
imported torch once, so a session takes half a second instead of three; only the process that scores an artifact is started anew.

| file | what is in it |
|---|---|
| cases.py | the settings, the moments, and a case drawn from a seed and a number |
| sessions.py | one session: forks, the kill, and whether a process is left behind |
| ends.py | what two finished runs must have in common, and what no run may leave |
"""
