from xbm_app.report.printed_figures import digest, draw, save

LINES = [
    {"label": "a", "x": [16, 64, 256], "y": [1.0, 2.0, 3.0], "error": [0.1, 0.0, 0.2], "colour": 1, "dashed": True},
    {"label": "b", "x": [16.0], "y": [2.0]},
]
DATA = {
    "panels": [
        {"title": "sizes", "x": "batch size", "y": "R@1", "lines": LINES, "x_log": 2, "ticks": [16, 64, 256]},
        {"title": "ratios", "x": "R_M", "y": "R@1", "lines": [{"label": "", "x": [0, 0.01, 1], "y": [1, 2, 3]}], "x_log": 0.01},
        {"title": "pairs", "x": "x", "y": "y", "lines": [{"label": "p", "x": [1, 2], "y": [3, 4], "points": True}],
         "y_log": True, "x_log": 10, "diagonal": [1, 4]},
        {"title": "drift", "x": "t", "y": "D", "lines": [{"label": "Δt", "x": [1, 2], "y": [3, 4]}], "marks": [1.5]},
    ]
}  # fmt: skip


def test_the_same_values_give_the_same_bytes_and_the_file_names_them(tmp_path):
    for name in ("a.svg", "b.svg"):
        save(DATA, tmp_path / "new" / name)
    one, other = ((tmp_path / "new" / name).read_bytes() for name in ("a.svg", "b.svg"))
    assert one == other and f"values {digest(DATA)}" in one.decode()
    assert digest({**DATA, "more": 1}) != digest(DATA)


def test_a_logarithmic_axis_has_plain_numbers():
    figure = draw({"panels": [{"title": "", "x": "", "y": "", "lines": [{"label": "", "x": [1, 2], "y": [0.15, 4]}],
                                     "y_log": True}]})  # fmt: skip
    figure.canvas.draw()
    named = [tick.get_text() for tick in figure.axes[0].get_yticklabels(which="both") if tick.get_text()]
    assert {"0.2", "1", "2"} <= {*named} and not any("e" in text for text in named)


def test_what_is_asked_for_is_drawn():
    sizes, ratios, pairs, drift = draw(DATA).axes
    assert [line.get_label() for line in sizes.lines] == ["a", "b"] and sizes.lines[0].get_ydata().tolist() == [1, 2, 3]
    assert [tick.get_text() for tick in sizes.get_xticklabels()] == ["16", "64", "256"] and sizes.get_xscale() == "log"
    assert ratios.get_xscale() == "symlog" and ratios.get_legend() is None
    assert pairs.get_yscale() == "log" and pairs.lines[1].get_label() == "the bound"
    assert drift.lines[1].get_xdata() == [1.5, 1.5] and drift.get_ylabel() == "D"
