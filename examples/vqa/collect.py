"""Several runs as one file of results and the table of README.md.

python examples/vqa/collect.py runs/0 runs/1           writes docs/results/vqa.json, prints the table
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "vqa.json"


def table(runs: list[dict[str, Any]]) -> str:
    """A line for each kind of training: mean test accuracy, each run, epsilon, trained parameters and seconds."""
    lines = ["| | test accuracy | runs | epsilon | trained | seconds |", "|---|---|---|---|---|---|"]
    for rows in zip(*(run["results"] for run in runs), strict=True):
        scores = [row["accuracy"] for row in rows]
        first = rows[0]
        trained = f"{first['trained_parameters']:,}"
        epsilon = "none" if first["trained_parameters"] else "-"
        if first["epsilon_prv"] is not None:
            epsilon = f"{max(row['epsilon_prv'] for row in rows):.2f}"
        each = ", ".join(f"{score:.3f}" for score in scores)
        seconds = sum(row["seconds"] for row in rows) / len(rows)
        mean = sum(scores) / len(scores)
        lines.append(f"| {first['name']} | {mean:.3f} | {each} | {epsilon} | {trained} | {seconds:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    found = [json.loads((Path(folder) / "metrics.json").read_text()) for folder in sys.argv[1:]]
    RESULTS.write_text(json.dumps({"runs": found}, indent=2) + "\n")
    print(table(found))
