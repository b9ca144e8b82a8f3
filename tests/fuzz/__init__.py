"""Generated input for every part that reads untrusted data: `python -m tests.fuzz`. None may crash, hang or leak."""
