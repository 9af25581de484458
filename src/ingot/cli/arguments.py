"""Options shared by several commands, and commands that accept config settings as options.

On the command line of a SettingsCommand, `--section.key value` is a config setting unless the command declares an option of that
name. The function of the command reads the settings with `given_settings(ctx)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Option
from typer.core import TyperCommand, TyperGroup

from ingot.console.output import split_overrides
from ingot.errors import ConfigError
from ingot.runtime.files import is_url

if TYPE_CHECKING:
    from ingot.config.loading import ResolvedConfig


def _recipe_names(incomplete: str) -> list[str]:
    from ingot.config.loading import list_recipes

    return [recipe.name for recipe in list_recipes() if recipe.name.startswith(incomplete)]


ConfigFile = Annotated[Path | None, Option("--config", metavar="FILE", help="Read settings from this YAML file.")]
RecipeName = Annotated[
    str | None,
    Option("--recipe", metavar="NAME", help="Recipe to start from; `ingot recipes` lists all.", autocompletion=_recipe_names),
]
OutputFile = Annotated[Path | None, Option("--output", "-o", metavar="FILE", help="Write to this file instead of printing.")]
AsJson = Annotated[bool, Option("--json", help="Print the result as JSON.")]
StopExitCode = Annotated[
    int, Option("--stop-exit-code", metavar="N", min=0, max=255, help="Exit code if the run is stopped early.")
]
ScoreOption = Annotated[Literal["val_bpb", "artifact_bpb", "val_loss"], Option("--score", help="Score to compare.")]


def _local_model(name: str) -> Path:
    from ingot.runs.mirror import local_run

    return local_run(name) if is_url(name) else Path(name)


_model_path = typer.Argument(
    metavar="PATH", parser=_local_model, help="The model: a run folder or its URL, a checkpoint or an artifact."
)
ModelPath = Annotated[Path, _model_path]
OptionalModelPath = Annotated[Path | None, _model_path]
DeviceName = Annotated[str, Option("--device", metavar="NAME", help="Device to use: auto, cpu, cuda, cuda:N, mps or mlx.")]

# Option names of other programs and the corresponding Ingot settings, which error messages suggest.
SETTING_BY_FOREIGN_NAME = {
    **dict.fromkeys(("lr", "learning_rate"), "optimizer.learning_rate"),
    **dict.fromkeys(("steps", "iters", "max_iters"), "training.max_steps"),
    **dict.fromkeys(("output", "out_dir"), "training.output_dir"),
    "batch_size": "training.tokens_per_step",
    "block_size": "data.seq_len",
    "data": "data.path",
    "model": "model.family",
    "seed": "training.seed",
    "time": "budget.seconds",
}


class CommandList(TyperGroup):
    """A command group whose help does not truncate the descriptions of its commands."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        names = self.list_commands(ctx)
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.commands[name].get_short_help_str(1000)) for name in names])


class SettingsCommand(TyperCommand):
    """A command that also accepts config settings as options (--section.key value) and lists them at the end of its help."""

    allow_extra_args = True
    ignore_unknown_options = True

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Add [RUN] to the usage line of `ingot train`: RUN is read from the extra arguments, so typer does not list it."""
        return [*(["[RUN]"] if self.name == "train" else []), *super().collect_usage_pieces(ctx)]

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from ingot.config.fields import known, sections

        formatter.write("\nSettings, given as --section.key value, for example --training.max_steps 100:\n")
        for section in sections():
            names = ", ".join(path.partition(".")[2] for path in known() if path.startswith(f"{section}."))
            formatter.write(fill(names, 108, initial_indent=f"  {section:<12}", subsequent_indent=" " * 14) + "\n")
        formatter.write("`ingot init` explains each setting; `ingot config show` prints its value.\n")

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        from ingot.config.fields import known

        item = type(super().shell_complete(ctx, "-")[0])  # click's CompletionItem, which some versions of typer bundle
        settings = [f"--{path}" for path in known()] if incomplete.startswith("-") else []
        matches = [item(name) for name in settings if name.startswith(incomplete)]
        return [*super().shell_complete(ctx, incomplete), *matches]


def given_settings(ctx: typer.Context, skip: int = 0) -> dict[str, str | bool]:
    """Parse a command's extra arguments after the first `skip` as settings; for another program's option, suggest a setting."""
    from ingot.config.fields import known

    args = ctx.args[skip:]
    if args and not args[0].startswith("-"):
        option = "--recipe" if args[0] in _recipe_names("") else "--config" if args[0].endswith((".yaml", ".yml")) else None
        if option is not None:
            raise ConfigError(f"unexpected {args[0]!r} on the command line; did you mean {option} {args[0]}?")
    for word in args:
        option = word.partition("=")[0]
        name = option.removeprefix("--").replace("-", "_")
        by_last_part = [path for path in known() if path.rpartition(".")[2] == name]
        meant = SETTING_BY_FOREIGN_NAME.get(name) or (by_last_part[0] if len(by_last_part) == 1 else None)
        if word.startswith("--") and meant is not None:
            raise ConfigError(f"unknown option {option}; did you mean --{meant}?")
    return split_overrides(args, [name for option in ctx.command.params for name in option.opts])


class TwoSides(TyperCommand):
    """A command with two groups of arguments separated by `--`; options may come before the first group or after the second."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first, rest = (args[: args.index("--")], args[args.index("--") + 1 :]) if "--" in args else (args, [])
        end = next((i for i, word in enumerate(rest) if word.startswith("-")), len(rest))
        ctx.meta["second side"] = rest[:end]
        return super().parse_args(ctx, [*first, *rest[end:]])


def resolve_config(
    recipe: str | None,
    file: Path | None,
    overrides: Mapping[str, Any],
    world_size: int = 1,
    warn: Callable[[str], None] | None = None,
) -> ResolvedConfig:
    """Build the config from a recipe, a YAML file and overrides. A gpt-simple config file is translated, with a warning."""
    from ingot.compat.gpt_simple.config import is_gpt_simple, read_config
    from ingot.config.loading import load_config

    if file is None or not file.is_file() or not is_gpt_simple(file):
        return load_config(recipe=recipe, file=file, overrides=overrides)
    if recipe is not None:
        raise ConfigError(f"{file} is a gpt-simple config and cannot be combined with the recipe {recipe}; keep one of them")
    from ingot.compat.gpt_simple.translate import kept_tokens, translate, warnings

    config = read_config(file, overrides)
    kept = kept_tokens(config)
    if warn is not None:
        warn(f"{file} is a gpt-simple config; its settings mean the same as in `gpt-simple train --config`")
        warnings(config, warn, world_size, kept)
    return translate(config, world_size, kept)
