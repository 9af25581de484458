from __future__ import annotations

from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

from ingot.console.progress import LiveReporter
from ingot.runs.reporter import BeginReport, EvaluationReport, LineReporter, MultiReporter, Reporter, StepReport, step_line

BEGIN = BeginReport("r", "cpu", "fp32", 2, 1234, 5000, 64, 4, "default", 0)
STEP = StepReport(
    step=10, max_steps=40, loss=3.0, grad_norm=0.5, learning_rate=1e-3, tokens=2560, tokens_per_second=1234.5,
    elapsed_seconds=3.0, budget_seconds=None, epoch=0, mfu=None, spent=0.25,
)  # fmt: skip


def test_a_step_line_names_what_is_known_and_nothing_else():
    assert step_line(STEP) == "step 10/40  loss 3.0000  grad 0.500  lr 1.00e-03  1,234 tok/s  3.0 s"
    line = step_line(replace(STEP, max_steps=None, budget_seconds=90.0, mfu=0.421))
    assert line == "step 10  loss 3.0000  grad 0.500  lr 1.00e-03  1,234 tok/s  mfu 42.1%  3.0 of 90 s"


def test_plain_lines_tell_every_event_once():
    lines: list[str] = []
    reporter = MultiReporter(Reporter(), LineReporter(lines.append))
    reporter.begin(BEGIN)
    reporter.step(STEP, log=False)
    reporter.step(STEP, log=True)
    reporter.evaluation(EvaluationReport(10, 2.0, 2.5, 100, 90, 0.25, 3.0, best=True))
    reporter.sample(10, "text")
    reporter.saved(Path("checkpoints/step-00000010"))
    reporter.message("note")
    reporter.end(SimpleNamespace(status="stopped", total_steps=10, stop_reason="walltime"))
    assert lines == [
        "run r  device cpu  precision fp32  ranks 2  parameters 1,234  train_tokens 5,000  tokens_per_step 64  micro_batch 4  "
        "attention default",
        step_line(STEP),
        "eval 10  val_loss 2.0000  val_bpb 2.5000  (0.2 s)  best so far",
        "saved checkpoints/step-00000010",
        "note",
        "stopped at step 10 (walltime)",
    ]


def test_a_terminal_gets_a_short_first_line_without_kernels_and_micro_batch(capsys):
    LiveReporter().begin(replace(BEGIN, max_steps=40))
    err = capsys.readouterr().err
    assert "1,234 parameters on cpu  5,000 train tokens  40 steps left\n" in err
    assert "attention" not in err and "micro_batch" not in err


def test_a_terminal_gets_scores_without_the_rows_that_the_log_names(capsys):
    report, lines = EvaluationReport(10, 2.0, 2.5, 100, 90, 0.25, 3.0, best=True, rows=640, rows_of=3210, stride=32), list[str]()
    LiveReporter().evaluation(report)
    assert "eval 10  val_loss 2.0000  val_bpb 2.5000  (0.2 s)  best so far\n" in capsys.readouterr().err
    LineReporter(lines.append).evaluation(report)
    assert "  sliding by 32  by 640 of 3,210 rows  " in lines[0]


def test_every_event_reaches_every_reporter():
    events = {name for name in dir(Reporter) if not name.startswith("_")} - {"tracked", "tracked_config"}  # which are questions
    listeners = Mock(spec=Reporter), Mock(spec=Reporter)
    several = MultiReporter(*listeners)
    for name in events:
        arguments = [object() for _ in signature(getattr(Reporter(), name)).parameters]
        getattr(several, name)(*arguments)
        for listener in listeners:
            assert listener.method_calls == [getattr(call, name)(*arguments)]
            listener.reset_mock()
