"""The report of a comparison: a page, which draws the curves, and standings as a table."""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lagwise.lab.estimates import Estimate
from lagwise.lab.grouping import Group, compared_groups
from lagwise.lab.json_files import make_folder, replace_text
from lagwise.lab.report.page import make_page
from lagwise.lab.run_folder import Run
from lagwise.lab.standings import Row, rows_of


def write_report(
    runs: Sequence[Run], out: Path, command: str, tune: Sequence[str] = (), left_out: Sequence[str] = ()
) -> list[Path]:
    """Writes report.html and standings.csv to a folder, and returns their paths.

    Args:
        runs: The runs to compare; the page says which of them are not complete.
        out: The folder.
        command: The command line that asked for it.
        tune: Fields that are tuned for each encoding.
        left_out: In words, what takes no part, which the page says too.
    """
    make_folder(out)
    paths = [out / "report.html", out / "standings.csv"]
    replace_text(paths[0], make_page(runs, command, tune, left_out))
    replace_text(paths[1], standings_csv(runs, tune))
    return paths


def standings_csv(runs: Iterable[Run], tune: Sequence[str] = ()) -> str:
    """Returns all standings as one table of comma-separated values; the column `table` tells them apart."""
    lines = [csv_line(group, row) for group in compared_groups(runs, tune) for row in rows_of(group)]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def csv_line(group: Group, row: Row) -> dict[str, Any]:
    """Returns a row of the standings by its columns."""
    line = {
        "table": group.title,
        "encoding": row.encoding,
        "encoding_options": json.dumps(row.options),
        "metric": group.metric,
        "seeds": " ".join(map(str, row.seeds)),
        "test": row.test.mean,
        "test_half_width_95": row.test.half_width,
        "validation": row.validation.mean,
        "validation_half_width_95": row.validation.half_width,
        "encoding_parameters": row.parameters,
        "seconds": row.seconds,
        "tokens_per_second": row.tokens_per_second,
        "peak_memory_bytes": row.peak_memory,
    }
    for length, found in row.lengths.items():
        line[f"test_at_{length}"] = found.mean if isinstance(found, Estimate) else f"refused: {found}"
        line[f"test_at_{length}_half_width_95"] = found.half_width if isinstance(found, Estimate) else None
    return line
