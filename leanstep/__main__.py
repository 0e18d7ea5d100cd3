"""`python -m leanstep`."""

from leanstep.cli import main

main()
