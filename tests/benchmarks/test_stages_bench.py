"""The benchmark of a change of stage, at toy size."""

import stages


def test_it_prints_the_steps_around_every_border(capsys):
    stages.main(["--toy", "--steps", "6"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[-2:]] == ["| stage 1 to 2", "| stage 2 to 3"]
    assert all(len(line.split(" | ")[2].replace("/", "").split()) == 6 for line in lines[-2:])


def test_the_cost_is_what_the_first_steps_took_beyond_the_usual():
    assert stages.Border([1.0] * 8, [2.0] * 8).cost == 0
    assert stages.Border([1.0] * 8, [5.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 9.0]).cost == 1.5
