"""Charts of text show where a curve goes, whose it is and what it came to, in any terminal."""

from __future__ import annotations

from ingot.console.charts import Panel, panel_lines


def falling(name: str = "first", by: float = 1.0) -> tuple[str, list[tuple[float, float]]]:
    return (name, [(step, 5.0 - by * step / 100) for step in range(1, 101)])


def test_a_falling_curve_goes_from_the_upper_left_to_its_letter_in_the_lower_right():
    lines = panel_lines(Panel("loss", "steps", [falling()]), width=60, height=8)
    curve = lines[1:9]
    assert lines[0] == "loss"
    assert curve[0].startswith("4.990 ┤") and curve[0][7] != " " and curve[0].rstrip()[-1] != "a"
    assert curve[-1].startswith("4.000 ┤") and curve[-1].endswith("a") and len(curve[-1]) == 59
    columns = [min(i for i, cell in enumerate(row[7:]) if cell != " ") for row in curve]
    assert columns == sorted(columns)
    assert lines[10].split() == ["1", "100", "steps"] and lines[11] == "a first  4.0000"


def test_curves_have_letters_names_and_last_values_of_their_own():
    lines = panel_lines(Panel("loss", "steps", [falling(), falling("second", by=2.0)]), width=80)
    drawn = "".join(lines[1:13])
    assert "a" in drawn and "b" in drawn
    assert lines[-2:] == ["a first   4.0000", "b second  3.0000"]


def test_curves_that_end_in_one_place_keep_their_letters():
    lines = panel_lines(Panel("loss", "steps", [falling(), falling("same")]), width=60)
    assert lines[12].endswith("ba")


def test_no_line_is_wider_than_the_terminal():
    for width in (40, 80, 200):
        for line in panel_lines(Panel("loss", "steps", [falling()]), width=width):
            assert len(line) <= width


def test_one_point_and_a_level_curve_are_drawn():
    for points in ([(1.0, 2.0)], [(1.0, 2.0), (5.0, 2.0)]):
        assert "a" in "".join(panel_lines(Panel("loss", "steps", [("x", points)]), width=60)[1:13])


def test_colours_change_nothing_but_colours():
    panel = Panel("loss", "steps", [falling(), falling("second", by=2.0)])
    coloured = "\n".join(panel_lines(panel, width=60, colours=True))
    for code in ("\x1b[36m", "\x1b[33m", "\x1b[0m"):
        assert code in coloured
        coloured = coloured.replace(code, "")
    assert coloured == "\n".join(panel_lines(panel, width=60))
