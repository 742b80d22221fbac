"""`python -m embodied`: the command line."""

from embodied.cli import main

main()
