"""`python -m pipeline.cli` is `rollstream`."""

from pipeline.cli import main

if __name__ == "__main__":
    main()
