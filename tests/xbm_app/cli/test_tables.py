from rich.table import Table

from xbm_app.cli.tables import print_rows, print_table


def shown(capsys) -> str:
    print_table(Table(*(f"a long heading {k}" for k in range(10))))
    return capsys.readouterr().out


def test_nothing_is_cut_where_there_is_no_screen(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert all(f"a long heading {k}" in shown(capsys) for k in range(10))


def test_a_screen_keeps_its_width(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    assert "a long heading 9" not in shown(capsys)


def test_numbers_are_aligned_to_the_right_of_their_names(capsys):
    print_rows(["metric", "value"], [("recall@1", "7"), ("r", "12.5")], numbers=True, caption="all of it")
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell[1:-1] for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert cells == [["recall@1", "    7"], ["r       ", " 12.5"]] and lines[-1].strip() == "all of it"
