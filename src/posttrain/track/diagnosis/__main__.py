"""``python -m posttrain.track.diagnosis > docs/diagnosis.md``."""

import sys

from posttrain.track.diagnosis.page import diagnosis_page

sys.stdout.write(diagnosis_page())
