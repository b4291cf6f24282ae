"""`python -m jaxstack.generate`."""

import sys

from jaxstack.generate.command import main

sys.exit(main())
