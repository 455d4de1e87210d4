from sample_report import sample_report

from surgery.eval.report import markdown


def test_a_line_a_row_with_as_many_cells_as_the_head():
    report = sample_report()
    report["rows"][1]["name"] = "a|b\nc"
    lines = markdown.render(report).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + len(report["rows"])
    cells = {line.replace("\\|", "").count("|") for line in table}
    assert len(cells) == 1
    assert any(line.startswith("| a\\|b c |") for line in table)
    assert "quick look" not in "\n".join(lines)


def test_quick_looks_are_marked():
    assert "at most 3 samples" in markdown.render(sample_report(limit=3))
