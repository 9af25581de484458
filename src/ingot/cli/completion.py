"""Shell completion: verbs, options, dotted settings and the words that they may be; files are left to the shell.

The shell calls `ingot` itself with the words of the line and the variable `_INGOT_COMPLETE`; what it prints is one word per line.
No verb is called for that and torch is not loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ingot.errors import ConfigError

SCRIPTS = {
    "bash": """_ingot_complete() {
    local IFS=$'\\n'
    COMPREPLY=($(_INGOT_COMPLETE=1 "$1" "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _ingot_complete ingot
""",
    "zsh": """(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
_ingot_complete() {
    local -a found
    found=(${(f)"$(_INGOT_COMPLETE=1 $words[1] "${(@)words[2,$CURRENT]}" 2>/dev/null)"})
    (( $#found )) && compadd -- $found || _files
}
compdef _ingot_complete ingot
""",
    "fish": """function __ingot_complete
    set -lx _INGOT_COMPLETE 1
    set -l words (commandline -opc)
    ingot $words[2..-1] (commandline -ct) 2>/dev/null
end
complete --command ingot --arguments '(__ingot_complete)'
""",
}


def script() -> tuple[str, str]:
    """The name of the user's shell and the lines that teach it our words."""
    shell = Path(os.environ.get("SHELL", "")).name
    if shell not in SCRIPTS:
        known = ", ".join(SCRIPTS)
        raise ConfigError(
            f"SHELL is {shell or 'not set'} and completion is for {known}; say which one with SHELL=bash before ingot"
        )
    return shell, SCRIPTS[shell]


def install() -> list[Path]:
    """Put the script where the user's shell finds it; returns the files that were written."""
    shell, lines = script()
    home = Path.home()
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    file = folder / "fish/completions/ingot.fish" if shell == "fish" else folder / f"ingot/completion.{shell}"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(lines)
        return [file] if shell == "fish" else [file, *_sourced(file, home / f".{shell}rc")]
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}; --show-completion prints the lines") from None


def _sourced(file: Path, start: Path) -> list[Path]:
    """Let the file that a shell starts with read another; nothing where it does so already."""
    line = f"source '{file}'"
    before = start.read_text(errors="replace") if start.exists() else ""
    if line in before.splitlines():
        return []
    with start.open("a") as stream:  # only ever longer: it is the user's own
        stream.write(f"{chr(10) * bool(before and not before.endswith(chr(10)))}{line}\n")
    return [start]


def print_completions(words: list[str]) -> None:
    """Print what the last of the words may become."""
    from ingot.cli.app import command_line

    before, incomplete = _split(words)
    for word in completions(command_line(), before, incomplete):
        print(word)


def _split(words: list[str]) -> tuple[list[str], str]:
    """The words before the one that is completed, and that one; a shell may cut --name=value into three."""
    *before, incomplete = words or [""]
    if incomplete == "=":
        return before, ""
    if before[-1:] == ["="]:
        return before[:-1], incomplete
    return before, incomplete


def completions(command: Any, before: list[str], incomplete: str) -> list[str]:
    """The words that may stand where `incomplete` stands, after those before it."""
    before = before[1:] if before[:1] == ["help"] else before
    while before and before[0] in getattr(command, "commands", ()):
        command, before = command.commands[before[0]], before[1:]
    name, equals, value = incomplete.partition("=")
    if name.startswith("--") and equals:
        return [f"{name}={one}" for one in _starting(_values(command, name), value)]
    if incomplete.startswith("-"):
        return _starting(_names(command), incomplete)
    if before and before[-1].startswith("--") and (values := _values(command, before[-1])):
        return _starting(values, incomplete)
    return _starting(getattr(command, "commands", ()), incomplete)


def _names(command: Any) -> list[str]:
    """The options of a verb, then the settings where it takes any."""
    shown = [param for param in command.params if not getattr(param, "hidden", False)]
    options = [name for param in shown for name in (*param.opts, *param.secondary_opts) if name.startswith("-")]
    return [*options, "--help", *(f"--{path}" for path in _settings(command))]


def _settings(command: Any) -> list[str]:
    from ingot.cli.options import SettingsCommand
    from ingot.config.fields import known

    return known() if isinstance(command, SettingsCommand) else []


def _values(command: Any, name: str) -> list[str]:
    """The words that an option or a setting may be, where they are known."""
    if name == "--recipe":
        return _recipes()
    for param in command.params:
        if name in (*param.opts, *param.secondary_opts):
            kind = param.type_descriptor if hasattr(param, "type_descriptor") else param.type  # by the version of typer
            return [str(one) for one in getattr(kind, "choices", None) or ()]
    return _of_setting(name.removeprefix("--")) if name.removeprefix("--") in _settings(command) else []


def _of_setting(path: str) -> list[str]:
    from ingot.config.fields import settings
    from ingot.config.schema import FAMILIES

    setting = next(settings(family)[path] for family in FAMILIES if path in settings(family))
    return [*setting.choices, *(["true", "false"] if "boolean" in setting.types else [])]


def _recipes() -> list[str]:
    from ingot.config.loading import list_recipes

    return [recipe.name for recipe in list_recipes()]


def _starting(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]
