"""`python -m jaxstack.launch`."""

import sys

from jaxstack.launch.command import main

if __name__ == "__main__":
    sys.exit(main())
