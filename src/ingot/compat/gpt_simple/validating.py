"""`gpt-simple validate`: what is wrong with a run, before it waits in a queue or trains for hours."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from ingot.compat.gpt_simple.log import Log
from ingot.compat.gpt_simple.names import advice, in_their_values, key_name
from ingot.compat.gpt_simple.training import configured
from ingot.compat.gpt_simple.translate import kept_tokens, resume_setting, translate, warnings
from ingot.console.entry import process_start
from ingot.console.output import print_json
from ingot.errors import ConfigError
from ingot.preflight.findings import BLOCKED, exit_code
from ingot.preflight.validate import report_lines, report_record
from ingot.preflight.validate import validate as look


def validate(options: Namespace, overrides: Mapping[str, Any], words: Sequence[str], log: Log) -> int:
    """Print a report; returns 0 for nothing or notes, 2 for warnings, 1 for what keeps a run from starting."""
    try:
        config = configured(options, overrides)
        resolved = translate(config, options.world_size, kept_tokens(config)).config
    except ConfigError as error:
        error.exit_code = BLOCKED  # of an instance: a config that cannot be read is a run that cannot start
        raise
    warnings(config, log.warn)
    workers, mismatch = config.data.num_workers, config.data.allow_budget_mismatch
    report = look(resolved, options.world_size, began=process_start(), workers=workers, allow_mismatch=mismatch)
    for finding in report.findings:
        if finding.cause is not None:
            in_their_values(finding.cause, (resume_setting(config), config.training.resume))
    if options.json:
        print_json(report_record(report, options.strict, key_name, advice))
    else:
        print("\n".join(report_lines(report, key_name, advice)))
    return exit_code(report.findings, options.strict)
