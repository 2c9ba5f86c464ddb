"""`python -m flex_trainer` is the command `flex-trainer`."""

from flex_trainer.cli import main

if __name__ == "__main__":
    main()
