"""``python -m edge_spec``: the command line, where its script is not on the path."""

import sys

from edge_spec.cli import main

sys.exit(main())
