"""``python -m hetsngp``: the command line without its script."""

from hetsngp.cli import main

if __name__ == "__main__":
    main()
