"""`python -m unirl_scale` is the `unirl-scale` command."""

import sys

from unirl_scale.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
