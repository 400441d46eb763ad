"""`python -m envfleet.cluster.worker`: what a launcher starts."""

import sys

from envfleet.cluster.worker.worker import main

if __name__ == "__main__":
    sys.exit(main())
