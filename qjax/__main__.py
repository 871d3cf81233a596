"""`python -m qjax` is the command line `qjax`."""

from qjax.cli import main

if __name__ == "__main__":
    main()
