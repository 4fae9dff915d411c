"""``python -m hetsngp``: the same as the command ``hetsngp``."""

from hetsngp.cli import main

if __name__ == "__main__":
    main()
