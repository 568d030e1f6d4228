"""python -m quietgrad is quietgrad."""

from quietgrad.cli import main

if __name__ == "__main__":
    main()
