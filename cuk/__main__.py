"""`python -m cuk`: the command line."""

import sys

from cuk.cli import main

sys.exit(main())
