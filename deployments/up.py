"""`python -m deployments.up CONFIG`: the earlier name of `llama-ray up`, kept for scripts that use it."""

from deployments.local.up import main

if __name__ == "__main__":
    main()
