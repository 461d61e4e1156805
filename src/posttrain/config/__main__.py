"""``python -m posttrain.config > docs/configuration.md``."""

import sys

from posttrain.config.reference import configuration_page

sys.stdout.write(configuration_page())
