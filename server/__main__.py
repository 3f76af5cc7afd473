"""``python -m duograph.server --model-path ...`` is ``duograph serve``."""

import sys

from duograph.server.cli import main

sys.exit(main(["serve", *sys.argv[1:]]))
