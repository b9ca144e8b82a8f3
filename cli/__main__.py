"""`python -m cli`: the command `llama-ray` where the package is not installed."""

from cli.main import main

if __name__ == "__main__":
    main()
