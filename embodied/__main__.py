"""`python -m embodied`: the command line."""

from embodied.cli import main

if __name__ == "__main__":
    main()
