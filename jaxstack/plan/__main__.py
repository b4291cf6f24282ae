"""`python -m jaxstack.plan`."""

import sys

from jaxstack.plan.command import main

sys.exit(main())
