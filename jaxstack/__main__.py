"""`python -m jaxstack <subcommand>`."""

import sys

from jaxstack.cli import main

sys.exit(main())
