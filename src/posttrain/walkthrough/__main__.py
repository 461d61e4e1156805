"""The tables of a results.json as Markdown: ``python -m posttrain.walkthrough results.json``."""

import json
import sys
from pathlib import Path

from posttrain.walkthrough.report import markdown

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m posttrain.walkthrough RESULTS.JSON")
    print(markdown(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
